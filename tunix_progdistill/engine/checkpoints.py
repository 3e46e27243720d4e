"""Checkpoints in Tunix's layout, always with the run's state beside them.

Items are named as Tunix names them (`model_params`, `optimizer_state`), so
that its own manager reads what is written here.
"""

from collections.abc import Callable
from collections.abc import Mapping
import json
import pathlib
from typing import Any

from absl import logging
from etils import epath
from flax import nnx
import orbax.checkpoint as ocp

from tunix_progdistill import errors
from tunix_progdistill import modules

_KEY = "progressive"
_MODEL, _OPTIMIZER = "model_params", "optimizer_state"
_SECONDS_BETWEEN_SAVES = 180  # Tunix's default
_KEPT = 3  # likewise

# What a truncated, half-written or foreign file shows itself by. Other errors
# of the file system may pass: they must not throw a good checkpoint away.
UNREADABLE = (
    FileNotFoundError,
    NotADirectoryError,
    ValueError,
    KeyError,
    TypeError,
)


def _options(options: Any) -> ocp.CheckpointManagerOptions:
  """Orbax options from what either Tunix takes; None is Tunix's default."""
  if isinstance(options, ocp.CheckpointManagerOptions):
    return options
  policy = getattr(options, "save_decision_policy", None)
  if policy is None:
    policy = ocp.checkpoint_managers.ContinuousCheckpointingPolicy(
        minimum_interval_secs=_SECONDS_BETWEEN_SAVES
    )
  extra = {}
  if (kept := getattr(options, "preservation_policy", None)) is not None:
    extra["preservation_policy"] = kept
  else:
    extra["max_to_keep"] = _KEPT
  if getattr(options, "enable_async_checkpointing", None) is False:
    extra["enable_async_checkpointing"] = False
  return ocp.CheckpointManagerOptions(save_decision_policy=policy, **extra)


def check_writable(root: str | None) -> None:
  """Raises ValueError unless checkpoints can be written under `root`."""
  if root is None or "://" in str(root):
    return
  path = pathlib.Path(root)
  probe = path / ".writable"
  try:
    path.mkdir(parents=True, exist_ok=True)
    probe.write_text("")
    probe.unlink()
  except OSError as e:
    raise errors.invalid(
        "checkpoint_root_directory",
        f"must be a folder that can be written ({e.strerror})",
        str(root), "choose another folder or mend its permissions",
    ) from e


