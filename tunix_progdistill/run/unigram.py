"""The floor: a model that knows how often each token occurs, and no more."""

from collections.abc import Iterable
from collections.abc import Mapping

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from tunix_progdistill import families
from tunix_progdistill import kernels
from tunix_progdistill import modules
from tunix_progdistill.families import causal_lm


def log_probs(
    batches: Iterable[Mapping[str, np.ndarray]], size: int
) -> np.ndarray:
  """log p(token), regardless of what stands before it.

  p(i) = (count[i] + 1/2) / sum_j (count[j] + 1/2), so that no token is
  impossible and KL(teacher || unigram) is finite.

  Args:
    batches: an epoch of training data; tokens under their loss mask count.
    size: V.

  Returns:
    float32 [V].
  """
  counts = np.zeros(size, np.float64)
  for batch in batches:
    mask = batch["input_mask"] & batch["loss_mask"]
    counts += np.bincount(batch["input_tokens"][mask], minlength=size)[:size]
  weight = counts + 0.5
  return np.log(weight / weight.sum()).astype(np.float32)


@nnx.jit(static_argnums=3)
def _sums(
    model: nnx.Module, floor: jax.Array, batch: Mapping[str, jax.Array],
    head: families.Head | None,
) -> dict[str, jax.Array]:
  labels = causal_lm.next_token_labels(**batch)
  where = labels >= 0

  def rule(logits, labels, *, where):
    rows = jnp.broadcast_to(floor, logits.shape)
    return {
        "kl_div_tau1": kernels.reference.forward_kl(rows, logits, where=where),
        "cross_entropy": kernels.reference.cross_entropy(
            rows, labels, where=where
        ),
    }

  with families.tracing(model):
    if head is None:
      values = kernels.chunked.token_values(
          rule, causal_lm.forward(model, **batch), labels, where=where
      )
    else:
      hidden = head.cast(causal_lm.hidden(model, **batch))
      matrix = head.matrix(model)
      values = kernels.linear_head.token_values(
          lambda _, *arrays, where: rule(*arrays, where=where),
          hidden, hidden, matrix, matrix, labels, where=where,
          student_layout=head.layout, teacher_layout=head.layout,
          student_softcap=head.softcap, teacher_softcap=head.softcap,
      )
  reduce = kernels.reduce
  sums = {k: reduce.masked_sum(v, where) for k, v in values.items()}
  return sums | {"count": reduce.count(where)}


def _head(model: nnx.Module) -> families.Head | None:
  """The model's output head, where the logits need not be made for it."""
  family = families.of(model)
  if family.head is None or modules.device_count(model) > 1:
    return None
  head = family.head(model)
  return None if head.fault(model) else head


def floor(
    teacher: nnx.Module,
    log_p: np.ndarray,
    held_out: Iterable[Mapping[str, np.ndarray]],
) -> dict[str, float]:
  """KL(teacher || unigram) at tau = 1 and the unigram's cross-entropy.

  A student that is not closer to the teacher has learned nothing of context.

  Args:
    teacher: runs in eval mode.
    log_p: float32 [V], see `log_probs`.
    held_out: batches; the means are over their valid target tokens.
  """
  model, head = modules.evaluating(teacher), _head(teacher)
  total: dict[str, float] = {}
  for batch in held_out:
    inputs = {
        k: jnp.asarray(batch[k])
        for k in ("input_tokens", "input_mask", "loss_mask")
    }
    for key, value in _sums(
        model, jnp.asarray(log_p), inputs, head
    ).items():
      total[key] = total.get(key, 0.0) + float(value)
  count = max(total.pop("count", 0.0), 1.0)
  return {k: v / count for k, v in total.items()}
