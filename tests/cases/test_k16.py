"""K16: mask and logits out of step, or positions that count the padding."""

from flax import nnx
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import toys
from tests.cases import common
from tunix_progdistill.families import causal_lm
from tunix_progdistill.kernels import reference

RNG = np.random.default_rng(16)
STUDENT, TEACHER = RNG.normal(size=(2, 6, 6)).astype(np.float32)
TARGETS = np.array([[0, 0, 0, 1, 1, 1]])


@pytest.mark.parametrize("path", common.WHOLE_BATCH_PATHS)
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_k16_1_targets_meet_the_logits_before_them(path, alpha):
  """Tokens 3..5 are targets: the logits at 2..4 are trained."""
  kwargs = {"labels_fn": causal_lm.next_token_labels, "alpha": alpha}
  inputs = common.batch([range(6)], loss_mask=TARGETS)
  ask = lambda teacher: common.PATHS[path](kwargs, STUDENT, teacher, inputs)
  loss, grad = ask(TEACHER)
  hard = -np.log(common.softmax(STUDENT))[[2, 3, 4], [3, 4, 5]].mean()
  soft = common.kl(TEACHER, STUDENT)[2:5].mean()
  assert loss == pytest.approx(alpha * soft + (1 - alpha) * hard, abs=1e-5)
  assert np.all(grad[[0, 1, 5]] == 0.0)
  assert np.all(np.abs(grad[2:5]).max(axis=1) > 1e-3)
  last = TEACHER.copy()
  last[5] = 9.0 * RNG.normal(size=6)
  other_loss, other_grad = ask(last)
  assert other_loss == loss
  np.testing.assert_array_equal(other_grad, grad)
  last[4] = 0.0
  assert ask(last)[0] != loss


@pytest.mark.parametrize("path", common.PATHS)
def test_k16_1_last_valid_position_has_no_target(path):
  """Without a loss mask, of n valid tokens n - 1 positions are trained."""
  kwargs = {"labels_fn": causal_lm.next_token_labels}
  inputs = common.batch([[0, 1, 2, 3, 4, 5]], [[1, 1, 1, 1, 0, 0]])
  loss, grad = common.PATHS[path](kwargs, STUDENT, TEACHER, inputs)
  assert loss == pytest.approx(common.kl(TEACHER, STUDENT)[:3].mean(), 1e-5)
  assert np.all(grad[3:] == 0.0)
  assert np.all(np.abs(grad[:3]).max(axis=1) > 1e-3)


def test_k16_1_first_token_of_a_left_padded_row_is_no_target():
  tokens = jnp.array([[0, 0, 7, 8, 9], [7, 8, 9, 0, 0]])
  mask = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
  assert causal_lm.next_token_labels(tokens, mask).tolist() == [
      [-1, -1, 8, 9, -1], [8, 9, -1, -1, -1]
  ]
  gap = jnp.array([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]])
  assert causal_lm.next_token_labels(tokens, gap).tolist()[0] == [
      0, -1, -1, 9, -1
  ]


# -- padding on either side, in a real transformer

LENGTHS = (3, 6, 11)
WIDTH = 12
ROWS = [RNG.integers(1, 64, n) for n in LENGTHS]


def layout(row, side, junk=0):
  """A row alone, or in a window of `WIDTH`."""
  if side == "unpadded":
    return common.batch([row])
  before = {"left": WIDTH - len(row), "right": 0, "middle": 1}[side]
  after = WIDTH - len(row) - before
  pad = lambda n: np.full(n, junk)
  return common.batch(
      [np.concatenate([pad(before), row, pad(after)])],
      [np.concatenate([np.zeros(before), np.ones(len(row)), np.zeros(after)])],
  )


def together(inputs):
  return {
      k: np.concatenate([i[k] for i in inputs])
      for k in ("input_tokens", "input_mask")
  }


def model(seed, num_layers):
  """Layers of a window of 4, shorter than a row; the sixth sees all."""
  made = toys.gemma3_model(
      seed=seed, sliding_window_size=4, num_layers=num_layers
  )
  table = made.embedder.input_embedding
  table.set_value(20.0 * table.get_value())  # logits that say something
  return made


def made(**kwargs):
  return common.strategy(
      labels_fn=causal_lm.next_token_labels, forward=causal_lm.forward,
      alpha=0.5, temperature=2.0, **kwargs,
  )


def test_k16_2_row_by_row():
  """The KD loss of each row alone, and of it padded in three ways."""
  student, teacher = model(1, 6), model(0, 6)
  forward = nnx.jit(causal_lm.forward)

  def losses(inputs):
    where = causal_lm.next_token_labels(**inputs) >= 0
    kl = reference.forward_kl(
        forward(student, **inputs), forward(teacher, **inputs),
        temperature=2.0, where=where,
    )
    return np.array(kl.sum(axis=1) / where.sum(axis=1))

  for row in (ROWS[0], ROWS[-1]):
    (alone,) = losses(layout(row, "unpadded"))
    assert alone > 0.05
    padded = together([layout(row, s, 5) for s in ("left", "right", "middle")])
    np.testing.assert_allclose(losses(padded), [alone] * 3, atol=1e-4)


def test_k16_2_all_rows_in_one_update():
  """Loss, gradient and logged values of a mixed batch, however padded."""
  names = ("loss", "grad_norm", "distill/soft_loss", "distill/valid_tokens")

  def train(sides):
    trainer = toys.trainer(
        student=model(1, 1), teacher=model(0, 1),
        optimizer=optax.sgd, progressive=common.one_stage(1),
        strategy_fn=made,
    )
    trainer.train([
        together([layout(r, s) for r, s in zip(ROWS, sides, strict=True)])
    ])
    return {n: float(toys.history(trainer, n)[0]) for n in names}

  right = train(("right", "right", "right"))
  assert right["distill/valid_tokens"] == sum(LENGTHS) - 3
  assert right["grad_norm"] > 0.01
  for sides in (("left", "left", "left"), ("left", "right", "left")):
    assert train(sides) == pytest.approx(right, rel=1e-4)
