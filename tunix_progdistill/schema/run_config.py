"""`RunConfig`: everything that a run is made from."""

import ast
from collections.abc import Callable
import dataclasses
import importlib.util
import os
import pathlib
import re
import shlex
from typing import Any

import optax

from tunix_progdistill import config as config_lib
from tunix_progdistill import data
from tunix_progdistill import errors
from tunix_progdistill import weights
from tunix_progdistill.data import config as data_config_lib
from tunix_progdistill.plan import schedules
from tunix_progdistill.plan import stages as stages_lib
from tunix_progdistill.schema import optimizer
from tunix_progdistill.schema import sections
from tunix_progdistill.schema import training as training_lib
from tunix_progdistill.weights import config as weights_config

_MOST_PROMPT_TOKENS = 4096
_MOST_BYTES_OF_A_NAME = 255  # on Linux
LOGGING = ("jsonl", "tensorboard", "wandb")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """Where a config came from.

  Attributes:
    config: the YAML, as it was named; empty for a config made in Python.
    arguments: what followed it on the command line.
    environment: the variables that were read, as (name, value).
    not_read: known sections of Tunix that were given and that nothing reads.
  """

  config: str = ""
  arguments: tuple[str, ...] = ()
  environment: tuple[tuple[str, str], ...] = ()
  not_read: tuple[str, ...] = ()


