"""The training config, what it costs to construct, and who else starts."""

import copy
import dataclasses
import subprocess
import sys
import types

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tunix.distillation import distillation_trainer
from tunix.sft import metrics_logger
from tunix.sft import peft_trainer

from tests import toys
import tunix_progdistill as tpd
from tunix_progdistill.engine import engine as engine_lib

# -- TrainingConfig


def _tunix_values():
  """One value for every field of Tunix's config."""
  known = {
      "eval_every_n_steps": 3, "max_steps": 5,
      "gradient_accumulation_steps": 2,
      "data_sharding_axis": ("batch",), "max_inflight_computations": 4,
      "metrics_prefix": "student", "pbar_description": "Distilling",
  }
  fields = dataclasses.fields(distillation_trainer.TrainingConfig)
  names = [f.name for f in fields]
  assert set(known) <= set(names)
  return {name: known.get(name) for name in names}


def test_config_takes_every_field_of_tunix():
  """Trap 25: slots and a dataclass of theirs, in either version."""
  values = _tunix_values()
  config = tpd.TrainingConfig(**values, progressive=toys.plan())
  for name, value in values.items():
    assert getattr(config, name) == value, name
  assert isinstance(config, distillation_trainer.TrainingConfig)
  assert isinstance(config, peft_trainer.TrainingConfig)
  assert config.get_with_default("max_steps", 9) == 5
  assert config.get_with_default("checkpointing_options", 9) == 9
  assert not hasattr(config, "__dict__")
  with pytest.raises(AttributeError):
    config.no_such_field = 1


def test_config_is_copied_and_replaced():
  """Trap 25: replace and copy keep the progressive section."""
  config = tpd.TrainingConfig(**_tunix_values(), progressive=toys.plan())
  other = dataclasses.replace(config, max_steps=11)
  assert (config.max_steps, other.max_steps) == (5, 11)
  assert other.progressive == config.progressive
  assert copy.copy(config) == config
  config.max_steps = 7  # not frozen, as Tunix's is not
  assert config.max_steps == 7
  assert isinstance(config.progressive, tpd.ProgressiveConfig)


@pytest.mark.parametrize(
    "section",
    [
        lambda plan: plan,
        lambda plan: tpd.ProgressiveConfig(plan=plan),
        lambda plan: {"stages": plan.stages},
        lambda plan: {"stages": [
            {"freeze_fraction": s.freeze_fraction, "updates": s.updates,
             "learning_rate": s.learning_rate} for s in plan.stages
        ]},
    ],
    ids=["plan", "section", "mapping", "nested"],
)
def test_config_reads_every_form(section):
  """Trap 25: the section is understood in __post_init__."""
  plan = toys.plan()
  config = tpd.TrainingConfig(eval_every_n_steps=1, progressive=section(plan))
  assert config.progressive.plan == plan


def test_constructing_leaves_the_users_config_alone():
  """Trap 25: the plan's length is set on a copy."""
  config = toys.config(toys.plan())
  trainer = tpd.ProgressiveDistillationTrainer(
      toys.Toy(seed=1), toys.Toy(), toys.strategy(), optax.adamw, config
  )
  assert config.max_steps is None
  assert trainer.config.max_steps == 6


def test_tunix_config_trains_everything_in_one_stage():
  """Trap 25: a stock config has no `progressive` and takes none."""
  trainer = tpd.ProgressiveDistillationTrainer(
      toys.Toy(seed=1, layers=2), toys.Toy(layers=1), toys.strategy(),
      optax.adamw(1e-3),
      distillation_trainer.TrainingConfig(eval_every_n_steps=1, max_steps=2),
  )
  before = toys.parameters(trainer.model)
  trainer.train(toys.batches(3))
  assert trainer.train_steps == 2
  after = toys.parameters(trainer.model)
  assert all(np.any(after[p] != before[p]) for p in before)


# -- memory of the constructor


