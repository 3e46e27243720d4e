"""A student as a folder that transformers, Tunix and this package read."""

from collections.abc import Iterator
import contextlib
import glob
import json
import os
import pathlib
import shutil
from typing import Any
import uuid

from absl import logging
from flax import nnx
import jax
import numpy as np
import safetensors
import safetensors.numpy
import tqdm

from tunix_progdistill import errors
from tunix_progdistill import families
from tunix_progdistill.families import hf as hf_lib
from tunix_progdistill.weights import coverage
from tunix_progdistill.weights import loaded as loaded_lib

MAX_SHARD_BYTES = 5_000_000_000
# Fields of the source's config.json that say nothing of what is computed.
_KEPT = (
    "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings",
    "initializer_range", "attention_dropout", "cache_implementation",
)
_Names = list[tuple[str, hf_lib.Tensor]]


def export(
    model: nnx.Module,
    folder: str | os.PathLike[str],
    *,
    loaded: loaded_lib.Loaded,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
  """Writes `model` as config.json, safetensors and tokenizer files.

  The new folder is written beside the old one and takes its place when it is
  whole and on the disk; a process that dies before leaves the old one as it
  was.

  Args:
    model: a model of a known family, without adapters.
    folder: where to; an existing folder must be empty or an earlier export.
    loaded: what the model was made of: the tokenizer and the parts of
      config.json that are not in the model.
    max_shard_bytes: the most bytes of tensors in one file.

  Raises:
    ValueError: one line; a folder that holds something else, or a model that
      has no form in Hugging Face's files.
  """
  target = pathlib.Path(folder).expanduser().absolute()
  check_export(target, loaded)
  recover_export(target)
  family = families.of(model)
  if family.hf is None:
    raise errors.invalid(
        "model", "must be of a family of Tunix to be exported",
        type(model).__name__, "save its parameters with a checkpoint",
    )
  config: Any = model.config  # type: ignore[attr-defined]
  values = {
      "/".join(map(str, path)): variable.get_value()
      for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
  }
  table = family.hf.tensors(config)
  coverage.check_table(table, values)
  dtype = _common_dtype(values)
  fields = _config_json(family.hf, config, dtype, loaded)
  with _replaced(target) as new:
    _write_json(new / "config.json", fields)
    names = [(family.hf.export_name(t.name), t) for t in table]
    _write_tensors(new, names, values, max_shard_bytes)
    if loaded.tokenizer is not None:
      loaded.tokenizer.save(new)
    coverage.account(
        coverage.read(new, "export"), family.hf, config, values, "export"
    )
  logging.info(
      "exported %s as %s to %s, layers: %d", family.name, dtype, target,
      config.num_layers,
  )


def check_export(
    folder: str | os.PathLike[str], loaded: loaded_lib.Loaded
) -> None:
  """Refuses a folder that `export` could not write to.

  Args:
    folder: where to; it need not be there.
    loaded: what the model was made of.

  Raises:
    ValueError: one line; it holds something else.
  """
  target = pathlib.Path(folder).expanduser().absolute()
  if loaded.folder is not None and target.exists() and (
      target.resolve() == pathlib.Path(loaded.folder).resolve()
  ):
    raise errors.invalid(
        "folder", "must not be the folder that the weights came from",
        str(target), "give a new folder",
    )
  if target.is_symlink() or (target.exists() and not target.is_dir()):
    raise errors.invalid(
        "folder", "must be a folder or not exist yet", str(target),
        "give a new folder",
    )
  if target.is_dir() and any(target.iterdir()) and not (
      (target / "config.json").is_file()
      and any(target.glob("*.safetensors"))
      and not any(p.is_dir() for p in target.iterdir())
  ):
    raise errors.invalid(
        "folder", "must be empty or an earlier export", str(target),
        "give a new folder",
    )


def _common_dtype(values: dict[str, Any]) -> str:
  kinds = sorted({v.dtype.name for v in values.values()})
  if len(kinds) != 1 or kinds[0] not in ("float32", "bfloat16", "float16"):
    raise errors.invalid(
        "model", "must have parameters of one dtype, float32, bfloat16 or "
        "float16", kinds, "cast the parameters",
    )
  return kinds[0]


def _config_json(
    hf: hf_lib.HuggingFace, config: Any, dtype: str, loaded: loaded_lib.Loaded
) -> dict[str, Any]:
  """What the model computes from the model, the rest from its source."""
  kept = {k: loaded.hf_config[k] for k in _KEPT if k in loaded.hf_config}
  fields = kept | hf.config_to_hf(config) | {"torch_dtype": dtype}
  for kind in ("bos", "eos", "pad"):
    name = f"{kind}_token_id"
    value = getattr(loaded.tokenizer, f"{kind}_id", None)
    known = fields.get(name)
    if value is None or value < 0 or (
        isinstance(known, list) and value in known
        and max(known) < fields["vocab_size"]
    ):
      continue
    fields[name] = int(value)
  return fields


def _write_json(path: pathlib.Path, value: Any) -> None:
  text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
  path.write_text(text + "\n", encoding="utf-8")


def _write_tensors(
    folder: pathlib.Path, names: _Names, values: dict[str, Any], limit: int
) -> None:
  """Writes shards of at most `limit` bytes, and their index."""
  sizes = {}
  shards: list[_Names] = [[]]
  filled = 0
  for name, tensor in names:
    whole = values[tensor.param]
    sizes[name] = whole.size * whole.dtype.itemsize // (
        whole.shape[0] if tensor.part is not None else 1
    )
    if shards[-1] and filled + sizes[name] > limit:
      shards.append([])
      filled = 0
    shards[-1].append((name, tensor))
    filled += sizes[name]
  places = {}
  with tqdm.tqdm(total=len(names), desc="export", disable=None) as bar:
    for i, shard in enumerate(shards, 1):
      file = (
          f"model-{i:05}-of-{len(shards):05}.safetensors"
          if len(shards) > 1 else "model.safetensors"
      )
      arrays = {}
      for name, tensor in shard:
        value = np.asarray(jax.device_get(values[tensor.param]))
        arrays[name] = np.ascontiguousarray(tensor.to_hf(value))
        places[name] = file
        bar.update()
      try:
        safetensors.numpy.save_file(
            arrays, folder / file, metadata={"format": "pt"}
        )
      except safetensors.SafetensorError as e:  # a full disk, above all
        raise OSError(f"{folder / file} cannot be written: {e}") from e
  if len(shards) > 1:
    _write_json(folder / "model.safetensors.index.json", {
        "metadata": {"total_size": sum(sizes.values())}, "weight_map": places,
    })


