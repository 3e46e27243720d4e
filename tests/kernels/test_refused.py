"""Kernels tell what they cannot take, before anything is computed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_progdistill.kernels import chunked
from tunix_progdistill.kernels import linear_head
from tunix_progdistill.kernels import pmapped
from tunix_progdistill.kernels import reference
from tunix_progdistill.kernels import sharded
from tunix_progdistill.kernels import topk

S, T = np.ones((3, 7), np.float32), np.zeros((3, 7), np.float32)
ON, IDS = np.ones(3, bool), np.zeros(3, np.int32)


def _loss(**kwargs):
  scalars = {"temperature": 2.0, "alpha": 0.5, **kwargs}
  mesh = jax.make_mesh(
      (2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  return {
      "chunked": lambda: chunked.distillation(
          S, T, IDS, weights=ON, **scalars
      ),
      "linear_head": lambda: linear_head.distillation(
          S, T, S, S, IDS, weights=ON, **scalars
      ),
      "sharded": lambda: sharded.distillation(
          S, T, IDS, weights=ON, mesh=mesh, batch_axis="batch",
          vocab_axis=None, **scalars
      ),
      "pmapped": lambda: pmapped.distillation_value_and_grad(
          S, T, IDS, weights=ON, **scalars
      ),
  }


@pytest.mark.parametrize("name", _loss())
@pytest.mark.parametrize(("scalar", "value", "rule"), [
    ("temperature", 0.0, "must be > 0 and finite, got 0.0"),
    ("temperature", np.float32(-1), "must be > 0 and finite, got -1.0"),
    ("temperature", np.nan, "must be > 0 and finite, got nan"),
    ("alpha", np.inf, "must be finite, got inf"),
])
def test_scalar_of_the_loss(name, scalar, value, rule):
  with pytest.raises(ValueError, match=f"{scalar} {rule}"):
    _loss(**{scalar: value})[name]()


@pytest.mark.parametrize("module", [reference, chunked])
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_scalar_of_a_divergence(module, name):
  function = getattr(module, name)
  with pytest.raises(ValueError, match="temperature must be > 0"):
    function(S, T, temperature=-2.0, where=ON)
  if name == "jsd":
    for beta in (0.0, 1.0, 2.0, np.nan):
      with pytest.raises(ValueError, match=r"beta must lie in \(0, 1\)"):
        function(S, T, beta=beta, where=ON)


@pytest.mark.parametrize(("k", "rule"), [
    (0, "must lie in 1..7, got 0"), (8, "must lie in 1..7, got 8"),
    (-1, "must lie in 1..7, got -1"), (2.5, "must be a whole number, got 2.5"),
])
@pytest.mark.parametrize("name", ["tail_kl", "renormalised_kl"])
def test_k(name, k, rule):
  with pytest.raises(ValueError, match=f"k {re.escape(rule)}"):
    getattr(topk, name)(S, T, k=k, where=ON)


@pytest.mark.parametrize(("block_tokens", "rule"), [
    (0, "must be at least 1, got 0"), (-4, "must be at least 1, got -4"),
    (2.0, "must be a whole number, got 2.0"),
])
@pytest.mark.parametrize("name", ["chunked", "linear_head", "sharded"])
def test_block_tokens(name, block_tokens, rule):
  with pytest.raises(ValueError, match=f"block_tokens {rule}"):
    _loss(block_tokens=block_tokens)[name]()


@pytest.mark.parametrize("module", [reference, chunked])
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "mse"])
def test_shapes(module, name):
  function = getattr(module, name)
  with pytest.raises(
      ValueError, match=r"the student's shape \(3, 7\), got \(3, 6\)"
  ):
    function(S, T[:, :6], where=ON)
  with pytest.raises(ValueError, match="a vocabulary of at least 1"):
    function(S[:, :0], T[:, :0], where=ON)


def test_traced_scalars_are_taken_as_they_are():
  loss = lambda tau: chunked.distillation(
      S, T, IDS, temperature=tau, alpha=1.0, weights=ON
  )[0]
  assert float(jax.jit(loss)(2.0)) == float(loss(2.0)) == float(
      loss(jnp.float32(2.0))
  )


@pytest.mark.parametrize("module", [reference, chunked])
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "mse"])
def test_what_both_rule_out_has_no_part_in_the_gradient(module, name):
  rng = np.random.default_rng(0)
  s, t = rng.normal(size=(2, 3, 7)).astype(np.float32)
  function = getattr(module, name)
  total = lambda x, y: jnp.sum(function(x, y, where=ON))
  less = np.delete(s, 2, axis=-1), np.delete(t, 2, axis=-1)
  value, expected = jax.value_and_grad(total)(*less)
  s[:, 2] = t[:, 2] = -np.inf
  with_it, gradient = jax.value_and_grad(total)(s, t)
  assert float(with_it) == pytest.approx(float(value), rel=1e-6)
  np.testing.assert_array_equal(gradient[:, 2], 0.0)
  np.testing.assert_allclose(
      np.delete(gradient, 2, axis=-1), expected, atol=1e-6
  )
