"""`RunFolder`: where everything of one run lies.

  config.yaml     the resolved config
  command.txt     the command that makes the run again
  versions.json   of this package and of what it stands on
  inputs.json     hashes of teacher and held-out rows, which must not change
  metrics.jsonl   a line for every update and every evaluation
  summary.json    what the stages cost, the models side by side, samples
  tensorboard/    events
  checkpoints/    with all that a resumed run needs
  student/        the student, as a Hugging Face checkpoint
  report.html     the page about all of it
"""

import contextlib
import fcntl
import importlib.metadata
import os
import pathlib
import platform
import shutil
from typing import Any
import uuid

from etils import epath
import omegaconf
import yaml

from tunix_progdistill import errors
from tunix_progdistill import files
from tunix_progdistill.plan import run as plan_lib

_FORGETTING = ".forgetting"
_RUN_ID = ".run_id"
_ENTRIES = (
    "config.yaml", "command.txt", "versions.json", "inputs.json",
    "metrics.jsonl", "summary.json", "tensorboard", "checkpoints", "student",
    "report.html", _RUN_ID,
)
_PACKAGES = (
    "tunix-progdistill", "google-tunix", "jax", "jaxlib", "flax", "optax",
    "orbax-checkpoint", "grain", "qwix", "numpy",
)
# What may change between two starts of one run.
_FREE = (
    "run_directory", "logging", "prompts", "prompt_tokens", "targets",
    "num_train_epochs",
    "training_config.max_steps", "training_config.checkpointing_options",
    "training_config.metrics_logging_options",
    "training_config.profiler_options", "training_config.pbar_description",
    "training_config.max_inflight_computations",
    "model_config.model_display", "teacher_model_config.model_display",
)


class RunFolder:
  """One run's folder, held by one process.

  Args:
    path: the folder; made where it is not there.

  Raises:
    ValueError: it holds something else, or another process uses it.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = pathlib.Path(path).expanduser().absolute()
    half = (self / _FORGETTING).exists()
    if self.path.is_dir() and not self._is_run() and not half:
      found = sorted(
          p.name for p in self.path.iterdir()
          if p.name != ".lock" and not p.name.endswith(files.PARTIAL)
      )
      if found:
        raise errors.invalid(
            "run_directory", "must be empty or hold a run",
            f"{self.path} with {', '.join(found[:3])}", "name another folder",
        )
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      self._lock = open(self.path / ".lock", "w", encoding="utf-8")  # noqa: SIM115
    except OSError as e:
      raise errors.invalid(
          "run_directory",
          f"must be a folder that can be written ({e.strerror})",
          str(self.path), "choose another folder or mend its permissions",
      ) from e
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self._lock.close()
      raise errors.invalid(
          "run_directory", "must not be in use by another process",
          str(self.path), "wait for that run, or name another folder",
      ) from None
    if half:  # a kill came between
      self.forget()

  def __enter__(self) -> "RunFolder":
    return self

  def __exit__(self, *exc: object) -> None:
    self._lock.close()

  def _is_run(self) -> bool:
    return (self.path / "config.yaml").is_file()

  def __truediv__(self, name: str) -> pathlib.Path:
    return self.path / name

  def check_root(self, root: str, *, restart: bool) -> None:
    """Refuses a checkpoint folder elsewhere that is not this run's own.

    Checkpoints do not say which models they are of: a run that found another
    one's would end with that one's student.

    Args:
      root: of the checkpoints.
      restart: whether the run that lies here is about to be forgotten.

    Raises:
      ValueError: the folder holds something of another run, or of the one that
        is to be forgotten.
    """
    if self._is_inside(root):
      return
    where = epath.Path(root)
    found = where.exists() and any(where.iterdir())
    own = None if restart else _text(self / _RUN_ID)
    if found and (own is None or own != _text(where / _RUN_ID)):
      raise errors.invalid(
          "training_config.checkpoint_root_directory",
          "must be empty or hold checkpoints of this run", root,
          "name another folder, or delete that one",
      )

  def claim_root(self, root: str) -> None:
    """Marks a checkpoint folder elsewhere as this run's own."""
    if not self._is_inside(root):
      where = epath.Path(root)
      where.mkdir(parents=True, exist_ok=True)
      (where / _RUN_ID).write_text(_text(self / _RUN_ID) or "")

  def _is_inside(self, root: str) -> bool:
    return "://" not in root and pathlib.Path(root).absolute().is_relative_to(
        self.path
    )

  def forget(self) -> None:
    """Deletes what a run has written here, and nothing else.

    A kill in between leaves a mark, and the next process goes on with it: half
    a run must not be taken for a whole one.
    """
    mark = self / _FORGETTING
    if not self._is_run() and not mark.exists():
      return
    mark.touch()
    for name in _ENTRIES:
      entry = self.path / name
      if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
      else:
        with contextlib.suppress(FileNotFoundError):
          entry.unlink()
    mark.unlink()

  def begin(self, *, text: str, command: str) -> None:
    """Writes config, command and versions, unless another run lies here.

    Args:
      text: of `config.yaml`.
      command: as it was given.

    Raises:
      ValueError: the run here was made by a config that trains otherwise.
    """
    if self._is_run():
      old = self._config()
      changed = [
          d for d in plan_lib.differences(old, _mapping(text))
          if not d.removeprefix("number of ").startswith(_FREE)
      ]
      if changed:
        raise errors.invalid(
            "run_directory", "must hold a run of this config, but these "
            f"differ: {'; '.join(changed[:5])}", str(self.path),
            "name another folder, or give --restart to forget that run",
        )
    files.write_text(self / "config.yaml", text)  # first: it marks a run
    if not (self / _RUN_ID).is_file():
      files.write_text(self / _RUN_ID, uuid.uuid4().hex)
    files.write_json(self / "versions.json", versions())
    files.write_text(self / "command.txt", f"{command}\n")

  def _config(self) -> dict[str, Any]:
    try:
      text = (self / "config.yaml").read_text(encoding="utf-8")
      return _mapping(text)
    except (ValueError, yaml.YAMLError) as e:
      reason = " ".join(str(e).split())[:100]
      raise errors.invalid(
          "run_directory", "must hold a config.yaml that can be read "
          f"({reason})", str(self.path),
          "name another folder, or give --restart to forget that run",
      ) from e

  def check_same(self, what: str, digest: str) -> None:
    """Writes down what a run stands on, or compares it.

    Args:
      what: a name, such as "the teacher's weights".
      digest: of it.

    Raises:
      ValueError: the run began with another one.
    """
    path = self / "inputs.json"
    known = files.read_object(path)
    if what not in known:
      files.write_json(path, known | {what: digest})
    elif known[what] != digest:
      raise errors.invalid(
          what, "must be what this run began with",
          f"something else for {self.path}", "restore it, name another "
          "run_directory, or give --restart to forget that run",
      )


def _text(path: Any) -> str | None:
  return path.read_text() if path.exists() else None


def _mapping(text: str) -> dict[str, Any]:
  found = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.create(text))
  if not isinstance(found, dict):
    raise ValueError("no mapping of keys")
  return {str(k): v for k, v in found.items()}


def versions() -> dict[str, str]:
  """The versions that a result depends on."""
  found = {"python": platform.python_version(), "system": platform.platform()}
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = "not installed"
  return found
