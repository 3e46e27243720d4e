"""What does not fit is told before anything broadcasts."""

import jax.numpy as jnp
from jaxtyping import Array

from tunix_progdistill import errors


def check(
    student: Array, *, teacher: Array | None = None,
    tokens: Array | None = None, labels: Array | None = None,
) -> None:
  """Checks what stands beside logits `[*N, V]`.

  Args:
    student: the logits.
    teacher: must have their shape.
    tokens: a mask or weights, must be `[*N]`.
    labels: must be whole numbers `[*N]`, or rows `[*N, V]`.

  Raises:
    ValueError: it does not fit.
  """
  lead = student.shape[:-1]
  if teacher is not None and teacher.shape != student.shape:
    raise errors.invalid(
        "teacher logits", f"must have the student's shape {student.shape}",
        teacher.shape, "give both models the same vocabulary (cut or pad one) "
        "and the same tokens",
    )
  if tokens is not None:
    check_tokens(lead, **{"where or weights": tokens})
  if labels is not None and labels.shape != student.shape:
    check_ids(lead, labels, f" or rows {student.shape}")


def check_tokens(lead: tuple[int, ...], **arrays: Array) -> None:
  """Raises ValueError unless each of `arrays` is `[*N]`, as `lead` says."""
  for name, array in arrays.items():
    if array.shape != lead:
      raise errors.invalid(
          name, f"must have a value for each token, {lead}", array.shape,
          "take those of the same tokens",
      )


def check_ids(lead: tuple[int, ...], labels: Array, else_: str = "") -> None:
  """Raises ValueError unless `labels` are whole numbers `[*N]`."""
  if labels.shape != lead or not jnp.issubdtype(labels.dtype, jnp.integer):
    raise errors.invalid(
        "labels", f"must be ids {lead}{else_}",
        f"{labels.dtype}{labels.shape}", "mend labels_fn",
    )
