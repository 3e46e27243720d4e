"""Batches on their way to the step."""

import base64
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import json
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


class Position:
  """Where the training data stand, for data that can tell.

  The iterators of grain, and any that has `get_state` and `set_state`, go on
  from a saved state without reading again what was read.

  Attributes:
    trained: the state after the last batch that was trained on; None where the
      data cannot tell. The loop may have fetched one batch more.
  """

  def __init__(self):
    self.trained: Any = None
    self._fetched: Any = None

  def fetched(self, iterator: Any) -> None:
    """Takes down the state after a batch was fetched."""
    self._fetched = iterator.get_state()

  def commit(self) -> None:
    """The batch that was fetched last is trained on."""
    if self._fetched is not None:
      self.trained = self._fetched

  def restore(self, iterator: Any) -> bool:
    """Moves `iterator` behind what was trained on, if both can."""
    if self.trained is None or not _can_tell(iterator):
      return False
    iterator.set_state(self.trained)
    return True

  def to_json(self) -> Any:
    """`trained` for a checkpoint; None where JSON cannot hold it."""
    if isinstance(self.trained, bytes):
      return {"base64": base64.b64encode(self.trained).decode("ascii")}
    try:
      json.dumps(self.trained)
    except TypeError:
      return None  # batches are skipped by count instead
    return self.trained

  def from_json(self, saved: Any) -> None:
    """Takes `trained` from what `to_json` gave."""
    if isinstance(saved, dict) and set(saved) == {"base64"}:
      saved = base64.b64decode(saved["base64"])
    self.trained = saved


def _can_tell(iterator: Any) -> bool:
  return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")


def complete_windows(
    batches: Iterable[Any], every: int, earlier_fillers: int = 0,
    position: Position | None = None, taken: int = 0,
) -> Iterator[Any]:
  """Yields `batches`, and fills up the last accumulation window.

  Micro-batches left over at the end of the data would otherwise be computed
  and never reach the weights. A resumed run skips as many items as it has
  taken: here it gets fillers for those that need not be read again.

  Args:
    batches: the training data.
    every: micro-batches per update.
    earlier_fillers: how many fillers this run has used before.
    position: where the data stand; it is kept up to date.
    taken: how many items, fillers included, this run has taken before.

  Raises:
    ValueError: there is not one batch.
  """
  iterator = iter(batches)
  if position is not None and position.restore(iterator):
    number = taken
  else:
    number = earlier_fillers
  yield from (FILLER for _ in range(number))
  before = number
  tells = position is not None and _can_tell(iterator)
  for batch in iterator:
    number += 1
    if tells:
      assert position is not None
      position.fetched(iterator)
    yield batch
  if number == before == 0:
    raise ValueError(_EMPTY)
  for _ in range(-number % every):
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


class DictBatch(dict):
  """A dict batch, as grain gives it, with attributes as in TrainingInput."""

  def __getattr__(self, name: str) -> Any:
    if name not in self:
      raise AttributeError(
          f"batch must hold {name!r}, got {sorted(self)}; add it, or pass "
          "with_gen_model_input_fn"
      )
    return self[name]


def model_inputs(batch: Any) -> dict[str, Any]:
  """Tokens and mask, as in Tunix, and a loss mask where the batch has one."""
  inputs = {"input_tokens": batch.input_tokens, "input_mask": batch.input_mask}
  if (loss_mask := getattr(batch, "loss_mask", None)) is not None:
    inputs["loss_mask"] = loss_mask
  return {"inputs": inputs}
