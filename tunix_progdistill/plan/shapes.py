"""How a value moves from its start to its end: the shapes of an anneal.

A shape is `(start, end, x) -> value` with x in [0, 1]; 0 gives the start, and 1
the end. Others are added by `register("schedule", name)`.
"""

import math


def linear(start: float, end: float, x: float) -> float:
  """start + (end - start) x."""
  return start + (end - start) * x


def cosine(start: float, end: float, x: float) -> float:
  """end + (start - end) (1 + cos(pi x)) / 2."""
  half = (1.0 + math.cos(math.pi * x)) / 2.0
  return end + (start - end) * half


def exponential(start: float, end: float, x: float) -> float:
  """start (end / start)^x, both > 0."""
  return start * (end / start) ** x
