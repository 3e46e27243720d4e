"""The losses with batch and vocabulary spread over a mesh, by `jax.shard_map`.

For logits `[*N, V]` whose vocabulary lies on several devices, as the head of a
tensor-parallel model leaves them. `chunked` is right there too, but what XLA
makes of it is XLA's choice; here it is written down. The device that holds some
columns never sees the others: for a block of tokens three small all-reduces
over the vocabulary's axis bring together

  1. the maxima of student and teacher                         [2, c]
  2. the sums of exponentials, the label's weight and logit    [5 or 6, c]
  3. the devices' parts of the KL                              [1 or 2, c]

with c the tokens of a block. Nothing is gathered. Over the batch's axis only
the total is reduced, once. On one device, or where only the batch is spread,
`chunked` does the same with less.

Rows or columns that do not divide by their axis are filled up with a copy: rows
of weight 0, columns of -inf. A head whose vocabulary divides saves that copy.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import ArrayLike
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

from tunix_progdistill import errors
from tunix_progdistill.kernels import blocks
from tunix_progdistill.kernels import chunked
from tunix_progdistill.kernels import closed_form
from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import shapes

_P = jax.sharding.PartitionSpec


def distillation(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    labels: Int[Array, "*N"] | Float[Array, "*N V"],
    *,
    mesh: jax.sharding.Mesh,
    batch_axis: str | None,
    vocab_axis: str | None,
    temperature: ArrayLike,
    alpha: ArrayLike,
    weights: chunked.Weights,
    kl_div_tau1: bool = False,
    block_tokens: int | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, "*N"]]]:
  """`chunked.distillation` over a mesh.

    total = sum_n w_n (alpha tau^2 KL(P_teacher || P_student)_n
                       + (1 - alpha) CE_n)

  Use it where the vocabulary is spread. The gradient flows to the student's
  logits alone, is made together with the value, and stays spread as they are.

  Args:
    student: logits `[*N, V]`, float32 or bfloat16, at least one axis before V.
    teacher: logits `[*N, V]`.
    labels: ids `[*N]`, or rows `[*N, V]`, which are spread as the logits. An id
      outside 0..V-1 gives a loss that is not finite where the weight is not 0.
    mesh: the devices; its axes are of type Auto.
    batch_axis: the mesh's axis for the first axis of N; None if not spread.
    vocab_axis: the mesh's axis for V; None if not spread.
    temperature: tau > 0; may be traced.
    alpha: weight of the soft loss in [0, 1]; may be traced.
    weights: of the tokens, `[*N]`; NaN may stand where it is 0.
    kl_div_tau1: also the KL at temperature 1.
    block_tokens: tokens of a block on one device; None for
      `blocks.tokens_per_block` of its part of V.

  Returns:
    The total, and the values per token, as `chunked.distillation`.

  Raises:
    ValueError: axes that the mesh does not have, or the same one twice, or that
      are not of type Auto.
  """
  shapes.check(student, teacher=teacher, tokens=weights, labels=labels)
  shapes.check_scalars(temperature=temperature, alpha=alpha)
  layout = _Layout(mesh, batch_axis, vocab_axis)
  total, values = _distillation(
      (layout, kl_div_tau1, block_tokens), student, teacher, labels,
      weights.astype(jnp.float32), jnp.asarray(temperature, jnp.float32),
      jnp.asarray(alpha, jnp.float32),
  )
  return total, lax.stop_gradient(values)


def forward_kl(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    mesh: jax.sharding.Mesh,
    batch_axis: str | None,
    vocab_axis: str | None,
    temperature: ArrayLike = 1.0,
    where: Bool[Array, "*N"],
    block_tokens: int | None = None,
) -> Float[Array, "*N"]:
  """`reference.forward_kl` over a mesh: KL(P_teacher || P_student) per token.

  Use it where the vocabulary is spread.

  Args:
    student: logits `[*N, V]`, at least one axis before V.
    teacher: logits `[*N, V]`; no gradient.
    mesh: the devices; its axes are of type Auto.
    batch_axis: the mesh's axis for the first axis of N, or None.
    vocab_axis: the mesh's axis for V, or None.
    temperature: tau > 0; may be traced.
    where: tokens that count, `[*N]`.
    block_tokens: tokens of a block on one device.

  Returns:
    `[*N]` float32 in nats, >= 0, 0 outside `where`.

  Raises:
    ValueError: axes that the mesh does not have, or the same one twice, or that
      are not of type Auto.
  """
  shapes.check(student, teacher=teacher, tokens=where)
  shapes.check_scalars(temperature=temperature)
  layout = _Layout(mesh, batch_axis, vocab_axis)
  return _forward_kl(
      (layout, block_tokens), student, teacher, where,
      jnp.asarray(temperature, jnp.float32),
  )


# -- how arrays lie on the mesh


@dataclasses.dataclass(frozen=True)
class _Layout:
  """A mesh, and which of its axes spread what."""

  mesh: jax.sharding.Mesh
  batch: str | None
  vocab: str | None

  def __post_init__(self):
    names = self.mesh.axis_names
    for field, axis in (("batch_axis", self.batch), ("vocab_axis", self.vocab)):
      if axis is not None and axis not in names:
        raise errors.invalid(
            field, f"must be one of the mesh's axes {names}", axis,
            "name one of them, or None",
        )
    if set(self.mesh.axis_types) != {jax.sharding.AxisType.Auto}:
      raise errors.invalid(
          "mesh", "must have axes of type Auto", self.mesh.axis_types,
          "make it with jax.make_mesh(..., axis_types=(AxisType.Auto,) * n)",
      )
    if self.batch is not None and self.batch == self.vocab:
      raise errors.invalid(
          "vocab_axis", "must differ from batch_axis", self.vocab,
          "spread one of the two, or take a mesh of two axes",
      )

  def missing(self, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns that logits of `shape` lack to divide evenly."""
    size = lambda axis: 1 if axis is None else self.mesh.shape[axis]
    return -shape[0] % size(self.batch), -shape[-1] % size(self.vocab)

  def spec(self, ndim: int, vocabulary: bool) -> jax.sharding.PartitionSpec:
    """Of an array of `ndim` axes, the last one a vocabulary or not."""
    if not vocabulary:
      return _P(self.batch)
    return _P(self.batch, *[None] * (ndim - 2), self.vocab)

  def map(self, function: Callable[..., Any], in_specs, out_specs) -> Any:
    """`function` on each device's part."""
    # Without the check of varying axes: the loop of `blocks.by_blocks` starts
    # from zeros that are the same everywhere. It is never differentiated.
    return jax.shard_map(
        function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs,
        check_vma=False,
    )


