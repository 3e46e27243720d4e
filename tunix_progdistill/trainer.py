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
from tunix.sft import metrics_logger as metrics_logger_lib
from tunix.sft import sharding_utils

from tunix_progdistill import errors
from tunix_progdistill.engine import batches
from tunix_progdistill.engine import dispatch
from tunix_progdistill.engine import engine as engine_lib
from tunix_progdistill.engine import optimizer as optimizer_lib
from tunix_progdistill.engine import resume
from tunix_progdistill.engine import setup
from tunix_progdistill.monitor import records
from tunix_progdistill.plan import state as state_lib

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
    parts = setup.assemble(
        student_model, teacher_model, strategy, optimizer, training_config
    )
    self._engine = parts.engine
    self._fingerprint = parts.fingerprint
    self._teacher = parts.teacher
    self._accumulation = parts.accumulation
    self._reads_scalars = parts.reads_scalars
    self._batch_shape: batches.Shape | None = None
    self._position = batches.Position()
    self._eval_sums: records.EvalSums = records.EvalSums()
    self._meter = records.TokenMeter()
    self._record_sink: records.Sink | None = None
    self._skip_jit = False
    self._logged_rate: Any = None
    # Optimizer and accumulation are the engine's: what Tunix's constructor
    # builds for them must hold no memory. It gets the real config back in the
    # setter of `checkpoint_manager`.
    self._real_config = parts.config
    bare = copy.copy(parts.config)
    bare.gradient_accumulation_steps = None
    super().__init__(
        parts.student_model, parts.teacher_model, _Wrapped(),
        optax.set_to_zero(), bare,
    )
    self.strategy = parts.strategy
    self.gen_model_input_fn = batches.model_inputs
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
        position=self._position,
        user_metadata=self.custom_checkpoint_metadata,
        before_save=self._flush_records,
    )

  # -- the run

  @property
  def engine(self) -> engine_lib.Engine:
    """The engine: its plan, its stage, what each stage costs."""
    return self._engine

  def with_record_sink(
      self, sink: records.Sink
  ) -> "ProgressiveDistillationTrainer":
    """Calls `sink(kind, update, values)` with every record.

    Args:
      sink: kind is "train" (once for every update, counted from 1, and before
        that update's checkpoint is written), "eval", or "event"; values are
        floats by their names in the logs.
    """
    self._record_sink = sink
    return self

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
    event = state_lib.Event(
        update=self.train_steps + open_window, kind=kind, value=value
    )
    self._engine.record(event)
    if self._record_sink is not None:
      self._record_sink(
          "event", event.update, {"event": kind, "value": value}
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
    managed = self.is_managed_externally
    self._meter.restart()
    try:
      super().train(
          batches.complete_windows(
              train_ds,
              self._accumulation,
              0 if managed else self._engine.run_state.fillers,
              None if managed else self._position,
              0 if managed else self.iter_steps,
          ) if hooks is None else train_ds,
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

  def evaluate(self, eval_ds: Iterable[Any]) -> dict[str, float]:
    """Evaluates the student as it is; nothing is logged.

    Args:
      eval_ds: batches of held-out data.

    Returns:
      Means over all valid tokens, by their names in the logs: `loss`,
      `distill/kl_div_tau1` and so on.

    Raises:
      ValueError: there is no batch.
    """
    sums = records.EvalSums()
    empty = True
    for batch in eval_ds:
      sums.add(self._engine.eval_step(self._prepare(batch)))
      empty = False
    if empty:
      raise errors.invalid(
          "eval_ds", "must hold at least one batch", "none",
          "check the data's path and filters",
      )
    loss, metrics = sums.finish()
    return {"loss": loss, **records.plain(metrics)}

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
    prepared = self._prepare(input_data)
    if self._mode == Mode.TRAIN and self._accumulation > 1:
      self._batch_shape = batches.Shape(prepared)
    return prepared

  def _prepare(self, input_data: Any) -> batches.Prepared:
    if isinstance(input_data, dict):
      input_data = batches.DictBatch(input_data)
    inputs = self.gen_model_input_fn(input_data)["inputs"]
    # On the mesh first, so that the teacher runs on each device's rows.
    inputs = sharding_utils.shard_input(
        inputs, self.config.data_sharding_axis
    )
    return batches.Prepared(
        inputs=inputs,
        teacher_output=self._teacher(self.teacher_model, inputs),
        weight=np.float32(1.0),
    )

  def _train_micro_batch(self, batch: batches.Prepared, is_update: bool):
    report = self._engine.train_step(
        batch, self.train_steps, is_update, jit=not self._skip_jit
    )
    self._position.commit()
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
    if self._record_sink is not None:
      rate = self._logged_rate
      self._record_sink(
          str(self._mode),
          int(metrics_buffer.step),
          {
              "loss": float(metrics_buffer.loss),
              **records.plain(metrics_buffer.additional_metrics),
              **({} if rate is None else {"learning_rate": float(rate)}),
          },
      )

  def _flush_records(self) -> None:
    """Writes the record of the last update, which Tunix keeps for the next.

    A checkpoint must not be ahead of the records: a run that goes on from it
    never comes by these updates again.
    """
    if self._prev_buffered_train_metrics is not None:
      self._write_train_metrics()

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
