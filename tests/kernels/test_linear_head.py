"""Heads fused with the loss give what `reference` gives on their logits."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_progdistill.kernels import heads
from tunix_progdistill.kernels import linear_head
from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import reference

_WIDTHS = (24, 40)
_TILE = 128
modes = pytest.mark.parametrize("tile", [None, _TILE], ids=["whole", "tiles"])


def _data(tokens, vocabulary, layouts=("vd", "vd"), dtype=jnp.float32, seed=0):
  """Hidden states, heads, labels and weights; junk where the weight is 0."""
  rng = np.random.default_rng(seed)
  weights = rng.choice([0.0, 0.5, 1.0, 2.0], tokens)
  weights[-1] = 1.5
  labels = np.where(weights == 0, -7, rng.integers(0, vocabulary, tokens))
  hidden, heads = [], []
  for width, layout in zip(_WIDTHS, layouts, strict=True):
    h = rng.normal(size=(tokens, width))
    h[weights == 0] = np.nan
    head = 3.0 / width**0.5 * rng.normal(size=(vocabulary, width))
    hidden.append(jnp.asarray(h, dtype))
    heads.append(jnp.asarray(head if layout == "vd" else head.T, dtype))
  return (
      *hidden, *heads, jnp.asarray(labels), jnp.asarray(weights, jnp.float32)
  )


def _logits(hidden, head, layout, softcap, vocabulary, where):
  hidden, head = reduce.blank(hidden, where), head.astype(jnp.float32)
  x = hidden @ (head.T if layout == "vd" else head)
  x = x if softcap is None else softcap * jnp.tanh(x / softcap)
  return jnp.where(jnp.arange(x.shape[-1]) < vocabulary, x, -jnp.inf)


def _plain(
    student_hidden, teacher_hidden, student_head, teacher_head, labels, *,
    temperature, alpha, weights, student_layout="vd", teacher_layout="vd",
    student_softcap=None, teacher_softcap=None, vocabulary=None,
):
  """The same by `reference` and autodiff on logits, in float32."""
  where = weights != 0
  size = student_head.shape[student_layout.index("v")]
  s, t = (
      _logits(*x, vocabulary or size, where) for x in (
          (student_hidden, student_head, student_layout, student_softcap),
          (teacher_hidden, teacher_head, teacher_layout, teacher_softcap),
      )
  )
  kl = functools.partial(reference.forward_kl, s, t, where=where)
  values = {
      "kl": kl(temperature=temperature),
      "ce": reference.cross_entropy(s, labels, where=where),
      "kl_div_tau1": kl(),
  }
  loss = alpha * temperature**2 * values["kl"] + (1 - alpha) * values["ce"]
  return reduce.masked_sum(weights * loss, where), values


def _graded(function, data, **options):
  """Total, values, d hidden and d head."""
  tau, alpha = options.pop("temperature", 2.5), options.pop("alpha", 0.7)
  step = _step(function, tuple(options.items()))
  (total, values), grads = step(*data, jnp.float32(tau), jnp.float32(alpha))
  return total, values, *grads


@functools.cache
def _step(function, options):

  def loss(h, g, head, teacher_head, labels, weights, tau, alpha):
    return function(
        h, g, head, teacher_head, labels, weights=weights, temperature=tau,
        alpha=alpha, **dict(options),
    )

  return jax.jit(jax.value_and_grad(loss, (0, 2), has_aux=True))


def _close(actual, expected, bound=1e-5):
  assert actual.shape == expected.shape
  actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
  largest = np.abs(expected).max(initial=0.0)
  np.testing.assert_allclose(actual, expected, rtol=0, atol=bound * largest)


def _compare(data, *, tile=None, block=8, bound=1e-5, **options):
  actual = _graded(
      linear_head.distillation, data, vocabulary_tile=tile, block_tokens=block,
      kl_div_tau1=True, **options,
  )
  expected = _graded(_plain, data, **options)
  jax.tree.map(functools.partial(_close, bound=bound), actual, expected)
  off = np.asarray(data[-1]) == 0
  assert (np.asarray(actual[2], np.float32)[off] == 0).all()
  return actual


@pytest.mark.parametrize(
    ("tile", "layouts"),
    [(None, ("vd", "vd")), (None, ("dv", "vd")), (None, ("vd", "dv")),
     (_TILE, ("vd", "dv")), (_TILE, ("dv", "vd"))],
)
def test_layouts_and_unequal_widths(tile, layouts):
  _compare(
      _data(21, 300, layouts), tile=tile, student_layout=layouts[0],
      teacher_layout=layouts[1],
  )


@pytest.mark.parametrize(
    ("tile", "caps"),
    [(None, (3.0, None)), (None, (None, 2.0)), (None, (5.0, 3.0)),
     (_TILE, (3.0, None)), (_TILE, (5.0, 3.0))],
)
def test_softcap(tile, caps):
  options = {"student_softcap": caps[0], "teacher_softcap": caps[1]}
  capped = _compare(_data(13, 300), tile=tile, **options)
  plain = _graded(_plain, _data(13, 300))
  assert abs(float(capped[0]) - float(plain[0])) > 0.1


@pytest.mark.parametrize(
    ("tile", "vocabulary"),
    [(None, 1), (None, 1003), (_TILE, 127), (_TILE, 128), (_TILE, 129),
     (_TILE, 1003)],
)
def test_awkward_vocabulary(tile, vocabulary):
  _compare(_data(11, vocabulary), tile=tile)


@pytest.mark.parametrize(
    ("tile", "tokens"),
    [(None, 1), (None, 7), (None, 8), (None, 9), (None, 13), (_TILE, 5),
     (_TILE, 9)],
)
def test_awkward_number_of_tokens(tile, tokens):
  """A token that stands in two blocks counts once in d head."""
  _compare(_data(tokens, 300), tile=tile)


def test_rows_of_the_heads_gradient_that_stand_in_two_pieces(monkeypatch):
  for rows in (64, 299):
    monkeypatch.setattr(heads, "_HEAD_ROWS", rows)
    _step.cache_clear()
    _compare(_data(21, 300))
  _step.cache_clear()


@modes
def test_no_tokens(tile):
  data = _data(3, 300)
  empty = [x[:0] for x in (data[0], data[1])], [x[:0] for x in data[4:]]
  total, values, d_hidden, d_head = _graded(
      linear_head.distillation, (*empty[0], *data[2:4], *empty[1]),
      vocabulary_tile=tile,
  )
  assert total == 0 and values["kl"].shape == (0,)
  assert d_hidden.shape == (0, 24) and not d_head.any()


@modes
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("tau", [0.5, 1.0, 10.0])
def test_temperature_and_alpha(tile, alpha, tau):
  _compare(_data(13, 300), tile=tile, temperature=tau, alpha=alpha)


@pytest.mark.parametrize(
    ("tile", "vocabulary"),
    [(None, 1), (None, 299), (_TILE, 127), (_TILE, 128), (_TILE, 129)],
)
def test_padded_vocabulary(tile, vocabulary):
  data = list(_data(13, 300))
  data[4] = jnp.where(data[4] < 0, data[4], data[4] % vocabulary)
  *_, d_head = _compare(data, tile=tile, vocabulary=vocabulary)
  assert (np.asarray(d_head)[vocabulary:] == 0).all()


@modes
def test_padding_is_not_read(tile):
  """What stands in the heads' padding makes no difference where it is finite.

  A cap takes its slope there to 0, which must not meet an infinity.
  """
  options = {"student_softcap": 3.0, "vocabulary": 200, "tile": tile}
  data = list(_data(13, 300))
  data[4] = jnp.where(data[4] < 0, data[4], data[4] % 200)
  expected = _compare(data, **options)
  data[2], data[3] = (x.at[200:].set(1e4) for x in data[2:4])
  jax.tree.map(_close, _compare(data, **options), expected)


@modes
def test_all_tokens_masked(tile):
  data = list(_data(13, 300))
  data[0], data[1] = (jnp.full_like(x, jnp.nan) for x in data[:2])
  data[-1] = jnp.zeros_like(data[-1])
  out = _graded(linear_head.distillation, data, vocabulary_tile=tile)
  assert all(not np.asarray(x).any() for x in jax.tree.leaves(out))


@modes
def test_leading_axes_and_bool_weights(tile):
  data = _data(12, 300)
  flat = (*data[:-1], data[-1] > 0)
  shaped = [
      x.reshape(3, 4, *x.shape[1:]) if i not in (2, 3) else x
      for i, x in enumerate(flat)
  ]
  graded = functools.partial(
      _graded, linear_head.distillation, block_tokens=5, vocabulary_tile=tile
  )
  actual, expected = graded(shaped), graded(flat)
  jax.tree.map(
      lambda a, b: _close(a.reshape(b.shape), b, 1e-6), actual, expected
  )
  assert actual[1]["kl"].shape == (3, 4) and actual[2].shape == (3, 4, 24)


@modes
@pytest.mark.parametrize("mixed", [False, True])
def test_bfloat16(tile, mixed):
  data = list(_data(21, 300, dtype=jnp.bfloat16))
  if mixed:
    data[2], data[1] = (x.astype(jnp.float32) for x in (data[2], data[1]))
  out = _compare(data, tile=tile, bound=1e-2, student_softcap=8.0)
  assert out[0].dtype == jnp.float32
  assert [x.dtype for x in out[2:]] == [data[0].dtype, data[2].dtype]


def test_tiles_are_as_the_whole():
  """However block and tile lie."""
  data = _data(29, 300)
  graded = functools.partial(
      _graded, linear_head.distillation, data, student_softcap=4.0,
      kl_div_tau1=True,
  )
  expected = graded(block_tokens=29)
  for block, tile in ((4, 7), (64, 299), (28, 1000)):
    actual = graded(block_tokens=block, vocabulary_tile=tile)
    jax.tree.map(_close, actual, expected)


@modes
def test_gradients_of_a_tied_head_add_up(tile):
  hidden, teacher, table, teacher_head, labels, weights = _data(13, 300)
  where, ids = weights != 0, jnp.arange(13) * 17 % 300

  def loss(table, distillation, **options):
    # The model takes its hidden states from the table it ends with.
    mixed = jnp.where(where[:, None], hidden, 0.0) * jnp.tanh(table[ids])
    return distillation(
        mixed, teacher, table, teacher_head, labels, temperature=2.0,
        alpha=0.5, weights=weights / jnp.sum(weights), **options,
    )[0]

  ours = functools.partial(
      loss, distillation=linear_head.distillation, block_tokens=8,
      vocabulary_tile=tile,
  )
  actual = jax.jit(jax.grad(ours))(table)
  expected = jax.grad(functools.partial(loss, distillation=_plain))(table)
  _close(actual, expected)
  frozen = jax.jit(jax.grad(functools.partial(ours, frozen_head=True)))(table)
  rest = np.setdiff1d(np.arange(300), ids)
  assert np.abs(expected[rest]).max() > 1e-3
  assert not np.asarray(frozen)[rest].any() and np.asarray(frozen).any()


@modes
def test_only_the_student_is_differentiated(tile):
  *arrays, weights = _data(5, 300)
  arrays[:2] = [jnp.nan_to_num(x) for x in arrays[:2]]

  def loss(teacher, teacher_head, weights, tau, alpha):
    return linear_head.distillation(
        arrays[0], teacher, arrays[2], teacher_head, arrays[4],
        temperature=tau, alpha=alpha, weights=weights, vocabulary_tile=tile,
    )[0]

  grads = jax.grad(loss, range(5))(arrays[1], arrays[3], weights, 2.0, 0.5)
  assert all(not np.asarray(x).any() for x in grads)
  values = lambda h: linear_head.distillation(
      h, *arrays[1:], temperature=2.0, alpha=0.5, weights=weights,
      vocabulary_tile=tile,
  )[1]["kl"].sum()
  assert not np.asarray(jax.grad(values)(arrays[0])).any()


@modes
def test_an_unknown_label_shows(tile):
  data = list(_data(5, 300))
  data[4] = data[4].at[-1].set(300)
  _, values, *_ = _graded(linear_head.distillation, data, vocabulary_tile=tile)
  assert np.isnan(values["ce"][-1])
  assert np.isfinite(values["ce"][:-1]).all()


# -- what XLA makes of it


def _compiled(
    tokens, vocabulary, widths, *, by=(0, 1), dtype=jnp.float32, **options
):
  """The step, without a number in it."""

  def loss(hidden, head, teacher, teacher_head, labels, weights, tau, alpha):
    return linear_head.distillation(
        hidden, teacher, head, teacher_head, labels, temperature=tau,
        alpha=alpha, weights=weights / jnp.sum(weights), **options,
    )[0]

  of = jax.ShapeDtypeStruct
  pairs = [of((n, d), dtype) for d in widths for n in (tokens, vocabulary)]
  return jax.jit(jax.value_and_grad(loss, by)).lower(
      *pairs, of((tokens,), jnp.int32), of((tokens,), jnp.float32),
      of((), jnp.float32), of((), jnp.float32),
  ).compile()


def _sizes(text):
  """The number of entries of every array in the HLO."""
  return {
      int(np.prod([int(n) for n in dims.split(",")]))
      for dims in re.findall(r"\b[a-z]+[0-9]+\[([0-9,]+)\]", text)
  }


@modes
def test_no_logits(tile):
  """Nothing has as many entries as [N, V]; a block or a tile is there."""
  sizes = _sizes(_compiled(
      64, 1009, (8, 12), block_tokens=16, vocabulary_tile=tile
  ).as_text())
  assert max(sizes) < 64 * 1009
  assert 16 * (tile or 1009) in sizes
  if tile:
    assert max(sizes - {1009 * 8, 1009 * 12}) < 16 * 1009


@modes
def test_products_of_bfloat16_are_summed_in_float32(tile):
  """Trap 29: the fast product, and the exact one."""
  bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  text = jax.jit(jax.grad(
      lambda *a: linear_head.distillation(
          *a, jnp.zeros(16, jnp.int32), temperature=2.0, alpha=0.5,
          weights=jnp.ones(16), vocabulary_tile=tile, block_tokens=8,
      )[0], (0, 2),
  )).lower(bf16(16, 8), bf16(16, 12), bf16(300, 8), bf16(300, 12)).as_text()
  products = re.findall(r"dot_general.*: \((.*), (.*)\) -> (.*)", text)
  assert len(products) >= 4
  for left, right, out in products:
    assert "bf16" in left and "bf16" in right and "xf32>" in out


@modes
def test_a_frozen_head_has_no_gradient(tile):
  """[V, D] is there as the parameter and what a loop is given of it only."""
  made = lambda **options: {
      line.strip().split(" = ")[1].split("(")[0].split()[-1]
      for line in _compiled(
          64, 1009, (8, 12), by=0, block_tokens=16, vocabulary_tile=tile,
          **options,
      ).as_text().splitlines()
      if re.search(r" = f32\[1009,8\]", line)
  }
  assert made(frozen_head=True) <= {"parameter", "get-tuple-element"}
  # Nor has one that nothing is differentiated by.
  assert made() <= {"parameter", "get-tuple-element"}
  zero = jax.grad(
      lambda head: linear_head.distillation(
          *_data(5, 300)[:2], head, *_data(5, 300)[3:5], temperature=1.0,
          alpha=0.5, weights=_data(5, 300)[5], frozen_head=True,
          vocabulary_tile=tile,
      )[0]
  )(_data(5, 300)[2])
  assert not np.asarray(zero).any()


@pytest.mark.parametrize(
    ("dtype", "tile", "bound"),
    [("float32", None, 0.5e9), ("bfloat16", None, 1.0e9),
     ("float32", 8192, 0.1e9)],
)
def test_memory_of_a_step_of_gemma(dtype, tile, bound):
  """36.9 GB for the logits of both models and what Tunix makes of them."""
  memory = _compiled(
      4096, 262_144, (640, 1152), dtype=jnp.dtype(dtype), vocabulary_tile=tile
  ).memory_analysis()
  assert memory.temp_size_in_bytes < min(bound, 0.03 * 36.9e9)


# -- bad arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"student_layout": "vx"}, "student_layout must be 'vd' or 'dv'"),
        ({"teacher_layout": "dv"}, "teacher_head must be .* D = 40"),
        ({"student_softcap": 0.0}, "student_softcap must be positive"),
        ({"vocabulary": 301}, r"vocabulary must lie in 1\.\.300, got 301"),
        ({"vocabulary": 0}, r"vocabulary must lie in 1\.\.300, got 0"),
        ({"block_tokens": 0}, "block_tokens must be at least 1"),
        ({"vocabulary_tile": 0}, "vocabulary_tile must be at least 1"),
    ],
)
def test_bad_options(options, message):
  *arrays, weights = _data(3, 300)
  with pytest.raises(ValueError, match=message):
    linear_head.distillation(
        *arrays, temperature=1.0, alpha=0.5, weights=weights, **options
    )


def test_vocabularies_must_be_the_same():
  *arrays, weights = _data(3, 300)
  arrays[3] = arrays[3][:299]
  with pytest.raises(ValueError, match="teacher_head must have the student's"):
    linear_head.distillation(
        *arrays, temperature=1.0, alpha=0.5, weights=weights
    )
