"""Frozen leaves stand still and cost nothing; new leaves start gently."""

import itertools

from flax import nnx
import jax
import numpy as np
import optax
import pytest

from tests import toys
import tunix_progdistill as tpd
from tunix_progdistill import freezing

_DECAY = 0.3


def _snapshots(trainer, batches):
  """Trains, and returns the weights before and after every update."""
  out = []

  def data():
    for batch in batches:
      out.append(toys.parameters(trainer.model))
      yield batch

  trainer.train(data())
  return [*out, toys.parameters(trainer.model)]


def _moments(trainer):
  """How many entries the optimizer's state has, counters left out."""
  state = nnx.state(trainer.optimizer, nnx.optimizer.OptState)
  return sum(x.size for x in jax.tree.leaves(state) if x.ndim)


def _paths(trainer):
  return [
      freezing.trainable_paths(trainer.model, s.stage)
      for s in trainer.engine.plan.stages
  ]


def _adamw(rate):
  return optax.adamw(rate, weight_decay=_DECAY)


@pytest.fixture(scope="module")
def run():
  """(trainer, snapshots, moments by update) of AdamW with decay and a clip."""
  trainer = toys.trainer(
      optimizer=_adamw,
      progressive=tpd.ProgressiveConfig(
          plan=toys.plan(updates=(2, 2, 2)), max_grad_norm=0.05
      ),
  )
  moments = []

  def data():
    for batch in toys.batches(6):
      yield batch
      moments.append(_moments(trainer))

  return trainer, _snapshots(trainer, data()), moments


def test_frozen_leaves_are_bit_identical(run):
  """Trap 7: AdamW moves weights whose gradient is zero."""
  trainer, snapshots, _ = run
  paths = _paths(trainer)
  assert [len(p) for p in paths] == [4, 8, 13]
  for update in range(6):
    trains = paths[trainer.engine.plan.stage_at(update)]
    for path, before in snapshots[update].items():
      after = snapshots[update + 1][path]
      if path in trains:
        assert np.any(after != before), (update, path)
      else:
        np.testing.assert_array_equal(after, before, err_msg=f"{update} {path}")


def test_frozen_leaves_have_no_optimizer_state(run):
  """Trap 7: masked updates keep the moments of what they mask."""
  trainer, snapshots, moments = run
  sizes = [
      sum(snapshots[0][path].size for path in paths)
      for paths in _paths(trainer)
  ]
  assert sizes[0] < sizes[1] < sizes[2]
  assert moments == [2 * sizes[trainer.engine.plan.stage_at(u)]
                     for u in range(6)]


def test_frozen_layers_cost_no_flops():
  """Trap 7: the gradients of frozen leaves must not be computed at all."""
  flops = []
  for trainable in (1, 8):
    trainer = toys.trainer(
        student=toys.Toy(seed=1, width=64, layers=8, tied=False),
        teacher=toys.Toy(width=64, layers=1),
        progressive=tpd.StagePlan(
            stages=(
                tpd.Stage(trainable_layers=trainable, updates=1),
            ),
            learning_rate=1e-3,
        ),
    )
    trainer.train(toys.batches(1, rows=16, length=32))
    flops.append(trainer.engine.cost().flops)
  # 8 forward + 1 backward layers against 8 + 8 (a backward one counts twice),
  # and the frozen ones' optimizer arithmetic: about 10 / 24.
  assert flops[0] / flops[1] < 0.55


def _step_norms(snapshots):
  return [
      np.sqrt(sum(
          np.sum(np.square(np.float64(after[p]) - before[p])) for p in before
      ))
      for before, after in itertools.pairwise(snapshots)
  ]


def test_clip_is_one_over_all_groups():
  """Trap 7: a clip inside partitioned groups clips each by itself."""
  trainer = toys.trainer(
      optimizer=optax.sgd,
      progressive=tpd.ProgressiveConfig(
          plan=toys.plan(updates=(1, 1, 1), rate=1.0), max_grad_norm=1e-3
      ),
  )
  snapshots = _snapshots(trainer, toys.batches(3))
  assert np.all(toys.history(trainer, "grad_norm") > 1e-3)  # the clip acts
  assert _step_norms(snapshots) == pytest.approx(
      [1e-3, 0.5e-3, 0.1e-3], rel=2e-3
  )


def test_logged_norm_is_that_of_the_trainable_gradient():
  """Trap 7: Tunix's norm counts leaves that do not train."""
  trainer = toys.trainer(
      optimizer=optax.sgd, progressive=toys.plan(updates=(1, 1, 1), rate=1.0)
  )
  snapshots = _snapshots(trainer, toys.batches(3))
  np.testing.assert_allclose(
      toys.history(trainer, "grad_norm") * [1.0, 0.5, 0.1],
      _step_norms(snapshots), rtol=1e-3,
  )


