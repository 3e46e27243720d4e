"""K02: padding, prompt tokens and other ignored positions enter the loss."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import toys
from tests.cases import common
from tunix_progdistill.families import causal_lm

JUNK = np.array([[1, 0, 1, 1], [0, 1, 1, 0]])


def padded(inputs):
  """`inputs` with four masked columns of arbitrary ids."""
  return common.batch(
      np.concatenate([inputs["input_tokens"], JUNK], axis=1),
      np.concatenate([inputs["input_mask"], np.zeros_like(JUNK)], axis=1),
  )


BATCH = common.batch([[0, 1, 0], [0, 0, 1]])  # four F1, two F2


@pytest.mark.parametrize("path", common.PATHS)
@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, (4 * toys.F1_KL + 2 * toys.F2_KL) / 6),
        ({"alpha": 0.0}, (4 * 1.55144471 + 2 * 0.16984603) / 6),
        ({"distill_top_k": 2}, None),
    ],
    ids=["soft", "hard", "top_k"],
)
def test_k02_1_pad_columns_change_nothing(path, kwargs, expected):
  ask = lambda inputs: common.PATHS[path](
      kwargs, common.STUDENT, common.TEACHER, inputs
  )
  loss, grad = ask(BATCH)
  if expected is not None:
    assert loss == pytest.approx(expected, abs=1e-6)
  assert np.abs(grad).max() > 0.05
  loss_padded, grad_padded = ask(padded(BATCH))
  assert loss_padded == pytest.approx(loss, abs=1e-6)
  np.testing.assert_allclose(grad_padded, grad, atol=1e-6)


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_k02_1_pad_columns_change_no_metric(kind):
  strategy = common.strategy(temperature=2.0, alpha=0.3)
  student, teacher = toys.Table(common.STUDENT), toys.Table(common.TEACHER)

  def sums(inputs):
    logits = strategy.teacher_logits(teacher, inputs)
    if kind == "eval":
      return strategy.eval_terms(student, logits, inputs)
    return strategy.train_terms(
        student, logits, inputs, common.scalars(2.0, 0.3), jnp.float32(1.0),
        kl_div_tau1=True,
    )

  plain, with_padding = sums(BATCH), sums(padded(BATCH))
  assert float(plain.count) == float(with_padding.count) == 6
  assert len(plain.parts) == {"train": 4, "eval": 6}[kind]
  for name, value in plain.parts.items():
    assert abs(float(value)) > 1e-3 or "agreement" in name, name
    assert float(with_padding.parts[name]) == pytest.approx(
        float(value), abs=1e-5
    ), name


def test_k02_1_pad_columns_in_a_transformer():
  """Every logged value and every updated weight of a small Gemma 3."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 64, (2, 5))
  plain = common.batch(tokens)
  junk = rng.integers(0, 64, (2, 4))
  longer = common.batch(
      np.concatenate([tokens, junk], 1),
      np.concatenate([np.ones((2, 5)), np.zeros((2, 4))], 1),
  )
  names = ("loss", "grad_norm", "distill/kl_div", "distill/hard_loss")

  def run(inputs):
    student = toys.gemma3_model(seed=1, num_layers=1)
    trainer = toys.trainer(
        student=student, teacher=toys.gemma3_model(seed=0, num_layers=1),
        optimizer=optax.sgd, progressive=common.one_stage(1, 0.1),
        strategy_fn=lambda: common.strategy(
            labels_fn=causal_lm.next_token_labels, alpha=0.5,
            temperature=2.0, forward=causal_lm.forward,
        ),
    )
    trainer.train([common.as_training_input(inputs)])
    logged = {n: float(toys.history(trainer, n)[-1]) for n in names}
    assert toys.history(trainer, "distill/valid_tokens")[-1] == 8
    return logged, toys.parameters(student)

  logged, weights = run(plain)
  logged_padded, weights_padded = run(longer)
  assert logged["loss"] > 0.1
  assert logged_padded == pytest.approx(logged, abs=1e-5)
  for name, value in weights.items():
    np.testing.assert_allclose(
        weights_padded[name], value, atol=1e-6, err_msg=name
    )


