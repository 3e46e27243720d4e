"""Watches a run: what each stage costs, and a line now and then."""

from collections.abc import Mapping
import dataclasses
import math
import statistics
import time
from typing import Any

from absl import logging
from tunix.sft import hooks

from tunix_progdistill.run import summary as summary_lib

_SECONDS_BETWEEN_LINES = 60.0
_SAID = (
    "distill/kl_div_tau1", "distill/correlation", "distill/top1_agreement"
)


class Watcher(hooks.TrainingHooks):
  """Writes each stage's cost into the summary, and a line to the log.

  Seconds per update are from the start of one to the start of the next, with
  the teacher's forward pass and without evaluations; the first update of a
  stage, in which the step is compiled, is told apart.

  Args:
    summary: of the run; what an earlier process measured stays in it.
    accumulation: micro-batches per update.
  """

  def __init__(self, summary: summary_lib.Summary, accumulation: int):
    self._summary = summary
    self._accumulation = accumulation
    self._stage = -1
    self._since: float | None = None
    self._seconds: list[float] = []
    self._last_line = time.perf_counter()

  def _lap(self, trainer: Any) -> None:
    """Ends the time of the last update."""
    now = time.perf_counter()
    if self._since is not None:
      self._seconds.append(now - self._since)
    self._since = now
    cost = trainer.engine.cost()
    if cost is None or not self._seconds:
      return
    later = self._seconds[1:]
    self._summary.set_cost(
        first_update_sec=self._seconds[0],
        update_sec=statistics.median(later) if later else None,
        **dataclasses.asdict(cost),
    )

  def _starts_window(self, trainer: Any) -> bool:
    return trainer.iter_steps % self._accumulation == 0

  def on_train_start(self, train_ctx: Any) -> None:
    self._last_line = time.perf_counter()
    stage = max(train_ctx.engine.stage, 0)
    logging.info(
        "Update %d: stage %d of %d (%s); %s parameters train.",
        train_ctx.train_steps, stage + 1, len(self._summary.stages),
        self._summary.stages[stage]["name"],
        f"{train_ctx.engine.trainable_parameters(stage):,}",
    )

  def on_train_step_start(self, train_ctx: Any) -> None:
    if not self._starts_window(train_ctx):
      return
    self._lap(train_ctx)
    update = train_ctx.train_steps
    scalars = train_ctx.engine.plan.scalars(
        update, train_ctx.engine.run_state.events
    )
    if scalars.stage != self._stage:
      self._stage, self._seconds = scalars.stage, []
    now = time.perf_counter()
    if now - self._last_line >= _SECONDS_BETWEEN_LINES:
      self._last_line = now
      logging.info("Update %d of %s.", update, train_ctx.config.max_steps)

  def on_train_step_end(
      self, train_ctx: Any, train_step: int, train_loss: float
  ) -> None:
    pass

  def on_eval_step_start(self, train_ctx: Any) -> None:
    if self._since is not None:
      self._lap(train_ctx)
      self._since = None

  def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
    value = lambda name: float(
        train_ctx.metrics_logger.get_metric_history(
            train_ctx.metrics_prefix, name, "eval"
        )[-1]
    )
    log_evaluation(
        train_ctx.train_steps, train_ctx.config.max_steps,
        {name: value(name) for name in _SAID},
    )
    self._summary.updates = train_ctx.train_steps
    self._summary.write()
    check_finite(value("distill/kl_div_tau1"), train_ctx.train_steps)
    self._last_line = time.perf_counter()
    self._since = None

  def on_train_end(self, train_ctx: Any) -> None:
    if self._since is not None:
      self._lap(train_ctx)
    self._summary.updates = train_ctx.train_steps
    self._summary.write()


def log_evaluation(
    update: int, end: int | None, values: Mapping[str, float]
) -> None:
  """One line about an evaluation."""
  logging.info(
      "Update %d of %s: held-out KL %.3f nats, correlation %.3f, top-1 "
      "agreement %.3f.", update, end, *(values[name] for name in _SAID),
  )


def check_finite(kl: float, update: int) -> None:
  """Raises RuntimeError where a run has nothing more to win."""
  if math.isfinite(kl):
    return
  if update == 0:
    raise RuntimeError(
        "the held-out KL must be finite before the first update, got "
        f"{kl}: the weights of the teacher or the student hold NaN, infinities "
        "or far too large values; check the files"
    )
  raise RuntimeError(
      f"the held-out KL must stay finite, got {kl} at update {update}: the "
      "student diverged; lower the rates or clip by max_grad_norm, and start "
      "anew with --restart"
  )
