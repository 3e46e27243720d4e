"""Files that are whole or not there."""

import json
import math
import os
import pathlib
from typing import Any

from absl import logging

PARTIAL = ".partial"


def write_text(path: pathlib.Path, text: str) -> None:
  """Writes beside `path`, then renames: a kill leaves the old file."""
  partial = path.with_name(path.name + PARTIAL)
  with open(partial, "w", encoding="utf-8") as f:
    f.write(text)
    f.flush()
    os.fsync(f.fileno())
  os.replace(partial, path)


def finite(value: Any) -> Any:
  """`value`, or None for a float that is not finite: JSON knows none."""
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def write_json(path: pathlib.Path, value: Any) -> None:
  """`write_text` of `value` as JSON."""
  write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_object(path: pathlib.Path) -> dict[str, Any]:
  """A JSON object; {} where there is none, or none that can be read."""
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    return {}
  except ValueError:  # no JSON, or no text at all
    found = None
  if not isinstance(found, dict):
    logging.warning("%s cannot be read and is written anew.", path)
    return {}
  return found
