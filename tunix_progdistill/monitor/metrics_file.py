"""`MetricsFile`: a run's records as JSON lines, each exactly once."""

from collections.abc import Iterator
from collections.abc import Mapping
import json
import os
import pathlib
import time
from typing import Any

from absl import logging

from tunix_progdistill import files


class MetricsFile:
  """Appends records to `metrics.jsonl`.

  A line is {"kind": "train" | "eval" | "event", "update": n, "time_sec": s,
  ...values}; a value that is not finite is null. Invariants:
    one train line for every update, in order from 1
    at most one eval line for every update
  A run that goes on from update n calls `rewind(n)` first: what was written
  after the checkpoint will be written anew.

  Args:
    path: the file; it is made where it is not there.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self._path = pathlib.Path(path)
    self._evaluated: set[int] = set()
    self._trained = 0

  def rewind(self, update: int) -> None:
    """Drops what lies beyond `update`, and a line that a kill cut short."""
    keep = []
    self._evaluated, self._trained = set(), 0
    for line, record in self._read():
      if record["update"] > update:
        continue
      keep.append(line)
      if record["kind"] == "eval":
        self._evaluated.add(record["update"])
      elif record["kind"] == "train":
        self._trained = record["update"]
    if self._trained < update:
      logging.warning(
          "%s ends at update %d, the checkpoint is of update %d: the lines in "
          "between are lost.", self._path, self._trained, update,
      )
    files.write_text(self._path, "".join(line + "\n" for line in keep))

  def _read(self) -> Iterator[tuple[str, dict[str, Any]]]:
    if not self._path.is_file():
      return
    lines = self._path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
      if not line:
        continue
      try:
        record = json.loads(line)
      except json.JSONDecodeError:
        record = None
      if not isinstance(record, dict) or not isinstance(
          record.get("update"), int
      ):
        logging.warning(
            "%s: line %d is cut short and is dropped.", self._path, number
        )
        continue
      yield line, record

  def records(self, kind: str) -> list[dict[str, Any]]:
    """All records of a kind, in order."""
    return [r for _, r in self._read() if r["kind"] == kind]

  def write(self, kind: str, update: int, values: Mapping[str, Any]) -> None:
    """Appends one line; an evaluation that stands there already is left out.

    Args:
      kind: "train", "eval" or "event".
      update: updates done.
      values: by their names in the logs.
    """
    if kind == "eval":
      if update in self._evaluated:
        return
      self._evaluated.add(update)
    elif kind == "train":
      if update <= self._trained:
        return
      self._trained = update
    record = {
        "kind": kind, "update": update, "time_sec": round(time.time(), 3),
        **{k: files.finite(v) for k, v in values.items()},
    }
    with open(self._path, "a", encoding="utf-8") as f:
      f.write(json.dumps(record, allow_nan=False) + "\n")
