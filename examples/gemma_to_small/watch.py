"""What a run has shown so far, kept beside its checkpoints.

A run that was killed goes on, and its tables must still show all of it: costs
of stages and points of the curve are written as they come.
"""

import dataclasses
import json
import os
import pathlib
import statistics
import time
from typing import Any

from tunix.sft import hooks

import tunix_progdistill as tpd

Progress = dict[str, dict[str, Any]]


class Watcher(hooks.TrainingHooks):
  """Writes the cost of every stage and the result of every evaluation.

  The file holds {"stages": {number: costs}, "curve": {update: metrics}}.
  Seconds per update are from the start of one to the start of the next, with
  the teacher's forward pass and without evaluations; the first update of a
  stage, in which the step is compiled, is told apart.

  Args:
    path: the JSON file; what an earlier process wrote there is kept.
    plan: names the stages.
  """

  def __init__(self, path: pathlib.Path, plan: tpd.StagePlan):
    self._path = path
    self._names = [s.name for s in plan.stages]
    self.progress: Progress = {"stages": {}, "curve": {}}
    if path.is_file():
      self.progress = json.loads(path.read_text(encoding="utf-8"))
    self._stage = -1
    self._since = 0.0
    self._seconds: list[float] = []

  def _write(self) -> None:
    partial = self._path.with_suffix(".partial")
    partial.write_text(json.dumps(self.progress, indent=1), encoding="utf-8")
    os.replace(partial, self._path)

  def _lap(self, trainer: Any) -> None:
    """Ends the time of the last update."""
    now = time.perf_counter()
    if self._since:
      self._seconds.append(now - self._since)
    self._since = now
    cost = trainer.engine.cost()
    if cost is None or not self._seconds:
      return
    later = self._seconds[1:]
    self.progress["stages"][str(cost.stage)] = {
        "name": self._names[cost.stage],
        "first_update_sec": self._seconds[0],
        "update_sec": statistics.median(later) if later else float("nan"),
        **dataclasses.asdict(cost),
    }

  def on_train_start(self, train_ctx: Any) -> None:
    pass

  def on_train_step_start(self, train_ctx: Any) -> None:
    self._lap(train_ctx)
    scalars = train_ctx.engine.plan.scalars(
        train_ctx.train_steps, train_ctx.engine.run_state.events
    )
    if scalars.stage != self._stage:
      self._stage, self._seconds = scalars.stage, []

  def on_train_step_end(
      self, train_ctx: Any, train_step: int, train_loss: float
  ) -> None:
    pass

  def on_eval_step_start(self, train_ctx: Any) -> None:
    if self._since:
      self._lap(train_ctx)
      self._since = 0.0

  def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
    metrics = train_ctx.metrics_logger
    names = (
        "kl_div_tau1", "correlation", "correlation_top32", "top1_agreement",
        "student_cross_entropy", "teacher_cross_entropy",
        "student_perplexity", "teacher_perplexity",
    )
    values = {
        n: float(metrics.get_metric_history("", f"distill/{n}", "eval")[-1])
        for n in names
    }
    self.progress["curve"][str(train_ctx.train_steps)] = values
    print(
        f"update {train_ctx.train_steps:3d}: held-out KL "
        f"{values['kl_div_tau1']:.3f} nats", flush=True,
    )
    self._write()
    self._since = 0.0

  def on_train_end(self, train_ctx: Any) -> None:
    self._lap(train_ctx)
    self._write()
