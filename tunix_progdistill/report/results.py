"""What came of a run: its table of models, its sentence, its key formats."""

import dataclasses

import numpy as np

from tunix_progdistill.report import formats
from tunix_progdistill.report import panels
from tunix_progdistill.report import read

TEACHER = "teacher"
BEFORE = "student before"
AFTER = "student after"
FLOOR = "unigram floor"

# Fields of a model, and the logged names that hold them at an evaluation.
_LOGGED = {
    "kl_div_tau1": panels.KL,
    "cross_entropy": "distill/student_cross_entropy",
    "top1_agreement": panels.TOP1,
    "correlation": panels.CORRELATION,
    "correlation_top32": panels.CORRELATION_TOP32,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
  """A key number. `met` says whether its target is; None without a target."""

  label: str
  value: str
  detail: str = ""
  met: bool | None = None
  target: str = ""


def before(run: read.Run) -> read.Model | None:
  """The student before the run: of the summary, else the first evaluation."""
  return run.model(BEFORE) or _evaluated(run, 0, BEFORE)


def after(run: read.Run) -> read.Model | None:
  """The student after the run: of the summary, else the last evaluation."""
  found = run.model(AFTER)
  if found is not None or _evaluations(run) < 2:
    return found
  name = AFTER if run.status == "finished" else "student so far"
  found, start = _evaluated(run, -1, name), before(run)
  if found is None or start is None:
    return found
  return dataclasses.replace(found, parameters=start.parameters)


def models(run: read.Run) -> list[read.Model]:
  """The rows of the models' table, in the order to be read in."""
  rows = [run.model(TEACHER), before(run), after(run)]
  known = {row.name for row in rows if row is not None}
  return [
      *(row for row in rows if row is not None),
      *(row for row in run.models if row.name not in known),
  ]


def _seen(run: read.Run, done: str) -> str:
  """What the evaluations say of a run that did not come to its end."""
  series = run.evaluations.get("distill/kl_div_tau1")
  if series is None or not series.finite.size:
    return f"No held-out KL yet, after {done}."
  at = series.updates[np.isfinite(series.values)][-1]
  words = (
      f"Held-out KL was {formats.fixed(series.finite[-1])} nats at update "
      f"{int(at):,}, after {done} in all."
  )
  if not np.isfinite(series.values[-1]):
    words += " The last one was not finite."
  return words


def sentence(run: read.Run) -> str:
  """The result in one or two sentences."""
  done = f"{run.updates:,} update{'' if run.updates == 1 else 's'}"
  start, end = before(run), after(run)
  first = None if start is None else start.kl_div_tau1
  last = None if end is None else end.kl_div_tau1
  if last is None and first is None:
    return _seen(run, done)
  if last is None:
    return (
        f"Held-out KL was {formats.fixed(first)} nats at the first evaluation;"
        f" there is no later value, after {done}."
    )
  words = f"Held-out KL is {formats.fixed(last)} nats after {done}"
  if first is not None:
    words = _change(first, last, done)
  floor = run.model(FLOOR)
  if floor is not None and floor.kl_div_tau1 is not None:
    side = "below" if last < floor.kl_div_tau1 else "not below"
    value = formats.fixed(floor.kl_div_tau1)
    words += f", {side} the {value} of a unigram model"
  target = run.targets.get(panels.KL)
  if target is not None:
    is_met = panels.met(panels.KL, last, target)
    words += (
        f"; the target of {formats.significant(target)} is"
        f" {'met' if is_met else 'not met'}"
    )
  return words + "."


def tiles(run: read.Run) -> list[Tile]:
  """The key numbers that are known."""
  start = before(run) or read.Model(name=BEFORE)
  end = after(run) or read.Model(name=AFTER)
  teacher = run.model(TEACHER) or read.Model(name=TEACHER)
  found = [
      _measure(run, "Held-out KL", panels.KL, start, end, "kl_div_tau1"),
      _measure(
          run, "Correlation", panels.CORRELATION, start, end, "correlation"
      ),
      _measure(
          run, "Top-1 agreement", panels.TOP1, start, end, "top1_agreement"
      ),
  ]
  if end.perplexity is not None:
    found.append(Tile(
        label="Perplexity", value=formats.significant(end.perplexity),
        detail=_joined(
            _named("from", formats.significant(start.perplexity)),
            _named("teacher", formats.significant(teacher.perplexity)),
        ),
    ))
  if end.parameters:
    share = ""
    if teacher.parameters:
      share = (
          f"{formats.significant(100 * end.parameters / teacher.parameters)} %"
          f" of {formats.parameters(teacher.parameters)}"
      )
    found.append(Tile(
        label="Student's parameters",
        value=formats.parameters(end.parameters), detail=share,
    ))
  speed = run.train.get("perf/tokens_per_sec")
  median = ""
  if speed is not None and speed.finite.size:
    median = f"{formats.significant(float(np.median(speed.finite)))} tokens/s"
  if run.wall_sec is not None:
    found.append(Tile(
        label="Time", value=formats.duration(run.wall_sec),
        detail=_joined(f"{run.updates:,} updates", median),
    ))
  elif run.updates:
    found.append(
        Tile(label="Updates", value=f"{run.updates:,}", detail=median)
    )
  return [tile for tile in found if tile is not None]


def _measure(
    run: read.Run, label: str, logged: str, start: read.Model,
    end: read.Model, field: str,
) -> Tile | None:
  first, last = getattr(start, field), getattr(end, field)
  value = first if last is None else last
  if value is None:
    return None
  target, is_met, words = run.targets.get(logged), None, ""
  if target is not None:
    is_met = panels.met(logged, value, target)
    sign = ">" if panels.higher_is_better(logged) else "<"
    words = f"target {sign} {formats.significant(target)}"
  detail = "" if last is None else _named("from", formats.fixed(first))
  return Tile(
      label=label, value=formats.fixed(value), detail=detail, met=is_met,
      target=words,
  )


def _change(first: float, last: float, done: str) -> str:
  if last == first:
    return f"Held-out KL stayed at {formats.fixed(last)} nats over {done}"
  verb = "fell" if last < first else "rose"
  words = (
      f"Held-out KL {verb} from {formats.fixed(first)} to"
      f" {formats.fixed(last)} nats in {done}"
  )
  small, large = sorted((first, last))
  if small > 0:
    factor = formats.significant(float(f"{large / small:.3g}"))
    words += f" ({factor} times {'smaller' if last < first else 'larger'})"
  return words


def _evaluations(run: read.Run) -> int:
  """How many evaluations there were."""
  return max((len(s.updates) for s in run.evaluations.values()), default=0)


def _evaluated(run: read.Run, index: int, name: str) -> read.Model | None:
  if not _evaluations(run):
    return None
  values = {}
  for field, logged in _LOGGED.items():
    series = run.evaluations.get(logged)
    value = float("nan") if series is None else float(series.values[index])
    values[field] = value if np.isfinite(value) else None
  return read.Model(name=name, **values)


def _named(name: str, value: str) -> str:
  return "" if value == formats.NONE else f"{name} {value}"


def _joined(*parts: str) -> str:
  return " · ".join(part for part in parts if part)
