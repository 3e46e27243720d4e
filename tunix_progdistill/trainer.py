"""`ProgressiveDistillationTrainer`: Tunix's trainer over the engine."""

import copy

from flax import nnx
import optax
from tunix.distillation import distillation_trainer
from tunix.distillation import strategies

from tunix_progdistill import errors
from tunix_progdistill.engine import batches
from tunix_progdistill.engine import loop
from tunix_progdistill.engine import optimizer as optimizer_lib
from tunix_progdistill.engine import setup


class ProgressiveDistillationTrainer(
    loop.StagedLoop, distillation_trainer.DistillationTrainer
):
  """Distills in stages; takes every argument of Tunix's `DistillationTrainer`.

  One `train()` runs all stages, and the same call again, with the same
  checkpoint folder, goes on where the last one stopped.

  Args:
    student_model: trained in place.
    teacher_model: runs in eval mode; never changed.
    strategy: a `ProgressiveLogitStrategy`; Tunix's `LogitStrategy` is turned
      into one. Any other Tunix strategy is one term of its own, for which the
      plan must set neither temperature nor alpha.
    optimizer: a factory `learning_rate -> GradientTransformation`, one made by
      `optax.inject_hyperparams`, or, where the plan names no rate, any
      `GradientTransformation`.
    training_config: `TrainingConfig` with `progressive`; Tunix's own trains
      everything in one stage.

  Raises:
    ValueError: arguments that cannot work together, or a checkpoint that was
      written by another plan.

  Buffers of the student are donated to each step: keep copies of its weights,
  not references, across updates.
  """

  def __init__(
      self,
      student_model: nnx.Module,
      teacher_model: nnx.Module,
      strategy: strategies.BaseStrategy,
      optimizer: optimizer_lib.Argument,
      training_config: distillation_trainer.TrainingConfig,
  ):
    """See the class."""
    section = setup.section_of(training_config)
    if not section.enabled:
      raise errors.invalid(
          "progressive.enabled", "must be true for this class", False,
          "make_trainer gives Tunix's own trainer where it is false",
      )
    parts = setup.assemble(
        student_model, teacher_model, strategy, optimizer, training_config,
        section,
    )
    self._staged = loop.Staged(parts)
    # Optimizer and accumulation are the engine's: what Tunix's constructor
    # builds for them must hold no memory. It gets the real config back in the
    # setter of `checkpoint_manager`.
    bare = copy.copy(parts.config)
    bare.gradient_accumulation_steps = None
    super().__init__(
        parts.student_model, parts.teacher_model, setup.Processed(),
        optax.set_to_zero(), bare,
    )
    self.strategy = parts.strategy
    self.gen_model_input_fn = batches.model_inputs
    if hasattr(self, "grad_accumulator"):
      self.grad_accumulator = None


def make_trainer(
    student_model: nnx.Module,
    teacher_model: nnx.Module,
    strategy: strategies.BaseStrategy,
    optimizer: optimizer_lib.Argument,
    training_config: distillation_trainer.TrainingConfig,
) -> distillation_trainer.DistillationTrainer:
  """The trainer that the config asks for.

  Args:
    student_model: see `ProgressiveDistillationTrainer`.
    teacher_model: likewise.
    strategy: likewise.
    optimizer: likewise; without stages a `GradientTransformation`.
    training_config: its `progressive` says which: ours where there is a section
      that is enabled, else Tunix's own, untouched.

  Raises:
    ValueError: see `ProgressiveDistillationTrainer`.
  """
  section = getattr(training_config, "progressive", None)
  if section is not None and setup.section_of(training_config).enabled:
    return ProgressiveDistillationTrainer(
        student_model, teacher_model, strategy, optimizer, training_config
    )
  if not isinstance(optimizer, optax.GradientTransformation):
    raise errors.invalid(
        "optimizer", "must be a GradientTransformation where no stage sets a "
        "rate, for progressive is off", optimizer,
        "pass optax.adamw(1e-4) instead of optax.adamw",
    )
  return distillation_trainer.DistillationTrainer(
      student_model, teacher_model, strategy, optimizer, training_config
  )
