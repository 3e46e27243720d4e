"""The loss of a training step, asked of every kernel.

Each path takes logits `[B, T, V]`, labels `[B, T]` and a mask `[B, T]`, and
gives the mean of alpha tau^2 KL + (1 - alpha) CE over the valid tokens with its
gradient by the student's logits. `exact` is the same in float64 numpy.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tunix_progdistill.kernels import chunked
from tunix_progdistill.kernels import linear_head
from tunix_progdistill.kernels import pmapped
from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import reference
from tunix_progdistill.kernels import sharded

F1_TEACHER, F1_STUDENT = [2.0, 0.0, -1.0], [0.0, 1.0, 0.0]
FORWARD, REVERSE = 0.91298290, 0.98257663  # of F1
INF = np.inf


def _mean(values, where):
  return reduce.mean(reduce.masked_sum(values, where), reduce.count(where))


def _reference(student, teacher, labels, where, tau, alpha):
  kl = reference.forward_kl(student, teacher, temperature=tau, where=where)
  ce = reference.cross_entropy(student, labels, where=where)
  kl, ce = (jnp.nan_to_num(x, posinf=INF) for x in (kl, ce))
  both = jnp.where(alpha > 0, alpha * tau**2 * kl, 0.0) + jnp.where(
      alpha < 1, (1 - alpha) * ce, 0.0
  )
  return _mean(both, where)


def _chunked(student, teacher, labels, where, tau, alpha, tokens):
  total, _ = chunked.distillation(
      student, teacher, labels, temperature=tau, alpha=alpha, weights=where,
      block_tokens=tokens,
  )
  return reduce.mean(total, reduce.count(where))


def _linear_head(student, teacher, labels, where, tau, alpha, tile):
  """Hidden states that are the logits, and heads that change nothing."""
  head = jnp.eye(student.shape[-1], dtype=student.dtype)
  total, _ = linear_head.distillation(
      student, teacher, head, head, labels, temperature=tau, alpha=alpha,
      weights=where, block_tokens=4, vocabulary_tile=tile,
  )
  return reduce.mean(total, reduce.count(where))


def _sharded(student, teacher, labels, where, tau, alpha, shape):
  mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(
      jax.sharding.AxisType.Auto,
  ) * 2)
  total, _ = sharded.distillation(
      student, teacher, labels, mesh=mesh, batch_axis="data",
      vocab_axis="model", temperature=tau, alpha=alpha, weights=where,
      block_tokens=4,
  )
  return reduce.mean(total, reduce.count(where))


def _differentiated(loss, **options):
  # As a trainer calls it: temperature and alpha are arguments.
  step = jax.jit(jax.value_and_grad(functools.partial(loss, **options)))

  def path(student, teacher, labels, where, tau=1.0, alpha=1.0):
    value, grad = step(
        jnp.asarray(student), jnp.asarray(teacher), jnp.asarray(labels),
        jnp.asarray(where), np.float32(tau), np.float32(alpha),
    )
    return float(value), np.asarray(grad.astype(jnp.float32))

  return path


def _pmapped(student, teacher, labels, where, tau=1.0, alpha=1.0):
  value, grad = pmapped.distillation_value_and_grad(
      jnp.asarray(student), jnp.asarray(teacher), jnp.asarray(labels),
      temperature=np.float32(tau), alpha=np.float32(alpha),
      weights=jnp.asarray(where),
  )
  return float(value), np.asarray(grad.astype(jnp.float32))


PATHS = {
    "reference": _differentiated(_reference),
    "chunked": _differentiated(_chunked, tokens=None),
    "blocks": _differentiated(_chunked, tokens=16),
    "pmapped": _pmapped,
    **{
        f"sharded {a}x{b}": _differentiated(_sharded, shape=(a, b))
        for a, b in ((1, 8), (2, 4), (8, 1))
    },
}
# -inf times the zeros of a head that changes nothing is NaN: the heads' own
# tests cover masked columns.
FINITE_PATHS = PATHS | {
    "linear_head": _differentiated(_linear_head, tile=None),
    "tiles": _differentiated(_linear_head, tile=2),
}


def exact(student, teacher, labels, where, tau=1.0, alpha=1.0):
  """Mean loss and gradient in float64; rows outside `where` are not read."""
  student, teacher = (
      np.asarray(x).astype(np.float64) for x in (student, teacher)
  )
  grad, total, number = np.zeros_like(student), 0.0, max(np.sum(where), 1)
  for n in zip(*np.nonzero(where), strict=True):
    (log_q, q), (log_p, p), (log_q1, q1) = map(
        _softmax, (student[n] / tau, teacher[n] / tau, student[n])
    )
    on = p > 0
    kl = np.sum(p[on] * (log_p[on] - log_q[on]))
    total += alpha * tau**2 * kl if alpha else 0.0
    total += (1 - alpha) * -log_q1[labels[n]] if alpha < 1 else 0.0
    q1[labels[n]] -= 1
    grad[n] = (alpha * tau * (q - p) + (1 - alpha) * q1) / number
  return total / number, grad


def _softmax(x):
  with np.errstate(divide="ignore"):
    x = x - x.max()
    log_p = x - np.log(np.exp(x).sum())
  return log_p, np.exp(log_p)
