"""Tokens that do not count leave no trace in loss, metrics or gradient."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import toys
import tunix_progdistill as tpd

# Row 2 stands for padding: whatever a model says there, nobody may hear it.
_STUDENT = [toys.F1_STUDENT, toys.F1_TEACHER, [np.nan, np.inf, 0.0]]
_TEACHER = [toys.F1_TEACHER, toys.F1_STUDENT, [-np.inf, np.nan, 1e30]]
_PLAIN = toys.batch([[0, 0]])
_PADDED = toys.batch([[0, 0, 2, 2]], [[1, 1, 0, 0]])
_LEFT = toys.batch([[2, 2, 0, 0]], [[0, 0, 1, 1]])


def _one_hot(input_tokens, input_mask):
  """Rows of one-hot labels, all zero where a token is to be ignored."""
  del input_tokens
  return jax.nn.one_hot(jnp.where(input_mask != 0, 0, -1), 3)


def _inputs(batch):
  return {"input_tokens": batch.input_tokens, "input_mask": batch.input_mask}


@pytest.mark.parametrize("labels_fn", [toys.identity_labels, _one_hot])
@pytest.mark.parametrize("batch", [_PLAIN, _PADDED, _LEFT])
@pytest.mark.parametrize("stock", [False, True], ids=["logits", "models"])
def test_padding_changes_neither_kl_nor_ce(labels_fn, batch, stock):
  """Trap 3: Tunix averages over padding, and NaN there poisons the loss."""
  strategy = toys.strategy(labels_fn=labels_fn, temperature=1.0, alpha=0.25)
  student, teacher = toys.Table(_STUDENT), toys.Table(_TEACHER)
  inputs = _inputs(batch)
  if stock:
    teacher_output = strategy.get_teacher_outputs(teacher, inputs)
    loss, metrics = strategy.get_train_loss(student, teacher_output, inputs)
    ce, _ = strategy.get_eval_loss(student, inputs)
  else:
    logits, labels = student(inputs["input_tokens"]), labels_fn(**inputs)
    loss, metrics = strategy.compute_loss(
        logits, teacher(inputs["input_tokens"]), labels
    )
    ce, _ = strategy.compute_eval_loss(logits, labels)
  assert float(metrics["distill/kl_div"]) == pytest.approx(toys.F1_KL, rel=1e-5)
  assert float(metrics["distill/hard_loss"]) == pytest.approx(
      toys.F1_CE, rel=1e-5
  )
  assert float(ce) == pytest.approx(toys.F1_CE, rel=1e-5)
  assert float(loss) == pytest.approx(
      0.25 * toys.F1_KL + 0.75 * toys.F1_CE, rel=1e-5
  )


@pytest.mark.parametrize("batch", [_PADDED, _LEFT])
def test_padding_changes_no_gradient(batch):
  """Trap 3: one update equals that of the batch without its padding."""
  after = []
  for data in (_PLAIN, batch):
    student = toys.Table(_STUDENT)
    trainer = toys.trainer(
        student=student, teacher=toys.Table(_TEACHER), optimizer=optax.sgd,
        strategy_fn=lambda: toys.strategy(labels_fn=toys.identity_labels),
        progressive=tpd.StagePlan(
            stages=(tpd.Stage(updates=1),), learning_rate=1.0
        ),
    )
    trainer.train([data])
    after.append(np.array(nnx.state(student)["rows"].get_value()))
  assert np.all(np.isfinite(after[1][:2]))
  assert not np.allclose(after[1][0], toys.F1_STUDENT)
  np.testing.assert_allclose(after[1], after[0], rtol=1e-6)


def test_loss_mask_excludes_the_prompt():
  """Trap 3: an explicit mask works beside labels that know of none."""
  strategy = toys.strategy(
      labels_fn=lambda input_tokens, input_mask: jnp.zeros_like(input_tokens),
      loss_mask_fn=lambda input_tokens, input_mask: input_tokens == 0,
      temperature=1.0, alpha=1.0,
  )
  inputs = _inputs(toys.batch([[1, 1, 1, 0]]))
  student, teacher = toys.Table(_STUDENT), toys.Table(_TEACHER)
  loss, _ = strategy.get_train_loss(
      student, strategy.get_teacher_outputs(teacher, inputs), inputs
  )
  assert float(loss) == pytest.approx(toys.F1_KL, rel=1e-5)


def test_no_valid_token_is_no_update():
  """Trap 3: 0 / 0 must be neither NaN nor a step of weight decay."""
  student = toys.Toy(seed=1)
  before = toys.parameters(student)
  trainer = toys.trainer(
      student=student,
      progressive=tpd.StagePlan(
          stages=(tpd.Stage(updates=1),), learning_rate=0.1
      ),
      optimizer=lambda lr: optax.adamw(lr, weight_decay=0.5),
  )
  tokens = np.zeros((2, 4))
  trainer.train([toys.batch(tokens, np.zeros_like(tokens))])
  assert toys.history(trainer, "loss") == [0.0]
  for path, value in toys.parameters(student).items():
    np.testing.assert_array_equal(value, before[path], err_msg=path)
