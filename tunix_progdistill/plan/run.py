"""`RunPlan`: a resolved plan as a pure function of (update, events)."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from tunix_progdistill.plan import schedules
from tunix_progdistill.plan import state

# Offsets at which a schedule is sampled, for its range and its fingerprint.
_OPEN_SAMPLES = (0, 1, 2, 5, 10, 100, 1000, 10000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """A value and what it counts: a stage's updates (local) or the run's."""

  value: schedules.Value
  local: bool

  def at(self, update: int, stage_start: int) -> float:
    return schedules.evaluate(
        self.value, update - stage_start if self.local else update
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRun:
  """A `Stage` with its length in updates and its values filled in."""

  stage: Any
  length: int | None
  learning_rate: Source | None
  temperature: Source
  alpha: Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scalars:
  """What one update runs with; `learning_rate` None leaves the optimizer's."""

  stage: int
  learning_rate: float | None
  temperature: float
  alpha: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
  """Stage, temperature, alpha and rate as f(update, events).

  Updates count from 0. The last stage goes on for as long as the run does.
  """

  stages: tuple[StageRun, ...]

  @property
  def updates(self) -> int | None:
    """The planned number of updates, or None where the last stage is open."""
    lengths = [s.length for s in self.stages if s.length is not None]
    return sum(lengths) if len(lengths) == len(self.stages) else None

  def starts(self, events: Sequence[state.Event] = ()) -> tuple[int, ...]:
    """The first update of every stage; an "advance" event ends one early."""
    advances = sorted(e.update for e in events if e.kind == state.ADVANCE)
    starts = [0]
    for stage in self.stages[:-1]:
      assert stage.length is not None  # only the last may be open
      stop = starts[-1] + stage.length
      early = [a for a in advances if starts[-1] <= a < stop]
      if early:
        advances.remove(early[0])
        stop = early[0]
      starts.append(stop)
    return tuple(starts)

  def stage_at(self, update: int, events: Sequence[state.Event] = ()) -> int:
    """The number of the stage that `update` belongs to."""
    starts = self.starts(events)
    return max(i for i, start in enumerate(starts) if start <= max(update, 0))

  def scalars(
      self, update: int, events: Sequence[state.Event] = ()
  ) -> Scalars:
    """Stage, rate, temperature and alpha of one update.

    Raises:
      ValueError: a schedule left its range here.
    """
    i = self.stage_at(update, events)
    start, stage = self.starts(events)[i], self.stages[i]
    values: dict[str, Any] = {}
    for field in ("learning_rate", "temperature", "alpha"):
      source = getattr(stage, field)
      value = None if source is None else source.at(update, start)
      if value is not None:
        _check(field, value, update)
      values[field] = value
    if values["learning_rate"] is not None:
      for event in events:
        if event.kind == state.SCALE_RATE and event.update <= update:
          values["learning_rate"] *= event.value
    return Scalars(stage=i, **values)

  def check(self, max_steps: int | None = None) -> None:
    """Samples every schedule; raises ValueError where one leaves its range.

    Args:
      max_steps: updates that the run will not go beyond.
    """
    for start, stage in zip(self.starts(), self.stages, strict=True):
      for offset in _samples(stage.length):
        if max_steps is None or start + offset < max_steps:
          self.scalars(start + offset)

  def fingerprint(self) -> dict[str, Any]:
    """A JSON description that differs where the plan would train otherwise.

    Schedules are arbitrary functions, so they are told apart by sampled values.
    """
    starts = self.starts()
    stages = []
    for start, stage in zip(starts, self.stages, strict=True):
      offsets = _samples(stage.length)
      entry = {
          "selects": {
              k: list(v) if isinstance(v, tuple) else v
              for k, v in stage.stage.selector.items()
          },
          "updates": stage.length,
      }
      for field in ("learning_rate", "temperature", "alpha"):
        source = getattr(stage, field)
        entry[field] = (
            None if source is None
            else {
                f"update {start + o}": source.at(start + o, start)
                for o in offsets
            } if callable(source.value)
            else source.at(start, start)
        )
      stages.append(entry)
    return {"stages": stages}


def differences(old: Any, new: Any, path: str = "") -> list[str]:
  """The places where two fingerprints differ, as "path: old -> new".

  >>> differences({"a": [1, 2]}, {"a": [1, 3]})
  ['a[1]: 2 -> 3']
  """
  if isinstance(old, dict) and isinstance(new, dict):
    out = []
    for key in list(old) + [k for k in new if k not in old]:
      where = f"{path}.{key}" if path else str(key)
      out += differences(old.get(key), new.get(key), where)
    return out
  if isinstance(old, list) and isinstance(new, list):
    if len(old) != len(new):
      return [f"number of {path}: {len(old)} -> {len(new)}"]
    return [
        d
        for i, (a, b) in enumerate(zip(old, new, strict=True))
        for d in differences(a, b, f"{path}[{i}]")
    ]
  return [] if old == new else [f"{path}: {old} -> {new}"]


def _check(field: str, value: float, update: int) -> None:
  try:
    schedules.check_range(field, value)
  except ValueError as e:
    raise ValueError(f"at update {update}: {e}") from None


def _samples(length: int | None) -> list[int]:
  if length is None:
    return list(_OPEN_SAMPLES)
  last = length - 1
  return sorted({0, 1, last // 4, last // 2, 3 * last // 4, last} - (
      {1} if last < 1 else set()
  ))
