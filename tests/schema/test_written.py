"""What is written from the schema, and reading it back."""

import dataclasses
import pathlib
import re

from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest
import yaml

from tests.schema import yamls
from tunix_progdistill import config as config_lib
from tunix_progdistill import data
from tunix_progdistill import plan
from tunix_progdistill import schema
from tunix_progdistill.schema import docstrings
from tunix_progdistill.schema import grammar
from tunix_progdistill.schema import keys
from tunix_progdistill.schema import sections
from tunix_progdistill.schema import training
from tunix_progdistill.schema import tree
from tunix_progdistill.weights import config as weights_config

_ROOT = pathlib.Path(__file__).parents[2]
_REMAKE = "run python -m tunix_progdistill.schema"

_TEXT = st.text(
    st.characters(exclude_categories=("Cs",)), max_size=12
) | st.sampled_from(
    ["${x}", "\\${", "a\\\\${b}", "1e5", "null", "~", "on", "1:30", "012",
     "2020-01-01", "???", "- a", "a: b", "#", "'", '"', "\x85", "\\", "{", "*"]
)
_NAME = _TEXT.filter(bool)


def _is_regex(text):
  try:
    re.compile(text)
  except re.error:
    return False
  return True


_RULE = _NAME.filter(_is_regex)
_PATH = _TEXT.filter(lambda text: "\0" not in text)
_POSITIVE = st.floats(1e-3, 1e3)
_PART = st.floats(0, 1)
_COUNT = st.integers(1, 10**12)


def _scalar(numbers):
  anneal = st.builds(
      plan.anneal, numbers, numbers, st.sampled_from(["linear", "cosine"]),
      updates=st.none() | st.integers(1, 10**6),
  )
  return st.none() | numbers | anneal


_STAGE = st.builds(
    lambda selector, **fields: plan.Stage(**selector, **fields),
    st.one_of(
        st.just({}),
        st.builds(lambda f: {"freeze_fraction": f}, _PART),
        st.builds(lambda n: {"trainable_layers": n}, _COUNT),
        st.builds(
            lambda r: {"frozen": tuple(r)}, st.lists(_RULE, min_size=1)
        ),
    ),
    name=_TEXT,
    updates=_COUNT,
    learning_rate=_PART,
    temperature=_scalar(_POSITIVE),
    alpha=_scalar(_PART),
)
_CONFIG = st.builds(
    schema.RunConfig,
    model_config=st.builds(
        weights_config.ModelConfig, model_path=_PATH, model_id=_TEXT,
        rng_seed=st.integers(0, 2**40),
        layers=st.lists(st.integers(0, 99), min_size=1).map(tuple),
        mesh=st.none() | st.just(
            {"shape": "(1,2)", "axis_names": "('fsdp','tp')"}
        ),
    ),
    teacher_model_config=st.none() | st.builds(
        weights_config.ModelConfig, model_path=_PATH,
        model_display=st.just(True),
    ),
    tokenizer_config=st.builds(
        sections.TokenizerConfig, tokenizer_path=_PATH, add_eos=st.booleans()
    ),
    data_config=st.builds(
        data.DataConfig, data_directory=_PATH, batch_size=_COUNT,
        text_field=_NAME, shuffle_seed=st.none() | _COUNT,
        eval_fraction=st.floats(0.01, 0.99),
    ),
    optimizer_config=st.builds(
        schema.OptimizerConfig, learning_rate=_PART,
        arguments=st.fixed_dictionaries(
            {}, optional={"b1": st.floats(0, 0.999), "nesterov": st.booleans(),
                          "mu_dtype": st.none(), "power": _POSITIVE},
        ),
    ),
    training_config=st.builds(
        training.TrainingSection, max_steps=_COUNT, metrics_prefix=_TEXT,
        pbar_description=st.none() | _TEXT,
        checkpointing_options=st.none() | st.builds(
            training.CheckpointingOptions, max_to_keep=st.none() | _COUNT
        ),
        metrics_logging_options=st.none() | st.builds(
            training.MetricsLoggingOptions, run_name=_TEXT
        ),
    ),
    progressive=st.builds(
        config_lib.ProgressiveConfig,
        plan=st.builds(
            plan.StagePlan,
            stages=st.lists(_STAGE, min_size=1, max_size=3).map(tuple),
            temperature=_scalar(_POSITIVE),
            alpha=_scalar(_PART),
        ),
        max_grad_norm=st.none() | _POSITIVE,
    ),
    run_directory=_PATH.filter(bool),
    logging=st.lists(st.sampled_from(["jsonl", "wandb"])).map(tuple),
    prompts=st.lists(_TEXT, max_size=3).map(tuple),
    targets=st.builds(sections.Targets, kl_div_tau1=st.none() | _POSITIVE),
)


