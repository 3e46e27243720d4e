"""`LogitObjective`: a strategy, as the engine asks an objective.

It knows the strategy by its methods alone: the strategy's room is above.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import nnx
import jax

from tunix_progdistill import outputs
from tunix_progdistill.objectives import fused
from tunix_progdistill.objectives import terms


@dataclasses.dataclass(frozen=True)
class LogitObjective:
  """A strategy as the engine's objective.

  Attributes:
    strategy: a `ProgressiveLogitStrategy`.
    kl_div_tau1: whether the KL at temperature 1 is to be logged.
    heads: of both models, where they may be fused with the loss.
    teacher_head: the matrix of the teacher's.
  """

  strategy: Any
  kl_div_tau1: bool = False
  heads: fused.Heads | None = None
  teacher_head: jax.Array | None = None

  def with_constant(self, constant: jax.Array | None) -> "LogitObjective":
    """Itself, with the matrix of the teacher's output head."""
    return dataclasses.replace(self, teacher_head=constant)

  def _fused_terms(self, model, teacher_output, *args, **kwargs):
    assert self.heads is not None and self.teacher_head is not None
    teacher = fused.Side(
        teacher_output.states, self.teacher_head, self.heads.teacher
    )
    return self.strategy.fused_terms(
        model, teacher, self.heads.student, *args, **kwargs
    )

  def train_terms(
      self,
      model: nnx.Module,
      teacher_output: jax.Array | outputs.Hidden,
      inputs: Mapping[str, Any],
      scalars: terms.StepScalars,
      weight: jax.Array,
  ) -> terms.LossTerms:
    """See `ProgressiveLogitStrategy.train_terms` and `fused_terms`."""
    rest = (inputs, scalars, weight, self.kl_div_tau1)
    if isinstance(teacher_output, outputs.Hidden):
      return self._fused_terms(model, teacher_output, *rest)
    return self.strategy.train_terms(model, teacher_output, *rest)

  def eval_terms(
      self,
      model: nnx.Module,
      teacher_output: jax.Array | outputs.Hidden,
      inputs: Mapping[str, Any],
  ) -> terms.LossTerms:
    """See `ProgressiveLogitStrategy.eval_terms` and `fused_terms`."""
    if isinstance(teacher_output, outputs.Hidden):
      return self._fused_terms(model, teacher_output, inputs)
    return self.strategy.eval_terms(model, teacher_output, inputs)
