"""Reads a run folder: whatever of it there is.

A run may still be going on, may have been killed within a line of
metrics.jsonl, and may never have evaluated. None of these is an error: what is
missing is None, or an empty tuple or mapping.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import json
import math
import pathlib
from typing import Any
from typing import TypeVar

import numpy as np

from tunix_progdistill import errors

FILES = ("config.yaml", "metrics.jsonl", "summary.json")
# Keys of a line that place it; everything else is a value.
_PLACES = ("kind", "update", "time_sec", "stage")

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
  """One value over updates.

  Attributes:
    updates: [n], ascending, each once.
    values: [n]; NaN where the value was missing or not finite.
  """

  updates: np.ndarray
  values: np.ndarray

  @property
  def finite(self) -> np.ndarray:
    """The values that are finite."""
    return self.values[np.isfinite(self.values)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
  """Something that the plan did not foresee, at `update`."""

  update: int
  name: str
  value: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """What one stage was and cost; None where it is not known.

  Attributes:
    name: as in the plan.
    first_update: updates done before it.
    end_update: updates done after it; None while it is open.
    update_sec: of an update, the first ones left out.
    first_update_sec: of its first update, compilation included.
    flops: floating-point operations of an update.
    optimizer_bytes: size of the optimizer's state.
    trainable_parameters: how many.
    compiles: of the training step.
  """

  name: str
  first_update: int
  end_update: int | None
  update_sec: float | None = None
  first_update_sec: float | None = None
  flops: float | None = None
  optimizer_bytes: float | None = None
  trainable_parameters: float | None = None
  compiles: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """A row of the models' table, measured on the held-out data."""

  name: str
  parameters: float | None = None
  kl_div_tau1: float | None = None
  cross_entropy: float | None = None
  top1_agreement: float | None = None
  correlation: float | None = None
  correlation_top32: float | None = None

  @property
  def perplexity(self) -> float | None:
    """exp(cross-entropy), infinite beyond float64."""
    if self.cross_entropy is None:
      return None
    try:
      return math.exp(self.cross_entropy)
    except OverflowError:
      return math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
  """A prompt, and (model, text) pairs of what each model wrote after it."""

  prompt: str
  continuations: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A run folder.

  Attributes:
    folder: where it was read.
    title: from summary.json, else the folder's name.
    status: running, stopped, finished or failed; None without summary.json.
    cause: why it failed.
    updates: done so far.
    wall_sec: from start to end.
    last_time_sec: the time of the last line of metrics.jsonl.
    train: one series per logged name, of updates.
    evaluations: one series per logged name, of evaluations.
    events: in order.
    stages: those of summary.json, else those seen in metrics.jsonl.
    models: rows of the models' table.
    samples: continuations.
    targets: logged name -> value.
    notes: sentences for the reader.
    versions: (package, version) pairs.
    command: to paste.
    config_text: config.yaml as it is.
  """

  folder: pathlib.Path
  title: str
  status: str | None
  cause: str | None
  updates: int
  wall_sec: float | None
  last_time_sec: float | None
  train: Mapping[str, Series]
  evaluations: Mapping[str, Series]
  events: tuple[Event, ...]
  stages: tuple[Stage, ...]
  models: tuple[Model, ...]
  samples: tuple[Sample, ...]
  targets: Mapping[str, float]
  notes: tuple[str, ...]
  versions: tuple[tuple[str, str], ...]
  command: str | None
  config_text: str | None

  def model(self, name: str) -> Model | None:
    return next((m for m in self.models if m.name == name), None)


def run_folder(folder: str | pathlib.Path) -> Run:
  """Reads the run folder.

  Args:
    folder: as written by `tunix-progdistill train`.

  Returns:
    What there is.

  Raises:
    ValueError: if it is no run folder, or if a file of it is damaged other than
      by a last line that was cut off.
  """
  folder = pathlib.Path(folder)
  if not any((folder / name).is_file() for name in FILES):
    raise errors.invalid(
        "run_folder", f"must hold one of {', '.join(FILES)}", str(folder),
        "give the folder that `tunix-progdistill train` wrote",
    )
  lines, cut = _lines(folder / "metrics.jsonl")
  summary = _json_object(folder / "summary.json")
  train = _latest(r for r in lines if r["kind"] == "train")
  evals = _latest(r for r in lines if r["kind"] == "eval")
  notes = _list(summary.get("notes"), lambda note: _text(note) or None)
  if cut:
    notes += (
        "The last line of metrics.jsonl was cut off, as when a run is killed "
        "while it writes; it is left out here.",
    )
  updates = max([_integer(summary.get("updates")) or 0, *train])
  return Run(
      folder=folder,
      title=_text(summary.get("title")) or folder.resolve().name,
      status=_text(summary.get("status")) or None,
      cause=_text(summary.get("cause")) or None,
      updates=updates,
      wall_sec=_number(summary.get("wall_sec")),
      last_time_sec=next(
          (t for r in reversed(lines) if (t := _number(r.get("time_sec")))),
          None,
      ),
      train=_series(train),
      evaluations=_series(evals),
      events=_events(lines),
      stages=_list(summary.get("stages"), _stage) or _seen_stages(train),
      models=_list(summary.get("models"), _model),
      samples=_list(summary.get("samples"), _sample),
      targets={
          name: number
          for name, value in _mapping(summary.get("targets")).items()
          if (number := _number(value)) is not None
      },
      notes=notes,
      versions=tuple(
          (_text(name), _text(version))
          for name, version in _json_object(folder / "versions.json").items()
      ),
      command=_file_text(folder / "command.txt"),
      config_text=_file_text(folder / "config.yaml"),
  )


def _file_text(path: pathlib.Path) -> str | None:
  if not path.is_file():
    return None
  return path.read_text(encoding="utf-8", errors="replace").strip() or None


def _json_object(path: pathlib.Path) -> dict[str, Any]:
  text = _file_text(path)
  if text is None:
    return {}
  remedy = "mend it, or remove it to have a report without it"
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as e:
    raise errors.invalid(str(path), "must be JSON", text[:80], remedy) from e
  if not isinstance(value, dict):
    raise errors.invalid(str(path), "must hold an object", value, remedy)
  return value


def _lines(path: pathlib.Path) -> tuple[list[dict[str, Any]], bool]:
  """The records of metrics.jsonl, and whether its last line was cut off."""
  if not path.is_file():
    return [], False
  raw = [
      (number, line)
      for number, line in enumerate(path.read_bytes().split(b"\n"), start=1)
      if line.strip()
  ]
  records = []
  for number, line in raw:
    record = _record(line)
    if record is not None:
      records.append(record)
    elif number == raw[-1][0]:
      return records, True
    else:
      raise errors.invalid(
          f"{path}:{number}", "must be a JSON object with kind and update",
          line[:80].decode("utf-8", "replace"), "mend or remove this line",
      )
  return records, False


def _record(line: bytes) -> dict[str, Any] | None:
  """The line's object, None if it is none or lacks kind or update."""
  try:
    value = json.loads(line)
  except (ValueError, RecursionError):
    return None
  if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
    return None
  return value if _integer(value.get("update")) is not None else None


