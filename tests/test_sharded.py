"""Eight simulated devices train as one does."""

from flax import nnx
import jax
import numpy as np
import optax
import pytest

from tests import toys
import tunix_progdistill as tpd
from tunix_progdistill.families import causal_lm


def _spread(model, mesh):
  """Moves a model onto the mesh, by the partition specs of its parameters."""
  state = nnx.state(model)
  specs = nnx.get_partition_spec(state)
  put = jax.tree.map(
      lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)),
      state, specs,
  )
  nnx.update(model, put)
  return model


def _run(mesh, optimizer, accumulation=None):
  student = toys.gemma3_model(seed=1, num_layers=2)
  teacher = toys.gemma3_model(seed=0, num_layers=2)
  if mesh is not None:
    student, teacher = _spread(student, mesh), _spread(teacher, mesh)
  trainer = tpd.ProgressiveDistillationTrainer(
      student, teacher,
      tpd.ProgressiveLogitStrategy(
          causal_lm.forward, causal_lm.forward, causal_lm.next_token_labels
      ),
      optimizer,
      toys.config(
          toys.plan(temperature=tpd.anneal(3.0, 1.0, "linear")),
          gradient_accumulation_steps=accumulation,
      ),
  )
  batches = toys.batches(
      6 * (accumulation or 1), rows=8, vocabulary=64, ragged=True
  )
  trainer.train(batches, batches[:2])
  return trainer


@pytest.mark.parametrize(
    ("shape", "accumulation"),
    [
        ((4, 2), 2),
        pytest.param((8, 1), None, marks=pytest.mark.slow),
        pytest.param((4, 2), None, marks=pytest.mark.slow),
        pytest.param((8, 1), 2, marks=pytest.mark.slow),
    ],
)
def test_mesh_equals_one_device(shape, accumulation):
  single = _run(None, optax.sgd, accumulation)
  mesh = jax.make_mesh(
      shape, ("fsdp", "tp"),
      axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )
  with mesh:
    spread = _run(mesh, optax.sgd, accumulation)
  assert spread.engine.compiles == (1, 1, 1)
  for name in ("loss", "distill/kl_div", "grad_norm"):
    np.testing.assert_allclose(
        toys.history(spread, name), toys.history(single, name), rtol=2e-4
    )
  np.testing.assert_allclose(
      toys.history(spread, "distill/kl_div_tau1", "eval"),
      toys.history(single, "distill/kl_div_tau1", "eval"), rtol=2e-4,
  )
  expected = toys.parameters(single.model)
  for name, value in toys.parameters(spread.model).items():
    np.testing.assert_allclose(value, expected[name], atol=2e-6, err_msg=name)
  sharding = spread.model.layers[1].mlp.gate_proj.kernel.get_value().sharding
  assert len(sharding.device_set) == 8


def test_adam_compiles_once_per_stage_on_a_mesh():
  """Scalars of the optimizer's state do not move from one device to all."""
  mesh = jax.make_mesh(
      (8, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  with mesh:
    trainer = _run(mesh, optax.adamw)
  assert trainer.engine.compiles == (1, 1, 1)
