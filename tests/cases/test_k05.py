"""K05: accumulated micro-batches do not add up to the full batch."""

import numpy as np
import optax
import pytest
from tunix.sft import hooks

from tests import toys
from tests.cases import common

ONE_F1 = common.batch([[0, 0, 0]], [[1, 0, 0]])
THREE_F2 = common.batch([[1, 1, 1]])


@pytest.mark.parametrize("filled", ["two", "with_empty"])
def test_k05_1_weight_per_token(filled):
  micro_batches = [ONE_F1, THREE_F2]
  if filled == "with_empty":
    micro_batches.insert(1, common.batch([[0, 1, 0]], [[0, 0, 0]]))
  student = toys.Table(common.STUDENT)
  trainer = toys.trainer(
      student=student, teacher=toys.Table(common.TEACHER),
      optimizer=optax.sgd, progressive=common.one_stage(1),
      strategy_fn=common.strategy,
      gradient_accumulation_steps=len(micro_batches),
  )
  trainer.train(micro_batches)
  (loss,) = toys.history(trainer, "loss")
  assert loss == pytest.approx(0.96517820, abs=1e-6)
  difference = common.softmax(common.STUDENT) - common.softmax(common.TEACHER)
  gradient = difference * np.array([[1 / 4], [3 / 4]])
  moved = np.array(common.STUDENT) - toys.parameters(student)["rows"]
  np.testing.assert_allclose(moved, gradient, atol=1e-6)
  assert toys.history(trainer, "grad_norm")[0] == pytest.approx(
      np.linalg.norm(gradient), abs=1e-6
  )


def splits(inputs, size):
  rows = len(inputs["input_tokens"])
  return [
      {k: v[i : i + size] for k, v in inputs.items()}
      for i in range(0, rows, size)
  ]


LENGTHS = np.array([1, 2, 5, 8])


def four_rows(vocabulary):
  rng = np.random.default_rng(5)
  tokens = rng.integers(0, vocabulary, (4, 8))
  return common.batch(tokens, np.arange(8) < LENGTHS[:, None])


def train_split(size, model, optimizer, updates=1, clip=None, **kwargs):
  student = model(1)
  trainer = toys.trainer(
      student=student, teacher=model(0), optimizer=optimizer,
      progressive={
          "stages": common.one_stage(updates, 0.1, **kwargs).stages,
          "max_grad_norm": clip,
      },
      strategy_fn=lambda: common.strategy(temperature=2.0, alpha=0.5),
      gradient_accumulation_steps=4 // size,
  )
  trainer.train(splits(four_rows(16), size) * updates)
  assert trainer.train_steps == updates
  names = ("loss", "grad_norm", "distill/hard_loss", "distill/valid_tokens")
  return toys.parameters(student), {
      n: toys.history(trainer, n) for n in names
  }


@pytest.mark.parametrize(
    ("optimizer", "clip", "kwargs", "sizes"),
    [
        (optax.sgd, None, {}, (2, 1)),
        (optax.sgd, 0.01, {"freeze_fraction": 0.5}, (1,)),
        (lambda lr: optax.adamw(lr, eps=1e-3), None, {}, (2,)),
    ],
    ids=["sgd", "clipped_and_frozen", "adamw"],
)
def test_k05_1_any_split_gives_the_same_update(
    optimizer, clip, kwargs, sizes
):
  model = lambda seed: toys.Toy(seed=seed, layers=2)
  whole, logged = train_split(4, model, optimizer, 2, clip, **kwargs)
  assert logged["distill/valid_tokens"].tolist() == [16, 16]
  assert logged["grad_norm"][0] > 0.01
  for size in sizes:
    weights, split_logged = train_split(
        size, model, optimizer, 2, clip, **kwargs
    )
    for name, value in whole.items():
      np.testing.assert_allclose(
          weights[name], value, atol=1e-5, err_msg=f"{size} {name}"
      )
    for name, value in logged.items():
      np.testing.assert_allclose(
          split_logged[name], value, rtol=1e-4, err_msg=f"{size} {name}"
      )


