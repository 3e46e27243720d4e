"""Checkpoints: closing, at a boundary, and such as fail."""

import shutil

import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from tunix.distillation import distillation_trainer
from tunix.sft import checkpoint_manager as tunix_checkpoints

from tests import toys
import tunix_progdistill as tpd


def _every_update(**kwargs):
  return ocp.CheckpointManagerOptions(
      save_interval_steps=1, max_to_keep=20, **kwargs
  )


def _metadata(root, step):
  with ocp.CheckpointManager(root) as manager:
    return manager.metadata(step).custom_metadata


class Mine(tpd.ProgressiveDistillationTrainer):
  """A user's trainer with metadata of its own."""

  def custom_checkpoint_metadata(self):
    return {"mine": 7}


def _make(root, **kwargs):
  return toys.trainer(checkpoint_root_directory=str(root), **kwargs)


def _make_mine(root):
  return Mine(
      toys.Toy(seed=1), toys.Toy(seed=0), toys.strategy(), optax.adamw,
      toys.config(toys.plan(), checkpoint_root_directory=str(root)),
  )


def test_closing_checkpoint_carries_the_run(tmp_path):
  """Trap 10: Tunix writes its closing checkpoint without any metadata."""
  trainer = _make_mine(tmp_path)
  trainer.record_event("advance")  # ends stage 0 before its first update
  trainer.train(toys.batches(3))
  found = _metadata(tmp_path, 3)
  assert found["mine"] == 7
  assert found["progressive"]["events"] == [
      {"update": 0, "kind": "advance", "value": 1.0}
  ]
  assert len(found["progressive"]["fingerprint"]["stages"]) == 3
  again = _make_mine(tmp_path)
  assert again.train_steps == 3
  assert again.engine.run_state == trainer.engine.run_state
  assert again.engine.stage == 2


class MineStock(distillation_trainer.DistillationTrainer):
  """A user's subclass of Tunix's trainer."""

  custom_checkpoint_metadata = Mine.custom_checkpoint_metadata


def test_attached_checkpoint_carries_the_users_metadata(tmp_path):
  """The closing one too, and the resumed instance has it back."""
  make = lambda: toys.hooked(
      kind=MineStock, checkpoint_root_directory=str(tmp_path)
  )
  make().train(toys.batches(3))
  found = _metadata(toys.saved(tmp_path), 3)
  assert found["mine"] == 7
  assert len(found["progressive"]["fingerprint"]["stages"]) == 3
  again = make()
  assert again.train_steps == 3
  assert again._restored_custom_metadata["mine"] == 7


@pytest.fixture(scope="module")
def all_updates(tmp_path_factory):
  """(folder with a checkpoint of every update, weights by update)."""
  root = tmp_path_factory.mktemp("run")
  trainer = _make(root, checkpointing_options=_every_update())
  weights = []

  def data():
    for batch in toys.batches(6):
      weights.append(toys.parameters(trainer.model))
      yield batch

  trainer.train(data())
  return toys.saved(root), [*weights, toys.parameters(trainer.model)]


def _only(root, update, to):
  """A run at `to` that has the checkpoint of `update` and no other."""
  _make(to).close()
  shutil.copytree(root / str(update), toys.saved(to) / str(update))


@pytest.mark.parametrize("update", [1, 2, 3, 4, 5, 6])
def test_every_update_restores(all_updates, tmp_path, update):
  """Trap 10: at a boundary the checkpoint is of the stage that ended.

  An optimizer of another structure makes the constructor raise.
  """
  root, weights = all_updates
  _only(root, update, tmp_path)
  trainer = _make(tmp_path)
  assert trainer.train_steps == update
  assert trainer.engine.stage == (0, 0, 1, 1, 2, 2)[update - 1]
  for path, value in toys.parameters(trainer.model).items():
    np.testing.assert_array_equal(value, weights[update][path], err_msg=path)
  assert int(trainer.optimizer.step[...]) == update


def test_boundary_goes_on_as_if_never_stopped(all_updates, tmp_path):
  """Trap 10: from the boundary, the rest of the run is bit-equal."""
  root, weights = all_updates
  _only(root, 4, tmp_path)
  trainer = _make(tmp_path)
  trainer.train(toys.batches(6))
  assert trainer.train_steps == 6
  for path, value in toys.parameters(trainer.model).items():
    np.testing.assert_array_equal(value, weights[6][path], err_msg=path)


def test_tunix_reads_what_we_write(all_updates):
  """Trap 10: the items keep Tunix's names and layout."""
  root, weights = all_updates
  model = toys.Toy(seed=5)
  manager = tunix_checkpoints.CheckpointManager(str(root))
  step, metadata = manager.maybe_restore(model)
  manager.close()
  assert step == 6
  assert "progressive" in metadata
  for path, value in toys.parameters(model).items():
    np.testing.assert_array_equal(value, weights[6][path], err_msg=path)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_failed_save_raises(tmp_path, asynchronous):
  """Trap 15: a background save that failed can pass unseen."""
  root = tmp_path / "checkpoints"
  trainer = _make(
      root,
      checkpointing_options=_every_update(
          enable_async_checkpointing=asynchronous
      ),
  )

  def data():
    for i, batch in enumerate(toys.batches(6)):
      if i == 2:
        trainer.checkpoint_manager.wait()
        shutil.rmtree(root)
        root.write_text("a file where the folder was")
      yield batch

  with pytest.raises((OSError, ValueError, RuntimeError)):
    trainer.train(data())


def test_save_that_never_arrives_raises(tmp_path, monkeypatch):
  """Trap 15: orbax says "saved" when it has begun, not when it is done."""
  real = ocp.CheckpointManager.save
  monkeypatch.setattr(
      ocp.CheckpointManager, "save", lambda self, step, **kwargs: True
  )
  trainer = _make(tmp_path)
  with pytest.raises(RuntimeError, match="update 6 was not written"):
    trainer.train(toys.batches(6))
  monkeypatch.setattr(ocp.CheckpointManager, "save", real)


def test_unwritable_folder_is_told_before_training(tmp_path):
  """Trap 15: an hour of training must not end in a folder of no use."""
  blocked = tmp_path / "file"
  blocked.write_text("")
  with pytest.raises(ValueError, match="checkpoint_root_directory must") as e:
    _make(blocked / "checkpoints")
  assert "\n" not in str(e.value)


def test_failed_save_leaves_the_last_good_one(tmp_path):
  """Trap 15: a truncated checkpoint is passed over, not fatal."""
  trainer = _make(tmp_path, checkpointing_options=_every_update())
  trainer.train(toys.batches(3))
  for file in (toys.saved(tmp_path) / "3" / "model_params").rglob("*"):
    if file.is_file():
      file.write_bytes(b"")
  again = _make(tmp_path)
  assert again.train_steps == 2
