"""The loss under pmap is that of one device, whatever the rows' split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_progdistill.kernels import pmapped
from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import reference

_TAU, _ALPHA = 2.0, 0.6


def _data(rows, vocabulary=40, dtype=jnp.float32, dense=False):
  """Row i has about i valid tokens; NaN where none counts."""
  rng = np.random.default_rng(rows)
  n = (rows, 4)
  where = np.arange(4) < np.minimum(np.arange(rows) + 1, 4)[:, None]
  where[rows // 2] &= rows < 2
  s, t = (3.0 * rng.normal(size=(*n, vocabulary)) for _ in range(2))
  s[~where], t[~where] = np.nan, np.nan
  labels = jnp.asarray(np.where(where, rng.integers(0, vocabulary, n), -1))
  if dense:
    labels = jax.nn.one_hot(labels, vocabulary)
  return jnp.asarray(s, dtype), jnp.asarray(t, dtype), labels, where


@jax.jit
def _plain(student, teacher, labels, where):

  def mean(s):
    kl = reference.forward_kl(s, teacher, temperature=_TAU, where=where)
    ce = reference.cross_entropy(s, labels, where=where)
    loss = _ALPHA * _TAU**2 * kl + (1 - _ALPHA) * ce
    return reduce.mean(reduce.masked_sum(loss, where), reduce.count(where))

  return jax.value_and_grad(mean)(student.astype(jnp.float32))


def _mapped(student, teacher, labels, where, number):
  return pmapped.distillation_value_and_grad(
      student, teacher, labels, temperature=_TAU, alpha=_ALPHA, weights=where,
      devices=jax.devices()[:number],
  )


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("rows", [5, 3, 1])
def test_equals_one_device(rows, number):
  data = _data(rows)
  loss, gradient = _mapped(*data, number)
  expected, slope = _plain(*data)
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  largest = np.abs(slope).max()
  assert largest > 0
  np.testing.assert_allclose(gradient, slope, rtol=0, atol=1e-6 * largest)


def test_rows_as_labels_in_bfloat16():
  data = _data(5, dtype=jnp.bfloat16, dense=True)
  loss, gradient = _mapped(*data, 8)
  expected, slope = _plain(*data)
  assert gradient.dtype == jnp.bfloat16
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  np.testing.assert_allclose(  # rounded twice: as a sum, and as a mean
      np.asarray(gradient, np.float32), slope, rtol=2**-7, atol=1e-7
  )


def test_nothing_counts():
  student, teacher, labels, where = _data(5)
  loss, gradient = _mapped(student, teacher, labels, where & False, 8)
  assert float(loss) == 0 and not np.asarray(gradient).any()


def test_another_temperature_does_not_compile_anew(monkeypatch):
  traces = []

  def counted(*args, **kwargs):
    traces.append(None)
    return distillation(*args, **kwargs)

  distillation = pmapped.chunked.distillation
  monkeypatch.setattr(pmapped.chunked, "distillation", counted)
  student, teacher, labels, where = _data(3, vocabulary=41)
  run = lambda tau, alpha: pmapped.distillation_value_and_grad(
      student, teacher, labels, temperature=tau, alpha=alpha, weights=where,
  )[0]
  first, compiled = run(1.0, 1.0), len(traces)
  assert compiled and run(3.0, 0.5) != first
  assert len(traces) == compiled


def test_join_undoes_split():
  tree = {"a": jnp.arange(10.0).reshape(5, 2), "b": jnp.arange(5)}
  parts = pmapped.split(tree, 3)
  assert parts["a"].shape == (3, 2, 2) and parts["b"].shape == (3, 2)
  assert parts["b"][2].tolist() == [4, 0]
  back = pmapped.join(parts, 5)
  jax.tree.map(np.testing.assert_array_equal, back, tree)


def test_psum_inside_what_is_differentiated():
  """Trap 14: this gradient is 4 times too large; ours is of the local sum."""
  x = jnp.arange(1.0, 5.0)
  inside = jax.pmap(
      jax.grad(lambda v: jax.lax.psum(v * v, "batch") / 4), axis_name="batch",
      devices=jax.devices()[:4],
  )(x)
  np.testing.assert_allclose(inside, 4 * (2 * x / 4))
