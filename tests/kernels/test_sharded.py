"""Eight simulated devices, batch and vocabulary spread, give what one gives."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import reference
from tunix_progdistill.kernels import sharded

_P = jax.sharding.PartitionSpec
_MESHES = ((1, 8), (2, 4), (8, 1))
_TAU, _ALPHA = 2.5, 0.7


def _mesh(shape):
  return jax.make_mesh(
      shape, ("batch", "vocab"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )


def _data(rows, vocabulary, dtype, dense, seed=0):
  """Logits, labels and weights; NaN in every array where the weight is 0."""
  rng = np.random.default_rng(seed)
  n = (rows, 3)
  weights = rng.choice([0.0, 0.5, 1.0, 2.0], n)
  weights[0] = [0.0, 1.0, 0.0]  # the last row has more, whatever was drawn
  weights[-1, 1:] = [2.0, 0.5]
  s, t = (3.0 * rng.normal(size=(*n, vocabulary)) for _ in range(2))
  s[weights == 0], t[weights == 0] = np.nan, np.nan
  if dense:
    labels = rng.dirichlet(np.full(vocabulary, 0.1), n)
    labels[..., : vocabulary // 3] = 0.0
    labels[weights == 0] = np.nan
    labels = jnp.asarray(labels, jnp.float32)
  else:
    labels = np.where(weights == 0, -1, rng.integers(0, vocabulary, n))
    labels[-1, -1] = vocabulary - 1
    labels = jnp.asarray(labels)
  return (
      jnp.asarray(s, dtype), jnp.asarray(t, dtype), labels,
      jnp.asarray(weights, jnp.float32),
  )


def _plain(student, teacher, labels, weights):
  """The same by `reference` and autodiff, in float32."""
  where = weights != 0
  kl = functools.partial(reference.forward_kl, where=where)
  values = {
      "kl": kl(student, teacher, temperature=_TAU),
      "ce": reference.cross_entropy(student, labels, where=where),
      "kl_div_tau1": kl(student, teacher),
  }
  loss = _ALPHA * _TAU**2 * values["kl"] + (1 - _ALPHA) * values["ce"]
  return reduce.masked_sum(weights * loss, where), values


def _spread(student, teacher, labels, weights, *, mesh, axes, **kwargs):
  return sharded.distillation(
      student, teacher, labels, mesh=mesh, batch_axis=axes[0],
      vocab_axis=axes[1], temperature=_TAU, alpha=_ALPHA, weights=weights,
      kl_div_tau1=True, **kwargs,
  )


def _value_and_grad(function):
  return jax.jit(jax.value_and_grad(function, has_aux=True))


def _close(actual, expected, bound=1e-6):
  actual, expected = np.asarray(actual, np.float64), np.asarray(expected)
  np.testing.assert_allclose(
      actual, expected, rtol=0, atol=bound * np.abs(expected).max()
  )


def _close_gradient(actual, expected):
  """To 1e-6 of the largest entry, and bfloat16 to its last digit."""
  if actual.dtype == jnp.float32:
    _close(actual, expected)
  else:
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), expected, rtol=2**-8,
        atol=1e-6 * np.abs(expected).max(),
    )


_BOTH = ("batch", "vocab")
_CASES = [
    # rows, V, dtype, rows as labels
    *[(m, _BOTH, 5, 1003, jnp.float32, False) for m in _MESHES],
    *[(m, _BOTH, 8, 300, jnp.bfloat16, True) for m in _MESHES],
    ((2, 4), _BOTH, 3, 300, jnp.float32, True),
    ((8, 1), _BOTH, 1, 300, jnp.bfloat16, False),
    ((2, 4), (None, "vocab"), 3, 300, jnp.float32, False),
    ((2, 4), ("batch", None), 3, 300, jnp.float32, False),
]


@pytest.mark.parametrize(
    "shape, axes, rows, vocabulary, dtype, dense", _CASES
)
def test_distillation_equals_one_device(
    shape, axes, rows, vocabulary, dtype, dense
):
  data = _data(rows, vocabulary, dtype, dense)
  (total, values), gradient = _value_and_grad(
      functools.partial(_spread, mesh=_mesh(shape), axes=axes, block_tokens=4)
  )(*data)
  (expected, others), slope = _value_and_grad(_plain)(
      data[0].astype(jnp.float32), *data[1:]
  )
  np.testing.assert_allclose(total, expected, rtol=1e-6)
  assert set(values) == set(others)
  for name, value in values.items():
    assert value.shape == data[3].shape
    _close(value, others[name])
  assert gradient.dtype == dtype and gradient.shape == data[0].shape
  _close_gradient(gradient, slope)
  assert np.abs(np.asarray(slope)).max() > 0.1
  assert not np.asarray(gradient)[np.asarray(data[3]) == 0].any()


@pytest.mark.parametrize("shape", _MESHES)
def test_forward_kl_equals_one_device(shape):
  student, teacher, _, weights = _data(5, 300, jnp.float32, False)
  where, pull = weights != 0, jnp.cos(jnp.arange(15.0)).reshape(5, 3)

  def pulled(function, s, **kwargs):
    values = function(s, teacher, temperature=_TAU, where=where, **kwargs)
    return jnp.sum(pull * values), values

  (_, values), gradient = _value_and_grad(functools.partial(
      pulled, sharded.forward_kl, mesh=_mesh(shape), batch_axis="batch",
      vocab_axis="vocab", block_tokens=2,
  ))(student)
  (_, others), slope = _value_and_grad(
      functools.partial(pulled, reference.forward_kl)
  )(student)
  _close(values, others)
  _close(gradient, slope)


def test_forward_kl_of_equal_logits_is_zero_and_never_negative():
  student, _, _, weights = _data(8, 300, jnp.float32, False)
  student = jnp.where(jnp.isnan(student), 0.0, student)
  kl = jax.jit(functools.partial(
      sharded.forward_kl, mesh=_mesh((2, 4)), batch_axis="batch",
      vocab_axis="vocab", where=weights != 0,
  ))
  assert not np.asarray(kl(student, student)).any()
  noise = 1e-5 * jnp.sin(jnp.arange(student.size).reshape(student.shape))
  near = np.asarray(kl(student + noise, student))
  assert (near >= 0).all() and near.max() > 0


def test_what_is_broken_shows_in_its_token_only():
  """NaN in one column, -inf in a column of both, an id that is no id."""
  data = _data(8, 300, jnp.float32, False)
  s, t, y, w = (np.array(x) for x in data)
  w[:] = 1.0
  s[np.isnan(s)], t[np.isnan(t)] = 0.0, 0.0
  y[:] = 7
  t[2, 1, 299] = np.nan
  s[4, 0, 100:200], t[4, 0, 100:200] = -np.inf, -np.inf
  y[5, 2], y[6, 2] = 300, -1
  (_, values), _ = _value_and_grad(functools.partial(
      _spread, mesh=_mesh((2, 4)), axes=_BOTH
  ))(s, t, y, w)
  broken = np.zeros((8, 3), bool)
  broken[2, 1] = True
  np.testing.assert_array_equal(~np.isfinite(values["kl"]), broken)
  broken[2, 1], broken[5, 2], broken[6, 2] = False, True, True
  np.testing.assert_array_equal(~np.isfinite(values["ce"]), broken)


# -- what was compiled


def _collectives(text):
  """(operation, shape) of each collective of a compiled module."""
  names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
  return re.findall(rf" = (\S+) ({names})(?:-start)?\(", text)


def _largest(text):
  """Entries of the largest array that is named."""
  shapes = re.findall(r"\w+\[([\d,]+)\]", text)
  return max(math.prod(map(int, s.split(","))) for s in shapes)


def _compiled(function, mesh, n, vocabulary):
  put = lambda shape, dtype, *spec: jax.ShapeDtypeStruct(
      shape, dtype, sharding=jax.NamedSharding(mesh, _P(*spec))
  )
  wide = put((*n, vocabulary), jnp.float32, "batch", None, "vocab")
  labels, weights = (put(n, d, "batch") for d in (jnp.int32, jnp.float32))
  return jax.jit(function).lower(wide, wide, labels, weights).compile()


@pytest.mark.parametrize("shape", _MESHES[:2])
def test_three_small_reductions_a_block_and_nothing_gathered(shape):
  """Trap 13: a vocabulary that is spread stays where it is."""
  n, vocabulary, tokens = (16, 32), 4096, 8
  compiled = _compiled(
      jax.value_and_grad(
          functools.partial(
              _spread, mesh=_mesh(shape), axes=_BOTH, block_tokens=tokens
          ),
          has_aux=True,
      ),
      _mesh(shape), n, vocabulary,
  )
  text = compiled.as_text()
  found = _collectives(text)
  assert {name for _, name in found} == {"all-reduce"}
  shapes = [re.sub(r"\{.*", "", s) for s, _ in found]
  blocks = [s for s in shapes if s != "f32[]"]
  assert 1 <= len(blocks) <= 3 and len(shapes) <= len(blocks) + 1
  assert all(re.fullmatch(rf"f32\[\d,1,{tokens}\]", s) for s in blocks)
  part = math.prod(n) * vocabulary // 8
  assert _largest(text) == part  # logits and gradient, as they are spread
  # Some blocks at a time; of all tokens only the values.
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * part // 4


def test_the_search_finds_a_gather():
  mesh = _mesh((1, 8))

  def gathering(s, t, labels, weights):
    del t, labels, weights
    whole = lambda x: jax.lax.all_gather(x, "vocab", axis=2, tiled=True)
    spec = _P("batch", None, "vocab")
    s = jax.shard_map(
        whole, mesh=mesh, in_specs=spec, out_specs=_P("batch"), check_vma=False
    )(s)
    return jnp.sum(jnp.sort(s, axis=-1)[..., 3])

  text = _compiled(gathering, mesh, (4, 4), 64).as_text()
  assert "all-gather" in {name for _, name in _collectives(text)}
  assert _largest(text) >= 4 * 4 * 64


@pytest.mark.parametrize("axes, kind, field", [
    (("rows", "vocab"), "Auto", "batch_axis"),
    (("batch", "batch"), "Auto", "vocab_axis"),
    (("batch", "vocab"), "Explicit", "mesh"),
])
def test_axes_must_fit_the_mesh(axes, kind, field):
  kind = jax.sharding.AxisType[kind]
  mesh = jax.make_mesh((2, 4), _BOTH, axis_types=(kind,) * 2)
  with pytest.raises(ValueError, match=f"^{field} must"):
    sharded.forward_kl(
        jnp.zeros((2, 4)), jnp.zeros((2, 4)), mesh=mesh, batch_axis=axes[0],
        vocab_axis=axes[1], where=jnp.ones(2, bool),
    )
