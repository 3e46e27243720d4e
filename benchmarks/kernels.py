"""The distillation loss: time, memory and error against Tunix's own.

  python benchmarks/kernels.py [--shapes 32000 262144] [--dtypes float32]
                               [--tokens 512] [--rounds 7] [--heads]

Value and gradient of alpha tau^2 KL + (1 - alpha) CE by the student's logits,
for 512 tokens of each vocabulary, all variants in one process and interleaved:

  tunix       `LogitStrategy.compute_loss`, one-hot labels
  optax       the same formula on optax, integer labels
  torch       a chunked forward KL in plain PyTorch, where it is installed
  reference   `kernels.reference`, integer labels
  drop-in     `ProgressiveLogitStrategy.compute_loss`, one-hot labels: what a
              Tunix user has after changing one line
  chunked     `kernels.chunked`, integer labels: what our trainer uses

With --heads also the whole way from hidden states and head matrices (widths 640
and 1152), where `linear_head` never makes the logits.

Prints a table, appends it to --output, and ends with exit code 1 where a gate
of GATES is missed. Ratios are Tunix's cost over the variant's for time, and the
variant's over Tunix's for memory.
"""

import argparse
import functools
import importlib.util
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
from tunix.distillation import strategies

import tunix_progdistill as tpd
from tunix_progdistill.kernels import chunked
from tunix_progdistill.kernels import linear_head
from tunix_progdistill.kernels import reference

VOCABULARIES = {
    "Gemma": 262_144, "Qwen": 151_936, "Llama": 128_256, "32k": 32_000,
}
TEMPERATURE, ALPHA = 2.0, 0.5
WIDTHS = (640, 1152)  # student, teacher
HERE = pathlib.Path(__file__).parent

# (variant, column) -> least ratio of time or greatest of memory; on a CPU.
GATES = {
    ("drop-in", "cpu_ratio"): {32_000: 2.8, 262_144: 2.5},
    ("chunked", "cpu_ratio"): {32_000: 2.8, 262_144: 2.5},
    ("chunked", "resident_ratio"): {32_000: 0.22, 262_144: 0.22},
}
TEMP_GATE = {"float32": 0.012, "bfloat16": 0.16}
HEAD_GATES = {"cpu_ratio": 1.0, "temp_ratio": 0.03}


def logits(tokens: int, vocabulary: int, dtype: str):
  """Student's and teacher's logits [1, N, V], and labels [1, N]."""
  make = lambda seed: (
      3 * jax.random.normal(jax.random.key(seed), (1, tokens, vocabulary))
  ).astype(dtype)
  labels = jax.random.randint(
      jax.random.key(2), (1, tokens), 0, vocabulary, jnp.int32
  )
  return make(0), make(1), labels


def tunix_loss(student, teacher, labels):
  stock = strategies.LogitStrategy(
      None, None, None, temperature=TEMPERATURE, alpha=ALPHA
  )
  return stock.compute_loss(student, teacher, labels)


def dropin_loss(student, teacher, labels):
  ours = tpd.ProgressiveLogitStrategy(
      None, None, None, temperature=TEMPERATURE, alpha=ALPHA
  )
  return ours.compute_loss(student, teacher, labels)


def optax_loss(student, teacher, labels):
  s, t = student.astype(jnp.float32), teacher.astype(jnp.float32)
  log_q = jax.nn.log_softmax(s / TEMPERATURE)
  kl = optax.losses.kl_divergence(log_q, jax.nn.softmax(t / TEMPERATURE))
  ce = optax.losses.softmax_cross_entropy_with_integer_labels(s, labels)
  return jnp.mean(ALPHA * TEMPERATURE**2 * kl + (1 - ALPHA) * ce), {}


def reference_loss(student, teacher, labels):
  where = labels >= 0
  kl = reference.forward_kl(
      student, teacher, temperature=TEMPERATURE, where=where
  )
  ce = reference.cross_entropy(student, labels, where=where)
  return jnp.mean(ALPHA * TEMPERATURE**2 * kl + (1 - ALPHA) * ce), {}


def chunked_loss(student, teacher, labels):
  where = labels >= 0
  return chunked.distillation(
      student, teacher, labels, temperature=TEMPERATURE, alpha=ALPHA,
      weights=where / jnp.sum(where),
  )


def exact(student, teacher, labels, rows: int = 8):
  """The loss and the gradient of the first rows, in float64."""
  total, gradients = 0.0, []
  student, teacher = np.asarray(student[0]), np.asarray(teacher[0])
  labels = np.asarray(labels[0])
  number = len(labels)
  for n in range(number):
    s, t = (x[n].astype(np.float64) for x in (student, teacher))
    (log_q, q), (log_p, p) = map(_softmax, (s / TEMPERATURE, t / TEMPERATURE))
    log_q1, q1 = _softmax(s)
    total += ALPHA * TEMPERATURE**2 * np.sum(p * (log_p - log_q))
    total -= (1 - ALPHA) * log_q1[labels[n]]
    if n < rows:
      q1[labels[n]] -= 1
      gradients.append(
          (ALPHA * TEMPERATURE * (q - p) + (1 - ALPHA) * q1) / number
      )
  return total / number, np.stack(gradients)


