"""How alike two models' logits are, beyond the divergence."""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float

from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import shapes


def correlation(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    where: Bool[Array, "*N"],
) -> Float[Array, "*N"]:
  """Pearson correlation of the two logit vectors of each token.

    r = <s - mean(s), t - mean(t)> / (|s - mean(s)| |t - mean(t)|)

  Softmax ignores a shift per token, so the vectors are centred over the
  vocabulary first. Scale is ignored too: read it beside the KL.

  Returns:
    `[*N]` float32 in [-1, 1]; 0 outside `where` and where a vector is constant.
  """
  shapes.check(student, teacher=teacher, tokens=where)
  centre = lambda x: x - jnp.mean(x, axis=-1, keepdims=True)
  s = centre(reduce.blank(student, where))
  t = centre(reduce.blank(teacher, where))
  norm = jnp.linalg.norm(s, axis=-1) * jnp.linalg.norm(t, axis=-1)
  r = jnp.sum(s * t, axis=-1) / jnp.where(norm > 0, norm, 1.0)
  return jnp.where(where, jnp.clip(r, -1.0, 1.0), 0.0)


def topk_correlation(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    k: int,
    where: Bool[Array, "*N"],
) -> Float[Array, "*N"]:
  """`correlation` over the teacher's k largest entries (all, where V < k).

  Where the teacher is sure, nearly all of a vocabulary is noise, and the
  correlation over the whole of it ranks students wrongly.
  """
  shapes.check(student, teacher=teacher, tokens=where)
  teacher = reduce.blank(teacher, where)
  student = reduce.blank(student, where)
  top, index = jax.lax.top_k(teacher, min(k, teacher.shape[-1]))
  return correlation(
      jnp.take_along_axis(student, index, axis=-1), top, where=where
  )


def top1_agreement(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    where: Bool[Array, "*N"],
) -> Float[Array, "*N"]:
  """1 where both models' most likely token is the same, else 0."""
  shapes.check(student, teacher=teacher, tokens=where)
  same = jnp.argmax(reduce.blank(student, where), axis=-1) == jnp.argmax(
      reduce.blank(teacher, where), axis=-1
  )
  return jnp.where(where & same, 1.0, 0.0)
