"""`Family`: where a kind of model keeps its layers, and what it needs."""

from collections.abc import Callable
import contextlib
import dataclasses
import re
from typing import Any

from flax import nnx

from tunix_progdistill.families import heads
from tunix_progdistill.families import hf as hf_lib


def _no_mend(model: nnx.Module):
  del model
  return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """One model family.

  Attributes:
    name: as in Tunix's package names.
    class_names: the model classes, by name: Tunix's modules are not imported
      before a model of theirs exists.
    package: the package that these classes live in.
    layers: path of the list of decoder layers.
    inputs: regexes of the parameters that are used before the first layer.
      Left trainable they would drag the backward pass through every frozen
      layer; a head that is tied to one of them is the same parameter.
    head: tells where a model's output head lies; None where nobody knows.
    mend: context manager to hold while the model is traced.
    hf: its checkpoints in Hugging Face's form; None where that is not known.
  """

  name: str
  class_names: tuple[str, ...] = ()
  package: str = ""
  layers: str = "layers"
  inputs: tuple[str, ...] = (r"embedder/.*",)
  head: Callable[[Any], heads.Head] | None = None
  mend: Callable[[nnx.Module], Any] = _no_mend
  hf: hf_lib.HuggingFace | None = None

  def is_mine(self, model: nnx.Module) -> bool:
    """By its class, or by one that it derives from, as adapters make it."""
    return any(
        kind.__name__ in self.class_names
        and kind.__module__.startswith(self.package)
        for kind in type(model).__mro__
    )

  def model_class(self) -> Any:
    """Tunix's class of the model; imports its module."""
    return getattr(hf_lib.module(self.package), self.class_names[0])

  def num_layers(self, model: nnx.Module) -> int:
    """The length of the list of layers."""
    found: Any = model
    for part in self.layers.split("/"):
      found = getattr(found, part)
    return len(found)

  def layer_of(self, path: str) -> int | None:
    """The number of the layer that holds `path`, or None."""
    if m := re.match(rf"{re.escape(self.layers)}/(\d+)(/|$)", path):
      return int(m[1])
    return None

  def feeds_layers(self, path: str) -> bool:
    return any(re.fullmatch(rule, path) for rule in self.inputs)


def _config(model: nnx.Module, *names: str):
  config = getattr(model, "config", None)
  for name in names:
    value = getattr(config, name, None)
    if value is not None:
      return value
  return None


def vocabulary_size(model: nnx.Module) -> int | None:
  """The number of entries of the logits, if the model's config tells."""
  size = _config(model, "num_embed", "vocab_size")
  return size if size is not None else getattr(model, "num_embed", None)


def rope_theta(model: nnx.Module) -> float | None:
  """The base of the rotary embedding, if the model's config tells."""
  return _config(model, "rope_theta")
