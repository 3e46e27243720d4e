"""Windows of micro-batches: token-weighted, whole, and proof against NaN."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tunix.sft import hooks as tunix_hooks

from tests import toys
import tunix_progdistill as tpd
from tunix_progdistill.families import causal_lm


class Data(tunix_hooks.DataHooks):
  """Batches that come through hooks."""

  def __init__(self, batches):
    self.batches = list(batches)
    self.calls = 0

  def load_next_train_batch(self, train_ctx):
    self.calls += 1
    return self.batches.pop(0) if self.batches else None

  def load_next_eval_batch(self, train_ctx):
    return None


def _forward(model, input_tokens, input_mask, scale):
  del input_mask
  return model(input_tokens) * scale[:, None, None]


def _strategy():
  return tpd.ProgressiveLogitStrategy(
      _forward, _forward,
      lambda input_tokens, input_mask, scale: causal_lm.next_token_labels(
          input_tokens, input_mask
      ),
  )


def _scaled(batch, scale=1.0):
  return {
      "input_tokens": batch.input_tokens, "input_mask": batch.input_mask,
      "scale": np.full(len(batch.input_tokens), scale, np.float32),
  }


def _joined(batches):
  return {
      name: np.concatenate([b[name] for b in batches]) for name in batches[0]
  }


def _run(batches, accumulation, *, through_hooks=False, rate=0.1, dropout=0.0):
  trainer = toys.trainer(
      student=toys.Toy(seed=1, layers=2, dropout=dropout),
      teacher=toys.Toy(layers=2),
      optimizer=lambda lr: optax.adamw(lr, weight_decay=0.1),
      strategy_fn=_strategy,
      progressive=tpd.StagePlan(
          stages=(tpd.Stage(updates=10),), learning_rate=rate
      ),
      gradient_accumulation_steps=accumulation,
  )
  trainer.with_gen_model_input_fn(
      lambda x: {
          name: x[name] for name in ("input_tokens", "input_mask", "scale")
      }
  )
  if through_hooks:
    trainer.with_data_hooks(Data(batches))
    batches = ()
  trainer.train(batches)
  return trainer, toys.parameters(trainer.model)


def _assert_close(found, expected, rtol=1e-5):
  for path, value in expected.items():
    np.testing.assert_allclose(
        found[path], value, rtol=rtol, atol=1e-6, err_msg=path
    )


_RAGGED = [_scaled(b) for b in toys.batches(5, ragged=True, rows=2)]


@pytest.mark.parametrize("through_hooks", [False, True])
def test_window_is_one_large_batch(through_hooks):
  """Trap 6: Tunix takes a mean of means, and drops the trailing window."""
  found, after = _run(_RAGGED, 2, through_hooks=through_hooks)
  windows = [_joined(_RAGGED[:2]), _joined(_RAGGED[2:4]), _RAGGED[4]]
  expected, expected_after = _run(windows, None)
  assert found.train_steps == expected.train_steps == 3
  _assert_close(after, expected_after)
  for name in ("loss", "distill/kl_div", "distill/valid_tokens", "grad_norm"):
    np.testing.assert_allclose(
        toys.history(found, name), toys.history(expected, name), rtol=1e-5,
        err_msg=name,
    )


def test_optimizer_counts_updates():
  """Trap 6: Tunix's optimizer counts micro-batches."""
  trainer, _ = _run(_RAGGED[:4], 2)
  assert int(trainer.optimizer.step[...]) == 2
  assert trainer.iter_steps == 4


