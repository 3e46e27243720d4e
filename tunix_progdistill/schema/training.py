"""The section `training_config`: Tunix's, whichever Tunix is installed."""

from collections.abc import Mapping
import dataclasses
import typing
from typing import TYPE_CHECKING
from typing import Any

import orbax.checkpoint as ocp
from tunix.distillation import distillation_trainer
from tunix.sft import profiler

from tunix_progdistill import errors

_SECONDS_BETWEEN_SAVES = 180  # Tunix's defaults
_KEPT = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointingOptions:
  """When checkpoints are written, and which are kept.

  Attributes:
    save_interval_steps: updates between two checkpoints, >= 1; null writes
      one every 180 seconds.
    max_to_keep: how many of the newest are kept, >= 1; null keeps 3.
    keep_period: keep for good every checkpoint whose update is a multiple of
      this, >= 1.
    enable_async_checkpointing: write in the background.
    timeout_secs: seconds that a background write may take, >= 1; null for
      orbax's own limit.
    cleanup_tmp_directories: delete what an interrupted write left behind.
    enable_background_delete: delete old checkpoints in the background.
  """

  save_interval_steps: int | None = None
  max_to_keep: int | None = None
  keep_period: int | None = None
  enable_async_checkpointing: bool = True
  timeout_secs: int | None = None
  cleanup_tmp_directories: bool = False
  enable_background_delete: bool = False

  def __post_init__(self):
    for name in (
        "save_interval_steps", "max_to_keep", "keep_period", "timeout_secs"
    ):
      at_least_one(name, getattr(self, name), "null for the default")

  def build(self) -> ocp.CheckpointManagerOptions:
    """These options as orbax takes them."""
    extra: dict[str, Any] = {}
    if self.save_interval_steps is None:
      extra["save_decision_policy"] = (
          ocp.checkpoint_managers.ContinuousCheckpointingPolicy(
              minimum_interval_secs=_SECONDS_BETWEEN_SAVES
          )
      )
    else:
      extra["save_interval_steps"] = self.save_interval_steps
    if self.timeout_secs is not None:
      extra["async_options"] = ocp.AsyncOptions(timeout_secs=self.timeout_secs)
    return ocp.CheckpointManagerOptions(
        max_to_keep=self.max_to_keep or _KEPT,
        keep_period=self.keep_period,
        enable_async_checkpointing=self.enable_async_checkpointing,
        cleanup_tmp_directories=self.cleanup_tmp_directories,
        enable_background_delete=self.enable_background_delete,
        **extra,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsLoggingOptions:
  """Where metrics go, beside the run folder's metrics.jsonl.

  Attributes:
    log_dir: folder of the TensorBoard events; empty for tensorboard in the run
      folder.
    project_name: project of the run, for wandb.
    run_name: name of the run, for wandb; empty for the run folder's name.
    flush_every_n_steps: updates between two writes of TensorBoard events, >= 1.
  """

  log_dir: str = ""
  project_name: str = "tunix"
  run_name: str = ""
  flush_every_n_steps: int = 100

  def __post_init__(self):
    at_least_one("flush_every_n_steps", self.flush_every_n_steps, "100")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfilerOptions:
  """Which updates JAX's profiler records.

  Attributes:
    log_dir: folder of the profile; must be given.
    skip_first_n_steps: updates before the profile starts, >= 0.
    profiler_steps: updates in the profile, >= 1.
    set_profile_options: whether the two levels below are used.
    host_tracer_level: detail of the host's trace, 0 to 3.
    python_tracer_level: detail of Python's trace, 0 or 1.
  """

  log_dir: str = ""
  skip_first_n_steps: int = 1
  profiler_steps: int = 5
  set_profile_options: bool = True
  host_tracer_level: int = 2
  python_tracer_level: int = 1

  def __post_init__(self):
    if not self.log_dir:
      raise errors.invalid(
          "log_dir", "must name a folder", self.log_dir,
          "write one, or set profiler_options to null",
      )
    at_least_one("profiler_steps", self.profiler_steps, "5")
    if self.skip_first_n_steps < 0:
      raise errors.invalid(
          "skip_first_n_steps", "must be >= 0", self.skip_first_n_steps,
          "write 1 to leave out the update that compiles",
      )
    for name, levels in (("host_tracer_level", 4), ("python_tracer_level", 2)):
      if getattr(self, name) not in range(levels):
        raise errors.invalid(
            name, f"must lie in 0 to {levels - 1}", getattr(self, name),
            "leave it out for Tunix's default",
        )

  def build(self) -> profiler.ProfilerOptions:
    """These options as Tunix takes them."""
    return profiler.ProfilerOptions(**dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Section:
  """How long, how often, and where to: Tunix's `training_config`.

  Attributes:
    eval_every_n_steps: updates between two evaluations on held-out data, >= 1.
    max_steps: updates of the whole run, >= 1; null for as long as the plan and
      the data last.
    gradient_accumulation_steps: batches that make one update, >= 1; null is 1.
    checkpoint_root_directory: folder of the checkpoints; null for checkpoints
      in the run folder.
    checkpointing_options: when checkpoints are written and which are kept; null
      for one every 180 seconds and the newest 3.
    metrics_logging_options: where metrics go; null for the run folder.
    profiler_options: which updates JAX's profiler records; null for none.
    perf_metrics_options: must be empty; Tunix has it for GRPO only.
    data_sharding_axis: mesh axes that the batch is split over.
    max_inflight_computations: updates that may be under way at once, >= 1.
    metrics_prefix: put before the name of every metric.
    pbar_description: what the progress bar is called; null for no name.
    max_seq_token_per_tpu: must be null; Tunix has it for packed batches of RL.
  """

  eval_every_n_steps: int = 100
  max_steps: int | None = None
  gradient_accumulation_steps: int | None = None
  checkpoint_root_directory: str | None = None
  checkpointing_options: CheckpointingOptions | None = None
  metrics_logging_options: MetricsLoggingOptions | None = None
  profiler_options: ProfilerOptions | None = None
  perf_metrics_options: Mapping[str, Any] | None = None
  data_sharding_axis: tuple[str, ...] = ("fsdp",)
  max_inflight_computations: int = 2
  metrics_prefix: str = ""
  pbar_description: str | None = "Training"
  max_seq_token_per_tpu: int | None = None

  def __post_init__(self):
    at_least_one("eval_every_n_steps", self.eval_every_n_steps, "100")
    at_least_one(
        "max_steps", self.max_steps, "null to run as long as the plan"
    )
    at_least_one(
        "gradient_accumulation_steps", self.gradient_accumulation_steps, "1"
    )
    at_least_one(
        "max_inflight_computations", self.max_inflight_computations, "2"
    )
    if self.perf_metrics_options:
      raise errors.invalid(
          "perf_metrics_options", "must be empty",
          dict(self.perf_metrics_options),
          "write {}: Tunix has it for GRPO only",
      )
    if self.max_seq_token_per_tpu is not None:
      raise errors.invalid(
          "max_seq_token_per_tpu", "must be null", self.max_seq_token_per_tpu,
          "set max_target_length and data_config.pack instead",
      )
    if not self.data_sharding_axis:
      raise errors.invalid(
          "data_sharding_axis", "must name at least one axis",
          list(self.data_sharding_axis), "write [fsdp]",
      )

  def arguments(self) -> dict[str, Any]:
    """Arguments of Tunix's `TrainingConfig`, but for the nested options."""
    known = {
        f.name for f in dataclasses.fields(distillation_trainer.TrainingConfig)
    }
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    for name in (
        "perf_metrics_options", "checkpointing_options",
        "metrics_logging_options", "profiler_options",
    ):
      fields.pop(name)
    if self.checkpointing_options is not None:
      fields["checkpointing_options"] = self.checkpointing_options.build()
    if self.profiler_options is not None:
      fields["profiler_options"] = self.profiler_options.build()
    return {k: v for k, v in fields.items() if k in known}


def at_least_one(name: str, value: int | None, remedy: str) -> None:
  """Raises ValueError unless `value` is None or >= 1."""
  if value is not None and value < 1:
    raise errors.invalid(name, "must be >= 1", value, f"write {remedy}")


def _plain(hint: Any) -> bool:
  arguments = [a for a in typing.get_args(hint) if a is not type(None)]
  return hint in (bool, int, float, str) or (
      len(arguments) == 1 and arguments[0] in (bool, int, float, str)
  )


def _with_new_fields(base: type) -> type:
  """`base`, plus the plain fields that only the installed Tunix knows."""
  theirs = distillation_trainer.TrainingConfig
  hints = typing.get_type_hints(theirs)
  ours = {f.name for f in dataclasses.fields(base)}
  new = [
      (f.name, hints[f.name], f.default)
      for f in dataclasses.fields(theirs)
      if f.name not in ours and _plain(hints[f.name])
      and f.default is not dataclasses.MISSING
  ]
  if not new:
    return base
  made = dataclasses.make_dataclass(
      "TrainingSection", new, bases=(base,), frozen=True, kw_only=True
  )
  lines = [
      f"    {name}: passed on to the installed Tunix as it is."
      for name, _, _ in new
  ]
  made.__doc__ = f"{(base.__doc__ or '').rstrip()}\n" + "\n".join(lines) + "\n"
  return made


if TYPE_CHECKING:
  TrainingSection = _Section
else:
  TrainingSection = _with_new_fields(_Section)

# Fields that only the installed Tunix has; other versions need not.
NEW_FIELDS = tuple(
    f.name for f in dataclasses.fields(TrainingSection)
    if f.name not in {g.name for g in dataclasses.fields(_Section)}
)