def _latest(
    records: Iterable[dict[str, Any]],
) -> dict[int, dict[str, Any]]:
  """update -> its last record, in the order of updates."""
  by_update = {int(r["update"]): r for r in records}
  return dict(sorted(by_update.items()))


def _series(records: Mapping[int, Mapping[str, Any]]) -> dict[str, Series]:
  names = dict.fromkeys(
      name for r in records.values() for name in r if name not in _PLACES
  )
  updates = np.array(list(records), dtype=np.int64)
  found = {}
  for name in names:
    values = np.array(
        [_nan_unless_number(r.get(name)) for r in records.values()],
        dtype=np.float64,
    )
    found[name] = Series(updates=updates, values=values)
  return found


def _events(lines: Iterable[dict[str, Any]]) -> tuple[Event, ...]:
  events = [
      Event(
          update=int(r["update"]),
          name=_text(r.get("event")) or "event",
          value=_number(r.get("value")),
      )
      for r in lines
      if r["kind"] == "event"
  ]
  return tuple(sorted(events, key=lambda e: e.update))


def _seen_stages(
    train: Mapping[int, Mapping[str, Any]],
) -> tuple[Stage, ...]:
  """Stages as metrics.jsonl shows them, where no summary tells."""
  groups: list[tuple[int, list[int]]] = []
  for update, record in train.items():
    number = _integer(record.get("stage", record.get("progressive/stage")))
    if number is None:
      continue
    if not groups or groups[-1][0] != number:
      groups.append((number, []))
    groups[-1][1].append(update)
  stages = []
  for number, updates in groups:
    last = train[updates[-1]]
    times = [_nan_unless_number(train[u].get("time_sec")) for u in updates]
    gaps = np.diff(times)
    gaps = gaps[np.isfinite(gaps) & (gaps > 0)]
    stages.append(
        Stage(
            name=f"stage {number + 1}",
            first_update=updates[0] - 1,
            end_update=updates[-1],
            update_sec=float(np.median(gaps)) if gaps.size else None,
            trainable_parameters=_number(
                last.get("progressive/trainable_parameters")
            ),
        )
    )
  return tuple(stages)


def _stage(value: Any) -> Stage | None:
  value = _mapping(value)
  first = _integer(value.get("first_update"))
  if first is None:
    return None
  return Stage(
      name=_text(value.get("name")),
      first_update=first,
      end_update=_integer(value.get("end_update")),
      **_numbers(Stage, value, after="end_update"),
  )


def _model(value: Any) -> Model | None:
  value = _mapping(value)
  name = _text(value.get("name"))
  if not name:
    return None
  return Model(name=name, **_numbers(Model, value, after="name"))


def _sample(value: Any) -> Sample | None:
  value = _mapping(value)
  continuations = tuple(
      (_text(name), _text(text))
      for name, text in _mapping(value.get("continuations")).items()
      if text is not None
  )
  if not continuations:
    return None
  return Sample(
      prompt=_text(value.get("prompt")), continuations=continuations
  )


def _numbers(
    owner: type, value: Mapping[str, Any], *, after: str
) -> dict[str, float | None]:
  """The numeric fields of `owner` that follow the field `after`."""
  names = [f.name for f in dataclasses.fields(owner)]
  names = names[names.index(after) + 1 :]
  return {name: _number(value.get(name)) for name in names}


def _list(
    value: Any, read: Callable[[Any], _T | None]
) -> tuple[_T, ...]:
  """What `read` makes of each item, None left out."""
  if not isinstance(value, list):
    return ()
  return tuple(item for v in value if (item := read(v)) is not None)


def _mapping(value: Any) -> Mapping[str, Any]:
  return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
  return "" if value is None else str(value)


def _number(value: Any) -> float | None:
  number = _nan_unless_number(value)
  return None if math.isnan(number) else number


def _nan_unless_number(value: Any) -> float:
  """A finite number as it is; NaN for null, text and what is not finite."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return math.nan
  try:
    number = float(value)
  except OverflowError:  # an integer beyond float64
    return math.nan
  return number if math.isfinite(number) else math.nan


def _integer(value: Any) -> int | None:
  number = _number(value)
  return None if number is None or number < 0 else int(number)
