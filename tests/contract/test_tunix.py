"""What the package leans on in Tunix, in one table.

Tunix promises none of its private names, and few of its public ones. When one
moves, the line of the table that fails says where the package uses it.
"""

import ast
import collections
from collections.abc import Callable
import dataclasses
import importlib
import importlib.metadata
import inspect
import pathlib
import re
import textwrap
from typing import Any
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tunix
from tunix.cli import config as cli_config
from tunix.distillation import distillation_trainer
from tunix.distillation import strategies
from tunix.distillation.strategies import base_strategy
from tunix.distillation.strategies import logit
from tunix.models import automodel
from tunix.models import naming
from tunix.models import safetensors_loader
from tunix.models.gemma3 import model as gemma3_model
from tunix.sft import checkpoint_manager
from tunix.sft import hooks
from tunix.sft import inflight_throttler
from tunix.sft import metrics_logger
from tunix.sft import peft_trainer
from tunix.sft import profiler
from tunix.sft import sharding_utils
from tunix.sft import utils as sft_utils
from tunix.utils import mesh as mesh_lib

from tests import toys
import tunix_progdistill

_PACKAGE = pathlib.Path(tunix_progdistill.__file__).parent
_Peft = peft_trainer.PeftTrainer
_Distill = distillation_trainer.DistillationTrainer
_Config = distillation_trainer.TrainingConfig


class Line(NamedTuple):
  """One thing that Tunix must go on having.

  Attributes:
    name: the attribute.
    used_in: the modules of the package that use it.
    must: what it must be like.
    holds: says whether it is; may raise.
  """

  name: str
  used_in: str
  must: str
  holds: Callable[[], Any]


def _parameters(function) -> list[str]:
  return list(inspect.signature(function).parameters)


def _takes(function, *names: str, exactly: bool = False):
  """A check that `function` has these parameters, in this order, first."""

  def check():
    found = _parameters(function)
    return found == list(names) if exactly else (
        found[: len(names)] == list(names)
    )

  return check


def _source(function) -> str:
  return textwrap.dedent(inspect.getsource(function))


def _says(function, *patterns: str):
  """A check that the source has these patterns, one after the other."""

  def check():
    source = _source(function)
    for pattern in patterns:
      found = re.search(pattern, source)
      if not found:
        return False
      source = source[found.end():]
    return True

  return check


def _field(kind, name, *default):
  def check():
    field = {f.name: f for f in dataclasses.fields(kind)}[name]
    return not default or field.default == default[0]

  return check


def _stock(**kwargs) -> _Distill:
  """A Tunix trainer over tables, not ours."""
  return _Distill(
      toys.Table([toys.F1_STUDENT]),
      toys.Table([toys.F1_TEACHER]),
      logit.LogitStrategy(
          toys.forward, toys.forward,
          lambda input_tokens, input_mask: jax.nn.one_hot(input_tokens, 3),
      ),
      optax.sgd(0.1),
      _Config(eval_every_n_steps=1000, **kwargs),
  )


class _Spy(_Distill):
  """Writes down what the constructor assigns, and when."""

  def __setattr__(self, name, value):
    self.__dict__.setdefault("order", []).append(name)
    super().__setattr__(name, value)


def _constructor_order():
  order = _Spy(
      toys.Table([toys.F1_STUDENT]), toys.Table([toys.F1_TEACHER]),
      _stock().strategy, optax.sgd(0.1), _Config(eval_every_n_steps=1),
  ).order
  places = [
      order.index(name)
      for name in ("config", "optimizer", "checkpoint_manager", "_train_steps")
  ]
  # _train_steps is set again, by maybe_restore, after all of them.
  return places == sorted(places) and order.count("_train_steps") >= 2


def _unreduced_loss() -> bool:
  """A loss of this form on Tunix's main branch; a mean before."""
  if not hasattr(sft_utils, "LossOutput"):
    return True
  metric = sft_utils.WeightedMetric(jnp.float32(6.0), jnp.float32(3.0))
  out = sft_utils.LossOutput(primary_loss=metric, aux_metrics={"a": metric})
  return (
      out.primary_loss.unreduced_sum == 6.0
      and out.primary_loss.denominator == 3.0
      and out.aux_metrics["a"].compute() == 2.0
  )


def _runs_own_step():
  """The loop calls what `jit_train_and_eval_step` returned, with one batch."""
  trainer = _stock()
  calls = []

  class Step:
    """A dispatcher as ours."""

    @property
    def func(self):
      return self

    @property
    def jitted_fn(self):
      return self

    def _cache_size(self):
      calls.append("size")
      return 0

    def __call__(self, *args, **kwargs):
      calls.append((len(args), sorted(kwargs)))
      return jnp.float32(2.5), {"aux": 1}, jnp.float32(0.5)

  def build(skip_jit=False, cache_nnx_graph=False):
    calls.append(("built", skip_jit, cache_nnx_graph))
    return Step(), None

  seen = []
  trainer.jit_train_and_eval_step = build
  trainer._post_process_train_step = seen.append
  trainer.train([toys.batch([[0]])] * 2)
  flags = ["is_update_step"] if hasattr(trainer, "grad_accumulator") else []
  assert calls == [("built", False, True), "size", (1, flags), (1, flags)]
  assert seen == [{"aux": 1}] * 2
  return toys.history(trainer, "loss").tolist() == [2.5, 2.5]


