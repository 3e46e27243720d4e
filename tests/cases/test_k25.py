"""K25: another rate than the one that was asked for, or at another time."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tunix.distillation import strategies

from tests import toys
from tests.cases import common
import tunix_progdistill as tpd


class Slope(strategies.BaseStrategy):
  """The loss is the sum of all entries: its gradient is 1 everywhere."""

  def __init__(self):
    super().__init__(toys.forward, toys.forward, toys.identity_labels)

  def get_train_loss(self, student_model, teacher_output, inputs):
    return jnp.sum(student_model.rows[...])

  def compute_loss(self, student_output, teacher_output, labels):
    raise NotImplementedError

  compute_eval_loss = compute_loss


def steps_taken(optimizer, plan, updates, accumulation=1, **kwargs):
  """(how far a weight moved at each update, logged rates)."""
  student = toys.Table([[0.0, 0.0]])
  seen = []

  def record(x):
    seen.append(float(student.rows[...][0, 0]))
    return common.everything(x)

  trainer = toys.trainer(
      student=student, teacher=toys.Table([[0.0, 0.0]]), optimizer=optimizer,
      progressive=plan, strategy_fn=Slope,
      gradient_accumulation_steps=accumulation, **kwargs,
  )
  trainer.with_gen_model_input_fn(record)
  trainer.train([common.batch([[0]])] * updates * accumulation)
  at_updates = [*seen[::accumulation], float(student.rows[...][0, 0])]
  logged = None  # of an optimizer that does not tell its rate
  if trainer.metrics_logger.metric_exists("", "learning_rate", "train"):
    logged = toys.history(trainer, "learning_rate")
  return -np.diff(at_updates), logged


def two_rates(first=0.1, second=0.01, **kwargs):
  return tpd.StagePlan(
      stages=(
          tpd.Stage(updates=3, learning_rate=first, **kwargs),
          tpd.Stage(updates=3, learning_rate=second, **kwargs),
      )
  )


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd, optax.inject_hyperparams(optax.sgd)(learning_rate=7.0)],
    ids=["factory", "injected"],
)
def test_k25_1_rate_of_each_stage(optimizer, accumulation):
  steps, logged = steps_taken(optimizer, two_rates(), 6, accumulation)
  expected = [0.1] * 3 + [0.01] * 3
  np.testing.assert_allclose(steps, expected, atol=1e-6)
  np.testing.assert_allclose(logged, expected, rtol=1e-6)


def test_k25_1_adam_moves_by_the_rate():
  """Under a constant gradient Adam moves by the rate, also after a switch."""
  steps, _ = steps_taken(optax.adam, two_rates(), 6)
  np.testing.assert_allclose(steps, [0.1] * 3 + [0.01] * 3, rtol=1e-4)


def test_k25_1_moments_go_on():
  """Momentum carried over the switch, for a factory: no new warm-up."""
  factory = lambda lr: optax.sgd(lr, momentum=0.5)
  steps, _ = steps_taken(factory, two_rates(0.1, 0.1), 6)
  trace = [1, 1.5, 1.75, 1.875, 1.9375, 1.96875]
  np.testing.assert_allclose(steps, 0.1 * np.array(trace), rtol=1e-5)


WARM_UP = optax.linear_schedule(0.0, 0.4, 4)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("plan", [0.0, 0.1, 0.2, 0.3, 0.4, 0.4]),
        ("stages", [0.0, 0.1, 0.2, 0.0, 0.1, 0.2]),
        ("inside", [0.0, 0.1, 0.2, 0.3, 0.4, 0.4]),
        ("injected", [0.0, 0.1, 0.2, 0.3, 0.4, 0.4]),
    ],
)
def test_k25_1_warm_up_restarts_only_if_asked(where, expected):
  """A plan's or an optimizer's schedule runs on; a stage's is the stage's."""
  plan, optimizer = two_rates(None, None), optax.sgd
  if where == "plan":
    plan = tpd.StagePlan(stages=plan.stages, learning_rate=WARM_UP)
  elif where == "stages":
    plan = two_rates(WARM_UP, WARM_UP)
  elif where == "inside":
    optimizer = optax.sgd(WARM_UP)
  else:
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=WARM_UP)
  steps, logged = steps_taken(optimizer, plan, 6)
  np.testing.assert_allclose(steps, expected, atol=1e-6)
  if where == "inside":
    assert logged is None
  else:
    np.testing.assert_allclose(logged, expected, atol=1e-6)


@pytest.mark.parametrize("where", ["plan", "inside", "injected"])
def test_k25_1_warm_up_goes_on_after_a_resume(where, tmp_path):
  plan, optimizer = two_rates(None, None), optax.sgd
  if where == "plan":
    plan = tpd.StagePlan(stages=plan.stages, learning_rate=WARM_UP)
  elif where == "inside":
    optimizer = optax.sgd(WARM_UP)
  else:
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=WARM_UP)
  root = {"checkpoint_root_directory": str(tmp_path)}
  for stop in (2, 4):
    steps_taken(optimizer, plan, 6, max_steps=stop, **root)
  steps, _ = steps_taken(optimizer, plan, 6, **root)
  # The first record is the restored weight: 0 + 0.1 + 0.2 + 0.3 were taken.
  np.testing.assert_allclose(steps, [0.4, 0.4], atol=1e-6)


@pytest.mark.parametrize("missing", [0, 1])
def test_k25_1_stage_without_a_rate_is_refused_for_a_factory(missing):
  """A factory has no rate of its own to fall back on: say so at once."""
  rates = [0.1, 0.1]
  rates[missing] = None
  with pytest.raises(ValueError, match="learning_rate"):
    steps_taken(optax.sgd, two_rates(*rates), 6)


def test_k25_1_stage_without_a_rate_keeps_the_optimizers():
  optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.7)
  steps, logged = steps_taken(optimizer, two_rates(0.1, None), 6)
  np.testing.assert_allclose(steps, [0.1] * 3 + [0.7] * 3, atol=1e-6)
  np.testing.assert_allclose(logged, [0.1] * 3 + [0.7] * 3, rtol=1e-6)


@pytest.mark.parametrize("where", ["plan", "stages", "inside", "injected"])
def test_k25_2_schedules_count_updates(where):
  """Warm-up of 4 and accumulation of 4: the peak is at update 4."""
  stage = lambda rate: tpd.StagePlan(
      stages=(tpd.Stage(updates=6, learning_rate=rate),)
  )
  plan, optimizer = stage(None), optax.sgd
  if where == "plan":
    plan = tpd.StagePlan(stages=plan.stages, learning_rate=WARM_UP)
  elif where == "stages":
    plan = stage(WARM_UP)
  elif where == "inside":
    optimizer = optax.sgd(WARM_UP)
  else:
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=WARM_UP)
  steps, logged = steps_taken(optimizer, plan, 6, accumulation=4)
  expected = [0.0, 0.1, 0.2, 0.3, 0.4, 0.4]
  np.testing.assert_allclose(steps, expected, atol=1e-6)
  if where == "inside":
    assert logged is None
  else:
    np.testing.assert_allclose(logged, expected, atol=1e-6)


def test_k25_2_epochs_count_updates():
  """16 micro-batches at an accumulation of 4: an epoch is 4 updates."""
  data = [common.batch([[0]])] * 16
  progressive = tpd.ProgressiveConfig(
      plan=tpd.StagePlan(
          stages=(
              tpd.Stage(epochs=1, learning_rate=0.1),
              tpd.Stage(epochs=1, learning_rate=0.01),
          )
      ),
      updates_per_epoch=data,
  )
  steps, _ = steps_taken(optax.sgd, progressive, 8, accumulation=4)
  np.testing.assert_allclose(steps, [0.1] * 4 + [0.01] * 4, atol=1e-6)
