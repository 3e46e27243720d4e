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
    """Drops what lies beyond `update`, and mends what breaks the invariants.

    Lines that are no records are dropped, doubled ones but for the first; the
    rest is put in order. A warning says so, and which updates have no line.
    """
    kept: dict[Any, tuple[int, str]] = {}
    trained, self._evaluated = set(), set()
    doubled, previous, moved = 0, 0, False
    for line, record in self._read():
      kind, at = record["kind"], record["update"]
      if at > update:
        continue
      moved |= at < previous
      previous = at
      key = (kind, at) if kind in ("train", "eval") else line
      if key in kept:
        doubled += 1
        continue
      kept[key] = at, line
      if kind == "eval":
        self._evaluated.add(at)
      elif kind == "train":
        trained.add(at)
    self._trained = update
    missing = sorted(set(range(1, update + 1)) - trained)
    faults = []
    if doubled:
      faults.append(f"{doubled} doubled lines, which are dropped")
    if moved:
      faults.append("lines out of order, which are sorted")
    if missing:
      faults.append(
          f"no line of {len(missing)} updates, of which {missing[0]} is the "
          f"first, though the checkpoint is of update {update}"
      )
    if faults:
      logging.warning("%s has %s.", self._path, "; ".join(faults))
    lines = [line for _, line in sorted(kept.values(), key=lambda v: v[0])]
    files.write_text(self._path, "".join(line + "\n" for line in lines))

  def _read(self) -> Iterator[tuple[str, dict[str, Any]]]:
    if not self._path.is_file():
      return
    lines = self._path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
      if not line:
        continue
      try:
        record = json.loads(line)
      except (ValueError, RecursionError):
        record = None
      if not _is_record(record):
        logging.warning(
            "%s: line %d is no record and is dropped.", self._path, number
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


def _is_record(value: Any) -> bool:
  return (
      isinstance(value, dict)
      and isinstance(value.get("kind"), str)
      and isinstance(value.get("update"), int)
      and not isinstance(value["update"], bool)
      and value["update"] >= 0
  )
