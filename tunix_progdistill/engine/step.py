"""The compiled steps: pure functions of state, batch and scalars.

One micro-batch runs

  (total, count, parts) = objective(student(trainable, frozen), teacher_output)
  gradient of `total` with respect to `trainable` only

and adds to the window's sums. At the window's last micro-batch the gradient is
sum(gradients) / sum(count), so that any split of the same rows gives the same
update. A micro-batch whose loss or gradient is not finite adds nothing, and a
window without a valid token updates nothing.

Frozen leaves are arguments that nothing is differentiated with respect to: they
cost no backward pass. Temperature, alpha and rate are arguments as well.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import flax
from flax import nnx
import jax
import jax.numpy as jnp

from tunix_progdistill.engine import batches
from tunix_progdistill.engine import optimizer as optimizer_lib
from tunix_progdistill.kernels import reduce
from tunix_progdistill.objectives import terms


@flax.struct.dataclass
class Window:
  """The sums of an accumulation window so far."""

  grads: Any
  terms: terms.LossTerms
  skipped: jax.Array


@flax.struct.dataclass
class StepState:
  """What a step replaces; its buffers are donated.

  Attributes:
    trainable: the leaves that train.
    mutable: what is not a parameter (dropout keys, batch statistics).
    optimizer: the state of the `nnx.Optimizer`.
    window: None where a window is one micro-batch.
  """

  trainable: Any
  mutable: Any
  optimizer: Any
  window: Window | None


@flax.struct.dataclass
class Report:
  """The window so far, as means over its valid tokens.

  Attributes:
    loss: the objective; NaN where every micro-batch was skipped.
    parts: the objective's parts.
    valid_tokens: how many tokens counted.
    skipped: micro-batches that were not finite.
    grad_norm: of the update's gradient before clipping; 0 between updates.
    learning_rate: what the optimizer used, NaN where it does not tell.
  """

  loss: jax.Array
  parts: dict[str, jax.Array]
  valid_tokens: jax.Array
  skipped: jax.Array
  grad_norm: jax.Array
  learning_rate: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blueprint:
  """What a step is made for: constants of the trace.

  Attributes:
    model_graph: graph definition of the student, split by trainable leaves,
      parameters, and the rest.
    optimizer_graph: graph definition of the optimizer.
    trainable_filter: the filter that `model_graph` was split by.
    objective: gives (sum, count) of the loss.
    max_grad_norm: clip of the gradient by its global norm, or None.
    sets_rate: whether the plan's rate is handed to the optimizer.
  """

  model_graph: Any
  optimizer_graph: Any
  trainable_filter: Any
  objective: terms.Objective
  max_grad_norm: float | None
  sets_rate: bool


def split(model: nnx.Module, trainable_filter: Any) -> tuple[Any, ...]:
  """(graph, trainable, frozen parameters, the rest) of a model."""
  return nnx.split(model, trainable_filter, nnx.Param, ...)


def _merge(graph: Any, *states: Any) -> Any:
  # A Variable belongs to the trace that made it: make new ones here.
  return nnx.merge(graph, *(jax.tree.map(lambda x: x, s) for s in states))


def _loss(blueprint, trainable, frozen, mutable, batch, scalars):
  model = _merge(blueprint.model_graph, trainable, frozen, mutable)
  out = blueprint.objective.train_terms(
      model, batch.teacher_output, batch.inputs, scalars, batch.weight
  )
  nnx.pop(model, nnx.Intermediate)  # what forward functions sow is not state
  _, _, _, new_mutable = split(model, blueprint.trainable_filter)
  return out.total, (out, new_mutable)


def empty_window(
    blueprint: Blueprint, state: StepState, frozen: Any,
    batch: batches.Prepared, scalars: terms.StepScalars,
) -> Window:
  """A window without a micro-batch, for gradients in float32."""
  _, (shapes, _) = jax.eval_shape(
      lambda *a: _loss(blueprint, *a),
      state.trainable, frozen, state.mutable, batch, scalars,
  )
  return Window(
      grads=jax.tree.map(
          lambda x: jnp.zeros_like(x, dtype=jnp.float32), state.trainable
      ),
      terms=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
      skipped=jnp.zeros((), jnp.int32),
  )


def make_train_step(blueprint: Blueprint) -> Callable[..., Any]:
  """`step(state, frozen, batch, scalars, is_update) -> (state, Report)`."""

  def step(
      state: StepState,
      frozen: Any,
      batch: batches.Prepared,
      scalars: terms.StepScalars,
      is_update: jax.Array,
  ) -> tuple[StepState, Report]:
    differentiate = jax.value_and_grad(
        lambda t: _loss(blueprint, t, frozen, state.mutable, batch, scalars),
        has_aux=True,
    )
    (total, (out, mutable)), grads = differentiate(state.trainable)
    finite = jnp.isfinite(total) & jnp.isfinite(_square_norm(grads))
    keep = lambda new, old: jax.tree.map(
        lambda a, b: jnp.where(finite, a, b), new, old
    )
    out = keep(out, jax.tree.map(jnp.zeros_like, out))
    mutable = keep(mutable, state.mutable)
    skipped = jnp.where(finite | (batch.weight == 0), 0, 1).astype(jnp.int32)
    window = state.window
    if window is None:
      sums, is_update = out, jnp.asarray(True)
    else:
      grads = jax.tree.map(
          lambda a, g: jnp.where(finite, a + g.astype(jnp.float32), a),
          window.grads, grads,
      )
      sums, skipped = window.terms + out, window.skipped + skipped

    updates_now = is_update & (sums.count > 0)
    trainable, optimizer, grad_norm, rate = jax.lax.cond(
        updates_now,
        lambda: _update(blueprint, state, frozen, grads, sums.count, scalars),
        lambda: _no_update(state),
    )
    if window is not None:
      fresh = lambda x: jnp.where(is_update, jnp.zeros_like(x), x)
      window = jax.tree.map(
          fresh, Window(grads=grads, terms=sums, skipped=skipped)
      )
    lost = (sums.count == 0) & (skipped > 0)
    report = Report(
        loss=jnp.where(lost, jnp.nan, reduce.mean(sums.total, sums.count)),
        parts={
            k: jnp.where(lost, jnp.nan, reduce.mean(v, sums.count))
            for k, v in sums.parts.items()
        },
        valid_tokens=sums.count,
        skipped=skipped,
        grad_norm=grad_norm,
        learning_rate=rate,
    )
    return StepState(trainable, mutable, optimizer, window), report

  return step


def _square_norm(tree: Any) -> jax.Array:
  """Sum of squares in float32, whatever the leaves' types."""
  squares = [
      jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)
  ]
  return sum(squares, jnp.float32(0.0))


