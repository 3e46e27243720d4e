"""The losses a few tokens at a time: the default.

The values and gradients of `reference`, but
  - no temporary of the size of the logits: a block of tokens is widened to
    float32, reduced, and gone;
  - the gradient is made together with the value, while the block's
    exponentials are at hand. It is an output of the size and dtype of the
    student's logits, and the backward pass only scales it.

Gradients flow to the student's logits alone: teacher, labels, weights,
temperature and alpha are constants. There is no second derivative.

One-hot label rows are told by their ids, see `labels`.
"""

from collections.abc import Callable
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import ArrayLike
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

from tunix_progdistill.kernels import blocks
from tunix_progdistill.kernels import closed_form
from tunix_progdistill.kernels import labels as one_hot
from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import shapes

Weights = Bool[Array, "*N"] | Float[Array, "*N"]

# From so many columns on, one-hot rows are told by their ids: it pays, for two
# programs to compile.
_WIDE = 2**12


def forward_kl(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    temperature: ArrayLike = 1.0,
    where: Bool[Array, "*N"],
    block_tokens: int | None = None,
) -> Float[Array, "*N"]:
  """`reference.forward_kl`, a block at a time."""
  shapes.check(student, teacher=teacher, tokens=where)
  shapes.check_scalars(temperature=temperature)
  return _divergence(
      closed_form.forward_kl, student, teacher, where, block_tokens,
      temperature,
  )


def reverse_kl(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    temperature: ArrayLike = 1.0,
    where: Bool[Array, "*N"],
    block_tokens: int | None = None,
) -> Float[Array, "*N"]:
  """`reference.reverse_kl`, a block at a time."""
  shapes.check(student, teacher=teacher, tokens=where)
  shapes.check_scalars(temperature=temperature)
  return _divergence(
      closed_form.reverse_kl, student, teacher, where, block_tokens,
      temperature,
  )


def jsd(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    beta: ArrayLike = 0.5,
    temperature: ArrayLike = 1.0,
    where: Bool[Array, "*N"],
    block_tokens: int | None = None,
) -> Float[Array, "*N"]:
  """`reference.jsd`, a block at a time."""
  shapes.check(student, teacher=teacher, tokens=where)
  shapes.check_scalars(temperature=temperature, beta=beta)
  return _divergence(
      closed_form.jsd, student, teacher, where, block_tokens, temperature, beta
  )


def mse(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    where: Bool[Array, "*N"],
    block_tokens: int | None = None,
) -> Float[Array, "*N"]:
  """`reference.mse`, a block at a time."""
  shapes.check(student, teacher=teacher, tokens=where)
  return _divergence(closed_form.mse, student, teacher, where, block_tokens)


def cross_entropy(
    logits: Float[Array, "*N V"],
    labels: Int[Array, "*N"] | Float[Array, "*N V"],
    *,
    where: Bool[Array, "*N"],
    block_tokens: int | None = None,
) -> Float[Array, "*N"]:
  """`reference.cross_entropy`, a block at a time."""
  shapes.check(logits, tokens=where, labels=labels)
  return _divergence(
      closed_form.cross_entropy, logits, labels, where, block_tokens
  )


def distillation(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    labels: Int[Array, "*N"] | Float[Array, "*N V"],
    *,
    temperature: ArrayLike,
    alpha: ArrayLike,
    weights: Weights,
    label_ids: Int[Array, "*N"] | None = None,
    kl_div_tau1: bool = False,
    teacher_ce: bool = False,
    block_tokens: int | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, "*N"]]]:
  """The whole loss of a training step, in one walk over the logits.

    total = sum_n w_n (alpha tau^2 KL(P_teacher || P_student)_n
                       + (1 - alpha) CE_n)

  Args:
    student: logits `[*N, V]`, float32 or bfloat16.
    teacher: logits `[*N, V]`.
    labels: ids `[*N]`, or rows `[*N, V]` (one-hot, soft or smoothed).
    temperature: tau > 0; may be traced.
    alpha: weight of the soft loss in [0, 1]; may be traced.
    weights: of the tokens, `[*N]`; a bool counts as 0 or 1. A token of weight 0
      is never looked at: NaN may stand there.
    label_ids: what `labels.ids` says of label rows, where it is known already.
    kl_div_tau1: also the KL at temperature 1.
    teacher_ce: also the teacher's cross-entropy.
    block_tokens: tokens of a block; None for `blocks.tokens_per_block(V)`.

  Returns:
    The total, float32 [], whose gradient has the student's dtype, and per-token
    values without weights and without gradient, each `[*N]` and 0 where the
    weight is 0: `kl`, `ce`, and `kl_div_tau1` and `teacher_ce` where they were
    asked for.

  >>> s, t = jnp.zeros((1, 3)), jnp.array([[1., 0., 0.]])
  >>> total, values = distillation(
  ...     s, t, jnp.array([2]), temperature=1.0, alpha=0.5,
  ...     weights=jnp.array([True]))
  >>> f"{total:.4f} {values['kl'][0]:.4f} {values['ce'][0]:.4f}"
  '0.6109 0.1233 1.0986'
  """
  shapes.check(student, teacher=teacher, tokens=weights, labels=labels)
  shapes.check_scalars(temperature=temperature, alpha=alpha)
  total, values = _distillation(
      (kl_div_tau1, teacher_ce, block_tokens), student, teacher,
      _labels(labels, label_ids, student.shape), weights.astype(jnp.float32),
      jnp.asarray(temperature, jnp.float32), jnp.asarray(alpha, jnp.float32),
  )
  return total, lax.stop_gradient(values)


