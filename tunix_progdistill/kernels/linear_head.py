"""The distillation loss together with the two output heads.

Hidden states and head matrices come in, and the logits `[*N, V]` are never
there: a block of tokens is multiplied out, reduced, turned into its part of the
gradients, and gone.

    logits = cap(hidden @ head)    cap(x) = c tanh(x / c), or x without a cap

With G the gradient by a block's product hidden @ head (the cap's slope is in
it), the student's gradients are

    d hidden = G head^T    one block of it
    d head  += hidden^T G  summed over the blocks in float32

and, as in `chunked`, they are made together with the value: the backward pass
only scales them. Teacher, labels, weights, temperature and alpha are constants.
There is no second derivative.

What it needs beside its results is the block: the logits of both models and G,
3 x 2^25 float32 entries (0.4 GB; on a CPU 0.1 GB) at most, or, with
`vocabulary_tile`, as much of them as one tile of the vocabulary has. With tiles
both models' products are computed twice.
"""

from collections.abc import Callable
import dataclasses
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

from tunix_progdistill.kernels import blocks
from tunix_progdistill.kernels import chunked
from tunix_progdistill.kernels import closed_form
from tunix_progdistill.kernels import head_tiles
from tunix_progdistill.kernels import heads
from tunix_progdistill.kernels import shapes

Matrix = Float[Array, "V D"] | Float[Array, "D V"]

# Entries of a block's logits: 32 MiB in float32, on an accelerator 128 MiB.
_ENTRIES_CPU = 2**23
_ENTRIES = 2**25
# More tokens than this do not make the products faster, fewer make them slow.
_MOST_TOKENS = 256
_FEWEST_TOKENS = 8


def distillation(
    student_hidden: Float[Array, "*N Ds"],
    teacher_hidden: Float[Array, "*N Dt"],
    student_head: Matrix,
    teacher_head: Matrix,
    labels: Int[Array, "*N"],
    *,
    temperature: ArrayLike,
    alpha: ArrayLike,
    weights: chunked.Weights,
    student_layout: str = "vd",
    teacher_layout: str = "vd",
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    vocabulary: int | None = None,
    frozen_head: bool = False,
    kl_div_tau1: bool = False,
    block_tokens: int | None = None,
    vocabulary_tile: int | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, "*N"]]]:
  """`chunked.distillation` of logits that are never made.

    total = sum_n w_n (alpha tau^2 KL(P_teacher || P_student)_n
                       + (1 - alpha) CE_n)

  Products are of the wider dtype of hidden state and head, with sums in
  float32. The loss is float32 throughout.

  On several devices call it inside `jax.shard_map`, the tokens spread and the
  heads whole, and sum the total over the batch's axis: left to XLA, a loop over
  blocks of a batch that is spread gathers it.

  Args:
    student_hidden: what the student's head is applied to, `[*N, Ds]`.
    teacher_hidden: the same of the teacher, `[*N, Dt]`.
    student_head: `[V, Ds]` (an embedding table, as tied heads are) or
      `[Ds, V]`, see `student_layout`.
    teacher_head: `[V, Dt]` or `[Dt, V]`.
    labels: ids `[*N]`.
    temperature: tau > 0; may be traced.
    alpha: weight of the soft loss in [0, 1]; may be traced.
    weights: of the tokens, `[*N]`; a bool counts as 0 or 1. A token of weight 0
      is never looked at: NaN may stand in its hidden states.
    student_layout: "vd" for a head `[V, D]`, "dv" for `[D, V]`.
    teacher_layout: the same of the teacher's.
    student_softcap: c > 0 of c tanh(logits / c); None for no cap.
    teacher_softcap: the same of the teacher.
    vocabulary: from this column on the heads are padding: logits of -inf in
      both models, gradient 0. None where all of V counts.
    frozen_head: make no gradient of the student's head. Where nothing is
      differentiated by the head, none is made anyhow.
    kl_div_tau1: also the KL at temperature 1.
    block_tokens: tokens of a block; None for `tokens_per_block(V)`.
    vocabulary_tile: columns of a tile; None takes a block's V as a whole. For
      where even that is too much. On a CPU, heads of bfloat16 are copied once.

  Returns:
    The total, float32 [], whose gradients have the dtypes of `student_hidden`
    and `student_head`, and per-token values without weights and without
    gradient, each `[*N]` and 0 where the weight is 0: `kl`, `ce`, and
    `kl_div_tau1` where it was asked for.

  Raises:
    ValueError: an unknown layout; widths or vocabularies that do not fit each
      other; a cap, `vocabulary`, `block_tokens` or `vocabulary_tile` out of
      range.

  >>> head = jnp.eye(3)
  >>> s, t = jnp.zeros((1, 3)), jnp.array([[1., 0., 0.]])
  >>> total, values = distillation(
  ...     s, t, head, head, jnp.array([2]), temperature=1.0, alpha=0.5,
  ...     weights=jnp.array([True]))
  >>> f"{total:.4f} {values['kl'][0]:.4f} {values['ce'][0]:.4f}"
  '0.6109 0.1233 1.0986'
  """
  student = heads.Head("student", student_layout, student_softcap)
  teacher = heads.Head("teacher", teacher_layout, teacher_softcap)
  size = student.vocabulary(student_hidden, student_head)
  heads.check(size, teacher.vocabulary(teacher_hidden, teacher_head))
  shapes.check_sizes(size, vocabulary=vocabulary)
  shapes.check_sizes(block_tokens=block_tokens, vocabulary_tile=vocabulary_tile)
  lead = student_hidden.shape[:-1]
  shapes.check_tokens(
      lead, weights=weights, teacher_hidden=teacher_hidden[..., 0]
  )
  shapes.check_ids(lead, labels)
  shapes.check_scalars(temperature=temperature, alpha=alpha)
  plan = heads.Plan(
      student, teacher,
      jnp.promote_types(student_hidden.dtype, student_head.dtype), size,
      vocabulary or size, frozen_head, kl_div_tau1,
      block_tokens or tokens_per_block(size),
      min(vocabulary_tile, size) if vocabulary_tile else None,
  )
  flat = lambda x: x.reshape(math.prod(lead), x.shape[-1])
  total, values = _distillation(
      plan, flat(student_hidden), student_head, flat(teacher_hidden),
      teacher_head, labels.reshape(-1), weights.astype(jnp.float32).reshape(-1),
      jnp.asarray(temperature, jnp.float32), jnp.asarray(alpha, jnp.float32),
  )
  values = {k: v.reshape(lead) for k, v in values.items()}
  return total, lax.stop_gradient(values)