class CheckpointManager:
  """Tunix's checkpoint manager, with what a staged run needs.

  - Every checkpoint, the closing one too, carries the run's state and the
    plan's fingerprint.
  - Restoring takes the newest checkpoint that can be read; one that cannot is
    reported and passed over.
  - A failed background save raises at the next save, or at `close`.

  Args:
    root_directory: None switches checkpointing off.
    options: as in Tunix's `TrainingConfig.checkpointing_options`.
    run_metadata: gives what is saved beside each checkpoint, as JSON.
    user_metadata: the trainer's own, for the closing checkpoint, which Tunix
      writes without any.
    before_save: called before a checkpoint is written.
  """

  def __init__(
      self,
      root_directory: str | None,
      options: Any,
      run_metadata: Callable[[], Mapping[str, Any]],
      user_metadata: Callable[[], Mapping[str, Any]],
      before_save: Callable[[], None] = lambda: None,
  ):
    self._run_metadata = run_metadata
    self._user_metadata = user_metadata
    self._before_save = before_save
    self._manager: Any = None
    self._last_requested: int | None = None
    if root_directory is not None:
      root = (
          root_directory if "://" in str(root_directory)
          else pathlib.Path(root_directory).absolute()
      )
      self._manager = ocp.CheckpointManager(
          epath.Path(root),
          item_handlers={
              _MODEL: ocp.PyTreeCheckpointHandler(),
              _OPTIMIZER: ocp.PyTreeCheckpointHandler(),
          },
          options=_options(options),
      )

  def latest_step(self) -> int | None:
    """The newest step, readable or not."""
    return None if self._manager is None else self._manager.latest_step()

  def steps(self) -> list[int]:
    """All steps, oldest first."""
    return [] if self._manager is None else sorted(self._manager.all_steps())

  def run_metadata(self, step: int) -> dict[str, Any]:
    """The run's state that was saved with `step`; {} if it was not ours."""
    metadata = self._manager.metadata(step).custom_metadata or {}
    return dict(metadata.get(_KEY, {}))

  def readable_steps(self) -> list[int]:
    """Steps whose metadata can be read, newest first."""
    out: list[int] = []
    for step in reversed(self.steps()):
      try:
        self._check_whole(step)
        self.run_metadata(step)
      except UNREADABLE as e:
        if not out:  # an older one may have been killed while it was deleted
          warn_unreadable(step, e)
        continue
      out.append(step)
    return out

  def _check_whole(self, step: int) -> None:
    """Raises what `UNREADABLE` holds where files of a step are missing."""
    folder = self._manager.directory / str(step)
    json.loads((folder / "_CHECKPOINT_METADATA").read_text())
    if not (folder / _MODEL).exists():
      raise FileNotFoundError(f"{_MODEL} is missing")

  def set_aside(self, steps: list[int]) -> None:
    """Renames checkpoints to `unreadable-<step>`, so that their steps are free.

    Orbax writes no step at or below its latest: a run that went back behind an
    unreadable checkpoint could save nothing until it was past it.
    """
    if not steps:
      return
    for step in steps:
      folder = self._manager.directory / str(step)
      folder.rename(self._manager.directory / f"unreadable-{step}")
    self._manager.reload()

  def save(
      self,
      step: int,
      model: nnx.Module,
      optimizer: nnx.Optimizer | None = None,
      save_only_lora_params: bool = False,
      force: bool = False,
      custom_metadata: Mapping[str, Any] | None = None,
  ) -> bool:
    """Saves if the policy says so; see Tunix's manager for the arguments.

    Raises:
      OSError, ValueError: the last background save failed.
    """
    if self._manager is None:
      return False
    self._manager.check_for_errors()
    if not force and not self._manager.should_save(step):
      return False
    self._before_save()
    if custom_metadata is None:
      custom_metadata = self._user_metadata()
    params = nnx.state(model, _saved(save_only_lora_params))
    items = {_MODEL: ocp.args.PyTreeSave(item=modules.raw_keys(params))}
    if optimizer is not None:
      state = nnx.state(optimizer, nnx.optimizer.OptState)
      items[_OPTIMIZER] = ocp.args.PyTreeSave(item=state)
    saved = self._manager.save(
        step,
        args=ocp.args.Composite(**items),
        custom_metadata={
            **custom_metadata, _KEY: dict(self._run_metadata())
        },
        force=force,
    )
    if saved:
      self._last_requested = step
    return saved

  def maybe_restore(
      self,
      model: nnx.Module,
      optimizer: nnx.Optimizer | None = None,
      step: int | None = None,
      restore_only_lora_params: bool = False,
  ) -> tuple[int, dict[str, Any]]:
    """Restores `step`, or the newest; returns (step, custom metadata).

    (0, {}) where there is no checkpoint.
    """
    if step is None:
      step = self.latest_step()
    if self._manager is None or step is None:
      return 0, {}
    metadata = self._manager.metadata(step)
    params = nnx.state(model, _saved(restore_only_lora_params))
    items = {_MODEL: _restore_args(modules.raw_keys(params))}
    if optimizer is not None:
      state = nnx.state(optimizer, nnx.optimizer.OptState)
      items[_OPTIMIZER] = _restore_args(state)
    found = self._manager.restore(step, args=ocp.args.Composite(**items))
    nnx.update(model, modules.typed_keys(found[_MODEL], params))
    if optimizer is not None:
      nnx.update(optimizer, found[_OPTIMIZER])
    custom = dict(metadata.custom_metadata or {})
    logging.info("Restored update %d.", step)
    return step, custom

  def wait(self) -> None:
    """Blocks until the last save is on disk; raises what it failed by."""
    if self._manager is not None:
      self._manager.wait_until_finished()
      self._manager.check_for_errors()

  def close(self) -> None:
    """Waits for the last save.

    Raises:
      RuntimeError: it did not arrive.
    """
    if self._manager is None:
      return
    self.wait()
    self._manager.reload()
    steps = self._manager.all_steps()
    self._manager.close()
    last = self._last_requested
    if last is not None and last not in steps:
      raise RuntimeError(
          f"the checkpoint of update {last} was not written; the last good "
          f"one is {max(steps, default=None)}"
      )


def _saved(only_lora: bool) -> nnx.filterlib.Filter:
  """What is saved: of a LoRA student the adapters, and what is no parameter.

  Dropout keys and batch statistics belong to a run as much as its weights.
  """
  return nnx.Any(nnx.LoRAParam, nnx.Not(nnx.Param)) if only_lora else ...


def warn_unreadable(step: int, error: Exception) -> None:
  """Logs that a checkpoint is passed over."""
  reason = str(error).split("\n", maxsplit=1)[0][:200]
  logging.warning(
      "The checkpoint of update %d cannot be read and is passed over (%s: %s).",
      step, type(error).__name__, reason,
  )


def _restore_args(state: Any) -> ocp.args.PyTreeRestore:
  return ocp.args.PyTreeRestore(
      item=state,
      restore_args=ocp.checkpoint_utils.construct_restore_args(target=state),
  )
