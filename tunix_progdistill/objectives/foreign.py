"""A loss that is not ours, as one term: a Tunix strategy's, or a trainer's own.

It returns a mean over its batch, and nobody can say over how many tokens it
was taken. It is weighed by the tokens of the input mask, so that a batch with
more tokens counts for more:

  total = mean * n,  count = n = the number of valid input tokens

A loss that names its sum and its denominator, as those of Tunix's main branch
do, is taken at its word.
"""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.distillation.strategies import base_strategy

from tunix_progdistill import families
from tunix_progdistill.objectives import terms


def teacher_outputs(
    strategy: base_strategy.BaseStrategy,
) -> Callable[[nnx.Module, Mapping[str, Any]], Any]:
  """The strategy's `get_teacher_outputs`, with the family's mends in force."""

  def outputs(teacher: nnx.Module, inputs: Mapping[str, Any]) -> Any:
    with families.tracing(teacher):
      return strategy.get_teacher_outputs(teacher, inputs)

  return outputs


class ForeignObjective:
  """Adapts `get_train_loss` and `get_eval_loss` to `terms.Objective`."""

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
    with families.tracing(model):
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
    with families.tracing(model):
      out = self._strategy.get_eval_loss(model, inputs)
    return _weigh(out, inputs, jnp.float32(1.0))


class Functions(NamedTuple):
  """The loss functions of a plain Tunix trainer.

  Attributes:
    loss: `(model, **inputs) -> loss`, or `(loss, aux)`.
    eval_loss: likewise, for evaluation.
  """

  loss: Callable[..., Any]
  eval_loss: Callable[..., Any]


class LossFunction:
  """Adapts a trainer's own loss functions to `terms.Objective`.

  Args:
    functions: gives them at every trace: a trainer may change them.
  """

  def __init__(self, functions: Callable[[], Functions]):
    self._functions = functions

  def with_constant(self, constant: Any) -> "LossFunction":
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
    """The trainer's own loss; it reads none of the step's scalars."""
    del teacher_output, scalars
    with families.tracing(model):
      out = self._functions().loss(model, **inputs)
    return _weigh(out, inputs, weight)

  def eval_terms(
      self,
      model: nnx.Module,
      teacher_output: Any,
      inputs: Mapping[str, Any],
  ) -> terms.LossTerms:
    """The trainer's own evaluation."""
    del teacher_output
    with families.tracing(model):
      out = self._functions().eval_loss(model, **inputs)
    return _weigh(out, inputs, jnp.float32(1.0))


def _weigh(out, inputs: Mapping[str, Any], weight) -> terms.LossTerms:
  if _is_unreduced(out):
    return _unreduced_terms(out, weight)
  loss, aux = out if isinstance(out, tuple) else (out, {})
  metrics = aux if isinstance(aux, Mapping) else {}
  mask = inputs.get("input_mask")
  if mask is None:
    mask = jnp.ones(jax.tree.leaves(dict(inputs))[0].shape[:1])
  count = jnp.sum((mask != 0).astype(jnp.float32)) * weight
  return terms.LossTerms(
      total=_sum_of(loss, count),
      count=count,
      parts={k: _sum_of(v, count) for k, v in metrics.items() if _scalar(v)},
  )


def _is_unreduced(out: Any) -> bool:
  """Whether a loss came as a sum and its denominator: Tunix's `LossOutput`.

  Tunix has it since 0.1.8; before, a loss is a mean, or a mean and metrics.
  """
  return hasattr(out, "primary_loss")


def _unreduced_terms(out: Any, weight) -> terms.LossTerms:
  """The loss's own sum and count: nothing needs to be guessed."""
  loss = out.primary_loss
  count = jnp.asarray(loss.denominator, jnp.float32) * weight
  mean = lambda m: m.compute() if hasattr(m, "unreduced_sum") else m
  means = {k: mean(v) for k, v in out.aux_metrics.items()}
  return terms.LossTerms(
      total=jnp.where(
          count > 0, jnp.asarray(loss.unreduced_sum, jnp.float32) * weight, 0.0
      ),
      count=count,
      parts={k: _sum_of(v, count) for k, v in means.items() if _scalar(v)},
  )


def _sum_of(mean: Any, count: jax.Array) -> jax.Array:
  """The sum of which `mean` is the mean; a mean over nothing may be NaN."""
  return jnp.where(count > 0, jnp.asarray(mean, jnp.float32) * count, 0.0)


def _scalar(value: Any) -> bool:
  return np.ndim(value) == 0