@pytest.mark.parametrize("through_hooks", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_micro_batch_leaves_no_trace(bad, through_hooks):
  """Trap 6: one NaN in optax.MultiSteps stays for ever."""
  poison = _scaled(toys.batches(1, rows=2, seed=9)[0], bad)
  data = [_RAGGED[0], poison, poison, _RAGGED[1], _RAGGED[2], _RAGGED[3]]
  found, after = _run(data, 2, through_hooks=through_hooks)
  _, expected = _run(
      [_RAGGED[0], _RAGGED[1], _joined(_RAGGED[2:4])], None
  )
  _assert_close(after, expected)
  np.testing.assert_array_equal(
      toys.history(found, "distill/skipped_micro_batches"), [1, 1, 0]
  )
  assert np.all(np.isfinite(toys.history(found, "loss")))
  assert np.all(np.isfinite(toys.history(found, "grad_norm")))


@pytest.mark.parametrize("accumulation", [None, 2])
def test_window_of_nothing_but_bad_micro_batches(accumulation):
  """Trap 6: no update, no decay, and the loss says that it is lost."""
  poison = _scaled(toys.batches(1, rows=2, seed=9)[0], np.nan)
  each = accumulation or 1
  found, after = _run(
      [poison] * each + _RAGGED[:each], accumulation, dropout=0.5
  )
  _, expected = _run(_RAGGED[:each], accumulation, dropout=0.5)
  _assert_close(after, expected)
  losses = toys.history(found, "loss")
  assert np.isnan(losses[0])
  assert np.isfinite(losses[1])
  np.testing.assert_array_equal(
      toys.history(found, "distill/skipped_micro_batches"), [each, 0]
  )


def test_trailing_window_is_not_counted_as_skipped():
  """Trap 6: what fills up the last window is neither batch nor failure."""
  trainer, _ = _run(_RAGGED[:3], 2)
  np.testing.assert_array_equal(
      toys.history(trainer, "distill/skipped_micro_batches"), [0, 0]
  )
  np.testing.assert_array_equal(
      toys.history(trainer, "distill/valid_tokens"),
      [
          sum(np.sum(b["input_mask"][:, 1:]) for b in window)
          for window in (_RAGGED[:2], _RAGGED[2:3])
      ],
  )


def test_bad_teacher_in_padding_is_not_a_bad_batch():
  """Trap 6 and 3: NaN where nothing counts must not cost the micro-batch."""
  tokens = [[0, 0], [1, 1]]
  trainer = toys.trainer(
      student=toys.Table([toys.F1_STUDENT, toys.F1_STUDENT]),
      teacher=toys.Table([toys.F1_TEACHER, [np.nan] * 3]),
      optimizer=optax.sgd,
      strategy_fn=lambda: toys.strategy(labels_fn=toys.identity_labels),
      progressive=tpd.StagePlan(
          stages=(tpd.Stage(updates=2),), learning_rate=0.1, temperature=1.0
      ),
  )
  trainer.train([toys.batch(tokens, [[1, 1], [0, 0]]), toys.batch(tokens)])
  np.testing.assert_array_equal(
      toys.history(trainer, "distill/skipped_micro_batches"), [0, 1]
  )
  kl = toys.history(trainer, "distill/kl_div")
  assert kl[0] == pytest.approx(toys.F1_KL, rel=1e-5)
  assert np.isnan(kl[1])  # where it counts, the whole micro-batch is lost


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.MultiSteps(optax.adamw(1e-3), 2),
        optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(),
        lambda lr: optax.MultiSteps(
            optax.adamw(lr), 2
        ).gradient_transformation(),
    ],
    ids=["object", "transformation", "factory"],
)
def test_a_second_accumulation_is_refused(optimizer):
  """Trap 6: windows of windows would update every fourth micro-batch."""
  with pytest.raises(ValueError, match="must not accumulate") as e:
    toys.trainer(optimizer=optimizer, gradient_accumulation_steps=2)
  assert "\n" not in str(e.value)


def test_sums_are_float32_for_bfloat16_weights():
  """Trap 6: a window's gradients are summed with their digits kept."""
  student = toys.Toy(seed=1, layers=2)
  for block in student.layers:
    kernel = block.linear.kernel
    kernel.set_value(kernel.get_value().astype(jnp.bfloat16))
  trainer = toys.trainer(
      student=student, teacher=toys.Toy(layers=2), optimizer=optax.sgd,
      progressive=tpd.StagePlan(
          stages=(tpd.Stage(updates=2),), learning_rate=0.5
      ),
      gradient_accumulation_steps=4,
  )
  trainer.train(toys.batches(8))
  assert student.layers[0].linear.kernel.get_value().dtype == jnp.bfloat16
  assert trainer.engine.compiles == (1,)
