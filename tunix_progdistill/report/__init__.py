"""The report of a run: one self-contained page, and the comparison of runs."""

from collections.abc import Sequence
import os
import pathlib

from tunix_progdistill.report import comparison
from tunix_progdistill.report import page
from tunix_progdistill.report import read

__all__ = ["compare", "write"]


def write(run_folder: str | pathlib.Path) -> pathlib.Path:
  """Writes `report.html` into a run folder, in one move.

  Args:
    run_folder: as written by `tunix-progdistill train`; the run may still be
      going on, or have been killed.

  Returns:
    The path of the page.

  Raises:
    ValueError: if it is no run folder, or if a file of it is damaged.
  """
  run = read.run_folder(run_folder)
  return _replace(run.folder / "report.html", page.render(run))


def compare(
    run_folders: Sequence[str | pathlib.Path], out: str | pathlib.Path
) -> pathlib.Path:
  """Writes one page that holds several runs on the same axes.

  Args:
    run_folders: at least one.
    out: the page; its folder is made if there is none.

  Returns:
    The path of the page.

  Raises:
    ValueError: if there is no folder, if one is no run folder, or if a file of
      one is damaged.
  """
  html = comparison.render(run_folders)
  out = pathlib.Path(out)
  out.parent.mkdir(parents=True, exist_ok=True)
  return _replace(out, html)


def _replace(path: pathlib.Path, html: str) -> pathlib.Path:
  """Writes beside and renames, so that no reader meets half a page."""
  beside = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    beside.write_bytes(html.encode("utf-8", "replace"))
    os.replace(beside, path)
  finally:
    beside.unlink(missing_ok=True)
  return path
