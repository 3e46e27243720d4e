"""What `weights` says of a model: before it is loaded, and once it is."""

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any

from flax import nnx


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
  """A model, read from its configuration and without its weights.

  A field is None where only a download could tell.

  Attributes:
    family: name of the model family, such as gemma3.
    vocab_size: the number of pieces of its vocabulary.
    num_layers: the number of decoder layers.
    embed_dim: the width of the model.
    bos_id: id of the piece that opens a text.
    eos_id: id of the piece that ends one.
    rope_theta: base of the rotary embedding, where the family's config tells.
    hf_config: `config.json`, as a dict.
  """

  family: str | None = None
  vocab_size: int | None = None
  num_layers: int | None = None
  embed_dim: int | None = None
  bos_id: int | None = None
  eos_id: int | None = None
  rope_theta: float | None = None
  hf_config: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
  """A model with all that belongs to it.

  Attributes:
    model: the Tunix model, with its weights.
    family: the `families.Family` of the model.
    model_config: Tunix's ModelConfig of the model.
    hf_config: what `config.json` says, as a dict.
    tokenizer: the tokenizer (see `weights.tokenizer`).
    folder: the local folder that the weights were read from, or None.
  """

  model: nnx.Module
  family: Any
  model_config: Any
  hf_config: Mapping[str, Any]
  tokenizer: Any
  folder: pathlib.Path | None = None
