"""K22: the teacher's dropout is on, and its targets are random."""

from flax import nnx
import numpy as np
import optax
import pytest
from tunix.distillation import distillation_trainer

from tests import toys
from tests.cases import common


def dropping(seed=0, **kwargs):
  return toys.Toy(seed=seed, layers=2, dropout=0.5, **kwargs)


BATCH = toys.batches(1, rows=2)[0]
INPUTS = {"input_tokens": BATCH.input_tokens, "input_mask": BATCH.input_mask}


def eval_logits(model):
  view = nnx.view(model, deterministic=True)
  return np.array(view(BATCH.input_tokens))


def test_k22_1_the_toy_does_drop():
  model = dropping()
  first, second = (np.array(model(BATCH.input_tokens)) for _ in range(2))
  assert np.abs(first - second).max() > 1e-2


@pytest.mark.parametrize("method", ["teacher_logits", "get_teacher_outputs"])
@pytest.mark.parametrize("handed_over", ["train", "untouched"])
def test_k22_1_strategy(method, handed_over):
  """The strategy's own calls, which an unmodified trainer makes."""
  teacher = dropping()
  expected = eval_logits(teacher)
  if handed_over == "train":
    teacher.train()
  strategy = common.strategy()

  def ask():
    out = getattr(strategy, method)(teacher, INPUTS)
    return np.array(getattr(out, "logits", out))

  first, second = ask(), ask()
  np.testing.assert_array_equal(first, second)
  np.testing.assert_allclose(first, expected, atol=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_k22_1_trainer(accumulation):
  """The teacher is deterministic, the student is not, nor is it changed."""
  teacher, student = dropping(), toys.Toy(seed=0, layers=2)
  assert len(eval_logits(teacher).shape) == 3
  nnx.update(student, nnx.state(teacher, nnx.Param))
  before = toys.parameters(teacher)
  teacher.train()
  trainer = toys.trainer(
      student=student, teacher=teacher, optimizer=optax.sgd,
      progressive=common.one_stage(3, 0.0), eval_every_n_steps=1,
      gradient_accumulation_steps=accumulation,
      strategy_fn=lambda: toys.strategy(alpha=1.0, temperature=1.0),
  )
  trainer.train([BATCH] * 3 * accumulation, [BATCH])
  # The student has no dropout and the same weights: it must agree exactly.
  np.testing.assert_allclose(toys.history(trainer, "loss"), 0, atol=1e-9)
  np.testing.assert_allclose(
      toys.history(trainer, "distill/kl_div_tau1", "eval"), 0, atol=1e-9
  )
  for name, value in before.items():
    np.testing.assert_array_equal(toys.parameters(teacher)[name], value)
  for layer in teacher.layers:  # the caller's module keeps its mode
    assert not layer.dropout.deterministic


@pytest.mark.parametrize("accumulation", [1, 2])
def test_k22_1_student_still_drops(accumulation):
  """Also after evaluations, which switch it off for themselves only."""
  student = dropping()
  teacher = toys.Toy(layers=2)
  nnx.update(teacher, nnx.state(student, nnx.Param))
  trainer = toys.trainer(
      student=student, teacher=teacher, optimizer=optax.sgd,
      progressive=common.one_stage(4, 0.0), eval_every_n_steps=1,
      gradient_accumulation_steps=accumulation,
      strategy_fn=lambda: toys.strategy(alpha=1.0, temperature=1.0),
  )
  trainer.train([BATCH] * 4 * accumulation, [BATCH])
  losses = toys.history(trainer, "loss")
  assert np.all(losses > 1e-3)
  assert len(set(losses.tolist())) == 4  # a new mask at every update
  np.testing.assert_allclose(
      toys.history(trainer, "distill/kl_div_tau1", "eval"), 0, atol=1e-9
  )
  assert not student.layers[0].dropout.deterministic


def test_k22_1_stock_trainer():
  """The one-line swap: our strategy, Tunix's trainer, a teacher that drops."""
  teacher, student = dropping(), toys.Toy(layers=2)
  nnx.update(student, nnx.state(teacher, nnx.Param))
  teacher.train()
  trainer = distillation_trainer.DistillationTrainer(
      student, teacher, toys.strategy(alpha=1.0, temperature=1.0),
      optax.sgd(0.0),
      distillation_trainer.TrainingConfig(
          eval_every_n_steps=1000, max_steps=2
      ),
  )
  trainer.train([BATCH] * 2)
  np.testing.assert_allclose(toys.history(trainer, "loss"), 0, atol=1e-9)
