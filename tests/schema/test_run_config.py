"""What a run config says of models, rates, lengths and files."""

import dataclasses
import inspect

from absl.testing import absltest
import optax
import pytest

from tests.schema import yamls
from tunix_progdistill import schema
from tunix_progdistill import weights
from tunix_progdistill.engine import optimizer as engine_optimizer
from tunix_progdistill.schema import optimizer as optimizer_lib
from tunix_progdistill.schema import run_config
from tunix_progdistill.schema import tree
from tunix_progdistill.weights import loaded

_NO_RATE = "progressive.stages.0.learning_rate=null"


def _schedule(kind, *more):
  return [
      _NO_RATE, f"optimizer_config.schedule_type={kind}",
      *[f"optimizer_config.{m}" for m in more],
  ]


def test_tunix_own_yaml_is_accepted(resolve):
  with absltest.TestCase().assertLogs("absl", "INFO") as logs:
    config = resolve(yamls.TUNIX + yamls.ADDED)
  assert config.model_config.model_id == "Qwen/Qwen2.5-0.5B"
  assert config.teacher().model_id == "Qwen/Qwen2.5-7B"
  assert config.teacher().mesh == config.model_config.mesh
  assert config.tokenizer_config.add_eos is True
  assert config.data().batch_size == 8
  assert config.training_config.checkpointing_options.timeout_secs == 1200
  assert config.optimizer_config.arguments["b2"] == 0.99
  assert config.source.not_read == (
      "actor_model_config", "reference_model_config", "num_test_batches",
      "train_fraction", "rl_training_config", "grpo_config", "rollout_config",
      "rollout_engine", "vllm_config", "offload_to_cpu", "reward_functions",
      "model_config.mesh.allocation_policy",
      "teacher_model_config.mesh.allocation_policy",
  )
  assert config.unused() == ["optimizer_config.value"]
  assert [r.getMessage().split(": ")[0] for r in logs.records] == [
      "Not read by distillation", "Given, but not used by what was chosen"
  ]
  assert config.updates() == 20


def test_other_sections_of_tunix_may_be_set_by_word(resolve):
  config = resolve(yamls.SMALL, "rl_training_config.mini_batch_size=4")
  assert config.source.not_read == ("rl_training_config",)
  assert config == resolve(yamls.SMALL)


def test_no_key_is_both_ours_and_not_read():
  assert not tree.NOT_READ & {k.name for k in tree.root().keys}


def test_a_teacher_that_is_left_out_is_the_whole_model(resolve):
  config = resolve(yamls.SMALL)
  assert config.teacher() == dataclasses.replace(
      config.model_config, layers=None
  )


def test_a_teacher_inherits_all_but_layers(resolve):
  config = resolve(
      yamls.SMALL, "model_config.dtype=bfloat16", "model_config.rng_seed=7",
      "teacher_model_config={model_path: models/large, rng_seed: 8}",
  )
  teacher = config.teacher()
  assert teacher.model_path == "models/large"
  assert teacher.dtype == "bfloat16"
  assert teacher.rng_seed == 8
  assert teacher.layers is None
  assert config.model_config.layers == (0, 2, 5)


def test_tokenizer_of_the_models_or_of_a_path(resolve, tmp_path):
  assert resolve(yamls.SMALL).tokenizer_folder() is None
  word = "tokenizer_config.tokenizer_path"
  assert resolve(yamls.SMALL, f"{word}=models/small").tokenizer_folder() is None
  folder = tmp_path / "pieces"
  folder.mkdir()
  found = resolve(yamls.SMALL, f"{word}=pieces").tokenizer_folder()
  assert found.resolve() == folder
  with pytest.raises(ValueError, match=r"^tokenizer_config\.tokenizer_path"):
    resolve(yamls.SMALL, f"{word}=nowhere").tokenizer_folder()


