"""What is logged, and at which update."""

import numpy as np
import optax
import pytest

from tests import toys
import tunix_progdistill as tpd


def _logged(trainer):
  """{name: {step: value}} of what goes to the logger in mode train."""
  out = {}
  log = trainer.metrics_logger.log

  def record(prefix, name, value, mode, step):
    if str(mode) == "train":
      entry = out.setdefault(name, {})
      assert step not in entry, f"{name} is logged twice at step {step}"
      entry[step] = float(value)
    return log(prefix, name, value, mode, step)

  trainer.metrics_logger.log = record
  return out


def test_scalars_stand_at_the_update_they_belong_to():
  """Trap 2: Tunix logs the next update's rate beside this update's loss."""
  plan = toys.plan(
      updates=(2, 3, 2), temperature=tpd.anneal(4.0, 1.0, "linear"),
      alpha=optax.linear_schedule(1.0, 0.0, 6),
  )
  trainer = toys.trainer(progressive=plan, eval_every_n_steps=2)
  logged = _logged(trainer)
  trainer.train(toys.batches(7), toys.batches(1))
  rates = [1e-2] * 2 + [5e-3] * 3 + [1e-3] * 2
  expected = {
      "learning_rate": rates,
      "distill/temperature": [4 - 0.5 * u for u in range(7)],
      "distill/alpha": [1 - u / 6 for u in range(7)],
      "progressive/stage": [0, 0, 1, 1, 1, 2, 2],
  }
  for name, values in expected.items():
    assert list(logged[name]) == list(range(1, 8)), name
    np.testing.assert_allclose(
        list(logged[name].values()), values, rtol=1e-5, atol=1e-7,
        err_msg=name,
    )


def test_scheduled_optimizer_logs_the_rate_that_it_used():
  """Trap 2: also where the rate is the optimizer's own."""
  trainer = toys.trainer(
      optimizer=optax.inject_hyperparams(optax.sgd)(
          learning_rate=optax.linear_schedule(0.4, 0.0, 4)
      ),
      progressive=tpd.StagePlan(
          stages=(
              tpd.Stage(trainable_layers=1, updates=2), tpd.Stage(updates=2)
          )
      ),
  )
  trainer.train(toys.batches(4))
  np.testing.assert_allclose(
      toys.history(trainer, "learning_rate"), [0.4, 0.3, 0.2, 0.1], rtol=1e-5
  )


def test_parts_of_the_loss_are_logged():
  """Trap 2: Tunix throws the strategy's own metrics away."""
  trainer = toys.trainer(
      student=toys.Table([toys.F1_STUDENT]),
      teacher=toys.Table([toys.F1_TEACHER]),
      optimizer=optax.sgd,
      strategy_fn=lambda: toys.strategy(labels_fn=toys.identity_labels),
      progressive=tpd.ProgressiveConfig(
          plan=tpd.StagePlan(
              stages=(tpd.Stage(updates=2),),
              learning_rate=0.5, temperature=1.0, alpha=0.25,
          ),
          log_kl_div_tau1=True,
      ),
  )
  logged = _logged(trainer)
  trainer.train([toys.batch(np.zeros((2, 3), np.int32))] * 2)
  first = {name: values[1] for name, values in logged.items()}
  assert first["distill/kl_div"] == pytest.approx(toys.F1_KL, rel=1e-5)
  assert first["distill/kl_div_tau1"] == pytest.approx(toys.F1_KL, rel=1e-5)
  assert first["distill/soft_loss"] == pytest.approx(toys.F1_KL, rel=1e-5)
  assert first["distill/hard_loss"] == pytest.approx(toys.F1_CE, rel=1e-5)
  loss = 0.25 * toys.F1_KL + 0.75 * toys.F1_CE
  assert first["loss"] == pytest.approx(loss, rel=1e-5)
  assert first["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)
  assert first["distill/valid_tokens"] == 6
  assert first["distill/skipped_micro_batches"] == 0
  assert first["progressive/trainable_parameters"] == 3
  # The gradient by hand: 0.25 (s - t) + 0.75 (s - onehot(0)).
  s, t = (
      np.exp(x) / np.sum(np.exp(x))
      for x in (toys.F1_STUDENT, toys.F1_TEACHER)
  )
  gradient = 0.25 * (s - t) + 0.75 * (s - np.array([1.0, 0.0, 0.0]))
  assert first["grad_norm"] == pytest.approx(
      np.linalg.norm(gradient), rel=1e-5
  )
  assert logged["distill/kl_div"][2] < 0.95 * toys.F1_KL
  assert first["perf/tokens_per_sec"] > 0


def test_last_update_is_logged():
  """Trap 2: metrics are written one update late; none may be lost."""
  trainer = toys.trainer(progressive=toys.plan(updates=(1, 1, 1)))
  logged = _logged(trainer)
  trainer.train(toys.batches(3))
  assert list(logged["loss"]) == [1, 2, 3]
  assert list(logged["distill/kl_div"]) == [1, 2, 3]


def test_accumulated_record_is_that_of_the_window():
  """Trap 2 and 6: one record per update, over the window's valid tokens."""
  short = toys.batch(np.zeros((2, 3)), [[1, 0, 0], [0, 0, 0]])
  long = toys.batch(np.ones((2, 3)))
  trainer = toys.trainer(
      student=toys.Table([toys.F1_STUDENT, toys.F1_TEACHER]),
      teacher=toys.Table([toys.F1_TEACHER, toys.F1_STUDENT]),
      optimizer=optax.sgd,
      strategy_fn=lambda: toys.strategy(labels_fn=toys.identity_labels),
      progressive=tpd.StagePlan(
          stages=(tpd.Stage(updates=1),), learning_rate=0.1, temperature=1.0
      ),
      gradient_accumulation_steps=2,
  )
  trainer.train([short, long])
  expected = (toys.F1_KL + 6 * toys.F2_KL) / 7
  np.testing.assert_allclose(
      toys.history(trainer, "distill/kl_div"), [expected], rtol=1e-5
  )
  np.testing.assert_allclose(
      toys.history(trainer, "distill/valid_tokens"), [7]
  )
