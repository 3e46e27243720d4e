"""What a finished run prints: its stages, its curve, its models."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import Any

from tunix_progdistill.run import summary as summary_lib

_BAR = 40
_POINTS = 12


def _number(value: Any, form: str) -> str:
  return "-" if value is None else format(value, form)


def _scaled(value: float | None, factor: float) -> float | None:
  return None if value is None else value * factor


def stages(entries: Sequence[Mapping[str, Any]]) -> str:
  """What each stage cost."""
  lines = [
      f"{'stage':<18}{'s/update':>9}{'1st (s)':>9}{'GFLOP':>9}"
      f"{'optimizer MB':>14}{'trainable':>13}{'compiles':>10}"
  ]
  for s in entries:
    lines.append(
        f"{s['name'][:17]:<18}{_number(s['update_sec'], '9.2f'):>9}"
        f"{_number(s['first_update_sec'], '9.1f'):>9}"
        f"{_number(_scaled(s['flops'], 1e-9), '9.3g'):>9}"
        f"{_number(_scaled(s['optimizer_bytes'], 1e-6), '14.1f'):>14}"
        f"{_number(s['trainable_parameters'], '13,'):>13}"
        f"{_number(s['compiles'], '10d'):>10}"
    )
  return "\n".join(lines)


def curve(evaluations: Iterable[Mapping[str, Any]]) -> str:
  """The held-out KL over the updates, as bars."""
  points = [
      (r["update"], r["distill/kl_div_tau1"]) for r in evaluations
      if r.get("distill/kl_div_tau1") is not None
  ]
  if not points:
    return ""
  step = -(-len(points) // _POINTS)
  shown = points[::step]
  if shown[-1] != points[-1]:
    shown.append(points[-1])
  top = max(kl for _, kl in shown) or 1.0
  lines = ["held-out KL at tau = 1 (nats per token)"]
  for update, kl in shown:
    bar = "#" * max(1, round(_BAR * kl / top))
    lines.append(f"{update:>7} {kl:>8.3f} {bar}")
  return "\n".join(lines)


def models(rows: Iterable[Mapping[str, Any]]) -> str:
  """Teacher, student before and after, and the unigram floor."""
  lines = [
      f"{'held out':<16}{'parameters':>14}{'KL':>8}{'CE':>8}"
      f"{'perplexity':>12}{'top-1':>8}{'corr':>7}{'corr top32':>12}"
  ]
  for row in rows:
    ce = row.get("cross_entropy")
    perplexity = None if ce is None else math.exp(min(ce, 700.0))
    lines.append(
        f"{row['name']:<16}{row['parameters']:>14,}"
        f"{_number(row.get('kl_div_tau1'), '8.3f'):>8}{_number(ce, '8.3f'):>8}"
        f"{_number(perplexity, '12.5g'):>12}"
        f"{_number(row.get('top1_agreement'), '8.3f'):>8}"
        f"{_number(row.get('correlation'), '7.3f'):>7}"
        f"{_number(row.get('correlation_top32'), '12.3f'):>12}"
    )
  return "\n".join(lines)


def text(
    summary: summary_lib.Summary, evaluations: Iterable[Mapping[str, Any]]
) -> str:
  """All of it, with the samples."""
  parts = [
      stages(summary.stages), curve(evaluations),
      models(summary.models.values()),
  ]
  for sample in summary.samples:
    parts.append("\n".join(
        f"{name:>15}: {_line(sample['prompt'])}|{_line(said)}"
        for name, said in sample["continuations"].items()
    ))
  return "\n\n".join(p for p in parts if p)


def _line(text: str) -> str:  # pylint: disable=redefined-outer-name
  return " ".join(text.split("\n"))
