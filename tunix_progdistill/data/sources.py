"""Records out of files, folders, globs, packages and datasets on disk."""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import glob
import gzip
import importlib.util
import json
import pathlib
from typing import Any
import zlib

import grain

from tunix_progdistill import errors
from tunix_progdistill.data import config as config_lib

# What a folder is searched for, by the end of a file's name.
_ENDINGS = {
    "text": (".txt", ".md"),
    "jsonl": (".jsonl", ".jsonl.gz"),
    "array_record": (".array_record", ".arrayrecord"),
}
_HELD_OUT_SPLITS = ("validation", "test")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """One record.

  Attributes:
    fields: its values by name.
    place: where it stands (file, and line or number), for messages.
  """

  fields: Mapping[str, Any]
  place: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """A value of data_directory or eval_directory, and its name in messages.

  Attributes:
    value: file, folder or glob; several separated by commas.
    field: what the user wrote it under.
    held_out: whether it is asked for held-out data.
  """

  value: str
  field: str
  held_out: bool = False


def _in_package(part: str, place: Place) -> list[str]:
  """package:NAME/PATH as paths; the package is not imported."""
  package, _, rest = part.removeprefix("package:").partition("/")
  if not package.isidentifier():
    raise errors.invalid(
        place.field, "must name a package as package:NAME/PATH", part,
        "NAME is what `import` takes, without dots",
    )
  spec = importlib.util.find_spec(package)
  if spec is None:
    raise errors.invalid(
        place.field, "must name a package that is installed", part,
        f"run `pip install --no-deps {package}`",
    )
  folders = list(spec.submodule_search_locations or ())
  if not folders:
    raise errors.invalid(
        place.field, "must name a package that is a folder", part,
        f"{package} is a single module",
    )
  return [str(pathlib.Path(folder) / rest) for folder in folders]


def _hidden(path: pathlib.Path, folder: pathlib.Path) -> bool:
  return any(p.startswith(".") for p in path.relative_to(folder).parts)


def _is_data(path: pathlib.Path, source: str) -> bool:
  file = path.name.lower()
  if source == "array_record":  # may go on: .array_record-00000-of-00004
    return any(ending in file for ending in _ENDINGS[source])
  return file.endswith(_ENDINGS[source])


def _files(part: str, source: str, place: Place) -> list[pathlib.Path]:
  """The files behind one part, sorted."""
  packaged = part.startswith("package:")
  patterns = (
      _in_package(part, place) if packaged
      else [str(pathlib.Path(part).expanduser())]
  )
  roots: list[pathlib.Path] = []
  for pattern in patterns:
    if pathlib.Path(pattern).exists():
      roots.append(pathlib.Path(pattern))
    elif glob.has_magic(pattern):
      found = sorted(glob.glob(pattern, recursive=True))
      roots.extend(map(pathlib.Path, found))
  if not roots:
    raise errors.invalid(
        place.field,
        "must match a file" if glob.has_magic(part) else "must exist", part,
        "check what the package holds" if packaged
        else f"relative paths start at {pathlib.Path.cwd()}",
    )
  if source == "hf_disk":
    return roots
  files: list[pathlib.Path] = []
  for root in roots:
    if root.is_file():
      files.append(root)
      continue
    if not root.is_dir():  # a pipe, whose reader would wait for ever
      raise errors.invalid(
          place.field, "must be a file or a folder", str(root),
          "write what it gives into a file",
      )
    files.extend(
        sorted(
            f for f in root.rglob("*")
            if _is_data(f, source) and not _hidden(f, root) and f.is_file()
        )
    )
  if not files:
    raise errors.invalid(
        place.field,
        f"must hold files that end in {' or '.join(_ENDINGS[source])}", part,
        "name the files, or set data_source to what the folder holds",
    )
  return files


def expand(source: str, place: Place) -> list[pathlib.Path]:
  """The files (hf_disk: folders) that a place stands for, each once.

  Parts keep their order; within a part the order is sorted.

  Args:
    source: one of text, jsonl, hf_disk, array_record.
    place: where to look.

  Raises:
    ValueError: nothing is named, something does not exist, or is empty.
  """
  parts = [p for p in map(str.strip, place.value.split(",")) if p]
  if not parts:
    raise errors.invalid(
        place.field, f"must name the data of data_source {source}",
        place.value, "write a file, a folder or a glob",
    )
  files = [f for part in parts for f in _files(part, source, place)]
  return list(dict.fromkeys(files))


