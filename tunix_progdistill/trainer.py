"""`ProgressiveDistillationTrainer`: Tunix's trainer over the engine."""

from collections.abc import Iterable
import copy
import time
from typing import Any

from absl import logging
from flax import nnx
import numpy as np
import optax
from tunix.distillation import distillation_trainer
from tunix.distillation import strategies
from tunix.distillation.strategies import logit
from tunix.sft import metrics_logger as metrics_logger_lib
from tunix.sft import peft_trainer
from tunix.sft import sharding_utils
from tunix.sft import utils as sft_utils

from tunix_progdistill import config as config_lib
from tunix_progdistill import errors
from tunix_progdistill import families
from tunix_progdistill import modules
from tunix_progdistill import strategy as strategy_lib
from tunix_progdistill.engine import batches
from tunix_progdistill.engine import checkpoints
from tunix_progdistill.engine import dispatch
from tunix_progdistill.engine import engine as engine_lib
from tunix_progdistill.engine import optimizer as optimizer_lib
from tunix_progdistill.engine import resume
from tunix_progdistill.monitor import records
from tunix_progdistill.objectives import foreign
from tunix_progdistill.plan import stages
from tunix_progdistill.plan import state as state_lib
from tunix_progdistill.teachers import online

Mode = metrics_logger_lib.Mode


