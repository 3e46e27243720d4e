"""The section `optimizer_config`: an optax optimizer and schedule by name."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
import inspect
import math
from typing import Any

import optax

from tunix_progdistill import errors
from tunix_progdistill.plan import schedules as schedule_lib
from tunix_progdistill.schema import keys

# They need more than gradients, or do not follow the rate of the plan.
_UNSUITED = ("lbfgs", "noisy_sgd", "rprop")
# Arguments that no YAML can hold.
_NOT_PLAIN = ("boundaries", "key", "linesearch", "schedules")

_OWN = (
    "opt_type", "learning_rate", "schedule_type", "warmup_ratio",
    "max_grad_norm",
)
# Rates of a schedule.
_RATES = ("value", "init_value", "peak_value", "end_value")
# What optax's arguments may be, by name: it does not look itself.
_DECAYS = ("b1", "b2", "b3", "decay", "momentum", "rho")
_NOT_NEGATIVE = (
    "clipping_threshold", "eps", "eps_root", "initial_accumulator_value",
    "initial_scale", "min_norm", "weight_decay", "weight_decay_rate",
)
# Lengths of a schedule that can be made from that of the run, as in Tunix.
_OF_THE_RUN = ("decay_steps", "warmup_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """Optimizer and rate: Tunix's `optimizer_config`.

  In a YAML the arguments of the optimizer and of the schedule stand beside the
  keys below, under the names that optax gives them.

  Attributes:
    opt_type: name of an optax optimizer.
    learning_rate: rate of the stages that have none of their own, >= 0.
    schedule_type: name of an optax schedule, which counts updates of the whole
      run; it takes the place of learning_rate and of rates in stages. Empty for
      none.
    warmup_ratio: part of the run that warms up, in [0, 1], for a schedule that
      has warmup_steps where these are not given.
    max_grad_norm: clip of the gradient by its global norm, > 0; the same as
      progressive.max_grad_norm, so give one of the two.
    arguments: keyword arguments of the optimizer and of the schedule.

  Raises:
    ValueError: on an unknown name, or a value out of range.
  """

  opt_type: str = "adamw"
  learning_rate: float | None = None
  schedule_type: str = ""
  warmup_ratio: float | None = None
  max_grad_norm: float | None = None
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    asked = self.opt_type
    object.__setattr__(self, "opt_type", asked.lower())
    if self.opt_type not in optimizers():
      raise errors.invalid(
          "opt_type", "must be the name of an optax optimizer", asked,
          keys.near(self.opt_type, sorted(optimizers())),
      )
    if self.schedule_type and self.schedule_type not in schedules():
      raise errors.invalid(
          "schedule_type", "must be the name of an optax schedule",
          self.schedule_type,
          keys.near(self.schedule_type, sorted(schedules())),
      )
    if self.learning_rate is not None:
      schedule_lib.check_range("learning_rate", self.learning_rate)
    if self.warmup_ratio is not None and not 0 <= self.warmup_ratio <= 1:
      raise errors.invalid(
          "warmup_ratio", "must lie in [0, 1]", self.warmup_ratio, "try 0.1"
      )
    if self.max_grad_norm is not None and self.max_grad_norm <= 0:
      raise errors.invalid(
          "max_grad_norm", "must be > 0", self.max_grad_norm,
          "write null for no clipping",
      )
    self._check_arguments()
    if self.schedule_type:
      given = self._given(schedules()[self.schedule_type])
      for name in _RATES:
        if (given.get(name) or 0) < 0:
          raise errors.invalid(name, "must be >= 0", given[name], "try 1e-4")
    self.factory()
    missing = self._missing()
    for name in missing:
      if name not in _OF_THE_RUN:
        raise errors.invalid(
            name, f"must be given, for {self.schedule_type} needs it", None,
            "write a value, or set schedule_type to null",
        )
      if name == "warmup_steps" and self.warmup_ratio is None:
        raise errors.invalid(
            name, f"must be given, for {self.schedule_type} needs it", None,
            "write a whole number, or optimizer_config.warmup_ratio=0.1",
        )
    if not missing:
      self.schedule(None)

  def _check_arguments(self) -> None:
    given = self._given(optimizers()[self.opt_type])
    for name, value in given.items():
      if isinstance(value, bool) or not isinstance(value, (int, float)):
        continue
      if name in _DECAYS and not 0 <= value < 1:
        raise errors.invalid(
            name, "must lie in [0, 1)", value, "leave it out for optax's own"
        )
      if name in _NOT_NEGATIVE and not 0 <= value < math.inf:
        raise errors.invalid(
            name, "must be >= 0 and finite", value,
            "leave it out for optax's own",
        )

  def factory(self) -> Callable[..., optax.GradientTransformation]:
    """A function from a learning rate to the optimizer."""
    make = optimizers()[self.opt_type]
    given = self._given(make)

    def factory(learning_rate):
      return make(learning_rate=learning_rate, **given)

    try:
      factory(0.0)
    except (TypeError, ValueError) as e:
      raise _refused("opt_type", self.opt_type, e) from None
    return factory

  def schedule(self, updates: int | None) -> Callable[[int], Any] | None:
    """The schedule over the updates of the run; None where none is named.

    Args:
      updates: length of the run, where it is known.

    Raises:
      ValueError: the schedule needs a length that is not known, or refuses its
        arguments.
    """
    if not self.schedule_type:
      return None
    make = schedules()[self.schedule_type]
    given = self._given(make)
    for name in self._missing():
      if updates is None:
        raise errors.invalid(
            name, f"must be given, for {self.schedule_type} needs it", None,
            "write a value, or set training_config.max_steps",
        )
      warms = name == "warmup_steps"
      given[name] = round((self.warmup_ratio or 0) * updates) if warms else (
          updates
      )
    try:
      return make(**given)
    except (TypeError, ValueError) as e:
      raise _refused("schedule_type", self.schedule_type, e) from None

  def unused(self, *, rates_in_stages: bool) -> list[str]:
    """The keys that are given and that nothing of the choice made reads."""
    used = set(_parameters(optimizers()[self.opt_type]))
    if self.schedule_type:
      used |= set(_parameters(schedules()[self.schedule_type]))
    found = [name for name in self.arguments if name not in used]
    if self.learning_rate is not None and (
        self.schedule_type or rates_in_stages
    ):
      found.append("learning_rate")
    if self.warmup_ratio is not None and (
        "warmup_steps" not in used or "warmup_steps" in self.arguments
    ):
      found.append("warmup_ratio")
    return found

  def _given(self, make: Callable) -> dict[str, Any]:
    return {
        k: v for k, v in self.arguments.items() if k in _parameters(make)
    }

  def _missing(self) -> list[str]:
    """Arguments that the schedule must have and that are not given."""
    if not self.schedule_type:
      return []
    make = schedules()[self.schedule_type]
    return [
        name for name, p in _parameters(make).items()
        if p.default is p.empty and name not in self.arguments
    ]


def _refused(field: str, value: str, error: Exception) -> ValueError:
  text = " ".join(str(error).split()).rstrip(".")
  return errors.invalid(
      field, "must get arguments that optax takes", value, f"it says: {text}"
  )


def _parameters(make: Callable) -> dict[str, inspect.Parameter]:
  """The arguments of an optimizer or schedule that a YAML can hold."""
  return {
      name: p for name, p in inspect.signature(make).parameters.items()
      if name not in _NOT_PLAIN and name != "learning_rate"
      and not name.endswith("mask")
  }


@functools.cache
def optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
  """optax's optimizers, by name."""
  return {
      name: make for name, make in vars(optax).items()
      if inspect.isfunction(make)
      and not name.startswith(("_", "scale_by_"))
      and name not in _UNSUITED
      and "learning_rate" in inspect.signature(make).parameters
  }