def recover_export(folder: str | os.PathLike[str]) -> None:
  """Puts right what a killed `export` into `folder` left beside it.

  No other process may be exporting there.
  """
  target = pathlib.Path(folder)
  for old in target.parent.glob(f".{glob.escape(target.name)}.old-*"):
    if target.exists():
      shutil.rmtree(old)
    else:
      old.rename(target)
  for new in target.parent.glob(f".{glob.escape(target.name)}.new-*"):
    shutil.rmtree(new)


@contextlib.contextmanager
def _replaced(target: pathlib.Path) -> Iterator[pathlib.Path]:
  """A new folder to write into, which then takes the place of `target`."""
  target.parent.mkdir(parents=True, exist_ok=True)
  mark = uuid.uuid4().hex[:8]
  new = target.with_name(f".{target.name}.new-{mark}")
  old = target.with_name(f".{target.name}.old-{mark}")
  new.mkdir()
  try:
    yield new
    for file in [*new.rglob("*"), new]:
      _sync(file)
    if target.exists():
      target.rename(old)
    try:
      new.rename(target)
    except OSError:
      if old.exists():
        old.rename(target)
      raise
    _sync(target.parent)
  finally:
    shutil.rmtree(new, ignore_errors=True)  # gone already if all went well
  if old.exists():
    shutil.rmtree(old)


def _sync(path: pathlib.Path) -> None:
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)