def test_the_run_directory_is_named_after_the_yaml(resolve):
  assert resolve(yamls.SMALL).run_directory == "runs/run"
  assert resolve(yamls.SMALL, "run_directory=a/b").run_directory == "a/b"
  config = resolve(yamls.SMALL, "run_directory=")
  assert config.run_directory == "runs/run"
  assert config.checkpoint_directory() == "runs/run/checkpoints"
  word = "training_config.checkpoint_root_directory=/tmp/kept"
  assert resolve(yamls.SMALL, word).checkpoint_directory() == "/tmp/kept"


def test_the_command_can_be_pasted(resolve):
  config = resolve(yamls.SMALL, "model_config.layers=[0, 1]", "prompts=[a's]")
  assert config.command() == (
      "tunix-progdistill train run.yaml 'model_config.layers=[0, 1]' "
      "'prompts=[a'\"'\"'s]'"
  )


class TestRates:
  """Stages, plan, schedule, optimizer_config: which one sets the rate."""

  def _at(self, config, *updates):
    training = config.training(updates_per_epoch=10, available=100)
    plan = training.progressive.plan.resolve(max_steps=training.max_steps)
    return [plan.scalars(u).learning_rate for u in updates]

  def test_a_stage_without_one_takes_the_optimizers(self, resolve):
    assert self._at(resolve(yamls.SMALL), 0, 5) == [1e-4, 1e-3]

  def test_the_plan_goes_before_the_optimizer(self, resolve):
    config = resolve(yamls.SMALL, "progressive.learning_rate=7e-4")
    assert self._at(config, 0, 5) == [1e-4, 7e-4]

  def test_a_schedule_counts_updates_of_the_run(self, resolve):
    config = resolve(yamls.SMALL, *_schedule(
        "linear_schedule", "init_value=1.0", "end_value=0.0",
        "transition_steps=10",
    ))
    assert self._at(config, 0, 5, 9) == pytest.approx([1.0, 0.5, 0.1])
    assert config.unused() == ["optimizer_config.learning_rate"]

  def test_its_length_is_that_of_the_run(self, resolve):
    config = resolve(yamls.SMALL, *_schedule(
        "warmup_cosine_decay_schedule", "init_value=0.0", "peak_value=1.0",
        "warmup_ratio=0.2",
    ))
    assert self._at(config, 0, 1, 2) == pytest.approx([0.0, 0.5, 1.0])
    assert self._at(config, 6) == pytest.approx([0.5])

  def test_steps_go_before_the_ratio(self, resolve):
    config = resolve(yamls.SMALL, *_schedule(
        "warmup_constant_schedule", "init_value=0.0", "peak_value=1.0",
        "warmup_ratio=0.2", "warmup_steps=4",
    ))
    assert self._at(config, 2) == pytest.approx([0.5])
    assert "optimizer_config.warmup_ratio" in config.unused()

  def test_an_open_plan_gets_its_length_from_the_data(self, resolve):
    config = resolve(
        "model_config: {layers: [0]}\nprogressive: {stages: [{}]}\n",
        *_schedule("cosine_decay_schedule", "init_value=1.0"),
    )
    assert config.updates() is None
    training = config.training(updates_per_epoch=10, available=40)
    assert training.max_steps == 40
    assert self._at(config, 50) == pytest.approx([0.5])

  def test_all_rates_given_leave_the_optimizers_unused(self, resolve):
    config = resolve(yamls.SMALL, "progressive.stages.1.learning_rate=1e-5")
    assert config.unused() == ["optimizer_config.learning_rate"]
    assert config.training().progressive.plan == config.progressive.plan


