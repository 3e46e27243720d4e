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
  summed = _unreduced(out) if hasattr(out, "primary_loss") else (
      _times_tokens(out, inputs)
  )
  count = summed.number * weight
  # A mean over nothing may be NaN.
  valid = lambda x: jnp.where(count > 0, x, 0.0)
  return terms.LossTerms(
      total=valid(summed.total * weight),
      count=count,
      parts={
          k: valid(jnp.asarray(v, jnp.float32) * count)
          for k, v in summed.means.items() if np.ndim(v) == 0
      },
  )


class _Summed(NamedTuple):
  """A loss before its weight: its sum, over how many, and metrics' means."""

  total: jax.Array
  number: jax.Array
  means: Mapping[str, Any]


def _times_tokens(out, inputs: Mapping[str, Any]) -> _Summed:
  """Of a mean, or a mean and metrics."""
  loss, aux = out if isinstance(out, tuple) else (out, {})
  mask = inputs.get("input_mask")
  if mask is None:
    mask = jnp.ones(jax.tree.leaves(dict(inputs))[0].shape[:1])
  number = jnp.sum((mask != 0).astype(jnp.float32))
  return _Summed(
      jnp.asarray(loss, jnp.float32) * number, number,
      aux if isinstance(aux, Mapping) else {},
  )


def _unreduced(out) -> _Summed:
  """Of Tunix's `LossOutput`, which its releases do not have yet."""
  loss = out.primary_loss
  return _Summed(
      jnp.asarray(loss.unreduced_sum, jnp.float32),
      jnp.asarray(loss.denominator, jnp.float32),
      {
          k: m.compute() if hasattr(m, "unreduced_sum") else m
          for k, m in out.aux_metrics.items()
      },
  )
