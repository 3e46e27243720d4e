"""Tunix's training loop, driven by the engine.

`StagedLoop` overrides what a Tunix trainer's loop calls, and nothing else. The
trainer of this package inherits from it; `attach` lends it to an instance of
Tunix's own class.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import time
from typing import Any
from typing import Self

from absl import logging
from flax import nnx
import jax
import numpy as np
from tunix.distillation import distillation_trainer
from tunix.sft import metrics_logger as metrics_logger_lib
from tunix.sft import peft_trainer
from tunix.sft import sharding_utils

from tunix_progdistill import errors
from tunix_progdistill.engine import batches
from tunix_progdistill.engine import dispatch
from tunix_progdistill.engine import engine as engine_lib
from tunix_progdistill.engine import resume
from tunix_progdistill.engine import setup
from tunix_progdistill.monitor import records
from tunix_progdistill.plan import state as state_lib

Mode = metrics_logger_lib.Mode


class Staged:
  """What the loop of one trainer keeps.

  Attributes:
    engine: the engine.
    checkpoints: None until the trainer has its folder.
    position: of the training data.
    eval_sums: of the evaluation that is going on.
    meter: of tokens per second.
    record_sink: see `StagedLoop.with_record_sink`.
    batch_shape: of the last micro-batch, where windows hold several.
    skip_jit: see `StagedLoop.train`.
    logged_rate: of the record that is being written.
  """

  def __init__(self, parts: setup.Assembly):
    self.parts = parts
    self.engine = parts.engine
    self.checkpoints: Any = None
    self.position = batches.Position()
    self.eval_sums = records.EvalSums()
    self.meter = records.TokenMeter()
    self.record_sink: records.Sink | None = None
    self.batch_shape: batches.Shape | None = None
    self.skip_jit = False
    self.logged_rate: Any = None
    self._input_fn: tuple[Any, Any] = (None, None)

  def traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled; one is remembered."""
    if function is not self._input_fn[0]:
      self._input_fn = (function, jax.jit(function))
    return self._input_fn[1]