class TestTraining:
  """What Tunix's `TrainingConfig` gets."""

  def test_fields_and_options_are_passed_on(self, resolve):
    training = resolve(
        yamls.FULL, "training_config.checkpointing_options.keep_period=6",
        "training_config.checkpointing_options.save_interval_steps=4",
        "training_config.checkpointing_options.timeout_secs=99",
    ).training()
    assert training.max_steps == 50
    assert training.eval_every_n_steps == 100
    options = training.checkpointing_options
    assert (options.max_to_keep, options.keep_period) == (2, 6)
    assert options.save_interval_steps == 4
    assert options.save_decision_policy is None
    assert options.async_options.timeout_secs == 99
    assert training.profiler_options.log_dir == "profile"
    assert training.metrics_logging_options is None
    assert training.checkpoint_root_directory == "runs/run/checkpoints"

  def test_checkpoints_are_timed_where_no_interval_is_given(self, resolve):
    options = resolve(yamls.FULL).training().checkpointing_options
    assert options.save_decision_policy.minimum_interval_secs == 180
    assert resolve(yamls.SMALL).training().checkpointing_options is None

  @pytest.mark.parametrize("section", ["optimizer_config", "progressive"])
  def test_the_clip_stands_in_either_section(self, resolve, section):
    config = resolve(yamls.SMALL, f"{section}.max_grad_norm=0.5")
    assert config.training().progressive.max_grad_norm == 0.5

  def test_epochs_are_counted_by_the_data_or_by_the_plan(self, resolve):
    words = ["progressive.stages=[{epochs: 2, learning_rate: 1}, {updates: 3}]",
             "num_train_epochs=9"]
    config = resolve(yamls.SMALL, *words)
    assert config.updates() is None
    assert config.updates(updates_per_epoch=10, available=90) == 23
    assert config.updates(updates_per_epoch=10, available=15) == 15
    config = resolve(yamls.SMALL, *words, "progressive.updates_per_epoch=4")
    assert config.updates(updates_per_epoch=10) == 11
    assert config.training(updates_per_epoch=10).progressive == (
        dataclasses.replace(
            config.progressive, updates_per_epoch=4,
            plan=dataclasses.replace(
                config.progressive.plan, learning_rate=1e-3
            ),
        )
    )

  def test_progressive_off_is_one_stage_of_everything(self, resolve):
    config = resolve(
        yamls.SMALL, "progressive.enabled=false",
        "training_config.max_steps=7",
    )
    section = config.training().progressive
    assert section.enabled and config.updates() == 7
    (stage,) = section.plan.stages
    assert stage.selector == {} and stage.updates is None
    assert section.plan.alpha == config.progressive.plan.alpha

  def test_max_steps_lets_the_data_be_shorter_than_the_plan(self, resolve):
    config = resolve(
        yamls.SMALL, "progressive.stages.0={updates: null, epochs: 5}",
        "training_config.max_steps=3",
    )
    assert config.updates(updates_per_epoch=10) == 3


class TestOptimizer:
  """Optimizers and schedules by name."""

  def test_arguments_reach_it(self, resolve):
    config = resolve(
        yamls.SMALL, "optimizer_config.opt_type=SGD",
        "optimizer_config.momentum=0.5", "optimizer_config.b1=0.1",
    )
    assert config.unused() == ["optimizer_config.b1"]
    made = config.optimizer()(0.1)
    state = made.init({"w": 0.0})
    first, state = made.update({"w": 1.0}, state)
    second, _ = made.update({"w": 1.0}, state)
    assert float(first["w"]) == pytest.approx(-0.1)
    assert float(second["w"]) == pytest.approx(-0.15)

  @pytest.mark.parametrize("name", sorted(optimizer_lib.optimizers()))
  def test_the_engine_takes_every_one(self, name):
    factory = schema.OptimizerConfig(opt_type=name).factory()
    spec = engine_optimizer.understand(factory, stages_with_rate=[True, True])
    assert spec.kind == engine_optimizer.FACTORY

  @pytest.mark.parametrize("name", sorted(optimizer_lib.schedules()))
  def test_every_schedule_can_be_made(self, name):
    make = optimizer_lib.schedules()[name]
    values = {
        "decay_steps": 10, "warmup_steps": 2, "transition_steps": 10,
        "interpolate_type": "linear", "decay_rate": 0.5, "power": 1.0,
        "cosine_kwargs": [{
            "init_value": 0.0, "peak_value": 1.0, "warmup_steps": 1,
            "decay_steps": 5,
        }],
    }
    needed = {
        n: values.get(n, 0.25) for n, p in
        inspect.signature(make).parameters.items() if p.default is p.empty
    }
    config = schema.OptimizerConfig(schedule_type=name, arguments=needed)
    assert 0 <= float(config.schedule(None)(3)) <= 1

  def test_only_what_stands_in_optax_and_in_a_yaml_is_offered(self):
    assert {"adamw", "sgd", "lion"} <= set(optimizer_lib.optimizers())
    for name in ("lbfgs", "rprop", "scale_by_learning_rate"):
      assert hasattr(optax, name)
      assert name not in optimizer_lib.optimizers()
    names = {k.name for k in optimizer_lib.section_keys()}
    assert {"b1", "weight_decay", "peak_value", "warmup_steps"} <= names
    assert not names & {"mask", "weight_decay_mask", "key", "schedules"}