def _softmax(x):
  x = x - x.max()
  log_p = x - np.log(np.exp(x).sum())
  return log_p, np.exp(log_p)


def torch_variant(student, teacher, labels) -> measure.Variant:
  """A chunked forward KL as a PyTorch user writes it: 128 tokens at a time."""
  import torch
  from torch.nn import functional

  convert = lambda x: torch.from_numpy(
      np.array(x[0].astype(jnp.float32))
  ).to(torch.bfloat16 if x.dtype == jnp.bfloat16 else torch.float32)
  s, t = convert(student), convert(teacher)
  y = torch.from_numpy(np.array(labels[0])).long()

  def run():
    gradient, total = torch.empty_like(s), 0.0
    for i in range(0, len(s), 128):
      part = s[i : i + 128].detach().float().requires_grad_()
      kl = functional.kl_div(
          functional.log_softmax(part / TEMPERATURE, -1),
          functional.log_softmax(t[i : i + 128].float() / TEMPERATURE, -1),
          reduction="sum", log_target=True,
      )
      ce = functional.cross_entropy(part, y[i : i + 128], reduction="sum")
      loss = (ALPHA * TEMPERATURE**2 * kl + (1 - ALPHA) * ce) / len(s)
      loss.backward()
      gradient[i : i + 128] = part.grad
      total += float(loss)
    return (np.float32(total), {}), gradient.float().numpy()[None]

  began = time.perf_counter()
  run()
  return measure.Variant(
      name="torch", run=run, compile_sec=time.perf_counter() - began,
      temp_bytes=None,
  )


def of_logits(tokens: int, vocabulary: int, dtype: str, rounds: int):
  """Rows of the table for one shape."""
  student, teacher, ids = logits(tokens, vocabulary, dtype)
  hot = jax.nn.one_hot(ids, vocabulary)
  grad = lambda loss: jax.value_and_grad(loss, has_aux=True)
  variants = [
      measure.compiled(name, grad(loss), student, teacher, labels)
      for name, loss, labels in (
          ("tunix", tunix_loss, hot),
          ("optax", optax_loss, ids),
          ("reference", reference_loss, ids),
          ("drop-in", dropin_loss, hot),
          ("chunked", chunked_loss, ids),
      )
  ]
  if importlib.util.find_spec("torch") is not None:
    variants.append(torch_variant(student, teacher, ids))
  results = measure.interleaved(variants, rounds)
  value, gradient = exact(student, teacher, ids)
  errors = {
      name: (
          abs(float(loss) - value) / abs(value),
          np.abs(
              np.asarray(g[0, : len(gradient)], np.float64) - gradient
          ).max() / np.abs(gradient).max(),
      )
      for name, ((loss, _), g) in results.items()
  }
  return _rows(variants, errors, tokens, vocabulary, dtype, "")


def _heads_loss(fused, hs, ws, ht, wt, labels):
  if fused:
    where = labels >= 0
    return linear_head.distillation(
        hs, ht, ws, wt, labels, temperature=TEMPERATURE, alpha=ALPHA,
        weights=where / jnp.sum(where),
    )[0]
  hot = jax.nn.one_hot(labels, ws.shape[0])
  return tunix_loss(hs @ ws.T, ht @ wt.T, hot)[0]


def of_heads(tokens: int, vocabulary: int, dtype: str, rounds: int):
  """From hidden states and heads: Tunix's way and ours; 0 rounds compile."""
  shapes = [
      (1, tokens, WIDTHS[0]), (vocabulary, WIDTHS[0]),
      (1, tokens, WIDTHS[1]), (vocabulary, WIDTHS[1]),
  ]
  ids = (1, tokens)
  if rounds:
    arrays = [
        (jax.random.normal(jax.random.key(i), shape) / 8).astype(dtype)
        for i, shape in enumerate(shapes)
    ]
    arrays.append(jax.random.randint(jax.random.key(9), ids, 0, vocabulary))
  else:
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    arrays.append(jax.ShapeDtypeStruct(ids, jnp.int32))
  variants = [
      measure.compiled(
          name,
          jax.value_and_grad(
              functools.partial(_heads_loss, name == "linear_head"),
              argnums=(0, 1),
          ),
          *arrays,
      )
      for name in ("tunix", "linear_head")
  ]
  errors = {}
  if rounds:
    results = measure.interleaved(variants, rounds)
    (value, (dh, dw)) = results["tunix"]
    relative = lambda a, b: float(
        jnp.max(jnp.abs(a - b).astype(jnp.float32)) / jnp.max(jnp.abs(b))
    )
    got, (gh, gw) = results["linear_head"]
    errors["linear_head"] = (
        float(abs(got - value) / abs(value)),
        max(relative(gh, dh), relative(gw, dw)),
    )
  return _rows(variants, errors, tokens, vocabulary, dtype, "heads")