def _open_stage() -> config_lib.ProgressiveConfig:
  return config_lib.ProgressiveConfig(
      plan=stages_lib.StagePlan(stages=(stages_lib.Stage(),))
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Everything that a run is made from.

  Attributes:
    model_config: the model that is trained, the student.
    teacher_model_config: the teacher; keys that are left out are those of
      model_config, but for layers and lora_config. Null for the whole model of
      model_config, which then must set layers.
    tokenizer_config: how text becomes tokens.
    data_config: which text, and how it becomes batches; Tunix's keys of this
      stand at the top level.
    optimizer_config: optimizer and rate.
    training_config: how long, how often, and where to.
    progressive: what is trained when, and with which temperature and alpha.
    run_directory: folder of the run; empty for runs/NAME, with the name of the
      YAML.
    logging: where metrics go, any of jsonl, tensorboard and wandb.
    prompts: texts that teacher and student continue for the report.
    prompt_tokens: new tokens after each prompt, 1 to 4096.
    targets: what a good run reaches on held-out data.
    source: where this config came from; no part of what it says.

  Raises:
    ValueError: sections that contradict each other.
  """

  model_config: weights_config.ModelConfig
  teacher_model_config: weights_config.ModelConfig | None = None
  tokenizer_config: sections.TokenizerConfig = dataclasses.field(
      default_factory=sections.TokenizerConfig
  )
  data_config: data_config_lib.DataConfig = dataclasses.field(
      default_factory=data_config_lib.DataConfig
  )
  optimizer_config: optimizer.OptimizerConfig = dataclasses.field(
      default_factory=optimizer.OptimizerConfig
  )
  training_config: training_lib.TrainingSection = dataclasses.field(
      default_factory=training_lib.TrainingSection
  )
  progressive: config_lib.ProgressiveConfig = dataclasses.field(
      default_factory=_open_stage
  )
  run_directory: str = ""
  logging: tuple[str, ...] = ("jsonl", "tensorboard")
  prompts: tuple[str, ...] = ()
  prompt_tokens: int = 20
  targets: sections.Targets = dataclasses.field(
      default_factory=sections.Targets
  )
  source: Source = dataclasses.field(default_factory=Source, compare=False)

  def __post_init__(self):
    if not self.run_directory:
      name = pathlib.PurePath(self.source.config or "run").stem
      object.__setattr__(self, "run_directory", f"runs/{name}")
    for name in self.logging:
      if name not in LOGGING:
        raise errors.invalid(
            "logging", f"must hold only {', '.join(LOGGING)}", name,
            "write e.g. [jsonl, tensorboard]",
        )
    if not 1 <= self.prompt_tokens <= _MOST_PROMPT_TOKENS:
      raise errors.invalid(
          "prompt_tokens", f"must lie in [1, {_MOST_PROMPT_TOKENS}]",
          self.prompt_tokens, "write 20",
      )
    self._check_paths()
    self._check_teacher()
    self._check_rates()
    self._check_lengths()
    self._check_axes()

  def _check_paths(self) -> None:
    """Paths that no file system takes."""
    teacher = self.teacher()
    for field, value in (
        ("run_directory", self.run_directory),
        ("data_directory", self.data_config.data_directory),
        ("data_config.eval_directory", self.data_config.eval_directory),
        ("model_config.model_path", self.model_config.model_path),
        ("teacher_model_config.model_path", teacher.model_path),
        ("tokenizer_config.tokenizer_path",
         self.tokenizer_config.tokenizer_path),
        ("training_config.checkpoint_root_directory",
         self.training_config.checkpoint_root_directory),
    ):
      parts = re.split("[/,]", str(value or ""))
      longest = max(len(os.fsencode(part)) for part in parts)
      if "\0" in str(value) or longest > _MOST_BYTES_OF_A_NAME:
        raise errors.invalid(
            field, "must be a path without NUL characters, whose every part "
            f"has at most {_MOST_BYTES_OF_A_NAME} bytes", f"{value}",
            "write another path",
        )

  def data(self) -> data_config_lib.DataConfig:
    """Tunix's data keys and those of data_config, in one."""
    return self.data_config

  def teacher(self) -> weights_config.ModelConfig:
    """The teacher: teacher_model_config, or the whole model of model_config."""
    if self.teacher_model_config is not None:
      return self.teacher_model_config
    return dataclasses.replace(
        self.model_config, layers=None, lora_config=None
    )

  def tokenizer_folder(self) -> pathlib.Path | None:
    """Where the tokenizer is; None for the teacher's own.

    Raises:
      ValueError: tokenizer_path is neither a path nor the name of a model of
        this config.
    """
    path = self.tokenizer_config.tokenizer_path
    own = {self.model_config.model_id, self.model_config.model_path}
    own |= {self.teacher().model_id, self.teacher().model_path, ""}
    if path in own:
      return None
    folder = pathlib.Path(path).expanduser()
    if not folder.exists():
      raise errors.invalid(
          "tokenizer_config.tokenizer_path",
          "must be a file or folder that is there", path,
          "leave it empty for the teacher's own",
      )
    return folder

  def optimizer(self) -> Callable[..., optax.GradientTransformation]:
    """A function from a rate to the optimizer; the plan sets the rate."""
    return self.optimizer_config.factory()

  def checkpoint_directory(self) -> str:
    """The folder of the checkpoints."""
    given = self.training_config.checkpoint_root_directory
    return given or str(pathlib.PurePath(self.run_directory) / "checkpoints")

  def updates(
      self,
      *,
      updates_per_epoch: int | None = None,
      available: int | None = None,
  ) -> int | None:
    """Updates of the run: the least of plan, max_steps and data.

    Args:
      updates_per_epoch: optimizer updates in an epoch, where data tells.
      available: updates that the data of all epochs is enough for.

    Returns:
      None where nothing limits the run.
    """
    per_epoch = self._per_epoch() or updates_per_epoch
    lengths = [
        stage.updates if stage.epochs is None
        else per_epoch and max(1, round(stage.epochs * per_epoch))
        for stage in self._plan.stages
    ]
    known = [n for n in lengths if n is not None]
    total = sum(known) if len(known) == len(lengths) else None
    limits = (total, self.training_config.max_steps, available)
    return min((n for n in limits if n is not None), default=None)

  def training(
      self,
      *,
      updates_per_epoch: int | None = None,
      available: int | None = None,
  ) -> config_lib.TrainingConfig:
    """The trainer's config, with the plan's open places filled in.

    Its metrics_logging_options are left to the caller.

    Args:
      updates_per_epoch: optimizer updates in an epoch, from the data.
      available: updates that the data of all epochs is enough for.

    Raises:
      ValueError: the run is longer than the data.
    """
    updates = self.updates(
        updates_per_epoch=updates_per_epoch, available=available
    )
    wanted = self.updates(updates_per_epoch=updates_per_epoch)
    if available is not None and wanted is not None and wanted > available:
      have = self.data_config.num_train_epochs
      raise errors.invalid(
          "num_train_epochs",
          f"must be at least {-(-wanted * have // max(available, 1))}: the run "
          f"is {wanted} updates long, and the data are enough for {available}",
          have, "raise it, or shorten the plan or max_steps",
      )
    plan = self._plan
    if not self._all_rates_given():
      plan = dataclasses.replace(plan, learning_rate=self._rate(updates))
    per_epoch = self._per_epoch() or updates_per_epoch
    norm = self.progressive.max_grad_norm or self.optimizer_config.max_grad_norm
    arguments = self.training_config.arguments()
    if arguments.get("max_steps") is None and (
        any(s.epochs is None and s.updates is None for s in plan.stages)
    ):
      arguments["max_steps"] = updates
    arguments["checkpoint_root_directory"] = self.checkpoint_directory()
    return config_lib.TrainingConfig(
        **arguments,
        progressive=dataclasses.replace(
            self.progressive, enabled=True, plan=plan,
            updates_per_epoch=per_epoch,
            max_grad_norm=norm,
        ),
    )

  def unused(self) -> list[str]:
    """Keys of optimizer_config that are given and that nothing reads."""
    found = self.optimizer_config.unused(
        rates_in_stages=self._all_rates_given()
    )
    return [f"optimizer_config.{name}" for name in found]

  def command(self) -> str:
    """The command that makes this run again, to be pasted into a shell."""
    words = ["tunix-progdistill", "train", self.source.config]
    line = shlex.join([*words, *self.source.arguments])
    before = [f"{k}={shlex.quote(v)}" for k, v in self.source.environment]
    return " ".join([*before, line])

  def check(self) -> None:
    """What can be known before a model loads: files, sources, vocabularies.

    Raises:
      ValueError: something is missing, or cannot work together.
    """
    if "wandb" in self.logging and importlib.util.find_spec("wandb") is None:
      raise errors.invalid(
          "logging", "must name what is installed", "wandb",
          "pip install wandb, or leave it out",
      )
    weights.check(self.model_config, field="model_config")
    if self.teacher_model_config is not None:
      weights.check(self.teacher_model_config, field="teacher_model_config")
    self.tokenizer_folder()
    data.check(self.data_config)
    self._check_pair()

  def _check_teacher(self) -> None:
    teacher = self.teacher_model_config
    if self.model_config.quantization is not None:
      raise errors.invalid(
          "model_config.quantization", "must be null, for it is a teacher's",
          self.model_config.quantization,
          "write teacher_model_config.quantization, or for the student "
          "model_config.lora_config.weight_qtype",
      )
    if teacher is None:
      if self.model_config.layers is None:
        raise errors.invalid(
            "model_config.layers",
            "must be set, for there is no teacher_model_config", None,
            "write the layers that the student keeps, such as [0, 2, 5], or "
            "add a teacher_model_config",
        )
      return
    if teacher.layers is not None:
      raise errors.invalid(
          "teacher_model_config.layers", "must be null, for only a student is "
          "cut", list(teacher.layers),
          "write teacher_model_config.layers=null",
      )
    if teacher.lora_config:
      raise errors.invalid(
          "teacher_model_config.lora_config", "must be empty, for only a "
          "student has adapters", dict(teacher.lora_config),
          "write model_config.lora_config",
      )
    if teacher == self.model_config:
      raise errors.invalid(
          "teacher_model_config", "must differ from model_config",
          teacher.model_id or teacher.model_path or teacher.model_name,
          "name another model, or set model_config.layers",
      )

  @property
  def _plan(self) -> stages_lib.StagePlan:
    """The plan, of one stage where progressive is off."""
    plan = self.progressive.plan
    if self.progressive.enabled:
      return plan
    return dataclasses.replace(plan, stages=(stages_lib.Stage(),))

  def _per_epoch(self) -> int | None:
    accumulation = self.training_config.gradient_accumulation_steps or 1
    return self.progressive.epoch_updates(accumulation)

  def _all_rates_given(self) -> bool:
    plan = self._plan
    return plan.learning_rate is not None or all(
        s.learning_rate is not None for s in plan.stages
    )

  def _rate(self, updates: int | None) -> schedules.Value | None:
    try:
      schedule = self.optimizer_config.schedule(updates)
    except ValueError as e:
      raise ValueError(f"optimizer_config.{e}") from None
    return schedule or self.optimizer_config.learning_rate

  def _check_rates(self) -> None:
    plan, own = self._plan, self.optimizer_config
    named = [
        f"progressive.stages[{i}].learning_rate"
        for i, s in enumerate(plan.stages) if s.learning_rate is not None
    ]
    if plan.learning_rate is not None:
      named.append("progressive.learning_rate")
    if own.schedule_type and named:
      raise errors.invalid(
          "optimizer_config.schedule_type",
          f"must not be given together with {named[0]}", own.schedule_type,
          "write optimizer_config.schedule_type=null to keep the plan's rates",
      )
    if not self._all_rates_given() and not own.schedule_type and (
        own.learning_rate is None
    ):
      i = [s.learning_rate is None for s in plan.stages].index(True)
      raise errors.invalid(
          f"progressive.stages[{i}].learning_rate",
          "must be set, by the stage, the plan or optimizer_config", None,
          "write e.g. optimizer_config.learning_rate=1e-4",
      )
    norms = (self.progressive.max_grad_norm, own.max_grad_norm)
    if None not in norms:
      raise errors.invalid(
          "progressive.max_grad_norm and optimizer_config.max_grad_norm",
          "must not be given together", norms, "set one of them to null",
      )

  def _check_lengths(self) -> None:
    plan = self._plan
    epochs = sum(s.epochs or 0 for s in plan.stages)
    last = plan.stages[-1]
    is_open = last.updates is None and last.epochs is None
    have = self.data_config.num_train_epochs
    free = (
        self.training_config.max_steps is not None
        or self._per_epoch() is not None
    )
    if epochs and not free and (epochs > have or (is_open and epochs == have)):
      need = int(epochs) + 1 if is_open else -(-epochs // 1)
      raise errors.invalid(
          "num_train_epochs",
          f"must be at least {need:g}, for the stages of progressive need it",
          have, f"write num_train_epochs={need:g}",
      )
    known = epochs == 0 or self._per_epoch() is not None
    if known and (not is_open or self.training_config.max_steps is not None):
      self._rate(self.updates())
      try:
        plan.resolve(
            updates_per_epoch=self._per_epoch(),
            max_steps=self.training_config.max_steps,
        )
      except ValueError as e:
        dot = " " if str(e).startswith("at update") else "."
        raise ValueError(f"progressive{dot}{e}") from None

    profile = self.training_config.profiler_options
    end = self.training_config.max_steps
    if profile and end is not None and profile.skip_first_n_steps >= end:
      raise errors.invalid(
          "training_config.profiler_options.skip_first_n_steps",
          f"must be below training_config.max_steps, {end}",
          profile.skip_first_n_steps, "write 1 and a longer run, or drop it",
      )

  def _check_axes(self) -> None:
    mesh = self.model_config.mesh
    names = ast.literal_eval(str(mesh["axis_names"])) if mesh else None
    for axis in self.training_config.data_sharding_axis:
      if names is not None and axis not in names:
        raise errors.invalid(
            "training_config.data_sharding_axis",
            "must name axes of model_config.mesh", axis,
            f"its axes are {', '.join(names)}",
        )

  def _check_pair(self) -> None:
    student = weights.describe(self.model_config, field="model_config")
    given = self.teacher_model_config is not None
    teacher = weights.describe(
        self.teacher(),
        field="teacher_model_config" if given else "model_config",
    )
    layers, count = self.model_config.layers, student.num_layers
    if layers and count is not None and max(layers) >= count:
      raise errors.invalid(
          "model_config.layers", f"must lie in 0 to {count - 1}", list(layers),
          f"the model has {count} layers",
      )
    other = (
        "take two models of one family, or leave teacher_model_config out and "
        "set model_config.layers"
    )
    pairs: tuple[tuple[str, Any, Any, str], ...] = (
        ("vocabulary size", student.vocab_size, teacher.vocab_size, other),
        (
            "vocabulary_size", self.model_config.vocabulary_size or "all",
            self.teacher().vocabulary_size or "all",
            "give both the same, or leave it out of teacher_model_config",
        ),
        ("bos_id", student.bos_id, teacher.bos_id, other),
        ("rope_theta", student.rope_theta, teacher.rope_theta, other),
    )
    for what, ours, theirs, remedy in pairs:
      if None not in (ours, theirs) and ours != theirs:
        raise errors.invalid(
            f"{what} of model_config and teacher_model_config",
            "must be the same", (ours, theirs), remedy,
        )