def token_values(
    rule: Callable[..., Any],
    student_hidden: Float[Array, "*N Ds"],
    teacher_hidden: Float[Array, "*N Dt"],
    student_head: Matrix,
    teacher_head: Matrix,
    *arrays: Array,
    where: Bool[Array, "*N"],
    student_layout: str = "vd",
    teacher_layout: str = "vd",
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    block_tokens: int | None = None,
) -> Any:
  """`chunked.token_values` of logits that are never made as a whole.

  Args:
    rule: `(student logits, teacher logits, *arrays, where=)` of a block, to a
      pytree of values per token.
    student_hidden: as for `distillation`, and so on.
    teacher_hidden: `[*N, Dt]`.
    student_head: `[V, Ds]` or `[Ds, V]`.
    teacher_head: `[V, Dt]` or `[Dt, V]`.
    *arrays: `[*N]`, each.
    where: handed to the rule.
    student_layout: "vd" or "dv".
    teacher_layout: "vd" or "dv".
    student_softcap: c > 0, or None.
    teacher_softcap: c > 0, or None.
    block_tokens: tokens of a block; None for `tokens_per_block(V)`.

  Returns:
    The rule's pytree, each leaf `[*N]`; without gradient.

  Raises:
    ValueError: as `distillation`.
  """
  student = heads.Head("student", student_layout, student_softcap)
  teacher = heads.Head("teacher", teacher_layout, teacher_softcap)
  size = student.vocabulary(student_hidden, student_head)
  heads.check(size, teacher.vocabulary(teacher_hidden, teacher_head))
  shapes.check_tokens(
      student_hidden.shape[:-1], where=where,
      teacher_hidden=teacher_hidden[..., 0],
  )
  student_head, teacher_head = map(
      lax.stop_gradient, (student_head, teacher_head)
  )

  def logits(head, hidden, matrix, on):
    flat = jnp.where(on[..., None], hidden, 0).reshape(-1, hidden.shape[-1])
    capped, _ = head.capped(head.product(flat, matrix))
    return capped.reshape(*hidden.shape[:-1], size)

  def block(s, t, *arrays, where):
    return rule(
        logits(student, s, student_head, where),
        logits(teacher, t, teacher_head, where), *arrays, where=where,
    )

  return chunked.token_values(
      block, student_hidden, teacher_hidden, *arrays, where=where,
      block_tokens=block_tokens or tokens_per_block(size),
  )


