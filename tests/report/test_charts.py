"""Charts: what stands in the drawing, and how little of it suffices."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from tunix_progdistill.report import charts
from tunix_progdistill.report import formats
from tunix_progdistill.report import read
from tunix_progdistill.report import svg
from tunix_progdistill.report import thin


def _series(values, updates=None):
  values = np.asarray(values, float)
  if updates is None:
    updates = np.arange(1, len(values) + 1)
  return read.Series(updates=np.asarray(updates), values=values)


def _chart(values, updates=None, **fields):
  line = charts.Line(label="loss", series=_series(values, updates))
  return charts.Chart(key="k", title="Loss", lines=(line,), **fields)


def _draw(chart, **fields):
  return ElementTree.fromstring(
      charts.draw(chart, width=360, height=240, **fields)
  )


def _groups(drawing, name):
  return [g for g in drawing.iter("g") if g.get("class") == name]


def _points(drawing, name="line"):
  """The [n, 2] points of the paths of a class; y grows downwards."""
  found = []
  for group in _groups(drawing, name):
    for path in group.iter("path"):
      pairs = re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.get("d"))
      found += [(float(x), float(y)) for x, y in pairs]
  return np.array(found)


_STAGES = (
    read.Stage(name="80 % frozen", first_update=0, end_update=20),
    read.Stage(name="nothing frozen", first_update=20, end_update=None),
)


def test_stages_targets_and_events_are_where_they_should_be():
  chart = _chart(
      np.linspace(9, 1, 80),
      references=(charts.Reference(label="target < 5", value=5.0),),
      stages=_STAGES,
      events=(read.Event(update=40, name="scale_rate", value=0.5),),
      from_zero=True,
  )
  drawing = _draw(chart)
  first, second = _groups(drawing, "stage")
  assert first.find("title").text == "80 % frozen: updates 1 to 20"
  assert second.find("title").text == "nothing frozen: updates 21 to 80"
  left, right = 46, 360 - 12
  xs = [float(x) for x in re.findall(r"(-?[\d.]+) -?[\d.]+",
                                     first.find("path").get("d"))]
  assert min(xs) == pytest.approx(left, abs=0.1)
  assert max(xs) == pytest.approx(left + (right - left) / 4, abs=0.1)
  (event,) = _groups(drawing, "event")
  assert event.find("title").text == (
      "update 40: learning rate \N{MULTIPLICATION SIGN} 0.5"
  )
  (x, _), *_ = _points(drawing, "event")
  assert x == pytest.approx((left + right) / 2, abs=0.1)
  # A target of 5 lies on the line where its value is 5.
  line, target = _points(drawing), _points(drawing, "target")
  crossing = np.interp(5.0, np.linspace(1, 9, 80), line[::-1, 1])
  assert target[0, 1] == pytest.approx(crossing, abs=0.2)
  texts = [t.text for t in drawing.iter("text")]
  assert {"80 % frozen", "nothing frozen", "A", "update"} <= set(texts)


def test_names_that_do_not_fit_become_numbers():
  stages = tuple(
      read.Stage(name=f"stage of a long name {i}", first_update=i * 10,
                 end_update=i * 10 + 10)
      for i in range(8)
  )
  texts = {t.text for t in _draw(_chart(np.ones(80), stages=stages))
           .iter("text")}
  assert {str(i) for i in range(1, 9)} <= texts
  assert not any("long name" in t for t in texts)


def test_it_can_be_read_out():
  drawing = _draw(_chart([3.0, 2.0, 1.0]), variant="-wide")
  assert drawing.get("role") == "img"
  named = {e.get("id"): e.text for e in drawing.iter() if e.get("id")}
  title, description = drawing.get("aria-labelledby").split()
  assert named[title] == "Loss"
  assert "loss from 3 to 1" in named[description]


def test_colours_are_the_pages_and_nothing_is_global():
  source = charts.draw(_chart([1.0, 2.0]), width=360, height=240)
  assert "var(--c0)" in source and "#0100" not in source
  assert "<style" not in source and "DejaVu" not in source
  assert "http" not in source and "xmlns" not in source


def test_the_axis_is_logarithmic_where_that_is_sensible():
  assert _chart([15.6, 2.0],
                references=(charts.Reference(label="t", value=0.1),)).is_log
  assert not _chart([3.0, 2.0]).is_log
  assert not _chart([1000.0, 0.0]).is_log
  assert not _chart([1000.0, 1.0], may_be_log=False).is_log


@pytest.mark.parametrize("values", [
    [5.0], [0.0], [0.0, 0.0], [1e-30, 1e30], [-1.0, -5.0], [1e300, -1e300],
    [np.nan, 1.0, np.nan], [7.0, 7.0, 7.0],
])
def test_any_values_can_be_drawn(values):
  drawing = _draw(_chart(values, stages=_STAGES))
  assert list(drawing.iter("path"))
  assert "nan" not in ElementTree.tostring(drawing, "unicode")


def test_a_value_between_gaps_is_a_dot():
  values = np.linspace(1, 2, 200)
  values[[99, 101]] = np.nan
  drawing = _draw(_chart(values))
  uses = [u for g in _groups(drawing, "dots") for u in g.iter("use")]
  assert len(uses) == 1
  # and the gap is a gap: the line starts anew after it
  assert sum(p.get("d").count("M") for g in _groups(drawing, "line")
             for p in g.iter("path")) >= 2


def test_a_spike_among_thousands_is_kept():
  values = np.ones(100_000)
  values[54_321] = 9.0
  drawing = _draw(_chart(values, from_zero=True, noisy=True))
  faint = _points(drawing, "extremes")
  assert len(faint) < 6 * 360
  x, y = faint[np.argmin(faint[:, 1])]
  assert x == pytest.approx(46 + 0.54321 * 302, abs=1)
  assert y < np.median(faint[:, 1]) - 100
  # its mean does not show it
  assert np.ptp(_points(drawing)[:, 1]) < 1


def test_a_step_among_thousands_stays_a_step():
  values = np.where(np.arange(100_000) < 50_000, 1.0, 2.0)
  points = _points(_draw(_chart(values)))
  rising = np.flatnonzero(np.abs(np.diff(points[:, 1])) > 1)
  assert len(rising) == 1
  (step,) = rising
  assert points[step + 1, 0] - points[step, 0] <= 0.2


def test_extremes_keeps_first_last_lowest_highest_and_gaps():
  rng = np.random.default_rng(0)
  x = np.arange(50_000.0)
  y = rng.normal(size=50_000)
  y[30_000:31_000] = np.nan
  y[12_345] = np.nan  # one update within a pixel
  kept = thin.extremes(x, y, 300)
  assert len(kept) <= 5 * 300 and np.all(np.diff(kept) > 0)
  assert {0, 49_999, np.nanargmin(y), np.nanargmax(y)} <= set(kept.tolist())
  assert 12_345 in kept and np.isnan(y[kept]).sum() > 5
  few = np.arange(10.0)
  np.testing.assert_array_equal(thin.extremes(few, few, 300), np.arange(10))


def test_means_leave_gaps_out():
  x, y = np.arange(1000.0), np.full(1000, 3.0)
  y[::2] = np.nan
  y[500:] = np.nan
  xs, ys = thin.means(x, y, 10)
  assert len(xs) == 10
  np.testing.assert_array_equal(ys, [3.0] * 5 + [np.nan] * 5)


def test_foreign_text_stays_text():
  nasty = "<b>&\"'$\\frac{$ \x00\ud800 日本"
  chart = _chart(
      np.ones(9),
      stages=(read.Stage(name=nasty, first_update=0, end_update=9),),
      events=(read.Event(update=2, name=nasty, value=None),),
  )
  drawing = _draw(chart)
  assert any(
      t.text == formats.one_line(nasty) for t in drawing.iter("text")
  )


def test_many_events_do_not_paint_the_chart_over():
  events = tuple(
      read.Event(update=u, name="advance", value=None) for u in range(2000)
  )
  drawing = _draw(_chart(np.ones(2000), events=events))
  assert len(_groups(drawing, "event")) <= 160
  assert len(_groups(drawing, "event-label")) <= 25


def test_the_same_chart_is_the_same_text():
  one, two = (charts.draw(_chart([1.0, 2.0]), width=360, height=240)
              for _ in range(2))
  assert one == two


def test_more_lines_than_colours_are_dashed():
  colours = [charts.Line(label="", series=_series([1.0]), colour=i).dashes
             for i in (0, 7, 8, 16)]
  assert colours[0] == colours[1] == () and len(set(colours[1:])) == 3
  assert len(svg.SERIES) == 8
