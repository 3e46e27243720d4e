"""The teacher runs on every batch, in training and in evaluation alike."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax

from tunix_progdistill import modules


class OnlineTeacher:
  """Runs the teacher on a batch's inputs.

  The teacher is always in eval mode, whatever mode it was handed over in: its
  dropout would make the targets random. The user's module keeps its mode; a
  view of it that shares its weights is what runs.

  Args:
    outputs: `(teacher_model, inputs) -> what the objective takes`, traceable.
    constant: path of a parameter that the objective takes beside them.
  """

  def __init__(
      self, outputs: Callable[[nnx.Module, Mapping[str, Any]], Any],
      constant: str | None = None,
  ):
    self._outputs = outputs
    self._constant = constant
    self._teacher: Any = None
    self._variables: Any = None
    self._run: Any = None

  def __call__(self, teacher: nnx.Module, inputs: Mapping[str, Any]) -> Any:
    if teacher is not self._teacher:
      self._bind(teacher)
    return self._run(self._variables.read(), inputs)

  def constant(self) -> jax.Array | None:
    """The parameter's value, of the teacher that ran last."""
    if self._constant is None or self._teacher is None:
      return None
    return modules.variable(self._teacher, self._constant).get_value()

  def _bind(self, teacher: nnx.Module) -> None:
    view = modules.evaluating(teacher)
    graph, variables = nnx.graphdef(view), modules.LiveVariables(view)
    self._teacher, self._variables = teacher, variables
    self._run = jax.jit(
        lambda values, inputs: jax.lax.stop_gradient(
            self._outputs(modules.merge(graph, variables.paths, values), inputs)
        )
    )
