"""A Tunix strategy that is not ours, as one term.

It returns a mean over its batch, and nobody can say over how many tokens it
was taken. It is weighed by the tokens of the input mask, so that a batch with
more tokens counts for more.
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.distillation.strategies import base_strategy

from tunix_progdistill.objectives import terms


class ForeignObjective:
  """Adapts `get_train_loss` and `get_eval_loss` to `terms.Objective`.

    total = mean * n,  count = n = the number of valid input tokens
  """

  def __init__(self, strategy: base_strategy.BaseStrategy):
    self._strategy = strategy

  def with_constant(self, constant: Any) -> "ForeignObjective":
    """Itself: it needs none."""
    del constant
    return self

  def train_terms(
      self,
      model: nnx.Module,
      teacher_output: Any,
      inputs: Mapping[str, Any],
      scalars: terms.StepScalars,
      weight: jax.Array,
  ) -> terms.LossTerms:
    """The strategy's own loss; it reads none of the step's scalars."""
    del scalars
    out = self._strategy.get_train_loss(model, teacher_output, inputs)
    return _weigh(out, inputs, weight)

  def eval_terms(
      self,
      model: nnx.Module,
      teacher_output: Any,
      inputs: Mapping[str, Any],
  ) -> terms.LossTerms:
    """The strategy's own evaluation; most of them need no teacher."""
    del teacher_output
    out = self._strategy.get_eval_loss(model, inputs)
    return _weigh(out, inputs, jnp.float32(1.0))


def _weigh(out, inputs: Mapping[str, Any], weight) -> terms.LossTerms:
  loss, metrics = out if isinstance(out, tuple) else (out, {})
  mask = inputs.get("input_mask")
  if mask is None:
    mask = jnp.ones(jax.tree.leaves(dict(inputs))[0].shape[:1])
  count = jnp.sum((mask != 0).astype(jnp.float32)) * weight
  scaled = lambda x: jnp.where(
      count > 0, jnp.asarray(x, jnp.float32) * count, 0.0
  )
  return terms.LossTerms(
      total=scaled(loss),
      count=count,
      parts={k: scaled(v) for k, v in metrics.items()},
  )
