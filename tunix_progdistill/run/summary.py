"""`Summary`: what a run comes to, kept in `summary.json` as it grows."""

from collections.abc import Mapping
from collections.abc import Sequence
import math
import pathlib
import time
from typing import Any

from tunix_progdistill import files

_STAGE_FIELDS = (
    "update_sec", "first_update_sec", "flops", "optimizer_bytes",
    "trainable_parameters", "compiles",
)
_MODEL_FIELDS = {
    "kl_div_tau1": "distill/kl_div_tau1",
    "top1_agreement": "distill/top1_agreement",
    "correlation": "distill/correlation",
    "correlation_top32": "distill/correlation_top32",
}


class Summary:
  """The content of `summary.json`.

  A run that was killed goes on, and its report must still show all of it: what
  an earlier process wrote is read first.

  Args:
    path: the file.
    title: of the run.
    plan: the resolved plan.
    targets: by the metric's name in the logs.
  """

  def __init__(
      self, path: pathlib.Path, *, title: str, plan: Any,
      targets: Mapping[str, float],
  ):
    self._path = path
    self._began = time.time()
    old = files.read_object(path)
    self._earlier_sec = _number(old.get("wall_sec"))
    self.updates = int(_number(old.get("updates")))
    self.status = "running"
    self.cause: str | None = None
    self.models: dict[str, dict[str, Any]] = {
        str(m["name"]): m for m in _objects(old.get("models")) if "name" in m
    }
    self.samples = _objects(old.get("samples"))
    self.notes: list[str] = []
    self._title = title
    self._targets = dict(targets)
    starts = plan.starts()
    ends = [*starts[1:], plan.updates]
    measured = _objects(old.get("stages"))
    self._stages: list[dict[str, Any]] = []
    for i, (stage, start, end) in enumerate(
        zip(plan.stages, starts, ends, strict=True)
    ):
      entry = measured[i] if i < len(measured) else {}
      self._stages.append({
          "name": stage.stage.name or f"stage {i + 1}",
          "first_update": start,
          "end_update": end,
          **{f: entry.get(f) for f in _STAGE_FIELDS},
      })

  def set_cost(self, *, stage: int, **cost: Any) -> None:
    """Takes down what one stage costs."""
    self._stages[stage] |= {
        f: files.finite(cost[f]) for f in _STAGE_FIELDS
        if cost.get(f) is not None or self._stages[stage][f] is None
    }

  @property
  def stages(self) -> Sequence[Mapping[str, Any]]:
    """Name, span and cost of each stage."""
    return self._stages

  def set_model(
      self, name: str, *, parameters: int,
      evaluation: Mapping[str, Any] | None = None, who: str = "student",
  ) -> None:
    """Takes down one row of the models' table.

    Args:
      name: of the model.
      parameters: its number of parameters.
      evaluation: a record of metrics.jsonl; None for no values.
      who: "student" or "teacher", whose values of the record are meant.
    """
    row: dict[str, Any] = {"name": name, "parameters": parameters}
    record = evaluation or {}
    for field, key in _MODEL_FIELDS.items():
      row[field] = record.get(key)
    if who == "teacher" and evaluation is not None:
      row |= {
          "kl_div_tau1": 0.0, "top1_agreement": 1.0, "correlation": 1.0,
          "correlation_top32": 1.0,
      }
    row["cross_entropy"] = record.get(f"distill/{who}_cross_entropy")
    self.models[name] = row

  def write(self) -> None:
    """Writes the file, whole or not at all."""
    last = self._stages[-1]  # max_steps may take it beyond its plan
    last["end_update"] = max(last["end_update"] or 0, self.updates)
    files.write_json(self._path, {
        "status": self.status,
        "cause": self.cause,
        "title": self._title,
        "updates": self.updates,
        "wall_sec": round(self._earlier_sec + time.time() - self._began, 1),
        "stages": self._stages,
        "models": list(self.models.values()),
        "samples": self.samples,
        "targets": self._targets,
        "notes": self.notes,
    })

  def __enter__(self) -> "Summary":
    self.write()
    return self

  def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
    if kind is None:
      self.status = "finished"
    elif kind is KeyboardInterrupt:
      self.status = "stopped"
    else:
      self.status = "failed"
      self.cause = f"{kind.__name__}: {error}".split("\n", maxsplit=1)[0]
    self.write()


def _objects(value: Any) -> list[dict[str, Any]]:
  """The objects of a list; what else there is does not come from us."""
  return [v for v in value if isinstance(v, dict)] if (
      isinstance(value, list)
  ) else []


def _number(value: Any) -> float:
  good = isinstance(value, (int, float)) and math.isfinite(value)
  return value if good else 0