class ProgressiveDistillationTrainer(distillation_trainer.DistillationTrainer):
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
    for name, value, kind in (
        ("student_model", student_model, nnx.Module),
        ("teacher_model", teacher_model, nnx.Module),
        ("strategy", strategy, strategies.BaseStrategy),
        ("training_config", training_config, peft_trainer.TrainingConfig),
    ):
      if not isinstance(value, kind):
        raise errors.invalid(
            name, f"must be a {kind.__name__}", type(value).__name__,
            "see the class's docstring",
        )
    training_config = _checked(training_config)
    wrt = (
        nnx.LoRAParam if sft_utils.is_lora_enabled(student_model)
        else nnx.Param
    )
    _check_apart(student_model, teacher_model, wrt)
    # Before the engine looks at the student: a strategy may wrap its modules.
    student_model, teacher_model = strategy.pre_process_models(
        student_model, teacher_model
    )
    families.check_pair(student_model, teacher_model)
    checkpoints.check_writable(training_config.checkpoint_root_directory)
    section = config_lib.as_progressive(
        getattr(training_config, "progressive", None)
    ) or config_lib.ProgressiveConfig(
        plan=stages.StagePlan(stages=(stages.Stage(),))
    )
    accumulation = training_config.get_with_default(
        "gradient_accumulation_steps", 1
    )
    if type(strategy) is logit.LogitStrategy:  # a subclass has its own loss
      strategy = strategy_lib.ProgressiveLogitStrategy.adopt(strategy)
    ours = isinstance(strategy, strategy_lib.ProgressiveLogitStrategy)
    if not ours:
      _check_no_scalars(section.plan, strategy)
    defaults = (
        {"temperature": strategy.temperature, "alpha": strategy.alpha}
        if ours else {}
    )
    plan = section.plan.resolve(
        updates_per_epoch=section.epoch_updates(accumulation),
        max_steps=training_config.max_steps,
        **defaults,
    )
    training_config = _with_length(training_config, plan.updates)

    self._engine = engine_lib.Engine(
        model=student_model,
        plan=plan,
        optimizer=optimizer_lib.understand(
            optimizer,
            stages_with_rate=[s.learning_rate is not None for s in plan.stages],
        ),
        objective=(
            strategy_lib.LogitObjective(
                strategy, kl_div_tau1=section.log_kl_div_tau1
            )
            if ours else foreign.ForeignObjective(strategy)
        ),
        wrt=wrt,
        accumulation=accumulation,
        max_grad_norm=section.max_grad_norm,
    )
    self._fingerprint = resume.fingerprint(
        plan,
        accumulation=accumulation,
        max_grad_norm=section.max_grad_norm,
        optimizer=self._engine.optimizer_spec,
    )
    self._teacher = online.OnlineTeacher(
        strategy.teacher_logits if ours else strategy.get_teacher_outputs
    )
    self._batch_shape: batches.Shape | None = None
    self._eval_sums: records.EvalSums = records.EvalSums()
    self._meter = records.TokenMeter()
    self._skip_jit = False
    self._logged_rate: Any = None
    self._accumulation = accumulation
    self._reads_scalars = ours
    # Optimizer and accumulation are the engine's: what Tunix's constructor
    # builds for them must hold no memory. It gets the real config back in the
    # setter of `checkpoint_manager`.
    self._real_config = training_config
    bare = copy.copy(training_config)
    bare.gradient_accumulation_steps = None
    super().__init__(
        student_model, teacher_model, _Wrapped(), optax.set_to_zero(), bare
    )
    self.strategy = strategy
    self.gen_model_input_fn = _model_inputs
    if hasattr(self, "grad_accumulator"):
      self.grad_accumulator = None

  # -- what Tunix's constructor assigns, in this order

  @property
  def optimizer(self) -> Any:
    """The optimizer of the current stage."""
    return self._engine.optimizer

  @optimizer.setter
  def optimizer(self, value: nnx.Optimizer) -> None:
    del value  # Tunix's, over every parameter; ours is built by the engine

  @property
  def checkpoint_manager(self) -> resume.RunCheckpoints:
    """Tunix's manager, with the run's state; see `engine.checkpoints`."""
    return self._checkpoint_manager

  @checkpoint_manager.setter
  def checkpoint_manager(self, value: Any) -> None:
    value.close()
    self.config = self._real_config
    self._checkpoint_manager = resume.RunCheckpoints(
        self.config.checkpoint_root_directory,
        self.config.checkpointing_options,
        engine=self._engine,
        fingerprint=self._fingerprint,
        user_metadata=self.custom_checkpoint_metadata,
    )

  # -- the run

  @property
  def engine(self) -> engine_lib.Engine:
    """The engine: its plan, its stage, what each stage costs."""
    return self._engine

  def record_event(self, kind: str, value: float = 1.0) -> None:
    """Deviates from the plan from the next update on; saved and resumed.

    Args:
      kind: "advance" ends the current stage; "scale_rate" multiplies the rate.
      value: the factor of "scale_rate".

    Raises:
      ValueError: it could have no effect.
    """
    last = len(self._engine.plan.stages) - 1
    if kind == state_lib.ADVANCE and self._engine.stage == last:
      raise errors.invalid(
          "kind", "must not be advance in the last stage", kind,
          "end the run instead",
      )
    if kind == state_lib.SCALE_RATE and not any(
        s.learning_rate for s in self._engine.plan.stages
    ):
      raise errors.invalid(
          "kind", "must not be scale_rate where the plan sets no rate", kind,
          "set learning_rate in the plan",
      )
    open_window = self.iter_steps % self._accumulation != 0
    self._engine.record(
        state_lib.Event(
            update=self.train_steps + open_window, kind=kind, value=value
        )
    )

  def train(
      self,
      train_ds: Iterable[Any],
      eval_ds: Iterable[Any] | None = None,
      skip_jit: bool = False,
      *,
      cache_nnx_graph: bool = True,
  ) -> None:
    """Runs all stages; see Tunix's `train`.

    Args:
      train_ds: batches, in the same order at every call; a resumed run skips
        those that it has trained on.
      eval_ds: batches of held-out data, read anew at every evaluation.
      skip_jit: run the train step operation by operation, for debugging.
      cache_nnx_graph: taken for compatibility; the engine's steps need none.

    Raises:
      ValueError: there is no batch at all, or `eval_ds` is an iterator.
    """
    if eval_ds is not None and iter(eval_ds) is eval_ds:
      raise errors.invalid(
          "eval_ds", "must be readable anew at every evaluation",
          type(eval_ds).__name__, "pass a list, or an object whose __iter__ "
          "starts again",
      )
    self._skip_jit = skip_jit
    planned = self._engine.plan.updates
    hooks = self.data_hooks  # type: ignore[has-type]
    if hooks is not None:
      self.data_hooks = batches.CompleteWindowsHooks(hooks, self._accumulation)
    # Tunix skips no batch where somebody else counts them.
    fillers = (
        0 if self.is_managed_externally else self._engine.run_state.fillers
    )
    self._meter.restart()
    try:
      super().train(
          batches.complete_windows(train_ds, self._accumulation, fillers)
          if hooks is None else train_ds,
          eval_ds,
          cache_nnx_graph=cache_nnx_graph,
      )
    finally:
      self.data_hooks = hooks
    wanted = self.config.max_steps or planned
    if wanted is not None and self.train_steps < wanted:
      logging.warning(
          "The data ended at update %d of %d; repeat it, or shorten the plan.",
          self.train_steps, wanted,
      )

  def jit_train_and_eval_step(
      self, skip_jit: bool = False, cache_nnx_graph: bool = False
  ):
    """The engine's steps, in the form that Tunix's loop calls."""
    del skip_jit, cache_nnx_graph
    dispatcher = dispatch.Dispatcher(
        self._train_micro_batch,
        lambda: (self.iter_steps + 1) % self._accumulation == 0,
        lambda: sum(self._engine.compiles),
    )
    return dispatcher, self._eval_batch

  def _prepare_inputs(self, input_data: Any) -> batches.Prepared:
    """The model's inputs, whole, and the teacher's outputs for them.

    Also in evaluation, where Tunix leaves the teacher out.
    """
    if isinstance(input_data, batches.Filler):
      assert self._batch_shape is not None  # a window begins with a batch
      self._engine.run_state = self._engine.run_state.with_filler()
      return self._batch_shape.empty()
    if isinstance(input_data, dict):
      input_data = _Batch(input_data)
    inputs = self.gen_model_input_fn(input_data)["inputs"]
    # On the mesh first, so that the teacher runs on each device's rows.
    inputs = sharding_utils.shard_input(
        inputs, self.config.data_sharding_axis
    )
    prepared = batches.Prepared(
        inputs=inputs,
        teacher_output=self._teacher(self.teacher_model, inputs),
        weight=np.float32(1.0),
    )
    if self._mode == Mode.TRAIN and self._accumulation > 1:
      self._batch_shape = batches.Shape(prepared)
    return prepared

  def _train_micro_batch(self, batch: batches.Prepared, is_update: bool):
    report = self._engine.train_step(
        batch, self.train_steps, is_update, jit=not self._skip_jit
    )
    return report.loss, report, report.grad_norm

  def _eval_batch(self, batch: batches.Prepared):
    out = self._engine.eval_step(batch)
    # Tunix hands the sum of these to `on_eval_step_end`: give it increments of
    # the token-weighted mean, so that their sum is that mean.
    return self._eval_sums.add(out), None

  # -- what is logged

  def _post_process_train_step(self, aux: Any) -> None:
    """Replaces Tunix's list of micro-batch losses by the window's record."""
    self._buffered_train_metrics.losses = [aux.loss]
    self._buffered_train_metrics.additional_metrics = records.train_record(
        aux,
        self._engine.plan.scalars(
            self.train_steps, self._engine.run_state.events
        ),
        self._engine.trainable_parameters(self._engine.stage),
        reads_scalars=self._reads_scalars,
    )

  def _write_metrics(self, metrics_buffer: Any) -> None:
    metrics = metrics_buffer.additional_metrics
    if self._mode == Mode.TRAIN:
      metrics.update(self._meter.read(metrics))
      records.warn_if_lost(metrics, metrics_buffer.step)
      self._logged_rate = records.pop_rate(metrics)
    else:
      loss, evaluation = self._eval_sums.finish()
      metrics_buffer.losses = [loss]
      metrics_buffer.additional_metrics = evaluation
      self._logged_rate = None
    super()._write_metrics(metrics_buffer)

  def _try_get_learning_rate(self) -> Any:
    """The rate of the update that is being written, not of the next one."""
    return self._logged_rate

  def _run_eval(self, *args: Any, **kwargs: Any) -> None:
    self._eval_sums = records.EvalSums()
    began = time.perf_counter()
    super()._run_eval(*args, **kwargs)
    self._meter.pause(time.perf_counter() - began)

  @property
  def _tqdm_train_metrics(self) -> list[str]:
    return ["loss", "perplexity", "distill/kl_div", "progressive/stage"]


