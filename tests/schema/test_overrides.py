"""key=value changes that key and nothing else, over every key that there is."""

import re

import pytest

from tests.schema import yamls
from tunix_progdistill import schema
from tunix_progdistill.schema import keys
from tunix_progdistill.schema import tree

_ROOT = tree.root()
_PATHS = keys.paths(_ROOT)

# What is written where the kind alone does not tell a value that may stand.
_VALUES = {
    "model_source": ("huggingface", "huggingface"),
    "dtype": ("bfloat16", "bfloat16"),
    "remat_config": ("3", "decoder"),
    "mesh.shape": ("(2,1)", "(2,1)"),
    "mesh.axis_names": ("('fsdp','model')", "('fsdp','model')"),
    "tokenizer_type": ("sentencepiece", "sentencepiece"),
    "data_source": ("jsonl", "jsonl"),
    "format": ("text", "text"),
    "encoding_errors": ("replace", "replace"),
    "on_long": ("skip", "skip"),
    "opt_type": ("sgd", "sgd"),
    "num_train_epochs": ("10", 10),
    "data_sharding_axis": ("[tp]", ["tp"]),
    "host_tracer_level": ("3", 3),
    "python_tracer_level": ("0", 0),
    "logging": ("[jsonl]", ["jsonl"]),
    "max_steps": ("40", 40),
    "schedule_type": ("constant_schedule", "constant_schedule"),
    "mu_dtype": ("bfloat16", "bfloat16"),
    "pack": ("false", False),
    "boundaries_and_scales": ("{10: 0.5}", {10: 0.5}),
    "cosine_kwargs": ("[{peak_value: 1.0}]", [{"peak_value": 1.0}]),
    "answer_field": ("reply", "reply"),
    "lora_config": (
        "{module_path: x, rank: 4, alpha: 1.0}",
        {"module_path": "x", "rank": 4, "alpha": 1.0},
    ),
    "quantization": ("nf4", "nf4"),
}
_BY_KIND = {
    "int": ("7", 7),
    "float": ("25e-2", 0.25),
    "scalar": ("25e-2", 0.25),
    "str": ("some/text", "some/text"),
    "ints": ("[1, 3]", [1, 3]),
    "strs": ("[one, 'two words']", ["one", "two words"]),
}
# What must be set as well for a key to make sense.
_WITH = {
    "progressive.stages[0].epochs": [
        "progressive.stages.0={updates: null, epochs: 1}"
    ],
    "optimizer_config.schedule_type": ["optimizer_config.value=1e-4"],
}
# Keys with one value only, or read by nothing: refused, or listed.
_REFUSED = {
    "model_config.quantization": "int8",
    "teacher_model_config.lora_config":
        "{module_path: x, rank: 4, alpha: 1.0}",
    "training_config.perf_metrics_options": "{trace_dir: x}",
    "training_config.max_seq_token_per_tpu": "64",
    "teacher_model_config.layers": "[0]",
    "tokenizer_config.add_bos": "false",
}
_NOT_READ = (
    "model_config.mesh.allocation_policy",
    "teacher_model_config.mesh.allocation_policy",
)


def _key(path):
  key = _ROOT
  for part in re.sub(r"\[\d+\]", "", path).split("."):
    key = key.child(part)
  return key


def _sample(path, now):
  key = _key(path)
  for end, pair in _VALUES.items():
    if f".{path}".endswith(f".{end}"):
      return pair
  if key.kind == "bool":
    return ("false", False) if now is True else ("true", True)
  return _BY_KIND[key.kind]


def _flat(value, path=""):
  """{path: leaf} of a plain tree, as `keys.paths` writes the paths."""
  if isinstance(value, dict) and path:
    key = _key(path)
    if key.kind not in ("section", "sections"):
      return {path: value}
  if isinstance(value, dict):
    out = {}
    for name, item in value.items():
      out |= _flat(item, keys.below(path, name))
    return out
  if isinstance(value, list) and value and isinstance(value[0], dict) and (
      _key(path).kind == "sections"
  ):
    out = {}
    for i, item in enumerate(value):
      for name, inner in item.items():
        out |= _flat(inner, f"{path}[{i}].{name}")
    return out
  return {path: value}


@pytest.fixture
def full(resolve, tmp_path):
  """A file in which every key is written out."""
  config = resolve(yamls.FULL)
  (tmp_path / "full.yaml").write_text(schema.to_yaml(config))
  return "full.yaml"


def _resolved(file, *overrides):
  config = schema.resolve([file, *overrides])
  return config, _flat(tree.plain(config))


