"""A resumed run ends bit-equal to the straight one."""

import pathlib
import signal
import subprocess
import sys

import numpy as np
import optax
import pytest

from tests import resume_worker
from tests import toys
import tunix_progdistill as tpd

_ROOT = pathlib.Path(__file__).parent.parent


def _worker(adapter, folder, accumulation, kill_at=None):
  command = [
      sys.executable, "-m", "tests.resume_worker", adapter, str(folder),
      str(accumulation),
  ] + ([str(kill_at)] if kill_at is not None else [])
  return subprocess.run(
      command, cwd=_ROOT, capture_output=True, text=True, check=False,
      timeout=300,
  )


@pytest.mark.parametrize(
    ("adapter", "accumulation"),
    [
        ("trainer", 3), ("hook", 3),
        pytest.param("trainer", 1, marks=pytest.mark.slow),
    ],
)
def test_killed_in_every_stage(tmp_path, adapter, accumulation):
  """kill -9 in the first, second and third stage, each time resumed."""
  straight = tmp_path / "straight"
  killed = tmp_path / "killed"
  done = _worker("trainer", straight, accumulation)
  assert done.returncode == 0, done.stderr[-2000:]
  folder = killed / "checkpoints" / ("progressive" * (adapter == "hook"))
  for update in (1, 3, 5):
    dead = _worker(adapter, killed, accumulation, update)
    assert dead.returncode == -signal.SIGKILL, dead.stderr[-2000:]
    assert not (killed / "final.npz").exists()
    steps = {int(p.name) for p in folder.glob("[0-9]*")}
    assert max(steps) == update
  done = _worker(adapter, killed, accumulation)
  assert done.returncode == 0, done.stderr[-2000:]
  expected = np.load(straight / "final.npz")
  found = np.load(killed / "final.npz")
  assert sorted(found) == sorted(expected)
  for name in expected:
    np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


class Stop(Exception):
  """Ends a run in the middle."""


def _until(batches, number):
  yield from batches[:number]
  raise Stop


def _interrupted(folder, accumulation, number, **kwargs):
  """Runs until `number` micro-batches are done; returns nothing."""
  trainer = resume_worker.make(folder, accumulation, **kwargs)
  batches = resume_worker.data(accumulation)
  with pytest.raises(Stop):
    trainer.train(_until(batches, number))
  trainer.checkpoint_manager.close()


@pytest.mark.parametrize(
    ("accumulation", "stops"), [(1, (1, 2, 3, 4, 5)), (2, (3, 8))]
)
def test_interrupted_at_any_update(tmp_path, accumulation, stops):
  """Stopped at every update, boundaries and open windows included."""
  straight = resume_worker.make(tmp_path / "straight", accumulation)
  straight.train(resume_worker.data(accumulation))
  expected = toys.parameters(straight.model)
  for stop in stops:
    folder = tmp_path / str(stop)
    _interrupted(folder, accumulation, stop)
    resumed = resume_worker.make(folder, accumulation)
    assert resumed.train_steps == stop // accumulation
    resumed.train(resume_worker.data(accumulation))
    assert resumed.train_steps == 6
    for name, value in toys.parameters(resumed.model).items():
      np.testing.assert_array_equal(value, expected[name], err_msg=name)
    first = stop // accumulation
    np.testing.assert_array_equal(
        toys.history(resumed, "distill/temperature"),
        toys.history(straight, "distill/temperature")[first:],
    )
    np.testing.assert_array_equal(
        toys.history(resumed, "loss"), toys.history(straight, "loss")[first:]
    )


def test_finished_run_does_nothing_more(tmp_path):
  first = resume_worker.make(tmp_path, 1)
  first.train(resume_worker.data(1))
  again = resume_worker.make(tmp_path, 1)
  assert again.train_steps == 6
  again.train(resume_worker.data(1))
  assert again.engine.compiles == (0, 0, 0)
  for name, value in toys.parameters(again.model).items():
    np.testing.assert_array_equal(value, toys.parameters(first.model)[name])


