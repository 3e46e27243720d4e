"""One-hot rows are told by their ids, and every other row is not."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_progdistill.kernels import chunked
from tunix_progdistill.kernels import labels
from tunix_progdistill.kernels import reference

WIDE = 5000  # told by ids; narrower rows are taken as they are
TOKENS = 67  # more than a block


def one_hot(ids, vocabulary=WIDE):
  return np.eye(vocabulary, dtype=np.float32)[ids]


@st.composite
def rows(draw):
  vocabulary = draw(st.sampled_from([1, 3, 300, WIDE]))
  column = st.integers(0, vocabulary - 1)
  row = np.zeros(vocabulary, np.float32)
  for _ in range(draw(st.integers(0, 3))):
    row[draw(column)] = draw(st.sampled_from(
        [1.0, 1.0, 1.0, 0.0, -0.0, 2.0, -1.0, 1e-30, np.nan, np.inf]
    ))
  return row


@settings(max_examples=300, deadline=None)
@given(rows())
def test_ids(row):
  nonzero, = np.nonzero(row)
  expected = len(row)
  if not nonzero.size:
    expected = labels.EMPTY
  elif nonzero.size == 1 and row[nonzero[0]] == 1:
    expected = nonzero[0]
  assert int(jax.jit(labels.ids)(row)) == expected


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, bool])
@pytest.mark.parametrize("shape", [(TOKENS,), (3, 5), ()])
def test_ids_by_blocks(dtype, shape):
  ids = np.random.default_rng(0).integers(0, WIDE, shape)
  got = labels.ids(jnp.asarray(one_hot(ids)).astype(dtype))
  np.testing.assert_array_equal(got, ids)


def test_many_ones_do_not_look_like_one():
  rows = jnp.ones((2, 2**17))
  assert labels.ids(rows).tolist() == [2**17] * 2


@pytest.fixture(scope="module", name="logits")
def _logits():
  rng = np.random.default_rng(1)
  return [
      jnp.asarray(3 * rng.normal(size=(TOKENS, WIDE)), jnp.float32)
      for _ in range(2)
  ]


@jax.jit
def loss(student, teacher, labels_, weights):
  def total(student):
    return chunked.distillation(
        student, teacher, labels_, temperature=2.0, alpha=0.5, weights=weights,
    )
  return jax.value_and_grad(total, has_aux=True)(student)


def expected(student, teacher, labels_, weights):
  def total(student):
    where = weights != 0
    kl = reference.forward_kl(student, teacher, temperature=2.0, where=where)
    ce = reference.cross_entropy(student, labels_, where=where)
    return jnp.sum(weights * (2.0 * kl + 0.5 * ce))
  return jax.value_and_grad(total)(student)


def test_one_hot_rows_give_what_ids_give(logits):
  ids = np.random.default_rng(2).integers(0, WIDE, TOKENS)
  ones = jnp.ones(TOKENS)
  by_rows = loss(*logits, jnp.asarray(one_hot(ids)), ones)
  by_ids = loss(*logits, jnp.asarray(ids), ones)
  jax.tree.map(np.testing.assert_array_equal, by_rows, by_ids)


@pytest.mark.parametrize("odd", ["soft", "empty", "double", "negative"])
def test_a_single_other_row_counts_as_it_is(logits, odd):
  rows = one_hot(np.arange(TOKENS))
  rows[40] = {
      "soft": 1 / WIDE, "empty": 0.0, "double": 2 * rows[40],
      "negative": rows[40] - rows[3],
  }[odd]
  weights = jnp.ones(TOKENS) / TOKENS
  (got, _), gradient = loss(*logits, jnp.asarray(rows), weights)
  value, exact = expected(*logits, jnp.asarray(rows), weights)
  np.testing.assert_allclose(got, value, rtol=1e-6)
  np.testing.assert_allclose(
      gradient, exact, rtol=0, atol=1e-6 * float(jnp.max(jnp.abs(exact)))
  )


def test_rows_of_weight_0_may_be_anything(logits):
  rows = one_hot(np.arange(TOKENS))
  rows[7], rows[8] = np.nan, 0.0
  weights = jnp.ones(TOKENS).at[jnp.array([7, 8])].set(0.0)
  (got, _), gradient = loss(*logits, jnp.asarray(rows), weights)
  ids = jnp.arange(TOKENS)
  (value, _), exact = loss(*logits, ids, weights)
  assert got == value
  np.testing.assert_array_equal(gradient, exact)
  assert not np.any(gradient[7]) and not np.any(gradient[8])


def test_nan_in_a_row_that_counts_is_not_hidden(logits):
  rows = one_hot(np.arange(TOKENS))
  rows[7, 5] = np.nan
  (got, _), _ = loss(*logits, jnp.asarray(rows), jnp.ones(TOKENS))
  assert np.isnan(got)
