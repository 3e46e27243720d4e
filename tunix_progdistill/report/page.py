"""One self-contained page of one run."""

import dataclasses
from typing import Any

import jinja2
import numpy as np

from tunix_progdistill.report import charts
from tunix_progdistill.report import formats
from tunix_progdistill.report import panels
from tunix_progdistill.report import read
from tunix_progdistill.report import results
from tunix_progdistill.report import svg

# Pixels. The headline chart is drawn for wide and for narrow screens.
_NARROW = (360, 244)
_WIDE = (1080, 290)
_MOST_ROWS = 60
_MOST_EVENTS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
  """An entry of a legend: a line's sample and its label."""

  label: str
  kind: str
  colour: str
  dashes: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
  """A chart as it stands in a page; `wide` is empty unless drawn twice."""

  title: str
  unit: str
  note: str
  keys: tuple[Key, ...]
  narrow: str
  wide: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
  """A row of the evaluations' table."""

  update: int
  values: tuple[str, ...]


def environment() -> jinja2.Environment:
  """Templates that escape, and that show what no page may hold."""
  made = jinja2.Environment(
      loader=jinja2.PackageLoader("tunix_progdistill.report"),
      autoescape=True, trim_blocks=True, lstrip_blocks=True,
      undefined=jinja2.StrictUndefined,
      finalize=lambda value: (
          formats.text(value) if type(value) is str else value
      ),
  )
  made.filters.update({
      "fixed": formats.fixed, "significant": formats.significant,
      "count": formats.count, "scaled": formats.scaled,
      "moment": formats.moment, "describe": charts.describe,
      "letter": charts.letter,
      "duration": formats.duration,
  })
  return made


def render(run: read.Run) -> str:
  """The page's HTML."""
  drawn = [figure(chart) for chart in panels.of_run(run)]
  return environment().get_template("page.html").render(
      run=run,
      sentence=results.sentence(run),
      tiles=results.tiles(run),
      figures=drawn,
      events=run.events[:_MOST_EVENTS],
      more_events=max(0, len(run.events) - _MOST_EVENTS),
      models=results.models(run),
      evaluations=_evaluations(run),
  )


def figure(chart: charts.Chart, *, wide: bool | None = None) -> Figure:
  """A chart drawn, with its legend.

  Args:
    chart: to draw.
    wide: whether to draw it for wide screens too; the chart of the KL is.
  """
  if wide is None:
    wide = chart.key == "kl"
  narrow = charts.draw(chart, width=_NARROW[0], height=_NARROW[1])
  keys = [
      Key(
          label=line.label, kind="line",
          colour=svg.variable(svg.SERIES[line.colour % len(svg.SERIES)]),
          dashes=" ".join(f"{n:g}" for n in line.dashes),
      )
      for line in chart.lines
      if line.series.finite.size
  ]
  keys += [
      Key(
          label=reference.label, kind=reference.kind,
          colour=svg.variable(svg.TARGET),
      )
      for reference in chart.references
  ]
  if chart.events:
    last = charts.letter(len(chart.events) - 1)
    label = {"A": "event A", "B": "events A and B"}.get(last)
    keys.append(Key(
        label=label or f"events A to {last}", kind="event",
        colour=svg.variable(svg.EVENT),
    ))
  return Figure(
      title=chart.title,
      unit=chart.unit,
      note=", ".join(_notes(chart)),
      keys=tuple(keys),
      narrow=narrow,
      wide=(
          charts.draw(
              chart, width=_WIDE[0], height=_WIDE[1], variant="-wide"
          )
          if wide
          else ""
      ),
  )


def _notes(chart: charts.Chart) -> list[str]:
  notes = ["log scale"] if chart.is_log else []
  if any(charts.is_averaged(chart, n, _NARROW[0]) for n in chart.lines):
    notes.append("mean and range")
  return notes


def _evaluations(run: read.Run) -> list[Evaluation]:
  """Rows of the table, at most `_MOST_ROWS`, the first and last among them."""
  names = (
      panels.KL, "distill/student_cross_entropy", "distill/student_perplexity",
      panels.TOP1, panels.CORRELATION, panels.CORRELATION_TOP32,
  )
  series = next(iter(run.evaluations.values()), None)
  if series is None:
    return []
  total = len(series.updates)
  rows = np.unique(
      np.linspace(0, total - 1, min(total, _MOST_ROWS)).round().astype(int)
  )
  return [
      Evaluation(
          update=int(series.updates[row]),
          values=tuple(_cell(run, name, row) for name in names),
      )
      for row in rows
  ]


def _cell(run: read.Run, name: str, row: Any) -> str:
  if name not in run.evaluations:
    return formats.NONE
  value = float(run.evaluations[name].values[row])
  shown = formats.significant if "perplexity" in name else formats.fixed
  return shown(value)
