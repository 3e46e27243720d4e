"""A block of tokens through two output heads: what `linear_head` is made of.

`at_once` multiplies the block by the whole vocabulary; `head_tiles` goes over
it tile by tile.
"""

import dataclasses
from typing import Any
from typing import NamedTuple

from jax import lax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import ArrayLike
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

from tunix_progdistill import errors
from tunix_progdistill.kernels import blocks
from tunix_progdistill.kernels import closed_form

# Rows of d head that are summed up at once, which keeps the summand small.
_HEAD_ROWS = 2**13


@dataclasses.dataclass(frozen=True)
class Head:
  """How one model's head lies, and what comes after it."""

  name: str
  layout: str
  softcap: float | None

  def __post_init__(self):
    if self.layout not in ("vd", "dv"):
      raise errors.invalid(
          f"{self.name}_layout", "must be 'vd' or 'dv'", self.layout,
          "write 'vd' for a head [V, D] and 'dv' for [D, V]",
      )
    if self.softcap is not None and not self.softcap > 0:
      raise errors.invalid(
          f"{self.name}_softcap", "must be positive", self.softcap,
          "write None for no cap",
      )

  @property
  def axis(self) -> int:
    """The matrix's axis of the vocabulary."""
    return self.layout.index("v")

  def vocabulary(self, hidden: Array, matrix: Array) -> int:
    """V, of a matrix that fits the hidden states."""
    if matrix.ndim != 2 or matrix.shape[1 - self.axis] != hidden.shape[-1]:
      raise errors.invalid(
          f"{self.name}_head",
          f"must be {list(self.layout.upper())} with D = {hidden.shape[-1]}",
          matrix.shape, f"transpose it, or set {self.name}_layout",
      )
    return matrix.shape[self.axis]

  def columns(self, matrix: Array, start: ArrayLike, size: int) -> Array:
    return lax.dynamic_slice_in_dim(matrix, start, size, axis=self.axis)

  def tile(
      self, matrix: blocks.Bits, start: ArrayLike, size: int
  ) -> Array:
    return matrix.widened(self.columns(matrix.bits, start, size))

  def product(self, hidden: Array, matrix: Array) -> Array:
    """hidden @ head, `[c, V]`, before the cap."""
    return _matmul(hidden, 1, matrix, 1 - self.axis)

  def by_hidden(self, gradient: Array, matrix: Array) -> Array:
    """`[c, D]`, of the gradient by the product."""
    return _matmul(gradient, 1, matrix, self.axis)

  def by_matrix(self, gradient: Array, hidden: Array) -> Array:
    """Shaped as the matrix, of the gradient by the product."""
    if self.axis == 0:
      return _matmul(gradient, 0, hidden, 0)
    return _matmul(hidden, 0, gradient, 0)

  def capped(self, product: Array) -> tuple[Array, ArrayLike]:
    """The logits, and their slope."""
    if self.softcap is None:
      return product, 1.0
    t = jnp.tanh(product / self.softcap)
    return self.softcap * t, 1.0 - t * t


@dataclasses.dataclass(frozen=True)
class Plan:
  """All of a call that is no array.

  Attributes:
    size: V, padding and all.
    dtype: of the student's products, and of G in them.
    vocabulary: columns that count.
    tile: columns of a tile, at most `size`, or None.
  """

  student: Head
  teacher: Head
  dtype: Any
  size: int
  vocabulary: int
  frozen_head: bool
  kl_div_tau1: bool
  block_tokens: int
  tile: int | None


def check(size: int, other: int) -> None:
  if size != other:
    raise errors.invalid(
        "teacher_head", f"must have the student's vocabulary of {size}", other,
        "pad the smaller one, and say so by vocabulary=",
    )


def _matmul(a: Array, a_axis: int, b: Array, b_axis: int) -> Array:
  """The product over one axis of each, summed in float32."""
  dtype = jnp.promote_types(a.dtype, b.dtype)
  return lax.dot_general(
      a.astype(dtype), b.astype(dtype), (((a_axis,), (b_axis,)), ((), ())),
      preferred_element_type=jnp.float32,
  )


class Tokens(NamedTuple):
  """A block of tokens; the rows of weight 0 are blank."""

  student: Float[Array, "c Ds"]
  teacher: Float[Array, "c Dt"]
  labels: Int[Array, " c"]
  weights: Float[Array, " c"]
  new: Bool[Array, " c"]  # not in an earlier block too

  @classmethod
  def blank(cls, student, teacher, labels, weights, new) -> "Tokens":
    on = weights != 0
    student, teacher = (
        jnp.where(on[:, None], x, jnp.zeros_like(x)) for x in (student, teacher)
    )
    return cls(student, teacher, jnp.where(on, labels, 0), weights, new)


class Loss(NamedTuple):
  """What the loss needs beside the tokens; heads as a loop carries them."""

  student_head: blocks.Bits
  teacher_head: blocks.Bits
  tau: Float[Array, ""]
  alpha: Float[Array, ""]


def at_once(plan, with_gradient, part, loss, sum_head):
  """Values `[c]`, d hidden `[c, D]` and the sum of d head, V as a whole."""
  s_head, t_head = (
      x.widened(x.bits) for x in (loss.student_head, loss.teacher_head)
  )
  s = plan.student.product(part.student, s_head)
  t = plan.teacher.product(part.teacher, t_head)

  def step(s, t, y, w):
    counts = closed_form.columns(s.shape, 0) < plan.vocabulary
    (s, slope), (t, _) = plan.student.capped(s), plan.teacher.capped(t)
    out = closed_form.distillation(
        jnp.where(counts, s, -jnp.inf), jnp.where(counts, t, -jnp.inf), y,
        temperature=loss.tau, alpha=loss.alpha, kl_div_tau1=plan.kl_div_tau1,
    )
    values = closed_form.token_values(out.kl, out.ce, out.kl_div_tau1, w)
    if not with_gradient:
      return values, None
    gradient = closed_form.weighted(out.gradient * slope, w, counts)
    return values, gradient.astype(plan.dtype)

  values, gradient = blocks.by_blocks(
      step, s.shape, (s, t, part.labels, part.weights)
  )
  if not with_gradient:
    return values, None, sum_head
  d_hidden = plan.student.by_hidden(gradient, s_head)
  if sum_head is not None:
    sum_head = _add_by_rows(plan, part, gradient, sum_head)
  return values, d_hidden, sum_head


def _add_by_rows(plan, part, gradient, sum_head):
  """sum_head + hidden^T G, in place, some of the vocabulary at a time."""
  hidden = only_new(part)
  size = min(_HEAD_ROWS, plan.size)

  def body(i, sum_head):
    end = i * size
    start = jnp.minimum(end, plan.size - size)
    g = lax.dynamic_slice_in_dim(gradient, start, size, axis=1)
    new = closed_form.columns(g.shape, start) >= end
    g = jnp.where(new, g, jnp.zeros_like(g))
    return add(plan, sum_head, start, g, hidden)

  return lax.fori_loop(0, -(-plan.size // size), body, sum_head)


def add(plan, sum_head, start, gradient, hidden):
  """Adds a tile's hidden^T G at its place in the sum."""
  head = plan.student
  old = head.columns(sum_head, start, gradient.shape[-1])
  return lax.dynamic_update_slice_in_dim(
      sum_head, old + head.by_matrix(gradient, hidden), start, axis=head.axis
  )


def only_new(part: Tokens) -> Array:
  """Hidden states for d head, into which a token must go once only."""
  zero = jnp.zeros_like(part.student)
  return jnp.where(part.new[:, None], part.student, zero)
