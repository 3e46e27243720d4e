"""The distillation loss on logits, and its evaluation.

  loss = alpha tau^2 KL(P_teacher || P_student) + (1 - alpha) CE

with both distributions softened by tau in the KL and none in the CE. The
factor tau^2 keeps the soft loss's gradient at one scale while tau changes.

Source: Hinton, Vinyals, Dean 2015, https://arxiv.org/abs/1503.02531.
"""

from collections.abc import Mapping
import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

from tunix_progdistill.kernels import chunked
from tunix_progdistill.kernels import labels as one_hot
from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import reference
from tunix_progdistill.kernels import shapes
from tunix_progdistill.kernels import similarity
from tunix_progdistill.kernels import topk
from tunix_progdistill.objectives import terms

TOP_ENTRIES = 32  # of the teacher, for the second correlation


def label_ids(
    logits: Float[Array, "*N V"],
    labels: Int[Array, "*N"] | Float[Array, "*N V"],
) -> Int[Array, "*N"]:
  """The ids of labels; negative for a token that is to be ignored.

  A label row of zeros, or a negative id, marks such a token (padding, a
  prompt). Rows that are not one-hot have the id V.

  Raises:
    ValueError: labels that do not fit the logits.
  """
  shapes.check(logits, labels=labels)
  return one_hot.ids(labels) if labels.shape == logits.shape else labels


def valid_tokens(
    ids: Int[Array, "*N"], loss_mask: Array | None = None
) -> Bool[Array, "*N"]:
  """The tokens that count: not to be ignored, and in the mask if there is one.

  Raises:
    ValueError: a mask that does not fit.
  """
  where = ids >= 0
  if loss_mask is not None:
    if loss_mask.shape != where.shape:
      raise ValueError(
          f"loss mask must have shape {where.shape}, got {loss_mask.shape}; "
          "mend loss_mask_fn"
      )
    where = where & (loss_mask != 0)
  return where


def train_terms(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    labels: Int[Array, "*N"] | Float[Array, "*N V"],
    *,
    where: Bool[Array, "*N"],
    temperature: ArrayLike,
    alpha: ArrayLike,
    ids: Int[Array, "*N"] | None = None,
    top_k: int = 0,
    kl_div_tau1: bool = False,
    teacher_ce: bool = False,
    mean: bool = False,
) -> terms.LossTerms:
  """The loss's sums over the tokens of `where`.

  Args:
    student: logits, any float type.
    teacher: logits of the same shape; no gradient flows into them.
    labels: ids or rows, as for `reference.cross_entropy`.
    where: tokens that count.
    temperature: tau > 0, float32 [].
    alpha: weight of the soft loss in [0, 1], float32 [].
    ids: `label_ids`, where they are known already.
    top_k: if > 0, the KL is over the teacher's k largest entries.
    kl_div_tau1: also measure the KL at tau = 1 (one more exponential).
    teacher_ce: also measure the teacher's cross-entropy (one more exponential).
    mean: give means over the tokens instead. The gradient is then made as it
      is wanted, and not scaled afterwards.

  Returns:
    `total`, and the parts `distill/soft_loss`, `distill/hard_loss`,
    `distill/kl_div` (at tau, without tau^2), `distill/kl_div_tau1`,
    `distill/teacher_loss`.
  """
  shapes.check(student, teacher=teacher)
  teacher = jax.lax.stop_gradient(teacher)
  alpha = jnp.asarray(alpha)
  count = reduce.count(where)
  weights = reduce.mean(where.astype(jnp.float32), count) if mean else where
  if top_k:
    kl = topk.renormalised_kl(
        student, teacher, k=top_k, temperature=temperature, where=where
    )
    ce = chunked.cross_entropy(student, labels, where=where)
    # A term of weight 0 must not be able to hurt: 0 * inf is NaN.
    add = functools.partial(_weighted_sum, where, weights)
    weigh = lambda w, x: jnp.where(w > 0, w * add(x), 0.0)
    total = weigh(alpha, kl * temperature**2) + weigh(1.0 - alpha, ce)
    values = {"kl": kl, "ce": ce}
    if kl_div_tau1:
      values["kl_div_tau1"] = chunked.forward_kl(
          jax.lax.stop_gradient(student), teacher, where=where
      )
    if teacher_ce:
      values["teacher_ce"] = chunked.cross_entropy(
          teacher, labels, where=where
      )
  else:
    total, values = chunked.distillation(
        student, teacher, labels, temperature=temperature, alpha=alpha,
        weights=weights, label_ids=ids, kl_div_tau1=kl_div_tau1,
        teacher_ce=teacher_ce,
    )
  return as_terms(total, values, where, weights, temperature)