@pytest.mark.parametrize("accumulation", [None, 1, 4])
def test_tunix_is_handed_no_optimizer_memory(monkeypatch, accumulation):
  """Trap 25: Tunix builds an optimizer over everything before we can.

  Accumulation counts as well: it is a copy of the model's size.
  """
  student = toys.Toy(seed=1)
  built = []
  real = nnx.Optimizer.__init__

  def record(self, model, tx, *args, **kwargs):
    real(self, model, tx, *args, **kwargs)
    built.append(self)

  if hasattr(peft_trainer, "GradientAccumulator"):
    real_accumulator = peft_trainer.GradientAccumulator.__init__

    def record_accumulator(self, *args, **kwargs):
      real_accumulator(self, *args, **kwargs)
      built.append(self)

    monkeypatch.setattr(
        peft_trainer.GradientAccumulator, "__init__", record_accumulator
    )
  monkeypatch.setattr(nnx.Optimizer, "__init__", record)
  trainer = toys.trainer(
      student=student, gradient_accumulation_steps=accumulation
  )
  ours = trainer.optimizer
  sizes = [
      sum(x.nbytes for x in jax.tree.leaves(nnx.state(node)))
      for node in built if node is not ours
  ]
  assert len(built) >= 2  # theirs and ours
  assert max(sizes) <= 64, "bytes of state that Tunix built for nothing"


def test_optimizer_starts_with_the_first_stage():
  """Trap 25: two moments of what the first stage trains, and no more."""
  trainer = toys.trainer()
  state = nnx.state(trainer.optimizer, nnx.optimizer.OptState)
  size = sum(x.size for x in jax.tree.leaves(state) if x.ndim)
  assert size == 2 * trainer.engine.trainable_parameters(0) == 2 * 88


# -- cost


def test_cost_says_that_loops_are_counted_once():
  """Trap 23: XLA counts a loop's body once, so the docs must warn."""
  assert "loop's body once" in engine_lib.StageCost.__doc__
  width, trips = 64, 10
  w = jnp.ones((width, width))

  def looped(x):
    return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=trips)[0]

  x = jnp.ones((width, width))
  flops = jax.jit(looped).lower(x).compile().cost_analysis()["flops"]
  # The day that XLA multiplies by the trips, the sentence must go.
  assert flops < 2 * (2 * width**3)


def test_our_step_has_no_loop():
  """Trap 23: so that the step's own count is whole, layer for layer."""
  width, tokens = 64, 16 * 32
  flops = []
  for layers in (2, 4):
    trainer = toys.trainer(
        student=toys.Toy(seed=1, width=width, layers=layers),
        teacher=toys.Toy(width=width, layers=1), optimizer=optax.sgd,
        progressive=tpd.StagePlan(
            stages=(tpd.Stage(updates=1),), learning_rate=1e-3
        ),
    )
    trainer.train(toys.batches(1, rows=16, length=32))
    flops.append(trainer.engine.cost().flops)
  matmuls = 3 * 2 * (2 * tokens * width**2)  # of the two more layers
  assert matmuls <= flops[1] - flops[0] <= 1.25 * matmuls


# -- Weights & Biases, listeners


class _Wandb(types.ModuleType):
  """Stands for an installed wandb that nobody asked for."""

  def __getattr__(self, name):
    if name.startswith("__"):
      raise AttributeError(name)
    raise AssertionError(f"wandb.{name} was used")


def test_wandb_is_not_started(monkeypatch):
  """Trap 24: where it is importable, W&B starts by itself."""
  monkeypatch.setitem(sys.modules, "wandb", _Wandb("wandb"))
  trainer = toys.trainer(progressive=toys.plan(updates=(1, 1, 1)))
  trainer.train(toys.batches(3))
  assert trainer.train_steps == 3


def test_wandb_is_not_imported():
  """Trap 24: importing the package starts and imports nothing of it."""
  code = (
      "import sys, tunix_progdistill\n"
      "assert 'wandb' not in sys.modules\n"
      "import jax._src.monitoring as m\n"
      "assert not m._scalar_listeners\n"
  )
  done = subprocess.run(
      [sys.executable, "-c", code], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr[-500:]


def test_logging_does_not_lean_on_listeners(tmp_path):
  """Trap 24: another trainer's close() clears every listener of jax's.

  Our records must still be in the history of a run that goes on.
  """
  other = metrics_logger.MetricsLogger(None)
  trainer = toys.trainer(progressive=toys.plan(updates=(1, 1, 1)))

  def data():
    for i, batch in enumerate(toys.batches(3)):
      if i == 1:
        other.close()
      yield batch

  trainer.train(data())
  assert len(toys.history(trainer, "distill/kl_div")) == 3
