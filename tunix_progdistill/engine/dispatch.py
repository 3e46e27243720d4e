"""What stands in Tunix's loop in the place of its compiled step."""

from collections.abc import Callable
from typing import Any

import numpy as np


class Dispatcher:
  """Stands where Tunix's loop expects its compiled train step.

  The loop fetches its step once; this object looks at the count of updates at
  each call, so that stages can switch inside one `train()`.

  Args:
    run: `(micro_batch, is_update) -> (loss, aux, grad_norm)`.
    is_update: whether the next call ends its window, for a Tunix whose loop
      does not say.
    cache_size: how many programs were compiled.
  """

  def __init__(
      self,
      run: Callable[[Any, bool], tuple[Any, Any, Any]],
      is_update: Callable[[], bool],
      cache_size: Callable[[], int],
  ):
    self._run = run
    self._is_update = is_update
    self._cache_size_fn = cache_size

  @property
  def func(self) -> "Dispatcher":
    """Tunix reads `train_step.func.jitted_fn._cache_size()`."""
    return self

  @property
  def jitted_fn(self) -> "Dispatcher":
    return self

  def _cache_size(self) -> int:
    return self._cache_size_fn()

  def __call__(self, batch: Any, is_update_step: Any = None):
    if is_update_step is None:
      is_update = self._is_update()
    else:
      is_update = bool(np.asarray(is_update_step))
    return self._run(batch, is_update)
