"""What does not fit is told before anything broadcasts."""

import math
import numbers

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
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
    ValueError: it does not fit, or the vocabulary is empty.
  """
  if not student.ndim or not student.shape[-1]:
    raise errors.invalid(
        "logits", "must end in a vocabulary of at least 1", student.shape,
        "pass [*N, V]",
    )
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


def check_scalars(
    *, temperature: ArrayLike = 1.0, alpha: ArrayLike = 1.0,
    beta: ArrayLike = 0.5,
) -> None:
  """Checks the scalars of a loss, as far as they are known.

  One that is traced, or that a device would have to be asked for, is not.

  Raises:
    ValueError: a scalar out of its range.
  """
  for name, value, least, most, rule, remedy in (
      ("temperature", temperature, 0.0, math.inf, "must be > 0 and finite",
       "1.0 softens nothing"),
      ("alpha", alpha, -math.inf, math.inf, "must be finite",
       "0.5 weighs both losses alike"),
      ("beta", beta, 0.0, 1.0, "must lie in (0, 1)", "0.5 is symmetric"),
  ):
    if isinstance(value, jax.Array):
      continue
    number = errors.plain(value)
    if not least < number < most:
      raise errors.invalid(name, rule, number, remedy)


def check_sizes(most: float = math.inf, **sizes: int | None) -> None:
  """Checks whole numbers from 1 to `most`; None is a default.

  Raises:
    ValueError: another.
  """
  for name, value in sizes.items():
    if value is None:
      continue
    if not isinstance(value, numbers.Integral):
      rule = "must be a whole number"
    elif not 1 <= value <= most:
      bounded = most != math.inf
      rule = f"must lie in 1..{most}" if bounded else "must be at least 1"
    else:
      continue
    raise errors.invalid(name, rule, value, "None is the default, if any")
