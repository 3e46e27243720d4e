"""Gradient checkpointing: activations computed again in the backward pass.

Tunix's models say it in a `remat_config`, and not with one voice: gemma and
gemma3 compare it with the Enum in one place and with its number in another,
their attention keeps a copy of its own from the constructor, and llama3's
config is frozen. So it is set as the Enum, wherever a module holds it.
"""

import dataclasses
import enum
import sys
from typing import Any

from flax import nnx

from tunix_progdistill import errors

# Tunix's names, and the numbers that its own commands pass.
CHOICES = {"none": 1, "block": 2, "decoder": 3}


def name_of(value: int | str | enum.Enum | None) -> str:
  """A choice by its name, from Tunix's Enum, its number or its name.

  Raises:
    ValueError: there is no such choice.

  >>> name_of(3), name_of("BLOCK")
  ('decoder', 'block')
  """
  if isinstance(value, enum.Enum):
    value = value.name
  for name, number in CHOICES.items():
    if value is not None and str(value).lower() in (name, str(number)):
      return name
  raise errors.invalid(
      "remat_config",
      f"must be one of {', '.join(CHOICES)}, or Tunix's number of one", value,
      "block computes attention and MLP again, decoder whole layers",
  )


def set_remat(model: nnx.Module, value: int | str | enum.Enum) -> int:
  """Sets gradient checkpointing on every module that holds a `remat_config`.

  Call it before training: it changes the model's graph.

  Args:
    model: of Tunix.
    value: see `name_of`.

  Returns:
    The number of modules that were set; 0 where the model knows of none.

  Raises:
    ValueError: there is no such choice.
  """
  name = name_of(value)
  configs: dict[int, Any] = {}  # modules that shared a config go on to
  found = 0
  for _, module in nnx.iter_modules(model):
    here = 0
    own = getattr(module, "remat_config", None)
    if own is not None:
      setattr(module, "remat_config", _like(own, module, name))  # noqa: B010
      here = 1
    config = getattr(module, "config", None)
    old = getattr(config, "remat_config", None)
    if dataclasses.is_dataclass(config) and old is not None:
      if id(config) not in configs:
        configs[id(config)] = (
            config,
            dataclasses.replace(
                config, remat_config=_like(old, module, name)  # type: ignore
            ),
        )
      module.config = configs[id(config)][1]  # type: ignore[attr-defined]
      here = 1
    found += here
  return found


def _like(old: Any, module: nnx.Module, name: str) -> Any:
  """The choice as the Enum of the module's own family."""
  kind = type(old) if isinstance(old, enum.Enum) else getattr(
      sys.modules[type(module).__module__], "RematConfig", None
  )
  return CHOICES[name] if kind is None else kind[name.upper()]
