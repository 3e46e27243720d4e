"""The compiled steps: pure functions of state, batch and scalars.

One micro-batch runs

  (total, count, parts) = objective(student(trainable, frozen), teacher_output)
  gradient of `total` with respect to `trainable` only

and adds to the window's sums. At the window's last micro-batch the gradient is
sum(gradients) / sum(count), so that any split of the same rows gives the same
update. A micro-batch whose loss or gradient is not finite adds nothing, and a
window without a valid token updates nothing.

Frozen leaves are arguments that nothing is differentiated with respect to: they
cost no backward pass. Temperature, alpha and rate are arguments as well, and so
is the constant: an array that every batch needs, such as the teacher's output
head, and that travels with none.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax

from tunix_progdistill import modules
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
    trainable: the leaves that train, by path.
    mutable: what is not a parameter (dropout keys, batch statistics).
    optimizer: the optimizer's state.
    window: None where a window is one micro-batch.
  """

  trainable: modules.Values
  mutable: modules.Values
  optimizer: Any
  window: Window | None


@flax.struct.dataclass
class Report:
  """The window so far, as means over its valid tokens.

  Attributes:
    loss: the objective; NaN where every micro-batch was skipped, 0 where no
      token counts.
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
    graph: graph definition of the student.
    paths: name -> path of each of its variables.
    optimizer: the transformation over the trainable leaves.
    objective: gives (sum, count) of the loss.
    max_grad_norm: clip of the gradient by its global norm, or None.
    sets_rate: whether the plan's rate is handed to the optimizer.
  """

  graph: Any
  paths: Mapping[str, tuple[Any, ...]]
  optimizer: optax.GradientTransformationExtraArgs
  objective: terms.Objective
  max_grad_norm: float | None
  sets_rate: bool


def _loss(blueprint, trainable, frozen, mutable, batch, scalars, constant):
  model = modules.merge(
      blueprint.graph, blueprint.paths, trainable, frozen, mutable
  )
  out = blueprint.objective.with_constant(constant).train_terms(
      model, batch.teacher_output, batch.inputs, scalars, batch.weight
  )
  return out.total, (out, modules.extract(model, mutable))


def empty_window(
    blueprint: Blueprint, state: StepState, frozen: Any,
    batch: batches.Prepared, scalars: terms.StepScalars, constant: Any,
) -> Window:
  """A window without a micro-batch, for gradients in float32."""
  _, (shapes, _) = jax.eval_shape(
      lambda *a: _loss(blueprint, *a),
      state.trainable, frozen, state.mutable, batch, scalars, constant,
  )
  return Window(
      grads=jax.tree.map(
          lambda x: jnp.zeros_like(x, dtype=jnp.float32), state.trainable
      ),
      terms=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
      skipped=jnp.zeros((), jnp.int32),
  )


def make_train_step(blueprint: Blueprint) -> Callable[..., Any]:
  """`step(state, frozen, batch, scalars, is_update, constant)`.

  It gives (state, Report).
  """

  def step(
      state: StepState,
      frozen: Any,
      batch: batches.Prepared,
      scalars: terms.StepScalars,
      is_update: jax.Array,
      constant: Any,
  ) -> tuple[StepState, Report]:
    differentiate = jax.value_and_grad(
        lambda t: _loss(
            blueprint, t, frozen, state.mutable, batch, scalars, constant
        ),
        has_aux=True,
    )
    (total, (out, mutable)), grads = differentiate(state.trainable)
    finite = jnp.isfinite(total) & jnp.isfinite(_square_norm(grads))
    keep = lambda when, new, old: jax.tree.map(
        lambda a, b: jnp.where(when, a, b), new, old
    )
    out = keep(finite, out, jax.tree.map(jnp.zeros_like, out))
    mutable = keep(finite & (batch.weight > 0), mutable, state.mutable)
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
        lambda: _update(blueprint, state, grads, sums.count, scalars),
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


def _update(blueprint, state, grads, count, scalars):
  """One optimizer update with the mean gradient grads / count."""
  # The norm of the sums and one product: XLA keeps no copy of the gradient for
  # them, as it would for the norm of the quotients.
  scale = 1.0 / count
  norm = jnp.sqrt(_square_norm(grads)) * scale
  if blueprint.max_grad_norm is not None:
    scale *= jnp.minimum(
        1.0, blueprint.max_grad_norm / jnp.maximum(norm, 1e-30)
    )
  grads = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, grads)
  extra = {}
  if blueprint.sets_rate:
    extra["learning_rate"] = scalars.learning_rate
  updates, optimizer = blueprint.optimizer.update(
      grads, state.optimizer, state.trainable, **extra
  )
  trainable = optax.apply_updates(state.trainable, updates)
  if blueprint.sets_rate:
    rate = jnp.asarray(scalars.learning_rate, jnp.float32)
  else:
    used = optimizer_lib.current_rate(optimizer)
    rate = jnp.asarray(jnp.nan if used is None else used, jnp.float32)
  return trainable, _as(optimizer, state.optimizer), norm, rate


def _no_update(state: StepState):
  nan = jnp.full((), jnp.nan, jnp.float32)
  return state.trainable, state.optimizer, jnp.zeros((), jnp.float32), nan


def _as(new: Any, old: Any) -> Any:
  """`new` in the float types of `old`: moments of a bfloat16 leaf stay so."""
  return jax.tree.map(
      lambda a, b: a.astype(b.dtype)
      if jnp.issubdtype(b.dtype, jnp.floating) else a,
      new, old,
  )


def make_eval_step(
    objective: terms.Objective, graph: Any,
    paths: Mapping[str, tuple[Any, ...]],
) -> Callable[[modules.Values, batches.Prepared, Any], terms.LossTerms]:
  """`step(values, batch, constant) -> LossTerms`, the student in eval mode."""

  def step(
      values: modules.Values, batch: batches.Prepared, constant: Any
  ) -> terms.LossTerms:
    model = modules.evaluating(modules.merge(graph, paths, values))
    return objective.with_constant(constant).eval_terms(
        model, batch.teacher_output, batch.inputs
    )

  return step
