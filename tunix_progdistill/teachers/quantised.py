"""A teacher with kernels of 8 or 4 bits, by qwix.

  model, size = quantise(teacher, "int8")

int8 has one scale for each output channel; nf4 one for each tile of up to 64
inputs as well. Embedding and norms stay as they are. Weights alone are
quantised: a product is computed in the activations' dtype.

Source of nf4: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.
"""

import dataclasses
import math
from typing import Any
import warnings

from flax import nnx
import jax
import jax.numpy as jnp
import qwix

from tunix_progdistill import errors
from tunix_progdistill import families
from tunix_progdistill import modules

KINDS = ("int8", "nf4")
_LARGEST_TILE = 64
# Not the embedding: under a trace qwix would find it behind its transpose, and
# quantise it anew in every step.
_PATHS = r"(?!embedder(/|$)).*"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
  """Bytes of a quantised model, and those of the same parts in float32.

  Attributes:
    kind: int8 or nf4.
    kernel_bytes: of the quantised kernels, scales included.
    kernel_float32_bytes: of the same kernels in float32.
    embedding_bytes: of the input embedding, which stays as it is.
    total_bytes: of everything.
    total_float32_bytes: of everything in float32.
  """

  kind: str
  kernel_bytes: int
  kernel_float32_bytes: int
  embedding_bytes: int
  total_bytes: int
  total_float32_bytes: int

  @property
  def kernel_ratio(self) -> float:
    """Bytes of the quantised kernels over their float32 bytes."""
    return self.kernel_bytes / max(self.kernel_float32_bytes, 1)

  @property
  def total_ratio(self) -> float:
    """Bytes of the model over its float32 bytes."""
    return self.total_bytes / max(self.total_float32_bytes, 1)


def quantise(model: nnx.Module, kind: str) -> tuple[nnx.Module, Size]:
  """`model` with quantised kernels, and what that saves.

  Args:
    model: a Tunix model; it is left as it is.
    kind: "int8" or "nf4".

  Returns:
    A model that shares embedding and norms with `model`, and its size.

  Raises:
    ValueError: an unknown kind, or a model that does not say what it is called
      with.
  """
  if kind not in KINDS:
    raise errors.invalid(
        "quantization", f"must be one of {', '.join(KINDS)}", kind,
        "leave it out",
    )
  make = getattr(model, "get_model_input", None)
  if make is None:
    raise errors.invalid(
        "model", "must have get_model_input, as Tunix's models do",
        type(model).__name__, "quantise it with qwix yourself",
    )
  rule = qwix.QuantizationRule(
      module_path=_PATHS, weight_qtype=kind,
      tile_size=None if kind == "int8" else _tile(model),
  )
  with families.tracing(model), warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    made = qwix.quantize_model(model, qwix.PtqProvider([rule]), **make())
  return made, _size(model, made, kind)


def _leaves(model: nnx.Module) -> dict[str, jax.Array]:
  return {
      modules.path_name(p): v.get_value()
      for p, v in nnx.to_flat_state(nnx.state(model, nnx.Param))
  }


def _tile(model: nnx.Module) -> int | None:
  """The largest tile that divides the inputs of every kernel."""
  config: Any = getattr(model, "config", None)
  widths = [
      getattr(config, n, None) for n in ("embed_dim", "hidden_dim", "head_dim")
  ]
  common = math.gcd(*(int(w) for w in widths if w))
  tile = math.gcd(common, _LARGEST_TILE)
  return tile if tile > 1 else None


def _size(model: nnx.Module, made: nnx.Module, kind: str) -> Size:
  before, after = _leaves(model), _leaves(made)
  quantised = {n.split("/array/")[0] for n in after if "/array/" in n}
  own = [
      n for n in after
      if n.split("/array/")[0] in quantised
  ]
  float32 = jnp.dtype(jnp.float32).itemsize
  return Size(
      kind=kind,
      kernel_bytes=sum(after[n].nbytes for n in own),
      kernel_float32_bytes=sum(before[n].size * float32 for n in quantised),
      embedding_bytes=sum(
          v.nbytes for n, v in after.items() if "embed" in n.split("/")[0]
      ),
      total_bytes=sum(v.nbytes for v in after.values()),
      total_float32_bytes=sum(v.size * float32 for v in before.values()),
  )
