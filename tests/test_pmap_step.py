"""A step under pmap is the step of one device with all rows."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import toys
import tunix_progdistill as tpd
from tunix_progdistill import freezing
from tunix_progdistill import modules
from tunix_progdistill.engine import pmap_step
from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import reference

_EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "pmap_step.py"
_SGD = lambda rate: optax.sgd(rate, momentum=0.9)
# (temperature, alpha, rate) of three updates
_SCALARS = ((3.0, 0.9, 0.5), (2.0, 0.5, 0.25), (1.0, 0.0, 0.125))


def _models():
  forward = lambda model, tokens: model(tokens)
  model = toys.Toy(seed=1)
  student_fn, student = pmap_step.pure(model, forward)
  teacher_fn, teacher = pmap_step.pure(toys.Toy(seed=0), forward)
  trainable = freezing.trainable_paths(model, tpd.Stage(freeze_fraction=0.8))
  assert 0 < len(trainable) < len(freezing.parameter_sizes(model))
  return student_fn, student, teacher_fn, teacher, trainable


def _batches(rows):
  """Rows with 0, 1, 2, ... valid tokens: the devices' counts differ."""
  rng = np.random.default_rng(0)
  for _ in _SCALARS:
    tokens = rng.integers(0, toys.VOCABULARY, (rows, 7))
    weights = np.arange(6) < (np.arange(rows) % 7)[:, None]
    yield tokens[:, :-1], tokens[:, 1:], weights


def _one_device(rows):
  """Three updates by `reference`, autodiff and optax, without pmap."""
  student_fn, student, teacher_fn, teacher, trainable = _models()
  trained = {k: v for k, v in student.items() if k in trainable}

  @jax.jit
  def step(trained, state, tokens, labels, where, tau, alpha, rate):

    def mean(trained):
      logits = student_fn(student | trained, tokens)
      kl = reference.forward_kl(
          logits, teacher_fn(teacher, tokens), temperature=tau, where=where
      )
      ce = reference.cross_entropy(logits, labels, where=where)
      loss = alpha * tau**2 * kl + (1 - alpha) * ce
      return reduce.masked_sum(loss, where) / reduce.count(where)

    loss, grads = jax.value_and_grad(mean)(trained)
    updates, state = _SGD(rate).update(grads, state, trained)
    return optax.apply_updates(trained, updates), state, loss

  state, losses = _SGD(0.0).init(trained), []
  for batch, scalars in zip(_batches(rows), _SCALARS, strict=True):
    trained, state, loss = step(trained, state, *batch, *scalars)
    losses.append(loss)
  return trained, losses


def run(rows, devices, optimizer=_SGD):
  student_fn, student, teacher_fn, teacher, trainable = _models()
  traces = []

  def counted(values, inputs):
    traces.append(None)
    return student_fn(values, inputs)

  step = pmap_step.make_pmap_step(
      counted, teacher_fn, optimizer, trainable=trainable, devices=devices
  )
  state, losses = step.init(student), []
  constant = step.replicate(teacher)
  for batch, (tau, alpha, rate) in zip(_batches(rows), _SCALARS, strict=True):
    state, means = step(
        state, constant, *batch, temperature=tau, alpha=alpha,
        learning_rate=rate,
    )
    losses.append(means["loss"])
    assert float(means["count"]) == batch[2].sum()
    if len(losses) == 1:
      compiled = len(traces)
  assert len(traces) == compiled  # other scalars, the same program
  return state, losses


def _bits(x):
  return np.asarray(modules.raw_keys(x)).view(np.uint32)


@pytest.mark.parametrize("rows, number", [(8, 8), (5, 8), (5, 2)])
def test_equals_one_device(rows, number):
  state, losses = run(rows, jax.devices()[:number])
  expected, others = _one_device(rows)
  np.testing.assert_allclose(losses, others, rtol=1e-6)
  _, student, *_ = _models()
  assert set(state.trainable) == set(expected)
  for name, value in state.values().items():
    if name not in expected:
      continue
    largest = np.abs(expected[name]).max()
    np.testing.assert_allclose(
        value, expected[name], rtol=0, atol=1e-6 * largest, err_msg=name
    )
    # What was learned is far more than what is forgiven.
    moved = np.abs(expected[name] - student[name]).max()
    assert moved > 1e-3 * largest


def test_devices_stay_equal_and_frozen_leaves_as_they_were():
  state, _ = run(5, jax.devices(), optax.adamw)
  _, student, _, _, trainable = _models()
  assert set(state.frozen) == set(student) - trainable
  for name, copies in state.frozen.items():
    assert copies.shape[0] == 8
    for copy in _bits(copies):
      np.testing.assert_array_equal(copy, _bits(student[name]), err_msg=name)
  moving = jax.tree.leaves((state.trainable, state.optimizer))
  for leaf in moving:
    first, *others = _bits(leaf)
    for other in others:
      np.testing.assert_array_equal(other, first)
  # Adam: a count, and two moments of each trainable leaf. No others.
  assert len(jax.tree.leaves(state.optimizer)) == 1 + 2 * len(trainable)


def test_a_batch_without_tokens_changes_nothing():
  student_fn, student, teacher_fn, teacher, trainable = _models()
  step = pmap_step.make_pmap_step(
      student_fn, teacher_fn, optax.adamw, trainable=trainable
  )
  state = step.init(student)
  before = jax.tree.map(np.array, modules.raw_keys(state))
  tokens, labels, weights = next(_batches(5))
  state, means = step(
      state, step.replicate(teacher), tokens, labels, weights & False,
      temperature=1.0, alpha=0.5, learning_rate=1.0,
  )
  assert float(means["loss"]) == 0 and float(means["count"]) == 0
  after = modules.raw_keys(state)
  jax.tree.map(np.testing.assert_array_equal, after, before)


def test_trainable_must_be_leaves():
  student_fn, student, teacher_fn, *_ = _models()
  for paths in (frozenset(), frozenset({"nowhere/kernel"})):
    step = pmap_step.make_pmap_step(
        student_fn, teacher_fn, optax.adamw, trainable=paths
    )
    with pytest.raises(ValueError, match=r"^trainable must"):
      step.init(student)


def test_pure_is_the_module():
  model = toys.Toy(seed=3)
  function, values = pmap_step.pure(model, lambda m, x: m(x))
  tokens = jnp.arange(6).reshape(2, 3)
  np.testing.assert_array_equal(function(values, tokens), model(tokens))


@pytest.mark.slow
def test_example():
  done = subprocess.run(
      [sys.executable, str(_EXAMPLE)], capture_output=True, text=True,
      env=os.environ | {"XLA_FLAGS": ""}, timeout=300, check=False,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("same on all devices: True") == 2
