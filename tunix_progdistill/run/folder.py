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

from collections.abc import Iterator
import contextlib
import fcntl
import importlib.metadata
import os
import pathlib
import platform
from typing import Any
import uuid

from etils import epath
import omegaconf
import yaml

from tunix_progdistill import errors
from tunix_progdistill import files
from tunix_progdistill import weights
from tunix_progdistill.monitor import metrics_file
from tunix_progdistill.plan import run as plan_lib
from tunix_progdistill.run import aside as aside_lib

_RUN_ID = ".run_id"
_FILES = (
    "config.yaml", "command.txt", "versions.json", "inputs.json",
    "metrics.jsonl", "summary.json", "report.html", _RUN_ID,
)
_FOLDERS = ("tensorboard", "checkpoints", "student")
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
    self._aside = aside_lib.Aside(self.path, _FILES + _FOLDERS)
    try:
      self._check_ours()
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
    self._aside.recover()
    weights.recover_export(self.path / "student")

  def _check_ours(self) -> None:
    """Refuses a folder of something else; nothing is written before."""
    if not self.path.is_dir():
      return
    if self._is_run() or self._aside.is_open:
      wrong = [n for n in _FILES if (self / n).is_dir()]
      wrong += [n for n in _FOLDERS if (self / n).is_file()]
      rule = "must hold a run, with files for files and folders for folders"
    else:
      wrong = sorted(
          p.name for p in self.path.iterdir()
          if p.name != ".lock" and not p.name.endswith(files.PARTIAL)
      )
      rule = "must be empty or hold a run"
    if wrong:
      raise errors.invalid(
          "run_directory", rule, f"{self.path} with {', '.join(wrong[:3])}",
          "name another folder",
      )

  def __enter__(self) -> "RunFolder":
    return self

  def __exit__(self, *exc: object) -> None:
    self._lock.close()

  def _is_run(self) -> bool:
    return (self / "config.yaml").is_file() or (self / _RUN_ID).is_file()

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
    own = None if restart else _text(self / _RUN_ID)
    if _entries(root) and (
        own is None or own != _text(epath.Path(root) / _RUN_ID)
    ):
      raise errors.invalid(
          "training_config.checkpoint_root_directory",
          "must be empty or hold checkpoints of this run", root,
          "name another folder, or delete that one",
      )

  def _is_inside(self, root: str) -> bool:
    return "://" not in root and pathlib.Path(root).absolute().is_relative_to(
        self.path
    )

  @contextlib.contextmanager
  def begin(
      self, *, text: str, command: str, root: str, restart: bool = False
  ) -> Iterator[None]:
    """The time in which it is not yet known whether a run can begin.

    A run that lies here is gone on with; one that never trained, or that is to
    be forgotten, is put aside. When the block is left by an exception all is as
    it was; else what was put aside is deleted, and config, versions and command
    are written.

    Args:
      text: of `config.yaml`.
      command: as it was given.
      root: of the checkpoints.
      restart: whether the run that lies here is to be forgotten.

    Raises:
      ValueError: the run here was made by a config that trains otherwise.
    """
    fresh = restart or not self._has_trained(root)
    if fresh:
      self._aside.take()
    else:
      self._check_config(text)
    begun = False
    try:
      if not (self / _RUN_ID).is_file():  # first: it marks a run
        files.write_text(self / _RUN_ID, uuid.uuid4().hex)
      self._claim(root)
      yield
      files.write_text(self / "config.yaml", text)
      files.write_json(self / "versions.json", versions())
      files.write_text(self / "command.txt", f"{command}\n")
      begun = True
    finally:
      if fresh:
        (self._aside.drop if begun else self._aside.put_back)()

  def _has_trained(self, root: str) -> bool:
    """Whether there is anything that a run could lose."""
    file = metrics_file.MetricsFile(self / "metrics.jsonl")
    return bool(
        file.records("train") or _entries(root) or _entries(self / "student")
    )

  def _claim(self, root: str) -> None:
    """Marks a checkpoint folder elsewhere as this run's own."""
    if not self._is_inside(root):
      where = epath.Path(root)
      where.mkdir(parents=True, exist_ok=True)
      (where / _RUN_ID).write_text(_text(self / _RUN_ID) or "")

  def _check_config(self, text: str) -> None:
    changed = [
        d for d in plan_lib.differences(self._config(), _mapping(text))
        if not d.removeprefix("number of ").startswith(_FREE)
    ]
    if changed:
      raise errors.invalid(
          "run_directory", "must hold a run of this config, but these "
          f"differ: {'; '.join(changed[:5])}", str(self.path),
          "name another folder, or give --restart to forget that run",
      )

  def _config(self) -> dict[str, Any]:
    try:
      text = (self / "config.yaml").read_text(encoding="utf-8")
      return _mapping(text)
    except (OSError, ValueError, yaml.YAMLError) as e:
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


def _entries(root: str | os.PathLike[str]) -> list[str]:
  """What lies in a folder, but for the mark of whose it is."""
  where = epath.Path(root)
  if not where.exists():
    return []
  return [p.name for p in where.iterdir() if p.name != _RUN_ID]


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
