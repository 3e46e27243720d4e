"""Charts over updates as inline SVG, drawn by matplotlib.

A drawing holds lines, stages, events and references; its title and legend are
text of the page, where they wrap and cover nothing.
"""

from collections.abc import Sequence
import dataclasses
import io
import math
from typing import Any
import warnings

import matplotlib
from matplotlib import figure
from matplotlib import ticker
from matplotlib.backends import backend_svg
import numpy as np

from tunix_progdistill.report import formats
from tunix_progdistill.report import read
from tunix_progdistill.report import svg
from tunix_progdistill.report import thin

TARGET = "target"
FLOOR = "floor"

_FONT = 12.0
_STAGE_FONT = 11.0
# Sides of the plotting area, in pixels from the figure's.
_LEFT, _RIGHT, _BOTTOM = 46, 12, 38
_STAGE_ROW, _EVENT_ROW, _TOP = 17, 14, 8
_DASHES: dict[str, Any] = {TARGET: (0, (6, 3)), FLOOR: (0, (1.5, 2.5))}
_ROUNDS: tuple[tuple[float, ...], ...] = ((), (6.0, 2.0), (2.0, 2.0))
# From this ratio of the largest to the smallest value an axis is logarithmic.
_LOG_RATIO = 15.0
_MOST_MARKERS = 60
_TICKS = ticker.FuncFormatter(lambda value, _: formats.tick(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
  """One line; `colour` counts the page's palette, then again in dashes."""

  label: str
  series: read.Series
  colour: int = 0

  @property
  def dashes(self) -> tuple[float, ...]:
    """Lengths of dash and gap; empty for a line drawn through."""
    return _ROUNDS[self.colour // len(svg.SERIES) % len(_ROUNDS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
  """A horizontal line; `kind` is TARGET or FLOOR."""

  label: str
  value: float
  kind: str = TARGET


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
  """Everything that one chart shows.

  Attributes:
    key: unique within the page; of letters, digits and dashes.
    title: what is shown.
    unit: of the values, empty if they have none.
    lines: at least one with a finite value.
    references: targets and floors.
    stages: shaded in turn and named where there is room.
    events: vertical lines, lettered in order.
    from_zero: whether a linear axis starts at 0.
    may_be_log: whether values over a wide range get a logarithmic axis.
    noisy: whether more points than pixels are shown as their mean, with the
      extremes faintly behind it.
  """

  key: str
  title: str
  unit: str = ""
  lines: tuple[Line, ...]
  references: tuple[Reference, ...] = ()
  stages: tuple[read.Stage, ...] = ()
  events: tuple[read.Event, ...] = ()
  from_zero: bool = False
  may_be_log: bool = True
  noisy: bool = False

  @property
  def last_update(self) -> int:
    return max(
        [1, *(int(n.series.updates[-1]) for n in self.lines if _shows(n))]
    )

  @property
  def is_log(self) -> bool:
    values = self._values()
    return (
        self.may_be_log
        and bool(np.all(values > 0))
        and float(values.max()) > _LOG_RATIO * float(values.min())
    )

  @property
  def summary(self) -> str:
    """The chart in words."""
    parts = []
    for line in self.lines:
      if _shows(line):
        first, last = line.series.finite[[0, -1]]
        parts.append(
            f"{line.label} from {formats.significant(first)}"
            f" to {formats.significant(last)}"
        )
    parts += [f"{r.label}" for r in self.references]
    if self.stages:
      parts.append("stages: " + ", ".join(s.name for s in self.stages))
    if self.events:
      parts.append(f"{len(self.events)} events")
    axis = "logarithmic" if self.is_log else "linear"
    return formats.one_line(
        f"Over {self.last_update} updates, {axis} axis: "
        + "; ".join(parts) + "."
    )

  def _values(self) -> np.ndarray:
    """Every value that the vertical axis must hold."""
    drawn = [n.series.finite for n in self.lines]
    return np.concatenate([*drawn, [r.value for r in self.references]])


def has_values(lines: Sequence[Line]) -> bool:
  return any(_shows(line) for line in lines)


def letter(index: int) -> str:
  """The sign of an event.

  >>> letter(0), letter(25), letter(26), letter(701)
  ('A', 'Z', 'AA', 'ZZ')
  """
  sign = ""
  index += 1
  while index:
    index, rest = divmod(index - 1, 26)
    sign = chr(ord("A") + rest) + sign
  return sign


def describe(event: read.Event) -> str:
  """What an event was, in words."""
  value = "" if event.value is None else formats.significant(event.value)
  words = {
      "advance": "went on to the next stage early",
      "scale_rate": f"learning rate \N{MULTIPLICATION SIGN} {value}",
      "resume": f"resumed from update {value}",
  }
  known = words.get(event.name)
  return known or formats.one_line(f"{event.name} {value}")


def draw(chart: Chart, *, width: int, height: int, variant: str = "") -> str:
  """The chart as an `<svg>` element.

  Args:
    chart: what to draw.
    width: in pixels.
    height: in pixels.
    variant: told apart in ids where one chart is drawn twice.
  """
  settings: Any = {
      "svg.fonttype": "none", "svg.hashsalt": chart.key + variant,
      "font.size": _FONT, "font.family": "DejaVu Sans",
  }
  with matplotlib.rc_context(settings), warnings.catch_warnings():
    # The page's fonts show the text, whatever matplotlib's own lacks.
    warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
    drawing = _Drawing(chart, width, height)
    buffer = io.StringIO()
    backend_svg.FigureCanvasSVG(drawing.figure).print_svg(buffer)
  return svg.inline(
      buffer.getvalue(),
      prefix=chart.key + variant,
      title=formats.one_line(chart.title),
      description=chart.summary,
      hints=drawing.hints,
  )


class _Drawing:
  """A figure of one chart, and the hints that belong to its parts."""

  def __init__(self, chart: Chart, width: int, height: int):
    self.chart = chart
    self.hints: dict[str, str] = {}
    top = (
        _TOP + (_STAGE_ROW if chart.stages else 0)
        + (_EVENT_ROW if chart.events else 0)
    )
    self._plot_width = width - _LEFT - _RIGHT
    self._plot_height = height - top - _BOTTOM
    self.figure = figure.Figure(figsize=(width / 72, height / 72), dpi=72)
    self.figure.patch.set_visible(False)
    self._axes = self.figure.add_axes((
        _LEFT / width, _BOTTOM / height,
        self._plot_width / width, self._plot_height / height,
    ))
    self._horizontal()
    self._vertical()
    self._stages()
    self._events()
    self._references()
    for line in chart.lines:
      self._line(line)

  def _horizontal(self) -> None:
    axes = self._axes
    axes.patch.set_visible(False)
    for side in ("top", "left", "right"):
      axes.spines[side].set_visible(False)
    axes.spines["bottom"].set(color=svg.MUTED, linewidth=0.8)
    axes.set_xlim(0, self.chart.last_update)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(
        max(3, min(10, self._plot_width // 75)), integer=True,
        steps=[1, 2, 2.5, 5, 10],
    ))
    axes.set_xlabel("update", color=svg.MUTED, fontsize=_FONT, labelpad=3)
    axes.tick_params(
        which="both", length=0, pad=6, labelsize=_FONT, labelcolor=svg.MUTED,
    )
    axes.tick_params(axis="x", length=3, color=svg.MUTED, pad=4)
    axes.xaxis.set_major_formatter(_TICKS)

  def _vertical(self) -> None:
    axes, values = self._axes, self.chart._values()
    low, high = float(values.min()), float(values.max())
    if self.chart.is_log:
      room = (high / low) ** 0.05
      axes.set_yscale("log")
      axes.set_ylim(low / room, high * room)
      axes.yaxis.set_major_locator(
          ticker.FixedLocator(log_ticks(low / room, high * room))
      )
      axes.yaxis.set_minor_locator(ticker.NullLocator())
    else:
      if self.chart.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
      room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
      axes.set_ylim(
          low if low == 0 and self.chart.from_zero else low - room, high + room
      )
      axes.yaxis.set_major_locator(ticker.MaxNLocator(
          max(3, min(6, int(self._plot_height // 30))),
          steps=[1, 2, 2.5, 5, 10],
      ))
    axes.yaxis.set_major_formatter(_TICKS)
    axes.grid(axis="y", color=svg.GRID, linewidth=0.8)
    axes.set_axisbelow(True)

  def _stages(self) -> None:
    last = self.chart.last_update
    row = 4 + (_EVENT_ROW if self.chart.events else 0)
    shown = []
    for i, stage in enumerate(self.chart.stages):
      end = last if stage.end_update is None else min(stage.end_update, last)
      if end <= stage.first_update:
        continue
      gid = svg.role("stage", i)
      name = formats.one_line(stage.name)
      self.hints[gid] = f"{name}: updates {stage.first_update + 1} to {end}"
      self._axes.axvspan(
          stage.first_update, end, gid=gid, linewidth=0, zorder=0,
          facecolor=svg.SHADE if i % 2 == 0 else "none",
      )
      shown.append((name, str(i + 1), stage.first_update, end))
    names_fit = all(self._fits(name, end - a) for name, _, a, end in shown)
    for name, number, first, end in shown:
      label = name if names_fit else number
      if self._fits(label, end - first):
        self._above(
            label, (first + end) / 2, row, svg.MUTED, "stage-label",
            _STAGE_FONT,
        )

  def _fits(self, label: str, updates: int) -> bool:
    """Whether a stage's label is narrower than its updates."""
    pixels = updates / self.chart.last_update * self._plot_width
    return len(label) * 0.57 * _STAGE_FONT <= pixels - 3

  def _events(self) -> None:
    drawn, labelled = -math.inf, -math.inf
    last = self.chart.last_update
    for i, event in enumerate(self.chart.events):
      if event.update > last:
        continue
      pixel = event.update / last * self._plot_width
      if pixel - drawn < 2:
        continue
      drawn = pixel
      gid = svg.role("event", i)
      self.hints[gid] = f"update {event.update}: {describe(event)}"
      self._axes.axvline(
          event.update, gid=gid, color=svg.EVENT, linewidth=1.2, zorder=2,
          dashes=(2, 2),
      )
      sign = letter(i)
      if pixel - labelled >= 5 + 0.7 * _FONT * len(sign):
        labelled = pixel
        self._above(sign, event.update, 3, svg.EVENT, "event-label", _FONT)

  def _above(
      self, label: str, update: float, pixels: float, colour: str, name: str,
      size: float,
  ) -> None:
    """A text over the plotting area."""
    self._axes.annotate(
        label, (update, 1), xycoords=self._axes.get_xaxis_transform(),
        xytext=(0, pixels), textcoords="offset points", ha="center",
        va="bottom", color=colour, fontsize=size, gid=svg.role(name),
        annotation_clip=False, parse_math=False,
    )

  def _references(self) -> None:
    for i, reference in enumerate(self.chart.references):
      gid = svg.role(reference.kind, i)
      self.hints[gid] = formats.one_line(reference.label)
      self._axes.axhline(
          reference.value, gid=gid, color=svg.TARGET, linewidth=1.3, zorder=3,
          linestyle=_DASHES[reference.kind],
      )

  def _line(self, line: Line) -> None:
    if not _shows(line):
      return
    x = line.series.updates.astype(float)
    y = line.series.values
    colour = svg.SERIES[line.colour % len(svg.SERIES)]
    buckets = int(self._plot_width)
    kept = thin.extremes(x, y, buckets)
    many = is_averaged(self.chart, line, buckets)
    style: dict[str, Any] = {"color": colour, "zorder": 4}
    if line.dashes:
      style["dashes"] = line.dashes
    self._axes.plot(
        x[kept], y[kept], linewidth=0.7 if many else 1.7,
        alpha=0.35 if many else 1.0,
        gid=svg.role("extremes" if many else "line"), **style,
    )
    if many:
      self._axes.plot(
          *thin.means(x, y, buckets // 4), linewidth=1.7, gid=svg.role("line"),
          **style,
      )
    few = np.isfinite(y).sum() <= min(_MOST_MARKERS, self._plot_width / 9)
    dots = np.isfinite(y[kept]) if few else thin.alone(y[kept])
    if dots.any():
      self._axes.plot(
          x[kept][dots], y[kept][dots], linestyle="none", marker="o",
          markersize=4.4, markeredgewidth=0, clip_on=False, color=colour,
          zorder=4, gid=svg.role("dots"),
      )


def is_averaged(chart: Chart, line: Line, pixels: int) -> bool:
  return chart.noisy and len(line.series.updates) > pixels


def log_ticks(low: float, high: float) -> list[float]:
  """Round numbers between `low` and `high` for a logarithmic axis.

  >>> [float(f"{t:g}") for t in log_ticks(0.08, 20)]
  [0.1, 0.3, 1.0, 3.0, 10.0]
  >>> [float(f"{t:g}") for t in log_ticks(9e-6, 1.1e-4)]
  [1e-05, 2e-05, 5e-05, 0.0001]
  """
  first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
  for steps in ((1,), (1, 3), (1, 2, 5)):
    ticks = [
        step * 10.0**power
        for power in range(first, last + 1)
        for step in steps
        if low <= step * 10.0**power <= high
    ]
    if len(ticks) >= 4:
      break
  return ticks[:: math.ceil(len(ticks) / 7)] if ticks else [low, high]


def _shows(line: Line) -> bool:
  return line.series.finite.size > 0
