"""Hidden states and output heads: a model's two halves of

    logits = cap(hidden @ matrix)    cap(x) = c tanh(x / c), or x without a cap

The hidden states are what Tunix's models have after their final norm. A forward
pass that is traced for them leaves its own logits unused, and XLA leaves out
what nobody uses.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from tunix_progdistill import modules

_EMBEDDING, _HEAD = "embedder/input_embedding", "lm_head/w"


@dataclasses.dataclass(frozen=True)
class Head:
  """Where a model's output head lies, and how it is applied.

  Attributes:
    path: of its matrix; the embedding's where the two are tied.
    layout: "vd" for a matrix `[V, D]`, "dv" for `[D, V]`.
    softcap: c > 0, or None.
    dtype: that the model multiplies in; None for that of its arrays.
  """

  path: str
  layout: str
  softcap: float | None = None
  dtype: Any = None

  @classmethod
  def of(cls, *, tied: bool, **kwargs: Any) -> "Head":
    """A head as Tunix's models name theirs."""
    if tied:
      return cls(_EMBEDDING, "vd", **kwargs)
    return cls(_HEAD, "dv", **kwargs)

  def variable(self, model: nnx.Module) -> nnx.Variable:
    return modules.variable(model, self.path)

  def fault(self, model: nnx.Module) -> str | None:
    """Why hidden states and matrix would not give the logits, or None."""
    variable = self.variable(model)
    # What qwix puts in a kernel's place is no variable.
    value = variable.get_value() if isinstance(variable, nnx.Variable) else None
    plain = isinstance(value, jax.Array) and jnp.issubdtype(
        value.dtype, jnp.floating
    )
    if not plain or value.ndim != 2:
      return f"{self.path} is no plain matrix"
    owner = modules.path_name(self.path.split("/")[:-1])
    if any(
        modules.path_name(path).startswith(f"{owner}/")
        for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    ):
      return f"{owner} has an adapter"
    return None

  def matrix(self, model: nnx.Module) -> jax.Array:
    return self.cast(self.variable(model).get_value())

  def cast(self, x: jax.Array) -> jax.Array:
    """Hidden states or matrix, as the model multiplies them."""
    return x if self.dtype is None else x.astype(self.dtype)


class _Recorder(nnx.Module):
  """Stands in a module's place and keeps what it gives."""

  def __init__(self, inner: nnx.Module, keep: Callable[[Any], None]):
    self.inner = inner
    self.keep = keep

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    out = self.inner(*args, **kwargs)
    self.keep(out)
    return out


@contextlib.contextmanager
def _recorded(model: nnx.Module, name: str) -> Iterator[list[jax.Array]]:
  inner = getattr(model, name)
  seen: list[jax.Array] = []
  setattr(model, name, _Recorder(inner, seen.append))
  try:
    yield seen
  finally:
    setattr(model, name, inner)


def hidden_states(
    model: nnx.Module, forward: Callable[[nnx.Module], Any],
    norm: str = "final_norm",
) -> jax.Array:
  """What `model` has after its final norm during `forward(model)`.

  Call it inside `jax.jit`, or the logits are computed as well.

  Args:
    model: a model of Tunix's.
    forward: calls the model once, without `jax.jit` of its own.
    norm: name of the model's final norm.

  Raises:
    ValueError: the final norm did not run exactly once.
  """
  if not isinstance(getattr(model, norm, None), nnx.Module):
    raise ValueError(
        f"model must have a {norm}, got {type(model).__name__}; write a hidden "
        "function of your own"
    )
  with _recorded(model, norm) as seen:
    forward(model)
  if len(seen) != 1:
    raise ValueError(
        f"forward must run the model once, got {len(seen)} times; write a "
        "hidden function of your own"
    )
  return seen[0]
