"""The engine's own promises, beside those that the traps and cases pin."""

import jax
import numpy as np
import optax
import pytest

from tests import toys
import tunix_progdistill as tpd
from tunix_progdistill.engine import engine as engine_lib


@pytest.mark.parametrize(
    "accumulation", [pytest.param(None, marks=pytest.mark.slow), 2]
)
def test_failed_first_step_loses_nothing(monkeypatch, accumulation):
  """Donated buffers may be gone when a step fails: weights come back."""
  trainer = toys.trainer(
      student=toys.Toy(seed=1, dropout=0.1),
      gradient_accumulation_steps=accumulation,
  )
  before = toys.parameters(trainer.model)
  compile_step = engine_lib.Engine._compile

  def failing(self, blueprint, args):
    compile_step(self, blueprint, args)

    def run(state, *_):
      for leaf in jax.tree.leaves(state):
        leaf.delete()
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    return run

  monkeypatch.setattr(engine_lib.Engine, "_compile", failing)
  # As on an accelerator: beside the host's memory there is nothing to save in.
  monkeypatch.setattr(engine_lib, "_has_own_memory", lambda: True)
  batches = toys.batches(6 * (accumulation or 1))
  with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
    trainer.train(batches)
  for name, value in toys.parameters(trainer.model).items():
    np.testing.assert_array_equal(value, before[name])
  monkeypatch.undo()
  trainer.train(batches)
  other = toys.trainer(
      student=toys.Toy(seed=1, dropout=0.1),
      gradient_accumulation_steps=accumulation,
  )
  other.train(batches)
  for name, value in toys.parameters(trainer.model).items():
    np.testing.assert_array_equal(value, toys.parameters(other.model)[name])


def test_a_step_that_cannot_have_its_memory_takes_nothing():
  """On a CPU it is told before the buffers are donated."""

  class Compiled:

    def memory_analysis(self):
      return type("Memory", (), {"temp_size_in_bytes": 2**60})

  with pytest.raises(MemoryError, match=r"must find 1152921504\.6 GB"):
    engine_lib._check_room(Compiled())


def test_only_the_current_stages_programs_are_kept():
  trainer = toys.trainer(progressive=toys.plan(updates=(2, 2, 2)))
  trainer.train(toys.batches(6))
  assert len(trainer.engine._steps) == 1
  assert trainer.engine.compiles == (1, 1, 1)


def test_a_smaller_last_batch_compiles_once_more():
  """One program per stage and shape; the loss stays one over its tokens."""
  plan = tpd.StagePlan(stages=(tpd.Stage(updates=3, learning_rate=0.1),))
  trainer = toys.trainer(progressive=plan, optimizer=optax.sgd)
  small = toys.batches(1, rows=2, seed=5)
  trainer.train([*toys.batches(2), *small])
  assert trainer.engine.compiles == (2,)
  assert toys.history(trainer, "distill/valid_tokens").tolist() == [20, 20, 10]


def test_bfloat16_student_keeps_its_types():
  student = toys.gemma3_model(seed=1, num_layers=2)
  jax_bf16 = jax.numpy.bfloat16
  from flax import nnx

  nnx.update(
      student,
      jax.tree.map(lambda x: x.astype(jax_bf16), nnx.state(student, nnx.Param)),
  )
  lm = tpd.causal_lm
  trainer = tpd.ProgressiveDistillationTrainer(
      student, toys.gemma3_model(seed=0, num_layers=2),
      tpd.ProgressiveLogitStrategy(
          lm.forward, lm.forward, lm.next_token_labels
      ),
      optax.adamw,
      toys.config(toys.plan(updates=(2, 2, 2))),
  )
  trainer.train(toys.batches(6, vocabulary=64))
  assert trainer.engine.compiles == (1, 1, 1)
  leaves = jax.tree.leaves(nnx.state(trainer.model, nnx.Param))
  assert {x.dtype for x in leaves} == {np.dtype(jax_bf16)}
  assert np.isfinite(toys.history(trainer, "loss")).all()
