"""Evaluation against the teacher, weighted by tokens."""

from flax import nnx
import numpy as np
import optax
import pytest
from tunix.sft import hooks as tunix_hooks

from tests import toys
import tunix_progdistill as tpd


class Hooks(tunix_hooks.TrainingHooks):
  """Records what evaluation reports."""

  def __init__(self):
    self.losses = []
    self.steps = 0

  def on_train_start(self, train_ctx):
    pass

  def on_train_end(self, train_ctx):
    pass

  def on_train_step_start(self, train_ctx):
    pass

  def on_train_step_end(self, train_ctx, train_step, train_loss):
    pass

  def on_eval_step_start(self, train_ctx):
    self.steps += 1

  def on_eval_step_end(self, train_ctx, eval_loss):
    self.losses.append(float(eval_loss))


# One token of pair F1, six of the pair with its roles swapped.
_EVAL = [
    toys.batch(np.zeros((2, 3)), [[0, 1, 0], [0, 0, 0]]),
    toys.batch(np.ones((2, 3))),
]


def _trainer(rate=0.0, **kwargs):
  return toys.trainer(
      student=toys.Table([toys.F1_STUDENT, toys.F1_TEACHER]),
      teacher=toys.Table([toys.F1_TEACHER, toys.F1_STUDENT]),
      optimizer=optax.sgd,
      strategy_fn=lambda: toys.strategy(labels_fn=toys.identity_labels),
      progressive=tpd.StagePlan(
          stages=(tpd.Stage(updates=3),), learning_rate=rate
      ),
      **kwargs,
  )


def _ce(logits):
  return -logits[0] + np.log(np.sum(np.exp(logits)))


def test_held_out_kl_is_token_weighted():
  """Trap 5: Tunix's evaluation knows no teacher and averages batches."""
  trainer = _trainer()
  trainer.train([_EVAL[0]] * 3, _EVAL)
  get = lambda name: toys.history(trainer, name, "eval")[0]
  student = (_ce(toys.F1_STUDENT) + 6 * _ce(toys.F1_TEACHER)) / 7
  teacher = (_ce(toys.F1_TEACHER) + 6 * _ce(toys.F1_STUDENT)) / 7
  assert get("distill/kl_div_tau1") == pytest.approx(
      (toys.F1_KL + 6 * toys.F2_KL) / 7, rel=1e-5
  )
  assert get("loss") == pytest.approx(student, rel=1e-5)
  assert get("perplexity") == pytest.approx(np.exp(student), rel=1e-5)
  assert get("distill/student_perplexity") == pytest.approx(
      np.exp(student), rel=1e-5
  )
  assert get("distill/teacher_perplexity") == pytest.approx(
      np.exp(teacher), rel=1e-5
  )
  r = np.corrcoef(toys.F1_STUDENT, toys.F1_TEACHER)[0, 1]
  assert get("distill/correlation") == pytest.approx(r, abs=1e-5)
  assert get("distill/correlation_top32") == pytest.approx(r, abs=1e-5)
  assert get("distill/top1_agreement") == 0.0
  assert get("distill/valid_tokens") == 7


def test_split_of_the_evaluation_data_does_not_matter():
  """Trap 5: one batch of all rows, or one batch a row, is the same."""
  rows = toys.batches(1, rows=4, ragged=True, seed=3)[0]
  single = [
      toys.batch(rows.input_tokens[i : i + 1], rows.input_mask[i : i + 1])
      for i in range(4)
  ]
  results = []
  for data in ([rows], single):
    trainer = toys.trainer(progressive=toys.plan(updates=(1, 1, 1)))
    trainer.train(toys.batches(1), data)
    results.append({
        name: toys.history(trainer, name, "eval")
        for name in ("loss", "distill/kl_div_tau1", "distill/valid_tokens")
    })
  for name, value in results[0].items():
    np.testing.assert_allclose(results[1][name], value, rtol=1e-5)


def test_hook_gets_the_mean():
  """Trap 5: Tunix hands the sum of the batches' losses to the hook."""
  trainer = _trainer(rate=0.5, eval_every_n_steps=1)
  hooks = Hooks()
  trainer.with_training_hooks(hooks)
  trainer.train([_EVAL[1]] * 3, _EVAL)
  logged = toys.history(trainer, "loss", "eval")
  assert len(hooks.losses) == 4  # before the first update, and after each
  assert hooks.steps == 8
  np.testing.assert_allclose(hooks.losses, logged, rtol=1e-5)
  assert hooks.losses[0] == pytest.approx(
      (_ce(toys.F1_STUDENT) + 6 * _ce(toys.F1_TEACHER)) / 7, rel=1e-5
  )
  assert len(set(hooks.losses)) == 4  # the weights moved in between


