"""Lets Tunix's models multiply by kernels that qwix has quantised.

The Einsum of gemma4, qwen2 and qwen3 casts its kernel before the product, and
what qwix puts in a kernel's place cannot be cast. Its call is replaced while
such a model is traced, and restored after.
"""

from collections.abc import Iterator
import contextlib
import sys
import threading
from typing import Any

from flax import nnx
import jax.numpy as jnp

_LOCK = threading.RLock()


def is_quantised(kernel: Any) -> bool:
  """Whether it is what qwix puts in a kernel's place."""
  return hasattr(getattr(kernel, "array", None), "qvalue")


def _has_quantised(model: nnx.Module) -> bool:
  return any(
      "qvalue" in path for path, _ in nnx.to_flat_state(nnx.state(model))
  )


@contextlib.contextmanager
def einsum_without_cast(model: nnx.Module) -> Iterator[None]:
  """Holds the family's Einsum at a call that leaves such a kernel alone."""
  modules = (sys.modules[kind.__module__] for kind in type(model).__mro__)
  einsum: Any = next((m.Einsum for m in modules if hasattr(m, "Einsum")), None)
  if einsum is None or not _has_quantised(model):
    yield
    return
  with _LOCK:
    plain = einsum.__call__

    def call(self, x):
      if not is_quantised(self.w):
        return plain(self, x)
      out = jnp.einsum(
          self.einsum_str, jnp.astype(x, self.dtype), self.w.value
      )
      scale = getattr(self, "w_scale", None)  # gemma4's, of the kernel
      return out if scale is None else out * scale

    einsum.__call__ = call
    try:
      yield
    finally:
      einsum.__call__ = plain
