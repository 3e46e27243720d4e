"""Any other nnx model, by discovery: its layers stand in one list."""

from flax import nnx

from tunix_progdistill import errors
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
  inputs = []
  for path, node in nnx.iter_graph(model):
    if isinstance(node, nnx.Embed):
      name = "/".join(map(str, path))
      if not name.startswith(f"{longest[0]}/"):
        inputs.append(f"{name}/.*")
  return base.Family(
      name="generic", layers=longest[0], inputs=tuple(inputs)
  )