@functools.cache
def schedules() -> dict[str, Callable[..., Callable[[int], Any]]]:
  """optax's schedules of plain arguments, by name."""
  return {
      name: make for name, make in vars(optax.schedules).items()
      if inspect.isfunction(make)
      and not name.startswith(("_", "inject_"))
      and name != "join_schedules"
  }


@functools.cache
def section_keys() -> tuple[keys.Key, ...]:
  """The section's keys: our own, and the arguments of all that optax has."""
  own = keys.of(OptimizerConfig, only=_OWN)
  users: dict[str, list[tuple[str, inspect.Parameter]]] = {}
  for name, make in (*optimizers().items(), *schedules().items()):
    for argument, parameter in _parameters(make).items():
      users.setdefault(argument, []).append((name, parameter))
  implied = tuple(
      _argument(name, found) for name, found in sorted(users.items())
  )
  return own + implied


def _argument(
    name: str, users: list[tuple[str, inspect.Parameter]]
) -> keys.Key:
  defaults = [p.default for _, p in users if p.default is not p.empty]
  hints = " ".join(str(p.annotation) for _, p in users)
  if "dtype" in name:
    kind = "str"
  elif any(isinstance(d, bool) for d in defaults):
    kind = "bool"
  elif "dict[" in hints:
    kind = "any" if "Iterable" in hints else "mapping"
  elif "<class 'str'>" in hints:
    kind = "str"
  elif all(p.annotation is int for _, p in users) or name == "seed":
    kind = "int"
  else:
    kind = "float"
  return keys.Key(
      name=name,
      kind=kind,
      nullable=any(d is None for d in defaults),
      meaning=f"argument of {', '.join(n for n, _ in users)}.",
      implied=True,
  )
