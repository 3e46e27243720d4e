"""K29: a record shows one micro-batch's value, or leaves values out."""

import numpy as np
import optax
import pytest

from tests import toys
from tests.cases import common
import tunix_progdistill as tpd

# A window of four: 1 F1 token, 3 F2 tokens, nothing, 2 F1 tokens.
WINDOW = [
    common.batch([[0, 0, 0]], [[1, 0, 0]]),
    common.batch([[1, 1, 1]]),
    common.batch([[0, 1, 0]], [[0, 0, 0]]),
    common.batch([[0, 0, 1]], [[1, 1, 0]]),
]
CE = {0: 1.55144471, 1: 0.16984602}  # at label 0


def trainer(updates=3, **kwargs):
  """A rate of 0 in the first stage keeps the losses known."""
  return toys.trainer(
      student=toys.Table(common.STUDENT), teacher=toys.Table(common.TEACHER),
      optimizer=optax.sgd,
      progressive=tpd.StagePlan(
          stages=(
              tpd.Stage(updates=updates - 1, learning_rate=0.0, alpha=0.25),
              tpd.Stage(updates=1, learning_rate=0.125, alpha=0.75),
          ),
          temperature=tpd.anneal(3.0, 1.0, "linear"),
      ),
      strategy_fn=common.strategy, **kwargs,
  )


def test_k29_1_one_record_per_update():
  run = trainer(gradient_accumulation_steps=4)
  run.train(WINDOW * 3)
  history = lambda name: toys.history(run, name)
  expected = {
      "distill/temperature": [3.0, 2.0, 1.0],
      "distill/alpha": [0.25, 0.25, 0.75],
      "learning_rate": [0.0, 0.0, 0.125],
      "progressive/stage": [0, 0, 1],
      "progressive/trainable_parameters": [6, 6, 6],
      "distill/valid_tokens": [6, 6, 6],
      "distill/skipped_micro_batches": [0, 0, 0],
      "distill/hard_loss": [(3 * CE[0] + 3 * CE[1]) / 6] * 3,
      "distill/kl_div": [
          np.mean([
              common.kl(common.TEACHER[i], common.STUDENT[i], tau)
              for i in (0, 0, 0, 1, 1, 1)
          ])
          for tau in (3.0, 2.0, 1.0)
      ],
  }
  expected["distill/soft_loss"] = [
      k * t * t
      for k, t in zip(expected["distill/kl_div"], (3, 2, 1), strict=True)
  ]
  for name, values in expected.items():
    assert len(history(name)) == 3, name
    np.testing.assert_allclose(
        history(name), values, atol=1e-6, err_msg=name
    )
  alpha = history("distill/alpha")
  total = (
      alpha * history("distill/soft_loss")
      + (1 - alpha) * history("distill/hard_loss")
  )
  np.testing.assert_allclose(history("loss"), total, atol=1e-6)
  np.testing.assert_allclose(history("perplexity"), np.exp(total), rtol=1e-5)
  assert len(history("grad_norm")) == 3
  assert np.all(history("grad_norm") > 0.01)
  assert np.all(history("perf/tokens_per_sec") > 0)


def test_k29_1_accumulated_record_equals_that_of_one_batch():
  names = (
      "loss", "grad_norm", "distill/kl_div", "distill/hard_loss",
      "distill/valid_tokens", "learning_rate",
  )
  merged = {
      k: np.concatenate([b[k] for b in WINDOW])
      for k in ("input_tokens", "input_mask")
  }
  apart, whole = trainer(gradient_accumulation_steps=4), trainer()
  apart.train(WINDOW * 3)
  whole.train([merged] * 3)
  for name in names:
    values = toys.history(whole, name)
    assert len(values) == 3
    np.testing.assert_allclose(
        toys.history(apart, name), values, atol=1e-6, err_msg=name
    )


@pytest.mark.parametrize("accumulation", [1, 4])
def test_k29_1_skipped_micro_batch_is_counted_not_averaged(accumulation):
  """A NaN does not hide in a mean, nor spoil it."""
  run = toys.trainer(
      student=toys.Table([*common.STUDENT, [np.nan] * 3]),
      teacher=toys.Table([*common.TEACHER, [0.0] * 3]),
      optimizer=optax.sgd, progressive=common.one_stage(2, 0.0),
      strategy_fn=common.strategy, gradient_accumulation_steps=accumulation,
  )
  good, bad = common.batch([[0]]), common.batch([[2]])
  run.train([bad] + [good] * (2 * accumulation - 1))
  skipped = toys.history(run, "distill/skipped_micro_batches")
  assert skipped.tolist() == [1, 0]
  loss = toys.history(run, "loss")
  assert loss[1] == pytest.approx(0.91298290, abs=1e-6)
  tokens = toys.history(run, "distill/valid_tokens")
  assert tokens.tolist() == [accumulation - 1, accumulation]
  if accumulation == 1:
    assert np.isnan(loss[0])
  else:
    assert loss[0] == pytest.approx(0.91298290, abs=1e-6)


def test_k29_1_hooks_see_the_windows_loss():
  from tunix.sft import hooks  # pylint: disable=g-import-not-at-top

  seen = []

  class Watch(hooks.TrainingHooks):
    """Records what the end of a step is told."""

    def on_train_start(self, train_ctx):
      pass

    on_train_end = on_train_start
    on_train_step_start = on_train_start
    on_eval_step_start = on_train_start

    def on_train_step_end(self, train_ctx, train_step, train_loss):
      seen.append((int(train_step), float(train_loss)))

    def on_eval_step_end(self, train_ctx, eval_loss):
      pass

  run = trainer(gradient_accumulation_steps=4)
  run.with_training_hooks(Watch())
  run.train(WINDOW * 3)
  losses = toys.history(run, "loss")
  assert [s for s, _ in seen] == [1, 2, 3]
  np.testing.assert_allclose([x for _, x in seen], losses, atol=1e-6)
