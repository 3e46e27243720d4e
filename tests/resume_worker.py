"""One run of a tiny staged distillation, for tests that kill it.

  python -m tests.resume_worker ADAPTER FOLDER ACCUMULATION [KILL_AT_UPDATE]

Trains with a checkpoint at every update, sends itself SIGKILL at the start of
the given update, or else writes the final weights to FOLDER/final.npz. ADAPTER
is `trainer`, or `hook` for a stock trainer that a hook is attached to.
"""

import os
import pathlib
import signal
import sys

import numpy as np
import orbax.checkpoint as ocp
from tunix.sft import hooks

from tests import conftest  # noqa: F401  (shared compilation cache)
from tests import toys
import tunix_progdistill as tpd


class KillAt(hooks.TrainingHooks):
  """SIGKILL at the start of an update, in the middle of its window."""

  def __init__(self, update: int | None):
    self._update = update

  def on_train_start(self, train_ctx):
    pass

  def on_train_end(self, train_ctx):
    pass

  def on_train_step_start(self, train_ctx):
    if train_ctx.train_steps == self._update:
      train_ctx.checkpoint_manager.wait()  # so that the test knows what it has
      os.kill(os.getpid(), signal.SIGKILL)

  def on_train_step_end(self, train_ctx, train_step, train_loss):
    pass

  def on_eval_step_start(self, train_ctx):
    pass

  def on_eval_step_end(self, train_ctx, eval_loss):
    pass


def options() -> ocp.CheckpointManagerOptions:
  """A checkpoint at every update; all are kept."""
  return ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=None)


def make(
    folder: pathlib.Path, accumulation: int, adapter: str = "trainer", **kwargs
):
  """A trainer over six updates in three stages, annealed, with dropout."""
  kwargs.setdefault("student", toys.Toy(seed=1, dropout=0.1))
  made = {"trainer": toys.trainer, "hook": toys.hooked}[adapter]
  return made(
      progressive=tpd.ProgressiveConfig(
          plan=toys.plan(
              updates=(2, 2, 2), temperature=tpd.anneal(3.0, 1.0, "linear")
          ),
          max_grad_norm=1.0,
      ),
      checkpoint_root_directory=str(folder / "checkpoints"),
      checkpointing_options=options(),
      gradient_accumulation_steps=accumulation if accumulation > 1 else None,
      **kwargs,
  )


def data(accumulation: int):
  return toys.batches(6 * accumulation, ragged=True)


def main(
    adapter: str, folder: str, accumulation: str, kill_at: str | None = None
) -> None:
  trainer = make(pathlib.Path(folder), int(accumulation), adapter)
  trainer.with_training_hooks(KillAt(int(kill_at) if kill_at else None))
  trainer.train(data(int(accumulation)), data(1)[:1])
  np.savez(pathlib.Path(folder) / "final.npz", **toys.parameters(trainer.model))


if __name__ == "__main__":
  main(*sys.argv[1:])
