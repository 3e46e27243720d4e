"""The record of an update and of an evaluation, under the names in the logs.

At every update (mode `train`), beside Tunix's `loss`, `perplexity` and
`learning_rate`:
  grad_norm                      before clipping
  distill/soft_loss              tau^2 KL at tau
  distill/hard_loss              cross-entropy
  distill/kl_div                 KL at tau, in nats
  distill/kl_div_tau1            KL at tau = 1, if asked for
  distill/temperature, distill/alpha
  distill/valid_tokens           tokens that counted
  distill/skipped_micro_batches  not finite, left out
  progressive/stage, progressive/trainable_parameters
  perf/tokens_per_sec            valid tokens per second, evaluation excluded

At every evaluation (mode `eval`), beside `loss` and `perplexity` (the student's
cross-entropy): see `objectives.logits.eval_terms`, and
`distill/student_perplexity`, `distill/teacher_perplexity`.
"""

from collections.abc import Callable
from collections.abc import Mapping
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from tunix_progdistill.objectives import terms
from tunix_progdistill.plan import run

Metrics = dict[str, tuple[list[Any], Any]]
Sink = Callable[[str, int, Mapping[str, Any]], None]


def _last(values: list[Any]) -> np.ndarray:
  # A copy: a view would keep the device's array alive in the history.
  return np.array(values[-1], dtype=np.float32)


def _metrics(values: dict[str, Any]) -> Metrics:
  return {name: ([value], _last) for name, value in values.items()}


def plain(metrics: Metrics) -> dict[str, float]:
  """The values of a record as floats."""
  return {k: float(reduce(v)) for k, (v, reduce) in metrics.items()}


def train_record(
    report: Any, scalars: run.Scalars, trainable_parameters: int,
    *, reads_scalars: bool,
) -> Metrics:
  """The record of one update, in the form of Tunix's metrics buffer.

  Args:
    report: of the window.
    scalars: that it ran with.
    trainable_parameters: of its stage.
    reads_scalars: whether the objective uses temperature and alpha.
  """
  rate = scalars.learning_rate
  used = {}
  if reads_scalars:
    used["distill/temperature"] = scalars.temperature
    used["distill/alpha"] = scalars.alpha
  return _metrics({
      "learning_rate": report.learning_rate if rate is None else rate,
      "grad_norm": report.grad_norm,
      **report.parts,
      **used,
      "distill/valid_tokens": report.valid_tokens,
      "distill/skipped_micro_batches": report.skipped,
      "progressive/stage": scalars.stage,
      "progressive/trainable_parameters": trainable_parameters,
  })


def warn_if_lost(metrics: Metrics, update: int) -> None:
  """Says where an update did nothing, or not all that it should."""
  value = lambda name: float(_last(metrics[name][0]))
  skipped = value("distill/skipped_micro_batches")
  if skipped:
    logging.warning(
        "Update %d: %d micro-batches were not finite and are left out.",
        update, skipped,
    )
  elif value("distill/valid_tokens") == 0:
    logging.warning(
        "Update %d did nothing: no token counts. Check labels and masks.",
        update,
    )


def pop_rate(metrics: Metrics) -> Any:
  """Takes the rate out of a record: Tunix logs it under its own name."""
  values, reduce = metrics.pop("learning_rate")
  rate = reduce(values)
  return None if np.isnan(rate) else rate


class TokenMeter:
  """Valid tokens per second of wall time between two records."""

  def __init__(self):
    self._since = time.perf_counter()

  def restart(self) -> None:
    self._since = time.perf_counter()

  def pause(self, seconds: float) -> None:
    """Leaves `seconds` that went elsewhere out of the next reading."""
    self._since += seconds

  def read(self, metrics: Metrics) -> Metrics:
    tokens = float(_last(metrics["distill/valid_tokens"][0]))
    now = time.perf_counter()
    seconds = max(now - self._since, 1e-9)
    self._since = now
    return _metrics({"perf/tokens_per_sec": tokens / seconds})


class EvalSums:
  """Adds up an evaluation's batches, token by token."""

  def __init__(self):
    self._sums: terms.LossTerms | None = None
    self._mean = np.float32(0.0)

  def add(self, out: terms.LossTerms) -> np.float32:
    """Adds one batch; returns by how much the mean loss moved."""
    out = jax.device_get(out)
    self._sums = out if self._sums is None else jax.tree.map(
        lambda a, b: np.float64(a) + np.float64(b), self._sums, out
    )
    mean = np.float32(self._sums.total / max(self._sums.count, 1.0))
    moved, self._mean = mean - self._mean, mean
    return moved

  def finish(self) -> tuple[float, Metrics]:
    """(mean loss, metrics) over all batches; empties itself."""
    sums, self._sums, self._mean = self._sums, None, np.float32(0.0)
    assert sums is not None  # Tunix writes no record of an empty evaluation
    count = float(sums.count)
    if not count:
      logging.warning("The evaluation data hold no valid token.")
      count = float("nan")
    values = {k: float(v) / count for k, v in sums.parts.items()}
    for who in ("student", "teacher"):
      if (ce := values.get(f"distill/{who}_cross_entropy")) is not None:
        with np.errstate(over="ignore"):
          values[f"distill/{who}_perplexity"] = float(np.exp(ce))
    values["distill/valid_tokens"] = float(sums.count)
    return float(sums.total) / count, _metrics(values)
