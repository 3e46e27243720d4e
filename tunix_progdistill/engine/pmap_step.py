"""A whole training step under `jax.pmap`, for code in that shape.

The engine's own step (`engine.step`) is one `jax.jit`; prefer it, on several
devices too. Here student, teacher and optimizer stand whole on every device,
each device runs both models on its rows, and over the axis "batch" are summed

  total = psum(total of this device's tokens)
  count = psum(number of this device's tokens)
  g     = psum(gradient of this device's total) / count

which is the step of one device with all rows. What is differentiated holds no
psum (`kernels.pmapped` says why). All devices make the update from the same
sums, and so stay equal.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import flax
from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import optax

from tunix_progdistill import errors
from tunix_progdistill import modules
from tunix_progdistill.kernels import chunked
from tunix_progdistill.kernels import pmapped
from tunix_progdistill.kernels import reduce

ModelFn = Callable[[modules.Values, Any], jax.Array]


@flax.struct.dataclass
class PmapState:
  """The student by path, and the trainable leaves' optimizer state.

  Each leaf is `[devices, ...]`.
  """

  trainable: modules.Values
  frozen: modules.Values
  optimizer: Any

  def values(self) -> modules.Values:
    """All leaves, as the first device has them."""
    return jax.tree.map(lambda x: x[0], self.trainable | self.frozen)


def pure(
    model: nnx.Module, forward: Callable[[nnx.Module, Any], jax.Array]
) -> tuple[ModelFn, modules.Values]:
  """`forward` as a function of {path: array} and inputs, and the arrays.

  What the forward pass writes (dropout keys, statistics) is not kept.
  """
  live, graph = modules.LiveVariables(model), nnx.graphdef(model)
  merge = lambda values: modules.merge(graph, live.paths, values)
  return lambda values, inputs: forward(merge(values), inputs), live.read()


def make_pmap_step(
    student_fn: ModelFn,
    teacher_fn: ModelFn,
    optimizer: Callable[[Any], optax.GradientTransformation],
    *,
    trainable: frozenset[str],
    devices: Sequence[jax.Device] | None = None,
) -> "PmapStep":
  """The training step of a stage.

    state = step.init(student)
    teacher = step.replicate(teacher)
    state, means = step(state, teacher, inputs, labels, weights,
                        temperature=2.0, alpha=0.9, learning_rate=1e-3)

  `inputs` is a pytree of `[rows, ...]` (any number of rows), `labels` are ids
  or rows and `weights` those of the tokens, as for `chunked.distillation`.
  `means` over the tokens are `loss`, `kl` and `ce`, with their `count`. A batch
  in which no token counts updates nothing. Another temperature, alpha or rate
  does not compile anew. The old state is donated, but for its frozen leaves.

  Args:
    student_fn: ({path: array}, inputs) to logits; see `pure`.
    teacher_fn: the same of the teacher; no gradient.
    optimizer: learning rate to transformation, such as `optax.adamw`.
    trainable: paths of the leaves that train.
    devices: to use; None for all local ones.
  """
  return PmapStep(
      (student_fn, teacher_fn), optimizer, frozenset(trainable),
      tuple(devices or jax.local_devices()),
  )


class PmapStep:
  """The compiled function, and what puts its arguments on the devices."""

  def __init__(self, models, optimizer, trainable, devices):
    self._student_fn, self._teacher_fn = models
    self._optimizer, self._trainable = optimizer, trainable
    self._devices = devices
    self._run = jax.pmap(
        self._on_device, axis_name=pmapped.AXIS, in_axes=(0, 0, 0, None),
        out_axes=(0, 0, None), devices=devices, donate_argnums=0,
    )

  def init(self, student: modules.Values) -> PmapState:
    """The state of a stage's start, from all of the student's leaves."""
    missing = sorted(self._trainable - set(student))
    if missing or not self._trainable:
      raise errors.invalid(
          "trainable", "must name leaves of the student", missing,
          f"paths look like {sorted(student)[:3]}",
      )
    trained = {k: v for k, v in student.items() if k in self._trainable}
    frozen = {k: v for k, v in student.items() if k not in self._trainable}
    state = self._optimizer(jnp.float32(0.0)).init(trained)
    return PmapState(*map(self.replicate, (trained, frozen, state)))

  def replicate(self, values: Any) -> Any:
    """The pytree on every device, as the step takes the teacher."""
    # Of another axis's name it would be another sharding: compiled twice.
    copy = jax.pmap(
        lambda _, x: x, axis_name=pmapped.AXIS, in_axes=(0, None),
        devices=self._devices,
    )
    return copy(jnp.zeros(len(self._devices)), values)

  def __call__(self, state, teacher, inputs, labels, weights, **scalars):
    batch = pmapped.split((inputs, labels, weights), len(self._devices))
    scalars = {k: jnp.asarray(v, jnp.float32) for k, v in scalars.items()}
    trained, optimizer, means = self._run(
        (state.trainable, state.optimizer), (state.frozen, teacher), batch,
        scalars,
    )
    return state.replace(trainable=trained, optimizer=optimizer), means

  def _on_device(self, old, constants, batch, scalars):
    trained, state = old
    grads, sums = lax.psum(
        self._local_sums(trained, constants, batch, scalars), pmapped.AXIS
    )
    count = sums.pop("count")
    mean = lambda tree: jax.tree.map(lambda x: reduce.mean(x, count), tree)
    updates, state = self._optimizer(scalars["learning_rate"]).update(
        mean(grads), state, trained
    )
    new = optax.apply_updates(trained, updates), state
    keep = lambda a, b: jnp.where(count > 0, a, b).astype(b.dtype)
    return *jax.tree.map(keep, new, old), mean(sums) | {"count": count}

  def _local_sums(self, trained, constants, batch, scalars):
    """The gradient of the sum over this device's tokens, and the sums."""
    (frozen, teacher), (inputs, labels, weights) = constants, batch
    targets = lax.stop_gradient(self._teacher_fn(teacher, inputs))

    def local_sum(trained):
      total, values = chunked.distillation(
          self._student_fn(trained | frozen, inputs), targets, labels,
          temperature=scalars["temperature"], alpha=scalars["alpha"],
          weights=weights,
      )
      return total, {k: jnp.sum(v) for k, v in values.items()} | {"loss": total}

    grads, sums = jax.grad(local_sum, has_aux=True)(trained)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    return grads, sums | {"count": reduce.count(weights != 0)}