class _Wrapped:
  """Stands for a strategy that has pre-processed its models already."""

  def pre_process_models(self, student: Any, teacher: Any) -> tuple[Any, Any]:
    return student, teacher


def _check_no_scalars(plan: stages.StagePlan, strategy: Any) -> None:
  """Raises ValueError where the plan sets what the strategy cannot read."""
  for owner, where in (
      (plan, ""), *((s, f"stages[{i}].") for i, s in enumerate(plan.stages))
  ):
    for field in ("temperature", "alpha"):
      if (value := getattr(owner, field)) is not None:
        raise errors.invalid(
            f"{where}{field}",
            f"must not be set, for {type(strategy).__name__} does not read it",
            value, "leave it out, or pass a ProgressiveLogitStrategy",
        )


class _Batch(dict):
  """A dict batch, as grain gives it, with attributes as in TrainingInput."""

  def __getattr__(self, name: str) -> Any:
    if name not in self:
      raise AttributeError(
          f"batch must hold {name!r}, got {sorted(self)}; add it, or pass "
          "with_gen_model_input_fn"
      )
    return self[name]


def _model_inputs(batch: Any) -> dict[str, Any]:
  """Tokens and mask, as in Tunix, and a loss mask where the batch has one."""
  inputs = {"input_tokens": batch.input_tokens, "input_mask": batch.input_mask}
  if (loss_mask := getattr(batch, "loss_mask", None)) is not None:
    inputs["loss_mask"] = loss_mask
  return {"inputs": inputs}


