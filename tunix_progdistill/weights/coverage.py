"""Every tensor of the files and of the model accounted for, from headers."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import pathlib
from typing import Any

from absl import logging
import safetensors

from tunix_progdistill import errors
from tunix_progdistill.families import hf as hf_lib

_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# What Tunix's loader casts from.
_DTYPES = ("F32", "BF16", "F16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
  """A tensor as a file's header describes it.

  Attributes:
    file: the file that holds it.
    name: its name there.
    dtype: in the spelling of safetensors, such as BF16.
    shape: its shape.
  """

  file: pathlib.Path
  name: str
  dtype: str
  shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
  """All tensors of a model, each with where it is stored.

  Attributes:
    tensors: the family's table, tensor -> stored.
    unused: the names of tensors that the model has no place for.
    one_dtype: whether each file has tensors of one dtype only.
  """

  tensors: Mapping[hf_lib.Tensor, Stored]
  unused: tuple[str, ...]
  one_dtype: bool


def some(names: Iterable[str]) -> str:
  """The first three names and the number of the others."""
  names = list(names)
  more = f" and {len(names) - 3} more" if len(names) > 3 else ""
  return ", ".join(names[:3]) + more


def read(folder: pathlib.Path, field: str) -> list[Stored]:
  """The tensors of all safetensors files of a folder; reads headers only.

  Raises:
    ValueError: no such file, one that is cut short or is none, a tensor in two
      files, or files that do not fit their index.
  """
  files = sorted(folder.glob("*.safetensors"))
  if not files:
    pickles = sorted(
        f.name for f in folder.iterdir() if f.suffix in _PICKLES
    )
    raise errors.invalid(
        field, "must hold *.safetensors files" + (
            "; pickled files run code and are never read" if pickles else ""
        ), f"{folder} with {some(pickles)}" if pickles else str(folder),
        "save the model with transformers' save_pretrained" if pickles
        else "download the model's safetensors files into it",
    )
  found: dict[str, Stored] = {}
  for file in files:
    for stored in _read_header(file, field):
      other = found.setdefault(stored.name, stored)
      if other is not stored:
        raise errors.invalid(
            field, "must hold each tensor once",
            f"{stored.name} in {other.file.name} and {file.name}",
            "keep one of the two files",
        )
  _check_index(folder, field, found)
  return list(found.values())


def _read_header(file: pathlib.Path, field: str) -> list[Stored]:
  try:
    with safetensors.safe_open(file, framework="numpy") as opened:
      slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
      return [
          Stored(
              file=file, name=name, dtype=str(s.get_dtype()),
              shape=tuple(s.get_shape()),
          )
          for name, s in slices.items()
      ]
  except (safetensors.SafetensorError, OSError) as e:
    raise errors.invalid(
        field, "must hold whole safetensors files",
        f"{file.name} of {_size(file)} bytes ({' '.join(str(e).split())})",
        "download the file again",
    ) from e


def _size(file: pathlib.Path) -> int:
  return file.stat().st_size if file.exists() else 0


def _check_index(
    folder: pathlib.Path, field: str, found: Mapping[str, Stored]
) -> None:
  """Refuses an index that names files or tensors that are not there."""
  path = folder / _INDEX
  if not path.exists():
    return
  places = read_json(path, field).get("weight_map")
  if not isinstance(places, Mapping):
    raise errors.invalid(
        field, f"must hold an index with a weight_map ({_INDEX})", places,
        "download the file again",
    )
  missing = sorted({
      str(f) for f in places.values() if not (folder / str(f)).exists()
  })
  if missing:
    raise errors.invalid(
        field, f"must hold every file that {_INDEX} names",
        f"no {some(missing)}", "download the missing files",
    )
  wrong = sorted(
      name for name, file in places.items()
      if name not in found or found[name].file.name != file
  )
  if wrong:
    raise errors.invalid(
        field, f"must hold tensors where {_INDEX} says", some(wrong),
        "download the index and its files again, of one revision",
    )


def read_json(path: pathlib.Path, field: str) -> dict[str, Any]:
  """A JSON object from a file, or a ValueError of one line."""
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except (ValueError, OSError) as e:
    raise errors.invalid(
        field, f"must hold a readable {path.name}",
        " ".join(str(e).split()), "download the file again",
    ) from e
  if not isinstance(value, dict):
    raise errors.invalid(
        field, f"must hold a {path.name} with a JSON object", value,
        "download the file again",
    )
  return value


def account(
    stored: Sequence[Stored],
    hf: hf_lib.HuggingFace,
    config: Any,
    shapes: Mapping[str, Any],
    field: str,
) -> Account:
  """Fits the tensors of the files to the parameters of the model.

  Args:
    stored: what the files hold.
    hf: the family's table.
    config: Tunix's ModelConfig.
    shapes: path -> shape of every parameter of the model.
    field: the setting that named the files.

  Raises:
    ValueError: a parameter without a tensor, a tensor without a parameter, a
      wrong shape, or a dtype that cannot be read.
  """
  table = {tensor.name: tensor for tensor in hf.tensors(config)}
  check_table(table.values(), shapes)
  unused: list[str] = []
  unknown: list[str] = []
  found: dict[str, Stored] = {}
  head = None
  for item in stored:
    name = hf.table_name(item.name)
    if name in table:
      other = found.setdefault(name, item)
      if other is not item:
        raise errors.invalid(
            field, "must hold each tensor once",
            f"{other.name} and {item.name}", "keep one of the two",
        )
    elif hf.is_unused(item.name):
      unused.append(item.name)
    elif _is_tied_head(name, hf, config):
      unused.append(item.name)
      head = item
    else:
      unknown.append(item.name)
  missing = [name for name in table if name not in found]
  if missing:
    raise errors.invalid(
        field, "must hold every tensor of the model that config.json "
        "describes", f"no {some(missing)}", _missing_remedy(missing, found),
    )
  if unknown:
    raise errors.invalid(
        field, "must hold tensors of the model that config.json describes "
        "and no others", some(unknown),
        "check config.json, or remove the file with the others (an adapter?)",
    )
  _check_shapes(
      [(item, table[n].hf_shape(shapes[table[n].param].shape))
       for n, item in found.items()]
      + ([(head, found["model.embed_tokens.weight"].shape)] if head else []),
      field,
  )
  wrong = [f"{s.name} ({s.dtype})" for s in found.values()
           if s.dtype not in _DTYPES]
  if wrong:
    raise errors.invalid(
        field, f"must hold tensors of {', '.join(_DTYPES)}", some(wrong),
        "take the model's unquantized repository",
    )
  if unused:
    logging.info(
        "%d tensors are not used by the text model: %s", len(unused),
        some(unused),
    )
  kinds = {(s.file, s.dtype) for s in stored}
  return Account(
      tensors={table[n]: found[n] for n in table}, unused=tuple(unused),
      one_dtype=len(kinds) == len({file for file, _ in kinds}),
  )


def _is_tied_head(name: str, hf: hf_lib.HuggingFace, config: Any) -> bool:
  return name.endswith("lm_head.weight") and hf.tied(config)


def _missing_remedy(missing: list[str], found: Mapping[str, Any]) -> str:
  if missing == ["lm_head.weight"] and found:
    return "set tie_word_embeddings to true if the head is the embedding"
  return "download all files of the model, or check config.json"


def _check_shapes(
    pairs: Iterable[tuple[Stored, tuple[int, ...]]], field: str
) -> None:
  wrong = [
      f"{s.name} {list(s.shape)} for {list(shape)}" for s, shape in pairs
      if s.shape != tuple(shape)
  ]
  if wrong:
    raise errors.invalid(
        field, "must hold tensors of the shapes that config.json asks for",
        some(wrong), "check config.json, or download it and the files of one "
        "revision",
    )


def check_table(
    table: Iterable[hf_lib.Tensor], shapes: Mapping[str, Any]
) -> None:
  """The table must fill every parameter of Tunix's model, each part once."""
  parts: dict[str, list[int | None]] = {}
  for tensor in table:
    parts.setdefault(tensor.param, []).append(tensor.part)
  wrong = sorted(set(parts) ^ set(shapes)) or sorted(
      param for param, found in parts.items()
      if found != [None] and found != list(range(shapes[param].shape[0]))
  )
  if wrong:
    raise errors.invalid(
        "the model", "must have the parameters that its family has in Tunix",
        some(wrong), "use a plain model without adapters, and a version of "
        "Tunix that this package supports",
    )
