"""K13: no temperature squared; a schedule that a resume starts again."""

import numpy as np
import optax
import pytest
from tunix.distillation import distillation_trainer

from tests import toys
from tests.cases import common
import tunix_progdistill as tpd

SMALL_TEACHER = 0.01 * np.array([[1, -2, 3, 0.5]], np.float32)
SMALL_STUDENT = 0.01 * np.array([[-1, 1, 0, 2]], np.float32)
ONE = common.batch([[0]])


@pytest.mark.parametrize("path", common.PATHS)
def test_k13_1_gradient_keeps_its_scale(path):
  norm = lambda tau: np.linalg.norm(
      common.PATHS[path](
          {"temperature": tau}, SMALL_STUDENT, SMALL_TEACHER, ONE
      )[1]
  )
  cold, hot = norm(1.0), norm(10.0)
  assert cold == pytest.approx(0.01228, abs=1e-5)
  assert hot == pytest.approx(0.01229, abs=1e-5)


@pytest.mark.parametrize("path", common.PATHS)
@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"temperature": 4.0}, 1.08800899),
        ({"temperature": 2.0, "alpha": 0.3}, 1.41337798),
    ],
)
def test_k13_1_values(path, kwargs, expected):
  loss, _ = common.PATHS[path](kwargs, common.STUDENT, common.TEACHER, ONE)
  assert loss == pytest.approx(expected, abs=1e-6)


def test_k13_1_metric_has_no_factor():
  """The KL metric is at tau without tau^2, the soft loss with it."""
  trainer = toys.trainer(
      student=toys.Table(common.STUDENT), teacher=toys.Table(common.TEACHER),
      progressive=common.one_stage(1),
      strategy_fn=lambda: common.strategy(temperature=2.0),
  )
  trainer.train([ONE])
  assert toys.history(trainer, "distill/soft_loss")[0] == pytest.approx(
      1.09122226, abs=1e-6
  )
  assert toys.history(trainer, "distill/kl_div")[0] == pytest.approx(
      1.09122226 / 4, abs=1e-6
  )


def annealed(root, max_steps, how, accumulation=1):
  tau = tpd.anneal(4.0, 1.0, "linear")
  plan = {
      "plan": tpd.StagePlan(
          stages=(tpd.Stage(updates=10, learning_rate=0.1),), temperature=tau
      ),
      "stage": tpd.StagePlan(
          stages=(
              tpd.Stage(updates=10, learning_rate=0.1, temperature=tau),
          )
      ),
      "strategy": tpd.StagePlan(
          stages=(tpd.Stage(updates=10, learning_rate=0.1),)
      ),
  }[how]
  default = tau if how == "strategy" else 2.0
  trainer = toys.trainer(
      student=toys.Table(common.STUDENT), teacher=toys.Table(common.TEACHER),
      optimizer=optax.sgd, progressive=plan, max_steps=max_steps,
      strategy_fn=lambda: common.strategy(temperature=default),
      checkpoint_root_directory=str(root),
      gradient_accumulation_steps=accumulation,
  )
  trainer.train([common.batch([[0, 1]])] * 10 * accumulation)
  return toys.history(trainer, "distill/temperature"), toys.history(
      trainer, "distill/soft_loss"
  )


@pytest.mark.parametrize("how", ["plan", "stage", "strategy"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_k13_2_schedule_goes_on(tmp_path, how, accumulation):
  straight, soft = annealed(tmp_path / "a", None, how, accumulation)
  expected = np.linspace(4.0, 1.0, 10)
  np.testing.assert_allclose(straight, expected, atol=1e-6)
  first, _ = annealed(tmp_path / "b", 6, how, accumulation)
  np.testing.assert_allclose(first, expected[:6], atol=1e-6)
  rest, rest_soft = annealed(tmp_path / "b", None, how, accumulation)
  assert rest[0] == pytest.approx(2.0)
  np.testing.assert_allclose(rest, expected[6:], atol=1e-6)
  # The value in the log is the one in the loss.
  np.testing.assert_allclose(rest_soft, soft[6:], rtol=1e-6)


def test_k13_2_logged_temperature_is_the_one_used():
  """At a rate of 0 the soft loss of F1 tells the temperature."""
  plan = tpd.StagePlan(
      stages=(tpd.Stage(updates=3, learning_rate=0.0),),
      temperature=tpd.anneal(4.0, 1.0, "linear"),
  )
  trainer = toys.trainer(
      student=toys.Table(common.STUDENT), teacher=toys.Table(common.TEACHER),
      optimizer=optax.sgd, progressive=plan, strategy_fn=common.strategy,
  )
  trainer.train([ONE] * 3)
  expected = [
      t * t * common.kl(toys.F1_TEACHER, toys.F1_STUDENT, t)
      for t in (4.0, 2.5, 1.0)
  ]
  np.testing.assert_allclose(
      toys.history(trainer, "distill/soft_loss"), expected, atol=1e-6
  )


@pytest.mark.parametrize("initial", [0, 1])
def test_k13_2_stock_trainer_follows_the_schedule(initial):
  """In Tunix's own trainer the strategy counts, from `initial_update`."""
  trainer = distillation_trainer.DistillationTrainer(
      toys.Table(common.STUDENT), toys.Table(common.TEACHER),
      common.strategy(
          temperature=tpd.anneal(4.0, 1.0, "linear", updates=3),
          initial_update=initial, gradient_accumulation_steps=2,
      ),
      optax.set_to_zero(),
      distillation_trainer.TrainingConfig(
          eval_every_n_steps=1, max_steps=2, gradient_accumulation_steps=2
      ),
  )
  inputs = common.as_training_input(ONE)
  trainer.train([inputs] * 4, [inputs])
  taus = (4.0, 2.5, 1.0)[initial : initial + 2]
  expected = [
      t * t * common.kl(toys.F1_TEACHER, toys.F1_STUDENT, t) for t in taus
  ]
  np.testing.assert_allclose(
      toys.history(trainer, "loss"), expected, atol=1e-6
  )


@pytest.mark.parametrize(
    "make",
    [
        lambda: tpd.anneal(4.0, 1.0, ""),
        lambda: tpd.anneal(4.0, 1.0, None),
        lambda: tpd.Stage(temperature={"start": 4.0, "end": 1.0}),
        lambda: tpd.StagePlan(
            stages=(tpd.Stage(),), temperature=tpd.anneal(4, -1, "linear")
        ),
        lambda: common.strategy(temperature=0.0),
        lambda: common.strategy(temperature=float("nan")),
        lambda: common.strategy(temperature=tpd.anneal(4.0, 0.0, "linear")),
        lambda: common.strategy(alpha=1.5),
        lambda: common.strategy(alpha=tpd.anneal(0.5, 1.5, "linear")),
        lambda: toys.trainer(
            progressive=tpd.StagePlan(
                stages=(tpd.Stage(updates=5, learning_rate=0.1),),
                alpha=optax.linear_schedule(0.5, 1.5, 4),
            )
        ),
    ],
)
def test_k13_2_refused_at_construction(make):
  with pytest.raises(ValueError, match=r"kind|temperature|alpha"):
    make()


def test_k13_2_end_without_a_kind():
  with pytest.raises(TypeError, match="kind"):
    tpd.anneal(4.0, 1.0)  # pylint: disable=no-value-for-parameter
