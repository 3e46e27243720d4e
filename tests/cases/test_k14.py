"""K14: a distillation run that trains on the labels, or on nothing."""

from flax import nnx
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from tunix.distillation import strategies
from tunix.tests import test_common

from tests import toys
from tests.cases import common
from tunix_progdistill.families import causal_lm

TOKENS = np.array([[3, 1, 2, 0, 5], [4, 2, 2, 1, 6]])
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
INPUTS = common.batch(TOKENS, MASK)


def labels(input_tokens, input_mask, **_):
  return jnp.where(input_mask != 0, input_tokens, -1)


def permuted(input_tokens, input_mask, **_):
  return jnp.where(input_mask != 0, (5 * input_tokens + 3) % 16, -1)


def transformer(seed):
  return test_common.ToyTransformer(
      test_common.ModelConfig(num_layers=1, vocab_size=16),
      rngs=nnx.Rngs(seed),
  )


def adapted(model):
  """LoRA on a toy, with adapters that already say something."""
  provider = qwix.LoraProvider(module_path=".*linear", rank=2, alpha=2.0)
  return fill(qwix.apply_lora_to_model(model, provider, TOKENS))


def fill(model):
  rng = np.random.default_rng(2)
  for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
    value = 0.1 * rng.normal(size=variable.get_value().shape)
    new = variable.replace(jnp.asarray(value, jnp.float32))
    nnx.update(model, nnx.from_flat_state([(path, new)]))
  return model


STUDENTS = {
    "full": (
        lambda: toys.Toy(seed=1, layers=1),
        lambda seed: toys.Toy(seed=seed, layers=1), toys.forward, nnx.Param,
    ),
    "lora": (
        lambda: adapted(toys.Toy(seed=1, layers=1)),
        lambda seed: toys.Toy(seed=seed, layers=1), toys.forward,
        nnx.LoRAParam,
    ),
    "lora_transformer": (
        lambda: fill(test_common.get_lora_model(transformer(1))),
        transformer, causal_lm.forward, nnx.LoRAParam,
    ),
}


def by_strategy(student, teacher, labels_fn, forward, wrt):
  made = common.strategy(labels_fn=labels_fn, forward=forward)
  return common.value_and_grad(made, student, teacher, INPUTS, wrt)


def by_trainer(student, teacher, labels_fn, forward, wrt):
  rows = [{k: v[i : i + 1] for k, v in INPUTS.items()} for i in range(2)]
  before = weights(student)
  trainer = toys.trainer(
      student=student, teacher=teacher, optimizer=optax.sgd,
      progressive=common.one_stage(1), gradient_accumulation_steps=2,
      strategy_fn=lambda: common.strategy(
          labels_fn=labels_fn, forward=forward
      ),
  )
  trainer.train(rows)
  trained = {
      "/".join(map(str, path))
      for path, _ in nnx.to_flat_state(nnx.state(student, wrt))
  }
  after = weights(student)
  for name, value in before.items():
    if name not in trained:
      np.testing.assert_array_equal(after[name], value, err_msg=name)
  (loss,) = toys.history(trainer, "loss")
  return float(loss), {n: before[n] - after[n] for n in sorted(trained)}


def weights(model):
  return toys.parameters(model)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("full", by_strategy), ("full", by_trainer), ("lora", by_strategy),
        ("lora", by_trainer),
        pytest.param("lora_transformer", by_trainer, marks=pytest.mark.slow),
    ],
)
def test_k14_1_only_the_teacher_counts(kind, path):
  student, teacher, forward, wrt = STUDENTS[kind]
  ask = lambda seed, labels_fn: path(
      student(), teacher(seed), labels_fn, forward, wrt
  )
  loss, grads = ask(0, labels)
  model = student()
  kl = common.kl(
      np.array(forward(teacher(0), **INPUTS)),
      np.array(forward(model, **INPUTS)),
  )[MASK != 0].mean()
  assert loss == pytest.approx(kl, rel=1e-4)
  # Every adapter or parameter is reached.
  for name, grad in grads.items():
    if "attn" not in name and "emb" not in name:
      assert np.abs(grad).max() > 1e-7, name

  other_loss, other_grads = ask(7, labels)
  assert abs(other_loss - loss) > 1e-3
  moved = max(np.abs(other_grads[n] - g).max() for n, g in grads.items())
  assert moved > 1e-4

  same_loss, same_grads = ask(0, permuted)
  assert same_loss == pytest.approx(loss, abs=1e-6)
  for name, grad in grads.items():
    np.testing.assert_allclose(
        same_grads[name], grad, atol=1e-6, err_msg=name
    )


