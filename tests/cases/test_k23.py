"""K23: frozen weights that still move, or still cost."""

from flax import nnx
import jax
import numpy as np
import optax
import pytest

from tests import toys
from tests.cases import common
import tunix_progdistill as tpd

OPTIMIZERS = {
    "factory": lambda lr: optax.adamw(lr, weight_decay=0.1),
    "injected": optax.inject_hyperparams(optax.adamw)(
        learning_rate=1.0, weight_decay=0.1
    ),
    "plain": optax.adamw(0.1, weight_decay=0.1),
}


def frozen_later(kind, unfreeze=False):
  rate = None if kind == "plain" else 0.1
  stage = lambda **kw: tpd.Stage(updates=5, learning_rate=rate, **kw)
  stages = [stage(), stage(frozen=("layers/0",))]
  if unfreeze:
    stages.append(stage())
  return tpd.StagePlan(stages=tuple(stages))


def snapshots(trainer, data):
  """Weights before every update, and after the last."""
  seen = []

  def record(x):
    seen.append(toys.parameters(trainer.model))
    return common.everything(x)

  trainer.with_gen_model_input_fn(record)
  trainer.train(data)
  return [*seen, toys.parameters(trainer.model)]


def moments(trainer, layer="layers/0"):
  """The optimizer's leaves whose path names the layer."""
  state = nnx.as_pure(trainer.optimizer.opt_state)
  return [
      leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
      if layer in "/".join(str(getattr(k, "key", "")) for k in path)
  ]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_k23_1_nothing_moves_after_the_freeze(kind):
  trainer = toys.trainer(
      student=toys.Toy(seed=1, layers=2), teacher=toys.Toy(layers=2),
      optimizer=OPTIMIZERS[kind], progressive=frozen_later(kind),
  )
  weights = snapshots(trainer, toys.batches(10, rows=2))
  assert len(weights) == 11
  for name, value in weights[5].items():
    if name.startswith("layers/0/"):
      assert not np.array_equal(weights[0][name], value), name
      for later in weights[6:]:
        np.testing.assert_array_equal(later[name], value, err_msg=name)
    else:
      assert not np.array_equal(weights[10][name], value), name
  assert moments(trainer) == []  # dropped
  assert len(moments(trainer, "layers/1")) >= 4


@pytest.mark.parametrize("accumulation", [2])
def test_k23_1_frozen_from_the_start(accumulation):
  """Fractions, a tied embedding, clipping and accumulation."""
  trainer = toys.trainer(
      student=toys.Toy(seed=1, layers=4), teacher=toys.Toy(layers=4),
      optimizer=OPTIMIZERS["factory"],
      progressive={
          "stages": common.one_stage(3, 0.1, freeze_fraction=0.5).stages,
          "max_grad_norm": 0.1,
      },
      gradient_accumulation_steps=accumulation,
  )
  before, *_, after = snapshots(trainer, toys.batches(3 * accumulation))
  for name, value in before.items():
    frozen = name.startswith(("layers/0/", "layers/1/", "embed/"))
    assert np.array_equal(after[name], value) == frozen, name


def test_k23_1_unfrozen_again():
  """It starts to move again at once, and from where it stood."""
  trainer = toys.trainer(
      student=toys.Toy(seed=1, layers=2), teacher=toys.Toy(layers=2),
      optimizer=OPTIMIZERS["factory"],
      progressive=frozen_later("factory", unfreeze=True),
  )
  weights = snapshots(trainer, toys.batches(11, rows=2))
  name = "layers/0/linear/kernel"
  np.testing.assert_array_equal(weights[10][name], weights[5][name])
  step = np.abs(weights[11][name] - weights[10][name])
  decay = 0.1 * 0.1 * np.abs(weights[10][name])
  # Adam's first update of a fresh leaf is the rate itself, no multiple of it.
  assert np.all(step > 0.0)
  assert step.max() <= 0.1 + decay.max() + 1e-6


def wide(**stage):
  """Four equal layers, and hardly anything else."""
  trainer = toys.trainer(
      student=toys.Toy(seed=1, layers=4, width=32, vocabulary=8),
      teacher=toys.Toy(layers=4, width=32, vocabulary=8),
      optimizer=optax.adam, progressive=common.one_stage(1, 0.1, **stage),
  )
  trainer.train(toys.batches(1, rows=8, length=32, vocabulary=8))
  return trainer


def test_k23_3_frozen_leaves_cost_nothing():
  everything, one = wide(), wide(trainable=("layers/3",))
  layer_bytes = 4 * (32 * 32 + 32)
  state = nnx.state(one.optimizer, nnx.optimizer.OptState)
  state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
  assert 2.0 * layer_bytes <= state_bytes <= 2.1 * layer_bytes
  cost, full = one.engine.cost(), everything.engine.cost()
  assert cost.optimizer_bytes == state_bytes
  assert cost.trainable_parameters == 32 * 32 + 32
  assert full.trainable_parameters > 4 * cost.trainable_parameters
  assert cost.temp_bytes < 0.8 * full.temp_bytes
  assert cost.flops < 0.8 * full.flops
