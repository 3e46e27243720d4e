"""From per-token values to (sum, count), the only currency of a reduction.

Means are taken once, at the end, from sums: a mean of means depends on how the
rows were split into batches.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

Sum = Float[Array, ""]


def masked_sum(values: Float[Array, "*N"], where: Bool[Array, "*N"]) -> Sum:
  """Sums `values` over the tokens where `where` holds, in float32.

  >>> float(masked_sum(jnp.array([1., 2., jnp.nan]), jnp.array([1, 1, 0]) > 0))
  3.0
  """
  return jnp.sum(jnp.where(where, values.astype(jnp.float32), 0.0))


def count(where: Bool[Array, "*N"]) -> Sum:
  """The number of tokens where `where` holds, as float32."""
  return jnp.sum(where.astype(jnp.float32))


def mean(total: Sum, number: Sum) -> Sum:
  """total / number, and 0 where there is nothing to average.

  >>> float(mean(jnp.float32(3.0), jnp.float32(0.0)))
  0.0
  """
  return jnp.where(number > 0, total / jnp.maximum(number, 1.0), 0.0)


def blank(logits: Float[Array, "*N V"], where: Bool[Array, "*N"]) -> jax.Array:
  """`logits` in float32, with the rows outside `where` set to 0.

  A row that does not count must not be able to hurt: whatever stands there
  (NaN, -inf, the padding of another tool), its value and its gradient are
  exactly 0 afterwards. Selecting *before* the mathematics is what keeps NaN out
  of the gradient as well.
  """
  return jnp.where(where[..., None], logits.astype(jnp.float32), 0.0)


def blank_labels(
    labels: Int[Array, "*N"] | Float[Array, "*N V"], where: Bool[Array, "*N"]
) -> jax.Array:
  """`labels` with those outside `where` set to id 0, or to rows of 0."""
  if labels.ndim == where.ndim:
    return jnp.where(where, labels, 0)
  return blank(labels, where)
