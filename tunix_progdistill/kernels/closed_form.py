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

from collections.abc import Callable
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
# A power of two of strips, of so many columns at least. Strips a multiple of a
# page apart would share a cache's few lines: their width is an odd multiple of
# a cache line.
_STRIPS, _NARROWEST, _LINE = 64, 8, 16


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
  top = by_strips(logits, jnp.maximum, jnp.max)
  shifted = (logits - top) * rate
  e = jnp.exp(shifted)
  z = by_strips(e, jnp.add, jnp.sum)
  return Distribution(e * (1.0 / z), shifted - jnp.log(z))


def by_strips(
    x: Block,
    combine: Callable[[Array, Array], Array],
    reduce: Callable[..., Array],
) -> Float[Array, "*n 1"]:
  """Reduces over V: strips of the row with each other, then what is left.

  XLA on a CPU combines strips many entries at a time, and adds up a row one by
  one. Elsewhere a row is reduced as it is.
  """
  width = x.shape[-1] // _STRIPS
  if width >= 4 * _LINE:
    width -= width % _LINE
    width -= _LINE * (width // _LINE % 2 == 0)
  if width < _NARROWEST or jax.default_backend() != "cpu":
    return reduce(x, axis=-1, keepdims=True)
  strips = [x[..., i * width : (i + 1) * width] for i in range(_STRIPS)]
  while len(strips) > 1:
    strips = [
        combine(a, b) for a, b in zip(strips[::2], strips[1::2], strict=True)
    ]
  rest = x[..., _STRIPS * width :]
  if rest.shape[-1]:
    return combine(
        reduce(strips[0], axis=-1, keepdims=True),
        reduce(rest, axis=-1, keepdims=True),
    )
  return reduce(strips[0], axis=-1, keepdims=True)


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


def kl(a: Distribution, b: Distribution) -> Values:
  """KL(a || b)."""
  return _divergence(a.p, b.log_p - a.log_p, b.p)


def _divergence(a: Block, d: Block, b: Block) -> Values:
  """sum over a > 0 of a (e^d - 1 - d), plus b where a = 0; d is log(b / a)."""
  terms = jnp.where(a != 0, _bregman(a, d, b), b)
  return by_strips(terms, jnp.add, jnp.sum)[..., 0]


def forward_kl(
    student: Block, teacher: Block, temperature: ArrayLike = 1.0
) -> ValueAndGrad:
  """KL(p || q)."""
  rate = 1.0 / jnp.asarray(temperature, jnp.float32)
  q, p = softmax(student, rate), softmax(teacher, rate)
  return kl(p, q), rate * (q.p - p.p)


def reverse_kl(
    student: Block, teacher: Block, temperature: ArrayLike = 1.0
) -> ValueAndGrad:
  """KL(q || p)."""
  rate = 1.0 / jnp.asarray(temperature, jnp.float32)
  q, p = softmax(student, rate), softmax(teacher, rate)
  value = kl(q, p)
  return value, rate * _along(q.p, q.log_p - p.log_p)


def jsd(
    student: Block, teacher: Block, temperature: ArrayLike = 1.0,
    beta: ArrayLike = 0.5,
) -> ValueAndGrad:
  """JSD_beta(p, q), 0 < beta < 1."""
  beta = jnp.asarray(beta, jnp.float32)
  rate = 1.0 / jnp.asarray(temperature, jnp.float32)
  q, p = softmax(student, rate), softmax(teacher, rate)
  u = q.log_p - p.log_p
  m = beta * p.p + (1.0 - beta) * q.p
  # log(m / p) and log(m / q), which are exactly 0 where p = q.
  m_p = jnp.log1p((1.0 - beta) * jnp.expm1(u))
  m_q = jnp.log1p(beta * jnp.expm1(-u))
  value = beta * _divergence(p.p, m_p, m)
  value += (1.0 - beta) * _divergence(q.p, m_q, m)
  return value, rate * (1.0 - beta) * _along(q.p, -m_q)


def _along(q: Block, u: Block) -> Block:
  """q (u - sum q u): softmax's Jacobian times u, 0 where q is.

  A shift of u changes nothing. Counted from its value at the largest q, no
  digits are lost there, where q is nearly all of the sum.
  """
  u = jnp.where(q != 0, u, 0.0)
  most = q == by_strips(q, jnp.maximum, jnp.max)
  here = by_strips(jnp.where(most, u, -jnp.inf), jnp.maximum, jnp.max)
  u = jnp.where(q != 0, u - jnp.where(jnp.isfinite(here), here, 0.0), 0.0)
  return q * (u - by_strips(q * u, jnp.add, jnp.sum))


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
  return value, q.p - jnp.where(columns(student.shape) == ids, 1.0, 0.0)


def _cross_entropy_value(
    logits: Block, labels: Int[Array, "*n"] | Block
) -> Values:
  """`cross_entropy` without its gradient: of ids, a sum and an entry a row."""
  if labels.ndim == logits.ndim:
    return cross_entropy(logits, labels)[0]
  top = by_strips(logits, jnp.maximum, jnp.max)
  z = by_strips(jnp.exp(logits - top), jnp.add, jnp.sum)
  own = jnp.take_along_axis(logits, labels[..., None], axis=-1)
  return (jnp.log(z) - (own - top))[..., 0]


def columns(shape: tuple[int, ...], start: ArrayLike = 0) -> Int[Array, "*n V"]:
  """The column of each entry, counted from `start`."""
  own = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
  return jnp.asarray(start, jnp.int32) + own


class Distillation(NamedTuple):
  """The loss of one block and what it is made of, per token.

  Attributes:
    kl: KL(p || q) at the temperature.
    ce: cross-entropy.
    kl_div_tau1: KL(p || q) at temperature 1; None where it was not asked for.
    gradient: of alpha temperature^2 kl + (1 - alpha) ce.
    teacher_ce: the teacher's cross-entropy; likewise.
  """

  kl: Values
  ce: Values
  kl_div_tau1: Values | None
  gradient: Block
  teacher_ce: Values | None = None


def distillation(
    student: Block,
    teacher: Block,
    labels: Int[Array, "*n"] | Block,
    *,
    temperature: ArrayLike,
    alpha: ArrayLike,
    kl_div_tau1: bool = False,
    teacher_ce: bool = False,
) -> Distillation:
  """alpha temperature^2 KL(p || q) + (1 - alpha) CE.

  A term of weight 0 has gradient 0, whatever its value.
  """
  temperature = jnp.asarray(temperature, jnp.float32)
  value, d_kl = forward_kl(student, teacher, temperature)
  ce, d_ce = cross_entropy(student, labels)
  at_one = forward_kl(student, teacher)[0] if kl_div_tau1 else None
  teachers = _cross_entropy_value(teacher, labels) if teacher_ce else None
  return Distillation(
      value, ce, at_one, mix(temperature**2 * d_kl, d_ce, alpha), teachers
  )


def mix(soft: Array, hard: Array, alpha: ArrayLike) -> Array:
  """alpha soft + (1 - alpha) hard; a term of weight 0 may be infinite."""
  alpha = jnp.asarray(alpha)
  return jnp.where(alpha > 0, alpha * soft, 0.0) + jnp.where(
      alpha < 1, (1.0 - alpha) * hard, 0.0
  )


def token_values(
    kl: Values, ce: Values, kl_div_tau1: Values | None, weights: Values,
    teacher_ce: Values | None = None,
) -> dict[str, Values]:
  """By name, 0 in tokens of weight 0; what was not asked for is left out."""
  values = {"kl": kl, "ce": ce}
  if kl_div_tau1 is not None:
    values["kl_div_tau1"] = kl_div_tau1
  if teacher_ce is not None:
    values["teacher_ce"] = teacher_ce
  return {k: jnp.where(weights != 0, v, 0.0) for k, v in values.items()}


def weighted(
    gradient: Block, weights: Values, counts: Array | bool = True
) -> Block:
  """w G, exactly 0 in tokens of weight 0 and in columns that do not count."""
  on = (weights != 0)[..., None] & counts
  return jnp.where(on, weights[..., None] * gradient, 0.0)


def weighted_total(
    values: dict[str, Values], weights: Values, temperature: ArrayLike,
    alpha: ArrayLike,
) -> Float[Array, ""]:
  """sum_n w_n (alpha tau^2 kl_n + (1 - alpha) ce_n) over the weights not 0."""
  weighted = lambda x: jnp.sum(jnp.where(weights != 0, weights * x, 0.0))
  soft = jnp.asarray(temperature) ** 2 * values["kl"]
  return mix(weighted(soft), weighted(values["ce"]), alpha)


def scaled(gradient: Array, scale: Array) -> Array:
  """A gradient times a cotangent, in float32, in its own dtype again."""
  return (gradient.astype(jnp.float32) * scale).astype(gradient.dtype)