def _check_apart(
    student: nnx.Module, teacher: nnx.Module, wrt: nnx.filterlib.Filter
) -> None:
  """Raises ValueError where training the student would change the teacher.

  Sharing arrays is fine, and so are variables that never train (the base of a
  LoRA student).
  """
  moving = nnx.Any(wrt, nnx.Not(nnx.Param))
  ours = {id(v): n for n, v in modules.LiveVariables(student, moving)}
  shared = [ours[id(v)] for _, v in modules.LiveVariables(teacher)
            if id(v) in ours]
  if shared:
    raise errors.invalid(
        "teacher_model", "must not share variables with student_model",
        shared[:3], "pass a copy: nnx.clone(teacher_model)",
    )


def _checked(
    config: distillation_trainer.TrainingConfig,
) -> distillation_trainer.TrainingConfig:
  """The config with its counts as Python ints.

  Raises:
    ValueError: a count that is none.
  """
  config = copy.copy(config)
  for field, optional in (
      ("max_steps", True), ("gradient_accumulation_steps", True),
      ("eval_every_n_steps", False),
  ):
    value = errors.plain(getattr(config, field))
    setattr(config, field, value)
    if value is None and optional:
      continue
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
      raise errors.invalid(
          field, "must be >= 1 and a whole number", value,
          "leave it out" if optional else "evaluate e.g. every 100 updates",
      )
  if config.checkpoint_root_directory == "":
    raise errors.invalid(
        "checkpoint_root_directory", "must name a folder", "", "leave it out"
    )
  return config


def _with_length(
    config: distillation_trainer.TrainingConfig, planned: int | None
) -> distillation_trainer.TrainingConfig:
  """The config with the plan's length as `max_steps`, where it has none."""
  if planned is None:
    return config
  if config.max_steps is None:
    config = copy.copy(config)
    config.max_steps = planned
  elif config.max_steps < planned:
    logging.warning(
        "max_steps=%d ends the run before the plan's %d updates.",
        config.max_steps, planned,
    )
  elif config.max_steps > planned:
    logging.warning(
        "max_steps=%d is more than the plan's %d updates: its last stage goes "
        "on.", config.max_steps, planned,
    )
  return config
