"""Values that change over a run: constants, anneals, optax schedules.

A schedule is `count -> value`, as in optax, and the count is one of optimizer
*updates*, never of micro-batches.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from tunix_progdistill import errors
from tunix_progdistill import registry

Schedule = Callable[[int], float]
Value = float | Schedule


def kinds() -> tuple[str, ...]:
  """The names of the shapes that an anneal can have."""
  return registry.REGISTRY.names("schedule")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anneal:
  """A schedule from `start` at the first update to `end` at the last.

  With x = count / (updates - 1), held in [0, 1]:
    linear       start + (end - start) x
    cosine       end + (start - end) (1 + cos(pi x)) / 2
    exponential  start (end / start)^x, both > 0
    any other    what is registered under that name, of (start, end, x)

  Attributes:
    start: value at count 0.
    end: value at count updates - 1 and after it.
    kind: "linear", "cosine", "exponential", or another registered name.
    updates: the length; None takes that of the run or stage it is used in.
  """

  start: float
  end: float
  kind: str
  updates: int | None = None

  def __post_init__(self):
    errors.plain_fields(self)
    for field in ("start", "end"):
      value = getattr(self, field)
      if not _is_number(value):
        raise errors.invalid(
            f"anneal.{field}", "must be a finite number", value, "try 3.0"
        )
    if self.kind not in kinds():
      raise errors.invalid(
          "anneal.kind", f"must be one of {', '.join(kinds())}", self.kind,
          "name how the value moves from start to end",
      )
    if self.kind == "exponential" and not (self.start > 0 and self.end > 0):
      raise errors.invalid(
          "anneal.start and anneal.end",
          "must both be > 0 for kind 'exponential'",
          (self.start, self.end), "use kind 'linear' to reach 0",
      )
    if self.updates is not None and (
        isinstance(self.updates, bool)
        or not isinstance(self.updates, int)
        or self.updates < 1
    ):
      raise errors.invalid(
          "anneal.updates", "must be a whole number >= 1", self.updates,
          "leave it out to span the run or stage",
      )

  def __call__(self, count: int) -> float:
    if self.updates is None:
      raise ValueError(
          "anneal.updates must be known before it is evaluated, got None; "
          "pass updates=, or use it inside a plan whose length is known"
      )
    x = min(max(float(count) / max(self.updates - 1, 1), 0.0), 1.0)
    shape = registry.REGISTRY.get("schedule", self.kind)
    return float(shape(self.start, self.end, x))

  def over(self, updates: int | None) -> "Anneal":
    """This anneal with its length filled in, if it had none."""
    if self.updates is not None or updates is None:
      return self
    return dataclasses.replace(self, updates=updates)


def anneal(
    start: float, end: float, kind: str, *, updates: int | None = None
) -> Anneal:
  """A schedule from `start` at the first update to `end` at the last.

  Args:
    start: value at count 0.
    end: value at count updates - 1 and after it.
    kind: "linear", "cosine", "exponential", or another registered name.
    updates: the length; None takes that of the run, or of the stage that the
      schedule is given to.

  >>> tau = anneal(4.0, 1.0, "linear", updates=10)
  >>> [tau(0), tau(6), tau(9), tau(50)]
  [4.0, 2.0, 1.0, 1.0]
  """
  return Anneal(start=start, end=end, kind=kind, updates=updates)


def read(field: str, value: Any) -> Any:
  """`value`, or the anneal that a mapping describes.

  Args:
    field: its name, for errors.
    value: anything; a mapping holds start, end, shape and perhaps updates.

  Raises:
    ValueError: a mapping with other keys.

  >>> read("alpha", {"start": 1, "end": 0.5, "shape": "linear"}).kind
  'linear'
  """
  if not isinstance(value, Mapping):
    return value
  needed = {"start", "end", "shape"}
  if not needed <= set(value) <= {*needed, "updates"}:
    raise errors.invalid(
        field, "must hold start, end, shape and perhaps updates", dict(value),
        "write e.g. {start: 3.0, end: 1.0, shape: linear}",
    )
  return anneal(
      value["start"], value["end"], value["shape"],
      updates=value.get("updates"),
  )


def evaluate(value: Value, count: int) -> float:
  """The value at `count`, as a Python float."""
  return float(value(count)) if callable(value) else float(value)


def _is_number(value) -> bool:
  return (
      isinstance(value, (int, float))
      and not isinstance(value, bool)
      and math.isfinite(value)
  )


def check(field: str, value: Value | None) -> None:
  """Raises ValueError unless `value` may stand as rate, tau or alpha.

  Constants and the ends of an `Anneal` are judged here, other schedules when a
  plan is resolved and at every update.
  """
  if value is None:
    return
  if isinstance(value, Anneal):
    check_range(f"{field}.start", value.start)
    check_range(f"{field}.end", value.end)
  elif callable(value):
    return
  else:
    check_range(field, value)


# The step computes in float32, which flushes what is smaller to 0; the soft
# loss is multiplied by temperature^2.
_SMALLEST, _LARGEST = 1.2e-38, 3.4e38
_RULES = {
    "temperature": (
        "must be > 0 and finite", "use 2 to 5 at the start and 1 at the end"
    ),
    "alpha": ("must lie in [0, 1]", "use 0.5 to weigh both losses alike"),
    "learning_rate": ("must be >= 0 and finite", "try 1e-4"),
}


def check_range(field: str, value) -> None:
  """Raises ValueError unless `value` lies in the range of its kind of field."""
  kind = field.removesuffix(".start").removesuffix(".end").split(".")[-1]
  rule, remedy = _RULES[kind]
  ok = _is_number(value) and {
      "temperature": lambda v: v > 0,
      "alpha": lambda v: 0 <= v <= 1,
      "learning_rate": lambda v: v >= 0,
  }[kind](value)
  if not ok:
    raise errors.invalid(field, rule, value, remedy)
  # A rate that float32 flushes to 0 is as good as 0; a temperature is not.
  if kind == "temperature":
    square = float(value) * float(value)
    fits, what = _SMALLEST <= square <= _LARGEST, "its square"
  else:
    fits, what = float(value) <= _LARGEST, "it"
  if not fits:
    raise errors.invalid(
        field, f"must be such that float32 holds {what}", value, remedy
    )