def _psum(x: Array, axis: str | None) -> Array:
  return x if axis is None else lax.psum(x, axis)


def _pmax(x: Array, axis: str | None) -> Array:
  return x if axis is None else lax.pmax(x, axis)


def _filled(x: Array, rows: int, columns: int, value: float) -> Array:
  """`x` with more rows, and more columns in its last axis."""
  if not rows and not columns:
    return x
  widths = [(0, rows)] + [(0, 0)] * (x.ndim - 1)
  if columns:
    widths[-1] = (0, columns)
  return jnp.pad(x, widths, constant_values=value)


def _cut(x: Array, shape: tuple[int, ...]) -> Array:
  """The first entries of `x`; itself where nothing was filled up."""
  return x if x.shape == shape else x[tuple(slice(n) for n in shape)]


def _by_blocks(
    step: Callable[..., Any], arrays: tuple[Array, ...],
    block_tokens: int | None,
) -> Any:
  """`blocks.by_blocks` on one device, its tokens in one row."""
  lead = arrays[0].shape[:-1]
  flat = tuple(x.reshape(-1, *x.shape[len(lead):]) for x in arrays)
  out = blocks.by_blocks(step, flat[0].shape, flat, block_tokens)
  return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), out)


# -- one block; `[1, c, V of this device]` in float32


