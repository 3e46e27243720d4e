"""What happened in a run that its plan did not foresee."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from tunix_progdistill import errors

ADVANCE = "advance"  # the stage ends here; value unused
SCALE_RATE = "scale_rate"  # the learning rate is multiplied by value from here
KINDS = (ADVANCE, SCALE_RATE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
  """One deviation from the plan, in force from `update` on.

  Attributes:
    update: the first update that it concerns, >= 0.
    kind: "advance" or "scale_rate".
    value: the factor of "scale_rate", > 0.
  """

  update: int
  kind: str
  value: float = 1.0

  def __post_init__(self):
    errors.plain_fields(self)
    if self.kind not in KINDS:
      raise errors.invalid(
          "event.kind", f"must be one of {', '.join(KINDS)}", self.kind,
          "use a known kind",
      )
    if self.update < 0:
      raise errors.invalid(
          "event.update", "must be >= 0", self.update, "count updates from 0"
      )
    if not isinstance(self.value, (int, float)) or not self.value > 0:
      raise errors.invalid(
          "event.value", "must be > 0", self.value, "try 0.5 to halve the rate"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState:
  """The append-only list of a run's events, and its count of fillers.

  The count of updates is Tunix's `train_steps`; everything else that a resumed
  run needs to know is here. Stage, temperature, alpha and rate are
  f(update, events), so that a run resumed from a checkpoint that holds the
  events goes on exactly where it stopped.

  Attributes:
    events: in the order of their updates.
    fillers: micro-batches so far that only filled up a window.
  """

  events: tuple[Event, ...] = ()
  fillers: int = 0

  def append(self, event: Event) -> "RunState":
    if self.events and event.update < self.events[-1].update:
      raise errors.invalid(
          "event.update", "must not lie before the last event's",
          event.update, f"the last event is at {self.events[-1].update}",
      )
    return dataclasses.replace(self, events=(*self.events, event))

  def with_filler(self) -> "RunState":
    """This state after one more micro-batch that only filled up a window."""
    return dataclasses.replace(self, fillers=self.fillers + 1)

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> "RunState":
    return cls(
        events=tuple(Event(**e) for e in data["events"]),
        fillers=data["fillers"],
    )
