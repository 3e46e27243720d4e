"""Between the plain tree of a YAML and a `RunConfig`, both ways."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

from tunix_progdistill import config as config_lib
from tunix_progdistill import errors
from tunix_progdistill.data import config as data_config_lib
from tunix_progdistill.plan import schedules
from tunix_progdistill.schema import keys
from tunix_progdistill.schema import optimizer
from tunix_progdistill.schema import run_config
from tunix_progdistill.schema import sections
from tunix_progdistill.schema import training
from tunix_progdistill.weights import config as weights_config

# Tunix's data keys, which stand at the top level of a YAML.
DATA_KEYS = (
    "data_source", "data_directory", "dataset_name", "batch_size",
    "max_target_length", "num_train_epochs", "num_batches", "tfds_download",
)

# What a teacher does not inherit from model_config.
OWN_KEYS = ("layers", "lora_config")

# Sections and keys of Tunix's other commands.
NOT_READ = frozenset((
    "actor_model_config", "agent_class_path", "agent_kwargs",
    "agentic_grpo_config", "agentic_ppo_config",
    "apply_chat_template_to_dataset", "chat_parser_config",
    "critic_model_config", "data_module", "env_class_path", "env_kwargs",
    "grpo_config", "kubernetes_config", "maxtext_config", "num_test_batches",
    "offload_to_cpu", "ppo_config", "prompt_key", "reference_model_config",
    "reward_functions", "rl_training_config", "rollout_config",
    "rollout_engine", "rollout_model_config", "sglang_jax_config",
    "train_fraction", "training_mode", "verl_compatible", "vllm_config",
))


@functools.cache
def root() -> keys.Key:
  """Every key that a config may hold."""
  model = keys.of(
      weights_config.ModelConfig, sections={"mesh": keys.of(sections.Mesh)}
  )
  found = keys.of(
      run_config.RunConfig,
      sections={
          "model_config": model,
          "teacher_model_config": model,
          "data_config": keys.of(
              data_config_lib.DataConfig, without=DATA_KEYS
          ),
          "optimizer_config": optimizer.section_keys(),
          "training_config": keys.of(
              training.TrainingSection, implied=training.NEW_FIELDS
          ),
          "progressive": keys.of(sections.ProgressiveKeys),
      },
      without=("source",),
  )
  at = [k.name for k in found].index("data_config")
  top = keys.of(data_config_lib.DataConfig, only=DATA_KEYS)
  return keys.Key(
      name="", kind="section", keys=(*found[:at], *top, *found[at:])
  )


def defaults(key: keys.Key) -> Any:
  """What stands where nothing is given; keys that are implied are left out."""
  if key.kind == "section" and not key.nullable:
    return {k.name: defaults(k) for k in key.keys if not k.implied}
  return key.default


def build(tree: Mapping[str, Any], source: run_config.Source) -> (
    run_config.RunConfig
):
  """A `RunConfig` from a checked tree.

  Raises:
    ValueError: a value out of range, with the path of its key.
  """
  tree = dict(tree)
  given = {k: tree.pop(k) for k in DATA_KEYS}
  model = tree.pop("model_config")
  teacher = tree.pop("teacher_model_config")
  if teacher is not None:
    inherited = {k: v for k, v in model.items() if k not in OWN_KEYS}
    teacher = _model("teacher_model_config", {**inherited, **teacher})
  own = {k.name for k in optimizer.section_keys() if not k.implied}
  rate = tree.pop("optimizer_config")
  arguments = {k: v for k, v in rate.items() if k not in own}
  training_fields = dict(tree.pop("training_config"))
  for name, kind in (
      ("checkpointing_options", training.CheckpointingOptions),
      ("metrics_logging_options", training.MetricsLoggingOptions),
      ("profiler_options", training.ProfilerOptions),
  ):
    if training_fields[name] is not None:
      training_fields[name] = _made(
          f"training_config.{name}", kind, training_fields[name]
      )
  progressive = tree.pop("progressive")
  if not progressive["stages"]:
    raise errors.invalid(
        "progressive.stages", "must hold at least one stage", [],
        "leave it out to train everything in one stage",
    )
  return run_config.RunConfig(
      model_config=_model("model_config", model),
      teacher_model_config=teacher,
      tokenizer_config=_made(
          "tokenizer_config", sections.TokenizerConfig,
          tree.pop("tokenizer_config"),
      ),
      data_config=_data({**given, **tree.pop("data_config")}),
      optimizer_config=_made(
          "optimizer_config", optimizer.OptimizerConfig,
          {k: v for k, v in rate.items() if k in own}
          | {"arguments": arguments},
      ),
      training_config=_made(
          "training_config", training.TrainingSection, training_fields
      ),
      progressive=_made(
          "progressive", config_lib.as_progressive, {"value": progressive}
      ),
      targets=_made("targets", sections.Targets, tree.pop("targets")),
      source=source,
      **tree,
  )


def _made(path: str, make: Callable, fields: Mapping[str, Any]) -> Any:
  """`make(**fields)`; what it refuses gets the section's path."""
  try:
    return make(**fields)
  except ValueError as e:
    text = str(e)
    for own in ("model_config.", "progressive."):  # as they say themselves
      text = text.removeprefix(own)
    raise ValueError(f"{path}.{text}") from None


def _model(path: str, fields: Mapping[str, Any]) -> weights_config.ModelConfig:
  mesh = {
      k: v for k, v in (fields.get("mesh") or {}).items()
      if k != "allocation_policy"
  }
  return _made(
      path, weights_config.ModelConfig, {**fields, "mesh": mesh or None}
  )


def _data(fields: Mapping[str, Any]) -> data_config_lib.DataConfig:
  try:
    return data_config_lib.DataConfig(**fields)
  except ValueError as e:
    text = str(e)
    at_top = text.split(" ")[0].split(".")[0] in (*DATA_KEYS, "data_config")
    raise ValueError(text if at_top else f"data_config.{text}") from None


def plain(config: run_config.RunConfig) -> dict[str, Any]:
  """The tree of a config, every key of it; `build` makes it again.

  Raises:
    ValueError: a schedule that was made in Python.
  """
  found: dict[str, Any] = {}
  for key in root().keys:
    if key.name in DATA_KEYS:
      value = getattr(config.data_config, key.name)
    else:
      value = getattr(config, key.name)
    if key.name == "progressive":
      value = {**_fields(value.plan), **_fields(value, without=("plan",))}
    elif key.name == "optimizer_config":
      value = _fields(value)
      value.update(value.pop("arguments"))
    found[key.name] = _plain(key, key.name, value)
  return found


def _fields(owner: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
  return {
      f.name: getattr(owner, f.name) for f in dataclasses.fields(owner)
      if f.name not in without
  }


def _plain(key: keys.Key, path: str, value: Any) -> Any:
  if value is None:
    return None
  if key.kind == "section":
    fields = dict(value) if isinstance(value, Mapping) else _fields(value)
    return {
        k.name: _plain(k, keys.below(path, k.name), fields[k.name])
        for k in key.keys if k.name in fields
        and not (k.implied and not isinstance(value, Mapping)
                 and fields[k.name] == k.default)
    }
  if key.is_list:
    return [
        _plain(key.item, keys.below(path, i), v) for i, v in enumerate(value)
    ]
  if isinstance(value, schedules.Anneal):
    return {
        "start": value.start, "end": value.end, "shape": value.kind,
        "updates": value.updates,
    }
  if callable(value):
    raise errors.invalid(
        path, "must be a number or an anneal to be written", value,
        "use plan.anneal",
    )
  return dict(value) if isinstance(value, Mapping) else value
