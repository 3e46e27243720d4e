"""Gives a Tunix attention module the rope_theta that its config asks for.

In Tunix, the attention of llama3 and qwen3 calls `apply_rope` without its
config's `rope_theta`, so every model of these families runs with the default
of that function (1,000,000). The default is set to the config's value while a
model is traced and restored after; a call that passes theta itself is left as
it is.
"""

from collections.abc import Iterator
import contextlib
import inspect
import sys
import threading
from typing import Any

from flax import nnx

from tunix_progdistill.families import base

# The default is one per process: only one model may be traced at a time.
_LOCK = threading.RLock()


@contextlib.contextmanager
def theta_of_config(model: nnx.Module) -> Iterator[None]:
  """Holds `apply_rope`'s default at `model.config.rope_theta`."""
  theta = base.rope_theta(model)
  module = sys.modules[type(model).__module__]
  function: Any = getattr(module, "apply_rope", lambda: None)
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
