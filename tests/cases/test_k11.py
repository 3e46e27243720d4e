"""K11: one buffer is donated twice, or while somebody else holds it."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import toys
from tests.cases import common
import tunix_progdistill as tpd

PLAN = tpd.StagePlan(
    stages=(
        tpd.Stage(freeze_fraction=0.5, updates=3, learning_rate=1e-2),
        tpd.Stage(updates=3, learning_rate=1e-2),
    )
)


def train(student, teacher, **kwargs):
  """Six updates over two stages, with an evaluation after each."""
  trainer = toys.trainer(
      student=student, teacher=teacher,
      progressive=kwargs.pop("progressive", PLAN),
      eval_every_n_steps=1, **kwargs,
  )
  accumulation = kwargs.get("gradient_accumulation_steps", 1)
  trainer.train(toys.batches(6 * accumulation), toys.batches(1, seed=5))
  assert trainer.train_steps == 6
  assert np.all(np.isfinite(toys.history(trainer, "loss")))
  return trainer


def assert_same(before, model):
  after = toys.parameters(model)
  assert after.keys() == before.keys()
  for name, value in before.items():
    np.testing.assert_array_equal(after[name], value, err_msg=name)


def assert_moved(before, model):
  after = toys.parameters(model)
  for name, value in before.items():
    assert not np.array_equal(after[name], value), name


@pytest.mark.parametrize(
    ("tied", "accumulation"),
    [(True, 2), pytest.param(False, 1, marks=pytest.mark.slow)],
)
def test_k11_1_student_from_the_teachers_arrays(tied, accumulation):
  teacher = toys.Toy(tied=tied, layers=2)
  before = toys.parameters(teacher)
  graph, state = nnx.split(teacher)
  # New variables, the same arrays.
  student = nnx.merge(graph, jax.tree.map(lambda x: x, state))
  held = jax.tree.leaves(nnx.state(student))
  train(student, teacher, gradient_accumulation_steps=accumulation)
  assert_same(before, teacher)
  assert_moved(before, student)
  assert not any(x.is_deleted() for x in held)


def test_k11_1_student_from_some_of_the_teachers_layers():
  from tunix_progdistill import students  # pylint: disable=g-import-not-at-top

  teacher = toys.Toy(layers=4)
  before = toys.parameters(teacher)
  train(students.from_layers(teacher, (0, 3)), teacher)
  assert_same(before, teacher)


def test_k11_1_student_is_the_teacher():
  """Refused at construction, or the teacher's targets stay as they were."""
  model = toys.Toy(layers=2)
  before = toys.parameters(model)
  probe = toys.batches(1, seed=5)[0]
  targets = np.array(model(probe.input_tokens))
  try:
    trainer = toys.trainer(
        student=model, teacher=model,
        progressive=common.one_stage(3, 0.1), eval_every_n_steps=1,
        strategy_fn=lambda: toys.strategy(alpha=0.0),
    )
  except ValueError as e:
    assert "teacher" in str(e)
    return
  trainer.train(toys.batches(3), [probe])
  assert_moved(before, trainer.model)
  kl = toys.history(trainer, "distill/kl_div_tau1", "eval")
  expected = common.kl(targets, np.array(trainer.model(probe.input_tokens)))
  assert kl[0] == 0.0
  assert kl[-1] == pytest.approx(expected[:, :-1].mean(), rel=1e-4)
  assert kl[-1] > 1e-3


def test_k11_1_teacher_shares_a_module_with_the_student():
  """The student took over the teacher's embedding, the very module."""
  teacher = toys.Toy(layers=2)
  before = toys.parameters(teacher)
  student = toys.Toy(seed=1, layers=2)
  student.embed = teacher.embed
  try:
    train(student, teacher)
  except ValueError as e:
    assert "teacher" in str(e)
    return
  assert_same(before, teacher)


