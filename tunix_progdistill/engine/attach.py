"""The engine lent to a trainer of Tunix's own class, and taken back.

An attached instance gets a class of its own: `StagedLoop` over the class that
it had. No other instance, and nothing of Tunix, is touched; taking the engine
back gives it its class again, with everything that the class's constructor
made.
"""

import copy
import dataclasses
import functools
from typing import Any

from flax import nnx
import optax
from tunix.distillation import distillation_trainer
from tunix.distillation import strategies
from tunix.sft import peft_trainer
from tunix.sft import profiler

from tunix_progdistill import config as config_lib
from tunix_progdistill import errors
from tunix_progdistill.engine import engine as engine_lib
from tunix_progdistill.engine import loop
from tunix_progdistill.engine import optimizer as optimizer_lib
from tunix_progdistill.engine import setup
from tunix_progdistill.objectives import foreign

_FOLDER = "progressive"
# What a step of the engine takes the place of. A subclass that has its own
# would be passed over without a sign.
_REPLACED = (
    "_prepare_inputs", "_train_step", "_eval_step", "create_train_step_fn",
    "create_eval_step_fn", "jit_train_and_eval_step", "get_train_loss",
    "get_eval_loss",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Before:
  """What a trainer was before it was attached.

  Attributes:
    kind: its class.
    config: its config.
    profiler: Tunix's, which counts from the step that it was made at.
    strategy: a distillation trainer's; None for another.
    wrapped_by: what pre-processed a plain trainer's models, if anything did.
  """

  kind: type[peft_trainer.PeftTrainer]
  config: peft_trainer.TrainingConfig
  profiler: Any
  strategy: strategies.BaseStrategy | None
  wrapped_by: strategies.BaseStrategy | None


class _Attached(loop.StagedLoop):
  """The loop of an instance that was made by a class of Tunix's."""

  _before: _Before

  def close(self) -> None:
    """Closes the run and Tunix's own manager; then the engine is gone."""
    try:
      super().close()
      self.__dict__["checkpoint_manager"].close()
    finally:
      detach(self)


def is_attached(trainer: Any) -> bool:
  """Whether `trainer` runs by an engine that was lent to it."""
  return isinstance(trainer, _Attached)


def attach(
    trainer: peft_trainer.PeftTrainer,
    section: config_lib.ProgressiveConfig,
    *,
    optimizer: optimizer_lib.Argument | None = None,
    strategy: strategies.BaseStrategy | None = None,
    teacher_model: nnx.Module | None = None,
) -> engine_lib.Engine:
  """Lends an engine to `trainer`, restored from its last checkpoint.

  Args:
    trainer: of Tunix's, before its `train()`.
    section: the plan and the rest.
    optimizer: see `ProgressiveDistillationTrainer`; None takes the trainer's.
    strategy: for a plain `PeftTrainer`: distils instead of its own loss.
    teacher_model: likewise.

  Returns:
    The engine.

  Raises:
    ValueError: a trainer that cannot be attached to, or arguments that cannot
      work together.
  """
  _check(trainer, strategy, teacher_model)
  if optimizer is None:
    optimizer = _own_optimizer(trainer)
  config = copy.copy(trainer.config)
  if config.checkpoint_root_directory:
    # Of its own, so that the stock constructor finds nothing to choke on.
    root = str(config.checkpoint_root_directory).rstrip("/")
    config.checkpoint_root_directory = f"{root}/{_FOLDER}"
  assemble = functools.partial(
      setup.assemble, optimizer=optimizer, training_config=config,
      section=section,
  )
  if isinstance(trainer, distillation_trainer.DistillationTrainer):
    parts = assemble(
        trainer.model, trainer.teacher_model, trainer.strategy, processed=True
    )
  elif strategy is not None and teacher_model is not None:
    parts = assemble(trainer.model, teacher_model, strategy)
  else:
    parts = setup.assemble_loss(
        trainer.model,
        lambda: foreign.Functions(trainer.loss_fn, trainer.eval_loss_fn),
        optimizer, config, section,
    )
  _lend(trainer, parts, wrapped_by=strategy)
  return parts.engine


def _lend(
    trainer: Any, parts: setup.Assembly,
    wrapped_by: strategies.BaseStrategy | None,
) -> None:
  """Gives `trainer` its new class and what belongs to it."""
  kind = type(trainer)
  trainer._before = _Before(
      kind=kind,
      config=trainer.config,
      profiler=trainer._prof,
      strategy=getattr(trainer, "strategy", None),
      wrapped_by=wrapped_by,
  )
  trainer._staged = loop.Staged(parts)
  trainer.__class__ = type(kind.__name__, (_Attached, kind), {})
  try:
    if trainer._before.strategy is not None:
      trainer.strategy = parts.strategy
    trainer.model = parts.student_model
    trainer._open_checkpoints()
    steps, metadata = trainer.checkpoint_manager.maybe_restore(
        trainer.model,
        trainer.optimizer,
        restore_only_lora_params=trainer._lora_enabled,
    )
  except BaseException:
    detach(trainer)
    raise
  trainer._train_steps, trainer._restored_custom_metadata = steps, metadata
  trainer._iter_steps = steps * parts.accumulation
  trainer.clear_jit_cache()
  most = parts.config.max_steps
  trainer._prof = profiler.Profiler(
      initial_step=trainer._iter_steps,
      max_step=None if most is None else most * parts.accumulation,
      profiler_options=parts.config.profiler_options,
  )


def detach(trainer: peft_trainer.PeftTrainer) -> None:
  """Takes the engine back; `trainer` keeps its weights and its count.

  Does nothing where none is lent. Checkpoints that are being written arrive
  first.
  """
  if not isinstance(trainer, _Attached):
    return
  before, staged = trainer._before, trainer._staged
  try:
    if staged.checkpoints is not None:
      staged.checkpoints.wait()
  finally:
    trainer.__class__ = before.kind
    del trainer._before, trainer._staged
    trainer.config = before.config
    trainer._prof = before.profiler
    if before.strategy is not None:
      trainer.strategy = before.strategy
    if before.wrapped_by is not None:
      trainer.model, _ = before.wrapped_by.post_process_models(
          trainer.model, staged.parts.teacher_model
      )
    peft_trainer.PeftTrainer.clear_jit_cache(trainer)


def _check(trainer: Any, strategy: Any, teacher_model: Any) -> None:
  """Raises ValueError unless an engine can be lent to `trainer`."""
  if not isinstance(trainer, peft_trainer.PeftTrainer):
    raise errors.invalid(
        "trainer", "must be a Tunix trainer", type(trainer).__name__,
        "pass a DistillationTrainer or a PeftTrainer",
    )
  if isinstance(trainer, loop.StagedLoop):
    raise errors.invalid(
        "trainer", "must have no engine yet", type(trainer).__name__,
        "set progressive in its TrainingConfig, or detach the first hook",
    )
  for name in _REPLACED:
    own = next((k for k in type(trainer).__mro__ if name in vars(k)), None)
    if own is not None and not own.__module__.startswith("tunix."):
      raise errors.invalid(
          "trainer", f"must not have a {name} of its own, for the engine's "
          "steps take its place", own.__name__,
          "pass a strategy, or set loss_fn by with_loss_fn",
      )
  if trainer.train_steps:
    raise errors.invalid(
        "trainer", "must be attached to before its first update",
        f"{trainer.train_steps} updates", "attach right after the "
        "constructor, and name a checkpoint_root_directory that holds no "
        "checkpoints of an unattached run",
    )
  distils = isinstance(trainer, distillation_trainer.DistillationTrainer)
  given = (strategy is not None, teacher_model is not None)
  if distils and any(given):
    raise errors.invalid(
        "strategy and teacher_model", "must be left out for a trainer that "
        "has its own", type(trainer).__name__, "pass them to its constructor",
    )
  if given[0] != given[1]:
    raise errors.invalid(
        "strategy and teacher_model", "must be given together",
        "one of them", "pass both to distil, or none for the trainer's loss",
    )


def _own_optimizer(trainer: Any) -> optax.GradientTransformation:
  """The transformation that the trainer was made with."""
  tx = trainer.optimizer.tx
  accumulates = trainer.config.gradient_accumulation_steps is not None
  if accumulates and isinstance(tx, optax.MultiSteps):
    return tx.inner_opt  # Tunix wrapped it
  return tx