def test_teacher_runs_in_evaluation():
  """Trap 5: the held-out KL needs the teacher's logits of the same batch."""
  calls = []

  def teacher_forward(model, input_tokens, input_mask):
    del input_mask
    calls.append(input_tokens.shape)
    return model(input_tokens)

  def make():
    return tpd.ProgressiveLogitStrategy(
        toys.forward, teacher_forward, toys.identity_labels
    )

  trainer = toys.trainer(
      strategy_fn=make, progressive=toys.plan(updates=(1, 1, 1))
  )
  trainer.train(toys.batches(1), toys.batches(1, rows=2))
  assert set(calls) == {(2, 6), (4, 6)}


def test_evaluation_uses_neither_dropout():
  """Trap 5: two evaluations of the same weights agree, mode untouched."""
  student, teacher = toys.Toy(seed=1, dropout=0.5), toys.Toy(dropout=0.5)
  trainer = toys.trainer(
      student=student, teacher=teacher, optimizer=optax.sgd,
      progressive=tpd.StagePlan(
          stages=(tpd.Stage(updates=2),), learning_rate=0.0
      ),
      eval_every_n_steps=1,
  )
  trainer.train(toys.batches(2), toys.batches(2, seed=5))
  kl = toys.history(trainer, "distill/kl_div_tau1", "eval")
  assert len(kl) == 3
  assert kl[0] == kl[1] == kl[2]
  # In training, the student's dropout is on.
  assert len(set(toys.history(trainer, "distill/kl_div").tolist())) == 2
  for _, node in nnx.iter_graph(student):
    if isinstance(node, nnx.Dropout):
      assert not node.deterministic


def test_evaluation_changes_no_training():
  """Trap 5: runs with and without evaluation end bit-equal."""
  after = []
  for data in (None, toys.batches(2, seed=9)):
    trainer = toys.trainer(
        student=toys.Toy(seed=1, dropout=0.3), eval_every_n_steps=1
    )
    trainer.train(toys.batches(6), data)
    after.append(toys.parameters(trainer.model))
  for path, value in after[0].items():
    np.testing.assert_array_equal(after[1][path], value, err_msg=path)


def test_empty_evaluation_is_harmless():
  """Trap 5: data without a batch neither raise nor log."""

  class Empty:

    def __iter__(self):
      return iter(())

  trainer = _trainer()
  trainer.train([_EVAL[1]] * 3, Empty())
  assert trainer.train_steps == 3
  assert not trainer.metrics_logger.metric_exists("", "loss", "eval")


def test_correlation_over_the_top_entries():
  """Trap 28: over the whole vocabulary the worse student looks better."""
  rng = np.random.default_rng(0)
  size = 4096
  teacher = rng.normal(size=size)
  teacher[:32] = np.linspace(20.0, 8.0, 32)
  worse = teacher + 0.1 * rng.normal(size=size)
  worse[:32] = np.linspace(6.0, 12.0, 32)  # the head in the wrong order
  better = 8.0 * rng.normal(size=size)
  better[:32] = teacher[:32]

  def measure(student):
    trainer = toys.trainer(
        student=toys.Table([student]), teacher=toys.Table([teacher]),
        optimizer=optax.sgd,
        strategy_fn=lambda: toys.strategy(labels_fn=toys.identity_labels),
        progressive=tpd.StagePlan(
            stages=(tpd.Stage(updates=1),), learning_rate=0.0
        ),
    )
    batch = toys.batch(np.zeros((1, 2)))
    trainer.train([batch], [batch])
    get = lambda name: toys.history(trainer, f"distill/{name}", "eval")[0]
    return get("correlation"), get("correlation_top32")

  full, top = zip(measure(worse), measure(better), strict=True)
  expected = [np.corrcoef(s, teacher)[0, 1] for s in (worse, better)]
  np.testing.assert_allclose(full, expected, atol=1e-4)
  assert full[0] > 0.8 > full[1] + 0.2
  assert top[0] == pytest.approx(-1.0, abs=1e-5)
  assert top[1] == pytest.approx(1.0, abs=1e-5)
