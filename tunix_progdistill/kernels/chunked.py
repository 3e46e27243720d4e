"""The losses a few tokens at a time: the default.

The values and gradients of `reference`, but
  - no temporary of the size of the logits: a block of tokens is widened to
    float32, reduced, and gone;
  - the gradient is made together with the value, while the block's
    exponentials are at hand. It is an output of the size and dtype of the
    student's logits, and the backward pass only scales it.

Gradients flow to the student's logits alone: teacher, labels, weights,
temperature and alpha are constants. There is no second derivative.

A block is sliced along the second to last axis. On one device all leading axes
are first made one; on several they stay whole, so that a batch that is spread
over devices is never gathered.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import ArrayLike
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

from tunix_progdistill.kernels import closed_form
from tunix_progdistill.kernels import reduce

Weights = Bool[Array, "*N"] | Float[Array, "*N"]

# Entries of a block: what stays in a core's cache; on an accelerator, what
# keeps it busy.
_ENTRIES_CPU = 2**17
_ENTRIES = 2**25
_FEWEST_TOKENS = 4


def tokens_per_block(vocabulary: int, entries: int | None = None) -> int:
  """How many tokens a block holds.

  Args:
    vocabulary: V.
    entries: of a block; None takes what suits the default backend.
  """
  if entries is None:
    cpu = jax.default_backend() == "cpu"
    entries = _ENTRIES_CPU if cpu else _ENTRIES
  return max(_FEWEST_TOKENS, entries // vocabulary)


def forward_kl(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    temperature: ArrayLike = 1.0,
    where: Bool[Array, "*N"],
    block_tokens: int | None = None,
) -> Float[Array, "*N"]:
  """`reference.forward_kl`, a block at a time."""
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
  return _divergence(closed_form.mse, student, teacher, where, block_tokens)


def cross_entropy(
    logits: Float[Array, "*N V"],
    labels: Int[Array, "*N"] | Float[Array, "*N V"],
    *,
    where: Bool[Array, "*N"],
    block_tokens: int | None = None,
) -> Float[Array, "*N"]:
  """`reference.cross_entropy`, a block at a time."""
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
    kl_div_tau1: bool = False,
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
    kl_div_tau1: also the KL at temperature 1.
    block_tokens: tokens of a block; None for `tokens_per_block(V)`.

  Returns:
    The total, float32 [], whose gradient has the student's dtype, and per-token
    values without weights and without gradient, each `[*N]` and 0 where the
    weight is 0: `kl`, `ce`, and `kl_div_tau1` where it was asked for.

  >>> s, t = jnp.zeros((1, 3)), jnp.array([[1., 0., 0.]])
  >>> total, values = distillation(
  ...     s, t, jnp.array([2]), temperature=1.0, alpha=0.5,
  ...     weights=jnp.array([True]))
  >>> f"{total:.4f} {values['kl'][0]:.4f} {values['ce'][0]:.4f}"
  '0.6109 0.1233 1.0986'
  """
  total, values = _distillation(
      (kl_div_tau1, block_tokens), student, teacher, labels,
      weights.astype(jnp.float32), jnp.asarray(temperature, jnp.float32),
      jnp.asarray(alpha, jnp.float32),
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
  return by_blocks(step, arrays[0].shape, (*arrays, where), block_tokens)


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
  kl_div_tau1, block_tokens = options

  def step(s, t, y, w):
    on = w != 0
    out = closed_form.distillation(
        reduce.blank(s, on), reduce.blank(t, on), reduce.blank_labels(y, on),
        temperature=tau, alpha=alpha, kl_div_tau1=kl_div_tau1,
    )
    values = closed_form.token_values(out.kl, out.ce, out.kl_div_tau1, w)
    if not with_gradient:
      return values, None
    gradient = closed_form.weighted(out.gradient, w)
    return values, gradient.astype(student.dtype)

  values, gradient = by_blocks(
      step, student.shape, (student, teacher, labels, weights), block_tokens
  )
  total = closed_form.weighted_total(values, weights, tau, alpha)
  return total, values, gradient


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

  return by_blocks(step, student.shape, (student, other, where), block_tokens)


def _values_fwd(options, student, other, where, scalars):
  return _values_and_gradient(options, True, student, other, where, scalars)


def _values_bwd(options, gradient, cotangent):
  del options
  return closed_form.scaled(gradient, cotangent[..., None]), None, None, None


_values.defvjp(_values_fwd, _values_bwd)


# -- blocks


def by_blocks(
    step: Callable[..., Any],
    shape: tuple[int, ...],
    arrays: tuple[Array, ...],
    block_tokens: int | None = None,
) -> Any:
  """`step` over blocks of tokens, its results put together.

  The last block begins earlier where the tokens do not divide: `step` must give
  the same for a token in whatever block it stands.

  Args:
    step: blocks `[r, c, V]` or `[r, c]` to a pytree of the like.
    shape: `[*N, V]`.
    arrays: `[*N, V]` or `[*N]`, each.
    block_tokens: r c, about; None for `tokens_per_block(V)`.

  Returns:
    The pytree, with `[*N]` in the place of `[r, c]`.
  """
  lead, vocabulary = shape[:-1], shape[-1]
  tokens = math.prod(lead)
  spread = jax.device_count() > 1 and len(lead) > 1 and tokens > 0
  rows = lead[0] if spread else 1
  length = tokens // rows
  wanted = block_tokens or tokens_per_block(vocabulary)
  size = max(1, wanted // rows)
  flat = [
      Bits.of(x.reshape((rows, length, *x.shape[len(lead):]))) for x in arrays
  ]
  whole = lambda x: x.reshape(*lead, *x.shape[2:])
  if size >= length:
    out = step(*[x.widened(x.bits) for x in flat])
    return jax.tree.map(whole, out)

  def block(start):
    parts = [
        x.widened(lax.dynamic_slice_in_dim(x.bits, start, size, axis=1))
        for x in flat
    ]
    return jax.tree.map(Bits.of, step(*parts))

  kinds = jax.eval_shape(block, 0)
  empty = jax.tree.map(
      lambda x: jnp.zeros((rows, length, *x.shape[2:]), x.dtype), kinds
  )

  def body(i, out):
    start = jnp.minimum(i * size, length - size)
    return jax.tree.map(
        lambda o, x: lax.dynamic_update_slice_in_dim(o, x, start, axis=1),
        out, block(start),
    )

  out = lax.fori_loop(0, -(-length // size), body, empty)
  return jax.tree.map(
      lambda x: whole(x.widened(x.bits)), out,
      is_leaf=lambda x: isinstance(x, Bits),
  )


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["bits"],
    meta_fields=["is_bfloat16"],
)
class Bits:
  """An array that a loop carries; bfloat16 as uint16.

  XLA on a CPU widens bfloat16 in a loop to float32, whole arrays of it.
  """

  def __init__(self, bits: Array, is_bfloat16: bool):
    self.bits, self.is_bfloat16 = bits, is_bfloat16

  @classmethod
  def of(cls, array: Array) -> "Bits":
    if array.dtype != jnp.bfloat16:
      return cls(array, False)
    return cls(lax.bitcast_convert_type(array, jnp.uint16), True)

  def widened(self, bits: Array) -> Array:
    """`bits`, some of this array's, as floats again."""
    if not self.is_bfloat16:
      return bits
    return lax.bitcast_convert_type(bits, jnp.bfloat16)
