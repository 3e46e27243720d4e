"""The loss under `jax.pmap`: each device its rows, over an axis named "batch".

The explicit form, for code that is written with `pmap` already and for devices
that have different numbers of valid tokens. Elsewhere `chunked` under `jax.jit`
on a mesh does the same, and `sharded` where the vocabulary is spread.

  total = psum_batch(total of this device's tokens)
  count = psum_batch(number of this device's tokens)
  loss  = total / count

A mean over devices of the devices' means would give the tokens of a device with
few of them too much weight. And the psum stands outside what is differentiated:
the transpose of psum is psum, so `pmap(grad(psum(loss)))` gives the gradient
times the number of devices. Here each device differentiates its local sum.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import ArrayLike
from jaxtyping import Float
from jaxtyping import Int

from tunix_progdistill.kernels import chunked
from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import shapes

AXIS = "batch"


def split(array_tree: Any, devices: int) -> Any:
  """Each array's rows over so many devices.

  Args:
    array_tree: arrays `[rows, ...]`, the tokens' weights among them.
    devices: their number D.

  Returns:
    The tree with arrays `[D, ceil(rows / D), ...]`. Rows of zeros fill up the
    last devices; their weight is zero as well, so that they do not count.

  >>> split({"weights": jnp.ones(3)}, 2)["weights"].tolist()
  [[1.0, 1.0], [1.0, 0.0]]
  """

  def one(x):
    x = jnp.asarray(x)
    more = -x.shape[0] % devices
    x = jnp.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(devices, -1, *x.shape[1:])

  return jax.tree.map(one, array_tree)


def join(array_tree: Any, rows: int) -> Any:
  """The inverse of `split`: arrays `[D, r, ...]` as `[rows, ...]`."""
  return jax.tree.map(
      lambda x: x.reshape(-1, *x.shape[2:])[:rows], array_tree
  )


def distillation_value_and_grad(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    labels: Int[Array, "*N"] | Float[Array, "*N V"],
    *,
    temperature: ArrayLike,
    alpha: ArrayLike,
    weights: chunked.Weights,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[Float[Array, ""], Float[Array, "*N V"]]:
  """Mean loss over the tokens and its gradient, each device its rows.

    loss = sum_n w_n (alpha tau^2 KL_n + (1 - alpha) CE_n) / count
    count = the number of tokens whose weight is not 0

  Args:
    student: logits `[*N, V]`, float32 or bfloat16; the rows are N's first axis.
    teacher: logits `[*N, V]`.
    labels: ids or rows, as for `chunked.distillation`.
    temperature: tau > 0.
    alpha: weight of the soft loss in [0, 1].
    weights: of the tokens `[*N]`; a bool counts as 0 or 1.
    devices: to use; None for all local ones. There may be more than rows.

  Returns:
    The loss, float32 [], 0 where no token counts, and its gradient by the
    student's logits, in their shape and dtype.
  """
  shapes.check(student, teacher=teacher, tokens=weights, labels=labels)
  shapes.check_scalars(temperature=temperature, alpha=alpha)
  devices = tuple(devices or jax.local_devices())
  arrays = split((student, teacher, labels, weights), len(devices))
  scalars = (
      jnp.asarray(temperature, jnp.float32), jnp.asarray(alpha, jnp.float32)
  )
  loss, gradient = _mapped(devices)(*arrays, *scalars)
  return loss[0], join(gradient, student.shape[0])


@functools.lru_cache(maxsize=16)
def _mapped(devices: tuple[jax.Device, ...]) -> Callable[..., Any]:
  """The compiled function; made anew at each call, pmap would compile anew."""
  return jax.pmap(
      _on_device, axis_name=AXIS, in_axes=(0, 0, 0, 0, None, None),
      devices=devices,
  )


def _on_device(student, teacher, labels, weights, temperature, alpha):

  def local_sum(logits):
    return chunked.distillation(
        logits, teacher, labels, temperature=temperature, alpha=alpha,
        weights=weights,
    )[0]

  total, gradient = jax.value_and_grad(local_sum)(student)
  total, count = lax.psum((total, reduce.count(weights != 0)), AXIS)
  scaled = reduce.mean(gradient.astype(jnp.float32), count)
  return reduce.mean(total, count), scaled.astype(gradient.dtype)