@settings(
    max_examples=60, deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow, HealthCheck.function_scoped_fixture
    ],
)
@given(config=_CONFIG)
def test_to_yaml_reads_back_equal(tmp_path, config):
  (tmp_path / "again.yaml").write_text(schema.to_yaml(config), encoding="utf-8")
  assert schema.resolve(["again.yaml"]) == config


@pytest.mark.parametrize("text", [yamls.SMALL, yamls.FULL])
def test_a_resolved_file_reads_back_equal(resolve, text):
  config = resolve(text)
  again = resolve(schema.to_yaml(config))
  assert again == config
  assert schema.to_yaml(again) == schema.to_yaml(config)
  assert again.run_directory == "runs/run"


def test_a_schedule_made_in_python_cannot_be_written(resolve):
  config = resolve(yamls.SMALL)
  made = dataclasses.replace(
      config.progressive.plan, temperature=lambda count: 2.0
  )
  progressive = dataclasses.replace(config.progressive, plan=made)
  config = dataclasses.replace(config, progressive=progressive)
  with pytest.raises(ValueError, match=r"^progressive\.temperature must be a"):
    schema.to_yaml(config)


def test_the_base_yaml_is_current_and_is_the_defaults():
  text = grammar.BASE_FILE.read_text(encoding="utf-8")
  assert text == schema.base_yaml(), _REMAKE
  root = tree.root()
  written = keys.checked(root, "", yaml.safe_load(text), root=root)
  assert written == keys.checked(root, "", tree.defaults(root), root=root) | {
      "progressive": written["progressive"]
  }
  (stage,) = written["progressive"].pop("stages")
  assert not any(stage.values())
  assert written["progressive"].pop("enabled") is True
  assert not any(written["progressive"].values())


def test_the_base_yaml_can_be_the_config():
  config = schema.resolve([
      "base_config.yaml", "model_config.layers=[0]",
      "optimizer_config.learning_rate=1e-4",
  ])
  assert config.run_directory == "runs/base_config"


def test_the_reference_is_current():
  path = _ROOT / "docs" / "configuration.md"
  assert path.read_text(encoding="utf-8") == schema.document(), _REMAKE


def test_every_key_is_described():
  """In the reference those that do not depend on what is installed."""
  reference, text = schema.document(), schema.help_text(80)
  for path in keys.paths(tree.root()):
    if path.startswith("teacher_model_config."):
      continue
    shown = path.replace("[0]", ".N")
    key = tree.root()
    for part in shown.replace(".N", "").split("."):
      key = key.child(part)
    assert f"\n  {shown}  ({key.type_name.split(' ')[0]}" in text
    assert key.implied or f"| `{shown}` | {key.type_name} | " in reference
  assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    "owner",
    [
        weights_config.ModelConfig, data.DataConfig, schema.RunConfig,
        schema.OptimizerConfig, training.TrainingSection, sections.Mesh,
        training.CheckpointingOptions, training.MetricsLoggingOptions,
        training.ProfilerOptions, sections.StageKeys, sections.ProgressiveKeys,
        sections.Targets, sections.TokenizerConfig,
    ],
)
def test_every_field_has_a_meaning(owner):
  names = [f.name for f in dataclasses.fields(owner)]
  meanings = docstrings.attributes(owner)
  assert list(meanings) == names or set(meanings) == set(names)
  assert all(m.endswith(".") for m in meanings.values())


def test_stages_in_a_yaml_are_those_of_the_plan():
  def fields(owner):
    return {
        f.name: f.default for f in dataclasses.fields(owner)
        if f.name not in ("stages", "plan")
    }

  assert fields(sections.StageKeys) == fields(plan.Stage)
  assert fields(sections.ProgressiveKeys) == {
      **fields(plan.StagePlan), **fields(config_lib.ProgressiveConfig)
  }
