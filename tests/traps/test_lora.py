"""A student whose adapters train, layer by layer."""

import warnings

from flax import nnx
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix

from tests import toys
import tunix_progdistill as tpd
from tunix_progdistill import freezing


def _student(seed=1):
  provider = qwix.LoraProvider(module_path=".*linear.*", rank=2, alpha=4.0)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    return qwix.apply_lora_to_model(
        toys.Toy(seed=seed), provider, jnp.zeros((1, 6), jnp.int32),
        rngs=nnx.Rngs(seed),
    )


def _trainer(**kwargs):
  return toys.trainer(student=_student(), **kwargs)


def test_only_adapters_of_unfrozen_layers_train():
  """Trap 17: an adapter is a parameter, and Tunix trains adapters alone."""
  trainer = _trainer(
      optimizer=lambda lr: optax.adamw(lr, weight_decay=0.5),
      progressive=toys.plan(updates=(2, 2, 2)),
  )
  snapshots = []

  def data():
    for batch in toys.batches(6):
      snapshots.append(toys.parameters(trainer.model))
      yield batch

  trainer.train(data())
  snapshots.append(toys.parameters(trainer.model))
  for stage, first in enumerate((4, 2, 0)):
    before, after = snapshots[2 * stage], snapshots[2 * stage + 2]
    moved = {p for p in before if np.any(before[p] != after[p])}
    assert moved == {
        f"layers/{layer}/linear/kernel_lora_{which}"
        for layer in range(first, 5) for which in "ab"
    }


def test_optimizer_holds_adapters_only():
  """Trap 17: the filter is both the trainer's and ours."""
  trainer = _trainer()
  leaves = nnx.to_flat_state(
      nnx.state(trainer.optimizer, nnx.optimizer.OptState)
  )
  arrays = [v.get_value() for _, v in leaves if v.get_value().ndim]
  # Two moments of the two adapters of layer 4, of rank 2 and width 8.
  assert sum(x.size for x in arrays) == 2 * (8 * 2 + 2 * 8)
  assert trainer.engine.trainable_parameters(0) == 32
  assert trainer.engine.trainable_parameters(2) == 5 * 32


def test_paths_of_list_items():
  """Trap 17: the items of an nnx.List have ints in their paths."""
  model = toys.Toy()
  parameters = nnx.to_flat_state(nnx.state(model, nnx.Param))
  path = next(p for p, _ in parameters if "layers" in p)
  assert 0 in path
  assert "0" not in path
  assert "layers/0/linear/kernel" in freezing.parameter_sizes(model)
  last = freezing.trainable_paths(model, tpd.Stage(trainable=("layers/4",)))
  assert last == {"layers/4/linear/bias", "layers/4/linear/kernel"}
  adapters = freezing.trainable_paths(
      _student(), tpd.Stage(trainable=("layers/4",)), nnx.LoRAParam
  )
  assert adapters == {
      "layers/4/linear/kernel_lora_a", "layers/4/linear/kernel_lora_b"
  }


def test_rule_that_names_no_adapter_is_refused():
  """Trap 17: a rule for base weights would train nothing of a LoRA student."""
  with pytest.raises(ValueError, match=r"stages\[0\]: trainable must match"):
    _trainer(
        progressive=tpd.StagePlan(
            stages=(
                tpd.Stage(trainable=("embed",), updates=1, learning_rate=0.1),
            )
        )
    )


def test_adapters_resume(tmp_path):
  """Trap 17: Tunix saves adapters alone; they come back, stage and all."""
  trainer = _trainer(checkpoint_root_directory=str(tmp_path))
  trainer.train(toys.batches(4))
  again = _trainer(checkpoint_root_directory=str(tmp_path))
  assert again.train_steps == 4
  assert again.engine.stage == 1
  after = toys.parameters(again.model)
  for path, value in toys.parameters(trainer.model).items():
    np.testing.assert_array_equal(after[path], value, err_msg=path)
