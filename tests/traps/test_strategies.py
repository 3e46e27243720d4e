"""Strategies that are not ours, and runs that do nothing."""

import logging as std_logging

import numpy as np
import optax
import pytest
from tunix.distillation import strategies

from tests import toys
import tunix_progdistill as tpd


def _stock(kind=strategies.LogitStrategy, **kwargs):
  return kind(
      toys.forward, toys.forward,
      lambda input_tokens, input_mask: (
          toys.one_hot(input_tokens) * input_mask[..., None]
      ),
      **kwargs,
  )


class Halved(strategies.LogitStrategy):
  """A user's subclass, with a loss of its own."""

  def compute_loss(self, student_output, teacher_output, labels):
    loss, metrics = super().compute_loss(student_output, teacher_output, labels)
    return loss / 2, metrics


@pytest.fixture
def warnings(caplog):
  with caplog.at_level(std_logging.WARNING, logger="absl"):
    yield lambda: [r.getMessage() for r in caplog.records]


def test_stock_strategy_follows_the_plan():
  """Trap 1, 3: kept in our trainer it must not go on with its own scalars."""
  plan = toys.plan(temperature=tpd.anneal(3.0, 1.0, "linear"), alpha=0.1)
  runs = []
  for make in (
      _stock,
      lambda: tpd.ProgressiveLogitStrategy(
          toys.forward, toys.forward, _stock()._labels_fn
      ),
  ):
    trainer = toys.trainer(progressive=plan, strategy_fn=make)
    trainer.train(toys.batches(6, ragged=True))
    runs.append(trainer)
  for name in ("loss", "distill/soft_loss", "distill/temperature"):
    np.testing.assert_array_equal(
        toys.history(runs[0], name), toys.history(runs[1], name)
    )


def test_stock_strategys_own_settings_are_the_defaults():
  trainer = toys.trainer(
      strategy_fn=lambda: _stock(temperature=4.0, alpha=0.25)
  )
  trainer.train(toys.batches(6))
  assert set(toys.history(trainer, "distill/temperature")) == {4.0}
  assert set(toys.history(trainer, "distill/alpha")) == {0.25}


def test_subclass_keeps_its_own_loss():
  losses = []
  for kind in (strategies.LogitStrategy, Halved):
    trainer = toys.trainer(strategy_fn=lambda: _stock(kind))
    trainer.train(toys.batches(6))
    losses.append(toys.history(trainer, "loss")[0])
  assert losses[1] == pytest.approx(losses[0] / 2, rel=1e-5)
  assert not trainer.metrics_logger.metric_exists(
      "", "distill/temperature", "train"
  )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperature": 3.0}, "temperature"), ({"alpha": 0.5}, "alpha"),
    ],
)
def test_scalars_that_nobody_reads_are_refused(change, field):
  with pytest.raises(ValueError, match=f"^{field} must not be set, for Halved"):
    toys.trainer(
        progressive=toys.plan(**change), strategy_fn=lambda: _stock(Halved)
    )


def test_update_without_a_token_is_told(warnings):
  """It changes nothing; a mean over nothing is 0, and a warning says so."""
  plan = tpd.StagePlan(stages=(tpd.Stage(updates=1, learning_rate=0.1),))
  trainer = toys.trainer(progressive=plan)
  before = toys.parameters(trainer.model)
  trainer.train([toys.batch(np.ones((2, 4)), np.zeros((2, 4)))])
  assert toys.history(trainer, "distill/valid_tokens")[0] == 0
  assert any("Update 1 did nothing" in w for w in warnings())
  for name, value in toys.parameters(trainer.model).items():
    np.testing.assert_array_equal(value, before[name])


def test_longer_and_shorter_max_steps_are_told(warnings):
  for steps, words in ((8, "its last stage goes on"), (3, "ends the run")):
    trainer = toys.trainer(max_steps=steps)
    trainer.train(toys.batches(10))
    assert trainer.train_steps == steps
    assert any(words in w for w in warnings())


@pytest.mark.parametrize("value", [0, -1])
def test_max_steps_below_one_is_refused(value):
  with pytest.raises(ValueError, match="max_steps must be >= 1"):
    toys.trainer(max_steps=value)


def test_iterator_as_evaluation_data_is_refused():
  """It would be empty at the second evaluation."""
  trainer = toys.trainer()
  with pytest.raises(ValueError, match="eval_ds must be readable anew"):
    trainer.train(toys.batches(6), iter(toys.batches(1)))
  assert trainer.train_steps == 0


def test_another_optimizer_is_named_on_resume(tmp_path):
  root = str(tmp_path)
  toys.trainer(checkpoint_root_directory=root).train(toys.batches(6))
  with pytest.raises(ValueError, match=r"these differ: .*optimizer"):
    toys.trainer(checkpoint_root_directory=root, optimizer=optax.lion)
