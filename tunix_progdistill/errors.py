"""One shape for every message about a bad argument."""

from typing import Any


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