class _Softmax(NamedTuple):
  """A softmax before its normaliser is known on every device."""

  shifted: closed_form.Block
  exponentials: closed_form.Block

  @classmethod
  def of(cls, shifted: Array, rate: ArrayLike) -> "_Softmax":
    return cls(shifted * rate, jnp.exp(shifted * rate))

  @property
  def sum(self) -> Array:
    """This device's part of the normaliser."""
    return jnp.sum(self.exponentials, axis=-1)

  def over(self, z: Array) -> closed_form.Distribution:
    """This device's part of the distribution; z: the whole normaliser."""
    z = z[..., None]
    return closed_form.Distribution(
        self.exponentials / z, self.shifted - jnp.log(z)
    )


def _shifted(s: Array, t: Array, axis: str | None) -> tuple[Array, Array]:
  """Both less their maximum over all devices."""
  top = jnp.stack([jnp.max(s, axis=-1), jnp.max(t, axis=-1)])
  top = _pmax(top, axis)[..., None]
  return s - top[0], t - top[1]


def _kl_block(axis: str | None, s: Array, t: Array, tau: Array):
  """Value and gradient of the forward KL; see `closed_form.forward_kl`."""
  rate = 1.0 / tau
  s, t = _shifted(s, t, axis)
  parts = _Softmax.of(s, rate), _Softmax.of(t, rate)
  sums = _psum(jnp.stack([x.sum for x in parts]), axis)
  q, p = (x.over(z) for x, z in zip(parts, sums, strict=True))
  return _psum(closed_form.kl(p, q), axis), rate * (q.p - p.p)


def _label_rows(y: Array, like: Array, axis: str | None) -> Array:
  """This device's part of the label rows; of ids, the one-hot rows."""
  if y.ndim == like.ndim:
    return y
  first = 0 if axis is None else lax.axis_index(axis) * like.shape[-1]
  own = closed_form.columns(like.shape, first) == y[..., None]
  return own.astype(jnp.float32)


def _distillation_block(
    axis: str | None, kl_div_tau1: bool, s: Array, t: Array, y: Array,
    tau: Array, alpha: Array,
) -> closed_form.Distillation:
  """`closed_form.distillation`, of this device's columns."""
  rate = 1.0 / tau
  s, t = _shifted(s, t, axis)
  rows = _label_rows(y, s, axis)
  parts = [_Softmax.of(s, rate), _Softmax.of(t, rate), _Softmax.of(s, 1.0)]
  if kl_div_tau1:
    parts.append(_Softmax.of(t, 1.0))
  # 0 * -inf: a class that the label row gives no weight costs nothing.
  own = jnp.sum(jnp.where(rows != 0, rows * s, 0.0), axis=-1)
  weight, own, *sums = _psum(
      jnp.stack([jnp.sum(rows, axis=-1), own, *(x.sum for x in parts)]), axis
  )
  if y.ndim < s.ndim:
    own = jnp.where(weight == 0, jnp.nan, own)  # no device has this id
  q, p, q1, *p1 = (x.over(z) for x, z in zip(parts, sums, strict=True))
  kls = [closed_form.kl(p, q), *(closed_form.kl(x, q1) for x in p1)]
  kl, *at_one = _psum(jnp.stack(kls), axis)
  d_kl, d_ce = rate * (q.p - p.p), q1.p * weight[..., None] - rows
  gradient = closed_form.mix(tau**2 * d_kl, d_ce, alpha)
  ce = weight * jnp.log(sums[2]) - own
  return closed_form.Distillation(
      kl, ce, at_one[0] if kl_div_tau1 else None, gradient
  )


# -- gradient made in the forward pass


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _distillation(options, student, teacher, labels, weights, tau, alpha):
  total, values, _ = _distill(
      options, False, student, teacher, labels, weights, tau, alpha
  )
  return total, values