class Twins(nnx.Module):
  """Two leaves, one array; they are two parameters nevertheless."""

  def __init__(self, tied: bool = False):
    value = jnp.asarray(common.STUDENT, jnp.float32)
    self.a = nnx.Param(value)
    self.b = self.a if tied else nnx.Param(value)

  def __call__(self, tokens):
    # The derivative for a is three times that for b.
    return (0.75 * self.a[...] + 0.25 * self.b[...])[tokens]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_k11_1_one_array_in_two_leaves(accumulation, tied):
  student = Twins(tied)
  trainer = toys.trainer(
      student=student, teacher=toys.Table(common.TEACHER),
      optimizer=optax.sgd, progressive=common.one_stage(3, 1.0),
      strategy_fn=common.strategy, gradient_accumulation_steps=accumulation,
  )
  trainer.train([common.batch([[0, 1]])] * 3 * accumulation)
  a, b = np.array(student.a[...]), np.array(student.b[...])
  moved = a - np.array(common.STUDENT), b - np.array(common.STUDENT)
  assert np.abs(moved[0]).max() > 0.1
  if tied:
    np.testing.assert_array_equal(a, b)
  else:
    np.testing.assert_allclose(moved[0], 3 * moved[1], atol=1e-6)


def test_k11_1_frozen_leaf_shares_its_array_with_a_trainable_one():
  student = Twins()
  trainer = toys.trainer(
      student=student, teacher=toys.Table(common.TEACHER),
      optimizer=optax.adamw,
      progressive=tpd.StagePlan(
          stages=(
              tpd.Stage(frozen=("b",), updates=2, learning_rate=0.1),
              tpd.Stage(updates=1, learning_rate=0.1),
          )
      ),
      strategy_fn=common.strategy,
  )
  seen = []

  def record(x):
    seen.append((np.array(student.a[...]), np.array(student.b[...])))
    return common.everything(x)

  trainer.with_gen_model_input_fn(record)
  trainer.train([common.batch([[0, 1]])] * 3)
  np.testing.assert_array_equal(seen[2][1], np.float32(common.STUDENT))
  assert not np.array_equal(seen[2][0], seen[2][1])
  assert not np.array_equal(np.array(student.b[...]), seen[2][1])


def keeps_parameters(rate=0.1) -> optax.GradientTransformation:
  """SGD that remembers where it started, as averaging optimizers do."""

  def init(params):
    return {"start": params}

  def update(grads, state, params=None):
    del params
    return jax.tree.map(lambda g: -rate * g, grads), state

  return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "factory"])
def test_k11_1_optimizer_state_holds_the_parameters(stages, kind):
  """An optimizer may keep the very arrays that it was started with."""
  rate = None if kind == "plain" else 0.1
  student = toys.Table(common.STUDENT)
  trainer = toys.trainer(
      student=student, teacher=toys.Table(common.TEACHER),
      optimizer=(
          keeps_parameters() if kind == "plain"
          else keeps_parameters
      ),
      progressive=tpd.StagePlan(
          stages=(tpd.Stage(updates=2, learning_rate=rate),) * stages
      ),
      strategy_fn=common.strategy,
  )
  trainer.train([common.batch([[0, 1]])] * 2 * stages)
  assert trainer.train_steps == 2 * stages
  assert_moved({"rows": np.float32(common.STUDENT)}, student)


def test_k11_1_weights_set_by_the_caller_between_runs():
  """A second `train` after the caller put the teacher's arrays back in."""
  student, teacher = toys.Table(common.STUDENT), toys.Table(common.TEACHER)
  trainer = toys.trainer(
      student=student, teacher=teacher, optimizer=optax.sgd,
      progressive=common.one_stage(4), strategy_fn=common.strategy,
      max_steps=4,
  )
  data = [common.batch([[0, 1]])] * 4
  trainer.train(data[:2])
  nnx.update(student, nnx.state(teacher))
  trainer.train(data)
  assert trainer.train_steps == 4
  assert_same({"rows": np.float32(common.TEACHER)}, teacher)
