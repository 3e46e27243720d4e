"""Gives a Tunix attention module the rope_theta that its config asks for.

A theta may be a `Llama3Theta`, which rotates slow pairs more slowly still.

In Tunix, the attention of llama3 and qwen3 calls `apply_rope` without its
config's `rope_theta`, so every model of these families runs with the default
of that function (1,000,000). The default is set to the config's value while a
model is traced and restored after; a call that passes theta itself is left as
it is.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import inspect
import math
import sys
import threading
from typing import Any

from flax import nnx

from tunix_progdistill.families import base


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Theta:
  """The base of RoPE with the scaling of Llama 3.1 (rope_type "llama3").

  A pair of a head turns once in 2 pi t positions, t = theta ** fraction. Pairs
  that turn more than `high_freq_factor` times in the original context stay as
  they are, those that turn less than `low_freq_factor` times are slowed by
  `factor`, and between the two the frequency is interpolated:

    s = clip((original / (2 pi t) - low) / (high - low), 0, 1)
    t' = t / ((1 - s) / factor + s)

  It stands in place of a number where only `theta ** fraction` is asked for,
  as Tunix's `apply_rope` does.

  Attributes:
    theta: the base.
    factor: by how much the slowest pairs are slowed.
    low_freq_factor: see above.
    high_freq_factor: see above.
    original_max_position_embeddings: the context before it was extended.
  """

  theta: float
  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int

  def __pow__(self, fraction: Any) -> Any:
    """The timescales t', for the fractions of an array."""
    timescale = self.theta**fraction
    turns = self.original_max_position_embeddings / (2 * math.pi * timescale)
    smooth = (turns - self.low_freq_factor) / (
        self.high_freq_factor - self.low_freq_factor
    )
    smooth = smooth.clip(0, 1)
    return timescale / ((1 - smooth) / self.factor + smooth)


# The default is one per process: only one model may be traced at a time.
_LOCK = threading.RLock()


@contextlib.contextmanager
def theta_of_config(model: nnx.Module) -> Iterator[None]:
  """Holds `apply_rope`'s default at `model.config.rope_theta`."""
  theta = base.rope_theta(model)
  modules = (sys.modules[kind.__module__] for kind in type(model).__mro__)
  function: Any = next(
      (m.apply_rope for m in modules if hasattr(m, "apply_rope")), lambda: None
  )
  names = list(inspect.signature(function).parameters)
  if theta is None or "rope_theta" not in names:
    yield
    return
  with _LOCK:
    old = function.__defaults__
    index = names.index("rope_theta") - len(names)
    if not old or len(old) < -index:
      yield  # theta has no default here: every caller passes its own
      return
    new = list(old)
    new[index] = theta
    function.__defaults__ = tuple(new)
    try:
      yield
    finally:
      function.__defaults__ = old
