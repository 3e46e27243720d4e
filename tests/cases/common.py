"""One question, asked of every path: what are the loss and its gradient?

The student is a `toys.Table`, so that a batch of tokens prescribes its logits
and the gradient of the table's row is that of the positions that use it.
"""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tunix.distillation import distillation_trainer

from tests import toys
import tunix_progdistill as tpd
from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import reference
from tunix_progdistill.kernels import topk
from tunix_progdistill.objectives import terms

# Token 0 is the pair F1, token 1 is F2 (the same logits, roles swapped).
F1, F2 = 0, 1
TEACHER = [toys.F1_TEACHER, toys.F1_STUDENT]
STUDENT = [toys.F1_STUDENT, toys.F1_TEACHER]

Inputs = Mapping[str, Any]
Answer = tuple[float, np.ndarray]


def batch(tokens, mask=None, **more) -> dict[str, np.ndarray]:
  """Inputs as a dict; `more` are further arrays of the same shape."""
  tokens = np.asarray(tokens, np.int32)
  mask = np.ones_like(tokens) if mask is None else np.asarray(mask, np.int32)
  return {"input_tokens": tokens, "input_mask": mask} | {
      k: np.asarray(v) for k, v in more.items()
  }


def as_training_input(inputs: Inputs) -> distillation_trainer.TrainingInput:
  return distillation_trainer.TrainingInput(
      input_tokens=inputs["input_tokens"], input_mask=inputs["input_mask"]
  )


def strategy(**kwargs: Any) -> tpd.ProgressiveLogitStrategy:
  """KD only at tau 1, label 0 at every valid position, unless told."""
  defaults = {
      "labels_fn": toys.identity_labels, "temperature": 1.0, "alpha": 1.0,
  }
  kwargs = defaults | kwargs
  forward = kwargs.pop("forward", toys.forward)
  return tpd.ProgressiveLogitStrategy(forward, forward, **kwargs)


def one_stage(updates: int, rate: Any = 1.0, **kwargs: Any) -> tpd.StagePlan:
  return tpd.StagePlan(
      stages=(tpd.Stage(updates=updates, learning_rate=rate, **kwargs),)
  )


def scalars(temperature: float, alpha: float) -> terms.StepScalars:
  return terms.StepScalars(
      temperature=np.float32(temperature),
      alpha=np.float32(alpha),
      learning_rate=np.float32(0.0),
  )


def everything(batch_: Any) -> dict[str, Any]:
  """A `gen_model_input_fn` that loses nothing of a dict batch."""
  names = ("input_tokens", "input_mask", "loss_mask")
  return {k: getattr(batch_, k) for k in names if hasattr(batch_, k)}


def value_and_grad(
    strategy_: tpd.ProgressiveLogitStrategy, student: nnx.Module,
    teacher: nnx.Module, inputs: Inputs, wrt: Any = nnx.Param,
) -> tuple[float, dict[str, np.ndarray]]:
  """The mean loss and its gradient by path, through `train_terms`."""
  teacher_logits = strategy_.teacher_logits(teacher, inputs)
  values = scalars(strategy_.temperature, strategy_.alpha)

  def loss(model):
    out = strategy_.train_terms(
        model, teacher_logits, inputs, values, jnp.float32(1.0)
    )
    return reduce.mean(out.total, out.count)

  value, grads = nnx.jit(
      nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))
  )(student)
  return float(value), {
      "/".join(map(str, path)): np.asarray(v.get_value())
      for path, v in nnx.to_flat_state(grads)
  }


# -- the paths: (strategy's arguments, student rows, teacher rows, inputs)


def by_kernel(kwargs, student, teacher, inputs) -> Answer:
  """The kernels alone, reduced by hand."""
  labels_fn = kwargs.get("labels_fn", toys.identity_labels)
  labels = labels_fn(**inputs)
  where = (
      labels >= 0 if labels.ndim == 2 else jnp.any(labels != 0, axis=-1)
  )
  if (mask_fn := kwargs.get("loss_mask_fn")) is not None:
    where = where & (mask_fn(**inputs) != 0)
  tau = kwargs.get("temperature", 1.0)
  alpha = kwargs.get("alpha", 1.0)
  top_k = kwargs.get("distill_top_k", 0)
  tokens = inputs["input_tokens"]
  t = jnp.asarray(teacher, jnp.float32)[tokens]

  def loss(rows):
    s = rows[tokens]
    if top_k:
      kl = topk.renormalised_kl(
          s, t, k=top_k, temperature=tau, where=where
      )
    else:
      kl = reference.forward_kl(s, t, temperature=tau, where=where)
    ce = reference.cross_entropy(s, labels, where=where)
    both = 0.0  # a term of no weight is left out: it may be infinite
    if alpha > 0:
      both += alpha * tau**2 * kl
    if alpha < 1:
      both += (1 - alpha) * ce
    return reduce.mean(reduce.masked_sum(both, where), reduce.count(where))

  value, grad = jax.jit(jax.value_and_grad(loss))(
      jnp.asarray(student, jnp.float32)
  )
  return float(value), np.asarray(grad)