class TestCheck:
  """What is known from files, before a model loads."""

  @pytest.fixture
  def world(self, monkeypatch):
    """Weights and data as they would be found; returns the descriptions."""
    found = {
        "models/small": loaded.Description(
            family="llama3", vocab_size=49152, num_layers=6, bos_id=1
        ),
        "models/other": loaded.Description(
            family="llama3", vocab_size=49152, num_layers=9, bos_id=1
        ),
        "models/gemma": loaded.Description(
            family="gemma3", vocab_size=262144, num_layers=9, bos_id=2
        ),
        "hub": loaded.Description(),
    }
    calls = []
    for module, name, fake in (
        (weights, "check", lambda c, field: calls.append((field, c))),
        (weights, "describe", lambda c, field: found[c.model_path]),
        (run_config.data, "check", lambda c: calls.append(("data", c))),
    ):
      monkeypatch.setattr(module, name, fake, raising=False)
    return found, calls

  def test_asks_weights_and_data(self, resolve, world):
    config = resolve(yamls.SMALL)
    config.check()
    assert world[1] == [
        ("model_config", config.model_config), ("data", config.data())
    ]
    world[1].clear()
    config = resolve(
        yamls.SMALL, "teacher_model_config.model_path=models/other"
    )
    config.check()
    assert [f for f, _ in world[1]] == [
        "model_config", "teacher_model_config", "data"
    ]

  @pytest.mark.parametrize(
      ("words", "expected"),
      [
          (["teacher_model_config.model_path=models/gemma"],
           "vocabulary size of model_config and teacher_model_config must be "
           "the same, got (49152, 262144); take two models of one family, or "
           "leave teacher_model_config out and set model_config.layers"),
          (["teacher_model_config.model_path=models/other",
            "teacher_model_config.vocabulary_size=512"],
           "vocabulary_size of model_config and teacher_model_config must be "
           "the same, got ('all', 512); give both the same, or leave it out of "
           "teacher_model_config"),
          (["model_config.layers=[0, 6]"],
           "model_config.layers must lie in 0 to 5, got [0, 6]; the model has "
           "6 layers"),
      ],
  )
  def test_refuses(self, resolve, world, words, expected):
    with pytest.raises(ValueError, match="must") as caught:
      resolve(yamls.SMALL, *words).check()
    assert str(caught.value) == expected

  @pytest.mark.parametrize("field", ["bos_id", "rope_theta"])
  def test_refuses_what_differs_in(self, resolve, world, field):
    found, _ = world
    for name, value in (("models/small", 1), ("models/other", 2)):
      found[name] = dataclasses.replace(found[name], **{field: value})
    config = resolve(
        yamls.SMALL, "teacher_model_config.model_path=models/other"
    )
    with pytest.raises(ValueError, match=rf"^{field} of .* got \(1, 2\)"):
      config.check()

  def test_lets_pass_what_only_a_download_tells(self, resolve, world):
    resolve(
        yamls.SMALL, "teacher_model_config.model_path=hub",
        "model_config.layers=[99]", "model_config.model_path=hub",
        "teacher_model_config.model_id=other",
    ).check()

  def test_wandb_must_be_installed(self, resolve, world, monkeypatch):
    monkeypatch.setattr(
        run_config.importlib.util, "find_spec", lambda name: None
    )
    resolve(yamls.SMALL).check()
    with pytest.raises(ValueError, match=r"'wandb'; pip install wandb"):
      resolve(yamls.SMALL, "logging=[jsonl, wandb]").check()