@pytest.mark.parametrize("label", [2, 7], ids=["ruled_out", "no_such_id"])
@pytest.mark.parametrize("path", common.PATHS)
def test_k14_1_labels_that_the_student_cannot_give(path, label):
  """KD only: an infinite cross-entropy has weight 0, and so counts nothing."""
  student = [[0.0, 1.0, -np.inf]]
  teacher = [[2.0, 0.0, -np.inf]]
  kwargs = {"labels_fn": lambda input_tokens, **_: input_tokens * 0 + label}
  loss, grad = common.PATHS[path](
      kwargs, student, teacher, common.batch([[0, 0]])
  )
  assert loss == pytest.approx(0.82872491, abs=1e-6)
  assert grad[0, 0] == pytest.approx(0.26894142 - 0.88079708, abs=1e-5)


@pytest.mark.parametrize("path", common.PATHS)
def test_k14_1_labels_only(path):
  """The mirror: at alpha 0 no teacher counts, not even a hopeless one."""
  student, teacher = [[0.0, 1.0, -np.inf]], [[2.0, 0.0, 1.0]]
  loss, grad = common.PATHS[path](
      {"alpha": 0.0}, student, teacher, common.batch([[0, 0]])
  )
  assert loss == pytest.approx(1.31326169, abs=1e-6)
  assert grad[0, 0] == pytest.approx(0.26894142 - 1.0, abs=1e-5)


@pytest.mark.parametrize("how", ["replaced", "updated"])
def test_k14_1_teacher_changed_between_runs(how):
  """The trainer asks the teacher that it has now."""
  trainer = toys.trainer(
      student=toys.Table(common.STUDENT), teacher=toys.Table(common.TEACHER),
      optimizer=optax.sgd, progressive=common.one_stage(2, 0.0),
      strategy_fn=common.strategy,
  )
  data = [common.batch([[0]])] * 2
  trainer.train(data[:1])
  rows = [[1.0, 1.0, 1.0]] * 2
  if how == "replaced":
    trainer.teacher_model = toys.Table(rows)
  else:
    nnx.update(trainer.teacher_model, nnx.state(toys.Table(rows)))
  trainer.train(data)
  np.testing.assert_allclose(
      toys.history(trainer, "loss"),
      [0.91298290, common.kl([1.0, 1.0, 1.0], toys.F1_STUDENT)], atol=1e-6,
  )


def test_k14_1_stock_strategy_under_our_trainer():
  """Tunix's own strategy keeps its own objective, teacher included."""
  def loss(teacher):
    trainer = toys.trainer(
        student=toys.Table(common.STUDENT), teacher=toys.Table(teacher),
        optimizer=optax.sgd, progressive=common.one_stage(1),
        strategy_fn=lambda: strategies.LogitStrategy(
            toys.forward, toys.forward,
            lambda input_tokens, **_: jnp.eye(3)[input_tokens],
            temperature=2.0, alpha=1.0,
        ),
    )
    trainer.train([common.batch([[0]])])
    return toys.history(trainer, "loss")[0]

  assert loss(common.TEACHER) == pytest.approx(1.09122226, abs=1e-6)
  assert loss([[0.0, 1.0, 0.0]] * 2) == pytest.approx(0.0, abs=1e-6)
