"""A pipeline class on Tunix's `HyperParameters` takes the flag from YAML."""

import numpy as np
import pytest
from tunix.cli import config as tunix_config
from tunix.distillation import distillation_trainer
from tunix.distillation.strategies import logit

from tests import toys
import tunix_progdistill as tpd
from tunix_progdistill.cli import pipeline

_YAML = """\
model_config: {model_name: llama3, model_source: internal}
tokenizer_config: {tokenizer_type: sentencepiece, tokenizer_path: ""}
batch_size: 4
optimizer_config: {opt_type: adamw, learning_rate: 0.01}
training_config:
  eval_every_n_steps: 100
  max_steps: 4
"""
_STAGES = """\
progressive:
  temperature: 2.5
  stages:
  - {freeze_fraction: 0.5, updates: 2, learning_rate: 0.01}
  - {updates: 2, learning_rate: 0.001}
"""


class Pipeline(pipeline.ProgressivePipeline):
  """As a user writes one: only the base class is ours."""

  def run(self, data):
    strategy = logit.LogitStrategy(
        toys.forward, toys.forward,
        lambda input_tokens, input_mask: toys.one_hot(input_tokens),
    )
    trainer = self.make_trainer(toys.Toy(seed=1), toys.Toy(), strategy)
    trainer.train(data)
    return trainer


@pytest.fixture
def run(tmp_path):
  def run(text, *words, override=None):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    if override is not None:
      (tmp_path / "more.yaml").write_text(override)
      words = (f"override_config_file={tmp_path / 'more.yaml'}", *words)
    return Pipeline(["main", str(path), *words])

  return run


def test_flag_in_the_yaml(run):
  trainer = run(_YAML + _STAGES).run(toys.batches(4))
  assert isinstance(trainer, tpd.ProgressiveDistillationTrainer)
  np.testing.assert_allclose(
      toys.history(trainer, "learning_rate"), [1e-2] * 2 + [1e-3] * 2,
      rtol=1e-6,
  )
  assert toys.history(trainer, "distill/temperature").tolist() == [2.5] * 4


@pytest.mark.parametrize(
    ("text", "words"), [
        (_YAML, ()), (_YAML + _STAGES, ("progressive.enabled=false",)),
        (_YAML + "progressive: {enabled: false}\n", ()),
        (_YAML + "progressive: null\n", ()),
    ],
)
def test_without_it_the_trainer_is_tunix_s(run, text, words):
  """Bit-equal to a pipeline on Tunix's own class."""
  trainer = run(text, *words).run(toys.batches(4))
  assert type(trainer) is distillation_trainer.DistillationTrainer
  path = run(_YAML)  # leaves run.yaml without the section
  del path
  plain = run(_YAML)
  assert isinstance(plain, tunix_config.HyperParameters)
  stock = distillation_trainer.DistillationTrainer(
      toys.Toy(seed=1), toys.Toy(),
      logit.LogitStrategy(
          toys.forward, toys.forward,
          lambda input_tokens, input_mask: toys.one_hot(input_tokens),
      ),
      plain.create_optimizer("optimizer_config"),
      distillation_trainer.TrainingConfig(
          **plain.obtain_training_config_dict("training_config")
      ),
  )
  stock.train(toys.batches(4))
  expected = toys.parameters(stock.model)
  for name, value in toys.parameters(trainer.model).items():
    np.testing.assert_array_equal(value, expected[name])


def test_overrides(run):
  """Trap 18: by list index, by file, and beside Tunix's own words."""
  made = run(
      _YAML + _STAGES, "progressive.stages.1.learning_rate=3e-4",
      "batch_size=8", "progressive.max_grad_norm=2.0",
      override="progressive:\n  temperature: 1.5\noptimizer_config:\n"
      "  opt_type: sgd\n  learning_rate: 0.5\n",
  )
  assert made.config["batch_size"] == 8
  assert made.config["optimizer_config"]["opt_type"] == "sgd"
  plan = made.progressive.plan
  assert [s.learning_rate for s in plan.stages] == [0.01, 3e-4]
  assert (plan.temperature, made.progressive.max_grad_norm) == (1.5, 2.0)
  assert made.training_config().progressive is made.progressive
  assert made.training_config().max_steps == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("progressive.stages.7.name=x",), "progressive.stages.7.name must"),
        (("progressive.stags=1",), "progressive must hold known keys only"),
        (("progressive.enabled=perhaps",), "must be true or false"),
        (("override_config_file=none.yaml",), "must be a YAML file"),
    ],
)
def test_wrong_words(run, words, message):
  with pytest.raises(ValueError) as e:
    run(_YAML + _STAGES, *words)
  assert message in str(e.value) and "\n" not in str(e.value)


def test_missing_file_is_one_line():
  with pytest.raises(ValueError, match="config must be a YAML file"):
    Pipeline(["main", "none.yaml"])
  with pytest.raises(ValueError, match="path to a base config"):
    Pipeline(["main"])
