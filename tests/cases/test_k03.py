"""K03: a shard or a micro-batch without a valid token gives 0/0."""

import jax
import numpy as np
import optax
import pytest

from tests import toys
from tests.cases import common

# 8 rows over 4 devices: rows 2 and 3 are the second device's, all masked.
RNG = np.random.default_rng(3)
TOKENS = RNG.integers(0, 8, (8, 5))
MASK = np.ones((8, 5), np.int32)
MASK[2:4] = 0
MASK[5, 3:] = 0
ROWS = RNG.normal(size=(2, 8, 16)).astype(np.float32)
VALID = 8 * 5 - 2 * 5 - 2


def expected_loss(alpha=1.0):
  picked = TOKENS[MASK != 0]
  soft = common.kl(ROWS[1], ROWS[0])[picked].mean()
  hard = -np.log(common.softmax(ROWS[0]))[picked, 0].mean()
  return alpha * soft + (1 - alpha) * hard


@pytest.mark.parametrize("path", common.PATHS)
def test_k03_1_masked_rows_on_one_device(path):
  loss, grad = common.PATHS[path](
      {"alpha": 0.5}, ROWS[0], ROWS[1], common.batch(TOKENS, MASK)
  )
  assert loss == pytest.approx(expected_loss(0.5), abs=1e-5)
  assert np.all(np.isfinite(grad))


@pytest.mark.parametrize("path", common.PATHS)
def test_k03_1_nothing_valid_at_all(path):
  loss, grad = common.PATHS[path](
      {"alpha": 0.5}, ROWS[0], ROWS[1], common.batch(TOKENS, MASK * 0)
  )
  assert loss == 0.0
  assert np.all(grad == 0.0)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_k03_1_empty_window_moves_nothing(accumulation):
  """Not even by weight decay, momentum or the bias correction's count."""
  student = toys.Table(ROWS[0])
  trainer = toys.trainer(
      student=student, teacher=toys.Table(ROWS[1]),
      optimizer=lambda lr: optax.adamw(lr, weight_decay=0.5),
      progressive=common.one_stage(3, 0.1), strategy_fn=common.strategy,
      gradient_accumulation_steps=accumulation,
  )
  full = common.batch(TOKENS, MASK)
  empty = common.batch(TOKENS, MASK * 0)
  seen = []

  def record(x):
    seen.append(toys.parameters(student)["rows"])
    return common.everything(x)

  trainer.with_gen_model_input_fn(record)
  trainer.train(
      [full] * accumulation + [empty] * accumulation + [full] * accumulation
  )
  first, second = seen[accumulation], seen[2 * accumulation]
  assert not np.array_equal(first, ROWS[0])
  np.testing.assert_array_equal(second, first)
  assert toys.history(trainer, "distill/valid_tokens").tolist() == [
      VALID * accumulation, 0, VALID * accumulation
  ]
  assert np.all(np.isfinite(toys.history(trainer, "loss")))


def distribute(model, mesh, placing):
  """Puts the table nowhere, everywhere, or in parts on the devices."""
  if placing == "unplaced":
    return model
  spec = jax.sharding.PartitionSpec(
      *(("fsdp",) if placing == "sharded" else ())
  )
  model.rows.set_value(
      jax.device_put(
          model.rows.get_value(), jax.sharding.NamedSharding(mesh, spec)
      )
  )
  return model


def run(tokens, mask, *, mesh=None, placing="unplaced", accumulation=1):
  """Two updates; (losses, grad norms, weights, evaluated KL, compiles)."""
  student, teacher = toys.Table(ROWS[0]), toys.Table(ROWS[1])
  if mesh is not None:
    distribute(student, mesh, placing)
    distribute(teacher, mesh, placing)
  trainer = toys.trainer(
      student=student, teacher=teacher, optimizer=optax.adam,
      progressive=common.one_stage(2, 0.1),
      strategy_fn=lambda: common.strategy(alpha=0.5),
      gradient_accumulation_steps=accumulation,
  )
  inputs = common.as_training_input(common.batch(tokens, mask))
  trainer.train([inputs] * 2 * accumulation, [inputs])
  return {
      "loss": toys.history(trainer, "loss"),
      "grad_norm": toys.history(trainer, "grad_norm"),
      "rows": toys.parameters(student)["rows"],
      "eval": toys.history(trainer, "distill/kl_div_tau1", "eval"),
  }, trainer.engine.compiles


@pytest.mark.parametrize(
    ("placing", "accumulation"),
    [
        pytest.param("unplaced", 1, marks=pytest.mark.slow),
        ("replicated", 2), ("sharded", 1),
    ],
)
def test_k03_1_four_devices_equal_one(placing, accumulation):
  one, _ = run(TOKENS, MASK, accumulation=accumulation)
  assert one["loss"][0] == pytest.approx(expected_loss(0.5), abs=1e-5)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("fsdp",))
  with mesh:
    four, compiles = run(
        TOKENS, MASK, mesh=mesh, placing=placing, accumulation=accumulation
    )
  for name, value in one.items():
    np.testing.assert_allclose(four[name], value, atol=2e-6, err_msg=name)
  assert compiles == (1,)


def test_k03_1_rows_that_do_not_divide_by_the_devices():
  """6 rows on 4 devices: another layout, the same numbers."""
  one, _ = run(TOKENS[:6], MASK[:6])
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("fsdp",))
  with mesh:
    four, _ = run(TOKENS[:6], MASK[:6], mesh=mesh, placing="replicated")
  for name, value in one.items():
    np.testing.assert_allclose(four[name], value, atol=2e-6, err_msg=name)
