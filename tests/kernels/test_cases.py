"""K01-K04, K06-K08, K13, K15, K17, K18, K20, K21 in every kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import paths
from tunix_progdistill.kernels import chunked
from tunix_progdistill.kernels import reference
from tunix_progdistill.kernels import topk


def _params(of):
  """A mesh of one row or one column has tests of its own; here it is slow."""
  slow = ("sharded 1x8", "sharded 8x1")
  return [
      pytest.param(path, id=name, marks=[pytest.mark.slow] * (name in slow))
      for name, path in of.items()
  ]


every_path = pytest.mark.parametrize("path", _params(paths.PATHS))
finite_path = pytest.mark.parametrize("path", _params(paths.FINITE_PATHS))
INF = np.inf


def rows(logits, shape=(1, 1)):
  return np.broadcast_to(
      np.asarray(logits, np.float32), (*shape, len(logits))
  ).copy()


@every_path
@pytest.mark.parametrize(
    ("student", "expected"),
    [([0.0, 1.0, -INF], 0.82872491), ([0.0, 1.0, 0.0], 1.06690794)],
)
def test_k01_1_a_class_that_the_teacher_rules_out(path, student, expected):
  on, labels = np.ones((1, 1), bool), np.zeros((1, 1), np.int32)
  loss, grad = path(rows(student), rows([2.0, 0.0, -INF]), labels, on)
  assert loss == pytest.approx(expected, abs=1e-6)
  assert np.isfinite(grad).all()
  if student[2] == -INF:
    assert grad[..., 2] == 0.0


@pytest.mark.parametrize("module", [reference, chunked])
@pytest.mark.parametrize(
    "name", ["forward_kl", "reverse_kl", "jsd", "mse", "cross_entropy"]
)
@pytest.mark.parametrize("junk", [-INF, np.nan, np.finfo(np.float32).min])
def test_k01_2_padding_of_another_tool(module, name, junk):
  """Rows of 4 and 2 valid positions; the rest of the teacher is junk."""
  rng = np.random.default_rng(0)
  student, teacher = rng.normal(size=(2, 2, 4, 5)).astype(np.float32)
  where = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
  clean = teacher.copy()
  teacher[1, 2:] = junk
  other = (lambda x: np.argmax(x, -1)) if name == "cross_entropy" else (
      lambda x: x
  )

  def mean(s, t):
    values = getattr(module, name)(s, other(t), where=where)
    return jnp.sum(values) / 6

  loss, grad = jax.value_and_grad(mean)(student, teacher)
  expected, _ = jax.value_and_grad(mean)(student, clean)
  assert float(loss) == pytest.approx(float(expected), abs=1e-6)
  assert np.isfinite(grad).all() and (np.asarray(grad)[1, 2:] == 0).all()
  assert np.abs(grad).max() > 1e-3


@finite_path
def test_k02_1_columns_of_padding_change_nothing(path):
  rng = np.random.default_rng(5)
  student, teacher = rng.normal(size=(2, 2, 8, 5)).astype(np.float32)
  labels = rng.integers(0, 5, (2, 8))
  where = np.ones((2, 8), bool)
  where[:, 4:] = False
  loss, grad = path(
      student[:, :4], teacher[:, :4], labels[:, :4], where[:, :4], 2.0, 0.3
  )
  padded, grad_padded = path(student, teacher, labels, where, 2.0, 0.3)
  assert padded == pytest.approx(loss, abs=1e-6)
  np.testing.assert_allclose(grad_padded[:, :4], grad, atol=1e-6)
  assert not grad_padded[:, 4:].any() and np.abs(grad).max() > 1e-3


@finite_path
def test_k02_2_a_prompt_has_no_gradient(path):
  rng = np.random.default_rng(6)
  student, teacher = rng.normal(size=(2, 1, 6, 5)).astype(np.float32)
  labels, where = rng.integers(0, 5, (1, 6)), np.arange(6)[None] >= 3
  loss, grad = path(student, teacher, labels, where, 2.0, 0.3)
  assert not grad[:, :3].any() and np.abs(grad[:, 3:]).max() > 1e-3
  teacher[:, :3] *= -7.0
  assert path(student, teacher, labels, where, 2.0, 0.3)[0] == loss


@every_path
def test_k17_1_other_vocabularies_are_told(path):
  s, t = np.zeros((2, 3, 3), np.float32), np.zeros((2, 3, 5), np.float32)
  labels, where = np.zeros((2, 3), np.int32), np.ones((2, 3), bool)
  with pytest.raises(ValueError, match=r"2, 3, 3\).*got \(2, 3, 5\)") as e:
    path(s, t, labels, where)
  assert "cut or pad one" in str(e.value) and "\n" not in str(e.value)


@finite_path
@pytest.mark.parametrize(
    ("labels", "where", "match"),
    [
        (np.zeros((2, 2), np.int32), np.ones((2, 3), bool), "labels must"),
        (np.zeros((2, 3), np.float32), np.ones((2, 3), bool), "labels must"),
        (np.zeros((2, 3), np.int32), np.ones((2, 1), bool), "weights must"),
    ],
    ids=["fewer labels", "labels that are no ids", "a mask per row"],
)
def test_arrays_that_do_not_fit_are_told(path, labels, where, match):
  s = np.zeros((2, 3, 3), np.float32)
  with pytest.raises(ValueError, match=match):
    path(s, s, labels, where)


@finite_path
def test_k03_1_nothing_left_on_one_device(path):
  rng = np.random.default_rng(1)
  student, teacher = rng.normal(size=(2, 8, 3, 16)).astype(np.float32)
  labels = rng.integers(0, 16, (8, 3))
  where = np.ones((8, 3), bool)
  where[2:4] = False
  student[2:4] = np.nan
  loss, grad = path(student, teacher, labels, where, 2.0, 0.3)
  expected, right = paths.exact(student, teacher, labels, where, 2.0, 0.3)
  assert loss == pytest.approx(expected, rel=1e-6)
  np.testing.assert_allclose(grad, right, atol=1e-6 * np.abs(right).max())


@finite_path
def test_k03_nothing_left_at_all(path):
  logits = rows(paths.F1_STUDENT, (2, 3))
  loss, grad = path(
      logits, logits + 1, np.zeros((2, 3), np.int32), np.zeros((2, 3), bool)
  )
  assert loss == 0.0
  assert (grad == 0.0).all()


@finite_path
@pytest.mark.parametrize(  # K08: 1, 3 and 5 rows on 8 devices
    ("batch", "length"), [(1, 1), (3, 4), (5, 16)]
)
def test_k04_1_length_and_rows_do_not_matter(path, length, batch):
  shape = (batch, length)
  loss, _ = path(
      rows(paths.F1_STUDENT, shape), rows(paths.F1_TEACHER, shape),
      np.zeros(shape, np.int32), np.ones(shape, bool),
  )
  assert loss == pytest.approx(paths.FORWARD, abs=1e-6)


@finite_path
def test_k06_1_tokens_are_weighed_not_devices(path):
  """One F1 token, and seven of F2 (its roles swapped)."""
  student = rows(paths.F1_TEACHER, (8, 1))
  teacher = rows(paths.F1_STUDENT, (8, 1))
  student[0], teacher[0] = teacher[0].copy(), student[0].copy()
  labels, on = np.zeros((8, 1), np.int32), np.ones((8, 1), bool)
  loss, grad = path(student, teacher, labels, on)
  assert loss == pytest.approx(0.97387742, abs=1e-6)
  _, right = paths.exact(student, teacher, labels, on)
  np.testing.assert_allclose(grad, right, atol=1e-7)


@every_path
def test_k07_1_a_shard_that_is_masked_and_maxima_apart(path):
  """V = 16: eight shards of two columns, one of them all -inf."""
  rng = np.random.default_rng(2)
  student, teacher = rng.normal(size=(2, 2, 3, 16)).astype(np.float32)
  student[..., 3] += 6.0
  teacher[..., 12] += 6.0
  student[..., 6:8] = teacher[..., 6:8] = -INF
  labels = np.full((2, 3), 12)
  on = np.ones((2, 3), bool)
  loss, grad = path(student, teacher, labels, on, 2.0, 0.5)
  expected, right = paths.exact(student, teacher, labels, on, 2.0, 0.5)
  assert loss == pytest.approx(expected, rel=1e-5)
  np.testing.assert_allclose(grad, right, atol=1e-6 * np.abs(right).max())


@finite_path
def test_k13_1_temperature_squared(path):
  student = rows([-0.01, 0.01, 0.0, 0.02])
  teacher = rows([0.01, -0.02, 0.03, 0.005])
  labels, on = np.zeros((1, 1), np.int32), np.ones((1, 1), bool)
  for tau, norm in ((1.0, 0.01228), (10.0, 0.01229)):
    _, grad = path(student, teacher, labels, on, tau)
    assert np.linalg.norm(grad) == pytest.approx(norm, rel=1e-3)
  f1 = rows(paths.F1_STUDENT), rows(paths.F1_TEACHER), labels, on
  assert path(*f1, 2.0)[0] == pytest.approx(1.09122226, abs=1e-6)
  assert path(*f1, 4.0)[0] == pytest.approx(1.08800899, abs=2e-6)
  assert path(*f1, 2.0, 0.3)[0] == pytest.approx(1.41337798, abs=1e-6)


@finite_path
def test_k15_1_the_direction(path):
  labels, on = np.zeros((1, 1), np.int32), np.ones((1, 1), bool)
  s, t = rows(paths.F1_STUDENT), rows(paths.F1_TEACHER)
  assert path(s, t, labels, on)[0] == pytest.approx(paths.FORWARD, abs=1e-6)
  assert path(t, s, labels, on)[0] == pytest.approx(paths.REVERSE, abs=1e-6)


@pytest.mark.parametrize("module", [reference, chunked])
def test_k15_definitions(module):
  s, t = rows(paths.F1_STUDENT), rows(paths.F1_TEACHER)
  on = np.ones((1, 1), bool)
  value = lambda name, **kw: getattr(module, name)(
      s, t, where=on, **kw
  ).item()
  assert value("reverse_kl") == pytest.approx(paths.REVERSE, abs=1e-6)
  for beta, right in ((0.5, 0.21667252), (0.1, 0.08009341), (0.9, 0.08449270)):
    assert value("jsd", beta=beta) == pytest.approx(right, abs=1e-6)
  # Centred: teacher (5, -1, -4) / 3, student (-1, 2, -1) / 3.
  assert value("mse") == pytest.approx((36 + 9 + 9) / 27, abs=1e-6)


def test_k18_1_top_k():
  on = np.ones((1, 1), bool)
  s, t = rows([3.0, 0.0, 0.0]), rows([1.0, 0.0, 0.0])
  assert topk.tail_kl(s, t, k=1, where=on).item() == pytest.approx(
      0.39124447, abs=1e-6
  )
  s, t = rows(paths.F1_STUDENT), rows(paths.F1_TEACHER)
  assert topk.renormalised_kl(s, t, k=2, where=on).item() == pytest.approx(
      0.82872491, abs=1e-6
  )
  assert topk.tail_kl(s, t, k=2, where=on).item() == pytest.approx(
      paths.FORWARD, abs=1e-6
  )


@pytest.mark.parametrize("k", [
    pytest.param(1, marks=pytest.mark.slow), 3,
    pytest.param(7, marks=pytest.mark.slow), 8,
])
def test_k18_top_k_is_a_divergence(k):
  rng = np.random.default_rng(k)
  s, t = 3 * rng.normal(size=(2, 5, 8)).astype(np.float32)
  t[0, 3:] = -INF
  on = np.array([1, 1, 1, 1, 0], bool)
  s[4] = np.nan
  dense, d_dense = jax.value_and_grad(
      lambda s: jnp.sum(reference.forward_kl(s, t, temperature=2.0, where=on))
  )(s)
  value, grad = jax.value_and_grad(
      lambda s: jnp.sum(topk.tail_kl(s, t, k=k, temperature=2.0, where=on))
  )(s)
  assert 0 <= float(value) <= float(dense) * (1 + 1e-6)
  assert np.isfinite(grad).all() and (np.asarray(grad)[4] == 0).all()
  assert float(jnp.sum(topk.tail_kl(t, t, k=k, where=on))) == 0.0
  if k == 8:
    assert float(value) == pytest.approx(float(dense), rel=1e-6)
    np.testing.assert_allclose(grad, d_dense, atol=1e-6)


def test_k18_2_empty_slots_hit_no_token():
  rng = np.random.default_rng(5)
  s, t = rng.normal(size=(2, 3, 6)).astype(np.float32)
  t[:, 5] = -8.0
  on = np.ones(3, bool)
  log_p = jax.nn.log_softmax(t / 2.0)
  two, index = jax.lax.top_k(log_p, 2)
  filler = np.full((3, 2), -1)
  loss = lambda s, i, p: jnp.sum(
      topk.stored_tail_kl(s, i, p, temperature=2.0, where=on)
  )
  value, grad = jax.value_and_grad(loss)(s, index, two)
  padded, grad_padded = jax.value_and_grad(loss)(
      s, np.concatenate([index, filler], -1),
      np.concatenate([two, np.full((3, 2), np.nan, np.float32)], -1),
  )
  assert float(padded) == pytest.approx(float(value), rel=1e-6)
  np.testing.assert_allclose(grad_padded, grad, atol=1e-7)
  dense = jnp.sum(topk.tail_kl(s, t, k=2, temperature=2.0, where=on))
  assert float(value) == pytest.approx(float(dense), rel=1e-5)
  nothing = loss(s, np.full((3, 2), -1), np.full((3, 2), np.nan, np.float32))
  assert float(nothing) == 0.0


@pytest.mark.slow
def test_k20_1_blocks_save_memory():
  """Of loss and gradient together; eight devices are simulated, one is used."""
  shape = jax.ShapeDtypeStruct((2048, 32000), jnp.float32)
  labels = jax.ShapeDtypeStruct((2048,), jnp.int32)

  def temp(tokens):
    def loss(s, t, y):
      return chunked.distillation(
          s, t, y, temperature=2.0, alpha=0.5, weights=y >= 0,
          block_tokens=tokens,
      )[0]

    compiled = jax.jit(jax.value_and_grad(loss)).lower(shape, shape, labels)
    return compiled.compile().memory_analysis().temp_size_in_bytes

  assert temp(2048) > 4 * temp(128) > 16 * temp(None)


@every_path
def test_k21_1_bfloat16(path):
  rng = np.random.default_rng(3)
  teacher = 8 * rng.normal(size=(1, 8, 32000))
  student = teacher + 0.16 * rng.normal(size=teacher.shape)
  student, teacher = (jnp.asarray(x, jnp.bfloat16) for x in (student, teacher))
  labels, on = np.zeros((1, 8), np.int32), np.ones((1, 8), bool)
  _, grad = path(student, teacher, labels, on)
  _, right = paths.exact(student, teacher, labels, on)
  error = np.linalg.norm(grad - right) / np.linalg.norm(right)
  assert error < 0.01
