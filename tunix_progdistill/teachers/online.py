"""The teacher runs on every batch, in training and in evaluation alike."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from flax import nnx

from tunix_progdistill.engine import step


class OnlineTeacher:
  """Runs the teacher on a batch's inputs.

  The teacher is always in eval mode, whatever mode it was handed over in: its
  dropout would make the targets random. The user's module keeps its mode; a
  view of it that shares its weights is what runs.

  Args:
    outputs: `(teacher_model, inputs) -> what the objective takes`.
  """

  def __init__(self, outputs: Callable[[nnx.Module, Mapping[str, Any]], Any]):
    self._outputs = outputs
    self._of: Any = None
    self._view: Any = None

  def __call__(self, teacher: nnx.Module, inputs: Mapping[str, Any]) -> Any:
    if teacher is not self._of:
      self._of, self._view = teacher, step.evaluating(teacher)
    return self._outputs(self._view, inputs)
