"""Label rows that are one-hot, told by their ids.

Tunix's `labels_fn` gives rows `[*N, V]`, nearly always one-hot: ids spelled
out, as large as the logits. One walk over them finds the ids and proves that
nothing else stands there.
"""

import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Int
from jaxtyping import Num

from tunix_progdistill.kernels import blocks
from tunix_progdistill.kernels import closed_form

EMPTY = -1

# Whole numbers up to the sum of two of these are exact in float32.
_ONE = 2**22


def ids(rows: Num[Array, "*N V"]) -> Int[Array, "*N"]:
  """The id of each one-hot row; EMPTY for one of zeros, V for any other.

  A row is summed with 2^22 + v in the place of a 1 in column v and NaN in the
  place of what is neither 0 nor 1. Only a single 1 gives a sum below 2^23 that
  is not 0, and the sum then says which column it is.

  >>> ids(jnp.array([[0, 1, 0], [0, 0, 0], [0, 1, 1]])).tolist()
  [1, -1, 3]
  """
  vocabulary = rows.shape[-1]

  def block(rows):
    if vocabulary > _ONE:
      return jnp.where(jnp.any(rows != 0, axis=-1), vocabulary, EMPTY)
    marks = (_ONE + closed_form.columns(rows.shape)).astype(jnp.float32)
    marks = jnp.where(rows == 1, marks, jnp.where(rows == 0, 0.0, jnp.nan))
    total = jnp.sum(marks, axis=-1)
    own = jnp.where(
        (total >= _ONE) & (total < 2 * _ONE), total - _ONE, float(vocabulary)
    )
    return jnp.where(total == 0, EMPTY, own.astype(jnp.int32))

  return blocks.by_blocks(block, rows.shape, (rows,))