class StagedLoop(peft_trainer.PeftTrainer):
  """The methods that Tunix's loop calls, answered by the engine."""

  _staged: Staged

  # -- what Tunix's constructor assigns, in this order

  @property
  def optimizer(self) -> Any:
    """The optimizer of the current stage."""
    return self._staged.engine.optimizer

  @optimizer.setter
  def optimizer(self, value: nnx.Optimizer) -> None:
    del value  # Tunix's, over every parameter; ours is built by the engine

  @property
  def checkpoint_manager(self) -> resume.RunCheckpoints:
    """Tunix's manager, with the run's state; see `engine.checkpoints`."""
    return self._staged.checkpoints

  @checkpoint_manager.setter
  def checkpoint_manager(self, value: Any) -> None:
    value.close()
    self._open_checkpoints()

  def _open_checkpoints(self) -> None:
    """Puts a manager of ours where Tunix's would stand."""
    self.config = self._staged.parts.config
    self._staged.checkpoints = resume.RunCheckpoints(
        self.config.checkpoint_root_directory,
        self.config.checkpointing_options,
        engine=self._staged.engine,
        fingerprint=self._staged.parts.fingerprint,
        position=self._staged.position,
        user_metadata=self.custom_checkpoint_metadata,
        before_save=self._flush_records,
    )

  # -- the run

  def clear_jit_cache(self) -> None:
    """Forgets the compiled steps, as after a change of the loss."""
    super().clear_jit_cache()
    self._staged.engine.forget_programs()

  @property
  def engine(self) -> engine_lib.Engine:
    """The engine: its plan, its stage, what each stage costs."""
    return self._staged.engine

  def with_record_sink(self, sink: records.Sink) -> Self:
    """Calls `sink(kind, update, values)` with every record.

    Args:
      sink: kind is "train" (once for every update, counted from 1, and before
        that update's checkpoint is written), "eval", or "event"; values are
        floats by their names in the logs.
    """
    self._staged.record_sink = sink
    return self

  def record_event(self, kind: str, value: float = 1.0) -> None:
    """Deviates from the plan from the next update on; saved and resumed.

    Args:
      kind: "advance" ends the current stage; "scale_rate" multiplies the rate.
      value: the factor of "scale_rate".

    Raises:
      ValueError: it could have no effect.
    """
    stages = self.engine.plan.stages
    last = len(stages) - 1
    if kind == state_lib.ADVANCE and self.engine.stage == last:
      raise errors.invalid(
          "kind", "must not be advance in the last stage", kind,
          "end the run instead",
      )
    if kind == state_lib.SCALE_RATE and not any(
        s.learning_rate for s in stages
    ):
      raise errors.invalid(
          "kind", "must not be scale_rate where the plan sets no rate", kind,
          "set learning_rate in the plan",
      )
    open_window = self.iter_steps % self._staged.parts.accumulation != 0
    event = state_lib.Event(
        update=self.train_steps + open_window, kind=kind, value=value
    )
    self.engine.record(event)
    if self._staged.record_sink is not None:
      self._staged.record_sink(
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
    staged = self._staged
    staged.skip_jit = skip_jit
    wanted = self.config.max_steps or staged.engine.plan.updates
    hooks = self.data_hooks  # type: ignore[has-type]
    accumulation = staged.parts.accumulation
    if hooks is not None:
      self.data_hooks = batches.CompleteWindowsHooks(hooks, accumulation)
    # Tunix skips no batch where somebody else counts them.
    managed = self.is_managed_externally
    staged.meter.restart()
    try:
      super().train(
          batches.complete_windows(
              train_ds,
              accumulation,
              0 if managed else staged.engine.run_state.fillers,
              None if managed else staged.position,
              0 if managed else self.iter_steps,
          ) if hooks is None else train_ds,
          eval_ds,
          cache_nnx_graph=cache_nnx_graph,
      )
    finally:
      self.data_hooks = hooks
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
      sums.add(self.engine.eval_step(self._prepare(batch)))
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
        lambda: (self.iter_steps + 1) % self._staged.parts.accumulation == 0,
        lambda: sum(self.engine.compiles),
    )
    return dispatcher, self._eval_batch

  def _prepare_inputs(self, input_data: Any) -> batches.Prepared:
    """The model's inputs, whole, and the teacher's outputs for them.

    Also in evaluation, where Tunix leaves the teacher out.
    """
    staged = self._staged
    if isinstance(input_data, batches.Filler):
      assert staged.batch_shape is not None  # a window begins with a batch
      staged.engine.run_state = staged.engine.run_state.with_filler()
      return staged.batch_shape.empty()
    prepared = self._prepare(input_data)
    if self._mode == Mode.TRAIN and staged.parts.accumulation > 1:
      staged.batch_shape = batches.Shape(prepared)
    return prepared

  def _prepare(self, input_data: Any) -> batches.Prepared:
    inputs = self._model_inputs(input_data)
    teacher, output = self._staged.parts.teacher, None
    if teacher is not None:
      output = teacher(self._teacher_model(), inputs)
    return batches.Prepared(
        inputs=inputs, teacher_output=output, weight=np.float32(1.0)
    )

  def _teacher_model(self) -> Any:
    """The trainer's own, which may be swapped; else what it was given."""
    return getattr(self, "teacher_model", self._staged.parts.teacher_model)

  def _model_inputs(self, input_data: Any) -> Mapping[str, Any]:
    """The model's inputs, on the mesh.

    A distillation trainer asks for them outside its compiled step, and the
    teacher then runs on each device's rows. A plain trainer asks inside it, so
    that its function may count on being traced.
    """
    axis = self.config.data_sharding_axis
    if not isinstance(self, distillation_trainer.DistillationTrainer):
      inputs = sharding_utils.shard_input(input_data, axis)
      return self._staged.traced(self.gen_model_input_fn)(inputs)
    if isinstance(input_data, dict):
      input_data = batches.DictBatch(input_data)
    inputs = self.gen_model_input_fn(input_data)["inputs"]
    return sharding_utils.shard_input(inputs, axis)

  def _train_micro_batch(self, batch: batches.Prepared, is_update: bool):
    report = self.engine.train_step(
        batch, self.train_steps, is_update, jit=not self._staged.skip_jit
    )
    self._staged.position.commit()
    return report.loss, report, report.grad_norm

  def _eval_batch(self, batch: batches.Prepared):
    out = self.engine.eval_step(batch)
    # Tunix hands the sum of these to `on_eval_step_end`: give it increments of
    # the token-weighted mean, so that their sum is that mean.
    return self._staged.eval_sums.add(out), None

  # -- what is logged

  def _post_process_train_step(self, aux: Any) -> None:
    """Replaces Tunix's list of micro-batch losses by the window's record."""
    engine = self.engine
    self._buffered_train_metrics.losses = [aux.loss]
    self._buffered_train_metrics.additional_metrics = records.train_record(
        aux,
        engine.plan.scalars(self.train_steps, engine.run_state.events),
        engine.trainable_parameters(engine.stage),
        reads_scalars=self._staged.parts.reads_scalars,
    )

  def _write_metrics(self, metrics_buffer: Any) -> None:
    staged, metrics = self._staged, metrics_buffer.additional_metrics
    if self._mode == Mode.TRAIN:
      metrics.update(staged.meter.read(metrics))
      records.warn_if_lost(metrics, metrics_buffer.step)
      staged.logged_rate = records.pop_rate(metrics)
    else:
      loss, evaluation = staged.eval_sums.finish()
      metrics_buffer.losses = [loss]
      metrics_buffer.additional_metrics = evaluation
      staged.logged_rate = None
    super()._write_metrics(metrics_buffer)
    if staged.record_sink is not None:
      rate = staged.logged_rate
      staged.record_sink(
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
    return self._staged.logged_rate

  def _run_eval(self, *args: Any, **kwargs: Any) -> None:
    self._staged.eval_sums = records.EvalSums()
    began = time.perf_counter()
    super()._run_eval(*args, **kwargs)
    self._staged.meter.pause(time.perf_counter() - began)

  @property
  def _tqdm_train_metrics(self) -> list[str]:
    return ["loss", "perplexity", "distill/kl_div", "progressive/stage"]
