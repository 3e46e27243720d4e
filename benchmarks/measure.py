"""What a compiled function costs: time, temporaries, resident memory."""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import csv
import dataclasses
import datetime
import importlib.metadata
import pathlib
import platform
import statistics
import time
from typing import Any

import jax

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR = pathlib.Path("/proc/self/clear_refs")


@dataclasses.dataclass(kw_only=True)
class Variant:
  """One way to compute the same thing, and what was measured of it.

  Attributes:
    name: of the row.
    run: computes it once and waits for the result.
    compile_sec: of the first call, or of the compilation.
    temp_bytes: XLA's temporaries; None where XLA has no part in it.
  """

  name: str
  run: Callable[[], Any]
  compile_sec: float
  temp_bytes: int | None
  cpu_sec: list[float] = dataclasses.field(default_factory=list)
  wall_sec: list[float] = dataclasses.field(default_factory=list)
  rise_bytes: list[int] = dataclasses.field(default_factory=list)

  def median(self, field: str) -> float:
    """The median over the rounds of cpu_sec, wall_sec or rise_bytes."""
    return statistics.median(getattr(self, field))


def compiled(name: str, function: Callable[..., Any], *arguments) -> Variant:
  """A variant of `function`, compiled for these arguments."""
  began = time.perf_counter()
  program = jax.jit(function).lower(*arguments).compile()
  return Variant(
      name=name,
      run=lambda: jax.block_until_ready(program(*arguments)),
      compile_sec=time.perf_counter() - began,
      temp_bytes=program.memory_analysis().temp_size_in_bytes,
  )


def interleaved(variants: list[Variant], rounds: int) -> dict[str, Any]:
  """Runs every variant once per round; the machine's moods hit all alike.

  Returns:
    The first result of each, by name.
  """
  results = {}
  for round_ in range(rounds + 1):
    for variant in variants:
      with _resident_rise() as rise:
        wall, cpu = time.perf_counter(), time.process_time()
        out = variant.run()
        cpu = time.process_time() - cpu
        wall = time.perf_counter() - wall
      if round_ == 0:  # warms up
        results[variant.name] = out
        continue
      del out
      variant.cpu_sec.append(cpu)
      variant.wall_sec.append(wall)
      variant.rise_bytes.append(rise[0])
  return results


@contextlib.contextmanager
def _resident_rise():
  """By how much the process's peak of resident memory exceeds its start.

  0 where the system does not tell.
  """
  rise = [0]
  if not _CLEAR.exists():
    yield rise
    return
  reset_peak()
  before = resident("VmRSS")
  yield rise
  rise[0] = max(0, resident("VmHWM") - before)


def reset_peak() -> None:
  """Lets the peak of resident memory begin anew."""
  _CLEAR.write_text("5")


def resident(field: str) -> int:
  """The process's VmRSS, or VmHWM (its peak), in bytes."""
  line = next(
      x for x in _STATUS.read_text().splitlines() if x.startswith(field)
  )
  return int(line.split()[1]) * 1024


def machine() -> dict[str, str]:
  """What a number depends on."""
  device = jax.devices()[0]
  name = device.device_kind
  if device.platform == "cpu":
    name = next(
        (x.split(":", 1)[1].strip()
         for x in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
         if x.startswith("model name")), platform.processor(),
    )
  return {
      "date": datetime.date.today().isoformat(),
      "platform": device.platform,
      "device": name,
      "python": platform.python_version(),
      **{
          p: importlib.metadata.version(p) for p in ("jax", "google-tunix")
      },
  }


def append(path: pathlib.Path, rows: list[Mapping[str, Any]]) -> None:
  """Adds rows to a CSV file; its header must be that of the rows.

  Raises:
    ValueError: it is not.
  """
  fields = list(rows[0])
  path.parent.mkdir(parents=True, exist_ok=True)
  new = not path.exists()
  if not new:
    with open(path, encoding="utf-8", newline="") as f:
      header = next(csv.reader(f), [])
    if header != fields:
      raise ValueError(
          f"{path} must have the columns {', '.join(fields)}, got "
          f"{', '.join(header)}; name another file"
      )
  with open(path, "a", encoding="utf-8", newline="") as f:
    writer = csv.DictWriter(f, fields)
    if new:
      writer.writeheader()
    writer.writerows(rows)