def test_events_are_resumed(tmp_path):
  """A stage ended early stays ended, and the rate stays scaled."""

  def run(folder, stop):
    trainer = resume_worker.make(folder, 1)
    batches = resume_worker.data(1)

    def feed():
      for i, batch in enumerate(batches):
        if i == 1 and trainer.train_steps == 1:
          trainer.record_event("advance")
          trainer.record_event("scale_rate", 0.5)
        if i == stop:
          raise Stop
        yield batch

    if stop is None:
      trainer.train(feed())
    else:
      with pytest.raises(Stop):
        trainer.train(feed())
      trainer.checkpoint_manager.close()
    return trainer

  straight = run(tmp_path / "straight", None)
  assert toys.history(straight, "progressive/stage").tolist() == [
      0, 1, 1, 2, 2, 2
  ]
  np.testing.assert_allclose(
      toys.history(straight, "learning_rate"),
      [1e-2, 2.5e-3, 2.5e-3, 5e-4, 5e-4, 5e-4], rtol=1e-6,
  )
  run(tmp_path / "cut", 2)
  resumed = run(tmp_path / "cut", None)
  for name, value in toys.parameters(resumed.model).items():
    np.testing.assert_array_equal(
        value, toys.parameters(straight.model)[name], err_msg=name
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"progressive": toys.plan(updates=(3, 2, 1))},
            r"stages\[0\]\.updates: 2 -> 3",
        ),
        (
            {"progressive": toys.plan(rate=2e-2)},
            r"stages\[0\]\.learning_rate: 0.01 -> 0.02",
        ),
        (
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps: 1 -> 2",
        ),
        (
            {
                "progressive": tpd.ProgressiveConfig(
                    plan=toys.plan(), max_grad_norm=1.0
                )
            },
            "max_grad_norm: None -> 1.0",
        ),
    ],
)
def test_changed_plan_is_refused(tmp_path, change, message):
  kwargs = {
      "progressive": toys.plan(),
      "checkpoint_root_directory": str(tmp_path),
      "checkpointing_options": resume_worker.options(),
  }
  toys.trainer(**kwargs).train(toys.batches(6))
  with pytest.raises(ValueError, match=message) as e:
    toys.trainer(**(kwargs | change))
  assert "\n" not in str(e.value)


def test_longer_open_run_is_not_another_plan(tmp_path):
  """`max_steps` may grow where the plan's last stage is open."""
  plan = tpd.StagePlan(
      stages=(
          tpd.Stage(freeze_fraction=0.5, updates=2, learning_rate=1e-2),
          tpd.Stage(learning_rate=1e-3),
      )
  )
  kwargs = {
      "progressive": plan, "checkpoint_root_directory": str(tmp_path),
      "checkpointing_options": resume_worker.options(),
  }
  toys.trainer(max_steps=4, **kwargs).train(toys.batches(8))
  longer = toys.trainer(max_steps=8, **kwargs)
  assert longer.train_steps == 4
  longer.train(toys.batches(8))
  assert longer.train_steps == 8


def test_newest_checkpoint_that_cannot_be_read_is_passed_over(tmp_path):
  first = resume_worker.make(tmp_path, 1)
  first.train(resume_worker.data(1))
  newest = tmp_path / "checkpoints" / "6"
  broken = 0
  for file in newest.rglob("*"):
    if file.is_file():
      file.write_bytes(b"")
      broken += 1
  assert broken
  resumed = resume_worker.make(tmp_path, 1)
  assert resumed.train_steps == 5
  resumed.train(resume_worker.data(1))
  for name, value in toys.parameters(resumed.model).items():
    np.testing.assert_array_equal(value, toys.parameters(first.model)[name])


def test_checkpoints_of_another_trainer_are_refused(tmp_path):
  from tunix.distillation import distillation_trainer
  from tunix.distillation import strategies

  stock = distillation_trainer.DistillationTrainer(
      toys.Toy(seed=1), toys.Toy(seed=0),
      strategies.LogitStrategy(
          toys.forward, toys.forward,
          lambda input_tokens, input_mask: toys.one_hot(input_tokens),
      ),
      optax.sgd(0.1),
      distillation_trainer.TrainingConfig(
          eval_every_n_steps=100, max_steps=2,
          checkpoint_root_directory=str(tmp_path),
          checkpointing_options=resume_worker.options(),
      ),
  )
  stock.train(toys.batches(2))
  with pytest.raises(ValueError, match="of another trainer at update 2"):
    toys.trainer(checkpoint_root_directory=str(tmp_path))


def test_tunix_reads_our_checkpoints(tmp_path):
  """Model weights restore through Tunix's own manager."""
  from tunix.sft import checkpoint_manager

  trainer = toys.trainer(
      checkpoint_root_directory=str(tmp_path),
      checkpointing_options=resume_worker.options(),
  )
  trainer.train(toys.batches(6))
  other = toys.Toy(seed=3)
  manager = checkpoint_manager.CheckpointManager(str(tmp_path))
  step, metadata = manager.maybe_restore(other)
  manager.close()
  assert step == 6
  assert "progressive" in metadata
  for name, value in toys.parameters(other).items():
    np.testing.assert_array_equal(value, toys.parameters(trainer.model)[name])
