"""`ProgressiveFreezingHook`: stages for a trainer of Tunix's own class."""

from collections.abc import Mapping
from typing import Any

from absl import logging
from flax import nnx
from tunix.distillation import strategies
from tunix.sft import hooks
from tunix.sft import peft_trainer

from tunix_progdistill import config as config_lib
from tunix_progdistill import errors
from tunix_progdistill.engine import attach as attach_lib
from tunix_progdistill.engine import engine as engine_lib
from tunix_progdistill.engine import optimizer as optimizer_lib
from tunix_progdistill.plan import stages


class ProgressiveFreezingHook(hooks.TrainingHooks):
  """Gives a stock `DistillationTrainer` or `PeftTrainer` stages.

    hook = ProgressiveFreezingHook(StagePlan(stages=(...)))
    hook.attach(trainer)
    trainer.train(train_ds, eval_ds)

  Attached, an instance runs by the same engine as
  `ProgressiveDistillationTrainer`: the same weights, records, checkpoints and
  resume, and the same methods (`evaluate`, `record_event`, `engine`). Its
  checkpoints lie in `<checkpoint_root_directory>/progressive`; `attach` goes on
  from the newest. `close()`, with which `train()` ends, or `detach()` gives the
  instance back as it was, with the weights that it was trained to.

  On a `PeftTrainer` the hook brings stages, freezing and rates for the
  trainer's own loss; with `strategy` and `teacher_model` it distils.

  The stock constructor has built its optimizer over every parameter by then:
  pass it `optax.set_to_zero()`, and the real one here, and it holds no memory.

  Args:
    progressive: a `StagePlan`, a `ProgressiveConfig`, or a mapping of their
      fields; None reads it from the trainer's `TrainingConfig`.
    optimizer: see `ProgressiveDistillationTrainer`; None takes the one that the
      trainer was made with, which must let the plan set its rate
      (`optax.inject_hyperparams`) where a stage names one.
    strategy: of a plain `PeftTrainer`, together with `teacher_model`.
    teacher_model: likewise.

  Raises:
    ValueError: a bad section; from the callbacks: training without `attach`.
  """

  def __init__(
      self,
      progressive: (
          stages.StagePlan | config_lib.ProgressiveConfig
          | Mapping[str, Any] | None
      ) = None,
      *,
      optimizer: optimizer_lib.Argument | None = None,
      strategy: strategies.BaseStrategy | None = None,
      teacher_model: nnx.Module | None = None,
  ):
    """See the class."""
    self._section = config_lib.as_progressive(progressive)
    self._optimizer = optimizer
    self._strategy = strategy
    self._teacher_model = teacher_model
    self._trainer: Any = None
    self._engine: engine_lib.Engine | None = None
    self._is_off = False

  def attach(
      self, trainer: peft_trainer.PeftTrainer
  ) -> "ProgressiveFreezingHook":
    """Lends the engine to `trainer`, and restores its last checkpoint.

    Where the section says `enabled: false` the trainer stays Tunix's.

    Args:
      trainer: right after its constructor.

    Returns:
      The hook, so that `with_training_hooks(hook.attach(trainer))` reads well;
      a trainer needs it there only to be told when it was not attached.

    Raises:
      ValueError: the trainer cannot be attached to, there is no plan, or the
        arguments cannot work together.
    """
    if self._trainer is not None and attach_lib.is_attached(self._trainer):
      raise errors.invalid(
          "trainer", "must be the hook's only one", "a second trainer",
          "make a hook for each",
      )
    section = self._section or config_lib.as_progressive(
        getattr(getattr(trainer, "config", None), "progressive", None)
    )
    if section is None:
      raise errors.invalid(
          "progressive", "must be given to the hook or to the trainer's "
          "TrainingConfig", None, "pass StagePlan(stages=(...))",
      )
    self._trainer, self._is_off = trainer, not section.enabled
    if self._is_off:
      logging.info("progressive.enabled is false: the trainer stays Tunix's.")
      return self
    self._engine = attach_lib.attach(
        trainer, section, optimizer=self._optimizer, strategy=self._strategy,
        teacher_model=self._teacher_model,
    )
    return self

  def detach(self) -> None:
    """Gives the trainer back as it was; its weights and its count stay."""
    if self._trainer is not None:
      attach_lib.detach(self._trainer)

  @property
  def engine(self) -> engine_lib.Engine | None:
    """The engine of the last `attach`; also after the end of the run."""
    return self._engine

  def on_train_start(self, train_ctx: Any) -> None:
    """Raises ValueError unless `train_ctx` is attached."""
    self._check(train_ctx)

  def on_train_step_start(self, train_ctx: Any) -> None:
    """Raises ValueError unless `train_ctx` is attached."""
    self._check(train_ctx)

  def on_train_step_end(
      self, train_ctx: Any, train_step: int, train_loss: float
  ) -> None:
    """Does nothing: stages never follow the events of a loop."""

  def on_train_end(self, train_ctx: Any) -> None:
    """Does nothing."""

  def on_eval_step_start(self, train_ctx: Any) -> None:
    """Does nothing."""

  def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
    """Does nothing."""

  def _check(self, trainer: Any) -> None:
    if self._is_off and trainer is self._trainer:
      return
    if not (trainer is self._trainer and attach_lib.is_attached(trainer)):
      raise errors.invalid(
          "hook", "must be attached to the trainer that it is given to",
          "no attach", "call hook.attach(trainer) before trainer.train(...)",
      )
