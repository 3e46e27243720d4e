"""Each wrong config is one line: field, rule, value got, remedy."""

import pytest

from tests.schema import yamls
from tunix_progdistill import schema

_SCHEDULED = "progressive.stages.0.learning_rate=null"
_TOP = (
    "model_config, teacher_model_config, tokenizer_config, data_source, "
    "data_directory, dataset_name, batch_size, max_target_length, "
    "num_train_epochs, num_batches, tfds_download, data_config, "
    "optimizer_config, training_config, progressive, run_directory, logging, "
    "prompts, prompt_tokens, targets"
)

# (words of the command line, the message)
_OVERRIDES = [
    # What float32 cannot hold.
    ("progressive.temperature=1e-30",
     "progressive.temperature must be such that float32 holds its square, got "
     "1e-30; use 2 to 5 at the start and 1 at the end"),
    ("progressive.temperature={start: 1e30, end: 1, shape: linear}",
     "progressive.temperature.start must be such that float32 holds its "
     "square, got 1e+30; use 2 to 5 at the start and 1 at the end"),
    ("progressive.stages.0.learning_rate=1e50",
     "progressive.stages[0].learning_rate must be such that float32 holds it, "
     "got 1e+50; try 1e-4"),
    # What optax takes and computes nonsense with.
    ("optimizer_config.b1=1.5",
     "optimizer_config.b1 must lie in [0, 1), got 1.5; leave it out for "
     "optax's own"),
    ("optimizer_config.eps=-1",
     "optimizer_config.eps must be >= 0 and finite, got -1.0; leave it out for "
     "optax's own"),
    # Paths that no file system takes, and prompts that no memory holds.
    (f"data_directory=/tmp/{'a' * 300}",
     "data_directory must be a path without NUL characters, whose every part "
     f"has at most 255 bytes, got '/tmp/{'a' * 191}...; write another path"),
    ("prompt_tokens=5000",
     "prompt_tokens must lie in [1, 4096], got 5000; write 20"),
    # Names.
    ("training_config.max_step=5",
     "training_config.max_step must be a known key, got 'max_step'; did you "
     "mean training_config.max_steps?"),
    ("max_steps=5",
     "max_steps must be a known key, got 'max_steps'; did you mean "
     "training_config.max_steps?"),
    ("progresive.alpha=0.5",
     "progresive must be a known key, got 'progresive'; did you mean "
     "progressive?"),
    ("progressive.stages.0.learning_rte=1e-4",
     "progressive.stages[0].learning_rte must be a known key, got "
     "'learning_rte'; did you mean progressive.stages[0].learning_rate?"),
    ("optimizer_config.weight_decy=0.1",
     "optimizer_config.weight_decy must be a known key, got 'weight_decy'; did "
     "you mean optimizer_config.weight_decay or "
     "optimizer_config.weight_decay_rate?"),
    ("training_config.checkpointing_options.max_to_kep=1",
     "training_config.checkpointing_options.max_to_kep must be a known key, "
     "got 'max_to_kep'; did you mean "
     "training_config.checkpointing_options.max_to_keep?"),
    ("progressive.temperature={start: 3, stop: 1}",
     "progressive.temperature.stop must be a known key, got 'stop'; known in "
     "progressive.temperature are start, end, shape, updates"),
    ("zebra=1",
     f"zebra must be a known key, got 'zebra'; known here are {_TOP}"),
    # Types.
    ("batch_size=[8]",
     "batch_size must be a whole number, got [8]; write a whole number such as "
     "8"),
    ("batch_size=8.0",
     "batch_size must be a whole number, got 8.0; write a whole number such as "
     "8"),
    ("batch_size=true",
     "batch_size must be a whole number, got True; write a whole number such "
     "as 8"),
    ("batch_size=",
     "batch_size must be a whole number, got None; write a whole number such "
     "as 8"),
    ("training_config.max_steps=1e3",
     "training_config.max_steps must be a whole number or null, got 1000.0; "
     "write a whole number such as 8, or null"),
    ("tfds_download=never",
     "tfds_download must be true or false, got 'never'; write true or false"),
    ("optimizer_config.learning_rate=fast",
     "optimizer_config.learning_rate must be a number or null, got 'fast'; "
     "write a number such as 0.1, or null"),
    ("optimizer_config.learning_rate=.nan",
     "optimizer_config.learning_rate must be finite, got nan; write a number "
     "such as 0.1"),
    ("optimizer_config.b1=[0.9]",
     "optimizer_config.b1 must be a number, got [0.9]; write a number such as "
     "0.1"),
    ("model_config.layers=3",
     "model_config.layers must be a list of whole numbers or null, got 3; "
     "write a list such as [0, 2, 5], or null"),
    ("model_config.layers=[0,\t1.5]",
     "model_config.layers[1] must be a whole number, got 1.5; write a whole "
     "number such as 8"),
    ("model_config=gemma",
     "model_config must be a section of keys, got 'gemma'; set one of its "
     "keys, such as model_config.model_name=..."),
    ("progressive.stages=5",
     "progressive.stages must be a list of sections, got 5; write a list such "
     "as [{...}, {...}]"),
    ("prompts=[a",
     "prompts must be a readable value, got '[a'; did not find expected ',' or "
     "']' (line 2, column 1)"),
    # Places.
    ("progressive.stages.2.updates=5",
     "progressive.stages must have an index from 0 to 1, got '2'; write the "
     "whole list: progressive.stages=[...]"),
    ("progressive.stages.-1.updates=5",
     "progressive.stages must have an index from 0 to 1, got '-1'; write the "
     "whole list: progressive.stages=[...]"),
    ("progressive.stages.first.updates=5",
     "progressive.stages must have an index from 0 to 1, got 'first'; write "
     "the whole list: progressive.stages=[...]"),
    ("batch_size.0=5",
     "batch_size.0 must name a key, but batch_size is a value, got '0'; write "
     "batch_size=..."),
    ("progressive.alpha.start=1",
     "progressive.alpha.start must name a key, but progressive.alpha is a "
     "value, got 'start'; write progressive.alpha={start: 3.0, end: 1.0, "
     "shape: linear}"),
    ("prompts.0=Hello",
     "prompts must hold items before one can be set, got '0'; write the whole "
     "list: prompts=[...]"),
    ("batch_size",
     "batch_size must have the form key=value, got 'batch_size'; write e.g. "
     "training_config.max_steps=100"),
    # Ranges and names of things.
    ("batch_size=0",
     "batch_size must be a whole number >= 1, got 0; try 1"),
    ("data_config.eval_fraction=2",
     "data_config.eval_fraction must be a number in (0, 1), got 2.0; try 0.1"),
    ("progressive.stages.0.temperature=0",
     "progressive.stages[0].temperature must be > 0 and finite, got 0.0; use 2 "
     "to 5 at the start and 1 at the end"),
    ("progressive.stages.1.temperature={start: 3, end: -1, shape: linear}",
     "progressive.stages[1].temperature.end must be > 0 and finite, got -1.0; "
     "use 2 to 5 at the start and 1 at the end"),
    ("progressive.temperature={start: 3, end: 1}",
     "progressive.temperature.shape must be given, got None; write a number, "
     "or a mapping such as {start: 3.0, end: 1.0, shape: linear}"),
    ("progressive.temperature={start: 3, end: 1, shape: linar}",
     "progressive.temperature.shape must be one of cosine, exponential, "
     "linear, got 'linar'; name how the value moves from start to end"),
    ("progressive.alpha={start: 1, end: 0, shape: exponential}",
     "progressive.alpha.start and progressive.alpha.end must both be > 0 for "
     "shape 'exponential', got (1.0, 0.0); use shape 'linear' to reach 0"),
    ("progressive.alpha=1.5",
     "progressive.alpha must lie in [0, 1], got 1.5; use 0.5 to "
     "weigh both losses alike"),
    ("progressive.updates_per_epoch=0",
     "progressive.updates_per_epoch must be a whole number >= 1, or data with "
     "a length, got 0; count optimizer updates, not micro-batches"),
    ("progressive.stages=[]",
     "progressive.stages must hold at least one stage, got []; leave it out to "
     "train everything in one stage"),
    ("progressive.stages.0.trainable_layers=2",
     "progressive.stages[0].freeze_fraction and trainable_layers must not be "
     "given together, got (0.8, 2); keep one of them"),
    ("optimizer_config.opt_type=adamv",
     "optimizer_config.opt_type must be the name of an optax optimizer, got "
     "'adamv'; did you mean adam or radam or adamw?"),
    ("optimizer_config.mu_dtype=float33",
     "optimizer_config.opt_type must get arguments that optax takes, got "
     "'adamw'; it says: data type 'float33' not understood"),
    ("optimizer_config.schedule_type=cosine_schedule",
     "optimizer_config.schedule_type must be the name of an optax schedule, "
     "got 'cosine_schedule'; did you mean cosine_decay_schedule or "
     "linear_schedule or cosine_onecycle_schedule?"),
    ("training_config.eval_every_n_steps=0",
     "training_config.eval_every_n_steps must be >= 1, got 0; write 100"),
    ("training_config.max_steps=0",
     "training_config.max_steps must be >= 1, got 0; write null to run as long "
     "as the plan"),
    ("training_config.profiler_options={profiler_steps: 2}",
     "training_config.profiler_options.log_dir must name a folder, got ''; "
     "write one, or set profiler_options to null"),
    ("training_config.perf_metrics_options={enable_perf_v1: true}",
     "training_config.perf_metrics_options must be empty, got "
     "{'enable_perf_v1': True}; write {}: Tunix has it for GRPO only"),
    ("logging=[tensorbord]",
     "logging must hold only jsonl, tensorboard, wandb, got 'tensorbord'; "
     "write e.g. [jsonl, tensorboard]"),
    ("prompt_tokens=0", "prompt_tokens must lie in [1, 4096], got 0; write 20"),
    ("targets.correlation=2",
     "targets.correlation must lie in [-1, 1], got 2.0; try 0.95"),
    ("tokenizer_config.tokenizer_type=wordpiece",
     "tokenizer_config.tokenizer_type must be sentencepiece, huggingface or "
     "empty, got 'wordpiece'; leave it empty to tell by the files"),
    ("tokenizer_config.add_bos=false",
     "tokenizer_config.add_bos must be true, got False; leave it out: models "
     "that know <bos> need it in every row"),
    # What contradicts each other.
    ("model_config.layers=null",
     "model_config.layers must be set, for there is no teacher_model_config, "
     "got None; write the layers that the student keeps, such as [0, 2, 5], or "
     "add a teacher_model_config"),
    ("teacher_model_config={} model_config.layers=null",
     "teacher_model_config must differ from model_config, got 'models/small'; "
     "name another model, or set model_config.layers"),
    ("teacher_model_config.layers=[0]",
     "teacher_model_config.layers must be null, for only a student is cut, got "
     "[0]; write teacher_model_config.layers=null"),
    ("optimizer_config.learning_rate=null",
     "progressive.stages[1].learning_rate must be set, by the stage, the plan "
     "or optimizer_config, got None; write e.g. "
     "optimizer_config.learning_rate=1e-4"),
    ("optimizer_config.schedule_type=constant_schedule "
     "optimizer_config.value=1e-4",
     "optimizer_config.schedule_type must not be given together with "
     "progressive.stages[0].learning_rate, got 'constant_schedule'; write "
     "optimizer_config.schedule_type=null to keep the plan's rates"),
    (f"{_SCHEDULED} optimizer_config.schedule_type=cosine_decay_schedule",
     "optimizer_config.init_value must be given, for cosine_decay_schedule "
     "needs it, got None; write a value, or set schedule_type to null"),
    (f"{_SCHEDULED} optimizer_config.schedule_type=constant_schedule "
     "optimizer_config.value=-1",
     "optimizer_config.value must be >= 0, got -1.0; try 1e-4"),
    (f"{_SCHEDULED} optimizer_config.schedule_type=warmup_constant_schedule "
     "optimizer_config.peak_value=1 optimizer_config.init_value=0",
     "optimizer_config.warmup_steps must be given, for "
     "warmup_constant_schedule needs it, got None; write a whole number, or "
     "optimizer_config.warmup_ratio=0.1"),
    ("optimizer_config.max_grad_norm=1 progressive.max_grad_norm=2",
     "progressive.max_grad_norm and optimizer_config.max_grad_norm must not be "
     "given together, got (2.0, 1.0); set one of them to null"),
    ("progressive.stages=[{epochs:\t3,learning_rate:\t1e-4},{}]",
     "num_train_epochs must be at least 4, for the stages of progressive need "
     "it, got 1; write num_train_epochs=4"),
    ("training_config.profiler_options.log_dir=p training_config.max_steps=1",
     "training_config.profiler_options.skip_first_n_steps must be below "
     "training_config.max_steps, 1, got 1; write 1 and a longer run, or drop "
     "it"),
    ("model_config.mesh={shape:\t'(1,)',axis_names:\t\"('data',)\"}",
     "training_config.data_sharding_axis must name axes of model_config.mesh, "
     "got 'fsdp'; its axes are data"),
    # Files and interpolations.
    ("override_config_file=a.yaml override_config_file=b.yaml",
     "override_config_file must be given at most once, got ['a.yaml', "
     "'b.yaml']; put both into one file"),
    ("override_config_file=none.yaml",
     "none.yaml must be a YAML file (No such file or directory), got "
     "'none.yaml'; check the path; it starts from the current folder"),
    ("run_directory=${no.such}",
     "run_directory must name what is there, got \"Interpolation key 'no.such' "
     "not found\"; write \\${ for a plain ${"),
    ("run_directory=${",
     "run_directory must hold readable interpolations, got '${'; write \\${ "
     "for a plain ${"),
]