def by_train_terms(kwargs, student, teacher, inputs) -> Answer:
  """What the engine calls."""
  value, grads = value_and_grad(
      strategy(**kwargs), toys.Table(student), toys.Table(teacher), inputs
  )
  return value, grads["rows"]


def by_compute_loss(kwargs, student, teacher, inputs) -> Answer:
  """Tunix's entry point on logits."""
  made = strategy(**kwargs)
  tokens = inputs["input_tokens"]
  labels = kwargs.get("labels_fn", toys.identity_labels)(**inputs)

  def loss(rows):
    t = jnp.asarray(teacher, jnp.float32)[tokens]
    return made.compute_loss(rows[tokens], t, labels)[0]

  value, grad = jax.jit(jax.value_and_grad(loss))(
      jnp.asarray(student, jnp.float32)
  )
  return float(value), np.asarray(grad)


def by_get_train_loss(kwargs, student, teacher, inputs) -> Answer:
  """What an unmodified Tunix trainer calls."""
  made = strategy(**kwargs)
  out = made.get_teacher_outputs(toys.Table(teacher), dict(inputs))
  loss = lambda model: made.get_train_loss(model, out, dict(inputs))[0]
  value, grads = nnx.jit(nnx.value_and_grad(loss))(toys.Table(student))
  return float(value), np.asarray(grads["rows"].get_value())


def by_trainer(kwargs, student, teacher, inputs) -> Answer:
  """Our trainer, one batch per update."""
  return _by_trainer(kwargs, student, teacher, [dict(inputs)])


def by_accumulation(kwargs, student, teacher, inputs) -> Answer:
  """Our trainer, one row per micro-batch."""
  rows = len(inputs["input_tokens"])
  return _by_trainer(
      kwargs, student, teacher,
      [{k: v[i : i + 1] for k, v in inputs.items()} for i in range(rows)],
  )


def _by_trainer(kwargs, student, teacher, micro_batches) -> Answer:
  model = toys.Table(student)
  before = toys.parameters(model)["rows"]
  trainer = toys.trainer(
      student=model,
      teacher=toys.Table(teacher),
      optimizer=optax.sgd,
      progressive=one_stage(1),
      strategy_fn=lambda: strategy(**kwargs),
      gradient_accumulation_steps=len(micro_batches),
  ).with_gen_model_input_fn(everything)
  trainer.train(micro_batches)
  assert trainer.train_steps == 1
  (loss,) = toys.history(trainer, "loss")
  return float(loss), before - toys.parameters(model)["rows"]


def by_stock_trainer(kwargs, student, teacher, inputs) -> Answer:
  """Our strategy in Tunix's own trainer."""
  model = toys.Table(student)
  before = toys.parameters(model)["rows"]
  trainer = distillation_trainer.DistillationTrainer(
      model,
      toys.Table(teacher),
      strategy(**kwargs),
      optax.sgd(1.0),
      distillation_trainer.TrainingConfig(
          eval_every_n_steps=1000, max_steps=1
      ),
  )
  trainer.train([as_training_input(inputs)])
  (loss,) = toys.history(trainer, "loss")
  return float(loss), before - toys.parameters(model)["rows"]


PATHS: dict[str, Callable[..., Answer]] = {
    "kernel": by_kernel,
    "compute_loss": by_compute_loss,
    "train_terms": by_train_terms,
    "get_train_loss": by_get_train_loss,
    "trainer": by_trainer,
    "accumulation": by_accumulation,
    "stock_trainer": by_stock_trainer,
}
# Those that hand all of a batch's arrays on to the strategy's functions.
WHOLE_BATCH_PATHS = {
    k: v for k, v in PATHS.items()
    if k not in ("compute_loss", "stock_trainer")
}


def softmax(x, tau: float = 1.0) -> np.ndarray:
  x = np.asarray(x, np.float64) / tau
  e = np.exp(x - x.max(axis=-1, keepdims=True))
  return e / e.sum(axis=-1, keepdims=True)


def kl(teacher, student, tau: float = 1.0) -> np.ndarray:
  """KL in float64, without tau^2."""
  p, q = softmax(teacher, tau), softmax(student, tau)
  return np.sum(p * (np.log(p) - np.log(q)), axis=-1)