def _rows(variants, errors, tokens, vocabulary, dtype, kind):
  base = variants[0]
  rows = []
  for v in variants:
    ran = bool(v.cpu_sec)
    value, gradient = errors.get(v.name, (None, None))
    ratio = lambda ours, theirs: (
        None if not ours or not theirs else ours / theirs
    )
    rows.append({
        **measure.machine(),
        "kind": kind or "logits", "tokens": tokens, "vocabulary": vocabulary,
        "dtype": dtype, "variant": v.name,
        "cpu_sec": v.median("cpu_sec") if ran else None,
        "wall_sec": v.median("wall_sec") if ran else None,
        "temp_bytes": v.temp_bytes,
        "resident_bytes": v.median("rise_bytes") if ran else None,
        "compile_sec": v.compile_sec,
        "value_error": value, "gradient_error": gradient,
        "cpu_ratio": ratio(base.median("cpu_sec"), v.median("cpu_sec"))
        if ran else None,
        "wall_ratio": ratio(base.median("wall_sec"), v.median("wall_sec"))
        if ran else None,
        "temp_ratio": ratio(v.temp_bytes, base.temp_bytes),
        "resident_ratio": ratio(
            v.median("rise_bytes"), base.median("rise_bytes")
        ) if ran else None,
    })
  return rows


def missed(row) -> list[str]:
  """The gates that a row misses."""
  if row["platform"] != "cpu":
    return []
  found = []

  def judge(column, bound, least):
    value = row[column]
    if bound is None or value is None:
      return
    if (value < bound) if least else (value > bound):
      found.append(
          f"{row['variant']} at {row['tokens']} x {row['vocabulary']} "
          f"{row['dtype']}: {column} {value:.3f}, gate {bound}"
      )

  if row["kind"] == "logits":
    for (variant, column), bounds in GATES.items():
      if variant == row["variant"]:
        judge(column, bounds.get(row["vocabulary"]), column == "cpu_ratio")
    if row["variant"] == "chunked":
      judge("temp_ratio", TEMP_GATE[row["dtype"]], False)
  elif row["variant"] == "linear_head":
    judge("cpu_ratio", HEAD_GATES["cpu_ratio"], True)
    if row["tokens"] >= 4096:
      judge("temp_ratio", HEAD_GATES["temp_ratio"], False)
  return found


_COLUMNS = (
    ("cpu_sec", "{:.3f}"), ("wall_sec", "{:.3f}"), ("cpu_ratio", "{:.2f}x"),
    ("wall_ratio", "{:.2f}x"), ("temp_ratio", "{:.4f}"),
    ("resident_ratio", "{:.3f}"), ("compile_sec", "{:.1f}"),
    ("value_error", "{:.0e}"), ("gradient_error", "{:.0e}"),
)


def show(rows) -> None:
  """Prints the rows of one shape."""
  head = rows[0]
  print(
      f"\n{head['kind']}, {head['tokens']} x {head['vocabulary']} "
      f"{head['dtype']}, {head['device']}"
  )
  print(f"{'':12}" + "".join(f"{c:>15}" for c, _ in _COLUMNS))
  for row in rows:
    cells = (
        "-" if row[c] is None else form.format(row[c]) for c, form in _COLUMNS
    )
    print(f"{row['variant']:12}" + "".join(f"{c:>15}" for c in cells))
  sys.stdout.flush()


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
  parser.add_argument(
      "--shapes", type=int, nargs="*", default=[32_000, 262_144],
      help=f"vocabularies, such as {VOCABULARIES}",
  )
  parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
  parser.add_argument("--tokens", type=int, default=512)
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--heads", action="store_true")
  parser.add_argument(
      "--output", type=pathlib.Path, default=HERE / "results" / "kernels.csv"
  )
  options = parser.parse_args()
  rows = []
  for vocabulary in options.shapes:
    for dtype in options.dtypes:
      rows.append(of_logits(options.tokens, vocabulary, dtype, options.rounds))
      show(rows[-1])
  if options.heads:
    for vocabulary in options.shapes:
      rows.append(
          of_heads(options.tokens, vocabulary, "float32", options.rounds)
      )
      show(rows[-1])
    rows.append(of_heads(4096, max(options.shapes), "float32", 0))
    show(rows[-1])
  flat = [row for part in rows for row in part]
  measure.append(options.output, flat)
  failures = [line for row in flat for line in missed(row)]
  print("\n" + ("\n".join(failures) or "Every gate holds."))
  return 1 if failures else 0


if __name__ == "__main__":
  sys.exit(main())