# (text of the YAML, the message)
_FILES = [
    (yamls.SMALL + "trainig_config: {max_steps: 3}\n",
     "trainig_config must be a known key, got 'trainig_config'; did you mean "
     "training_config or tokenizer_config or optimizer_config?"),
    (yamls.SMALL + "dataset_name: 7\n",
     "dataset_name must be a text, got 7; put it in quotes"),
    (yamls.SMALL + "training_config: [1]\n",
     "training_config must be a section of keys, got [1]; set one of its keys, "
     "such as training_config.eval_every_n_steps=..."),
    ("progressive:\n",
     "progressive must be a section of keys, got None; set one of its keys, "
     "such as progressive.stages=..."),
    ("batch_size: 8\nbatch_size: 9\n",
     "run.yaml must be readable YAML, got 'found duplicate key batch_size "
     "(line 2, column 1)'; mend it there"),
    ("a: [1\n",
     "run.yaml must be readable YAML, got \"did not find expected ',' or ']' "
     "(line 2, column 1)\"; mend it there"),
    ("a:\n\tb: 1\n",
     "run.yaml must be readable YAML, got 'found character that cannot start "
     "any token (line 2, column 1)'; mend it there"),
    ("- 1\n",
     "run.yaml must hold a mapping of keys, got 'a list'; write key: value "
     "lines"),
    ("hello\n",
     "run.yaml must hold a mapping of keys, got 'hello'; write key: value "
     "lines"),
    ("",
     "run.yaml must hold a mapping of keys, got 'nothing'; write key: value "
     "lines"),
    ("1: 2\n", f"1 must be a known key, got 1; known here are {_TOP}"),
    ("data_directory: ${\n",
     "run.yaml must hold plain keys and values, got \"no viable alternative at "
     "input '${'\"; mend it there"),
]