def _update(blueprint, state, frozen, grads, count, scalars):
  """One optimizer update with the mean gradient grads / count."""
  grads = jax.tree.map(lambda g: g.astype(jnp.float32) / count, grads)
  norm = jnp.sqrt(_square_norm(grads))
  if blueprint.max_grad_norm is not None:
    scale = jnp.minimum(1.0, blueprint.max_grad_norm / jnp.maximum(norm, 1e-30))
    grads = jax.tree.map(lambda g: g * scale, grads)
  model = _merge(
      blueprint.model_graph, state.trainable, frozen, state.mutable
  )
  optimizer = _merge(blueprint.optimizer_graph, state.optimizer)
  extra = {}
  if blueprint.sets_rate:
    extra["learning_rate"] = scalars.learning_rate
  optimizer.update(model, _fresh(grads), **extra)
  _, trainable, _, _ = split(model, blueprint.trainable_filter)
  if blueprint.sets_rate:
    rate = jnp.asarray(scalars.learning_rate, jnp.float32)
  else:
    used = optimizer_lib.current_rate(nnx.as_pure(optimizer.opt_state))
    rate = jnp.asarray(jnp.nan if used is None else used, jnp.float32)
  _, optimizer_state = nnx.split(optimizer)
  return (
      _as(trainable, state.trainable),
      _as(optimizer_state, state.optimizer),
      norm,
      rate,
  )


def _no_update(state: StepState):
  nan = jnp.full((), jnp.nan, jnp.float32)
  return state.trainable, state.optimizer, jnp.zeros((), jnp.float32), nan


def _fresh(tree: Any) -> Any:
  return jax.tree.map(lambda x: x, tree)


def _as(new: Any, old: Any) -> Any:
  """`new`'s leaves in the types and the structure of `old`."""
  pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
  leaves = [
      a.astype(b.dtype) if jnp.issubdtype(b.dtype, jnp.floating) else a
      for a, b in pairs
  ]
  return jax.tree.unflatten(jax.tree.structure(old), leaves)


def make_eval_step(objective: terms.Objective) -> Callable[..., Any]:
  """`step(graph, state, batch) -> LossTerms`, the student in eval mode."""

  def step(graph: Any, state: Any, batch: batches.Prepared) -> terms.LossTerms:
    model = evaluating(_merge(graph, state))
    return objective.eval_terms(model, batch.teacher_output, batch.inputs)

  return step


def evaluating(model: nnx.Module) -> nnx.Module:
  """`model` with dropout off and running averages on; it shares its weights."""
  return nnx.view(
      model,
      deterministic=True,
      use_running_average=True,
      raise_if_not_found=False,
  )

