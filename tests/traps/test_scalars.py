"""Temperature, alpha and rate reach the compiled step, and never recompile."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tunix.distillation import distillation_trainer

from tests import toys
import tunix_progdistill as tpd


def _log_softmax(x):
  x = np.asarray(x, np.float64)
  return x - np.log(np.sum(np.exp(x)))


def _loss(tau, alpha):
  """alpha tau^2 KL + (1 - alpha) CE of the F1 pair, by hand."""
  t, s = (
      _log_softmax(np.array(x) / tau)
      for x in (toys.F1_TEACHER, toys.F1_STUDENT)
  )
  kl = float(np.sum(np.exp(t) * (t - s)))
  return alpha * tau**2 * kl + (1 - alpha) * toys.F1_CE


def _tables():
  return toys.Table([toys.F1_STUDENT]), toys.Table([toys.F1_TEACHER])


def _batches(number):
  return [toys.batch(np.zeros((2, 3), np.int32)) for _ in range(number)]


def _stock(strategy, **kwargs):
  """An unmodified Tunix trainer whose weights stand still."""
  return distillation_trainer.DistillationTrainer(
      *_tables(),
      strategy,
      optax.sgd(0.0),
      distillation_trainer.TrainingConfig(eval_every_n_steps=1000, **kwargs),
  )


_TAU = tpd.anneal(4.0, 1.0, "linear", updates=4)
_ALPHA = optax.linear_schedule(1.0, 0.25, 3)


def test_loss_by_hand():
  assert _loss(1.0, 1.0) == pytest.approx(toys.F1_KL, rel=1e-6)
  assert _loss(4.0, 1.0) != pytest.approx(_loss(1.0, 1.0), rel=1e-2)


def test_schedule_in_an_unmodified_trainer():
  """Trap 1: a strategy's temperature is a constant of the compiled step."""
  trainer = _stock(
      toys.strategy(
          temperature=_TAU, alpha=_ALPHA, labels_fn=toys.identity_labels
      )
  )
  trainer.train(_batches(6))
  expected = [_loss(_TAU(u), float(_ALPHA(u))) for u in range(6)]
  np.testing.assert_allclose(toys.history(trainer, "loss"), expected, rtol=1e-5)
  step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)
  assert step.func.jitted_fn._cache_size() == 1


def test_schedule_counts_updates_in_an_unmodified_trainer():
  """Trap 1: with accumulation, a schedule must not run at double speed."""
  trainer = _stock(
      toys.strategy(
          temperature=_TAU, alpha=1.0, labels_fn=toys.identity_labels,
          initial_update=1, gradient_accumulation_steps=2,
      ),
      gradient_accumulation_steps=2,
  )
  trainer.train(_batches(6))
  expected = [_loss(_TAU(1 + u), 1.0) for u in range(3)]
  np.testing.assert_allclose(toys.history(trainer, "loss"), expected, rtol=1e-5)


def test_evaluation_does_not_move_the_count_of_an_unmodified_trainer():
  """Trap 1: only training batches count."""
  trainer = _stock(
      toys.strategy(
          temperature=_TAU, alpha=1.0, labels_fn=toys.identity_labels
      )
  )
  trainer.config.eval_every_n_steps = 1
  trainer.train(_batches(3), _batches(2))
  expected = [_loss(_TAU(u), 1.0) for u in range(3)]
  np.testing.assert_allclose(toys.history(trainer, "loss"), expected, rtol=1e-5)


def test_schedule_in_our_trainer():
  """Trap 1: the same, by the plan, with one program."""
  student, teacher = _tables()
  trainer = toys.trainer(
      student=student, teacher=teacher, optimizer=optax.sgd,
      strategy_fn=lambda: toys.strategy(labels_fn=toys.identity_labels),
      progressive=tpd.StagePlan(
          stages=(tpd.Stage(updates=6),),
          learning_rate=0.0, temperature=_TAU, alpha=_ALPHA,
      ),
  )
  trainer.train(_batches(6))
  expected = [_loss(_TAU(u), float(_ALPHA(u))) for u in range(6)]
  np.testing.assert_allclose(toys.history(trainer, "loss"), expected, rtol=1e-5)
  assert trainer.engine.compiles == (1,)


def test_strategy_change_in_mid_run_is_not_silent():
  """Trap 1: setting `strategy.temperature` in our trainer changes nothing.

  The plan is the one source of scalars, and the log must say what was used.
  """
  student, teacher = _tables()
  strategy = toys.strategy(
      temperature=2.0, alpha=1.0, labels_fn=toys.identity_labels
  )
  trainer = toys.trainer(
      student=student, teacher=teacher, optimizer=optax.sgd,
      strategy_fn=lambda: strategy,
      progressive=tpd.StagePlan(
          stages=(tpd.Stage(updates=4),), learning_rate=0.0
      ),
  )

  def data():
    yield from _batches(2)
    strategy.temperature = 9.0
    yield from _batches(2)

  trainer.train(data())
  tau = toys.history(trainer, "distill/temperature")
  np.testing.assert_allclose(
      toys.history(trainer, "loss"), [_loss(float(t), 1.0) for t in tau],
      rtol=1e-5,
  )


class Counting(tpd.ProgressiveLogitStrategy):
  """Counts how often the loss is traced."""

  traces = 0

  def train_terms(self, *args, **kwargs):
    self.traces += 1
    return super().train_terms(*args, **kwargs)


@pytest.mark.parametrize(
    "rate",
    [
        1e-2,
        optax.linear_schedule(1e-2, 1e-3, 6),
        lambda count: jnp.asarray(1e-2),  # weakly typed or not: no matter
        lambda count: np.float64(1e-2),
        lambda count: 1e-2 if count % 2 else 0,
    ],
    ids=["float", "optax", "jax", "float64", "int"],
)
def test_one_program_per_stage(rate):
  """Trap 27: a weakly typed rate compiles every step twice."""
  strategy = Counting(
      toys.forward, toys.forward, toys.causal_lm.next_token_labels
  )
  trainer = toys.trainer(
      strategy_fn=lambda: strategy,
      progressive=tpd.StagePlan(
          stages=tuple(
              tpd.Stage(trainable_layers=n, updates=3) for n in (1, 2, 5)
          ),
          learning_rate=rate, temperature=tpd.anneal(3, 1, "cosine"),
      ),
  )
  trainer.train(toys.batches(9))
  assert trainer.train_steps == 9
  assert trainer.engine.compiles == (1, 1, 1)
  assert strategy.traces == 3


def test_one_program_per_stage_with_an_injected_rate():
  """Trap 27: also where the rate lives in the optimizer's state."""
  trainer = toys.trainer(
      optimizer=optax.inject_hyperparams(optax.adamw)(learning_rate=1.0),
      progressive=toys.plan(updates=(3, 3, 3)),
  )
  trainer.train(toys.batches(9))
  assert trainer.engine.compiles == (1, 1, 1)
  np.testing.assert_allclose(
      toys.history(trainer, "learning_rate"),
      [1e-2] * 3 + [5e-3] * 3 + [1e-3] * 3, rtol=1e-6,
  )


def test_one_program_per_stage_with_accumulation():
  """Trap 27: the first and last micro-batch of a window share a program."""
  trainer = toys.trainer(gradient_accumulation_steps=2)
  trainer.train(toys.batches(12))
  assert trainer.train_steps == 6
  assert trainer.engine.compiles == (1, 1, 1)
