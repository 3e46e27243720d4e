"""Path rules: which parameters of a model a stage trains."""

from collections.abc import Iterable
import difflib
import math
import re

from absl import logging
from flax import nnx
import jax.numpy as jnp

from tunix_progdistill import errors
from tunix_progdistill import families
from tunix_progdistill import modules
from tunix_progdistill.plan import stages


def parameter_sizes(
    model: nnx.Module, wrt: nnx.filterlib.Filter = nnx.Param
) -> dict[str, int]:
  """Path -> number of entries, for every floating-point leaf that `wrt` keeps.

  Integer leaves (packed quantised weights) have no gradient and are left out.
  """
  sizes = {}
  for path, variable in nnx.to_flat_state(nnx.state(model, wrt)):
    value = variable.get_value()
    if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating):
      sizes[modules.path_name(path)] = value.size
  return sizes


def matches(rule: str, path: str) -> bool:
  """Whether `rule` matches all of `path`, or all of one of its parents.

  >>> matches("layers/1", "layers/1/w"), matches("layers/1", "layers/10/w")
  (True, False)
  """
  pattern = re.compile(rule)
  parts = path.split("/")
  return any(
      pattern.fullmatch("/".join(parts[:n])) for n in range(len(parts), 0, -1)
  )


def _select(field: str, rules: Iterable[str], paths: list[str]) -> set[str]:
  chosen = set()
  for rule in rules:
    hit = {p for p in paths if matches(rule, p)}
    if not hit:
      names = sorted({"/".join(p.split("/")[:2]) for p in paths} | set(paths))
      near = difflib.get_close_matches(rule, names, n=5, cutoff=0.3)
      raise errors.invalid(
          field, "must match a parameter path", rule,
          f"paths look like {', '.join(near or names[:5])}",
      )
    chosen |= hit
  return chosen


def frozen_layers(stage: stages.Stage, num_layers: int) -> int:
  """How many of the first layers a stage freezes: floor(f L), never all.

  >>> frozen_layers(stages.Stage(freeze_fraction=0.8), 6)
  4
  >>> frozen_layers(stages.Stage(freeze_fraction=1.0), 6)
  5
  """
  if stage.trainable_layers is not None:
    if stage.trainable_layers > num_layers:
      raise errors.invalid(
          "trainable_layers", f"must be at most the {num_layers} layers",
          stage.trainable_layers, "leave it out to train every layer",
      )
    return num_layers - stage.trainable_layers
  fraction = stage.freeze_fraction or 0.0
  # 0.29 * 100 is 28.999...: do not let a rounding error thaw a layer.
  return min(math.floor(fraction * num_layers + 1e-9), num_layers - 1)


def trainable_paths(
    model: nnx.Module,
    stage: stages.Stage,
    wrt: nnx.filterlib.Filter = nnx.Param,
) -> frozenset[str]:
  """The paths of the parameters that `stage` trains.

  Args:
    model: the student.
    stage: its selector decides.
    wrt: the type of leaf that may train at all; `nnx.LoRAParam` for a LoRA
      student, so that the adapters of frozen layers are frozen.

  Raises:
    ValueError: a rule that matches nothing, nothing left to train, or layers
      that cannot be found in this model.
  """
  paths = list(parameter_sizes(model, wrt))
  if stage.trainable is not None:
    chosen = _select("trainable", stage.trainable, paths)
  elif stage.frozen is not None:
    chosen = set(paths) - _select("frozen", stage.frozen, paths)
  else:
    chosen = set(paths)
    if stage.trainable_layers is not None or stage.freeze_fraction:
      family = families.of(model)
      count = frozen_layers(stage, family.num_layers(model))
      if count:
        chosen = {p for p in paths if not _below(family, p, count)}
  _warn_of_cost(model, stage, chosen, paths)
  if not chosen:
    raise errors.invalid(
        "stage", "must train at least one parameter", stage.selector,
        "freeze less, or widen the rules",
    )
  return frozenset(chosen)


def _warn_of_cost(model, stage, chosen, paths) -> None:
  """Rules may freeze layers and train what feeds them: that saves nothing."""
  if stage.trainable is None and stage.frozen is None:
    return
  try:
    family = families.of(model)
  except ValueError:
    return  # no layers to be found: the rules say all there is to say
  frozen = any(family.layer_of(p) is not None for p in set(paths) - chosen)
  fed = sorted(p for p in chosen if family.feeds_layers(p))
  if frozen and fed:
    logging.warning(
        "The rules train %s, which feeds frozen layers: the backward pass runs "
        "through all of them.", fed[0],
    )


def _below(family: families.Family, path: str, count: int) -> bool:
  """Whether `path` is in the first `count` layers, or feeds them."""
  layer = family.layer_of(path)
  if layer is not None:
    return layer < count
  return family.feeds_layers(path)


def filter_of(paths: frozenset[str]) -> nnx.filterlib.Filter:
  """An nnx filter for the leaves at `paths`."""
  return lambda path, _: modules.path_name(path) in paths
