"""The house: arrows run one way, files are small, nothing is patched."""

import ast
import pathlib

import pytest

_PACKAGE = pathlib.Path(__file__).parent.parent / "tunix_progdistill"

# A room knows only rooms that stand before it.
_ROOMS = (
    "errors", "registry", "files", "kernels", "plan", "modules", "families",
    "freezing",
    "outputs", "teachers", "objectives", "strategy", "config", "monitor",
    "engine", "trainer", "hook", "students", "weights", "data", "schema",
    "report", "run", "cli",
)
_BESIDE = {
    "students": ("errors", "families"),
    "weights": ("errors", "modules", "families", "students"),
    "data": ("errors",),
    "schema": ("errors", "plan", "config", "weights", "data"),
    "report": ("errors",),
}
_FILES = sorted(_PACKAGE.rglob("*.py"))


def _room(path: pathlib.Path) -> str:
  return path.relative_to(_PACKAGE).parts[0].removesuffix(".py")


def _imports(path: pathlib.Path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      for alias in node.names:
        yield f"{node.module}.{alias.name}"
    elif isinstance(node, ast.Import):
      for alias in node.names:
        yield alias.name


def _knows(path: pathlib.Path) -> set[str]:
  """The rooms of this package that a file imports."""
  parts = [i.split(".") for i in _imports(path)]
  return {p[1] for p in parts if p[0] == _PACKAGE.name and len(p) > 1}


@pytest.mark.parametrize(
    "path", _FILES, ids=lambda p: str(p.relative_to(_PACKAGE))
)
def test_file(path):
  room = _room(path)
  if room != "__init__":
    before = _BESIDE.get(room) or _ROOMS[: _ROOMS.index(room)]
    assert _knows(path) <= {*before, room}
  if room == "kernels":
    assert not any(i.startswith(("flax", "tunix.")) for i in _imports(path))
  if room == "plan":
    assert not any(i.startswith(("flax", "jax")) for i in _imports(path))
  assert len(path.read_text().splitlines()) <= 500
  assert ast.get_docstring(ast.parse(path.read_text()))


def test_import_patches_nothing():
  """Tunix's functions are the same objects, defaults included, after import."""
  import subprocess
  import sys

  code = (
      "from tunix.models.llama3 import model as m\n"
      "from tunix.sft import peft_trainer as p\n"
      "snap = lambda: (m.apply_rope.__defaults__, m.apply_rope,"
      " dict(vars(p.PeftTrainer)), dict(vars(p)))\n"
      "before = snap()\n"
      "import tunix_progdistill\n"
      "assert before == snap()\n"
  )
  subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_wheel_holds_every_file_of_the_package():
  """What is no Python file is named in pyproject's package-data."""
  import fnmatch
  import tomllib

  settings = tomllib.loads((_PACKAGE.parent / "pyproject.toml").read_text())
  data = settings["tool"]["setuptools"]["package-data"]["tunix_progdistill"]
  others = [
      str(p.relative_to(_PACKAGE)) for p in _PACKAGE.rglob("*")
      if p.is_file() and p.suffix not in (".py", ".pyc")
  ]
  assert len(others) >= 6
  missing = [
      o for o in others if not any(fnmatch.fnmatch(o, d) for d in data)
  ]
  assert missing == []
