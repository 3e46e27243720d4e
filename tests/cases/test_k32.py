"""K32: with recomputation on, adapters get no gradient."""

from flax import nnx
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from tunix.models.gemma3 import model as gemma3

from tests import toys
from tests.cases import common
from tunix_progdistill.families import causal_lm

LAYERS, FROZEN = 2, 1
MODULES = ".*q_einsum|.*kv_einsum|.*down_proj"
BATCH = toys.batches(1, rows=2, length=5, vocabulary=32)[0]
REMAT = gemma3.RematConfig


def adapted(remat):
  """A Gemma 3 with LoRA whose A is the same at every call."""
  model = toys.gemma3_model(
      seed=1, num_layers=LAYERS, num_embed=32, remat_config=remat
  )
  student = qwix.apply_lora_to_model(
      model, qwix.LoraProvider(module_path=MODULES, rank=2, alpha=4.0),
      **model.get_model_input(),
  )
  rng = np.random.default_rng(3)
  for path, variable in sorted(
      nnx.to_flat_state(nnx.state(student, nnx.LoRAParam)),
      key=lambda item: str(item[0]),
  ):
    if str(path[-1]).endswith("lora_a"):
      value = 0.3 * rng.normal(size=variable.get_value().shape)
      nnx.update(
          student,
          nnx.from_flat_state([
              (path, variable.replace(jnp.asarray(value, jnp.float32)))
          ]),
      )
  return student


def strategy():
  return common.strategy(
      labels_fn=causal_lm.next_token_labels, forward=causal_lm.forward,
      temperature=2.0, alpha=0.5,
  )


def teacher():
  return toys.gemma3_model(seed=0, num_layers=LAYERS, num_embed=32)


def train(remat):
  """(weights before each update and at the end, gradient norms)."""
  student = adapted(remat)
  seen = []

  def record(x):
    seen.append(toys.parameters(student))
    return common.everything(x)

  trainer = toys.trainer(
      student=student, teacher=teacher(), optimizer=optax.sgd,
      progressive=common.one_stage(3, 0.5, freeze_fraction=FROZEN / LAYERS),
      strategy_fn=strategy,
  )
  trainer.with_gen_model_input_fn(record)
  trainer.train([BATCH] * 3)
  return [*seen, toys.parameters(student)], toys.history(trainer, "grad_norm")


def layer(name):
  return int(name.split("/")[1])


def check_moves(weights):
  first, last = weights[0], weights[-1]
  b_leaves = [n for n in first if n.endswith("lora_b")]
  assert len(b_leaves) == 3 * LAYERS
  for name, value in first.items():
    trains = "lora" in name and layer(name) >= FROZEN
    if name.endswith("lora_b"):
      assert np.all(value == 0.0), name
      assert np.any(last[name] != 0.0) == trains, name
    assert np.array_equal(last[name], value) != trains, name


@pytest.mark.slow
def test_k32_1_adapters_move_with_and_without_recomputation():
  plain, norms = train(REMAT.NONE)
  check_moves(plain)
  assert np.all(norms > 1e-4)
  for remat in (REMAT.BLOCK, REMAT.DECODER):
    weights, remat_norms = train(remat)
    check_moves(weights)
    np.testing.assert_allclose(remat_norms, norms, rtol=1e-4)
    # At a rate of 0.5 the first step is half the gradient.
    for name, value in weights[1].items():
      np.testing.assert_allclose(
          value, plain[1][name], atol=5e-6, err_msg=f"{remat} {name}"
      )
