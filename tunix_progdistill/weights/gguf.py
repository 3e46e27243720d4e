"""A GGUF file of Gemma 3 or Llama as a folder that Tunix loads.

    model.safetensors   Hugging Face tensor names, one dtype
    config.json         Hugging Face's fields
    tokenizer.model     SentencePiece (Gemma), or
    tokenizer.json      byte-level BPE (Llama with SmolLM's pre-tokenizer)
    tokenizer_config.json

What llama.cpp changed is undone:

*   Gemma's norms are stored as the factor `1 + w`; Hugging Face and Tunix
    store `w` and add the 1 themselves. Llama's are stored as they are.
*   Llama's q and k have the two halves of each head, which RoPE turns against
    each other, interleaved row by row; Hugging Face and Tunix have one half
    after the other. Gemma's rows are in order.
*   The RoPE base of Gemma's local layers (10,000), the pattern of five local
    layers and a global one, and the scale of its queries are part of the
    architecture, not of the metadata.

The file is read tensor by tensor, in blocks of rows, so that memory holds one
block in float32 whatever the size of the model.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

from tunix_progdistill import errors
from tunix_progdistill.weights import gguf_reader
from tunix_progdistill.weights import gguf_tokenizer
from tunix_progdistill.weights import stream

# Raised by one whenever the written files change; part of the cache's key.
CONVERTER_VERSION = 2
EMBEDDING = "token_embd.weight"
_BLOCK_ROWS = 16_384
_DTYPES = {
    "float32": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
}
_HUB = "take its safetensors from the hub (model_source huggingface)"

_TOP = (
    # GGUF, Hugging Face, shape (see `_axes`)
    ("token_embd", "model.embed_tokens", "VD"),
    ("output_norm", "model.norm", "D"),
)
_HEAD = ("output", "lm_head", "VD")
_ATTENTION = (
    ("attn_norm", "input_layernorm", "D"),
    ("attn_q", "self_attn.q_proj", "QD"),
    ("attn_k", "self_attn.k_proj", "KD"),
    ("attn_v", "self_attn.v_proj", "KD"),
    ("attn_output", "self_attn.o_proj", "DQ"),
)
_MLP = (
    ("ffn_gate", "mlp.gate_proj", "FD"),
    ("ffn_up", "mlp.up_proj", "FD"),
    ("ffn_down", "mlp.down_proj", "DF"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
  """What is said of one `general.architecture`.

  Attributes:
    model_type: Hugging Face's name.
    layer: the tensors of a layer: GGUF, Hugging Face, shape.
    tokenizer: what `tokenizer.ggml.model` must be.
    shifts_norms: whether norms are stored as 1 + w.
    interleaves: tensors of a layer whose rows are interleaved, and the
      metadata with their number of heads.
    may_untie: whether there may be a head of its own.
  """

  model_type: str
  layer: tuple[tuple[str, str, str], ...]
  tokenizer: str
  shifts_norms: bool = False
  interleaves: Mapping[str, str] = dataclasses.field(default_factory=dict)
  may_untie: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma3": Architecture(
        model_type="gemma3_text",
        layer=(
            *_ATTENTION, *_MLP,
            ("attn_q_norm", "self_attn.q_norm", "H"),
            ("attn_k_norm", "self_attn.k_norm", "H"),
            ("post_attention_norm", "post_attention_layernorm", "D"),
            ("ffn_norm", "pre_feedforward_layernorm", "D"),
            ("post_ffw_norm", "post_feedforward_layernorm", "D"),
        ),
        tokenizer="llama",
        shifts_norms=True,
    ),
    "llama": Architecture(
        model_type="llama",
        layer=(
            *_ATTENTION, *_MLP,
            ("ffn_norm", "post_attention_layernorm", "D"),
        ),
        tokenizer="gpt2",
        interleaves={
            "attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"
        },
        may_untie=True,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
  """One tensor of the model.

  Attributes:
    name: Hugging Face's name.
    shape: (out, in).
    shifted: whether 1 was added.
    heads: number of heads whose rows are interleaved; 0 for none.
  """

  name: str
  shape: tuple[int, ...]
  shifted: bool = False
  heads: int = 0


def _axes(config: Mapping[str, Any]) -> dict[str, int]:
  head_dim = config["head_dim"]
  return {
      "V": config["vocab_size"],
      "D": config["hidden_size"],
      "F": config["intermediate_size"],
      "H": head_dim,
      "Q": config["num_attention_heads"] * head_dim,
      "K": config["num_key_value_heads"] * head_dim,
  }


def tensor_specs(
    architecture: Architecture, config: Mapping[str, Any]
) -> dict[str, TensorSpec]:
  """All tensors that a model of this config has, by their GGUF name."""
  axes = _axes(config)
  table = list(_TOP)
  if not config["tie_word_embeddings"]:
    table.append(_HEAD)
  for i in range(config["num_hidden_layers"]):
    table += [
        (f"blk.{i}.{source}", f"model.layers.{i}.{target}", shape)
        for source, target, shape in architecture.layer
    ]
  specs = {}
  for source, target, shape in table:
    heads = architecture.interleaves.get(source.rsplit(".", 1)[-1])
    specs[f"{source}.weight"] = TensorSpec(
        name=f"{target}.weight",
        shape=tuple(axes[a] for a in shape),
        shifted=architecture.shifts_norms and len(shape) == 1,
        heads=config[heads] if heads else 0,
    )
  return specs


def straight_rows(rows: int, heads: int) -> np.ndarray:
  """Where each row of a straight q or k stands in an interleaved one.

  Row (head, half, i) of the straight matrix is row (head, i, half) of the
  other, 0 <= i < head_dim / 2.

  >>> straight_rows(8, 2).tolist()
  [0, 2, 1, 3, 4, 6, 5, 7]
  """
  index = np.arange(rows).reshape(heads, rows // heads // 2, 2)
  return index.swapaxes(1, 2).reshape(rows)


def check_tensors(
    found: Mapping[str, tuple[int, ...]],
    specs: Mapping[str, TensorSpec],
    field: str,
) -> None:
  """Accounts for every tensor of the file and of the model.

  Args:
    found: shapes in the file, by GGUF name.
    specs: what the model needs.
    field: what messages call the file.

  Raises:
    ValueError: a tensor is absent, unknown or of the wrong shape.
  """
  if absent := sorted(specs.keys() - found.keys()):
    raise errors.invalid(
        field, "must hold every tensor of its model", f"no {_some(absent)}",
        "download the file, or install its package, again",
    )
  if unknown := sorted(found.keys() - specs.keys()):
    raise errors.invalid(
        field, "must hold tensors that the model knows and no others",
        _some(unknown), _HUB,
    )
  for name, spec in specs.items():
    if found[name] != spec.shape:
      raise errors.invalid(
          field, f"must hold {name} of the shape {list(spec.shape)}",
          list(found[name]), "use another file",
      )


def _some(names: Iterable[str]) -> str:
  names = list(names)
  more = f" and {len(names) - 3} more" if len(names) > 3 else ""
  return ", ".join(names[:3]) + more


class GgufFile:
  """An open GGUF file of a known architecture.

  Attributes:
    architecture: what is said of its kind.
    config: what `config.json` will say, its vocabulary uncut.
  """

  def __init__(
      self, path: str | os.PathLike[str], field: str = "the GGUF file"
  ):
    """Reads the metadata, and accounts for every tensor.

    Args:
      path: the file.
      field: what messages call it.

    Raises:
      ValueError: the file is not of a known architecture, or its tensors are
        not those of its metadata.
    """
    self._field = field
    self._reader = gguf_reader.GgufReader(path, field)
    name = self._metadata("general.architecture")
    if name not in ARCHITECTURES:
      raise errors.invalid(
          field, f"must be of an architecture of {', '.join(ARCHITECTURES)}",
          name, _HUB,
      )
    self._prefix = name
    self.architecture = ARCHITECTURES[name]
    self.config = self._config()
    self._specs = tensor_specs(self.architecture, self.config)
    check_tensors(self._reader.shapes, self._specs, field)

  def _metadata(self, key: str) -> Any:
    if key not in self._reader.fields:
      raise errors.invalid(
          self._field, "must have the metadata of a language model",
          f"no {key}", "use another file",
      )
    return self._reader.fields[key]

  def _size(self, key: str, default: int | None = None) -> int:
    key = f"{self._prefix}.{key}"
    value = self._reader.fields.get(key, default)
    if value is None:
      value = self._metadata(key)
    if not isinstance(value, int) or value < 1:
      raise errors.invalid(
          self._field, f"must have a {key} that is an integer >= 1", value,
          "use another file",
      )
    return value

  def _number(self, key: str) -> float:
    # Stored in float32: 9.999999974752427e-07.
    return float(f"{self._metadata(f'{self._prefix}.{key}'):.6g}")

  def _config(self) -> dict[str, Any]:
    fields, prefix = self._reader.fields, self._prefix
    width, heads = self._size("embedding_length"), self._size(
        "attention.head_count"
    )
    layers = self._size("block_count")
    config: dict[str, Any] = {
        "model_type": self.architecture.model_type,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": self._size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": self._size("attention.head_count_kv", heads),
        "head_dim": self._size("attention.key_length", width // heads),
        "vocab_size": len(self._metadata("tokenizer.ggml.tokens")),
        "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
        "rope_theta": self._number("rope.freq_base"),
        "tie_word_embeddings": not (
            self.architecture.may_untie
            and "output.weight" in self._reader.shapes
        ),
    }
    if f"{prefix}.context_length" in fields:
      config["max_position_embeddings"] = self._size("context_length")
    scaling = fields.get(f"{prefix}.rope.scaling.type", "none")
    if scaling != "none":
      factor = fields.get(f"{prefix}.rope.scaling.factor")
      config["rope_scaling"] = {"rope_type": scaling, "factor": factor}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
      key = f"tokenizer.ggml.{theirs}_token_id"
      if key in fields:
        config[f"{ours}_token_id"] = fields[key]
    if prefix == "gemma3":
      # The largest alone (62 layers) scales its queries by width / heads.
      scale = width // heads if layers == 62 else config["head_dim"]
      config |= {
          "sliding_window": self._size("attention.sliding_window"),
          "sliding_window_pattern": 6,
          "rope_local_base_freq": 10_000.0,
          "query_pre_attn_scalar": scale,
          "hidden_activation": "gelu_pytorch_tanh",
      }
    else:
      config |= {
          "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
      }
    return config

  def tokenizer_files(self) -> dict[str, bytes]:
    """The tokenizer's files, by name; see `gguf_tokenizer.files`."""
    return gguf_tokenizer.files(
        self._reader.fields, self.architecture.tokenizer, self._field
    )

  def check_tokenizer(self) -> None:
    """Refuses a tokenizer that cannot be rebuilt, without rebuilding it.

    Raises:
      ValueError: its kind or its pre-tokenizer is not known.
    """
    found = self._metadata("tokenizer.ggml.model")
    pre = self._reader.fields.get("tokenizer.ggml.pre", "default")
    if found != self.architecture.tokenizer or (
        found == "gpt2" and pre not in gguf_tokenizer.PRE_TOKENIZERS
    ):
      self.tokenizer_files()

  def _blocks(
      self, source: str, dtype: np.dtype, kept: np.ndarray | None
  ) -> Iterator[np.ndarray]:
    """A tensor's values, dequantised, a block of rows at a time."""
    gguf = gguf_reader.library(self._field)
    spec = self._specs[source]
    data, kind = self._reader.tensors[source]
    rows = np.arange(len(data))
    if spec.heads:
      rows = straight_rows(len(data), spec.heads)
    elif kept is not None and source in (EMBEDDING, "output.weight"):
      rows = kept
    for start in range(0, len(rows), _BLOCK_ROWS):
      block = np.ascontiguousarray(data[rows[start : start + _BLOCK_ROWS]])
      value = np.asarray(gguf.dequantize(block, kind), np.float32)
      yield (value - 1.0 if spec.shifted else value).astype(dtype)

  def write(
      self,
      folder: str | os.PathLike[str],
      dtype: str = "float32",
      kept: np.ndarray | None = None,
  ) -> None:
    """Writes model.safetensors and config.json into an existing folder.

    Args:
      folder: must exist.
      dtype: float32 or bfloat16.
      kept: int [K]. If given, only these rows of the embedding (and of a head
        of its own) are converted.

    Raises:
      ValueError: an unknown dtype.
    """
    if dtype not in _DTYPES:
      raise errors.invalid(
          "dtype", f"must be {' or '.join(_DTYPES)}", dtype, "use float32"
      )
    name, kind = _DTYPES[dtype]
    folder = pathlib.Path(folder)
    config = dict(self.config, torch_dtype=dtype)
    if kept is not None:
      config["vocab_size"] = len(kept)
      cut_ids(config, kept)
    specs = tensor_specs(self.architecture, config)
    sources = {spec.name: source for source, spec in specs.items()}
    stream.write(
        folder / "model.safetensors",
        {s.name: stream.entry(name, s.shape) for s in specs.values()},
        lambda target: self._blocks(sources[target], kind, kept),
        "convert",
    )
    (folder / "config.json").write_text(
        json.dumps(config, indent=2), encoding="utf-8"
    )


def cut_ids(config: dict[str, Any], kept: np.ndarray) -> None:
  """Turns the special ids of a config into rows of the cut embedding."""
  place = {int(full): i for i, full in enumerate(kept)}
  for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
    value = config.get(name)
    if isinstance(value, list):
      config[name] = [place[i] for i in value if i in place]
    elif value is not None:
      config[name] = place.get(value)
