"""An nnx module's variables, read and written without walking its graph.

`nnx.split` and `nnx.update` visit every node of a model in Python: tens of
milliseconds for a few hundred layers' worth of nodes, at every step. Here the
walk is done once, when a stage starts, and a step passes plain arrays by name.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

Values = dict[str, Any]

_SMALL = ("int4", "uint4", "int2", "uint2")


def path_name(path: Iterable[Any]) -> str:
  """`('layers', 3, 'attn', 'w')` as `layers/3/attn/w`."""
  return "/".join(str(part) for part in path)


class LiveVariables:
  """The variables of `module` that `which` chooses, by path name.

  Invariant: the module's graph does not change while this is in use.
  """

  def __init__(self, module: nnx.Module, which: nnx.filterlib.Filter = ...):
    self.paths = {
        path_name(path): path
        for path, _ in nnx.to_flat_state(nnx.state(module, which))
    }
    self._variables = {
        name: _follow(module, path) for name, path in self.paths.items()
    }

  def __iter__(self) -> Iterator[tuple[str, nnx.Variable]]:
    """(name, variable), each variable once, under its first path."""
    return iter(self._variables.items())

  def read(self) -> Values:
    """The current values."""
    return {n: v.get_value() for n, v in self._variables.items()}

  def write(self, values: Mapping[str, Any]) -> None:
    """Sets the variables to `values`, in place."""
    for name, value in values.items():
      self._variables[name].set_value(value)


def _follow(node: Any, path: tuple[Any, ...]) -> Any:
  for part in path:
    if isinstance(part, int) or isinstance(node, Mapping):
      node = node[part]
    else:
      node = getattr(node, part)
  return node


def device_count(module: nnx.Module) -> int:
  """Over how many devices the variables of `module` are spread."""
  return max(
      (len(x.sharding.device_set)
       for x in jax.tree.leaves(nnx.state(module)) if isinstance(x, jax.Array)),
      default=1,
  )


def variable(module: nnx.Module, name: str) -> nnx.Variable:
  """The variable at `name`, such as `layers/3/attn/w`."""
  path = [int(p) if p.isdigit() else p for p in name.split("/")]
  return _follow(module, tuple(path))


def merge(
    graph: Any, paths: Mapping[str, tuple[Any, ...]], *values: Values
) -> Any:
  """The module of `graph` with these values; it belongs to the current trace.

  Args:
    graph: from `nnx.split`.
    paths: name -> path, for every value.
    *values: name -> array; together, all of the module's variables.
  """
  flat = {paths[n]: v for part in values for n, v in part.items()}
  return nnx.merge(graph, nnx.from_flat_state(flat))


def extract(module: nnx.Module, names: Mapping[str, Any]) -> Values:
  """The values of the variables in `names`; others, such as sown ones, stay."""
  flat = nnx.to_flat_state(nnx.state(module))
  found = {path_name(p): v.get_value() for p, v in flat}
  return {n: found[n] for n in names}


def _is_key(x: Any) -> bool:
  return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def raw_keys(tree: Any) -> Any:
  """`tree` with its typed random keys as their raw bits."""
  return jax.tree.map(
      lambda x: jax.random.key_data(x) if _is_key(x) else x, tree
  )


def typed_keys(raw: Any, like: Any) -> Any:
  """The inverse of `raw_keys`, with `like` for the types of the keys."""

  def back(x, old):
    if _is_key(old):
      return jax.random.wrap_key_data(x, impl=jax.random.key_impl(old))
    return x

  return jax.tree.map(back, raw, like)


def let_go_of_small_types(model: nnx.Module) -> None:
  """Makes 4-bit arrays on one device uncommitted.

  A compiled program refuses them otherwise: jax says that a committed array of
  such a type has another layout than the program's.
  """
  for _, variable in LiveVariables(model):
    x = variable.get_value()
    if (
        isinstance(x, jax.Array) and x.dtype.name in _SMALL and x.committed
        and len(x.sharding.device_set) == 1
    ):
      variable.set_value(jnp.asarray(np.asarray(x)))


def evaluating(model: nnx.Module) -> nnx.Module:
  """`model` with dropout off and running averages on; it shares its weights."""
  return nnx.view(
      model,
      deterministic=True,
      use_running_average=True,
      raise_if_not_found=False,
  )
