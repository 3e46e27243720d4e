"""`ModelConfig`: which model, and where its weights are."""

import ast
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import difflib
from typing import Any

from tunix_progdistill import errors
from tunix_progdistill.families import remat
from tunix_progdistill.students import adapters

SOURCES = ("local", "gguf", "huggingface", "kaggle", "gcs")
DTYPES = ("float32", "bfloat16")
QUANTIZATIONS = ("int8", "nf4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Which model, and where its weights are: Tunix's `model_config`.

  `local`, `gguf`, `vocabulary_size`, `dtype`, `layers` and `quantization` are
  this package's; everything else is Tunix's and means what it means there.

  Attributes:
    model_name: the model's name in Tunix's spelling or the hub's, such as
      gemma-3-270m or llama-3.2-1b; empty where the files tell (local, gguf).
    model_source: where the weights are: local (a folder with config.json,
      safetensors and tokenizer; so does an empty string), gguf (a GGUF file),
      huggingface (the hub), kaggle or gcs.
    model_id: the repository on the hub, such as google/gemma-3-270m.
    model_path: local: the folder. gguf: the file, or package:NAME for one that
      a Python package ships. kaggle and gcs: the path there.
    model_download_path: folder for downloaded files; empty for the cache.
    intermediate_ckpt_dir: folder where Tunix keeps a converted Gemma from
      Kaggle.
    rng_seed: seed of the random state that a new model is given, >= 0.
    model_display: print the structure of the loaded model.
    use_flash_attention: use Tunix's flash attention where the family has it.
    flash_attention_block_size: its block size in tokens, >= 1.
    remat_config: what the backward pass computes again to save memory: none,
      block (attention and MLP) or decoder (whole layers); Tunix's numbers 1, 2
      and 3 are taken as well. Only a student has a backward pass.
    lora_config: train adapters instead of the weights, by qwix: module_path (a
      regex on module paths), rank, alpha, and perhaps dropout, weight_qtype
      (int8, int4 or nf4, for the frozen kernels) and tile_size. Only a student
      has adapters; the exported student has them in its weights.
    quantization: int8 or nf4, of a teacher's kernels, by qwix; null leaves them
      as they are.
    mesh: mesh of devices as in Tunix, shape and axis_names, such as shape
      "(1,2)" and axis_names "('fsdp','tp')"; null for one device.
    dtype: float32 or bfloat16, of the loaded parameters.
    vocabulary_size: keep this many pieces of a SentencePiece vocabulary, those
      that the training text needs, >= 1; null keeps all.
    layers: numbers of the layers that the model keeps, from 0; null keeps all.
      Only a student is cut.

  Raises:
    ValueError: on a value out of range, or of another type.
  """

  model_name: str = ""
  model_source: str = "local"
  model_id: str = ""
  model_path: str = ""
  model_download_path: str = ""
  intermediate_ckpt_dir: str = ""
  rng_seed: int = 0
  model_display: bool = False
  use_flash_attention: bool = False
  flash_attention_block_size: int = 1024
  remat_config: str = "none"
  lora_config: Mapping[str, Any] | None = None
  quantization: str | None = None
  mesh: Mapping[str, Any] | None = None
  dtype: str = "float32"
  vocabulary_size: int | None = None
  layers: tuple[int, ...] | None = None

  def __post_init__(self):
    errors.plain_fields(self)
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type in (str, "str") and not isinstance(value, str):
        raise _invalid(field.name, "must be a string", value, "quote it")
      if field.type in (bool, "bool") and not isinstance(value, bool):
        raise _invalid(field.name, "must be true or false", value, "try false")
    object.__setattr__(self, "model_source", _source(self.model_source))
    try:
      object.__setattr__(
          self, "remat_config", remat.name_of(self.remat_config)
      )
    except ValueError as e:
      raise ValueError(f"model_config.{e}") from None
    if self.dtype not in DTYPES:
      raise _invalid("dtype", *_near(self.dtype, DTYPES))
    _check_integer("rng_seed", self.rng_seed, 0)
    _check_integer(
        "flash_attention_block_size", self.flash_attention_block_size, 1
    )
    if self.vocabulary_size is not None:
      _check_integer("vocabulary_size", self.vocabulary_size, 1)
    if self.lora_config is not None:
      if not isinstance(self.lora_config, Mapping):
        raise _invalid(
            "lora_config", "must be a mapping", self.lora_config,
            "write e.g. {module_path: .*q_einsum, rank: 16, alpha: 16.0}",
        )
      if self.lora_config:  # Tunix's own YAML has an empty one
        adapters.check(self.lora_config, "model_config.lora_config")
    if self.quantization is not None and self.quantization not in QUANTIZATIONS:
      raise _invalid(
          "quantization", *_near(self.quantization, QUANTIZATIONS)
      )
    object.__setattr__(self, "layers", _layers(self.layers))
    if self.mesh is not None:
      mesh_axes(self.mesh)


def _invalid(name: str, rule: str, value: Any, remedy: str) -> ValueError:
  return errors.invalid(f"model_config.{name}", rule, value, remedy)


def _near(value: Any, valid: Sequence[str]) -> tuple[str, Any, str]:
  near = difflib.get_close_matches(str(value).lower(), valid, n=1, cutoff=0.5)
  return (
      f"must be one of {', '.join(valid)}", value,
      f"did you mean {near[0]}?" if near else f"try {valid[0]}",
  )


def _source(value: str) -> str:
  """The source, `local` where Tunix's own default leaves it empty."""
  if value in ("internal", "maxtext"):
    raise _invalid(
        "model_source", f"must be one of {', '.join(SOURCES)}", value,
        "convert the checkpoint to safetensors and give its folder as local",
    )
  if value and value not in SOURCES:
    raise _invalid("model_source", *_near(value, SOURCES))
  return value or "local"


def _check_integer(name: str, value: Any, least: int) -> None:
  if isinstance(value, bool) or not isinstance(value, int) or value < least:
    raise _invalid(
        name, f"must be a whole number of at least {least}", value,
        f"try {max(least, 1024 if name.startswith('flash') else least)}",
    )


def _layers(value: Any) -> tuple[int, ...] | None:
  if value is None:
    return None
  good = isinstance(value, Sequence) and not isinstance(value, str)
  numbers = tuple(errors.plain(i) for i in value) if good else ()
  if not numbers or any(
      isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in numbers
  ):
    raise _invalid(
        "layers", "must name at least one layer by its number, from 0", value,
        "try [0, 1], or null for all",
    )
  return numbers


def mesh_axes(mesh: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
  """(shape, names) of a mesh, from Tunix's strings or from lists.

  Raises:
    ValueError: it is not a shape and as many names.
  """
  remedy = "try shape \"(1,1)\" and axis_names \"('fsdp','tp')\""
  if not isinstance(mesh, Mapping) or set(mesh) != {"shape", "axis_names"}:
    raise _invalid("mesh", "must have shape and axis_names", mesh, remedy)
  shape, names = (_sequence(mesh[k]) for k in ("shape", "axis_names"))
  if (
      not shape or not names or len(shape) != len(names)
      or any(type(n) is not int or n < 1 for n in shape)
      or any(not isinstance(n, str) for n in names)
  ):
    raise _invalid(
        "mesh", "must have a size of at least 1 and a name for each axis",
        dict(mesh), remedy,
    )
  return shape, names


def _sequence(value: Any) -> tuple[Any, ...] | None:
  if isinstance(value, str):
    try:
      value = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      return None
  if isinstance(value, str) or not isinstance(value, Sequence):
    return None
  return tuple(value)
