"""Value and gradient of each loss for a block of tokens, without autodiff.

What `chunked`, `linear_head` and `sharded` have in common. Blocks are float32
`[*n, V]`; every function returns values `[*n]` and their gradients by the
student's logits `[*n, V]`. With q the student's distribution, p the teacher's,
u = log q - log p and r = 1 / temperature:

  forward KL  sum p (log p - log q)               r (q - p)
  reverse KL  sum q u                             r q (u - sum q u)
  JSD_b       b KL(p || m) + (1 - b) KL(q || m)   r q (v - sum q v)
              m = b p + (1 - b) q                 v = (1 - b) log(q / m)
  MSE         mean (s' - t')^2, both centred      2 (s' - t') / V
  CE          sum labels (log z - s)              q sum labels - labels

A divergence is a sum of terms y (e^x - 1 - x), none of which can be negative:
rounding cannot take it below zero, and equal logits give exactly zero.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import ArrayLike
from jaxtyping import Float
from jaxtyping import Int

Block = Float[Array, "*n V"]
Values = Float[Array, "*n"]
ValueAndGrad = tuple[Values, Block]

# Below this |x| the direct form e^x - 1 - x loses its digits.
_NEAR = 0.1


class Distribution(NamedTuple):
  """softmax(logits) and its logarithm."""

  p: Block
  log_p: Block


def softmax(logits: Block, rate: ArrayLike = 1.0) -> Distribution:
  """softmax(rate logits), the maximum subtracted first.

  Args:
    logits: the block.
    rate: 1 / temperature, > 0.
  """
  shifted = (logits - jnp.max(logits, axis=-1, keepdims=True)) * rate
  e = jnp.exp(shifted)
  z = jnp.sum(e, axis=-1, keepdims=True)
  return Distribution(e / z, shifted - jnp.log(z))


def _bregman(weight: Block, x: Block, exp_x_weight: Block) -> Block:
  """weight (e^x - 1 - x), never negative; exp_x_weight is weight e^x.

  The remainder of the series at |x| < 0.1 is below 1e-9 of the value.
  """
  near = jnp.abs(x) < _NEAR
  series = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (
      1 / 120 + x * (1 / 720)
  ))))
  direct = jnp.maximum(exp_x_weight - weight - weight * x, 0.0)
  # A sum of 0 * inf must not come in where the weight is 0.
  return jnp.where(near, weight * series, direct)


def _kl(a: Distribution, b: Distribution) -> Values:
  """KL(a || b) = sum over a > 0 of a (e^d - 1 - d), plus b where a = 0."""
  terms = _bregman(a.p, b.log_p - a.log_p, b.p)
  return jnp.sum(jnp.where(a.p != 0, terms, b.p), axis=-1)


def forward_kl(
    student: Block, teacher: Block, temperature: ArrayLike = 1.0
) -> ValueAndGrad:
  """KL(p || q)."""
  rate = 1.0 / jnp.asarray(temperature, jnp.float32)
  q, p = softmax(student, rate), softmax(teacher, rate)
  return _kl(p, q), rate * (q.p - p.p)


def reverse_kl(
    student: Block, teacher: Block, temperature: ArrayLike = 1.0
) -> ValueAndGrad:
  """KL(q || p)."""
  rate = 1.0 / jnp.asarray(temperature, jnp.float32)
  q, p = softmax(student, rate), softmax(teacher, rate)
  value = _kl(q, p)
  return value, rate * _along(q.p, q.log_p - p.log_p)


def jsd(
    student: Block, teacher: Block, temperature: ArrayLike = 1.0,
    beta: ArrayLike = 0.5,
) -> ValueAndGrad:
  """JSD_beta(p, q), 0 < beta < 1."""
  rate = 1.0 / jnp.asarray(temperature, jnp.float32)
  q, p = softmax(student, rate), softmax(teacher, rate)
  m = Distribution(
      beta * p.p + (1.0 - beta) * q.p,
      jnp.logaddexp(jnp.log(beta) + p.log_p, jnp.log1p(-beta) + q.log_p),
  )
  value = beta * _kl(p, m) + (1.0 - beta) * _kl(q, m)
  return value, rate * (1.0 - beta) * _along(q.p, q.log_p - m.log_p)


def _along(q: Block, u: Block) -> Block:
  """q (u - sum q u): softmax's Jacobian times u, 0 where q is."""
  qu = jnp.where(q != 0, q * jnp.where(q != 0, u, 0.0), 0.0)
  return qu - q * jnp.sum(qu, axis=-1, keepdims=True)


def mse(student: Block, teacher: Block) -> ValueAndGrad:
  """Mean squared difference of the centred logits."""
  # Entries that are masked in both models say nothing.
  masked = jnp.isneginf(student) & jnp.isneginf(teacher)
  number = jnp.sum(~masked, axis=-1, keepdims=True)
  d = jnp.where(masked, 0.0, student - teacher)
  d = jnp.where(
      masked, 0.0, d - jnp.sum(d, axis=-1, keepdims=True) / number
  )
  n = number[..., 0]
  return jnp.sum(d * d, axis=-1) / n, 2.0 / number * d


def cross_entropy(
    student: Block, labels: Int[Array, "*n"] | Block
) -> ValueAndGrad:
  """-sum labels log q, of ids or of rows."""
  q = softmax(student)
  if labels.ndim == student.ndim:
    rows = labels.astype(jnp.float32)
    # 0 * -inf: a class that the label row gives no weight costs nothing.
    value = -jnp.sum(jnp.where(rows != 0, rows * q.log_p, 0.0), axis=-1)
    return value, q.p * jnp.sum(rows, axis=-1, keepdims=True) - rows
  ids = labels[..., None]
  value = -jnp.take_along_axis(q.log_p, ids, axis=-1)[..., 0]
  columns = jax.lax.broadcasted_iota(jnp.int32, student.shape, student.ndim - 1)
  return value, q.p - jnp.where(columns == ids, 1.0, 0.0)


class Distillation(NamedTuple):
  """The loss of one block and what it is made of, per token.

  Attributes:
    kl: KL(p || q) at the temperature.
    ce: cross-entropy.
    kl_div_tau1: KL(p || q) at temperature 1; None where it was not asked for.
    gradient: of alpha temperature^2 kl + (1 - alpha) ce.
  """

  kl: Values
  ce: Values
  kl_div_tau1: Values | None
  gradient: Block


def distillation(
    student: Block,
    teacher: Block,
    labels: Int[Array, "*n"] | Block,
    *,
    temperature: ArrayLike,
    alpha: ArrayLike,
    kl_div_tau1: bool = False,
) -> Distillation:
  """alpha temperature^2 KL(p || q) + (1 - alpha) CE.

  A term of weight 0 has gradient 0, whatever its value.
  """
  temperature = jnp.asarray(temperature, jnp.float32)
  alpha = jnp.asarray(alpha, jnp.float32)
  kl, d_kl = forward_kl(student, teacher, temperature)
  ce, d_ce = cross_entropy(student, labels)
  at_one = forward_kl(student, teacher)[0] if kl_div_tau1 else None
  gradient = jnp.where(alpha > 0, alpha * temperature**2 * d_kl, 0.0)
  gradient += jnp.where(alpha < 1, (1.0 - alpha) * d_ce, 0.0)
  return Distillation(kl, ce, at_one, gradient)