def _weighted_sum(where, weights, values):
  return jnp.sum(jnp.where(where, weights * values, 0.0))


def as_terms(
    total: jax.Array,
    values: Mapping[str, Float[Array, "*N"]],
    where: Bool[Array, "*N"],
    weights: Bool[Array, "*N"] | Float[Array, "*N"],
    temperature: ArrayLike,
) -> terms.LossTerms:
  """The loss's sums, from a kernel's total and its values per token."""
  sums = {k: _weighted_sum(where, weights, v) for k, v in values.items()}
  parts = {
      "distill/soft_loss": sums["kl"] * temperature**2,
      "distill/hard_loss": sums["ce"],
      "distill/kl_div": sums["kl"],
  }
  for name, part in (
      ("kl_div_tau1", "distill/kl_div_tau1"),
      ("teacher_ce", "distill/teacher_loss"),
  ):
    if name in sums:
      parts[part] = sums[name]
  return terms.LossTerms(
      total=total, count=reduce.count(where), parts=parts
  )


def all_tokens(
    loss: Float[Array, ""],
    metrics: Mapping[str, Float[Array, ""]],
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    weight: ArrayLike,
    kl_div_tau1: bool,
) -> terms.LossTerms:
  """Tunix's loss, a mean over every token with padding, as sums.

  Args:
    loss: the mean.
    metrics: means likewise.
    student: logits.
    teacher: logits.
    weight: of the batch; 0 makes it count nothing.
    kl_div_tau1: also measure the KL at tau = 1.
  """
  everywhere = jnp.ones(student.shape[:-1], bool)
  if kl_div_tau1:
    values = chunked.forward_kl(
        jax.lax.stop_gradient(student), teacher, where=everywhere
    )
    metrics = {**metrics, "distill/kl_div_tau1": jnp.mean(values)}
  count = jnp.float32(everywhere.size) * weight
  return terms.LossTerms(
      total=loss * count,
      count=count,
      parts={k: v * count for k, v in metrics.items()},
  )


def eval_terms(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    labels: Int[Array, "*N"] | Float[Array, "*N V"],
    *,
    where: Bool[Array, "*N"],
) -> terms.LossTerms:
  """Student against teacher at tau = 1; `total` is the student's CE."""
  shapes.check(student, teacher=teacher)
  values = chunked.token_values(
      evaluate, student, teacher, labels, where=where
  )
  return as_eval_terms(values, where)


def as_eval_terms(
    values: Mapping[str, Float[Array, "*N"]], where: Bool[Array, "*N"]
) -> terms.LossTerms:
  """The evaluation's sums, from `evaluate`'s values per token."""
  sums = {k: reduce.masked_sum(v, where) for k, v in values.items()}
  return terms.LossTerms(
      total=sums["distill/student_cross_entropy"],
      count=reduce.count(where),
      parts=sums,
  )


def evaluate(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    labels: Int[Array, "*N"] | Float[Array, "*N V"],
    *,
    where: Bool[Array, "*N"],
) -> dict[str, Float[Array, "*N"]]:
  """Every measure of `eval_terms`, per token."""
  return {
      "distill/kl_div_tau1": reference.forward_kl(
          student, teacher, where=where
      ),
      "distill/correlation": similarity.correlation(
          student, teacher, where=where
      ),
      f"distill/correlation_top{TOP_ENTRIES}": similarity.topk_correlation(
          student, teacher, k=TOP_ENTRIES, where=where
      ),
      "distill/top1_agreement": similarity.top1_agreement(
          student, teacher, where=where
      ),
      "distill/student_cross_entropy": reference.cross_entropy(
          student, labels, where=where
      ),
      "distill/teacher_cross_entropy": reference.cross_entropy(
          teacher, labels, where=where
      ),
  }
