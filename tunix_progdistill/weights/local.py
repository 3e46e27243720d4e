"""A model from a folder with `config.json` and safetensors files."""

from collections.abc import Iterator
import contextlib
import dataclasses
import importlib
import os
import pathlib
from typing import Any

from absl import logging
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from tunix.models import safetensors_loader

from tunix_progdistill import errors
from tunix_progdistill import families
from tunix_progdistill.families import hf as hf_lib
from tunix_progdistill.weights import config as config_lib
from tunix_progdistill.weights import coverage
from tunix_progdistill.weights import loaded as loaded_lib

_FIELD = "model_config.model_path"
_AXES = ("fsdp", "tp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Checkpoint:
  """A folder whose every tensor is accounted for."""

  folder: pathlib.Path
  family: families.Family
  hf: hf_lib.HuggingFace
  hf_config: dict[str, Any]
  config: Any
  shapes: dict[str, Any]
  account: coverage.Account


def check(folder: str | os.PathLike[str], field: str = _FIELD) -> None:
  """Refuses a folder that `load` could not read; reads headers only.

  Args:
    folder: the folder.
    field: the setting that named it, for messages.

  Raises:
    ValueError: one line that names the setting, the rule, what was found and
      the remedy.
  """
  _inspect(folder, field, jnp.float32)


def describe(
    folder: str | os.PathLike[str], field: str = _FIELD
) -> loaded_lib.Description:
  """What `config.json` says; no tensor file is opened."""
  family, hf_config = _read_config(_folder(folder, field), field)
  with _named(field):
    config = _side(family).config_from_hf(hf_config, jnp.float32)
  vocabulary = getattr(config, "num_embed", None)
  return loaded_lib.Description(
      family=family.name,
      vocab_size=config.vocab_size if vocabulary is None else vocabulary,
      num_layers=config.num_layers,
      embed_dim=config.embed_dim,
      bos_id=_first(hf_config.get("bos_token_id")),
      eos_id=_first(hf_config.get("eos_token_id")),
      rope_theta=getattr(config, "rope_theta", None),
      hf_config=hf_config,
  )


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    mesh: jax.sharding.Mesh | None = None,
    config: config_lib.ModelConfig | None = None,
    field: str = _FIELD,
) -> tuple[nnx.Module, families.Family, Any, dict[str, Any]]:
  """The model of a folder, by Tunix's own loader.

  Every tensor of the files and every parameter of the model is accounted for
  before an array is read.

  Args:
    folder: a folder with config.json and safetensors files.
    dtype: float32 or bfloat16, of the parameters.
    mesh: places the parameters as Tunix's config of the family says.
    config: where flash attention is asked for.
    field: the setting that named the folder, for messages.

  Returns:
    The model, its family, Tunix's ModelConfig, and config.json's text part.

  Raises:
    ValueError: as `check`, and where a tied head differs from its embedding.
  """
  if dtype not in config_lib.DTYPES:
    raise errors.invalid(
        "dtype", f"must be {' or '.join(config_lib.DTYPES)}", dtype,
        "use float32",
    )
  _check_mesh(mesh)
  found = _inspect(folder, field, jnp.dtype(dtype))
  tunix_config = _with_flash_attention(found, config)
  _check_tied_head(found, field)
  model = _read(found, tunix_config, jnp.dtype(dtype), mesh)
  _check_loaded(model, jnp.dtype(dtype), found)
  logging.info(
      "%s with %d layers from %s: %d tensors as %s", found.family.name,
      tunix_config.num_layers, found.folder, len(found.account.tensors), dtype,
  )
  return model, found.family, tunix_config, found.hf_config


def _folder(folder: str | os.PathLike[str], field: str) -> pathlib.Path:
  path = pathlib.Path(folder).expanduser()
  if not os.fspath(folder) or not path.is_dir():
    raise errors.invalid(
        field, "must be a folder with config.json and *.safetensors",
        os.fspath(folder), "give the path of an existing folder",
    )
  return path


def _read_config(
    folder: pathlib.Path, field: str
) -> tuple[families.Family, dict[str, Any]]:
  path = folder / "config.json"
  if not path.is_file():
    raise errors.invalid(
        field, "must hold a config.json", str(folder),
        "download the model's config.json into it",
    )
  raw = coverage.read_json(path, field)
  with _named(field):
    return families.of_config(raw)


@contextlib.contextmanager
def _named(field: str) -> Iterator[None]:
  """Puts the setting's name before a message about config.json."""
  try:
    yield
  except ValueError as e:
    raise ValueError(f"{field}: {e}") from e


def _side(family: families.Family) -> hf_lib.HuggingFace:
  assert family.hf is not None, family.name
  return family.hf


def _first(ids: Any) -> int | None:
  return (ids or [None])[0] if isinstance(ids, list) else ids


def _inspect(
    folder: str | os.PathLike[str], field: str, dtype: Any
) -> _Checkpoint:
  path = _folder(folder, field)
  family, hf_config = _read_config(path, field)
  stored = coverage.read(path, field)
  hf = _side(family)
  layers = hf_config.get("num_hidden_layers")
  if isinstance(layers, int) and layers > len(stored):
    raise errors.invalid(
        f"{field}: num_hidden_layers", "must be at most the number of tensors, "
        f"{len(stored)}", layers, "mend config.json",
    )
  with _named(field):
    config = hf.config_from_hf(hf_config, dtype)
  shapes = hf.shapes(family.model_class(), config)
  return _Checkpoint(
      folder=path, family=family, hf=hf, hf_config=hf_config, config=config,
      shapes=shapes,
      account=coverage.account(stored, hf, config, shapes, field),
  )