@pytest.mark.parametrize(
    ("word", "path"),
    [(re.sub(r"\[(\d+)\]", r".\1", p), p) for p in _PATHS]
    + [(p, p) for p in _PATHS if "[" in p],
)
def test_override_changes_that_key_and_nothing_else(full, word, path):
  with_it = _WITH.get(path, [])
  if path in _REFUSED:
    with pytest.raises(ValueError, match=re.escape(f"{path} must be ")):
      schema.resolve([full, f"{word}={_REFUSED[path]}"])
    return
  _, before = _resolved(full, *with_it)
  text, expected = _sample(path, before.get(path))
  config, after = _resolved(full, *with_it, f"{word}={text}")
  if path in _NOT_READ:
    assert after == before
    assert path in config.source.not_read
    return
  assert before.get(path, "absent") != expected
  assert after == {**before, path: expected}


def test_every_key_is_in_the_full_file(full):
  """Else the test above would look at fewer keys than there are."""
  _, found = _resolved(full)
  implied = {p for p in _PATHS if _key(p).implied}
  assert set(_PATHS) - implied - set(_NOT_READ) <= set(found)
  assert len(_PATHS) > 150


@pytest.mark.parametrize(
    ("words", "path", "expected"),
    [
        (["model_config.model_path="], "model_config.model_path", ""),
        (["model_config.model_path=7"], "model_config.model_path", "7"),
        (["model_config.model_path=*.gguf"], "model_config.model_path",
         "*.gguf"),
        (["data_directory='a, b'"], "data_directory", "a, b"),
        (["model_config.layers=[]", "model_config.layers=[0,1]"],
         "model_config.layers", [0, 1]),
        (["model_config.layers.1=4"], "model_config.layers", [0, 4, 5]),
        (["progressive.stages.1.learning_rate=3e-4"],
         "progressive.stages[1].learning_rate", 0.0003),
        (["prompts.0=Note: this"], "prompts", ["Note: this", "A dog"]),
        (["prompts=[]"], "prompts", []),
        (["training_config={max_steps: 40}"], "training_config.max_steps", 40),
        (["training_config.max_steps=null"], "training_config.max_steps", None),
        (["training_config.max_steps="], "training_config.max_steps", None),
        (["progressive.temperature=3e-1"], "progressive.temperature", 0.3),
        (["progressive.temperature.shape=cosine"], "progressive.temperature",
         {"start": 3.0, "end": 1.0, "shape": "cosine", "updates": None}),
        (["progressive.alpha={start: 1, end: 0, shape: linear, updates: 9}"],
         "progressive.alpha",
         {"start": 1.0, "end": 0.0, "shape": "linear", "updates": 9}),
        (["run_directory=${data_source}/x"], "run_directory", "text/x"),
        (["run_directory=a=b"], "run_directory", "a=b"),
        (["training_config.checkpointing_options=null"],
         "training_config.checkpointing_options", None),
    ],
)
def test_values(full, words, path, expected):
  _, before = _resolved(full)
  _, after = _resolved(full, *words)
  assert after[path] == expected
  below = f"{path}."
  same = {k: v for k, v in before.items() if not k.startswith(below)}
  assert {k: v for k, v in after.items() if k != path} == {
      k: v for k, v in same.items() if k != path
  }


def test_a_section_that_was_null_starts_from_its_defaults(resolve):
  config = resolve(
      yamls.SMALL, "training_config.checkpointing_options.max_to_keep=1"
  )
  options = config.training_config.checkpointing_options
  assert options.max_to_keep == 1
  assert options.enable_async_checkpointing is True
  assert config.training_config.metrics_logging_options is None


def test_a_stage_can_be_set_where_the_file_has_none(resolve):
  config = resolve(
      "model_config: {layers: [0]}", "progressive.stages.0.learning_rate=3e-4"
  )
  (stage,) = config.progressive.plan.stages
  assert stage.learning_rate == 3e-4


def test_the_later_one_wins(resolve, tmp_path, monkeypatch):
  (tmp_path / "more.yaml").write_text(
      "batch_size: 3\nnum_batches: 3\ntraining_config: {max_steps: 3}\n"
  )
  monkeypatch.setenv("T_NUM_TRAIN_EPOCHS", "5")
  config = resolve(
      yamls.SMALL + "batch_size: 2\nmax_target_length: 2\nnum_batches: 2\n",
      "num_batches=4", "override_config_file=more.yaml", "num_batches=6",
  )
  data = config.data()
  assert data.max_target_length == 2
  assert data.batch_size == 3
  assert data.num_batches == 6
  assert data.num_train_epochs == 5
  assert config.training_config.max_steps == 3
  assert config.training_config.eval_every_n_steps == 100
  assert config.command() == (
      "T_NUM_TRAIN_EPOCHS=5 tunix-progdistill train run.yaml num_batches=4 "
      "override_config_file=more.yaml num_batches=6"
  )