# Six positions with logits of their own; the first three are a prompt.
RNG = np.random.default_rng(7)
STUDENT6, TEACHER6 = RNG.normal(size=(2, 6, 6)).astype(np.float32)
TEACHER6_OTHER = TEACHER6.copy()
TEACHER6_OTHER[:3] = 9.0 * RNG.normal(size=(3, 6))
COUNTS = np.array([0, 0, 0, 1, 1, 1])


def ids(input_tokens, input_mask, **_):
  del input_mask
  return jnp.where(jnp.asarray(COUNTS) > 0, input_tokens * 0 + 1, -1)


def rows(input_tokens, input_mask, **_):
  del input_mask
  one = jnp.zeros((*input_tokens.shape, 6)).at[..., 1].set(1.0)
  return one * COUNTS[:, None]


IGNORING = {
    "ids": {"labels_fn": ids},
    "rows": {"labels_fn": rows},
    "loss_mask_fn": {
        "labels_fn": lambda input_tokens, **_: jnp.ones_like(input_tokens),
        "loss_mask_fn": lambda loss_mask, **_: loss_mask,
    },
}


@pytest.mark.parametrize("how", IGNORING)
@pytest.mark.parametrize("path", common.PATHS)
def test_k02_2_prompt_has_no_gradient(path, how):
  if how == "loss_mask_fn" and path not in common.WHOLE_BATCH_PATHS:
    pytest.skip("this path of Tunix hands no loss mask to a strategy")
  more = {"loss_mask": COUNTS[None]} if how == "loss_mask_fn" else {}
  inputs = common.batch([range(6)], **more)
  alpha = 0.5
  kwargs = {**IGNORING[how], "alpha": alpha}
  ask = lambda teacher: common.PATHS[path](kwargs, STUDENT6, teacher, inputs)
  loss, grad = ask(TEACHER6)
  soft = common.kl(TEACHER6, STUDENT6)[3:].mean()
  hard = -np.log(common.softmax(STUDENT6))[3:, 1].mean()
  assert loss == pytest.approx(alpha * soft + (1 - alpha) * hard, abs=1e-5)
  assert np.all(grad[:3] == 0.0)
  assert np.all(np.abs(grad[3:]).max(axis=1) > 1e-3)
  loss_other, grad_other = ask(TEACHER6_OTHER)
  assert loss_other == loss
  np.testing.assert_array_equal(grad_other, grad)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("path", ["kernel", "accumulation", "stock_trainer"])
def test_k02_2_what_stands_at_ignored_positions_is_harmless(path, bad):
  teacher = TEACHER6.copy()
  teacher[:3] = bad
  loss, grad = common.PATHS[path](
      {"labels_fn": ids}, STUDENT6, teacher, common.batch([range(6)])
  )
  assert loss == pytest.approx(common.kl(TEACHER6, STUDENT6)[3:].mean(), 1e-5)
  assert np.all(grad[:3] == 0.0)
  assert np.all(np.isfinite(grad))


def test_k02_2_loss_mask_of_a_batch_is_not_dropped():
  """A dict batch names its targets; nobody wrote a gen_model_input_fn."""
  student = toys.Table(STUDENT6)
  trainer = toys.trainer(
      student=student, teacher=toys.Table(TEACHER6), optimizer=optax.sgd,
      progressive=common.one_stage(1),
      strategy_fn=lambda: common.strategy(
          labels_fn=causal_lm.next_token_labels
      ),
  )
  try:
    trainer.train([common.batch([range(6)], loss_mask=COUNTS[None])])
  except ValueError as e:  # to refuse it is fair, to ignore it is not
    assert "loss_mask" in str(e)
    return
  moved = STUDENT6 - toys.parameters(student)["rows"]
  # Tokens 3..5 are targets: the logits at 2..4 predict them.
  assert np.all(moved[[0, 1, 5]] == 0.0)
  assert toys.history(trainer, "distill/valid_tokens")[-1] == 3