_loop_order = _says(
    _Peft.train, r"self\._prepare_inputs\(", r"on_train_step_start",
    r"= train_step\(", r"self\._buffer_metrics\(",
    r"self\._post_process_train_step\(",
    r"self\._write_train_metrics\(\)", r"self\.checkpoint_manager\.save\(",
)

_eval_order = _says(
    _Peft._run_eval, r"self\._switch_mode\(", r"self\._prepare_inputs\(",
    r"loss, aux = eval_step_fn\(", r"eval_loss \+= loss",
    r"self\._write_metrics\(", r"on_eval_step_end\(self, eval_loss\)",
)


def _buffer_is_as_written():
  buffer = peft_trainer.MetricsBuffer(step=0, losses=[np.float32(1.5)])
  buffer.additional_metrics = {"x": ([1.0], np.mean)}
  buffer.losses = [np.float32(2.5)]
  return float(buffer.loss) == 2.5


def _item_names():
  """Names of the items of a Tunix checkpoint; ours have the same."""
  source = _source(checkpoint_manager.CheckpointManager)
  found = set(re.findall(r"'(model_params|optimizer_state)'", source))
  return found == {"model_params", "optimizer_state"}


def _rope_default(module):
  def check():
    function = importlib.import_module(module).apply_rope
    parameter = inspect.signature(function).parameters["rope_theta"]
    assert function.__defaults__[-1] == parameter.default or (
        parameter.default in function.__defaults__
    )
    return parameter.default == 1_000_000

  return check


def _model_class(family, name):
  def check():
    module = importlib.import_module(f"tunix.models.{family}.model")
    kind = getattr(module, name)
    assert kind.__module__.startswith(f"tunix.models.{family}.")
    source = inspect.getsource(kind.__init__)
    assert re.search(r"self\.embedder = ", source)
    assert re.search(r"self\.layers = ", source)
    assert re.search(r"self\.final_norm = ", source)
    fields = {f.name for f in dataclasses.fields(module.ModelConfig)}
    assert fields & {"num_embed", "vocab_size"}
    assert "num_layers" in fields
    return _parameters(kind.__call__)[1:5] in (
        ["last_tokens", "positions", "cache", "attention_mask"],
        ["input_tokens", "positions", "cache", "attention_mask"],
        ["tokens", "positions", "cache", "attention_mask"],
    )

  return check


def _head_is_told(family, name, *told):
  def check():
    module = importlib.import_module(f"tunix.models.{family}.model")
    kind = getattr(module, name)
    call = inspect.getsource(kind.__call__)
    after = call[re.search(r"x = self\.final_norm\(x\)", call).end():]
    if "logits = self.compute_final_logits(x)" in after:  # Tunix's main
      call = after = inspect.getsource(kind.compute_final_logits)
    assert re.search(r"logits = self\.embedder\.decode\(x\)", after)
    assert all(t in after for t in told)
    untied = "use_tied_embedding" in call or "weight_tying" in call
    assert ("self.lm_head(x)" in after) == untied
    decode = inspect.getsource(module.Embedder.decode)
    return "self.input_embedding.value" in decode

  return check


def _gemma3_kinds():
  model = toys.gemma3_model()
  kinds = [layer.attn.attn_type.name for layer in model.layers]
  return kinds == ["LOCAL_SLIDING"] * 5 + ["GLOBAL"]


def _positions_and_mask():
  mask = jnp.array([[False, True, True, False]])
  positions = sft_utils.build_positions_from_mask(mask)
  attention = sft_utils.make_causal_attn_mask(mask)
  assert positions.tolist() == [[0, 0, 1, 1]]
  return attention[0, 2].tolist() == [False, True, True, False]


def _lora_is_a_param():
  model = toys.Table([[0.0]])
  assert not sft_utils.is_lora_enabled(model)
  model.adapter = nnx.LoRAParam(jnp.zeros(1))
  return sft_utils.is_lora_enabled(model)


def _translation_dataset():
  module = importlib.import_module("tunix.examples.data.translation_dataset")
  names = {
      "dataset_name", "global_batch_size", "max_target_length",
      "num_train_epochs", "tokenizer", "tfds_download",
  }
  source = inspect.getsource(module)
  asked = set(re.findall(r"tokenizer\.(\w+)\(", source))
  return (
      names <= set(_parameters(module.create_datasets))
      and asked == {"tokenize", "pad_id"}
      and "np.concat([q_mask, a_mask]" in source
      and "input_tokens=tokens, input_mask=mask" in source
  )


def _loads_safetensors(name):
  def check():
    module = importlib.import_module(f"tunix.models.{name}")
    function = module.create_model_from_safe_tensors
    return {"file_dir", "config", "mesh", "dtype", "mode"} <= set(
        _parameters(function)
    )

  return check