def decode(
    raw: bytes, where: str, field: str, mode: str, start: int = 0
) -> str:
  """UTF-8 as text, without a byte order mark, lines ended by "\\n".

  Args:
    raw: the bytes.
    where: their place, for the message.
    field: the field to blame.
    mode: strict or replace.
    start: offset of `raw` in its file.

  Raises:
    ValueError: with the offset of the first byte that is not UTF-8.
  """
  try:
    text = raw.decode("utf-8", mode)
  except UnicodeDecodeError as e:
    raise errors.invalid(
        field, "must hold UTF-8 text", where,
        f"byte {start + e.start} is 0x{raw[e.start]:02x}; save the file as "
        "UTF-8, or set data_config.encoding_errors: replace",
    ) from None
  text = text.removeprefix("\ufeff")
  return text.replace("\r\n", "\n").replace("\r", "\n")


def _parse(text: str, where: str, field: str) -> Mapping[str, Any]:
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as e:
    reason = str(e).split("\n")[0]
    raise errors.invalid(
        field, "must hold JSON, one object a record", where, reason
    ) from None
  if not isinstance(value, dict):
    raise errors.invalid(
        field, "must hold JSON objects with named fields", where,
        f"this record is a {type(value).__name__}",
    )
  return value


def _read_text(
    path: pathlib.Path, field: str, config: config_lib.DataConfig
) -> Iterator[Record]:
  text = decode(path.read_bytes(), str(path), field, config.encoding_errors)
  yield Record(fields={config.text_field: text}, place=str(path))


def _read_jsonl(
    path: pathlib.Path, field: str, config: config_lib.DataConfig
) -> Iterator[Record]:
  opener = gzip.open if path.name.lower().endswith(".gz") else open
  offset = 0
  with opener(path, "rb") as f:
    for number, line in enumerate(f, start=1):
      if line.strip():
        where = f"{path}:{number}"
        text = decode(line, where, field, config.encoding_errors, offset)
        yield Record(fields=_parse(text, where, field), place=where)
      offset += len(line)


def _read_array_record(
    path: pathlib.Path, field: str, config: config_lib.DataConfig
) -> Iterator[Record]:
  as_json = None
  try:
    source = grain.sources.ArrayRecordDataSource([str(path)])
    for i in range(len(source)):
      where = f"{path} record {i}"
      text = decode(source[i], where, field, config.encoding_errors)
      if as_json is None:  # the first record decides
        as_json = text.lstrip().startswith("{")
      yield Record(
          fields=(
              _parse(text, where, field) if as_json
              else {config.text_field: text}
          ),
          place=where,
      )
  except RuntimeError as e:  # what the reader raises on a broken file
    raise errors.invalid(
        field, "must hold array records", str(path), str(e).split("\n")[0]
    ) from None


def _read_hf_disk(path: pathlib.Path, place: Place) -> Iterator[Record]:
  import datasets  # slow to import

  try:
    found = datasets.load_from_disk(str(path))
  except FileNotFoundError:
    raise errors.invalid(
        place.field, "must be a folder that `save_to_disk` wrote", str(path),
        "it holds state.json or dataset_dict.json; files of JSON lines are "
        "data_source: jsonl",
    ) from None
  if isinstance(found, datasets.DatasetDict):
    wanted = (*_HELD_OUT_SPLITS, "train") if place.held_out else ("train",)
    split = next((s for s in wanted if s in found), None)
    if split is None:
      raise errors.invalid(
          place.field, f"must have a split {' or '.join(wanted)}",
          sorted(found), f"save one of them alone, or rename it in {path}",
      )
    found, path = found[split], path / split
  for i, fields in enumerate(found):
    yield Record(fields=fields, place=f"{path} row {i}")


def held_out_split(source: str, place: Place) -> bool:
  """Whether the data brings held-out data of its own: hf_disk's splits."""
  if source != "hf_disk":
    return False
  for path in expand(source, place):
    file = path / "dataset_dict.json"
    if file.is_file():
      splits = json.loads(file.read_text(encoding="utf-8"))["splits"]
      if any(s in splits for s in _HELD_OUT_SPLITS):
        return True
  return False


def records(config: config_lib.DataConfig, place: Place) -> Iterator[Record]:
  """Reads the records of a place, one after the other.

  Args:
    config: of a source of files, not tfds or huggingface.
    place: where they are.

  Yields:
    Records in the order of the files.

  Raises:
    ValueError: a file is missing, unreadable, not UTF-8 or not what the source
      says; the message names file and line, record or byte.
  """
  source = config.data_source
  readers = {
      "text": _read_text, "jsonl": _read_jsonl,
      "array_record": _read_array_record,
  }
  for path in expand(source, place):
    try:
      if source == "hf_disk":
        yield from _read_hf_disk(path, place)
      else:
        yield from readers[source](path, place.field, config)
    except (OSError, EOFError, zlib.error) as e:
      reason = getattr(e, "strerror", None) or str(e)
      raise errors.invalid(
          place.field, "must be readable", str(path), reason
      ) from None
