"""A checkpoint folder with fewer rows in its embedding, made of another one."""

from collections.abc import Iterator
from collections.abc import Sequence
import hashlib
import json
import pathlib
import shutil
from typing import Any

import numpy as np

from tunix_progdistill import errors
from tunix_progdistill.weights import cache
from tunix_progdistill.weights import gguf
from tunix_progdistill.weights import sentencepiece_tokenizer
from tunix_progdistill.weights import stream
from tunix_progdistill.weights import tokenizer_files
from tunix_progdistill.weights import vocabulary

# Raised by one whenever the written files change; part of the cache's key.
CUT_VERSION = 1
_BLOCK_ROWS = 16_384
_INDEX = "model.safetensors.index.json"
# Tensors with one row for each piece, whatever stands before these names.
_ROWS = (
    "embed_tokens.weight", "embed_tokens_per_layer.weight", "lm_head.weight"
)
_SIZES = ("vocab_size", "vocab_size_per_layer_input")
_COPIED = ("generation_config.json", "special_tokens_map.json")


def texts_key(texts: Sequence[str]) -> str:
  """What tells these texts from any others."""
  digest = hashlib.sha256()
  for text in texts:
    raw = text.encode("utf-8", errors="surrogatepass")
    digest.update(hashlib.sha256(raw).digest())
  return digest.hexdigest()


def sentencepiece_model(
    folder: pathlib.Path, field: str = "model_config.vocabulary_size"
) -> bytes:
  """The bytes of the SentencePiece model that a cut needs.

  Raises:
    ValueError: the folder's tokenizer is of another kind, or cut already.
  """
  file, kind = tokenizer_files.find(folder, None, field)
  if kind != tokenizer_files.SENTENCEPIECE:
    raise errors.invalid(
        field, "must be null for a tokenizer that is no SentencePiece model "
        "(the merges of a byte-level BPE need every piece)", file.name,
        "leave it out",
    )
  if tokenizer_files.read_kept(file, field) is not None:
    raise errors.invalid(
        field, "must be null for a model whose vocabulary is cut already",
        str(folder), "leave it out",
    )
  model = tokenizer_files.read_bytes(file, field)
  vocabulary.check_model(model, field)
  return model


def write_tokenizer(
    folder: pathlib.Path, model: bytes, kept: np.ndarray
) -> None:
  """Writes the cut tokenizer.model and the kept ids."""
  cut = vocabulary.cut_model(model, kept)
  (folder / tokenizer_files.MODEL_FILE).write_bytes(cut)
  sentencepiece_tokenizer.write_kept(folder, kept)


def folder_of(
    source: pathlib.Path,
    texts: Sequence[str],
    size: int,
    field: str = "model_config.vocabulary_size",
) -> pathlib.Path:
  """The cached folder of `source`, cut to what the texts use.

  Args:
    source: a folder with config.json, safetensors and tokenizer.model.
    texts: the training texts.
    size: the number of pieces to keep at most.
    field: what messages call the size.

  Raises:
    ValueError: the tokenizer cannot be cut, or not so far.
  """
  source = pathlib.Path(source).expanduser().resolve()
  model = sentencepiece_model(source, field)
  digest = hashlib.sha256(model)
  for file in sorted([*source.glob("*.safetensors"), *source.glob("*.json")]):
    status = file.stat()
    digest.update(
        f"{file.name} {status.st_size} {status.st_mtime_ns}".encode()
    )
  key: cache.Key = {
      "source": str(source),
      "files": digest.hexdigest(),
      "cut_version": CUT_VERSION,
      "vocabulary_size": size,
      "text_sha256": texts_key(texts),
  }

  def build(folder: pathlib.Path) -> None:
    kept = vocabulary.choose_pieces(model, texts, size, field)
    _cut(source, folder, kept)
    write_tokenizer(folder, model, kept)

  return cache.get("cut", key, build)


def _cut(source: pathlib.Path, folder: pathlib.Path, kept: np.ndarray) -> None:
  config = json.loads((source / "config.json").read_text(encoding="utf-8"))
  for part in (config, config.get("text_config")):
    if isinstance(part, dict):
      part |= {name: len(kept) for name in _SIZES if name in part}
      gguf.cut_ids(part, kept)
  (folder / "config.json").write_text(
      json.dumps(config, indent=2), encoding="utf-8"
  )
  total = 0
  for file in sorted(source.glob("*.safetensors")):
    total += _cut_file(file, folder / file.name, kept)
  if (source / _INDEX).exists():
    index = json.loads((source / _INDEX).read_text(encoding="utf-8"))
    index["metadata"] = {"total_size": total}
    (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")
  for name in (
      tokenizer_files.CONFIG_FILE, tokenizer_files.TEMPLATE_FILE, *_COPIED
  ):
    if (source / name).exists():
      shutil.copyfile(source / name, folder / name)


def _cut_file(
    source: pathlib.Path, target: pathlib.Path, kept: np.ndarray
) -> int:
  """Writes a safetensors file with fewer rows; returns its tensors' bytes."""
  old = stream.read_header(source)
  data = np.memmap(source, np.uint8, mode="r")
  new, rows = {}, {}
  for name, entry in old.items():
    new[name] = entry
    if name.endswith(_ROWS):
      rows[name] = kept
      new[name] = stream.Entry(
          dtype=entry.dtype, shape=(len(kept), *entry.shape[1:]),
          size_bytes=entry.size_bytes // entry.shape[0] * len(kept),
      )

  def blocks(name: str) -> Iterator[Any]:
    entry = old[name]
    raw = data[entry.start : entry.start + entry.size_bytes]
    if name not in rows:
      step = 1 << 26
      for start in range(0, len(raw), step):
        yield raw[start : start + step]
      return
    table = raw.reshape(entry.shape[0], -1)
    for start in range(0, len(kept), _BLOCK_ROWS):
      yield table[kept[start : start + _BLOCK_ROWS]]

  stream.write(target, new, blocks, "cut")
  return sum(entry.size_bytes for entry in new.values())
