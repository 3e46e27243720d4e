"""The distillation loss on logits, and its evaluation.

  loss = alpha tau^2 KL(P_teacher || P_student) + (1 - alpha) CE

with both distributions softened by tau in the KL and none in the CE. The
factor tau^2 keeps the soft loss's gradient at one scale while tau changes.

Source: Hinton, Vinyals, Dean 2015, https://arxiv.org/abs/1503.02531.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import reference
from tunix_progdistill.kernels import similarity
from tunix_progdistill.objectives import terms

TOP_ENTRIES = 32  # of the teacher, for the second correlation


def valid_tokens(
    logits: Float[Array, "*N V"],
    labels: Int[Array, "*N"] | Float[Array, "*N V"],
    loss_mask: Array | None = None,
) -> Bool[Array, "*N"]:
  """The tokens that count.

  A label row of zeros, or a negative id, marks a token that is to be ignored
  (padding, a prompt); `loss_mask` excludes more.

  Raises:
    ValueError: labels or mask that do not fit the logits.
  """
  if labels.shape == logits.shape:
    where = jnp.any(labels != 0, axis=-1)
  elif labels.shape == logits.shape[:-1] and jnp.issubdtype(
      labels.dtype, jnp.integer
  ):
    where = labels >= 0
  else:
    raise ValueError(
        "labels must be ids [B, T] or rows [B, T, V] for logits "
        f"{logits.shape}, got {labels.dtype}{labels.shape}; "
        "mend labels_fn"
    )
  if loss_mask is not None:
    if loss_mask.shape != where.shape:
      raise ValueError(
          f"loss mask must have shape {where.shape}, got {loss_mask.shape}; "
          "mend loss_mask_fn"
      )
    where = where & (loss_mask != 0)
  return where


def check_vocabularies(student: jax.Array, teacher: jax.Array) -> None:
  """Raises ValueError unless the two logits have one shape."""
  if student.shape != teacher.shape:
    raise ValueError(
        "student and teacher logits must have one shape, got "
        f"{student.shape} and {teacher.shape}; give both models the same "
        "vocabulary and the same tokens"
    )


def train_terms(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    labels: Int[Array, "*N"] | Float[Array, "*N V"],
    *,
    where: Bool[Array, "*N"],
    temperature: ArrayLike,
    alpha: ArrayLike,
    top_k: int = 0,
    kl_div_tau1: bool = False,
) -> terms.LossTerms:
  """The loss's sums over the tokens of `where`.

  Args:
    student: logits, any float type.
    teacher: logits of the same shape; no gradient flows into them.
    labels: ids or rows, as for `reference.cross_entropy`.
    where: tokens that count.
    temperature: tau > 0, float32 [].
    alpha: weight of the soft loss in [0, 1], float32 [].
    top_k: if > 0, the KL is over the teacher's k largest entries.
    kl_div_tau1: also measure the KL at tau = 1 (one more pass).

  Returns:
    `total`, and the parts `distill/soft_loss`, `distill/hard_loss`,
    `distill/kl_div` (at tau, without tau^2), `distill/kl_div_tau1`.
  """
  check_vocabularies(student, teacher)
  teacher = jax.lax.stop_gradient(teacher)

  def kl(tau):
    if top_k:
      return reference.topk_forward_kl(
          student, teacher, k=top_k, temperature=tau, where=where
      )
    return reference.forward_kl(
        student, teacher, temperature=tau, where=where
    )

  kl_sum = reduce.masked_sum(kl(temperature), where)
  soft = kl_sum * temperature**2
  hard = reduce.masked_sum(
      reference.cross_entropy(student, labels, where=where), where
  )
  parts = {
      "distill/soft_loss": soft,
      "distill/hard_loss": hard,
      "distill/kl_div": kl_sum,
  }
  if kl_div_tau1:
    at_one = reference.forward_kl(
        jax.lax.stop_gradient(student), teacher, where=where
    )
    parts["distill/kl_div_tau1"] = reduce.masked_sum(at_one, where)
  alpha = jnp.asarray(alpha)
  # A term of weight 0 must not be able to hurt: 0 * inf is NaN.
  weigh = lambda w, x: jnp.where(w > 0, w * x, 0.0)
  return terms.LossTerms(
      total=weigh(alpha, soft) + weigh(1.0 - alpha, hard),
      count=reduce.count(where),
      parts=parts,
  )


def eval_terms(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    labels: Int[Array, "*N"] | Float[Array, "*N V"],
    *,
    where: Bool[Array, "*N"],
) -> terms.LossTerms:
  """Student against teacher at tau = 1; `total` is the student's CE."""
  check_vocabularies(student, teacher)
  total = lambda values: reduce.masked_sum(values, where)
  hard = total(reference.cross_entropy(student, labels, where=where))
  return terms.LossTerms(
      total=hard,
      count=reduce.count(where),
      parts={
          "distill/kl_div_tau1": total(
              reference.forward_kl(student, teacher, where=where)
          ),
          "distill/correlation": total(
              similarity.correlation(student, teacher, where=where)
          ),
          f"distill/correlation_top{TOP_ENTRIES}": total(
              similarity.topk_correlation(
                  student, teacher, k=TOP_ENTRIES, where=where
              )
          ),
          "distill/top1_agreement": total(
              similarity.top1_agreement(student, teacher, where=where)
          ),
          "distill/student_cross_entropy": hard,
          "distill/teacher_cross_entropy": total(
              reference.cross_entropy(teacher, labels, where=where)
          ),
      },
  )
