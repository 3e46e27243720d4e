"""A student of the same width, made of some of the teacher's layers."""

from collections.abc import Iterable
from collections.abc import Sequence
import copy
import dataclasses
from typing import Any

from flax import nnx
import jax

from tunix_progdistill import errors
from tunix_progdistill import families


def from_layers(teacher: nnx.Module, layers: Sequence[int]) -> nnx.Module:
  """A copy of `teacher` that keeps the given layers, in the given order.

  Embedding, norms and head are kept. The weights are copies.

  Layers of Gemma are local or global by their position, and a loader rebuilds
  them by position: each kept layer must come to stand where its own kind does.

  Args:
    teacher: a model of a known family, or one whose layers stand in one list.
    layers: numbers of the layers to keep, from 0; one may be used repeatedly.

  Returns:
    A model of the teacher's class; its config, if any, tells the new number of
    layers.

  Raises:
    ValueError: a number that is no layer, or a layer in a place of another
      attention type.
  """
  path = families.of(teacher).layers.split("/")
  source = _follow(teacher, path)
  if isinstance(layers, str) or not isinstance(layers, Iterable):
    layers = ()
  layers = [errors.plain(i) for i in layers]
  if not layers:
    raise errors.invalid(
        "layers", "must name at least one layer", layers, "try (0, 1)"
    )
  for i in layers:
    if not isinstance(i, int) or not 0 <= i < len(source):
      raise errors.invalid(
          "layers", f"must be numbers from 0 to {len(source) - 1}", i,
          "count the teacher's layers from 0",
      )
  kinds = [_attention_type(layer) for layer in source]
  for position, i in enumerate(layers):
    if kinds[i] != kinds[position % len(source)]:
      raise errors.invalid(
          f"layers[{position}]",
          f"must be a layer of attention type {kinds[position]}, as its place "
          f"asks, and layer {i} is {kinds[i]}", i,
          "choose one of "
          f"{[j for j, k in enumerate(kinds) if k == kinds[position]]}",
      )
  if getattr(
      getattr(teacher, "config", None), "per_layer_input_dim", None
  ):
    raise errors.invalid(
        "teacher", "must not have embeddings per layer (Gemma 4's "
        "per_layer_input_dim)", type(teacher).__name__,
        "build the student from its own config",
    )
  student: Any = _copy(teacher)
  kept = [_copy(source[i]) for i in layers]
  *parents, name = path
  owner = _follow(student, parents)
  setattr(owner, name, type(source)(kept))
  config: Any = getattr(student, "config", None)
  if hasattr(config, "num_layers"):
    student.config = dataclasses.replace(config, num_layers=len(kept))
  return student


def num_parameters(model: nnx.Module) -> int:
  """The number of entries of all parameters; a tied one counts once.

  The scales of a quantised kernel are none.
  """
  return sum(
      v.get_value().size
      for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))
      if path[-2:-1] != ("array",) or path[-1] == "qvalue"
  )


def _follow(node: Any, path: Sequence[str]) -> Any:
  for part in path:
    node = getattr(node, part)
  return node


def _attention_type(layer: Any) -> Any:
  return getattr(getattr(layer, "attn", None), "attn_type", None)


def _copy(node: Any) -> Any:
  graph, state = nnx.split(node)
  return nnx.merge(graph, jax.tree.map(copy.copy, state))