def _distill(
    options, with_gradient, student, teacher, labels, weights, tau, alpha
):
  """Total, values and (where asked for) the gradient."""
  layout, kl_div_tau1, block_tokens = options
  dense = labels.ndim == student.ndim

  def step(tau, alpha, s, t, y, w):
    on = w != 0
    out = _distillation_block(
        layout.vocab, kl_div_tau1, reduce.blank(s, on), reduce.blank(t, on),
        reduce.blank_labels(y, on), tau, alpha,
    )
    values = closed_form.token_values(out.kl, out.ce, out.kl_div_tau1, w)
    if not with_gradient:
      return values, None
    gradient = closed_form.weighted(out.gradient, w)
    return values, gradient.astype(student.dtype)

  def on_device(tau, alpha, s, t, y, w):
    values, gradient = _by_blocks(
        functools.partial(step, tau, alpha), (s, t, y, w), block_tokens
    )
    total = closed_form.weighted_total(values, w, tau, alpha)
    total = _psum(total, layout.batch)
    return total, values, gradient

  rows, columns = layout.missing(student.shape)
  wide = layout.spec(student.ndim, True)
  narrow = layout.spec(student.ndim - 1, False)
  total, values, gradient = layout.map(
      on_device,
      (_P(), _P(), wide, wide, wide if dense else narrow, narrow),
      (_P(), narrow, wide),
  )(
      tau, alpha,
      _filled(student, rows, columns, -jnp.inf),
      _filled(teacher, rows, columns, -jnp.inf),
      _filled(labels, rows, columns if dense else 0, 0),
      _filled(weights, rows, 0, 0),
  )
  cut = functools.partial(_cut, shape=weights.shape)
  if with_gradient:
    gradient = _cut(gradient, student.shape)
  return total, jax.tree.map(cut, values), gradient


def _distillation_fwd(options, student, *rest):
  total, values, gradient = _distill(options, True, student, *rest)
  return (total, values), gradient


def _distillation_bwd(options, gradient, cotangents):
  del options
  scale, _ = cotangents
  return (closed_form.scaled(gradient, scale), *[None] * 5)


_distillation.defvjp(_distillation_fwd, _distillation_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward_kl(options, student, teacher, where, tau):
  return _kl_and_gradient(options, False, student, teacher, where, tau)[0]


def _kl_and_gradient(options, with_gradient, student, teacher, where, tau):
  layout, block_tokens = options

  def step(tau, s, t, on):
    value, gradient = _kl_block(
        layout.vocab, reduce.blank(s, on), reduce.blank(t, on), tau
    )
    value = jnp.where(on, value, 0.0)
    if not with_gradient:
      return value, None
    gradient = jnp.where(on[..., None], gradient, 0.0)
    return value, gradient.astype(student.dtype)

  def on_device(tau, *arrays):
    return _by_blocks(functools.partial(step, tau), arrays, block_tokens)

  rows, columns = layout.missing(student.shape)
  wide = layout.spec(student.ndim, True)
  narrow = layout.spec(student.ndim - 1, False)
  value, gradient = layout.map(
      on_device, (_P(), wide, wide, narrow), (narrow, wide)
  )(
      tau,
      _filled(student, rows, columns, -jnp.inf),
      _filled(teacher, rows, columns, -jnp.inf),
      _filled(where, rows, 0, 0),
  )
  if with_gradient:
    gradient = _cut(gradient, student.shape)
  return _cut(value, where.shape), gradient


def _forward_kl_fwd(options, student, teacher, where, tau):
  return _kl_and_gradient(options, True, student, teacher, where, tau)


def _forward_kl_bwd(options, gradient, cotangent):
  del options
  return closed_form.scaled(gradient, cotangent[..., None]), None, None, None


_forward_kl.defvjp(_forward_kl_fwd, _forward_kl_bwd)

