"""Laws of the kernels, over awkward shapes, dtypes and values.

Shapes come from a short list, so that few programs are compiled.
"""

import functools

from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import paths
from tunix_progdistill.kernels import chunked
from tunix_progdistill.kernels import closed_form

TOKENS, BLOCK = 7, 3
BLOCK_ENTRIES = 128
VOCABULARIES = (1, 2, 300, BLOCK_ENTRIES - 1, BLOCK_ENTRIES, BLOCK_ENTRIES + 1,
                32003)
TINY = np.finfo(np.float32).min

KINDS = {
    "noise": lambda rng, v: 3 * rng.normal(size=(TOKENS, v)),
    "large": lambda rng, v: 1e4 * rng.uniform(-1, 1, size=(TOKENS, v)),
    "flat": lambda rng, v: np.full((TOKENS, v), 1e4),
    "spike": lambda rng, v: 1e4 * (np.arange(v) == rng.integers(v)) * np.ones(
        (TOKENS, 1)
    ),
}
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "mse")


@functools.cache
def _distillation(vocabulary, dtype):
  del vocabulary, dtype  # a program for each

  def loss(s, t, labels, where, tau, alpha):
    total, values = chunked.distillation(
        s, t, labels, temperature=tau, alpha=alpha, weights=where,
        kl_div_tau1=True, block_tokens=BLOCK,
    )
    return total, values

  return jax.jit(jax.value_and_grad(loss, has_aux=True))


@st.composite
def worlds(draw):
  vocabulary = draw(st.sampled_from(VOCABULARIES))
  rng = np.random.default_rng(draw(st.integers(0, 2**31)))
  dtype = draw(st.sampled_from([jnp.float32, jnp.bfloat16]))
  student, teacher = (
      KINDS[draw(st.sampled_from(sorted(KINDS)))](rng, vocabulary)
      for _ in range(2)
  )
  if draw(st.booleans()):  # nearly equal: where a sum of differences goes wrong
    student = teacher + 1e-3 * rng.normal(size=teacher.shape)
  masked = rng.random(vocabulary) < draw(st.sampled_from([0.0, 0.4]))
  masked[rng.integers(vocabulary)] = False
  student[:, masked] = teacher[:, masked] = draw(
      st.sampled_from([-np.inf, TINY])
  )
  where = rng.random(TOKENS) < draw(st.sampled_from([0.0, 0.5, 1.0]))
  student[~where] = draw(st.sampled_from([np.nan, -np.inf, TINY, 0.0]))
  teacher[~where] = draw(st.sampled_from([np.nan, np.inf, TINY, 0.0]))
  labels = np.full(TOKENS, int(np.flatnonzero(~masked)[0]))
  labels[~where] = -1
  return (
      jnp.asarray(student.astype(np.float32), dtype),
      jnp.asarray(teacher.astype(np.float32), dtype), labels, where,
      draw(st.floats(0.5, 10)), draw(st.sampled_from([0.0, 0.5, 1.0])),
  )


@settings(
    max_examples=150, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(worlds())
def test_loss_and_gradient(world):
  s, t, labels, where, tau, alpha = world
  (total, values), grad = _distillation(s.shape[-1], str(s.dtype))(
      s, t, labels, where, np.float32(tau), np.float32(alpha)
  )
  assert grad.dtype == s.dtype
  grad = np.asarray(grad, np.float32)
  for name, value in values.items():
    value = np.asarray(value)
    assert not np.isnan(value).any(), name
    assert (value >= 0).all(), name
    assert (value[~where] == 0).all(), name
  assert np.isfinite(grad).all()
  assert (grad[~where] == 0).all()
  mean, right = paths.exact(s, t, labels, where, np.float32(tau), alpha)
  number = max(where.sum(), 1)
  if np.isfinite(mean):
    # A cross-entropy of 1e4 has its own digits.
    assert float(total) / number == pytest.approx(mean, rel=2e-5, abs=2e-6)
  tolerance = (1e-5 if s.dtype == jnp.float32 else 1e-2)
  scale = np.abs(right * number).max()
  # The KL's is tau (q - p), and float32 knows q and p to some 1e-7.
  floor = 1e-6 * max(1.0, tau / 2)
  assert np.abs(grad - right * number).max() <= tolerance * scale + floor


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(VOCABULARIES[:-1]), st.sampled_from(sorted(KINDS)),
    st.sampled_from(DIVERGENCES), st.floats(0.5, 10), st.integers(0, 2**31),
    st.floats(-5, 5),
)
def test_equal_logits_give_exactly_nothing(v, kind, name, tau, seed, shift):
  """And a shift of all logits changes a divergence by rounding at most."""
  logits = KINDS[kind](np.random.default_rng(seed), v).astype(np.float32)
  where = np.ones(TOKENS, bool)
  rule = getattr(chunked, name)
  scale = {} if name == "mse" else {"temperature": np.float32(tau)}
  values, grad = jax.vjp(
      lambda s: rule(s, logits, where=where, block_tokens=BLOCK, **scale),
      logits,
  )
  assert (np.asarray(values) == 0).all()
  (grad,) = grad(np.ones(TOKENS, np.float32))
  np.testing.assert_allclose(grad, 0.0, atol=1e-6)
  if kind == "noise":
    shifted = rule(
        logits + np.float32(shift), logits, where=where, block_tokens=BLOCK,
        **scale,
    )
    assert (np.asarray(shifted) >= 0).all()
    np.testing.assert_allclose(shifted, 0.0, atol=1e-5)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from((2, 5, 300)), st.sampled_from(DIVERGENCES),
    st.floats(0.5, 10), st.floats(0.05, 0.95), st.integers(0, 2**31),
)
def test_closed_forms_are_the_derivatives(v, name, tau, beta, seed):
  """Against finite differences in float64."""
  rng = np.random.default_rng(seed)
  s, t = (2 * rng.normal(size=(2, 1, v))).astype(np.float32).astype(float)
  rule = getattr(closed_form, name)
  scalars = {"mse": (), "jsd": (tau, beta)}.get(name, (tau,))
  direction = rng.normal(size=(1, v))
  step = 1e-5
  up, down = (
      _float64(name, s + k * step * direction, t, *scalars) for k in (1, -1)
  )
  _, grad = rule(
      jnp.asarray(s, jnp.float32), jnp.asarray(t, jnp.float32), *scalars
  )
  expected = (up - down) / (2 * step)
  got = float(np.sum(np.asarray(grad, np.float64) * direction))
  size = float(np.abs(grad).max() * np.abs(direction).sum())
  assert abs(got - expected) <= 1e-5 * size + 1e-9


def _float64(name, s, t, tau=1.0, beta=0.5):
  log_softmax = lambda x: x - x.max() - np.log(np.exp(x - x.max()).sum())
  if name == "mse":
    d = (s - s.mean()) - (t - t.mean())
    return np.mean(d * d)
  log_q, log_p = log_softmax(s / tau), log_softmax(t / tau)
  q, p = np.exp(log_q), np.exp(log_p)
  if name == "forward_kl":
    return np.sum(p * (log_p - log_q))
  if name == "reverse_kl":
    return np.sum(q * (log_q - log_p))
  m = beta * p + (1 - beta) * q
  return beta * np.sum(p * (log_p - np.log(m))) + (1 - beta) * np.sum(
      q * (log_q - np.log(m))
  )
