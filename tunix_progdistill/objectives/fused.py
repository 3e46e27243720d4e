"""The terms of `objectives.logits` from hidden states and output heads.

The same loss and the same measures, a block of tokens at a time, without the
logits `[B, T, V]` of either model.
"""

import dataclasses
import os
from typing import Any

from flax import nnx
import jax
from jax.typing import ArrayLike
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

from tunix_progdistill import errors
from tunix_progdistill import families
from tunix_progdistill import modules
from tunix_progdistill.kernels import linear_head
from tunix_progdistill.objectives import logits
from tunix_progdistill.objectives import terms


def cannot(need: str, value: Any, remedy: str) -> ValueError:
  """What to raise where heads cannot be fused with the loss."""
  return errors.invalid(
      "fused_head", f"needs {need}", value, f"{remedy}, or set it to False"
  )


@dataclasses.dataclass(frozen=True)
class Heads:
  """The output heads of a run's two models.

  Attributes:
    student: the student's.
    teacher: the teacher's.
    always: fuse them with the loss whatever the batch; else only where the
      logits would take too much memory.
  """

  student: families.Head
  teacher: families.Head
  always: bool

  @classmethod
  def of(
      cls, student: nnx.Module, teacher: nnx.Module, *, always: bool
  ) -> "Heads":
    """The heads of two models.

    Raises:
      ValueError: they cannot be fused with the loss.
    """
    if (devices := modules.device_count(student)) > 1:
      raise cannot(
          "a student on one device", f"{devices} devices", "use a mesh of one"
      )
    found = {}
    for name, model in (("student", student), ("teacher", teacher)):
      family = families.of(model)
      if family.head is None:
        raise cannot(
            f"a {name} whose output head is known", type(model).__name__,
            "take a model of Tunix's",
        )
      found[name] = family.head(model)
      if fault := found[name].fault(model):
        raise cannot(f"a plain output head in the {name}", fault, "merge it")
    return cls(always=always, **found)

  def are_fused(self, states: jax.Array, vocabulary: int) -> bool:
    """Whether a batch goes without logits; by its shape and the device alone.

    Both models' logits and the gradient may take half of the memory there is:
    weights, optimizer and activations need the rest.

    Args:
      states: the teacher's hidden states.
      vocabulary: V.
    """
    tokens = states.size // states.shape[-1]
    logits_bytes = 3 * tokens * vocabulary * states.dtype.itemsize
    return self.always or logits_bytes > _memory_bytes() / 2


def _memory_bytes() -> float:
  """Of a device; of the machine where the device is its processor."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if limit := stats.get("bytes_limit"):
    return limit
  return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@dataclasses.dataclass(frozen=True)
class Side:
  """One model's part: hidden states and its head.

  Attributes:
    states: `[B, T, D]`.
    matrix: `[V, D]` or `[D, V]`.
    head: how the two make the logits.
  """

  states: Float[Array, "B T D"]
  matrix: Float[Array, "V D"] | Float[Array, "D V"]
  head: families.Head


def _arguments(
    student: Side, teacher: Side
) -> tuple[tuple[jax.Array, jax.Array, jax.Array, jax.Array], dict[str, Any]]:
  """Of a `linear_head` function: the arrays, and the rest by name."""
  fixed = jax.lax.stop_gradient
  arrays = (
      student.head.cast(student.states),
      teacher.head.cast(fixed(teacher.states)),
      student.head.cast(student.matrix),
      teacher.head.cast(fixed(teacher.matrix)),
  )
  return arrays, {
      "student_layout": student.head.layout,
      "teacher_layout": teacher.head.layout,
      "student_softcap": student.head.softcap,
      "teacher_softcap": teacher.head.softcap,
  }


def check_labels(labels: Array, tokens: tuple[int, ...]) -> None:
  """Raises ValueError unless labels are ids."""
  if labels.shape != tokens:
    raise ValueError(
        "labels must be ids [B, T] where the output head is fused with the "
        f"loss, got {labels.dtype}{labels.shape}; let labels_fn give ids, or "
        "set fused_head=False"
    )


def train_terms(
    student: Side,
    teacher: Side,
    labels: Int[Array, "B T"],
    *,
    where: Bool[Array, "B T"],
    temperature: ArrayLike,
    alpha: ArrayLike,
    kl_div_tau1: bool = False,
) -> terms.LossTerms:
  """`objectives.logits.train_terms`; gradients flow to states and matrix."""
  arrays, options = _arguments(student, teacher)
  total, values = linear_head.distillation(
      *arrays, labels, temperature=temperature, alpha=alpha, weights=where,
      kl_div_tau1=kl_div_tau1, **options,
  )
  return logits.as_terms(total, values, where, where, temperature)


def eval_terms(
    student: Side,
    teacher: Side,
    labels: Int[Array, "B T"],
    *,
    where: Bool[Array, "B T"],
) -> terms.LossTerms:
  """`objectives.logits.eval_terms`."""
  arrays, options = _arguments(student, teacher)
  values = linear_head.token_values(
      logits.evaluate, *arrays, labels, where=where, **options
  )
  return logits.as_eval_terms(values, where)
