"""The tables that the example prints, and the goals that it must reach."""

from collections.abc import Iterable
import math
from typing import Any

from flax import nnx
import jax.numpy as jnp
import prepare
import watch

import tunix_progdistill as tpd

MAX_PARAMETERS_RATIO = 0.35  # of the teacher that the student learns from
MAX_KL_RATIO = 0.3  # of the untrained student's


def print_models(prepared: prepare.Prepared, student: nnx.Module) -> None:
  """Parameters of both models; what the cut of the vocabulary saved, apart.

  Raises:
    ValueError: the student is too large.
  """
  size = tpd.students.num_parameters
  teacher, small = size(prepared.model), size(student)
  kept, width = prepared.config.num_embed, prepared.config.embed_dim
  full = prepared.tokenizer.full_size
  cut = (full - kept) * width
  print(
      f"Gemma 3 270M: {teacher + cut:,} parameters, of which the cut of the\n"
      f"vocabulary ({full:,} -> {kept:,} pieces) took {cut:,}.\n"
      f"Teacher: {teacher:,}. Student: {small:,} "
      f"({small / teacher:.1%} of the teacher), layers "
      f"{student.num_layers} of {prepared.config.num_layers}.\n"  # type: ignore
      f"Teacher's perplexity on held-out text: {prepared.perplexity:.1f}\n",
      flush=True,
  )
  if small > MAX_PARAMETERS_RATIO * teacher:
    raise ValueError(
        f"student must have at most {MAX_PARAMETERS_RATIO:.0%} of the "
        f"teacher's parameters, got {small / teacher:.1%}; keep fewer layers"
    )


def print_stages(progress: watch.Progress) -> None:
  """What each stage cost."""
  print(
      f"\n{'stage':<16}{'s/update':>9}{'1st (s)':>9}{'GFLOP':>8}"
      f"{'optimizer MB':>14}{'trainable':>12}{'compiles':>10}"
  )
  for _, s in sorted(progress["stages"].items()):
    print(
        f"{s['name']:<16}{s['update_sec']:>9.2f}{s['first_update_sec']:>9.1f}"
        f"{s['flops'] / 1e9:>8.0f}{s['optimizer_bytes'] / 1e6:>14.1f}"
        f"{s['trainable_parameters']:>12,}{s['compiles']:>10}"
    )
  print(
      "s/update with the teacher, 1st with compilation; GFLOP of the\n"
      "student's loss, gradient and update."
  )


def print_curve(progress: watch.Progress) -> None:
  """The held-out KL over the updates."""
  points = progress["curve"].items()
  curve = sorted((int(u), m["kl_div_tau1"]) for u, m in points)
  top = max(kl for _, kl in curve)
  print("\nheld-out KL at tau = 1 (nats per token)")
  for update, kl in curve:
    bar = "#" * max(1, round(50 * kl / top))
    print(f"{update:>5} {kl:>8.3f} {bar}")


def unigram_floor(
    prepared: prepare.Prepared, held_out: Iterable[Any]
) -> dict[str, float]:
  """KL(teacher || unigram), and its cross-entropy, over the held-out tokens.

  The unigram distribution of the training text knows nothing of the context:
  a student that is not closer to the teacher has learned nothing.
  """
  forward = nnx.jit(tpd.causal_lm.forward)
  floor = jnp.asarray(prepared.unigram_log_probs)
  kl = ce = count = 0.0
  for batch in held_out:
    tokens, mask = batch.input_tokens, batch.input_mask
    logits = forward(prepared.model, tokens, mask)
    labels = tpd.causal_lm.next_token_labels(tokens, mask)
    where = labels >= 0
    rows = jnp.broadcast_to(floor, logits.shape)
    reference, reduce = tpd.kernels.reference, tpd.kernels.reduce
    kl += float(
        reduce.masked_sum(
            reference.forward_kl(rows, logits, where=where), where
        )
    )
    ce += float(
        reduce.masked_sum(
            reference.cross_entropy(rows, labels, where=where), where
        )
    )
    count += float(reduce.count(where))
  return {"kl_div_tau1": kl / count, "cross_entropy": ce / count}


def print_table(
    prepared: prepare.Prepared, student: nnx.Module, progress: watch.Progress,
    floor: dict[str, float],
) -> None:
  """Teacher, student before and after, and the unigram floor."""
  curve = progress["curve"]
  first, last = curve[min(curve, key=int)], curve[max(curve, key=int)]
  size = tpd.students.num_parameters
  print(
      f"\n{'held out':<16}{'parameters':>13}{'KL':>8}{'CE':>8}"
      f"{'perplexity':>12}{'top-1':>8}{'corr':>7}{'corr top32':>12}"
  )
  ce = last["teacher_cross_entropy"]
  rows = [("teacher", f"{size(prepared.model):,}", 0.0, ce, 1.0, 1.0, 1.0)]
  for name, m in (("student before", first), ("student after", last)):
    rows.append((
        name, f"{size(student):,}", m["kl_div_tau1"],
        m["student_cross_entropy"], m["top1_agreement"], m["correlation"],
        m["correlation_top32"],
    ))
  for name, parameters, kl, ce, top1, corr, top in rows:
    print(
        f"{name:<16}{parameters:>13}{kl:>8.3f}{ce:>8.3f}{math.exp(ce):>12.1f}"
        f"{top1:>8.3f}{corr:>7.3f}{top:>12.3f}"
    )
  ce = floor["cross_entropy"]
  print(
      f"{'unigram floor':<16}{len(prepared.unigram_log_probs):>13,}"
      f"{floor['kl_div_tau1']:>8.3f}{ce:>8.3f}{math.exp(ce):>12.1f}\n"
  )


def check(progress: watch.Progress, floor: dict[str, float]) -> None:
  """Raises RuntimeError unless the student learned what it should."""
  curve = progress["curve"]
  first = curve[min(curve, key=int)]["kl_div_tau1"]
  last = curve[max(curve, key=int)]["kl_div_tau1"]
  print(
      f"held-out KL {first:.3f} -> {last:.3f}: {last / first:.3f}x of the "
      f"untrained student's (at most {MAX_KL_RATIO}), and the unigram floor's "
      f"is {floor['kl_div_tau1']:.3f}"
  )
  if last > MAX_KL_RATIO * first or last >= floor["kl_div_tau1"]:
    raise RuntimeError(
        f"the student's held-out KL must end at most at {MAX_KL_RATIO} of its "
        f"start and below the unigram floor, got {last:.3f}"
    )