@pytest.mark.parametrize(
    "factory",
    [
        lambda lr: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(lr)),
        lambda lr: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr)),
        lambda lr: optax.chain(
            optax.clip_by_global_norm(0.1), optax.scale_by_adam(),
            optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(lr),
        ),
    ],
    ids=["sgd", "adamw", "chain"],
)
def test_clip_inside_a_factory_is_refused(factory):
  """Trap 7: over several stages it would silently become a clip per group.

  Adam hides it from one look: its first update does not depend on the scale of
  the gradient.
  """
  with pytest.raises(ValueError, match="max_grad_norm") as e:
    toys.trainer(optimizer=factory)
  assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "factory",
    [
        optax.adamw, optax.adafactor, optax.lion, optax.lamb, optax.sgd,
        lambda lr: optax.chain(optax.clip(1.0), optax.adamw(lr)),
    ],
    ids=["adamw", "adafactor", "lion", "lamb", "sgd", "clip-by-value"],
)
def test_what_treats_each_leaf_by_itself_is_accepted(factory):
  """Trap 7: the refusal must not hit optimizers that are fit."""
  assert toys.trainer(optimizer=factory).engine.stage == 0


def test_clip_inside_a_factory_works_in_one_stage():
  """Trap 7: with one group there is nothing to go wrong."""
  trainer = toys.trainer(
      optimizer=lambda lr: optax.chain(
          optax.clip_by_global_norm(1e-3), optax.sgd(lr)
      ),
      progressive=tpd.StagePlan(
          stages=(tpd.Stage(updates=1),), learning_rate=1.0
      ),
  )
  norms = _step_norms(_snapshots(trainer, toys.batches(1)))
  assert norms == pytest.approx([1e-3], rel=2e-3)


@pytest.mark.parametrize(
    ("factory", "plain"),
    [
        (optax.inject_hyperparams(optax.adamw), optax.adamw),
        (
            lambda lr: optax.inject_hyperparams(optax.sgd)(learning_rate=lr),
            optax.sgd,
        ),
    ],
    ids=["adamw", "sgd"],
)
def test_factory_that_injects_trains_at_the_plans_rate(factory, plain):
  """Trap 7 and 27: a rate kept in the state must not stay what it began as."""
  trainer = toys.trainer(
      optimizer=factory, progressive=toys.plan(updates=(1, 1, 1))
  )
  snapshots = _snapshots(trainer, toys.batches(3))
  expected = _snapshots(
      toys.trainer(
          optimizer=plain, progressive=toys.plan(updates=(1, 1, 1))
      ),
      toys.batches(3),
  )
  for path, value in expected[-1].items():
    assert np.any(value != expected[0][path]), path
    np.testing.assert_allclose(
        snapshots[-1][path], value, rtol=1e-5, atol=1e-6, err_msg=path
    )


def test_fresh_leaves_start_gently(run):
  """Trap 11: an inherited count makes first updates 2.5-4.6 times too large."""
  trainer, snapshots, _ = run
  paths = _paths(trainer)
  rates = (1e-2, 5e-3, 1e-3)
  for stage, update in enumerate((0, 2, 4)):
    fresh = paths[stage] - (paths[stage - 1] if stage else frozenset())
    assert fresh
    largest = 0.0
    for path in fresh:
      before = np.float64(snapshots[update][path])
      step = np.abs(snapshots[update + 1][path] - before)
      limit = rates[stage] * (1 + _DECAY * np.abs(before)) * 1.001
      assert np.all(step <= limit + 1e-9), (stage, path)
      largest = max(largest, np.max(step) / rates[stage])
    assert largest > 0.9, stage  # Adam's first step is nearly the rate


def test_leaves_that_go_on_keep_their_moments():
  """Trap 11: what trained before a switch goes on as if there were none."""
  one = tpd.Stage(trainable_layers=1, updates=4, learning_rate=1e-2)
  two = [
      tpd.Stage(trainable_layers=1, updates=2, learning_rate=1e-2)
      for _ in range(2)
  ]
  after = []
  for stages in ((one,), tuple(two)):
    trainer = toys.trainer(
        optimizer=_adamw, progressive=tpd.StagePlan(stages=stages)
    )
    trainer.train(toys.batches(4))
    after.append(toys.parameters(trainer.model))
  for path, value in after[0].items():
    np.testing.assert_array_equal(after[1][path], value, err_msg=path)
