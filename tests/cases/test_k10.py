"""K10: a changed scalar compiles the step again, or is never seen."""

import logging

from flax import nnx
import jax
import numpy as np
import optax
import pytest
from tunix.distillation import distillation_trainer

from tests import toys
from tests.cases import common
import tunix_progdistill as tpd


class CountCompiles(logging.Handler):
  """Counts the programs that XLA compiled, by name."""

  def __init__(self):
    super().__init__(logging.WARNING)
    self.names = []

  def emit(self, record):
    message = record.getMessage()
    if message.startswith("Compiling "):
      self.names.append(message.split()[1])

  def __enter__(self):
    self._context = jax.log_compiles()
    self._context.__enter__()
    logging.getLogger("jax").addHandler(self)
    return self

  def __exit__(self, *args):
    logging.getLogger("jax").removeHandler(self)
    self._context.__exit__(*args)


def two_stages(**kwargs):
  return tpd.StagePlan(
      stages=(
          tpd.Stage(freeze_fraction=0.5, updates=10, learning_rate=1e-2),
          tpd.Stage(
              updates=10, learning_rate=optax.linear_schedule(1e-2, 1e-3, 9)
          ),
      ),
      **kwargs,
  )


OPTIMIZERS = {
    "factory": optax.adamw,
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1.0),
}


@pytest.mark.parametrize(
    ("accumulation", "optimizer"),
    [(2, "factory"), pytest.param(1, "injected", marks=pytest.mark.slow)],
)
def test_k10_1_one_compile_per_stage(accumulation, optimizer):
  trainer = toys.trainer(
      student=toys.Toy(seed=1, layers=2), teacher=toys.Toy(layers=2),
      optimizer=OPTIMIZERS[optimizer],
      progressive=two_stages(
          temperature=tpd.anneal(4.0, 1.0, "linear"),
          alpha=tpd.anneal(0.9, 0.5, "cosine"),
      ),
      gradient_accumulation_steps=accumulation, eval_every_n_steps=5,
  )
  # One micro-batch short, so that the last window is filled up.
  data = toys.batches(20 * accumulation - (accumulation - 1), rows=2)
  trainer.record_event("scale_rate", 0.5)
  with CountCompiles() as compiled:
    trainer.train(data, toys.batches(2, rows=2, seed=9))
  assert trainer.train_steps == 20
  assert trainer.engine.compiles == (1, 1)
  # A step for each stage, one for the evaluation, and the teacher's pass.
  ours = [
      n for n in compiled.names
      if any(part in n for part in ("step", "forward", "lambda"))
  ]
  assert len(ours) == 4, compiled.names
  rates = toys.history(trainer, "learning_rate")
  assert len(set(rates.tolist())) == 10
  assert len(set(toys.history(trainer, "distill/temperature").tolist())) == 20


def test_k10_1_stages_differ_only_in_rate():
  trainer = toys.trainer(
      student=toys.Table(common.STUDENT), teacher=toys.Table(common.TEACHER),
      optimizer=optax.sgd,
      progressive=tpd.StagePlan(
          stages=(
              tpd.Stage(updates=10, learning_rate=0.1),
              tpd.Stage(updates=10, learning_rate=0.01),
          )
      ),
      strategy_fn=common.strategy,
  )
  trainer.train([common.batch([[0, 1]])] * 20)
  assert max(trainer.engine.compiles) == 1


def test_k10_1_resumed_run_compiles_once(tmp_path):
  def train(max_steps):
    trainer = toys.trainer(
        student=toys.Table(common.STUDENT),
        teacher=toys.Table(common.TEACHER), optimizer=optax.adamw,
        progressive=common.one_stage(6, 0.1), strategy_fn=common.strategy,
        max_steps=max_steps, checkpoint_root_directory=str(tmp_path),
    )
    trainer.train([common.batch([[0, 1]])] * 6)
    return trainer.engine.compiles

  assert train(3) == (1,)
  assert train(None) == (1,)


def test_k10_1_two_devices_compile_once_per_stage():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("fsdp",))
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  models = [toys.Toy(seed=s, layers=2) for s in (1, 0)]
  for model in models:
    nnx.update(model, jax.device_put(nnx.state(model), everywhere))
  with mesh:
    trainer = toys.trainer(
        student=models[0], teacher=models[1],
        progressive=tpd.StagePlan(
            stages=(
                tpd.Stage(freeze_fraction=0.5, updates=2, learning_rate=0.1),
                tpd.Stage(updates=2, learning_rate=0.1),
            )
        ),
        gradient_accumulation_steps=2,
    )
    trainer.train(toys.batches(8, rows=2))
  assert trainer.train_steps == 4
  assert trainer.engine.compiles == (1, 1)


def test_k10_1_strategy_in_a_stock_trainer():
  """A schedule moves without a new program in Tunix's own trainer too."""
  trainer = distillation_trainer.DistillationTrainer(
      toys.Table(common.STUDENT), toys.Table(common.TEACHER),
      common.strategy(temperature=tpd.anneal(4.0, 1.0, "linear", updates=6)),
      optax.sgd(0.1),
      distillation_trainer.TrainingConfig(
          eval_every_n_steps=1000, max_steps=6
      ),
  )
  step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)
  trainer.train([common.as_training_input(common.batch([[0, 1]]))] * 6)
  assert len(set(toys.history(trainer, "loss").tolist())) == 6
  assert step.func.jitted_fn._cache_size() == 1