def test_k05_1_operation_by_operation():
  """`skip_jit` takes the same step."""
  def train(**kwargs):
    student = toys.Table(common.STUDENT)
    trainer = toys.trainer(
        student=student, teacher=toys.Table(common.TEACHER),
        optimizer=optax.adam, progressive=common.one_stage(2, 0.1),
        strategy_fn=common.strategy, gradient_accumulation_steps=2,
    )
    trainer.train([ONE_F1, THREE_F2] * 2, **kwargs)
    return toys.parameters(student)["rows"], toys.history(trainer, "loss")

  rows, loss = train()
  assert loss[0] == pytest.approx(0.96517820, abs=1e-6)
  rows_eager, loss_eager = train(skip_jit=True)
  np.testing.assert_allclose(rows_eager, rows, atol=1e-5)
  np.testing.assert_allclose(loss_eager, loss, atol=1e-6)


class FromList(hooks.DataHooks):
  """Tunix's other way to hand over data."""

  def __init__(self, batches):
    self._batches = iter(batches)

  def load_next_train_batch(self, train_ctx):
    return next(self._batches, None)

  def load_next_eval_batch(self, train_ctx):
    return None


def five(rate=1.0):
  return [common.batch([[0, 1, i % 2]]) for i in range(5)], rate


@pytest.mark.parametrize("how", ["iterable", "generator", "data_hooks"])
def test_k05_2_trailing_window_is_trained(how):
  micro_batches, _ = five()

  def train(data, accumulation, updates):
    student = toys.Table(common.STUDENT)
    trainer = toys.trainer(
        student=student, teacher=toys.Table(common.TEACHER),
        optimizer=optax.sgd, progressive=common.one_stage(updates, 0.5),
        strategy_fn=common.strategy,
        gradient_accumulation_steps=accumulation,
    )
    if how == "data_hooks":
      trainer.with_data_hooks(FromList(data))
    trainer.train(iter(data) if how == "generator" else data)
    return trainer, toys.parameters(student)["rows"]

  trainer, rows = train(micro_batches, 2, 3)
  assert trainer.train_steps == 3
  tokens = toys.history(trainer, "distill/valid_tokens")
  assert tokens.tolist() == [6, 6, 3]
  # The same as whole windows of 2, 2 and 1 rows.
  merged = [
      {
          k: np.concatenate([b[k] for b in window])
          for k in ("input_tokens", "input_mask")
      }
      for window in (micro_batches[:2], micro_batches[2:4], micro_batches[4:])
  ]
  _, whole = train(merged, 1, 3)
  np.testing.assert_allclose(rows, whole, atol=1e-6)


def test_k05_2_resume_replays_nothing(tmp_path):
  seen = []

  def train():
    trainer = toys.trainer(
        student=toys.Table(common.STUDENT),
        teacher=toys.Table(common.TEACHER), optimizer=optax.sgd,
        progressive=common.one_stage(10, 0.5), strategy_fn=common.strategy,
        gradient_accumulation_steps=2,
        checkpoint_root_directory=str(tmp_path),
    )

    def record(x):
      seen.append(1)
      return common.everything(x)

    trainer.with_gen_model_input_fn(record)
    trainer.train(five()[0])
    return trainer

  assert train().train_steps == 3
  assert len(seen) == 5
  again = train()
  assert again.train_steps == 3
  assert len(seen) == 5


def test_k05_2_data_grows_after_a_trailing_window(tmp_path):
  """Three updates took 5 batches; with 8 to read, batch 6 comes next."""
  seen = []

  def train(number):
    trainer = toys.trainer(
        student=toys.Table(common.STUDENT),
        teacher=toys.Table(common.TEACHER), optimizer=optax.sgd,
        progressive=common.one_stage(10, 0.5), strategy_fn=common.strategy,
        gradient_accumulation_steps=2,
        checkpoint_root_directory=str(tmp_path),
    )

    def record(x):
      seen.append(int(x.input_mask.sum()))
      return common.everything(x)

    trainer.with_gen_model_input_fn(record)
    # Batch i has i valid tokens.
    trainer.train(
        [
            common.batch(np.zeros((1, 9)), np.arange(9)[None] < i)
            for i in range(1, number + 1)
        ]
    )

  train(5)
  assert seen == [1, 2, 3, 4, 5]
  train(8)
  assert seen == [1, 2, 3, 4, 5, 6, 7, 8]
