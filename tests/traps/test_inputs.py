"""What cannot train says so, once, and leaves nothing behind."""

import numpy as np
import optax
import pytest

from tests import toys
from tests.traps import test_accumulation
import tunix_progdistill as tpd


def _list(trainer):
  trainer.train([])


def _generator(trainer):
  trainer.train(batch for batch in [])


def _consumed(trainer):
  data = iter(toys.batches(2))
  list(data)
  trainer.train(data)


def _hooks(trainer):
  trainer.with_data_hooks(test_accumulation.Data([]))
  trainer.train(())


@pytest.mark.parametrize("accumulation", [None, 2])
@pytest.mark.parametrize("start", [_list, _generator, _consumed, _hooks])
def test_empty_dataset(tmp_path, start, accumulation):
  """Trap 15: Tunix "succeeds" without data and writes a checkpoint."""
  trainer = toys.trainer(
      checkpoint_root_directory=str(tmp_path),
      gradient_accumulation_steps=accumulation,
  )
  with pytest.raises(ValueError, match="train_ds must hold at least") as e:
    start(trainer)
  assert "\n" not in str(e.value)
  assert toys.files(tmp_path) == []
  assert trainer.train_steps == 0


@pytest.mark.parametrize("through_hooks", [False, True])
def test_finished_run_may_be_called_again(tmp_path, through_hooks):
  """Trap 15: a run that is done has no batch left, and that is no error."""
  make = lambda: toys.trainer(checkpoint_root_directory=str(tmp_path))
  make().train(toys.batches(6))
  again = make()
  assert again.train_steps == 6
  if through_hooks:
    # A loader that goes on where it stopped is at its end.
    again.with_data_hooks(test_accumulation.Data([]))
    again.train(())
  else:
    again.train(toys.batches(6))
  assert again.train_steps == 6


def test_skip_jit_trains():
  """Trap 15: Tunix's own train(skip_jit=True) calls its step wrongly."""
  after = []
  for skip_jit in (False, True):
    trainer = toys.trainer(
        student=toys.Toy(seed=1, layers=2), teacher=toys.Toy(layers=1),
        optimizer=optax.sgd,
        progressive=tpd.StagePlan(
            stages=(
                tpd.Stage(trainable_layers=1, updates=1), tpd.Stage(updates=1)
            ),
            learning_rate=0.1,
        ),
    )
    trainer.train(toys.batches(2, rows=2), skip_jit=skip_jit)
    assert trainer.train_steps == 2
    assert (sum(trainer.engine.compiles) == 0) == skip_jit
    after.append(toys.parameters(trainer.model))
  start = toys.parameters(toys.Toy(seed=1, layers=2))
  for path, value in after[0].items():
    assert np.any(value != start[path]), path
    np.testing.assert_allclose(
        after[1][path], value, rtol=1e-4, atol=1e-6, err_msg=path
    )


@pytest.mark.parametrize("student", [12, 20])
def test_vocabulary_mismatch(tmp_path, student):
  """Trap 15: Tunix fails in a broadcast, or does not fail at all."""
  model = toys.Toy(seed=1, vocabulary=student)
  before = toys.parameters(model)
  with pytest.raises(ValueError, match="same vocabulary") as e:
    trainer = toys.trainer(
        student=model, checkpoint_root_directory=str(tmp_path)
    )
    trainer.train(toys.batches(2, vocabulary=10))
  assert "\n" not in str(e.value)
  assert "16" in str(e.value)
  assert str(student) in str(e.value)
  assert toys.files(tmp_path) == []
  for path, value in toys.parameters(model).items():
    np.testing.assert_array_equal(value, before[path], err_msg=path)


def test_vocabulary_mismatch_that_the_configs_tell():
  """Trap 15: known before anything is built or traced."""
  with pytest.raises(ValueError, match="vocabulary size of student") as e:
    tpd.ProgressiveDistillationTrainer(
        toys.gemma3_model(num_embed=64), toys.gemma3_model(num_embed=80),
        toys.strategy(), optax.adamw, toys.config(toys.plan()),
    )
  assert "\n" not in str(e.value)
  assert "(64, 80)" in str(e.value)


@pytest.mark.parametrize("accumulation", [None, 2])
def test_resumed_run_sees_each_batch_of_a_hook_once(tmp_path, accumulation):
  """Trap 24: Tunix skips trained batches of an iterable, not of a hook."""
  seen = []

  def gen(x):
    seen.append(int(x.input_tokens[0, 0]))
    return {"input_tokens": x.input_tokens, "input_mask": x.input_mask}

  def make():
    trainer = toys.trainer(
        student=toys.Toy(seed=1, layers=2), teacher=toys.Toy(layers=1),
        optimizer=optax.sgd,
        progressive=tpd.StagePlan(
            stages=(tpd.Stage(updates=4),), learning_rate=0.1
        ),
        checkpoint_root_directory=str(tmp_path),
        gradient_accumulation_steps=accumulation,
    )
    return trainer.with_gen_model_input_fn(gen)

  each = accumulation or 1
  numbered = [toys.batch(np.full((2, 4), i)) for i in range(4 * each)]
  for part in (numbered[: 2 * each], numbered[2 * each :]):
    trainer = make()
    trainer.with_data_hooks(test_accumulation.Data(part))
    trainer.train(())
  assert trainer.train_steps == 4
  assert seen == list(range(4 * each))


def test_resumed_run_skips_an_iterable_once(tmp_path):
  """Trap 24: the same data again, and each batch is trained on once."""
  seen = []

  def read(x):
    seen.append(int(x.input_tokens[0, 0]))
    return {"input_tokens": x.input_tokens, "input_mask": x.input_mask}

  numbered = [toys.batch(np.full((2, 4), i)) for i in range(4)]
  for data in (numbered[:2], numbered):
    trainer = toys.trainer(
        student=toys.Toy(seed=1, layers=2), teacher=toys.Toy(layers=1),
        optimizer=optax.sgd,
        progressive=tpd.StagePlan(
            stages=(tpd.Stage(updates=4),), learning_rate=0.1
        ),
        checkpoint_root_directory=str(tmp_path),
    )
    trainer.with_gen_model_input_fn(read)
    trainer.train(data)
  assert seen == [0, 1, 2, 3]


def test_hooks_are_the_users_again_afterwards():
  """Trap 24: what wraps the data hooks is gone after train(), come what may."""
  for batches in (toys.batches(1), []):
    trainer = toys.trainer(progressive=toys.plan(updates=(1, 1, 1)))
    data = test_accumulation.Data(batches)
    trainer.with_data_hooks(data)
    try:
      trainer.train(())
    except ValueError:
      assert not batches
    assert trainer.data_hooks is data
