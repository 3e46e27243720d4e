"""What freezing saves: exact FLOPs and optimizer bytes of the compiled step."""

import numpy as np
import optax
import pytest

from tests import toys
import tunix_progdistill as tpd
from tunix_progdistill.families import causal_lm

_LAYERS = 8


def _batch(rng):
  return toys.batch(rng.integers(0, 2048, (4, 128)))


@pytest.fixture(scope="module")
def costs():
  """Cost of the step by number of frozen layers, at the documented sizes."""
  big = {
      "num_layers": _LAYERS, "num_embed": 2048, "embed_dim": 256,
      "hidden_dim": 1024, "num_heads": 4, "head_dim": 64,
      "sliding_window_size": 512,
  }
  out = {}
  stages = [
      tpd.Stage(trainable_layers=n, updates=1, learning_rate=1e-4)
      for n in (2, 4, _LAYERS)
  ]
  for stage in stages:
    trainer = tpd.ProgressiveDistillationTrainer(
        toys.gemma3_model(seed=1, **big),
        toys.gemma3_model(seed=0, **big),
        tpd.ProgressiveLogitStrategy(
            causal_lm.forward, causal_lm.forward, causal_lm.next_token_labels
        ),
        optax.adamw,
        toys.config(tpd.StagePlan(stages=(stage,))),
    )
    trainer.train([_batch(np.random.default_rng(0))])
    out[_LAYERS - stage.trainable_layers] = trainer.engine.cost()
  return out


@pytest.mark.parametrize(("frozen", "limit"), [(6, 0.53), (4, 0.69)])
def test_frozen_layers_cost_no_backward_pass(costs, frozen, limit):
  assert costs[frozen].flops / costs[0].flops <= limit
  assert costs[frozen].temp_bytes < costs[0].temp_bytes


@pytest.mark.parametrize("frozen", [0, 4, 6])
def test_optimizer_holds_only_what_trains(costs, frozen):
  cost = costs[frozen]
  assert cost.optimizer_bytes <= 2.1 * 4 * cost.trainable_parameters
  assert cost.optimizer_bytes >= 2 * 4 * cost.trainable_parameters


def test_flops_are_those_of_the_formula(costs):
  """The count is of this order: forward + 2 x (trainable backward)."""
  tokens, width, ffn = 4 * 128, 256, 1024
  layer = 2 * tokens * (
      width * 256 * 2 + 2 * width * 64 + 3 * width * ffn
  )
  head = 2 * tokens * width * 2048
  full = 3 * (_LAYERS * layer + head)
  assert 0.8 < costs[0].flops / full < 1.6


def test_teacher_is_not_part_of_the_step():
  """A deeper teacher leaves the step's cost as it was."""
  flops = []
  for layers in (2, 12):
    trainer = toys.trainer(
        teacher=toys.Toy(layers=layers),
        progressive=toys.plan(updates=(1, 1, 1)),
    )
    trainer.train(toys.batches(1))
    flops.append(trainer.engine.cost().flops)
  assert flops[0] == flops[1]

