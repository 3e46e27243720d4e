"""A block of tokens, tile by tile of the vocabulary.

For where even the logits of one block are too much. A first walk over the tiles
finds the normalisers, a second one values and gradients: both models' products
are computed twice.
"""

from typing import NamedTuple

from jax import lax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import ArrayLike
from jaxtyping import Bool
from jaxtyping import Float

from tunix_progdistill.kernels import closed_form
from tunix_progdistill.kernels import heads


class _Sums(NamedTuple):
  """What a softmax needs of all tiles: the maximum, a sum for each rate."""

  top: Float[Array, "c 1"]
  sums: tuple[Float[Array, "c 1"], ...]

  @classmethod
  def empty(cls, tokens: int, number: int) -> "_Sums":
    column = jnp.zeros((tokens, 1), jnp.float32)
    return cls(column - jnp.inf, (column,) * number)

  def plus(self, logits: Array, rates: tuple[ArrayLike, ...]) -> "_Sums":
    """With another tile."""
    top = jnp.maximum(self.top, jnp.max(logits, axis=-1, keepdims=True))
    return _Sums(top, tuple(
        z * jnp.exp((self.top - top) * r)
        + jnp.sum(jnp.exp((logits - top) * r), axis=-1, keepdims=True)
        for z, r in zip(self.sums, rates, strict=True)
    ))

  def softmax(
      self, logits: Array, rates: tuple[ArrayLike, ...]
  ) -> list[closed_form.Distribution]:
    """A tile's part of the softmax at each rate."""
    shifted = [(logits - self.top) * r for r in rates]
    return [
        closed_form.Distribution(jnp.exp(x) / z, x - jnp.log(z))
        for x, z in zip(shifted, self.sums, strict=True)
    ]


class _Tile(NamedTuple):
  """Logits of some columns, -inf in those that do not count."""

  student: Float[Array, "c T"]
  teacher: Float[Array, "c T"]
  slope: ArrayLike
  counts: Bool[Array, "c T"]
  is_label: Bool[Array, "c T"]


def _tile(plan, part, loss, end):
  start = jnp.minimum(end, plan.size - plan.tile)
  product = lambda head, hidden, matrix: head.product(
      hidden, head.tile(matrix, start, plan.tile)
  )
  s, slope = plan.student.capped(
      product(plan.student, part.student, loss.student_head)
  )
  t, _ = plan.teacher.capped(
      product(plan.teacher, part.teacher, loss.teacher_head)
  )
  columns = closed_form.columns(s.shape, start)
  # The last tile begins earlier where the vocabulary does not divide.
  counts = (columns >= end) & (columns < plan.vocabulary)
  is_label = (columns >= end) & (columns == part.labels[:, None])
  s, t = (jnp.where(counts, x, -jnp.inf) for x in (s, t))
  return start, _Tile(s, t, slope, counts, is_label)


def by_tiles(plan, with_gradient, part, loss, sum_head):
  """`heads.at_once`, in two walks over the tiles of the vocabulary."""
  tokens, number = part.weights.size, -(-plan.size // plan.tile)
  at_one = (1.0,) if plan.kl_div_tau1 else ()
  s_rates, t_rates = (1.0 / loss.tau, 1.0), (1.0 / loss.tau, *at_one)
  none = jnp.zeros(tokens, jnp.float32)

  def first(i, carry):
    s, t, own = carry
    _, x = _tile(plan, part, loss, i * plan.tile)
    own += jnp.sum(jnp.where(x.is_label, x.student, 0.0), axis=-1)
    return s.plus(x.student, s_rates), t.plus(x.teacher, t_rates), own

  s, t, own = lax.fori_loop(0, number, first, (
      _Sums.empty(tokens, len(s_rates)), _Sums.empty(tokens, len(t_rates)), none
  ))

  def second(i, carry):
    kls, d_hidden, sum_head = carry
    start, x = _tile(plan, part, loss, i * plan.tile)
    q, q1 = s.softmax(x.student, s_rates)
    p, *p1 = t.softmax(x.teacher, t_rates)
    parts = [closed_form.kl(p, q), *(closed_form.kl(x, q1) for x in p1)]
    kls = [a + b for a, b in zip(kls, parts, strict=True)]
    if with_gradient:
      g = _tile_gradient(loss, x, q, p, q1)
      g = closed_form.weighted(g * x.slope, part.weights, x.counts)
      g = g.astype(plan.dtype)
      matrix = plan.student.tile(loss.student_head, start, plan.tile)
      d_hidden += plan.student.by_hidden(g, matrix)
    if sum_head is not None:
      sum_head = heads.add(plan, sum_head, start, g, heads.only_new(part))
    return kls, d_hidden, sum_head

  d_hidden = jnp.zeros(part.student.shape, jnp.float32)
  (kl, *kl1), d_hidden, sum_head = lax.fori_loop(0, number, second, (
      [none] * len(t_rates), d_hidden if with_gradient else None, sum_head
  ))
  known = (part.labels >= 0) & (part.labels < plan.size)
  ce = jnp.log(s.sums[1][:, 0]) - (jnp.where(known, own, jnp.nan) - s.top[:, 0])
  values = closed_form.token_values(
      kl, ce, kl1[0] if kl1 else None, part.weights
  )
  return values, d_hidden, sum_head


def _tile_gradient(loss, tile, q, p, q1):
  """Of alpha tau^2 KL + (1 - alpha) CE by the logits of a tile."""
  soft = loss.tau * (q.p - p.p)
  hard = q1.p - jnp.where(tile.is_label, 1.0, 0.0)
  return closed_form.mix(soft, hard, loss.alpha)
