"""Any other nnx model, by discovery: its layers stand in one list."""

import re

from flax import nnx

from tunix_progdistill import errors
from tunix_progdistill import modules
from tunix_progdistill.families import base


def _lists(model: nnx.Module) -> dict[str, int]:
  """Path -> length of every list of two or more modules of one class."""
  found = {}
  for path, node in nnx.iter_graph(model):
    if not isinstance(node, nnx.Module):
      continue
    for name, value in vars(node).items():
      if not isinstance(value, (list, tuple, nnx.List)) or len(value) < 2:
        continue
      items = list(value)
      kinds = {type(v) for v in items}
      if isinstance(items[0], nnx.Module) and len(kinds) == 1:
        found["/".join(map(str, (*path, name)))] = len(items)
  return found


def discover(model: nnx.Module) -> base.Family:
  """The family of a model that no known one claims.

  Its layers are its longest list of modules of one class; the inputs are its
  `nnx.Embed` modules outside that list.

  Raises:
    ValueError: there is no such list, or two are equally long.
  """
  found = _lists(model)
  # A list inside another list's items (the experts of a layer) is not it.
  outer = {
      p: n for p, n in found.items()
      if not any(p.startswith(f"{q}/") for q in found if q != p)
  }
  longest = [p for p, n in outer.items() if n == max(outer.values())]
  if len(longest) != 1:
    raise errors.invalid(
        f"layers of {type(model).__name__}",
        "must stand in one list of modules of one class",
        longest or "no list",
        "choose parameters by trainable= or frozen= rules",
    )
  return base.Family(
      name="generic", layers=longest[0], inputs=_inputs(model, longest[0])
  )


def _inputs(model: nnx.Module, layers: str) -> tuple[str, ...]:
  """The paths of the embeddings' variables outside the layers.

  By identity, for a head that is tied to an embedding may hold the variable
  under the name that nnx knows it by.
  """
  embeddings = {
      id(variable)
      for path, node in nnx.iter_graph(model)
      if isinstance(node, nnx.Embed)
      and not modules.path_name(path).startswith(f"{layers}/")
      for variable in vars(node).values()
      if isinstance(variable, nnx.Variable)
  }
  return tuple(
      re.escape(name)
      for name, variable in modules.LiveVariables(model)
      if id(variable) in embeddings
  )
