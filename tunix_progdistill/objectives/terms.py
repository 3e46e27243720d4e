"""The pytrees that cross from an objective to the engine."""

from collections.abc import Mapping
from typing import Any
from typing import Protocol

import flax
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np


@flax.struct.dataclass
class StepScalars:
  """The scalars of one update: arguments of the compiled step, never constants.

  Attributes:
    temperature: tau > 0, float32 [].
    alpha: weight of the soft loss, float32 [].
    learning_rate: float32 []; not used where the optimizer keeps its own.
  """

  temperature: jax.Array | np.float32
  alpha: jax.Array | np.float32
  learning_rate: jax.Array | np.float32


@flax.struct.dataclass
class LossTerms:
  """Sums over the valid tokens of one batch.

  Sums add up over micro-batches, devices and evaluation batches; a mean is
  taken once, at the end.

  Attributes:
    total: what is minimised, summed over tokens, float32 [].
    count: the number of valid tokens, float32 [].
    parts: further sums over the same tokens, by name.
  """

  total: jax.Array
  count: jax.Array
  parts: Mapping[str, jax.Array]

  def __add__(self, other: "LossTerms") -> "LossTerms":
    return jax.tree.map(jnp.add, self, other)


class Objective(Protocol):
  """What the engine needs of a strategy."""

  def with_constant(self, constant: Any) -> "Objective":
    """Itself, with an array that every batch needs and that none carries."""

  def train_terms(
      self,
      model: nnx.Module,
      teacher_output: Any,
      inputs: Mapping[str, Any],
      scalars: StepScalars,
      weight: jax.Array,
  ) -> LossTerms:
    """The loss of one micro-batch; a `weight` of 0 makes it count nothing."""

  def eval_terms(
      self,
      model: nnx.Module,
      teacher_output: Any,
      inputs: Mapping[str, Any],
  ) -> LossTerms:
    """The evaluation of one batch."""
