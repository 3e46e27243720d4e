"""K26: a resumed run that trains on the wrong data."""

import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import qwix

from tests import toys
from tests.cases import common
import tunix_progdistill as tpd


def numbered(order):
  """Batch i consists of token i, so that it tells its number."""
  return [common.batch(np.full((2, 3), i)) for i in order]


ROWS = np.random.default_rng(26).normal(size=(2, 10, 4)).astype(np.float32)


def make(root, *, max_steps=None, updates=20, accumulation=1, student=None):
  seen = []
  half = updates // 2
  trainer = toys.trainer(
      student=toys.Table(ROWS[0]) if student is None else student,
      teacher=toys.Table(ROWS[1]), optimizer=optax.adamw,
      progressive=tpd.StagePlan(
          stages=(
              tpd.Stage(updates=half, learning_rate=0.1),
              tpd.Stage(updates=updates - half, learning_rate=0.05),
          ),
          temperature=tpd.anneal(3.0, 1.0, "linear"),
      ),
      strategy_fn=lambda: common.strategy(alpha=0.5), max_steps=max_steps,
      gradient_accumulation_steps=accumulation,
      checkpoint_root_directory=None if root is None else str(root),
      checkpointing_options=ocp.CheckpointManagerOptions(
          save_interval_steps=1, max_to_keep=3
      ),
  )

  def record(x):
    seen.append(int(x.input_tokens[0, 0]))
    return common.everything(x)

  return trainer.with_gen_model_input_fn(record), seen


def straight(data, **kwargs):
  trainer, seen = make(None, **kwargs)
  trainer.train(data)
  return toys.parameters(trainer.model)["rows"], seen


ORDERS = {
    "one_epoch": (list(range(10)), 4),
    "second_epoch": (list(range(10)) * 2, 14),
    "shuffled": (
        [
            int(i) for epoch in range(2)
            for i in np.random.default_rng([7, epoch]).permutation(10)
        ],
        14,
    ),
    "epoch_end": (list(range(10)) * 2, 10),
}


@pytest.mark.parametrize("order", ORDERS)
def test_k26_1_goes_on_with_the_next_batch(order, tmp_path):
  ids, stop = ORDERS[order]
  updates = len(ids)
  expected, all_seen = straight(numbered(ids), updates=updates)
  assert all_seen == ids

  trainer, seen = make(tmp_path, max_steps=stop, updates=updates)
  trainer.train(numbered(ids))
  assert seen == ids[:stop]
  assert trainer.train_steps == stop

  trainer, seen = make(tmp_path, updates=updates)
  assert trainer.train_steps == stop
  trainer.train(numbered(ids))
  assert seen == ids[stop:]
  assert trainer.train_steps == updates
  np.testing.assert_array_equal(
      toys.parameters(trainer.model)["rows"], expected
  )


def test_k26_1_accumulation(tmp_path):
  """4 updates of 2 micro-batches are 8 batches."""
  ids = list(range(10)) * 2
  expected, _ = straight(numbered(ids), updates=10, accumulation=2)
  trainer, seen = make(tmp_path, max_steps=4, updates=10, accumulation=2)
  trainer.train(numbered(ids))
  assert seen == ids[:8]
  trainer, seen = make(tmp_path, updates=10, accumulation=2)
  trainer.train(numbered(ids))
  assert seen == ids[8:]
  np.testing.assert_array_equal(
      toys.parameters(trainer.model)["rows"], expected
  )


@pytest.mark.parametrize("accumulation", [1, 2])
def test_k26_1_killed_in_mid_window(accumulation, tmp_path):
  """No clean end: the data raises after 4 updates and a part of the fifth."""
  ids = list(range(10)) * accumulation
  kwargs = {"updates": 10, "accumulation": accumulation}
  expected, _ = straight(numbered(ids), **kwargs)

  def dies():
    yield from numbered(ids)[: 5 * accumulation - 1]
    raise KeyboardInterrupt

  trainer, _ = make(tmp_path, **kwargs)
  with pytest.raises(KeyboardInterrupt):
    trainer.train(dies())
  trainer.checkpoint_manager.close()

  trainer, seen = make(tmp_path, **kwargs)
  assert trainer.train_steps == 4
  trainer.train(numbered(ids))
  assert seen == ids[4 * accumulation :]
  np.testing.assert_array_equal(
      toys.parameters(trainer.model)["rows"], expected
  )


def test_k26_1_many_short_runs(tmp_path):
  """Stopped after every single update, across the stages' boundary."""
  ids = list(range(6))
  expected, _ = straight(numbered(ids), updates=6)
  all_seen = []
  for stop in range(1, 7):
    trainer, seen = make(tmp_path, max_steps=stop, updates=6)
    trainer.train(numbered(ids))
    all_seen += seen
  assert all_seen == ids
  np.testing.assert_array_equal(
      toys.parameters(trainer.model)["rows"], expected
  )


def test_k26_1_lora_student(tmp_path):
  """Adapters alone are saved while it runs; the closing save holds all."""
  ids = list(range(6))

  def train(root, max_steps):
    student = qwix.apply_lora_to_model(
        toys.Toy(seed=1, layers=2),
        qwix.LoraProvider(module_path=".*linear", rank=2, alpha=2.0),
        np.zeros((1, 3), np.int32),
    )
    trainer = toys.trainer(
        student=student, teacher=toys.Toy(layers=2),
        progressive=common.one_stage(6, 0.1), max_steps=max_steps,
        checkpoint_root_directory=None if root is None else str(root),
    )
    seen = []

    def record(x):
      seen.append(int(x.input_tokens[0, 0]))
      return common.everything(x)

    trainer.with_gen_model_input_fn(record)
    trainer.train(numbered(ids))
    return toys.parameters(student), seen

  expected, _ = train(None, None)
  assert train(tmp_path, 2)[1] == [0, 1]
  weights, seen = train(tmp_path, None)
  assert seen == [2, 3, 4, 5]
  for name, value in expected.items():
    np.testing.assert_array_equal(weights[name], value, err_msg=name)
