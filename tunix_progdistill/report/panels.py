"""Which charts a page has."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tunix_progdistill.report import charts
from tunix_progdistill.report import formats
from tunix_progdistill.report import read

KL = "distill/kl_div_tau1"
CORRELATION = "distill/correlation"
CORRELATION_TOP32 = "distill/correlation_top32"
TOP1 = "distill/top1_agreement"

# key, title, unit, (logged name, label) pairs, further fields of the chart.
_EVAL_PANELS: tuple[tuple[str, str, str, Any, Any], ...] = (
    ("kl", "Held-out KL at τ = 1", "nats", ((KL, "student"),), {}),
    (
        "correlation", "Held-out correlation of logits", "",
        (
            (CORRELATION, "whole vocabulary"),
            (CORRELATION_TOP32, "teacher's top 32"),
        ),
        {"may_be_log": False, "from_zero": True},
    ),
)
_TRAIN_PANELS: tuple[tuple[str, str, str, Any, Any], ...] = (
    (
        "loss", "Training loss", "nats",
        (
            ("loss", "loss"), ("distill/soft_loss", "soft (τ² KL)"),
            ("distill/hard_loss", "hard (cross-entropy)"),
        ),
        {"noisy": True},
    ),
    (
        "schedule", "Temperature and alpha", "",
        (("distill/temperature", "temperature τ"), ("distill/alpha", "alpha")),
        {"may_be_log": False, "from_zero": True},
    ),
    ("rate", "Learning rate", "", (("learning_rate", "learning rate"),), {}),
    (
        "speed", "Throughput", "tokens/s",
        (("perf/tokens_per_sec", "training, evaluation excluded"),),
        {"may_be_log": False, "from_zero": True, "noisy": True},
    ),
    (
        "norm", "Gradient norm", "", (("grad_norm", "before clipping"),),
        {"noisy": True},
    ),
)
# logged name, key, title, unit, further fields of the chart.
_COMPARED: tuple[tuple[str, str, str, str, Any], ...] = (
    (KL, "kl", "Held-out KL at τ = 1", "nats", {}),
    (
        CORRELATION, "correlation", "Held-out correlation of logits", "",
        {"may_be_log": False, "from_zero": True},
    ),
    (
        CORRELATION_TOP32, "correlation-top32", "Held-out correlation, top 32",
        "", {"may_be_log": False, "from_zero": True},
    ),
    (
        TOP1, "top1", "Held-out top-1 agreement", "",
        {"may_be_log": False, "from_zero": True},
    ),
)
_HIGHER_IS_BETTER = ("correlation", "agreement", "utilisation", "utilization")


def higher_is_better(name: str) -> bool:
  """Whether a target for this logged name is a floor, not a ceiling."""
  return any(word in name for word in _HIGHER_IS_BETTER)


def met(name: str, value: float, target: float) -> bool:
  return value > target if higher_is_better(name) else value < target


def of_run(run: read.Run) -> list[charts.Chart]:
  """The charts of one run, those without any value left out."""
  found = []
  for panels, series in (
      (_EVAL_PANELS, run.evaluations), (_TRAIN_PANELS, run.train)
  ):
    for key, title, unit, names, fields in panels:
      lines = tuple(
          charts.Line(label=label, series=series[name], colour=i)
          for i, (name, label) in enumerate(names)
          if name in series
      )
      references = [
          _target(name, run.targets) for name, _ in names
      ]
      if key == "kl":
        references.append(_floor(run))
      if charts.has_values(lines):
        found.append(charts.Chart(
            key=key, title=title, unit=unit, lines=lines,
            references=tuple(r for r in references if r is not None),
            stages=run.stages, events=run.events, **fields,
        ))
  return found


def of_runs(
    runs: Sequence[read.Run], names: Sequence[str]
) -> list[charts.Chart]:
  """Charts that hold several runs each.

  Args:
    runs: to compare.
    names: of the runs, distinct.

  Returns:
    Stages and targets stand in a chart where all runs have the same.
  """
  spans = {
      tuple((s.name, s.first_update, s.end_update) for s in run.stages)
      for run in runs
  }
  found = []
  for logged, key, title, unit, fields in _COMPARED:
    lines = tuple(
        charts.Line(label=name, series=run.evaluations[logged], colour=i)
        for i, (run, name) in enumerate(zip(runs, names, strict=True))
        if logged in run.evaluations
    )
    targets = {run.targets.get(logged) for run in runs}
    target = _target(logged, runs[0].targets) if len(targets) == 1 else None
    if charts.has_values(lines):
      found.append(charts.Chart(
          key=key, title=title, unit=unit, lines=lines,
          references=() if target is None else (target,),
          stages=runs[0].stages if len(spans) == 1 else (), **fields,
      ))
  return found


def _target(
    name: str, targets: Mapping[str, float]
) -> charts.Reference | None:
  if name not in targets:
    return None
  sign = ">" if higher_is_better(name) else "<"
  return charts.Reference(
      label=f"target {sign} {formats.significant(targets[name])}",
      value=targets[name],
  )


def _floor(run: read.Run) -> charts.Reference | None:
  floor = run.model("unigram floor")
  if floor is None or floor.kl_div_tau1 is None:
    return None
  return charts.Reference(
      label=f"unigram floor {formats.significant(floor.kl_div_tau1)}",
      value=floor.kl_div_tau1, kind=charts.FLOOR,
  )
