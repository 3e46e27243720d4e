"""K30: the evaluation is a mean of batch means, or of something else."""

import numpy as np
import optax
import pytest
from tunix.sft import hooks

from tests import toys
from tests.cases import common

EXPECTED = 0.92690164
CE = (4 * 1.55144471 + 0.16984602) / 5
ROWS = np.array([0, 0, 0, 0, 1])  # F1 four times, F2 once


def split(size):
  return [
      common.batch(ROWS[i : i + size, None]) for i in range(0, 5, size)
  ]


UNEVEN = [
    common.batch([[0, 0, 0, 0]]),
    common.batch([[1, 0, 0, 1]], [[1, 0, 0, 0]]),
]
EMPTY = common.batch([[0, 1]], [[0, 0]])

SETS = {
    "tokens": UNEVEN,
    "with_empty": [EMPTY, UNEVEN[0], EMPTY, UNEVEN[1]],
    "size_1": split(1),
    "size_2": split(2),
    "size_5": split(5),
}


class Watch(hooks.TrainingHooks):
  """Records what the end of an evaluation is told."""

  def __init__(self):
    self.losses = []

  def on_train_start(self, train_ctx):
    pass

  on_train_end = on_train_start
  on_train_step_start = on_train_start
  on_eval_step_start = on_train_start

  def on_train_step_end(self, train_ctx, train_step, train_loss):
    pass

  def on_eval_step_end(self, train_ctx, eval_loss):
    self.losses.append(float(eval_loss))


def make(**kwargs):
  """At tau 4 in training: the evaluation is at tau 1 all the same."""
  return toys.trainer(
      student=toys.Table(common.STUDENT), teacher=toys.Table(common.TEACHER),
      optimizer=optax.sgd, progressive=common.one_stage(2, 0.0),
      strategy_fn=lambda: common.strategy(temperature=4.0, alpha=0.7),
      eval_every_n_steps=1, **kwargs,
  )


@pytest.mark.parametrize("name", SETS)
def test_k30_1_mean_over_tokens(name):
  trainer, watch = make(), Watch()
  trainer.with_training_hooks(watch)
  trainer.train([common.batch([[0]])] * 2, SETS[name])
  history = lambda n: toys.history(trainer, n, "eval")
  # Before the first update, and after each.
  for metric, expected in {
      "distill/kl_div_tau1": EXPECTED,
      "loss": CE,
      "perplexity": np.exp(CE),
      "distill/student_cross_entropy": CE,
      "distill/student_perplexity": np.exp(CE),
      "distill/teacher_cross_entropy": (4 * 0.16984602 + 1.55144471) / 5,
      "distill/top1_agreement": 0.0,
      "distill/valid_tokens": 5,
  }.items():
    np.testing.assert_allclose(
        history(metric), [expected] * 3, atol=1e-6, rtol=1e-6,
        err_msg=metric,
    )
  np.testing.assert_allclose(watch.losses, [CE] * 3, atol=1e-6)


def test_k30_1_correlation():
  teacher, student = np.array(toys.F1_TEACHER), np.array(toys.F1_STUDENT)
  r = np.corrcoef(teacher, student)[0, 1]
  trainer = make()
  trainer.train([common.batch([[0]])], UNEVEN)
  for name in ("distill/correlation", "distill/correlation_top32"):
    np.testing.assert_allclose(
        toys.history(trainer, name, "eval"), r, atol=1e-6
    )


def test_k30_1_evaluations_do_not_add_up():
  """Each evaluation starts anew; the training record stays untouched."""
  trainer = make(gradient_accumulation_steps=2)
  trainer.train([common.batch([[0]])] * 4, UNEVEN)
  assert len(toys.history(trainer, "loss", "eval")) == 3
  assert toys.history(trainer, "distill/valid_tokens", "eval").tolist() == [
      5, 5, 5
  ]
  assert toys.history(trainer, "distill/valid_tokens").tolist() == [2, 2]


def test_k30_1_evaluation_data_without_a_length():
  """An iterable that makes its batches anew each time will do."""

  class Made:

    def __iter__(self):
      return (batch for batch in UNEVEN)

  trainer = make()
  trainer.train([common.batch([[0]])] * 2, Made())
  assert toys.history(trainer, "distill/kl_div_tau1", "eval")[0] == (
      pytest.approx(EXPECTED, abs=1e-6)
  )


def test_k30_1_data_hooks():
  class Data(hooks.DataHooks):
    """Hands over training and evaluation data."""

    def __init__(self):
      self._train = iter([common.batch([[0]])] * 2)
      self._eval = iter(UNEVEN)

    def load_next_train_batch(self, train_ctx):
      return next(self._train, None)

    def load_next_eval_batch(self, train_ctx):
      return next(self._eval, None)

  trainer = make()
  trainer.with_data_hooks(Data())
  trainer.train([], [None])
  assert toys.history(trainer, "distill/kl_div_tau1", "eval")[0] == (
      pytest.approx(EXPECTED, abs=1e-6)
  )