def token_values(
    rule: Callable[..., Any],
    *arrays: Array,
    where: Bool[Array, "*N"],
    block_tokens: int | None = None,
) -> Any:
  """`rule(*blocks, where=block)`, a block at a time, without gradient.

  Args:
    rule: gives a pytree of values per token.
    *arrays: `[*N, V]` or `[*N]`; the first one has a vocabulary.
    where: handed to the rule.
    block_tokens: tokens of a block.

  Returns:
    The rule's pytree, each leaf `[*N]`.
  """
  step = lambda *blocks: rule(*blocks[:-1], where=blocks[-1])
  arrays = tuple(map(lax.stop_gradient, arrays))
  return blocks.by_blocks(step, arrays[0].shape, (*arrays, where), block_tokens)


class _Rows(NamedTuple):
  """Label rows, and the ids of those that are one-hot."""

  rows: Float[Array, "*N V"]
  ids: Int[Array, "*N"]


def _labels(labels, ids, shape):
  if labels.ndim < len(shape) or shape[-1] < _WIDE:
    return labels
  return _Rows(labels, one_hot.ids(labels) if ids is None else ids)


# -- gradient made in the forward pass


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _distillation(options, student, teacher, labels, weights, tau, alpha):
  total, values, _ = _distill(
      options, False, student, teacher, labels, weights, tau, alpha
  )
  return total, values


def _distill(
    options, with_gradient, student, teacher, labels, weights, tau, alpha
):
  """Total, values and (where asked for) the gradient."""
  walk = functools.partial(
      _walk, options, with_gradient, student, teacher, weights, tau, alpha
  )
  if not isinstance(labels, _Rows):
    values, gradient = walk(labels)
  else:
    known = (labels.ids >= 0) & (labels.ids < student.shape[-1])
    values, gradient = lax.cond(
        jnp.all(known | (weights == 0)),
        lambda: walk(jnp.where(known, labels.ids, 0)),
        lambda: walk(labels.rows),
    )
  total = closed_form.weighted_total(values, weights, tau, alpha)
  return total, values, gradient


def _walk(
    options, with_gradient, student, teacher, weights, tau, alpha, labels
):
  """Values and gradient, block by block."""
  kl_div_tau1, teacher_ce, block_tokens = options

  def step(s, t, y, w):
    on = w != 0
    out = closed_form.distillation(
        reduce.blank(s, on), reduce.blank(t, on), reduce.blank_labels(y, on),
        temperature=tau, alpha=alpha, kl_div_tau1=kl_div_tau1,
        teacher_ce=teacher_ce,
    )
    values = closed_form.token_values(
        out.kl, out.ce, out.kl_div_tau1, w, out.teacher_ce
    )
    if not with_gradient:
      return values, None
    gradient = closed_form.weighted(out.gradient, w)
    return values, gradient.astype(student.dtype)

  return blocks.by_blocks(
      step, student.shape, (student, teacher, labels, weights), block_tokens
  )


def _distillation_fwd(options, student, *rest):
  total, values, gradient = _distill(options, True, student, *rest)
  return (total, values), gradient


def _distillation_bwd(options, gradient, cotangents):
  del options
  scale, _ = cotangents
  return (closed_form.scaled(gradient, scale), *[None] * 5)


_distillation.defvjp(_distillation_fwd, _distillation_bwd)


def _divergence(rule, student, other, where, block_tokens, *scalars):
  scalars = tuple(jnp.asarray(x, jnp.float32) for x in scalars)
  return _values((rule, block_tokens), student, other, where, scalars)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _values(options, student, other, where, scalars):
  return _values_and_gradient(options, False, student, other, where, scalars)[0]


def _values_and_gradient(
    options, with_gradient, student, other, where, scalars
):
  rule, block_tokens = options

  def step(s, o, on):
    # Logits, ids or rows: what does not count is blank in all of them.
    value, gradient = rule(
        reduce.blank(s, on), reduce.blank_labels(o, on), *scalars
    )
    value = jnp.where(on, value, 0.0)
    if not with_gradient:
      return value, None
    gradient = jnp.where(on[..., None], gradient, 0.0)
    return value, gradient.astype(student.dtype)

  return blocks.by_blocks(
      step, student.shape, (student, other, where), block_tokens
  )


def _values_fwd(options, student, other, where, scalars):
  return _values_and_gradient(options, True, student, other, where, scalars)


def _values_bwd(options, gradient, cotangent):
  del options
  return closed_form.scaled(gradient, cotangent[..., None]), None, None, None


_values.defvjp(_values_fwd, _values_bwd)
