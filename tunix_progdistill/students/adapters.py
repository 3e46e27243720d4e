"""LoRA students by qwix: adapters on, and merged into the weights again.

An adapter of rank r beside a kernel W adds the product of two small matrices,

  y = x W + (alpha / r) (x A) B        B starts at 0

and only A and B train. Over a quantised kernel it is a QLoRA student.

Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685; Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import re
from typing import Any
import warnings

from flax import nnx
import jax
import jax.numpy as jnp
import qwix

from tunix_progdistill import errors
from tunix_progdistill import families
from tunix_progdistill.families import quantised

QTYPES = ("int8", "int4", "nf4")

_KEYS = ("module_path", "rank", "alpha", "dropout", "weight_qtype", "tile_size")
_A, _B = "_lora_a", "_lora_b"


def check(config: Mapping[str, Any], field: str = "lora_config") -> None:
  """Refuses a `lora_config` that qwix could not follow.

  Args:
    config: Tunix's section: module_path (a regex on module paths; the embedding
      is never meant), rank, alpha, and perhaps dropout, weight_qtype (of the
      frozen kernel) and tile_size.
    field: what messages call it.

  Raises:
    ValueError: one line.
  """
  for key in config:
    if key not in _KEYS:
      raise errors.invalid(
          f"{field}.{key}", "must be a known key", key,
          f"known are {', '.join(_KEYS)}",
      )
  for key, good, rule, remedy in (
      ("module_path", _is_pattern, "must be a regex on module paths",
       "write e.g. .*q_einsum|.*kv_einsum"),
      ("rank", lambda x: _is_whole(x) and x >= 1,
       "must be a whole number >= 1", "try 16"),
      ("alpha", lambda x: _is_number(x) and x > 0, "must be > 0", "try 16.0"),
  ):
    if not good(config.get(key)):
      raise errors.invalid(f"{field}.{key}", rule, config.get(key), remedy)
  for key, good, rule, remedy in (
      ("dropout", lambda x: _is_number(x) and 0 <= x < 1,
       "must lie in [0, 1)", "leave it out"),
      ("weight_qtype", lambda x: x in QTYPES,
       f"must be one of {', '.join(QTYPES)}", "leave it out"),
      ("tile_size", lambda x: _is_whole(x) and x >= 1,
       "must be a whole number >= 1", "leave it out"),
  ):
    if config.get(key) is not None and not good(config[key]):
      raise errors.invalid(f"{field}.{key}", rule, config[key], remedy)


def _is_pattern(value: Any) -> bool:
  if not isinstance(value, str) or not value:
    return False
  try:
    re.compile(value)
  except re.error:
    return False
  return True


def _is_whole(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def add(
    model: nnx.Module, config: Mapping[str, Any], *, seed: int = 0,
    field: str = "lora_config",
) -> nnx.Module:
  """`model` with adapters; it shares the arrays that are not quantised.

  Args:
    model: a Tunix model.
    config: see `check`.
    seed: of the adapters' first values.
    field: what messages call the config.

  Returns:
    A model whose `nnx.LoRAParam`s train.

  Raises:
    ValueError: a bad config, or one whose module_path matches nothing.
  """
  check(config, field)
  rule = {k: v for k, v in config.items() if v is not None}
  # A tied head multiplies by the embedding's transpose, which has no adapter.
  rule["module_path"] = rf"(?!embedder(/|$))(?:{rule['module_path']})"
  provider = qwix.LoraProvider(**rule)
  with families.tracing(model), warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    adapted = qwix.apply_lora_to_model(
        model, provider, rngs=nnx.Rngs(seed), **model_input(model)
    )
  if not nnx.to_flat_state(nnx.state(adapted, nnx.LoRAParam)):
    raise errors.invalid(
        f"{field}.module_path", "must match a module that multiplies by a "
        "kernel", config["module_path"],
        f"paths are such as {', '.join(_kernels(model)[:4])}",
    )
  return adapted


def model_input(model: nnx.Module) -> dict[str, Any]:
  """What qwix traces a Tunix model with.

  Raises:
    ValueError: the model does not say.
  """
  make = getattr(model, "get_model_input", None)
  if make is None:
    raise errors.invalid(
        "model", "must have get_model_input, as Tunix's models do",
        type(model).__name__, "apply qwix to it yourself",
    )
  return make()


def _kernels(model: nnx.Module) -> list[str]:
  """Paths of modules that own a matrix."""
  found = {
      "/".join(map(str, path[:-1]))
      for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))
      if jnp.ndim(v.get_value()) >= 2
  }
  return sorted(found)


def _adapted(model: nnx.Module) -> Iterator[tuple[nnx.Module, str]]:
  """(module, name of its kernel) for every adapter."""
  for _, module in nnx.iter_modules(model):
    for name in list(vars(module)):
      if name.endswith(_A) and hasattr(module, name.removesuffix(_A) + _B):
        yield module, name.removesuffix(_A)


def merged(model: nnx.Module, *, alpha: float) -> nnx.Module:
  """A copy whose kernels have the adapters in them: W + (alpha / r) A B.

  A quantised kernel becomes a plain one in the adapters' dtype first.

  Args:
    model: from `add`, or from `qwix.apply_lora_to_model`; it is left as it is.
    alpha: of its `lora_config`.

  Returns:
    A model without adapters, which gives the same logits but for rounding.

  Raises:
    ValueError: an adapter whose product has not the kernel's axes.
  """
  model = nnx.clone(model)
  for module, name in list(_adapted(model)):
    a = getattr(module, name + _A).get_value()
    b = getattr(module, name + _B).get_value()
    kernel = getattr(module, name)
    plain = _plain(kernel, a.dtype)
    product = _product(module, name, a, b, plain.shape)
    value = plain + (alpha / a.shape[-1] * product).astype(plain.dtype)
    _replace(module, name, value)
    for suffix in (_A, _B):
      delattr(module, name + suffix)
  for _, module in nnx.iter_modules(model):
    for name, kernel in list(vars(module).items()):
      if quantised.is_quantised(kernel):
        _replace(module, name, _plain(kernel, jnp.float32))
  # qwix hands out a class of its own, whose calls look for adapters.
  model.__class__ = type(model).__mro__[1]
  return model


def _replace(module: nnx.Module, name: str, value: jax.Array) -> None:
  """A plain parameter in the place of what stands there."""
  setattr(module, name, nnx.Param(value))


def _plain(kernel: Any, dtype: Any) -> jax.Array:
  if not quantised.is_quantised(kernel):
    return kernel.get_value()
  is_variable = lambda x: isinstance(x, nnx.Variable)
  array = jax.tree.map(
      lambda v: v.get_value() if is_variable(v) else v, kernel.array,
      is_leaf=is_variable,
  )
  return qwix.dequantize(array).astype(dtype)


def _product(
    module: nnx.Module, name: str, a: jax.Array, b: jax.Array,
    shape: tuple[int, ...],
) -> jax.Array:
  """A B in the kernel's axes."""
  letters = getattr(module, f"{name}_lora_einsum_str", None)
  if letters is None:  # a dot product: [.., in, r] and [.., r, out]
    return jnp.reshape(a @ b, shape)
  _, a_axes, b_axes = letters.split("->")[0].split(",")
  own = getattr(module, "einsum_str", None)
  kernel = own.replace(" ", "").split("->")[0].split(",")[1] if own else ""
  if set(kernel) != set(a_axes + b_axes) - (set(a_axes) & set(b_axes)) | (
      set(kernel) & set(a_axes) & set(b_axes)
  ):
    raise errors.invalid(
        "model", "must have adapters beside Tunix's own einsums",
        f"{type(module).__name__} with {letters}",
        "merge that adapter yourself",
    )
  return jnp.einsum(f"{a_axes},{b_axes}->{kernel}", a, b)