def _message(resolve, *arguments):
  with pytest.raises(ValueError, match=r"^\S+") as caught:
    resolve(*arguments)
  text = str(caught.value)
  assert "\n" not in text
  return text


@pytest.mark.parametrize(("words", "expected"), _OVERRIDES)
def test_override(resolve, words, expected):
  # A tab stands for the space in a value.
  found = words.split(" ") if ": " not in words else [words]
  found = [w.replace("\t", " ") for w in found]
  assert _message(resolve, yamls.SMALL, *found) == expected


@pytest.mark.parametrize(("text", "expected"), _FILES)
def test_file(resolve, text, expected):
  message = _message(resolve, text)
  if "quotes" not in expected and "YAML" in expected and "'," in expected:
    # PyYAML's own words differ between its two parsers.
    assert message.startswith("run.yaml must be readable YAML, got ")
    assert "(line 2, column 1)" in message
  else:
    assert message == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "got None; write tunix-progdistill train CONFIG.yaml"),
        (["batch_size=3"], "got 'batch_size=3'; write tunix-progdistill"),
        (["none.yaml"], "none.yaml must be a YAML file (No such file or"),
        (["folder"], "folder must be a YAML file (Is a directory)"),
        (["binary"], "binary must be text in UTF-8"),
    ],
)
def test_first_word(tmp_path, words, expected):
  (tmp_path / "folder").mkdir()
  (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
  assert expected in _message(schema.resolve, words)


@pytest.mark.parametrize(
    ("name", "value", "words", "expected"),
    [
        ("T_BATCHSIZE", "3", [],
         "environment variable T_BATCHSIZE must be T_ and the upper-case name "
         "of a top-level key, got '3'; unset it, or rename it: did you mean "
         "batch_size or num_batches?"),
        ("T_batch_size", "3", [],
         "environment variable T_batch_size must be T_ and the upper-case name "
         "of a top-level key, got '3'; unset it, or rename it: did you mean "
         "batch_size?"),
        ("T_BATCH_SIZE", "x", [],
         "batch_size must be a whole number, got 'x'; write a whole number "
         "such as 8"),
        ("T_BATCH_SIZE", "3", ["batch_size=3"],
         "batch_size must not be set both on the command line and by the "
         "environment, got 'T_BATCH_SIZE=3'; keep one of them"),
        ("T_TRAINING_CONFIG", "{max_steps: 3}", ["training_config.max_steps=4"],
         "training_config must not be set both on the command line and by the "
         "environment, got 'T_TRAINING_CONFIG={max_steps: 3}'; keep one of "
         "them"),
    ],
)
def test_environment(resolve, monkeypatch, name, value, words, expected):
  monkeypatch.setenv(name, value)
  assert _message(resolve, yamls.SMALL, *words) == expected
