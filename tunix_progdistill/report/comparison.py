"""Several runs on one page: the same axes, one table, what differs."""

from collections.abc import Sequence
import dataclasses
import pathlib
import re
from typing import Any

import yaml

from tunix_progdistill import errors
from tunix_progdistill.report import formats
from tunix_progdistill.report import page
from tunix_progdistill.report import panels
from tunix_progdistill.report import read
from tunix_progdistill.report import results
from tunix_progdistill.report import svg

_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_UNSET = "not set"
_LONGEST = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A run in the table of results."""

  name: str
  colour: str
  run: read.Run
  before: read.Model | None
  after: read.Model | None
  update_sec: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """A key of the configuration that is not the same in all runs."""

  key: str
  values: tuple[str, ...]


def render(run_folders: Sequence[str | pathlib.Path]) -> str:
  """The comparison's HTML.

  Args:
    run_folders: at least one.

  Raises:
    ValueError: if there is none, or one cannot be read.
  """
  if isinstance(run_folders, (str, pathlib.Path)) or not run_folders:
    raise errors.invalid(
        "run_folders", "must list at least one run folder", run_folders,
        "give the folders that `tunix-progdistill train` wrote",
    )
  runs = [read.run_folder(folder) for folder in run_folders]
  names = distinct_names([run.folder for run in runs])
  rows = [
      Row(
          name=name,
          colour=svg.variable(svg.SERIES[i % len(svg.SERIES)]),
          run=run,
          before=results.before(run),
          after=results.after(run),
          update_sec=_mean_update_sec(run),
      )
      for i, (name, run) in enumerate(zip(names, runs, strict=True))
  ]
  return page.environment().get_template("compare.html").render(
      rows=rows,
      figures=[
          page.figure(chart, wide=chart.key == "kl")
          for chart in panels.of_runs(runs, names)
      ],
      differences=differences(runs),
      no_config=[
          name for name, run in zip(names, runs, strict=True)
          if run.config_text is None
      ],
  )


def distinct_names(folders: Sequence[pathlib.Path]) -> list[str]:
  """Short names for folders, as long as it takes to tell them apart.

  >>> p = pathlib.Path
  >>> distinct_names([p("/a/one"), p("/a/two")])
  ['one', 'two']
  >>> distinct_names([p("/a/x/run"), p("/b/x/run"), p("/c")])
  ['a/x/run', 'b/x/run', 'c']
  >>> distinct_names([p("/a/run"), p("/a/run")])
  ['run', 'run (2)']
  """
  parts = [
      [p for p in folder.resolve().parts if p != folder.resolve().anchor]
      or [str(folder)]
      for folder in folders
  ]
  names = []
  for i, mine in enumerate(parts):
    others = [p for p in parts if p != mine]
    length = 1
    while length < len(mine) and any(
        p[-length:] == mine[-length:] for p in others
    ):
      length += 1
    name = "/".join(mine[-length:])
    again = parts[:i].count(mine)
    names.append(f"{name} ({again + 1})" if again else name)
  return names


def differences(runs: Sequence[read.Run]) -> list[Difference]:
  """The keys whose values are not the same in all runs that have a config.

  Raises:
    ValueError: if a config.yaml cannot be read.
  """
  flats = [_flat(run) for run in runs]
  known = [flat for flat in flats if flat is not None]
  keys = dict.fromkeys(key for flat in known for key in flat)
  return [
      Difference(
          key=key,
          values=tuple(
              formats.NONE if flat is None else _shown(flat, key)
              for flat in flats
          ),
      )
      for key in keys
      if len({_shown(flat, key) for flat in known}) > 1
  ]


def _flat(run: read.Run) -> dict[str, Any] | None:
  """config.yaml as dotted key -> value; None if there is none."""
  if run.config_text is None:
    return None
  path = run.folder / "config.yaml"
  try:
    tree = yaml.safe_load(run.config_text)
  except (yaml.YAMLError, RecursionError, ValueError) as e:
    raise errors.invalid(
        str(path), "must be YAML", " ".join(str(e).split())[:150],
        "mend it, or leave this run out",
    ) from e
  flat: dict[str, Any] = {}
  _flatten(tree, "", flat)
  return flat


def _flatten(value: Any, key: str, into: dict[str, Any]) -> None:
  items: Any = ()
  if isinstance(value, dict):
    items = value.items()
  elif isinstance(value, list):
    items = list(enumerate(value))
  for name, item in items:
    _flatten(item, f"{key}.{name}" if key else str(name), into)
  if not items:
    into[key or "config"] = value


def _shown(flat: dict[str, Any], key: str) -> str:
  """A value as text; 1e-4, which PyYAML takes for text, as the number."""
  if key not in flat:
    return _UNSET
  value = flat[key]
  if isinstance(value, str) and _EXPONENT.fullmatch(value):
    value = float(value)
  if value is None or isinstance(value, bool):
    return {None: "null", True: "true", False: "false"}[value]
  shown = str(value)
  return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"


def _mean_update_sec(run: read.Run) -> float | None:
  """Seconds per update over all stages, weighted by their updates."""
  spent, updates = 0.0, 0
  for stage in run.stages:
    end = run.updates if stage.end_update is None else stage.end_update
    if stage.update_sec is None or end <= stage.first_update:
      continue
    spent += stage.update_sec * (end - stage.first_update)
    updates += end - stage.first_update
  return spent / updates if updates else None