def tokens_per_block(vocabulary: int) -> int:
  """How many tokens a block holds where nothing is said.

  Args:
    vocabulary: V.

  >>> tokens_per_block(32_000)
  256
  """
  cpu = jax.default_backend() == "cpu"
  entries = _ENTRIES_CPU if cpu else _ENTRIES
  return max(_FEWEST_TOKENS, min(_MOST_TOKENS, entries // vocabulary))


# -- gradients made in the forward pass


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _distillation(plan, *arguments):
  return _distill(plan, False, *arguments)[:2]


def _distillation_fwd(plan, *arguments):
  head_is_asked_for = arguments[1].perturbed
  if not head_is_asked_for:
    plan = dataclasses.replace(plan, frozen_head=True)
  total, values, gradients = _distill(plan, True, *(a.value for a in arguments))
  return (total, values), gradients


def _distillation_bwd(plan, gradients, cotangents):
  del plan
  scale, _ = cotangents
  hidden, head = jax.tree.map(
      lambda x: closed_form.scaled(x, scale), gradients
  )
  return (hidden, head, *[None] * 6)


_distillation.defvjp(
    _distillation_fwd, _distillation_bwd, symbolic_zeros=True
)


def _distill(
    plan, with_gradient, student_hidden, student_head, teacher_hidden,
    teacher_head, labels, weights, tau, alpha
):
  """Total, values and (where asked for) the two gradients."""
  # As bits: see `blocks.Bits`.
  of = blocks.Bits.of
  arrays = [of(x) for x in (student_hidden, teacher_hidden, labels, weights)]
  loss = heads.Loss(of(student_head), of(teacher_head), tau, alpha)
  tokens = weights.size
  size = min(plan.block_tokens, tokens)
  rule = head_tiles.by_tiles if plan.tile else heads.at_once

  def block(start, end, sum_head):
    h, g, y, w = (
        x.widened(lax.dynamic_slice_in_dim(x.bits, start, size))
        for x in arrays
    )
    part = heads.Tokens.blank(h, g, y, w, start + jnp.arange(size) >= end)
    values, d_hidden, sum_head = rule(
        plan, with_gradient, part, loss, sum_head
    )
    if with_gradient:
      d_hidden = of(d_hidden.astype(student_hidden.dtype))
    return (values, d_hidden), sum_head

  def body(i, carry):
    whole, sum_head = carry
    end = i * size
    # The last block begins earlier where the tokens do not divide.
    start = jnp.minimum(end, tokens - size)
    part, sum_head = block(start, end, sum_head)
    return jax.tree.map(
        lambda o, x: lax.dynamic_update_slice_in_dim(o, x, start, axis=0),
        whole, part,
    ), sum_head

  sum_head = None
  if with_gradient and not plan.frozen_head:
    sum_head = jnp.zeros(student_head.shape, jnp.float32)
  kinds, _ = jax.eval_shape(block, 0, 0, sum_head)
  whole = jax.tree.map(
      lambda x: jnp.zeros((tokens, *x.shape[1:]), x.dtype), kinds
  )
  (values, d_hidden), sum_head = lax.fori_loop(
      0, -(-tokens // max(size, 1)), body, (whole, sum_head)
  )
  total = closed_form.weighted_total(values, weights, tau, alpha)
  if not with_gradient:
    return total, values, None
  if sum_head is not None:
    sum_head = sum_head.astype(student_head.dtype)
  return total, values, (d_hidden.widened(d_hidden.bits), sum_head)
