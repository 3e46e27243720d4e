"""Folders that are slow to make, kept between runs.

They lie in $XDG_CACHE_HOME/tunix-progdistill, or ~/.cache/tunix-progdistill.

Invariant: a folder `<name>-<hash of key>` is complete. It is made under another
name and takes its own by one rename, after `manifest.json` was written, so that
a kill leaves at most an unused partial folder. Whatever changes the content
must be in the key.
"""

from collections.abc import Callable
from collections.abc import Mapping
import hashlib
import json
import os
import pathlib
import shutil
import tempfile

from absl import logging

_MANIFEST = "manifest.json"
_PARTIAL = ".partial-"

Key = Mapping[str, str | int | float]


def root() -> pathlib.Path:
  """The folder that holds all cached folders; it may not exist yet."""
  base = os.environ.get("XDG_CACHE_HOME")
  parent = pathlib.Path(base) if base else pathlib.Path.home() / ".cache"
  return parent / "tunix-progdistill"


def path(name: str, key: Key) -> pathlib.Path:
  """Where the folder of this key is, or would be."""
  text = json.dumps(dict(key), sort_keys=True)
  digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
  return root() / f"{name}-{digest[:16]}"


def _sizes(folder: pathlib.Path) -> dict[str, int]:
  return {
      str(f.relative_to(folder)): f.stat().st_size
      for f in sorted(folder.rglob("*"))
      if f.is_file() and f.name != _MANIFEST
  }


def is_complete(folder: pathlib.Path, key: Key) -> bool:
  """Whether the folder was made for this key and all its files are there.

  Args:
    folder: A cached folder, or a path where none is.
    key: What made it.

  Returns:
    True if the manifest has the same key and the same files, of the same
    sizes, as the folder.
  """
  try:
    manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
  except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
    return False
  return manifest == {"key": dict(key), "files": _sizes(folder)}


def get(
    name: str, key: Key, build: Callable[[pathlib.Path], None]
) -> pathlib.Path:
  """The folder of this key, made if it is not there.

  A folder that is incomplete or was made for another key is deleted and made
  again. If two processes make the same one, the first to finish wins and both
  use it.

  Args:
    name: Start of the folder's name.
    key: All that the content depends on.
    build: Fills an empty folder.

  Returns:
    A complete folder.
  """
  folder = path(name, key)
  if is_complete(folder, key):
    logging.debug("Using %s", folder)
    return folder
  folder.parent.mkdir(parents=True, exist_ok=True)
  partial = pathlib.Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder.parent))
  try:
    build(partial)
    manifest = {"key": dict(key), "files": _sizes(partial)}
    (partial / _MANIFEST).write_text(
        json.dumps(manifest, indent=2), encoding="utf-8"
    )
    if is_complete(folder, key):  # another process was faster
      return folder
    if folder.exists():
      logging.warning("Replacing %s: stale or incomplete.", folder)
      shutil.rmtree(folder)
    try:
      os.replace(partial, folder)
    except OSError:
      if not is_complete(folder, key):  # else it came between the two lines
        raise
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  return folder
