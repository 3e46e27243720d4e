"""One shape for every message about a bad argument."""

import dataclasses
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
  """A numpy or jax scalar as a Python number; anything else as it is.

  Plans are compared and saved as JSON, which knows no numpy.
  """
  if isinstance(value, np.generic) or (
      getattr(value, "ndim", None) == 0 and hasattr(value, "item")
  ):
    return value.item()
  return value


def plain_fields(owner: Any) -> None:
  """`plain` for every field of a frozen dataclass."""
  for field in dataclasses.fields(owner):
    object.__setattr__(owner, field.name, plain(getattr(owner, field.name)))


def invalid(field: str, rule: str, value: Any, remedy: str) -> ValueError:
  """Returns the `ValueError` for one bad field, as a single line.

  Args:
    field: the argument's name, with its owner where that helps
      (`stages[1].temperature`).
    rule: what must hold, starting with "must".
    value: what was given.
    remedy: what to write instead.

  >>> print(invalid("alpha", "must lie in [0, 1]", 1.5, "try 0.5"))
  alpha must lie in [0, 1], got 1.5; try 0.5
  """
  shown = repr(value).replace("\n", " ")
  if len(shown) > 200:
    shown = shown[:197] + "..."
  return ValueError(f"{field} {rule}, got {shown}; {remedy}")
