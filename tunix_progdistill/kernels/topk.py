"""Divergences over a teacher's k largest entries.

With the k entries alone, renormalised, neither side sees the mass that lies
elsewhere: a student that puts half of its own there has a divergence of 0. A
bucket for the tail keeps it a divergence of two distributions (over k + 1
outcomes), which is at most the dense one and equals it for k = V.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import ArrayLike
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import reference
from tunix_progdistill.kernels import shapes


def renormalised_kl(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    k: int,
    temperature: ArrayLike = 1.0,
    where: Bool[Array, "*N"],
) -> Float[Array, "*N"]:
  """The KL over the teacher's k largest entries, both sides renormalised.

  This is Tunix's `distill_top_k`: a divergence between the two truncated
  distributions, not a bound on the full one.
  """
  shapes.check(student, teacher=teacher, tokens=where)
  shapes.check_sizes(student.shape[-1], k=k)
  # Before top_k, for NaN in a masked row would order arbitrarily.
  teacher = reduce.blank(teacher, where)
  student = reduce.blank(student, where)
  teacher_k, index = jax.lax.top_k(teacher, k)
  student_k = jnp.take_along_axis(student, index, axis=-1)
  return reference.forward_kl(
      student_k, teacher_k, temperature=temperature, where=where
  )


def tail_kl(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    k: int,
    temperature: ArrayLike = 1.0,
    where: Bool[Array, "*N"],
) -> Float[Array, "*N"]:
  """KL over the teacher's k largest entries and one bucket for all the rest.

    KL = sum over top k of p log(p / q) + p_tail log(p_tail / q_tail)

  Args:
    student: student logits `[*N, V]`.
    teacher: teacher logits `[*N, V]`.
    k: 1 to V.
    temperature: tau > 0.
    where: tokens that count.

  Returns:
    `[*N]` float32, 0 <= KL <= `reference.forward_kl`, 0 outside `where`.
  """
  shapes.check(student, teacher=teacher, tokens=where)
  shapes.check_scalars(temperature=temperature)
  shapes.check_sizes(student.shape[-1], k=k)
  student = reduce.blank(student, where) / temperature
  teacher = reduce.blank(teacher, where) / temperature
  _, index = jax.lax.top_k(teacher, k)
  return reference.forward_kl(
      _buckets(student, index), _buckets(teacher, index), where=where
  )


def stored_tail_kl(
    student: Float[Array, "*N V"],
    index: Int[Array, "*N K"],
    teacher_log_p: Float[Array, "*N K"],
    *,
    temperature: ArrayLike = 1.0,
    where: Bool[Array, "*N"],
) -> Float[Array, "*N"]:
  """`tail_kl` for a teacher of whom only k log-probabilities are known.

  Args:
    student: student logits `[*N, V]`.
    index: of the entries that are known, each once; a slot of -1 is empty, and
      its log-probability is not looked at.
    teacher_log_p: log P_teacher at these entries and at this temperature.
    temperature: tau > 0, of the student.
    where: tokens that count.

  Returns:
    `[*N]` float32, >= 0, 0 outside `where`.
  """
  shapes.check(student, tokens=where)
  shapes.check_scalars(temperature=temperature)
  student = reduce.blank(student, where) / temperature
  known = (index >= 0) & where[..., None]
  log_p = jnp.where(known, teacher_log_p.astype(jnp.float32), -jnp.inf)
  mass = jnp.sum(jnp.exp(log_p), axis=-1, keepdims=True)
  # A sum that rounding takes to 1 leaves no tail.
  rest = 1.0 - jnp.minimum(mass, 1.0)
  tail = jnp.where(rest > 0, jnp.log(jnp.where(rest > 0, rest, 1.0)), -jnp.inf)
  teacher = jnp.concatenate([log_p, tail], axis=-1)
  return reference.forward_kl(
      _buckets(student, index), teacher,
      # A token of which nothing is known says nothing.
      where=where & jnp.any(known, axis=-1),
  )


def _buckets(
    logits: Float[Array, "*N V"], index: Int[Array, "*N K"]
) -> Float[Array, "*N K1"]:
  """The logits at `index`, then the log-sum-exp of all others.

  Their softmax is that of the logits, with the others' mass in one entry.
  """
  vocabulary = logits.shape[-1]
  known = index >= 0
  top = jnp.take_along_axis(logits, jnp.maximum(index, 0), axis=-1)
  top = jnp.where(known, top, -jnp.inf)
  flat = jnp.where(known, index, vocabulary).reshape(-1, index.shape[-1])
  in_rest = jax.vmap(
      lambda i: jnp.ones(vocabulary, bool).at[i].set(False, mode="drop")
  )(flat).reshape(logits.shape)
  in_rest &= ~jnp.isneginf(logits)
  some = jnp.any(in_rest, axis=-1, keepdims=True)
  # Both where's: an empty rest must not hold log 0, whose gradient is NaN.
  rest = jax.nn.logsumexp(
      jnp.where(in_rest | ~some, jnp.where(some, logits, 0.0), -jnp.inf),
      axis=-1, keepdims=True,
  )
  return jnp.concatenate([top, jnp.where(some, rest, -jnp.inf)], axis=-1)
