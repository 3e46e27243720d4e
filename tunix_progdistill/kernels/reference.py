"""The readable form of every loss: one token, vmapped over all the others.

Everything is computed in float32. Each function takes logits of any leading
shape `[*N, V]` and returns unreduced values `[*N]`; the caller reduces
(`kernels.reduce`). Tokens outside `where` give 0, with gradient 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import ArrayLike
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import shapes

# Below this |log q - log p| the direct form q - p - p*d loses its digits.
_NEAR = 0.1


def _kl_token(
    student: Float[Array, " V"],
    teacher: Float[Array, " V"],
    temperature: ArrayLike,
) -> Float[Array, ""]:
  """KL(p_teacher || p_student) of one token; see `forward_kl`.

  Written as a sum of terms that are never negative: with d = log q - log p,
    KL = sum_v p (e^d - 1 - d)   over p > 0
       + sum_v q                 over p = 0.
  So rounding cannot take it below zero, and equal logits give exactly zero.
  """
  return _divergence(
      jax.nn.log_softmax(teacher / temperature),
      jax.nn.log_softmax(student / temperature),
  )


def _divergence(
    log_p: Float[Array, " V"], log_q: Float[Array, " V"]
) -> Float[Array, ""]:
  """KL(p || q) of two distributions, given by their logarithms."""
  p, q = jnp.exp(log_p), jnp.exp(log_q)
  supported = p != 0  # NaN counts: a broken teacher must show
  # Both where's: the branch that is not taken must not hold inf - inf.
  d = jnp.where(
      supported,
      jnp.where(supported, log_q, 0.0) - jnp.where(supported, log_p, 0.0),
      0.0,
  )
  near = jnp.abs(d) < _NEAR
  small = jnp.where(near, d, 0.0)
  close = p * (jnp.expm1(small) - small)
  apart = jnp.maximum(q - p - p * d, 0.0)
  return jnp.sum(jnp.where(supported, jnp.where(near, close, apart), q))


def forward_kl(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    temperature: ArrayLike = 1.0,
    where: Bool[Array, "*N"],
) -> Float[Array, "*N"]:
  """KL(P_teacher || P_student) per token, in nats.

    P = softmax(logits / temperature)
    KL = sum_v P_teacher(v) log(P_teacher(v) / P_student(v))

  Without the factor temperature^2: the soft loss adds it, the metric does not.
  Entries of -inf in both (a masked vocabulary) contribute nothing.

  Args:
    student: student logits `[*N, V]`, any float type.
    teacher: teacher logits `[*N, V]`.
    temperature: softening temperature tau > 0; may be traced.
    where: tokens that count, `[*N]`.

  Returns:
    `[*N]` float32, >= 0, 0 outside `where`; +inf where the student rules out
    what the teacher allows.

  Source: Hinton, Vinyals, Dean 2015, https://arxiv.org/abs/1503.02531.

  >>> t, s = jnp.array([[2., 0., -1.]]), jnp.array([[0., 1., 0.]])
  >>> float(forward_kl(s, t, where=jnp.array([True]))[0])  # doctest: +ELLIPSIS
  0.91298...
  """
  shapes.check(student, teacher=teacher, tokens=where)
  shapes.check_scalars(temperature=temperature)
  shape = where.shape
  flat = lambda x: reduce.blank(x, where).reshape(-1, x.shape[-1])
  values = jax.vmap(_kl_token, in_axes=(0, 0, None))(
      flat(student), flat(teacher), temperature
  )
  return jnp.where(where, values.reshape(shape), 0.0)


def reverse_kl(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    temperature: ArrayLike = 1.0,
    where: Bool[Array, "*N"],
) -> Float[Array, "*N"]:
  """KL(P_student || P_teacher) per token, in nats: `forward_kl` turned round.

  It asks the student to avoid what the teacher rules out, where the forward KL
  asks it to cover what the teacher allows.

  Source: Gu et al. 2023, MiniLLM, https://arxiv.org/abs/2306.08543.
  """
  shapes.check(student, teacher=teacher, tokens=where)
  return forward_kl(teacher, student, temperature=temperature, where=where)


def _jsd_token(
    student: Float[Array, " V"],
    teacher: Float[Array, " V"],
    temperature: ArrayLike,
    beta: Float[Array, ""],
) -> Float[Array, ""]:
  log_p = jax.nn.log_softmax(teacher / temperature)
  log_q = jax.nn.log_softmax(student / temperature)
  # Of equal distributions the mixture is one of them, bit for bit; and what
  # both rule out must have no part in the gradient.
  same = log_p == log_q
  a, b = (jnp.where(same, 0.0, x) for x in (log_p, log_q))
  mixed = jnp.logaddexp(jnp.log(beta) + a, jnp.log1p(-beta) + b)
  log_m = jnp.where(same, log_p, mixed)
  return beta * _divergence(log_p, log_m) + (1.0 - beta) * _divergence(
      log_q, log_m
  )


def jsd(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    beta: ArrayLike = 0.5,
    temperature: ArrayLike = 1.0,
    where: Bool[Array, "*N"],
) -> Float[Array, "*N"]:
  """Generalised Jensen-Shannon divergence per token, in nats.

    JSD_b = b KL(P_teacher || M) + (1 - b) KL(P_student || M)
    M = b P_teacher + (1 - b) P_student

  Args:
    student: student logits `[*N, V]`.
    teacher: teacher logits `[*N, V]`.
    beta: b in (0, 1); 0.5 is the symmetric one. JSD_b / b tends to the forward
      KL as b goes to 0, JSD_b / (1 - b) to the reverse KL as b goes to 1.
    temperature: tau > 0.
    where: tokens that count.

  Returns:
    `[*N]` float32 in [0, log 2] for b = 0.5, 0 outside `where`.

  Source: Agarwal et al. 2023, GKD, https://arxiv.org/abs/2306.13649.
  """
  shapes.check(student, teacher=teacher, tokens=where)
  shapes.check_scalars(temperature=temperature, beta=beta)
  flat = lambda x: reduce.blank(x, where).reshape(-1, x.shape[-1])
  values = jax.vmap(_jsd_token, in_axes=(0, 0, None, None))(
      flat(student), flat(teacher), temperature,
      jnp.asarray(beta, jnp.float32),
  )
  return jnp.where(where, values.reshape(where.shape), 0.0)


def _mse_token(
    student: Float[Array, " V"], teacher: Float[Array, " V"]
) -> Float[Array, ""]:
  masked = jnp.isneginf(student) & jnp.isneginf(teacher)
  number = jnp.sum(~masked)
  d = jnp.where(masked, 0.0, student) - jnp.where(masked, 0.0, teacher)
  centred = jnp.where(masked, 0.0, d - jnp.sum(d) / number)
  return jnp.sum(centred * centred) / number


def mse(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    where: Bool[Array, "*N"],
) -> Float[Array, "*N"]:
  """Mean squared difference of the centred logits, per token.

    MSE = mean_v ((s - mean s) - (t - mean t))^2

  Softmax ignores a shift per token, so the logits are centred first. Entries of
  -inf in both (a masked vocabulary) are left out.

  Returns:
    `[*N]` float32, >= 0, 0 outside `where`.

  Source: Ba and Caruana 2014, https://arxiv.org/abs/1312.6184.
  """
  shapes.check(student, teacher=teacher, tokens=where)
  flat = lambda x: reduce.blank(x, where).reshape(-1, x.shape[-1])
  values = jax.vmap(_mse_token)(flat(student), flat(teacher))
  return jnp.where(where, values.reshape(where.shape), 0.0)


def cross_entropy(
    logits: Float[Array, "*N V"],
    labels: Int[Array, "*N"] | Float[Array, "*N V"],
    *,
    where: Bool[Array, "*N"],
) -> Float[Array, "*N"]:
  """-log softmax(logits)[label] per token, in nats.

  Args:
    logits: `[*N, V]`, any float type.
    labels: integer ids `[*N]`, or dense rows `[*N, V]` (one-hot, soft or
      smoothed), for which the value is -sum_v labels(v) log softmax(logits)(v).
    where: tokens that count, `[*N]`; an id outside 0..V-1 may stand elsewhere.

  Returns:
    `[*N]` float32, 0 outside `where`.

  >>> s = jnp.array([[0., 1., 0.]])
  >>> on = jnp.array([True])
  >>> f"{cross_entropy(s, jnp.array([0]), where=on)[0]:.5f}"
  '1.55144'
  """
  shapes.check(logits, tokens=where, labels=labels)
  log_q = jax.nn.log_softmax(reduce.blank(logits, where))
  if labels.ndim == logits.ndim:
    rows = jnp.where(where[..., None], labels.astype(jnp.float32), 0.0)
    # 0 * -inf: a class that the label row gives no weight costs nothing.
    values = -jnp.sum(jnp.where(rows != 0, rows * log_q, 0.0), axis=-1)
  else:
    ids = jnp.where(where, labels, 0)
    values = -jnp.take_along_axis(log_q, ids[..., None], axis=-1)[..., 0]
  return jnp.where(where, values, 0.0)
