"""Going on from the last checkpoint, or refusing to."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from absl import logging
from flax import nnx

from tunix_progdistill.engine import batches
from tunix_progdistill.engine import checkpoints
from tunix_progdistill.engine import engine as engine_lib
from tunix_progdistill.engine import optimizer as optimizer_lib
from tunix_progdistill.plan import run
from tunix_progdistill.plan import state as state_lib


def fingerprint(
    plan: run.RunPlan, *, accumulation: int, max_grad_norm: float | None,
    optimizer: optimizer_lib.Spec,
) -> dict[str, Any]:
  """What must be the same for a resumed run to equal a straight one.

  Of the optimizer only its kind and its states are known; its own settings,
  such as a decay, are not compared.
  """
  return {
      **plan.fingerprint(),
      "gradient_accumulation_steps": accumulation,
      "max_grad_norm": max_grad_norm,
      "optimizer": [optimizer.kind, *optimizer_lib.parts(optimizer)],
  }


class RunCheckpoints(checkpoints.CheckpointManager):
  """The checkpoint manager that a Tunix trainer is given.

  It stands in Tunix's constructor just before `maybe_restore`. In that call it
  reads the run's state, lets the engine build the optimizer of the stage that
  the checkpoint belongs to, and restores into that.

  Args:
    root_directory: see `CheckpointManager`.
    options: likewise.
    engine: its run state and optimizer are set, and its run state is saved.
    fingerprint: of this run's plan.
    position: of the training data; it is saved, and restored.
    user_metadata: see `CheckpointManager`.
    before_save: likewise.
  """

  def __init__(
      self,
      root_directory: str | None,
      options: Any,
      *,
      engine: engine_lib.Engine,
      fingerprint: Mapping[str, Any],  # pylint: disable=redefined-outer-name
      position: batches.Position,
      user_metadata: Callable[[], Mapping[str, Any]],
      before_save: Callable[[], None],
  ):
    super().__init__(
        root_directory,
        options,
        lambda: {
            **engine.run_state.to_json(),
            "fingerprint": fingerprint,
            "data": position.to_json(),
        },
        user_metadata,
        before_save,
    )
    self._engine = engine
    self._position = position
    self._fingerprint = fingerprint

  def maybe_restore(
      self,
      model: nnx.Module,
      optimizer: nnx.Optimizer | None = None,
      step: int | None = None,
      restore_only_lora_params: bool = False,
  ) -> tuple[int, dict[str, Any]]:
    """Restores the newest checkpoint that can be read.

    Raises:
      ValueError: it was written by another plan; or there are checkpoints, and
        none can be read.
    """
    del optimizer  # the engine's, which must be built first
    steps = self.readable_steps() if step is None else [step]
    first_error = None
    for candidate in steps:
      self._accept(candidate)
      self._engine.start(candidate)
      try:
        restored = super().maybe_restore(
            model, self._engine.optimizer, candidate, restore_only_lora_params
        )
        if step is None:  # a step that was asked for leaves the newer ones
          self.set_aside([s for s in self.steps() if s > candidate])
        return restored
      except checkpoints.UNREADABLE as e:
        checkpoints.warn_unreadable(candidate, e)
        first_error = first_error or e
    if self.latest_step() is not None:
      raise ValueError(
          "checkpoint_root_directory must hold a checkpoint that can be read "
          f"by this student, got {self.latest_step()} as the newest; "
          "mend it, or name an empty folder to start anew"
      ) from first_error
    self._engine.run_state = state_lib.RunState()
    self._position.from_json(None)
    self._engine.start(0)
    return 0, {}

  def _accept(self, step: int) -> None:
    saved = self.run_metadata(step)
    if not saved:
      raise ValueError(
          "checkpoint_root_directory must hold checkpoints of a staged run, "
          f"got one of another trainer at update {step}; name another folder"
      )
    changed = run.differences(saved["fingerprint"], dict(self._fingerprint))
    if changed:
      raise ValueError(
          "the plan must be the one that the checkpoints were written by, "
          f"but these differ: {'; '.join(changed[:5])}; restore the old "
          "values (a schedule of the run without updates of its own follows "
          "max_steps), or name an empty checkpoint_root_directory"
      )
    self._engine.run_state = state_lib.RunState.from_json(saved)
    self._position.from_json(saved.get("data"))
    logging.info("Found the checkpoint of update %d.", step)
