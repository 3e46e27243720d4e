"""Thousands of points made as many as a chart can show."""

import itertools

import numpy as np


def extremes(x: np.ndarray, y: np.ndarray, buckets: int) -> np.ndarray:
  """Indices of points that draw the same line as all of them.

  Per bucket of equal width in x: the first, the last, the lowest and the
  highest point, and one that is not finite if there is any, so that a gap
  stays a gap.

  Args:
    x: [n], ascending.
    y: [n], NaN where there is no value.
    buckets: about the width of the chart in pixels, >= 1.

  Returns:
    Ascending indices, at most 5 * buckets.
  """
  if len(x) <= 4 * buckets:
    return np.arange(len(x))
  kept: set[int] = set()
  for start, end in _bounds(x, buckets):
    part = y[start:end]
    finite = np.isfinite(part)
    kept.update((start, end - 1))
    if not finite.all():
      kept.add(start + int(np.argmin(finite)))
    if finite.any():
      kept.add(start + int(np.nanargmin(np.where(finite, part, np.nan))))
      kept.add(start + int(np.nanargmax(np.where(finite, part, np.nan))))
  return np.array(sorted(kept))


def means(
    x: np.ndarray, y: np.ndarray, buckets: int
) -> tuple[np.ndarray, np.ndarray]:
  """The mean of the finite values per bucket; NaN where there is none.

  Args:
    x: [n], ascending.
    y: [n], NaN where there is no value.
    buckets: how many.

  Returns:
    x and y, at most `buckets` long.
  """
  xs, ys = [], []
  for start, end in _bounds(x, buckets):
    part = y[start:end]
    finite = part[np.isfinite(part)]
    xs.append(x[start:end].mean())
    ys.append(finite.mean() if finite.size else np.nan)
  return np.array(xs), np.array(ys)


def alone(y: np.ndarray) -> np.ndarray:
  """[n] bool: finite points without a finite neighbour, which no line shows."""
  finite = np.concatenate([[False], np.isfinite(y), [False]])
  return finite[1:-1] & ~finite[:-2] & ~finite[2:]


def _bounds(x: np.ndarray, buckets: int) -> list[tuple[int, int]]:
  """(start, end) indices of the buckets that hold a point."""
  edges = np.linspace(x[0], x[-1], buckets + 1)[1:-1]
  cuts = [0, *np.searchsorted(x, edges, side="left"), len(x)]
  return [(int(a), int(b)) for a, b in itertools.pairwise(cuts) if b > a]
