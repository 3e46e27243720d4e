"""`TrainingConfig`: Tunix's, with the progressive section."""

from collections.abc import Mapping
from collections.abc import Sized
import dataclasses
from typing import Any

from tunix.distillation import distillation_trainer

from tunix_progdistill import errors
from tunix_progdistill.plan import stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgressiveConfig:
  """The progressive section.

  Attributes:
    enabled: False leaves everything to Tunix: `make_trainer` gives its own
      trainer, and the hook attaches nothing.
    plan: the stages; a mapping is read as `StagePlan`'s fields. None trains
      everything in one stage.
    updates_per_epoch: optimizer updates in an epoch, or the training data
      itself if it has a length; only a plan that counts epochs needs it.
    max_grad_norm: clip of the gradient by its global norm over all trainable
      parameters, > 0; None does not clip.
    log_kl_div_tau1: also log the KL at tau = 1 at every update; it costs one
      more pass over the logits.
    fused_head: fuse the output heads with the loss, so that no logits [B, T, V]
      are ever made: a little slower, and far less memory. None does it where
      both models' logits and their gradient would take more than half of the
      memory, on one device, with models of Tunix's and a strategy that has
      hidden functions; True insists on it, False never does it.
  """

  enabled: bool = True
  plan: stages.StagePlan = None  # type: ignore[assignment]  # set below
  updates_per_epoch: int | Sized | None = None
  max_grad_norm: float | None = None
  log_kl_div_tau1: bool = False
  fused_head: bool | None = None

  def __post_init__(self):
    errors.plain_fields(self)
    for field, words, kinds in (
        ("enabled", "true or false", bool),
        ("fused_head", "true, false or null", bool | None),
    ):
      value = getattr(self, field)
      if not isinstance(value, kinds):
        raise errors.invalid(
            f"progressive.{field}", f"must be {words}", value, "leave it out"
        )
    if self.plan is None:
      everything = stages.StagePlan(stages=(stages.Stage(),))
      object.__setattr__(self, "plan", everything)
    if isinstance(self.plan, Mapping):
      plan = stages.StagePlan.from_mapping(self.plan)
      object.__setattr__(self, "plan", plan)
    if not isinstance(self.plan, stages.StagePlan):
      raise errors.invalid(
          "progressive.plan", "must be a StagePlan", self.plan,
          "write StagePlan(stages=(...)) or StagePlan.three_stages()",
      )
    per_epoch = self.updates_per_epoch
    if isinstance(per_epoch, int):
      known = per_epoch >= 1
    else:
      known = per_epoch is None or (
          isinstance(per_epoch, Sized) and not isinstance(per_epoch, str)
          and len(per_epoch) > 0
      )
    if not known:
      raise errors.invalid(
          "progressive.updates_per_epoch",
          "must be a whole number >= 1, or data with a length", per_epoch,
          "count optimizer updates, not micro-batches",
      )
    norm = self.max_grad_norm
    if norm is not None and not (
        isinstance(norm, (int, float)) and 0 < norm < float("inf")
    ):
      raise errors.invalid(
          "progressive.max_grad_norm", "must be > 0", norm,
          "leave it out for no clipping",
      )

  def epoch_updates(self, accumulation: int) -> int | None:
    """Optimizer updates in an epoch, if they are known."""
    value = self.updates_per_epoch
    if value is None or isinstance(value, int):
      return value
    return -(-len(value) // accumulation)


def as_progressive(value: Any) -> ProgressiveConfig | None:
  """A `ProgressiveConfig` from one, from a plan, or from a mapping.

  Raises:
    ValueError: anything else, or an unknown key.
  """
  if value is None or isinstance(value, ProgressiveConfig):
    return value
  if isinstance(value, stages.StagePlan):
    return ProgressiveConfig(plan=value)
  if isinstance(value, Mapping):
    if "plan" in value:
      return ProgressiveConfig(**value)
    own = {f.name for f in dataclasses.fields(ProgressiveConfig)} - {"plan"}
    of_plan = {f.name for f in dataclasses.fields(stages.StagePlan)}
    for key in value:
      if key not in own | of_plan:
        raise errors.invalid(
            "progressive", "must hold known keys only", key,
            f"known are {', '.join(sorted(own | of_plan))}",
        )
    plan = {k: v for k, v in value.items() if k in of_plan}
    rest = {k: v for k, v in value.items() if k in own}
    if not plan and rest.get("enabled") is False:
      return ProgressiveConfig(**rest)
    return ProgressiveConfig(
        plan=stages.StagePlan.from_mapping(plan), **rest
    )
  raise errors.invalid(
      "progressive", "must be a StagePlan, a ProgressiveConfig or a mapping",
      value, "write TrainingConfig(progressive=StagePlan(stages=(...)), ...)",
  )


@dataclasses.dataclass(slots=True, kw_only=True)
class TrainingConfig(distillation_trainer.TrainingConfig):
  """Tunix's distillation `TrainingConfig`, plus `progressive`.

  Attributes:
    progressive: a `StagePlan`, a `ProgressiveConfig`, or a mapping of their
      fields; None trains everything in one open-ended stage.
  """

  progressive: Any = None

  def __post_init__(self):
    self.progressive = as_progressive(self.progressive)
