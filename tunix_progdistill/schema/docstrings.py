"""Reads the meaning of each field out of a class's docstring."""

import inspect
import re

_ENTRY = re.compile(r"^  (\w+): (.*)$")


def attributes(owner: type) -> dict[str, str]:
  """The entries of a docstring's `Attributes:` section, each on one line.

  >>> class Point:
  ...   '''A point.
  ...
  ...   Attributes:
  ...     x: to the
  ...       right.
  ...     y: up.
  ...   '''
  >>> attributes(Point)
  {'x': 'to the right.', 'y': 'up.'}
  """
  lines = (inspect.getdoc(owner) or "").splitlines()
  if "Attributes:" not in lines:
    return {}
  found: dict[str, str] = {}
  name = ""
  for line in lines[lines.index("Attributes:") + 1:]:
    if line and not line.startswith(" "):
      break
    if entry := _ENTRY.match(line):
      name = entry[1]
      found[name] = entry[2].strip()
    elif name and line.strip():
      found[name] += " " + line.strip()
  return found
