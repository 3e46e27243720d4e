"""Blocks of tokens: what keeps a loss from needing room as its logits do.

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

from tunix_progdistill.kernels import shapes

# Entries of a block: what stays in a core's cache; on an accelerator, what
# keeps it busy.
_ENTRIES_CPU = 2**18
_ENTRIES = 2**25


def tokens_per_block(vocabulary: int, entries: int | None = None) -> int:
  """How many tokens a block holds: a power of two, which cores share evenly.

  Args:
    vocabulary: V.
    entries: of a block; None takes what suits the default backend.

  >>> tokens_per_block(32_000, 2**18), tokens_per_block(262_145, 2**18)
  (8, 1)
  """
  if entries is None:
    cpu = jax.default_backend() == "cpu"
    entries = _ENTRIES_CPU if cpu else _ENTRIES
  return 1 << max(entries // vocabulary, 1).bit_length() - 1


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

  Raises:
    ValueError: `block_tokens` is no whole number, or below 1.
  """
  lead, vocabulary = shape[:-1], shape[-1]
  tokens = math.prod(lead)
  spread = jax.device_count() > 1 and len(lead) > 1 and tokens > 0
  rows = lead[0] if spread else 1
  length = tokens // rows
  shapes.check_sizes(block_tokens=block_tokens)
  wanted = block_tokens or tokens_per_block(vocabulary)
  size = max(1, wanted // rows)
  flat = tuple(
      x.reshape((rows, length, *x.shape[len(lead):])) for x in arrays
  )
  whole = lambda x: x.reshape(*lead, *x.shape[2:])
  if size >= length:
    return jax.tree.map(whole, step(*flat))

  def cut(x, start):
    x = Bits.of(x)
    return x.widened(lax.dynamic_slice_in_dim(x.bits, start, size, axis=1))

  def block(start, arrays):
    parts = [cut(x, start) for x in arrays]
    return jax.tree.map(Bits.of, step(*parts))

  kinds = jax.eval_shape(block, 0, flat)
  empty = jax.tree.map(
      lambda x: jnp.zeros((rows, length, *x.shape[2:]), x.dtype), kinds
  )

  def body(i, out):
    # Without the barrier XLA prepares the arrays once, before the loop: whole
    # copies of them.
    here, i = lax.optimization_barrier((flat, i))
    start = jnp.minimum(i * size, length - size)
    return jax.tree.map(
        lambda o, x: lax.dynamic_update_slice_in_dim(o, x, start, axis=1),
        out, block(start, here),
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
