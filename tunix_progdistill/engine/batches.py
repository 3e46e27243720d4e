"""Batches on their way to the step."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from tunix.sft import hooks


@flax.struct.dataclass
class Prepared:
  """One micro-batch as the compiled step takes it.

  Attributes:
    inputs: the model's inputs, all that `gen_model_input_fn` gave.
    teacher_output: what the teacher says of them.
    weight: 1, or 0 for a batch that only fills up a window.
  """

  inputs: Mapping[str, Any]
  teacher_output: Any
  weight: jax.Array | np.float32


class Filler:
  """Stands for an empty micro-batch, which ends a trailing window."""


FILLER = Filler()


class Shape:
  """Remembers the shape of a batch, to make an empty one of it.

  Only shapes are kept: holding on to a batch would hold on to its logits.
  """

  def __init__(self, batch: Prepared):
    leaves, self._tree = jax.tree.flatten(batch)
    self._leaves = [
        (np.shape(x), jnp.result_type(x), getattr(x, "sharding", None))
        for x in leaves
    ]

  def empty(self) -> Prepared:
    """A batch of zeros with weight 0, placed as the remembered one was."""
    leaves = [
        np.zeros(shape, dtype) if sharding is None
        else jax.device_put(np.zeros(shape, dtype), sharding)
        for shape, dtype, sharding in self._leaves
    ]
    return jax.tree.unflatten(self._tree, leaves)

_EMPTY = (
    "train_ds must hold at least one batch, got none; check the data's path "
    "and filters (a consumed generator cannot be read twice)"
)


def complete_windows(
    batches: Iterable[Any], every: int, earlier_fillers: int = 0
) -> Iterator[Any]:
  """Yields `batches`, and fills up the last accumulation window.

  Micro-batches left over at the end of the data would otherwise be computed
  and never reach the weights.

  Args:
    batches: the training data.
    every: micro-batches per update.
    earlier_fillers: how many fillers this run has used before. A resumed run
      skips as many items as it has taken; these stand first, so that no batch
      is skipped in a filler's place.

  Raises:
    ValueError: there is not one batch.
  """
  yield from (FILLER for _ in range(earlier_fillers))
  number = 0
  for batch in batches:
    number += 1
    yield batch
  if number == 0:
    raise ValueError(_EMPTY)
  for _ in range(-(earlier_fillers + number) % every):
    yield FILLER


class CompleteWindowsHooks(hooks.DataHooks):
  """`complete_windows` for data that comes through Tunix's `DataHooks`."""

  def __init__(self, inner: hooks.DataHooks, every: int):
    self._inner = inner
    self._every = every
    self._number = 0

  def load_next_train_batch(self, train_ctx: Any) -> Any:
    batch = self._inner.load_next_train_batch(train_ctx)
    if batch is not None:
      self._number += 1
      return batch
    if self._number == 0 and train_ctx.train_steps == 0:
      raise ValueError(_EMPTY)
    if train_ctx.iter_steps % self._every:
      return FILLER
    return None

  def load_next_eval_batch(self, train_ctx: Any) -> Any:
    return self._inner.load_next_eval_batch(train_ctx)