def _google_tokenizers():
  return all(
      getattr(
          importlib.import_module(f"tunix.models.{family}.params"),
          f"{family.upper()}_TOKENIZER",
      ).startswith("gs://")
      for family in ("gemma3", "gemma4")
  )


def _names_of_models():
  found = naming.ModelNaming(model_id="google/gemma-3-270m")
  assert (
      found.model_family, found.model_config_category, found.model_config_id
  ) == ("gemma3", "gemma3", "gemma3_270m")
  for name in ("gema-3-270m", "gemma", ""):
    try:
      naming.ModelNaming(model_id=name)
    except ValueError:
      continue
    return False
  return isinstance(
      vars(gemma3_model.ModelConfig)["gemma3_270m"], classmethod
  )


_TRAINER = "engine.loop"
TABLE = [
    # -- the trainer's constructor
    Line(
        "DistillationTrainer.__init__", _TRAINER,
        "take (student_model, teacher_model, strategy, optimizer, "
        "training_config)",
        _takes(
            _Distill.__init__, "self", "student_model", "teacher_model",
            "strategy", "optimizer", "training_config", exactly=True,
        ),
    ),
    Line(
        "PeftTrainer.__init__ (order)", f"{_TRAINER} (properties)",
        "assign config, optimizer, checkpoint_manager, then restore",
        _constructor_order,
    ),
    Line(
        "PeftTrainer.__init__ (maybe_restore)", "engine.resume",
        "call maybe_restore(model, optimizer, restore_only_lora_params=)",
        _says(
            _Peft.__init__,
            r"self\.checkpoint_manager\.maybe_restore\(\s*self\.model,"
            r"\s*self\.optimizer,\s*restore_only_lora_params=",
        ),
    ),
    Line(
        "PeftTrainer.grad_accumulator", _TRAINER,
        "be an attribute where the step takes is_update_step, else absent",
        lambda: hasattr(_stock(), "grad_accumulator") == (
            "is_update_step" in _parameters(_Peft._train_step)
        ),
    ),
    Line(
        "DistillationTrainer.teacher_model", _TRAINER,
        "be what was handed in", lambda: isinstance(
            _stock().teacher_model, toys.Table
        ),
    ),
    Line(
        "PeftTrainer.config", _TRAINER, "be the very object handed in",
        _says(_Peft.__init__, r"self\.config = training_config\n"),
    ),
    Line(
        "PeftTrainer.metrics_logger", _TRAINER, "be a MetricsLogger",
        lambda: isinstance(
            _stock().metrics_logger, metrics_logger.MetricsLogger
        ),
    ),
    Line(
        "PeftTrainer.data_hooks", _TRAINER, "be None until set, and writable",
        lambda: _stock().data_hooks is None,
    ),
    Line(
        "DistillationTrainer.gen_model_input_fn", _TRAINER,
        "give {'inputs': {input_tokens, input_mask}, ...}",
        lambda: set(
            _stock().gen_model_input_fn(toys.batch([[0]]))["inputs"]
        ) == {"input_tokens", "input_mask"},
    ),
    Line(
        "DistillationTrainer.with_gen_model_input_fn", _TRAINER,
        "put a user's function under 'inputs'",
        lambda: _stock().with_gen_model_input_fn(
            lambda x: {"mine": x}
        ).gen_model_input_fn(1)["inputs"] == {"mine": 1},
    ),
    Line(
        "sft.utils.LossOutput", "objectives.foreign",
        "hold primary_loss (unreduced_sum, denominator) and aux_metrics of "
        "the same kind with a compute(), else be absent",
        _unreduced_loss,
    ),
    # -- an instance that the engine is lent to
    Line(
        "PeftTrainer.optimizer", "engine.attach",
        "hold the transformation as tx, in MultiSteps where the config "
        "accumulates and the loop does not",
        lambda: isinstance(
            _stock(gradient_accumulation_steps=2).optimizer.tx,
            optax.MultiSteps,
        ) == (not hasattr(_stock(), "grad_accumulator")),
    ),
    Line(
        "PeftTrainer.loss_fn", "engine.attach",
        "be the loss, as eval_loss_fn is the evaluation's, called with "
        "gen_model_input_fn's result by name",
        _says(_Peft._train_step, r"self\.gen_model_input_fn\(inputs\)",
              r"self\.loss_fn", r"grad_fn\(model, .*\*\*inputs\)"),
    ),
    Line(
        "PeftTrainer._prof", "engine.attach",
        "count from initial_step to max_step of micro-batches",
        _says(
            _Peft.__init__, r"self\._prof = profiler\.Profiler\(",
            r"initial_step=self\._iter_steps", r"max_step=max_step",
            r"profiler_options=",
        ),
    ),
    Line(
        "profiler.Profiler", "engine.attach",
        "take (initial_step, max_step, profiler_options)",
        _takes(
            profiler.Profiler.__init__, "self", "initial_step", "max_step",
            "profiler_options",
        ),
    ),
    Line(
        "PeftTrainer._train_steps", "engine.attach",
        "be set from maybe_restore, with _restored_custom_metadata, and "
        "_iter_steps from it",
        _says(
            _Peft.__init__,
            r"self\._train_steps, self\._restored_custom_metadata = ",
            r"self\._iter_steps = self\._train_steps \*",
        ),
    ),
    Line(
        "PeftTrainer._lora_enabled", "engine.attach",
        "say whether adapters alone train", lambda: not _stock()._lora_enabled,
    ),
    Line(
        "PeftTrainer.clear_jit_cache", "engine.loop, engine.attach",
        "be called where the loss changes",
        _says(_Peft.with_loss_fn, r"self\.clear_jit_cache\(\)"),
    ),
    Line(
        "PeftTrainer.close", "engine.attach",
        "end train(), save, and close the manager",
        _says(
            _Peft.close, r"self\._save_last_checkpoint\(\)",
            r"self\.checkpoint_manager\.close\(\)",
        ),
    ),
    Line(
        "strategies.BaseStrategy.post_process_models", "engine.attach",
        "take and give (student_model, teacher_model)",
        _takes(
            base_strategy.BaseStrategy.post_process_models, "self",
            "student_model", "teacher_model", exactly=True,
        ),
    ),
    # -- the loop
    Line(
        "PeftTrainer.train", _TRAINER,
        "take (train_ds, eval_ds, skip_jit, *, cache_nnx_graph)",
        _takes(
            _Peft.train, "self", "train_ds", "eval_ds", "skip_jit",
            "cache_nnx_graph",
        ),
    ),
    Line(
        "PeftTrainer.jit_train_and_eval_step", f"{_TRAINER}, engine.engine",
        "give the steps that the loop calls, and be called once",
        _runs_own_step,
    ),
    Line(
        "train_step.func.jitted_fn._cache_size", "engine.dispatch.Dispatcher",
        "be all that the loop asks of a step besides calling it",
        lambda: set(
            re.findall(r"\btrain_step\.([\w.]+)", _source(_Peft.train))
        ) <= {"func.jitted_fn._cache_size"},
    ),
    Line(
        "PeftTrainer.train (order)", _TRAINER,
        "prepare, hook, step, buffer, post-process, write, save",
        _loop_order,
    ),
    Line(
        "PeftTrainer.train_steps", _TRAINER, "count updates from 0",
        lambda: _stock().train_steps == 0,
    ),
    Line(
        "PeftTrainer.iter_steps", _TRAINER, "count micro-batches from 0",
        lambda: _stock().iter_steps == 0,
    ),
    Line(
        "PeftTrainer.iter_steps (when)", f"{_TRAINER} (Dispatcher)",
        "be counted after the step, unless the loop says is_update_step",
        lambda: "is_update_step" in _source(_Peft.train) or _says(
            _Peft.train, r"= train_step\(", r"self\._iter_steps \+= 1"
        )(),
    ),
    Line(
        "PeftTrainer._prepare_inputs", _TRAINER, "take the batch alone",
        _takes(_Distill._prepare_inputs, "self", "input_data", exactly=True),
    ),
    Line(
        "PeftTrainer._mode", _TRAINER, "be Mode.TRAIN outside evaluation",
        lambda: _stock()._mode == metrics_logger.Mode.TRAIN,
    ),
    Line(
        "PeftTrainer.custom_checkpoint_metadata", _TRAINER,
        "be a method that gives a dict",
        lambda: _stock().custom_checkpoint_metadata() == {},
    ),
    Line(
        "PeftTrainer._save_last_checkpoint", "engine.resume",
        "save through checkpoint_manager.save(..., force=True)",
        _says(
            _Peft._save_last_checkpoint,
            r"self\.checkpoint_manager\.latest_step\(\)",
            r"self\.checkpoint_manager\.save\(", r"force=True",
        ),
    ),
    # -- metrics
    Line(
        "PeftTrainer._post_process_train_step", _TRAINER,
        "take the step's second result, after the buffer was filled",
        _takes(_Peft._post_process_train_step, "self", "aux", exactly=True),
    ),
    Line(
        "PeftTrainer._buffered_train_metrics", _TRAINER,
        "be the MetricsBuffer of the window when post-processing runs",
        _says(
            _Peft.train,
            r"self\._buffered_train_metrics = self\._buffer_metrics\(",
            r"self\._post_process_train_step\(",
        ),
    ),
    Line(
        "MetricsBuffer", f"{_TRAINER}, monitor.records",
        "have assignable losses and additional_metrics, loss their mean",
        _buffer_is_as_written,
    ),
    Line(
        "PeftTrainer._write_metrics", _TRAINER,
        "take the buffer, and reduce additional_metrics by op(values)",
        _takes(_Peft._write_metrics, "self", "metrics_buffer", exactly=True),
    ),
    Line(
        "PeftTrainer._write_train_metrics", _TRAINER,
        "write the record kept in _prev_buffered_train_metrics, and keep the "
        "new one",
        _says(
            _Peft._write_train_metrics,
            r"if self\._prev_buffered_train_metrics is None:",
            r"self\._prev_buffered_train_metrics\.step \+= 1",
            r"self\._write_metrics\(self\._prev_buffered_train_metrics\)",
            r"self\._prev_buffered_train_metrics = "
            r"self\._buffered_train_metrics",
        ),
    ),
    Line(
        "PeftTrainer._try_get_learning_rate", _TRAINER,
        "give what is logged as learning_rate, nothing for None",
        _says(
            _Peft._log_metrics, r"self\._try_get_learning_rate\(\)",
            r"learning_rate is not None",
        ),
    ),
    Line(
        "PeftTrainer._run_eval", _TRAINER,
        "sum the eval step's losses for the hook, and write one record",
        _eval_order,
    ),
    Line(
        "PeftTrainer._tqdm_train_metrics", _TRAINER,
        "be a property that lists names",
        lambda: isinstance(_Peft._tqdm_train_metrics, property)
        and "loss" in _stock()._tqdm_train_metrics,
    ),
    Line(
        "metrics_logger.Mode", _TRAINER, "have TRAIN and EVAL",
        lambda: (
            str(metrics_logger.Mode.TRAIN), str(metrics_logger.Mode.EVAL)
        ) == ("train", "eval"),
    ),
    # -- the config
    Line(
        "distillation_trainer.TrainingConfig", "config",
        "be a keyword-only, mutable dataclass with slots",
        lambda: dataclasses.is_dataclass(_Config)
        and hasattr(_Config, "__slots__")
        and not _Config.__dataclass_params__.frozen
        and all(f.kw_only for f in dataclasses.fields(_Config)),
    ),
    Line(
        "TrainingConfig.__post_init__", "config",
        "not exist: ours would hide it",
        lambda: not hasattr(_Config, "__post_init__"),
    ),
    Line(
        "TrainingConfig.max_steps", _TRAINER, "count updates, None by default",
        _field(_Config, "max_steps", None),
    ),
    Line(
        "TrainingConfig.gradient_accumulation_steps", _TRAINER,
        "be None by default",
        _field(_Config, "gradient_accumulation_steps", None),
    ),
    Line(
        "TrainingConfig.checkpoint_root_directory", _TRAINER,
        "be None by default",
        _field(_Config, "checkpoint_root_directory", None),
    ),
    Line(
        "TrainingConfig.checkpointing_options", _TRAINER,
        "be None by default", _field(_Config, "checkpointing_options", None),
    ),
    Line(
        "TrainingConfig.data_sharding_axis", _TRAINER,
        "be ('fsdp',) by default",
        _field(_Config, "data_sharding_axis", ("fsdp",)),
    ),
    Line(
        "TrainingConfig.get_with_default", _TRAINER,
        "give the default for None", lambda: _Config(
            eval_every_n_steps=1
        ).get_with_default("max_steps", 5) == 5,
    ),
    Line(
        "TrainingConfig.eval_every_n_steps", "schema.training",
        "stand beside max_inflight_computations, metrics_prefix, "
        "pbar_description, max_seq_token_per_tpu, profiler_options, "
        "metrics_logging_options and perf_metrics_options",
        lambda: {
            "eval_every_n_steps", "max_inflight_computations",
            "metrics_prefix", "pbar_description", "max_seq_token_per_tpu",
            "profiler_options", "metrics_logging_options",
            "perf_metrics_options",
        } <= {f.name for f in dataclasses.fields(_Config)},
    ),
    Line(
        "profiler.ProfilerOptions", "schema.training",
        "take what the section profiler_options holds",
        _takes(
            profiler.ProfilerOptions, "log_dir", "skip_first_n_steps",
            "profiler_steps", "set_profile_options", "host_tracer_level",
            "python_tracer_level",
        ),
    ),
    # -- strategies
    Line(
        "strategies.BaseStrategy", _TRAINER, "be base_strategy.BaseStrategy",
        lambda: strategies.BaseStrategy is base_strategy.BaseStrategy,
    ),
    Line(
        "base_strategy.BaseStrategy.get_train_loss", "objectives.foreign",
        "take (student_model, teacher_output, inputs)",
        _takes(
            base_strategy.BaseStrategy.get_train_loss, "self",
            "student_model", "teacher_output", "inputs", exactly=True,
        ),
    ),
    Line(
        "base_strategy.BaseStrategy.get_eval_loss", "objectives.foreign",
        "take (student_model, inputs)",
        _takes(
            base_strategy.BaseStrategy.get_eval_loss, "self",
            "student_model", "inputs", exactly=True,
        ),
    ),
    Line(
        "base_strategy.BaseStrategy.get_teacher_outputs",
        f"strategy, {_TRAINER}", "take (teacher_model, inputs)",
        _takes(
            base_strategy.BaseStrategy.get_teacher_outputs, "self",
            "teacher_model", "inputs", exactly=True,
        ),
    ),
    Line(
        "base_strategy.BaseStrategy.get_student_outputs", "strategy",
        "take (student_model, inputs)",
        _takes(
            base_strategy.BaseStrategy.get_student_outputs, "self",
            "student_model", "inputs", exactly=True,
        ),
    ),
    Line(
        "logit.LogitStrategy.__init__", "strategy",
        "take our first six arguments, in our order",
        _takes(
            logit.LogitStrategy.__init__, "self", "student_forward_fn",
            "teacher_forward_fn", "labels_fn", "temperature", "alpha",
            "distill_top_k", exactly=True,
        ),
    ),
    Line(
        "logit.LogitStrategy._labels_fn", "strategy",
        "be callable with the inputs by name", lambda: _stock(
        ).strategy._labels_fn(
            input_tokens=jnp.zeros((1, 1), jnp.int32), input_mask=None
        ).shape == (1, 1, 3),
    ),
    Line(
        "logit.LogitStrategy._student_forward_fn", "strategy (adopt)",
        "be callable, as is `_teacher_forward_fn`",
        lambda: callable(_stock().strategy._student_forward_fn)
        and callable(_stock().strategy._teacher_forward_fn),
    ),
    Line(
        "PeftTrainer.is_managed_externally", "trainer",
        "be False at first: then the loop skips what was trained on",
        lambda: _stock().is_managed_externally is False,
    ),
    Line(
        "logit.LogitStrategy.distill_top_k", "strategy", "be 0 by default",
        lambda: _stock().strategy.distill_top_k == 0,
    ),
    Line(
        "logit.LogitStrategy.compute_loss", "strategy",
        "take (student_output, teacher_output, labels)",
        _takes(
            logit.LogitStrategy.compute_loss, "self", "student_output",
            "teacher_output", "labels", exactly=True,
        ),
    ),
    Line(
        "logit.LogitStrategy.compute_eval_loss", "strategy",
        "take (student_output, labels)",
        _takes(
            logit.LogitStrategy.compute_eval_loss, "self", "student_output",
            "labels", exactly=True,
        ),
    ),
    # -- the command line
    Line(
        "config.HyperParameters", "cli.pipeline",
        "take argv: program, YAML, override_config_file= and key=value words",
        lambda: _parameters(cli_config.HyperParameters.__init__)[:2] == [
            "self", "argv"
        ] and "override_config_file=" in _source(
            cli_config.HyperParameters.__init__
        ),
    ),
    Line(
        "HyperParameters.create_optimizer", "cli.pipeline",
        "make it by optax.inject_hyperparams, from a section's name",
        _says(
            cli_config.HyperParameters.create_optimizer,
            r"\*optimizer_keys", r"optax\.inject_hyperparams\(",
        ),
    ),
    Line(
        "HyperParameters.obtain_training_config_dict", "cli.pipeline",
        "take a section's name",
        _takes(
            cli_config.HyperParameters.obtain_training_config_dict, "self",
            "key", exactly=True,
        ),
    ),
    # -- checkpoints
    Line(
        "CheckpointManager (item names)", "engine.checkpoints",
        "name its items model_params and optimizer_state",
        _item_names,
    ),
    Line(
        "CheckpointManager.save", "engine.resume",
        "take what ours takes",
        _takes(
            checkpoint_manager.CheckpointManager.save, "self", "step",
            "model", "optimizer", "save_only_lora_params", "force",
            "custom_metadata", exactly=True,
        ),
    ),
    Line(
        "CheckpointManager.maybe_restore", "engine.resume",
        "take what ours takes",
        _takes(
            checkpoint_manager.CheckpointManager.maybe_restore, "self",
            "model", "optimizer", "step", "restore_only_lora_params",
            exactly=True,
        ),
    ),
    Line(
        "PeftTrainer (use of checkpoint_manager)", "engine.resume",
        "call only what ours has", lambda: set(
            re.findall(
                r"self\.checkpoint_manager\.(\w+)", inspect.getsource(_Peft)
            )
        ) <= {"maybe_restore", "save", "latest_step", "close"},
    ),
    Line(
        "CheckpointManager.close", _TRAINER,
        "work on a manager that never saved",
        lambda: checkpoint_manager.CheckpointManager(None).close() is None,
    ),
    Line(
        "InflightThrottler.add_computation", "engine.step.Report",
        "wait for the loss by block_until_ready alone",
        lambda: set(re.findall(
            r"computation\.(\w+)",
            _source(inflight_throttler.InflightThrottler),
        )) <= {"block_until_ready"},
    ),
    # -- data, sharding, utilities
    Line(
        "hooks.DataHooks", "engine.batches",
        "have load_next_train_batch and load_next_eval_batch alone",
        lambda: hooks.DataHooks.__abstractmethods__ == {
            "load_next_train_batch", "load_next_eval_batch"
        },
    ),
    Line(
        "sharding_utils.shard_input", _TRAINER,
        "give its input back where there is no mesh",
        lambda: sharding_utils.shard_input({"a": 1}, ("fsdp",)) == {"a": 1},
    ),
    Line(
        "sft_utils.is_lora_enabled", _TRAINER, "find an nnx.LoRAParam",
        _lora_is_a_param,
    ),
    Line(
        "sft_utils.build_positions_from_mask", "families.causal_lm",
        "count from the first valid token", _positions_and_mask,
    ),
    Line(
        "sft_utils.make_causal_attn_mask", "families.causal_lm",
        "be causal and hide padding", _positions_and_mask,
    ),
    Line(
        "translation_dataset.create_datasets", "data.translation",
        "take dataset_name to tfds_download, ask a tokenizer for tokenize and "
        "pad_id alone, and give batches whose input_mask marks the target",
        _translation_dataset,
    ),
    # -- models
    *(
        Line(
            f"tunix.models.{family}.model.{name}", f"families.{family}",
            "have embedder, layers, final_norm and a config that tells the "
            "number of layers and the vocabulary; take (tokens, positions, "
            "cache, attention_mask)",
            _model_class(family, name),
        )
        for family, name in (
            ("gemma", "Gemma"), ("gemma3", "Gemma3"), ("gemma4", "Gemma4"),
            ("llama3", "Llama3"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"),
        )
    ),
    *(
        Line(
            f"tunix.models.{family}.model.{name}.__call__",
            f"families.{family}",
            "turn what final_norm gives into logits by the embedding or by "
            f"lm_head, and tell the rest of the head by {', '.join(told)}",
            _head_is_told(family, name, *told),
        )
        for family, name, told in (
            ("gemma", "Gemma", ["self.final_logits_softcap"]),
            ("gemma3", "Gemma3", []),
            ("gemma4", "Gemma4", ["config.final_logit_softcap"]),
            ("llama3", "Llama3", ["config.weight_tying"]),
            ("qwen2", "Qwen2", ["config.use_tied_embedding"]),
            ("qwen3", "Qwen3", ["config.use_tied_embedding"]),
        )
    ),
    *(
        Line(
            f"tunix.models.{family}.model.apply_rope", "families.rope",
            "have a plain default rope_theta of 1,000,000",
            _rope_default(f"tunix.models.{family}.model"),
        )
        for family in ("llama3", "qwen3")
    ),
    Line(
        "gemma3 layer.attn.attn_type", "students.layers",
        "tell local from global", _gemma3_kinds,
    ),
    # -- files
    *(
        Line(
            f"tunix.models.{module}.create_model_from_safe_tensors",
            "families, weights.local",
            "take (file_dir, config, mesh, dtype, mode)",
            _loads_safetensors(module),
        )
        for module in (
            "gemma.params_safetensors", "gemma3.params_safetensors",
            "gemma4.params_safetensors", "llama3.params", "qwen2.params",
            "qwen3.params",
        )
    ),
    Line(
        "safetensors_loader.load_and_create_model", "weights.local",
        "take (file_dir, model_class, config, key_mapping, mesh, "
        "preprocess_fn, dtype, mode) and know the mode 'original'",
        lambda: {
            "file_dir", "model_class", "config", "key_mapping", "mesh",
            "preprocess_fn", "dtype", "mode",
        } <= set(_parameters(safetensors_loader.load_and_create_model))
        and "'original'" in _source(safetensors_loader.load_and_create_model),
    ),
    # -- the command
    Line(
        "metrics_logger.MetricsLoggerOptions", "run.backends, schema.training",
        "start the factories under backend_kwargs['custom_backend'], and "
        "nothing else",
        lambda: metrics_logger.MetricsLoggerOptions(
            log_dir="x", backend_kwargs={"custom_backend": [lambda: "mine"]}
        ).create_backends() == ["mine"],
    ),
    Line(
        "metrics_logger.TensorboardBackend", "run.backends",
        "take (log_dir, flush_every_n_steps)",
        lambda: {"log_dir", "flush_every_n_steps"} <= set(
            _parameters(metrics_logger.TensorboardBackend)
        ),
    ),
    Line(
        "metrics_logger.WandbBackend", "run.backends", "take (project, name)",
        lambda: {"project", "name"} <= set(
            _parameters(metrics_logger.WandbBackend)
        ),
    ),
    Line(
        "mesh.create_mesh", "run.models",
        "take (axis_shapes, axis_names, devices)",
        lambda: mesh_lib.create_mesh(
            (2,), ("fsdp",), jax.devices()[:2]
        ).shape == {"fsdp": 2},
    ),
    Line(
        "hooks.TrainingHooks", "run.watch, hook",
        "have on_train_start, on_train_end, on_train_step_start, "
        "on_train_step_end, on_eval_step_start and on_eval_step_end",
        lambda: hooks.TrainingHooks.__abstractmethods__ == {
            f"on_{what}_{when}" for what in ("train", "train_step", "eval_step")
            for when in ("start", "end")
        },
    ),
    # -- downloads
    Line(
        "automodel.AutoModel.from_pretrained", "weights.remote",
        "take (model_id, mesh, *, model_source, model_path, "
        "model_download_path, **kwargs) and know its sources",
        lambda: _parameters(automodel.AutoModel.from_pretrained) == [
            "model_id", "mesh", "model_source", "model_path",
            "model_download_path", "kwargs",
        ],
    ),
    Line(
        "automodel.ModelSource", "weights.remote", "have kaggle and gcs",
        lambda: {"kaggle", "gcs"} <= {s.value for s in automodel.ModelSource},
    ),
    Line(
        "AutoModel (what from where)", "weights.remote",
        "read Gemma and Gemma 2 from Kaggle, Gemma 3 and 4 from gcs, and no "
        "other model from either",
        _says(
            automodel.AutoModel.from_pretrained.__func__,
            r"model_family == 'gemma3':\s+if model_source in \(ModelSource.GCS",
            r"model_family == 'gemma4':\s+if model_source in \(ModelSource.GCS",
            r"in \('gemma', 'gemma1p1', 'gemma2'\):\s+if model_source == "
            r"ModelSource.KAGGLE",
            r"in \(ModelSource.KAGGLE, ModelSource.GCS\):\s+raise",
        ),
    ),
    Line(
        "naming.ModelNaming", "weights.remote",
        "split a name into family, category and config id, or raise "
        "ValueError; configs are class methods", _names_of_models,
    ),
    Line(
        "GEMMA3_TOKENIZER, GEMMA4_TOKENIZER", "weights.remote",
        "tell where Google keeps the tokenizer", _google_tokenizers,
    ),
    Line(
        "gemma3.model.GEMMA3_ATTENTION_PATTERN", "families.gemma3",
        "be five local layers, then a global one",
        lambda: [
            kind.name for kind in gemma3_model.GEMMA3_ATTENTION_PATTERN
        ] == ["LOCAL_SLIDING"] * 5 + ["GLOBAL"],
    ),
    Line(
        "gemma3.model.QueryPreAttentionNormalisation", "families.gemma3",
        "scale by the head's width or by the model's over the heads",
        lambda: [
            kind.name for kind in gemma3_model.QueryPreAttentionNormalisation
        ] == [
            "BY_ONE_OVER_SQRT_HEAD_DIM",
            "BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS",
        ],
    ),
]


def _version() -> str:
  return (
      f"Tunix at {pathlib.Path(tunix.__file__).parent} "
      f"(installed {importlib.metadata.version('google-tunix')})"
  )


@pytest.mark.parametrize("line", TABLE, ids=[line.name for line in TABLE])
def test_tunix_has(line):
  """Every line of the table holds for the Tunix that is installed."""
  try:
    holds, why = line.holds(), ""
  except (AttributeError, KeyError, TypeError, ValueError, AssertionError,
          ImportError, IndexError) as e:
    holds, why = False, f" [{type(e).__name__}: {e}]"
  assert holds, (
      f"{line.name}, used in tunix_progdistill.{line.used_in}, must "
      f"{line.must}; {_version()} differs{why}"
  )


def test_names_stand_once():
  counts = collections.Counter(line.name for line in TABLE)
  assert [name for name, n in counts.items() if n > 1] == []


# -- the table is complete


def _words() -> set[str]:
  return set(
      re.findall(r"\w+", " ".join(f"{x.name} {x.must}" for x in TABLE))
  )


def _trees():
  for path in sorted(_PACKAGE.rglob("*.py")):
    yield path, ast.parse(path.read_text())


def test_table_names_every_tunix_module_attribute():
  """Whatever is read off an imported Tunix module stands in the table."""
  named = _words()
  missing = []
  for path, tree in _trees():
    modules = {}
    for node in ast.walk(tree):
      if isinstance(node, ast.ImportFrom) and (
          (node.module or "").split(".")[0] == "tunix"
      ):
        modules |= {a.asname or a.name: a.name for a in node.names}
    for node in ast.walk(tree):
      if (
          isinstance(node, ast.Attribute)
          and isinstance(node.value, ast.Name)
          and node.value.id in modules
          and node.attr not in named
      ):
        missing.append(f"{path.name}: {modules[node.value.id]}.{node.attr}")
  assert missing == []


def test_table_names_every_inherited_attribute():
  """Whatever our subclasses read of `self` and do not define stands there."""
  named = _words()
  missing = []
  for path, tree in _trees():
    if path.name not in ("trainer.py", "strategy.py"):
      continue
    for node in tree.body:
      if not isinstance(node, ast.ClassDef) or not any(
          isinstance(base, ast.Attribute) and base.value.id in (
              "distillation_trainer", "logit"
          )
          for base in node.bases
      ):
        continue
      own, read = set(), set()
      for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef):
          own.add(child.name)
        if not isinstance(child, ast.Attribute):
          continue
        through_super = (
            isinstance(child.value, ast.Call)
            and getattr(child.value.func, "id", "") == "super"
        )
        if through_super:
          read.add(("super", child.attr))
        elif getattr(child.value, "id", "") == "self":
          if isinstance(child.ctx, ast.Store):
            own.add(child.attr)
          else:
            read.add(("self", child.attr))
      missing += [
          f"{path.name}: {owner}.{name}" for owner, name in sorted(read)
          if (owner == "super" or name not in own) and name not in named
      ]
  assert missing == []