def _check_mesh(mesh: jax.sharding.Mesh | None) -> None:
  if mesh is not None and set(_AXES) - set(mesh.axis_names):
    raise errors.invalid(
        "mesh", f"must have the axes {' and '.join(_AXES)}, which Tunix's "
        "models are placed by", tuple(mesh.axis_names),
        "give the one that is not needed the size 1",
    )


def _with_flash_attention(
    found: _Checkpoint, config: config_lib.ModelConfig | None
) -> Any:
  if config is None or not config.use_flash_attention:
    return found.config
  names = {f.name for f in dataclasses.fields(found.config)}
  if "use_flash_attention" not in names:
    raise errors.invalid(
        "model_config.use_flash_attention",
        f"must be false: Tunix has none for {found.family.name}", True,
        "set it to false",
    )
  change = {
      "use_flash_attention": True,
      "flash_attention_block_size": config.flash_attention_block_size,
      "use_sliding_window_kv_cache": False,
  }
  return dataclasses.replace(
      found.config, **{k: v for k, v in change.items() if k in names}
  )


def _check_tied_head(found: _Checkpoint, field: str) -> None:
  """A head in the file of a tied model must be the embedding itself."""
  heads = [n for n in found.account.unused if n.endswith("lm_head.weight")]
  for name in heads:
    embedding = next(
        s for t, s in found.account.tensors.items()
        if t.name == "model.embed_tokens.weight"
    )
    files = coverage.read(found.folder, field)
    head = next(s for s in files if s.name == name)
    if not _equal(head, embedding):
      raise errors.invalid(
          field, "must hold a head that equals the embedding, for config.json "
          "ties the two", name, "set tie_word_embeddings to false if the "
          "family has models with a head of their own",
      )
    logging.info("%s equals the embedding, which config.json ties it to", name)


def _equal(a: coverage.Stored, b: coverage.Stored, rows: int = 4096) -> bool:
  n = a.shape[0]
  with (
      safetensors.safe_open(a.file, framework="flax") as left,
      safetensors.safe_open(b.file, framework="flax") as right,
  ):
    x, y = left.get_slice(a.name), right.get_slice(b.name)
    ends = [(i, min(i + rows, n)) for i in range(0, n, rows)]
    return all(
        np.array_equal(np.asarray(x[i:j]), np.asarray(y[i:j])) for i, j in ends
    )


def _read(
    found: _Checkpoint, config: Any, dtype: Any, mesh: Any
) -> nnx.Module:
  """Reads the arrays.

  Tunix's faster mode takes all tensors of a file to be of one dtype; where
  they are not, the slower one is asked for.
  """
  mode = "auto" if found.account.one_dtype else "original"
  folder = str(found.folder)
  known = all(
      _loader_knows(found.hf, tensor.name, stored.name)
      for tensor, stored in found.account.tensors.items()
  )
  if known and found.hf.loader_is_right(config):
    loader = importlib.import_module(found.hf.loader)
    return loader.create_model_from_safe_tensors(
        file_dir=folder, config=config, mesh=mesh, dtype=dtype, mode=mode
    )
  return safetensors_loader.load_and_create_model(
      file_dir=folder, model_class=found.family.model_class(), config=config,
      key_mapping=lambda config: {r"(.+)": (r"\1", None)},
      mesh=mesh, preprocess_fn=_by_table(found), dtype=dtype, mode=mode,
  )


def _loader_knows(hf: hf_lib.HuggingFace, name: str, stored: str) -> bool:
  if not name.startswith("model."):
    return stored == name
  rest = name.removeprefix("model.")
  return any(stored == f"{prefix}{rest}" for prefix in hf.loader_prefixes)


def _by_table(found: _Checkpoint) -> Any:
  """Turns tensors of files into parameters by our own table.

  Tunix's slower mode calls it once for each file, so the parts of a stacked
  parameter are kept until all are there.
  """
  wanted = {s.name: t for t, s in found.account.tensors.items()}
  parts: dict[str, dict[int, Any]] = {}

  def preprocess(tensors: dict[str, Any]) -> dict[str, Any]:
    filled = {}
    for name, value in tensors.items():
      if name not in wanted:
        continue
      tensor = wanted[name]
      shape = found.shapes[tensor.param].shape
      value = tensor.from_hf(value, shape)
      key = tensor.param.replace("/", ".")
      if tensor.part is None:
        filled[key] = value
        continue
      waiting = parts.setdefault(key, {})
      waiting[tensor.part] = value
      if len(waiting) == shape[0]:
        stack = np.stack if isinstance(value, np.ndarray) else jnp.stack
        filled[key] = stack([waiting[i] for i in range(shape[0])])
        del parts[key]
    return filled

  return preprocess


def _check_loaded(model: nnx.Module, dtype: Any, found: _Checkpoint) -> None:
  """After the load, each parameter is an array of the dtype asked for."""
  wrong = []
  for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    value = variable.get_value()
    if not isinstance(value, jax.Array) or value.dtype != dtype:
      wrong.append("/".join(map(str, path)))
  if wrong:
    raise errors.invalid(
        str(found.folder), f"must give every parameter a {dtype.name} array",
        coverage.some(wrong), "use a version of Tunix that this package "
        "supports",
    )
