"""`ProgressiveLogitStrategy`: logit distillation over valid tokens."""

from collections.abc import Callable
from collections.abc import Mapping
import copy
from typing import Any
from typing import Self
import weakref

from absl import logging
import flax
from flax import nnx
import jax
import jax.numpy as jnp
from tunix.distillation.strategies import logit

from tunix_progdistill import errors
from tunix_progdistill import families
from tunix_progdistill import modules
from tunix_progdistill import outputs
from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import shapes
from tunix_progdistill.objectives import fused
from tunix_progdistill.objectives import logits as logit_objective
from tunix_progdistill.objectives import terms
from tunix_progdistill.plan import schedules

# The kernels of the loss.
CHUNKED, TUNIX = "chunked", "tunix"


@flax.struct.dataclass
class ScheduledOutput:
  """Teacher logits with the scalars of the update that they are for.

  On a trainer that is not ours, what `get_teacher_outputs` returns is the only
  argument of the compiled step that a strategy controls: scalars that travel
  in it change without a recompile.
  """

  logits: jax.Array
  temperature: jax.Array
  alpha: jax.Array


class ProgressiveLogitStrategy(logit.LogitStrategy):
  """Logit distillation over valid tokens, with schedules.

    loss = alpha tau^2 KL(P_teacher || P_student) + (1 - alpha) CE

  averaged over the valid tokens: those whose label is not empty (an all-zero
  row, or a negative id) and that `loss_mask_fn`, where given, keeps. Takes
  every argument of Tunix's `LogitStrategy`, in its order.

  Under `ProgressiveDistillationTrainer` the plan's temperature and alpha win;
  these are its defaults. In an unmodified Tunix trainer a schedule follows the
  trainer's updates once `bind(trainer)` has been called, and until then the
  strategy's own count of training batches.

  Args:
    student_forward_fn: `(model, **inputs) -> logits [B, T, V]`.
    teacher_forward_fn: likewise, for the teacher.
    labels_fn: `(**inputs) ->` rows `[B, T, V]` (one-hot, soft or smoothed), or
      integer ids `[B, T]` with a negative id where a token is to be ignored.
    temperature: tau > 0, or a schedule over optimizer updates.
    alpha: weight of the soft loss in [0, 1], or a schedule likewise.
    distill_top_k: if > 0, the KL is over the teacher's k largest entries.
    loss_mask_fn: `(**inputs) -> [B, T]`, non-zero where a token counts.
    student_hidden_fn: `(model, **inputs) -> [B, T, D]`, what the model's output
      head turns into the logits of `student_forward_fn`. With both, a trainer
      of ours can fuse the heads with the loss and never make the logits: see
      `ProgressiveConfig.fused_head`.
    teacher_hidden_fn: likewise, for the teacher.
    kernel: "chunked" is ours. "tunix" is the parent's own loss, bit for bit:
      padding counts, labels are rows, and the logits' temporaries are large.
    initial_update: in an unmodified, unbound trainer, the updates already done.
    gradient_accumulation_steps: likewise, its setting.

  Raises:
    ValueError: a value out of its range.
  """

  def __init__(
      self,
      student_forward_fn: Callable[..., jax.Array],
      teacher_forward_fn: Callable[..., jax.Array],
      labels_fn: Callable[..., jax.Array],
      temperature: schedules.Value = 2.0,
      alpha: schedules.Value = 0.5,
      distill_top_k: int = 0,
      *,
      loss_mask_fn: Callable[..., jax.Array] | None = None,
      student_hidden_fn: Callable[..., jax.Array] | None = None,
      teacher_hidden_fn: Callable[..., jax.Array] | None = None,
      kernel: str = CHUNKED,
      initial_update: int = 0,
      gradient_accumulation_steps: int = 1,
  ):
    """See the class."""
    schedules.check("temperature", temperature)
    schedules.check("alpha", alpha)
    if not isinstance(distill_top_k, int) or distill_top_k < 0:
      raise errors.invalid(
          "distill_top_k", "must be a whole number >= 0", distill_top_k,
          "0 uses the whole vocabulary",
      )
    if kernel not in (CHUNKED, TUNIX):
      raise errors.invalid(
          "kernel", f"must be {CHUNKED} or {TUNIX}", kernel,
          f"leave it out for {CHUNKED}",
      )
    if kernel == TUNIX and loss_mask_fn is not None:
      raise errors.invalid(
          "loss_mask_fn", "must be left out with kernel='tunix', whose loss "
          "counts every token", loss_mask_fn, "leave kernel out",
      )
    for field, value, least in (
        ("initial_update", initial_update, 0),
        ("gradient_accumulation_steps", gradient_accumulation_steps, 1),
    ):
      if not isinstance(value, int) or value < least:
        raise errors.invalid(
            field, f"must be a whole number >= {least}", value,
            f"leave it at {least}",
        )
    super().__init__(
        student_forward_fn,
        teacher_forward_fn,
        labels_fn,
        temperature=1.0 if callable(temperature) else temperature,
        alpha=0.5 if callable(alpha) else alpha,
        distill_top_k=distill_top_k,
    )
    self.temperature = temperature
    self.alpha = alpha
    self._loss_mask_fn = nnx.jit(loss_mask_fn) if loss_mask_fn else None
    self._student_hidden_fn = student_hidden_fn
    self._teacher_hidden_fn = teacher_hidden_fn
    self._kernel = kernel
    self._initial_update = initial_update
    self._accumulation = gradient_accumulation_steps
    self._teacher_calls = 0
    self._trainer: Callable[[], Any] = lambda: None

  @classmethod
  def adopt(cls, stock: logit.LogitStrategy) -> "ProgressiveLogitStrategy":
    """One with the functions and settings of Tunix's own `LogitStrategy`."""
    return cls(
        stock._student_forward_fn,  # pylint: disable=protected-access
        stock._teacher_forward_fn,  # pylint: disable=protected-access
        stock._labels_fn,  # pylint: disable=protected-access
        temperature=stock.temperature,
        alpha=stock.alpha,
        distill_top_k=stock.distill_top_k,
    )

  # -- the models

  def teacher_logits(
      self, teacher_model: nnx.Module, inputs: Mapping[str, Any]
  ) -> jax.Array:
    """The teacher's logits, in eval mode and without gradient."""
    with families.tracing(teacher_model):
      return super().get_teacher_outputs(
          modules.evaluating(teacher_model), dict(inputs)
      )

  def teacher_output(
      self, teacher_model: nnx.Module, inputs: Mapping[str, Any],
      heads: fused.Heads | None = None,
  ) -> jax.Array | outputs.Hidden:
    """The teacher's logits, or hidden states where the heads are fused."""
    if heads is not None and self._teacher_hidden_fn is not None:
      model = modules.evaluating(teacher_model)
      with families.tracing(model):
        states = self._teacher_hidden_fn(model, **inputs)
      shape = heads.teacher.variable(model).get_value().shape
      if heads.are_fused(states, shape[heads.teacher.layout.index("v")]):
        return outputs.Hidden(states=jax.lax.stop_gradient(states))
    return self.teacher_logits(teacher_model, inputs)

  def heads(
      self, student: nnx.Module, teacher: nnx.Module, *, always: bool
  ) -> fused.Heads:
    """The two models' output heads, for a loss without logits.

    Args:
      student: the student.
      teacher: the teacher.
      always: see `objectives.fused.Heads`.

    Raises:
      ValueError: they cannot be fused with the loss.
    """
    if None in (self._student_hidden_fn, self._teacher_hidden_fn):
      raise fused.cannot(
          "the strategy's student_hidden_fn and teacher_hidden_fn", None,
          "pass causal_lm.hidden",
      )
    if self._kernel == TUNIX:
      raise fused.cannot(
          "a kernel of ours", "kernel='tunix'", "leave kernel out"
      )
    if self.distill_top_k:
      raise fused.cannot(
          "the whole vocabulary", f"distill_top_k={self.distill_top_k}",
          "set distill_top_k=0",
      )
    return fused.Heads.of(student, teacher, always=always)

  def get_student_outputs(
      self, student_model: nnx.Module, inputs: Mapping[str, Any]
  ) -> jax.Array:
    with families.tracing(student_model):
      return super().get_student_outputs(student_model, dict(inputs))

  def _where(self, ids, inputs, weight=1.0):
    mask = self._loss_mask_fn(**inputs) if self._loss_mask_fn else None
    where = logit_objective.valid_tokens(ids, mask)
    return where & (jnp.asarray(weight) > 0)

  # -- the engine's view

  def fused_terms(
      self,
      model: nnx.Module,
      teacher: fused.Side,
      head: families.Head,
      inputs: Mapping[str, Any],
      scalars: terms.StepScalars | None = None,
      weight: jax.Array | float = 1.0,
      kl_div_tau1: bool = False,
  ) -> terms.LossTerms:
    """The loss, or without scalars the evaluation; see `objectives.fused`."""
    assert self._student_hidden_fn is not None  # `heads` saw to it
    with families.tracing(model):
      states = self._student_hidden_fn(model, **inputs)
    student = fused.Side(states, head.variable(model).get_value(), head)
    labels = self._labels_fn(**inputs)
    fused.check_labels(labels, states.shape[:-1])
    where = self._where(labels, inputs, weight)
    if scalars is None:
      return fused.eval_terms(student, teacher, labels, where=where)
    return fused.train_terms(
        student, teacher, labels, where=where, temperature=scalars.temperature,
        alpha=scalars.alpha, kl_div_tau1=kl_div_tau1,
    )

  def train_terms(
      self,
      model: nnx.Module,
      teacher_output: jax.Array,
      inputs: Mapping[str, Any],
      scalars: terms.StepScalars,
      weight: jax.Array,
      kl_div_tau1: bool = False,
  ) -> terms.LossTerms:
    """The loss of one micro-batch as sums; see `objectives.logits`."""
    student = self.get_student_outputs(model, inputs)
    labels = self._labels_fn(**inputs)
    if self._kernel == TUNIX:
      loss, metrics = self._parents_loss(
          student, teacher_output, labels, scalars.temperature, scalars.alpha
      )
      return logit_objective.all_tokens(
          loss, metrics, student, teacher_output, weight=weight,
          kl_div_tau1=kl_div_tau1,
      )
    ids = logit_objective.label_ids(student, labels)
    return logit_objective.train_terms(
        student,
        teacher_output,
        labels,
        ids=ids,
        where=self._where(ids, inputs, weight),
        temperature=scalars.temperature,
        alpha=scalars.alpha,
        top_k=self.distill_top_k,
        kl_div_tau1=kl_div_tau1,
    )

  def eval_terms(
      self,
      model: nnx.Module,
      teacher_output: jax.Array,
      inputs: Mapping[str, Any],
  ) -> terms.LossTerms:
    """The evaluation of one batch as sums; see `objectives.logits`."""
    student = self.get_student_outputs(model, inputs)
    labels = self._labels_fn(**inputs)
    return logit_objective.eval_terms(
        student,
        teacher_output,
        labels,
        where=self._where(logit_objective.label_ids(student, labels), inputs),
    )

  # -- an unmodified Tunix trainer's view

  def bind(self, trainer: Any) -> Self:
    """Lets the schedules follow the updates of an unmodified trainer.

    Exact at every update, with accumulation and after a resume, for the count
    is the trainer's own.

    Args:
      trainer: Tunix's `DistillationTrainer` that this strategy was given to.

    Raises:
      ValueError: its strategy is another one.
    """
    if getattr(trainer, "strategy", None) is not self:
      raise errors.invalid(
          "trainer", "must have been made with this strategy",
          type(trainer).__name__, "pass the strategy to its constructor",
      )
    self._trainer = weakref.ref(trainer)
    return self

  def _current_update(self) -> int:
    if (trainer := self._trainer()) is not None:
      return trainer.train_steps
    update = self._initial_update + self._teacher_calls // self._accumulation
    self._teacher_calls += 1
    if callable(self.temperature) or callable(self.alpha):
      logging.log_first_n(
          logging.WARNING,
          "temperature and alpha follow this strategy's own count of training "
          "batches, and start again at initial_update=%d when the run is "
          "resumed: call strategy.bind(trainer)", 1, self._initial_update,
      )
    return update

  def get_teacher_outputs(
      self, teacher_model: nnx.Module, inputs: dict[str, jax.Array]
  ) -> ScheduledOutput | jax.Array:
    """Teacher logits and the scalars of the update that they belong to.

    The logits alone where the parent's loss reads constants.
    """
    update = self._current_update()
    logits = self.teacher_logits(teacher_model, inputs)
    if self._kernel == TUNIX and not (
        callable(self.temperature) or callable(self.alpha)
    ):
      return logits
    values = {}
    for field in ("temperature", "alpha"):
      value = schedules.evaluate(getattr(self, field), update)
      schedules.check_range(field, value)
      values[field] = jnp.float32(value)
    return ScheduledOutput(logits=logits, **values)

  def get_train_loss(
      self,
      student_model: nnx.Module,
      teacher_output: ScheduledOutput | jax.Array,
      inputs: dict[str, jax.Array],
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean over the valid tokens, and the parts as means."""
    if self._kernel == TUNIX or not isinstance(
        teacher_output, ScheduledOutput
    ):
      student = self.get_student_outputs(student_model, inputs)
      return self.compute_loss(
          student, teacher_output, self._labels_fn(**inputs)
      )
    inputs = dict(inputs)
    student = self.get_student_outputs(student_model, inputs)
    return self._mean_loss(
        student, teacher_output.logits, self._labels_fn(**inputs), inputs,
        teacher_output.temperature, teacher_output.alpha,
    )

  def get_eval_loss(
      self, student_model: nnx.Module, inputs: dict[str, jax.Array]
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The student's cross-entropy over the valid tokens."""
    student = jax.lax.stop_gradient(
        self.get_student_outputs(student_model, inputs)
    )
    labels = self._labels_fn(**inputs)
    if self._kernel == TUNIX:
      return super().compute_eval_loss(student, labels)
    ids = logit_objective.label_ids(student, labels)
    where = self._where(ids, inputs)
    return self._task_loss(student, labels, where), {}

  def compute_loss(
      self,
      student_output: jax.Array,
      teacher_output: jax.Array | ScheduledOutput,
      labels: jax.Array,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Tunix's entry point on logits: the mean over the valid tokens."""
    temperature: Any
    alpha: Any
    if isinstance(teacher_output, ScheduledOutput):
      temperature, alpha = teacher_output.temperature, teacher_output.alpha
      teacher_output = teacher_output.logits
    else:
      temperature = schedules.evaluate(self.temperature, self._initial_update)
      alpha = schedules.evaluate(self.alpha, self._initial_update)
    if self._kernel == TUNIX:
      return self._parents_loss(
          student_output, teacher_output, labels, temperature, alpha
      )
    return self._mean_loss(
        student_output, teacher_output, labels, None, temperature, alpha
    )

  def compute_eval_loss(
      self, student_output: jax.Array, labels: jax.Array
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Tunix's entry point on logits: cross-entropy over the valid tokens."""
    if self._kernel == TUNIX:
      return super().compute_eval_loss(student_output, labels)
    where = logit_objective.valid_tokens(
        logit_objective.label_ids(student_output, labels)
    )
    return self._task_loss(student_output, labels, where), {}

  def _parents_loss(self, student, teacher, labels, temperature, alpha):
    """`LogitStrategy.compute_loss` at this temperature and alpha."""
    shapes.check(student, teacher=teacher, labels=labels)
    if labels.shape != student.shape:
      raise errors.invalid(
          "labels_fn", "must give rows [B, T, V] with kernel='tunix'",
          labels.shape, "use jax.nn.one_hot, or leave kernel out",
      )
    parent = copy.copy(self)
    parent.temperature, parent.alpha = temperature, alpha
    return logit.LogitStrategy.compute_loss(parent, student, teacher, labels)

  def _mean_loss(self, student, teacher, labels, inputs, temperature, alpha):
    """The mean over the valid tokens, with the metrics that Tunix gives."""
    ids = logit_objective.label_ids(student, labels)
    if inputs is None:  # logits alone: nothing to ask `loss_mask_fn` by
      where = logit_objective.valid_tokens(ids)
    else:
      where = self._where(ids, inputs)
    out = logit_objective.train_terms(
        student,
        teacher,
        labels,
        ids=ids,
        where=where,
        temperature=jnp.float32(temperature),
        alpha=jnp.float32(alpha),
        top_k=self.distill_top_k,
        teacher_ce=True,
        mean=True,
    )
    return out.total, dict(out.parts)

  def _task_loss(self, student, labels, where) -> jax.Array:
    values = logit_objective.chunked.cross_entropy(
        student, labels, where=where
    )
    return reduce.mean(reduce.masked_sum(values, where), reduce.count(where))
