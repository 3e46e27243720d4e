"""A family's checkpoints as Hugging Face writes them: the shared machinery.

What is said of one family stands in the family's own file; here is only the
form in which it is said.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import importlib
import math
import re
from typing import Any

from flax import nnx


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
  """One tensor of a file, and the parameter that it fills or is a part of.

  Attributes:
    name: name in the file, such as model.layers.0.mlp.up_proj.weight.
    param: path of the parameter, such as layers/0/mlp/up_proj/kernel.
    layout: the parameter's axes and the tensor's, such as
      "n d h -> (n h) d"; empty where the two are the same.
    part: place on the parameter's first axis, where several tensors are
      stacked there; None where the tensor is the whole parameter.
  """

  name: str
  param: str
  layout: str = ""
  part: int | None = None

  def part_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of this tensor's part of a parameter of `shape`."""
    return tuple(shape[1:] if self.part is not None else shape)

  def hf_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the tensor, for a parameter of `shape`.

    >>> Tensor(name="q", param="q", layout="n d h -> (n h) d").hf_shape(
    ...     (2, 16, 8))
    (16, 16)
    """
    shape = self.part_shape(shape)
    if not self.layout:
      return shape
    left, right = _axes(self.layout)
    size = dict(zip(left, shape, strict=True))
    return tuple(math.prod(size[a] for a in group) for group in right)

  def to_hf(self, value: Any) -> Any:
    """The tensor, of a parameter's value (numpy or jax)."""
    if self.part is not None:
      value = value[self.part]
    if not self.layout:
      return value
    left, right = _axes(self.layout)
    order = [left.index(a) for group in right for a in group]
    shape = Tensor(name="", param="", layout=self.layout).hf_shape(value.shape)
    return value.transpose(order).reshape(shape)

  def from_hf(self, value: Any, shape: Sequence[int]) -> Any:
    """The inverse: this tensor's part of a parameter of `shape`."""
    shape = self.part_shape(shape)
    if not self.layout:
      return value.reshape(shape)
    left, right = _axes(self.layout)
    size = dict(zip(left, shape, strict=True))
    order = [a for group in right for a in group]
    return value.reshape([size[a] for a in order]).transpose(
        [order.index(a) for a in left]
    )


def _axes(layout: str) -> tuple[list[str], list[list[str]]]:
  left, right = layout.split("->")
  groups = re.findall(r"\([^)]*\)|\S+", right)
  return left.split(), [g.strip("()").split() for g in groups]


# The projections of a feed-forward block, in every family.
FEED_FORWARD: dict[str, Any] = {
    f"mlp.{name}.weight": (f"mlp/{name}/kernel", "i o -> o i")
    for name in ("gate_proj", "up_proj", "down_proj")
}


def module(package: str) -> Any:
  """Tunix's module of a family's model, imported when it is first needed."""
  return importlib.import_module(f"{package}model")


def abstract_parameters(kind: Any, config: Any) -> dict[str, Any]:
  """Path -> shape and dtype of every parameter; nothing is allocated."""
  model = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
  return {
      "/".join(map(str, path)): variable.get_value()
      for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
  }


def alike_parameters(kind: Any, config: Any) -> dict[str, Any]:
  """`abstract_parameters` where all layers have the shapes of the first.

  Building a layer of Tunix takes a third of a second, even an abstract one.
  """
  found: dict[str, Any] = {}
  one = dataclasses.replace(config, num_layers=1)
  for path, value in abstract_parameters(kind, one).items():
    if path.startswith("layers/0/"):
      rest = path.removeprefix("layers/0/")
      found |= {f"layers/{i}/{rest}": value for i in range(config.num_layers)}
    else:
      found[path] = value
  return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFace:
  """A family's side towards Hugging Face.

  Invariant: `tensors(config)` names every parameter of the model of `config`,
  each part of it once.

  Attributes:
    model_types: the values of `model_type` that the family answers to.
    loader: the module of Tunix with the family's public
      `create_model_from_safe_tensors`.
    config_from_hf: (config.json of the text model, dtype) -> Tunix's
      ModelConfig; raises ValueError on what Tunix cannot express.
    config_to_hf: Tunix's ModelConfig -> the fields of config.json that decide
      what is computed; raises ValueError on what no model_type can express.
    tensors: Tunix's ModelConfig -> the table of tensors.
    prefixes: what may stand in a file in place of the table's "model.".
    loader_prefixes: those of them that Tunix's loader knows.
    export_prefix: what stands there in a file that is exported.
    loader_is_right: whether Tunix's loader reads files of this config right.
    unused: regexes of names in a file that the text model has no place for.
    shapes: (class, config) -> path -> shape of every parameter.
    tied: whether the head of a model of this config is its embedding.
  """

  model_types: tuple[str, ...]
  loader: str
  config_from_hf: Callable[[Mapping[str, Any], Any], Any]
  config_to_hf: Callable[[Any], dict[str, Any]]
  tensors: Callable[[Any], list[Tensor]]
  shapes: Callable[[Any, Any], dict[str, Any]] = alike_parameters
  tied: Callable[[Any], bool] = lambda config: True
  prefixes: tuple[str, ...] = ("model.",)
  loader_prefixes: tuple[str, ...] = ("model.",)
  export_prefix: str = "model."
  loader_is_right: Callable[[Any], bool] = lambda config: True
  unused: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)

  def is_unused(self, name: str) -> bool:
    return any(re.fullmatch(rule, name) for rule in self.unused)

  def table_name(self, name: str) -> str:
    """A name of a file, as the table writes it."""
    for prefix in sorted(self.prefixes, key=len, reverse=True):
      if name.startswith(prefix):
        return f"model.{name.removeprefix(prefix)}"
    return name

  def export_name(self, name: str) -> str:
    """A name of the table, as an exported file has it."""
    if name.startswith("model."):
      return f"{self.export_prefix}{name.removeprefix('model.')}"
    return name


def layer_tensors(
    numbers: Iterable[int], table: Mapping[str, tuple[Any, ...]]
) -> list[Tensor]:
  """The tensors of some layers.

  Args:
    numbers: the layers' numbers.
    table: name inside the layer -> (parameter inside the layer, layout) and,
      where it is one of several, its place.
  """
  return [
      Tensor(
          name=f"model.layers.{i}.{name}", param=f"layers/{i}/{row[0]}",
          layout=row[1], part=row[2] if len(row) > 2 else None,
      )
      for i in numbers
      for name, row in table.items()
  ]
