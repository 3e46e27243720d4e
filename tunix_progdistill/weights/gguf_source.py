"""`model_source: gguf`: a GGUF file, converted once into a cached folder."""

from collections.abc import Sequence
import json
import pathlib

from absl import logging
import numpy as np

from tunix_progdistill import errors
from tunix_progdistill.weights import cache
from tunix_progdistill.weights import config as config_lib
from tunix_progdistill.weights import cut
from tunix_progdistill.weights import gguf
from tunix_progdistill.weights import gguf_reader
from tunix_progdistill.weights import loaded as loaded_lib
from tunix_progdistill.weights import local
from tunix_progdistill.weights import packages
from tunix_progdistill.weights import tokenizer_files
from tunix_progdistill.weights import vocabulary


def _field(field: str) -> str:
  return f"{field}.model_path"


def _config_folder(
    config: config_lib.ModelConfig, field: str
) -> pathlib.Path:
  """A cached folder with `config.json`, read from the metadata alone.

  So a file that must be assembled first is assembled once for this, and once
  for its weights.

  Raises:
    ValueError: the file cannot be converted.
  """
  gguf_reader.library(_field(field))
  source = packages.resolve(config.model_path, _field(field))
  if source.path is None:
    key = source.key() | {"converter_version": gguf.CONVERTER_VERSION}
  else:
    status = source.path.stat()
    key = {
        "path": str(source.path.resolve()), "size": status.st_size,
        "mtime": status.st_mtime_ns,
        "converter_version": gguf.CONVERTER_VERSION,
    }

  def build(folder: pathlib.Path) -> None:
    with source.open() as path:
      file = gguf.GgufFile(path, _field(field))
      file.check_tokenizer()
      (folder / "config.json").write_text(
          json.dumps(file.config), encoding="utf-8"
      )

  return cache.get("gguf-config", key, build)


def check(config: config_lib.ModelConfig, field: str) -> None:
  """Refuses a file that cannot be converted; no weights are read.

  Raises:
    ValueError: one line.
  """
  folder = _config_folder(config, field)
  local.describe(folder, _field(field))
  kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))[
      "model_type"
  ]
  if config.vocabulary_size is not None and kind != "gemma3_text":
    raise errors.invalid(
        f"{field}.vocabulary_size", "must be null for a tokenizer that is no "
        "SentencePiece model (the merges of a byte-level BPE need every "
        "piece)", config.vocabulary_size, "leave it out",
    )


def describe(
    config: config_lib.ModelConfig, field: str
) -> loaded_lib.Description:
  """What the metadata says."""
  return local.describe(_config_folder(config, field), _field(field))


def folder_of(
    config: config_lib.ModelConfig, texts: Sequence[str] | None, field: str
) -> pathlib.Path:
  """The cached folder that the file was converted into.

  Args:
    config: which file; its dtype, and its vocabulary_size with `texts`.
    texts: the training texts, which choose the pieces that are kept.
    field: what messages call the config.

  Raises:
    ValueError: one line.
  """
  check(config, field)
  source = packages.resolve(config.model_path, _field(field))
  key: dict[str, str | int | float] = {
      **source.key(),
      "converter_version": gguf.CONVERTER_VERSION,
      "dtype": config.dtype,
  }
  size = config.vocabulary_size
  if size is not None:
    assert texts is not None
    key |= {"vocabulary_size": size, "text_sha256": cut.texts_key(texts)}

  def build(folder: pathlib.Path) -> None:
    logging.info("Converting %s", config.model_path)
    with source.open() as path:
      file = gguf.GgufFile(path, _field(field))
      files = file.tokenizer_files()
      kept: np.ndarray | None = None
      if size is not None:
        model = files.pop(tokenizer_files.MODEL_FILE)
        kept = vocabulary.choose_pieces(
            model, texts or (), size, f"{field}.vocabulary_size"
        )
        cut.write_tokenizer(folder, model, kept)
      for name, data in files.items():
        (folder / name).write_bytes(data)
      file.write(folder, config.dtype, kept)

  return cache.get("gguf", key, build)
