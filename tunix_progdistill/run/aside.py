"""`Aside`: what lies in a folder, out of the way until it is known to go.

A folder is named after what is going on, so that a process that is killed
between any two steps leaves something that `recover` puts right:

  .aside-moving   both it and the folder hold old entries
  .aside          it holds the old entries, the folder new ones
  .aside-gone     it holds old entries that nobody needs
"""

import os
import pathlib
import shutil


class Aside:
  """Entries of one folder that may come back.

  Args:
    folder: where they lie.
    names: of the entries; others are not touched.
  """

  def __init__(self, folder: pathlib.Path, names: tuple[str, ...]):
    self._folder, self._names = folder, names
    self._moving = folder / ".aside-moving"
    self._here = folder / ".aside"
    self._gone = folder / ".aside-gone"

  @property
  def is_open(self) -> bool:
    """Whether a process was killed before it said what is to become of them."""
    return self._moving.exists() or self._here.exists() or self._gone.exists()

  def recover(self) -> None:
    """Puts right what a killed process left."""
    if self._moving.exists():
      self._bring_back()
    if self._here.exists():
      self.put_back()
    if self._gone.exists():
      shutil.rmtree(self._gone)

  def take(self) -> None:
    """Moves the entries out of the way."""
    self._moving.mkdir()
    for name in self._names:
      if os.path.lexists(self._folder / name):
        (self._folder / name).rename(self._moving / name)
    self._moving.rename(self._here)

  def put_back(self) -> None:
    """Deletes new entries of the same names, and moves the old ones back."""
    for name in self._names:
      delete(self._folder / name)
    self._here.rename(self._moving)
    self._bring_back()

  def drop(self) -> None:
    """Deletes the entries for good."""
    self._here.rename(self._gone)
    shutil.rmtree(self._gone)

  def _bring_back(self) -> None:
    for entry in self._moving.iterdir():
      entry.rename(self._folder / entry.name)
    self._moving.rmdir()


def delete(path: pathlib.Path) -> None:
  """Deletes a file, a link or a whole folder; no error if it is not there."""
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)
