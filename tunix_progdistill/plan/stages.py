"""`Stage` and `StagePlan`: what a user writes down."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import re
from typing import Any

from tunix_progdistill import errors
from tunix_progdistill.plan import run
from tunix_progdistill.plan import schedules

Value = schedules.Value

_SELECTORS = ("freeze_fraction", "trainable_layers", "trainable", "frozen")


def _read_scalars(owner: Any) -> None:
  """Checks the values that may be schedules, and reads those in mappings."""
  for field in ("learning_rate", "temperature", "alpha"):
    value = schedules.read(field, getattr(owner, field))
    object.__setattr__(owner, field, value)
    schedules.check(field, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """One stage: which parameters train, for how long, with which scalars.

  Parameters are chosen in one of four ways (none: everything trains):
    freeze_fraction f   the first floor(f L) of the L layers are frozen; at
                        least one trains
    trainable_layers n  the last n layers train
    trainable           regexes on parameter paths (`layers/3/attn/.*`); what
                        matches trains, the rest is frozen
    frozen              regexes likewise; what matches is frozen
  A regex matches a path when it matches the whole of it or the whole of one of
  its parent modules' paths: `layers/1` means layer 1, not layers 10 to 19.
  While a fraction or a number freezes any layer, the input embedding is frozen
  as well, and with it a head that is tied to it; an untied head and the final
  norm train in every stage.

  Attributes:
    name: what logs call the stage; empty for its number.
    updates: length in optimizer updates, >= 1.
    epochs: length in epochs, > 0; give one of the two. Only a plan's last
      stage may leave both out: it then lasts as long as the run.
    learning_rate: >= 0, or a schedule over the updates of this stage; None
      takes the plan's.
    temperature: > 0, or a schedule likewise; None takes the plan's.
    alpha: in [0, 1], or a schedule likewise; None takes the plan's.

  Raises:
    ValueError: on a value out of range, or two selectors at once.
  """

  name: str = ""
  freeze_fraction: float | None = None
  trainable_layers: int | None = None
  trainable: tuple[str, ...] | None = None
  frozen: tuple[str, ...] | None = None
  updates: int | None = None
  epochs: float | None = None
  learning_rate: Value | None = None
  temperature: Value | None = None
  alpha: Value | None = None

  def __post_init__(self):
    errors.plain_fields(self)
    for field in ("trainable", "frozen"):
      rules = getattr(self, field)
      if rules is None:
        continue
      if isinstance(rules, str):
        rules = (rules,)
      if not isinstance(rules, Sequence):
        rules = ()
      object.__setattr__(self, field, tuple(rules))
      if not rules or not all(isinstance(r, str) and r for r in rules):
        raise errors.invalid(
            field, "must hold at least one regex", rules,
            "write e.g. ('layers/[45]', 'final_norm')",
        )
      for rule in rules:
        try:
          re.compile(rule)
        except re.error as e:
          raise errors.invalid(
              field, f"must hold valid regexes ({e})", rule,
              "mend the pattern",
          ) from None
    given = [f for f in _SELECTORS if getattr(self, f) is not None]
    if len(given) > 1:
      raise errors.invalid(
          " and ".join(given), "must not be given together",
          tuple(getattr(self, f) for f in given), "keep one of them",
      )
    f = self.freeze_fraction
    if f is not None and not (_is_real(f) and 0.0 <= f <= 1.0):
      raise errors.invalid(
          "freeze_fraction", "must lie in [0, 1]", f, "write 0.8 for 80 %"
      )
    n = self.trainable_layers
    if n is not None and not (_is_int(n) and n >= 1):
      raise errors.invalid(
          "trainable_layers", "must be a whole number >= 1", n,
          "leave it out to train every layer",
      )
    if self.updates is not None and self.epochs is not None:
      raise errors.invalid(
          "updates and epochs", "must not be given together",
          (self.updates, self.epochs), "keep one of them",
      )
    if self.updates is not None and not (
        _is_int(self.updates) and self.updates >= 1
    ):
      raise errors.invalid(
          "updates", "must be a whole number >= 1", self.updates,
          "drop the stage if it is to do nothing",
      )
    if self.epochs is not None and not (
        _is_real(self.epochs) and 0 < self.epochs < math.inf
    ):
      raise errors.invalid(
          "epochs", "must be > 0 and finite", self.epochs,
          "drop the stage if it is to do nothing",
      )
    _read_scalars(self)

  @property
  def selector(self) -> dict[str, Any]:
    """The one selector that was given, as {name: value}; {} if none."""
    return {
        f: getattr(self, f) for f in _SELECTORS if getattr(self, f) is not None
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlan:
  """The stages of a run, in order.

  A scalar is taken from the stage, else from the plan, else from the strategy
  (temperature, alpha) or the optimizer (learning rate). A schedule given to a
  stage counts that stage's updates, one given to the plan those of the run.

  Attributes:
    stages: at least one; only the last may be open-ended.
    learning_rate: across the run.
    temperature: across the run.
    alpha: across the run.

  Raises:
    ValueError: on a plan that cannot be run.

  >>> plan = StagePlan(stages=(
  ...     Stage(freeze_fraction=0.8, updates=5, learning_rate=1e-4),
  ...     Stage(updates=5, learning_rate=1e-5),
  ... ), temperature=schedules.anneal(3.0, 1.0, "linear"), alpha=0.5)
  >>> plan.resolve().scalars(9)
  Scalars(stage=1, learning_rate=1e-05, temperature=1.0, alpha=0.5)
  """

  stages: tuple[Stage, ...]
  learning_rate: Value | None = None
  temperature: Value | None = None
  alpha: Value | None = None

  def __post_init__(self):
    errors.plain_fields(self)
    stages = self.stages
    if isinstance(stages, Stage) or not isinstance(stages, Sequence):
      raise errors.invalid(
          "stages", "must be a list of stages", stages, "write (Stage(...),)"
      )
    stages = tuple(
        _stage_of(i, s) if isinstance(s, Mapping) else s
        for i, s in enumerate(stages)
    )
    object.__setattr__(self, "stages", stages)
    if not stages:
      raise errors.invalid(
          "stages", "must hold at least one stage", stages,
          "StagePlan.three_stages() is the usual plan",
      )
    for i, stage in enumerate(stages):
      if not isinstance(stage, Stage):
        raise errors.invalid(
            f"stages[{i}]", "must be a Stage", stage, "write Stage(...)"
        )
      if i < len(stages) - 1 and stage.updates is None and stage.epochs is None:
        raise errors.invalid(
            f"stages[{i}]", "must have a length (only the last may be open)",
            None, "give it updates= or epochs=",
        )
    _read_scalars(self)

  @classmethod
  def from_mapping(cls, fields: Mapping[str, Any]) -> "StagePlan":
    """A plan from its fields by name, as a config file has them.

    Raises:
      ValueError: an unknown or missing field, or a value out of range.
    """
    known = [f.name for f in dataclasses.fields(cls)]
    for key in fields:
      if key not in known:
        raise errors.invalid(
            "plan", "must hold known keys only", key,
            f"known are {', '.join(known)}",
        )
    if "stages" not in fields:
      raise errors.invalid(
          "plan", "must hold stages", sorted(fields), "add stages"
      )
    return cls(**fields)

  @classmethod
  def three_stages(
      cls,
      *,
      epochs: tuple[float, float] = (5, 5),
      learning_rate: float = 1e-4,
      temperature: Value | None = None,
      alpha: Value = 0.5,
  ) -> "StagePlan":
    """The usual plan: 80 %, then 50 %, then nothing frozen.

    The rates are in ratio 10 : 5 : 1 and the last stage is open-ended.

    Args:
      epochs: lengths of the first two stages.
      learning_rate: the first stage's; the others' follow from it.
      temperature: None anneals from 3 to 1 across the run, which then needs a
        known length (`max_steps`).
      alpha: weight of the soft loss.
    """
    if temperature is None:
      temperature = schedules.anneal(3.0, 1.0, "linear")
    return cls(
        stages=(
            Stage(
                name="upper layers", freeze_fraction=0.8, epochs=epochs[0],
                learning_rate=learning_rate,
            ),
            Stage(
                name="upper half", freeze_fraction=0.5, epochs=epochs[1],
                learning_rate=learning_rate / 2,
            ),
            Stage(
                name="everything", freeze_fraction=0.0,
                learning_rate=learning_rate / 10,
            ),
        ),
        temperature=temperature,
        alpha=alpha,
    )

  def resolve(
      self,
      *,
      updates_per_epoch: int | None = None,
      max_steps: int | None = None,
      temperature: Value = 2.0,
      alpha: Value = 0.5,
  ) -> run.RunPlan:
    """Turns epochs into updates and fills in what the plan leaves open.

    Args:
      updates_per_epoch: optimizer updates in one epoch.
      max_steps: the run's length in updates; it gives an anneal its length
        where the plan is open-ended.
      temperature: used where neither stage nor plan names one.
      alpha: likewise.

    Raises:
      ValueError: epochs without `updates_per_epoch`, or an anneal whose length
        cannot be known.
    """
    lengths: list[int | None] = []
    for i, stage in enumerate(self.stages):
      if stage.epochs is not None:
        if updates_per_epoch is None:
          raise errors.invalid(
              "updates_per_epoch",
              f"must be known, for stages[{i}] counts epochs",
              None, "pass it, or give the stage updates=",
          )
        lengths.append(max(1, round(stage.epochs * updates_per_epoch)))
      else:
        lengths.append(stage.updates)
    closed = sum(n for n in lengths if n is not None)
    total = closed if lengths[-1] is not None else max_steps
    runs = []
    for i, (stage, length) in enumerate(zip(self.stages, lengths, strict=True)):
      span = length
      if length is None and max_steps is not None:
        span = max(max_steps - closed, 1)

      def pick(field, default, stage=stage, span=span, i=i):
        own, shared = getattr(stage, field), getattr(self, field)
        if own is not None:
          return run.Source(
              value=_span(f"stages[{i}].{field}", own, span), local=True
          )
        value = default if shared is None else shared
        if value is None:
          return None
        return run.Source(value=_span(field, value, total), local=False)

      runs.append(
          run.StageRun(
              stage=stage,
              length=length,
              learning_rate=pick("learning_rate", None),
              temperature=pick("temperature", temperature),
              alpha=pick("alpha", alpha),
          )
      )
    plan = run.RunPlan(stages=tuple(runs))
    plan.check(max_steps)
    return plan


def _stage_of(number: int, fields: Mapping[str, Any]) -> Stage:
  known = [f.name for f in dataclasses.fields(Stage)]
  for key in fields:
    if key not in known:
      raise errors.invalid(
          f"stages[{number}]", "must hold known keys only", key,
          f"known are {', '.join(known)}",
      )
  try:
    return Stage(**fields)
  except ValueError as e:
    raise ValueError(f"stages[{number}].{e}") from None


def _span(field: str, value: Value, updates: int | None) -> Value:
  if isinstance(value, schedules.Anneal) and value.updates is None:
    if updates is None:
      raise errors.invalid(
          f"{field}.updates", "must be known, for the plan is open-ended",
          None, "set max_steps, or pass updates= to anneal",
      )
    return value.over(updates)
  return value


def _is_int(value) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)
