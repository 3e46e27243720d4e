"""A hook on a plain `PeftTrainer`: its own loss in stages, or distilling."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests import toys
import tunix_progdistill as tpd
from tunix_progdistill.families import causal_lm


def test_plain_trainer_by_its_own_loss():
  """One stage of everything equals Tunix's own step under SGD."""
  data = toys.batches(4, vocabulary=64)
  stock = toys.plain(optimizer=optax.sgd(0.01))
  stock.train(data, data[:2])
  trainer = toys.plain()
  hook = tpd.ProgressiveFreezingHook(
      tpd.StagePlan(stages=(tpd.Stage(learning_rate=0.01),)),
      optimizer=optax.sgd,
  ).attach(trainer)
  trainer.train(data, data[:2])
  assert hook.engine.compiles == (1,)
  for mode in ("train", "eval"):
    np.testing.assert_allclose(
        toys.history(trainer, "loss", mode), toys.history(stock, "loss", mode),
        rtol=1e-6,
    )
  expected = toys.parameters(stock.model)
  for name, value in toys.parameters(trainer.model).items():
    np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


def test_plain_trainer_in_stages():
  """Frozen layers stay, and the loss may be changed after the attach."""
  trainer = toys.plain()
  tpd.ProgressiveFreezingHook(
      tpd.StagePlan(stages=(
          tpd.Stage(freeze_fraction=0.5, updates=2, learning_rate=1e-2),
      )),
      optimizer=optax.adamw,
  ).attach(trainer)
  trainer.evaluate(toys.batches(1, vocabulary=64))

  def loss(model, input_tokens, positions, attention_mask, **_):
    logits, _ = model(input_tokens, positions, None, attention_mask)
    return jnp.mean(jnp.square(logits)), {"mine": jnp.float32(3.0)}

  trainer.with_loss_fn(loss, has_aux=True)
  before = toys.parameters(trainer.model)
  trainer.train(toys.batches(2, vocabulary=64))
  after = toys.parameters(trainer.model)
  assert toys.history(trainer, "mine").tolist() == [3.0, 3.0]
  moved = {n for n in before if not np.array_equal(before[n], after[n])}
  assert moved and not any(
      n.startswith(("layers/0", "layers/1", "layers/2", "embedder"))
      for n in moved
  )


@flax.struct.dataclass
class _Metric:
  """The form of a metric on Tunix's main branch."""

  unreduced_sum: jax.Array
  denominator: jax.Array

  def compute(self):
    return self.unreduced_sum / self.denominator


@flax.struct.dataclass
class _Unreduced:
  """The form of a loss there."""

  primary_loss: _Metric
  aux_metrics: dict


def test_unreduced_loss_is_weighed_by_its_own_denominator():
  """Micro-batches of unequal counts: the sums over the sum of the counts."""
  trainer = toys.plain(gradient_accumulation_steps=2, eval_every_n_steps=9)
  tpd.ProgressiveFreezingHook(
      tpd.StagePlan(stages=(tpd.Stage(updates=1, learning_rate=1e-9),)),
      optimizer=optax.sgd,
  ).attach(trainer)
  data = toys.batches(2, vocabulary=64)

  def loss(model, input_tokens, positions, attention_mask, **_):
    logits, _ = model(input_tokens, positions, None, attention_mask)
    first = jnp.all(input_tokens == data[0].input_tokens)
    count = jnp.where(first, 1.0, 3.0)
    total = jnp.where(first, 10.0, 60.0) + 0.0 * jnp.sum(logits)
    metric = _Metric(total, count)
    return _Unreduced(metric, {"mine": metric, "plain": count})

  trainer.with_loss_fn(loss)
  trainer.train(data, data)
  assert toys.history(trainer, "loss").tolist() == [17.5]
  assert toys.history(trainer, "mine").tolist() == [17.5]
  assert toys.history(trainer, "plain").tolist() == [2.5]
  assert toys.history(trainer, "loss", "eval").tolist() == [17.5]


def test_plain_trainer_distils():
  """With a strategy and a teacher it is the distillation trainer's run."""

  def forward(model, input_tokens, positions, attention_mask, **_):
    return model(input_tokens, positions, None, attention_mask)[0]

  def labels(input_tokens, input_mask, **_):
    return causal_lm.next_token_labels(input_tokens, input_mask)

  data = toys.batches(6, vocabulary=64)
  plan = toys.plan()
  model = lambda seed: toys.gemma3_model(seed=seed, num_layers=3)
  trainer = toys.plain(model=model(1))
  tpd.ProgressiveFreezingHook(
      plan, optimizer=optax.adamw,
      strategy=tpd.ProgressiveLogitStrategy(forward, forward, labels),
      teacher_model=model(0),
  ).attach(trainer)
  trainer.train(data, data[:1])
  ours = toys.trainer(
      student=model(1), teacher=model(0),
      progressive=plan, eval_every_n_steps=2,
      strategy_fn=lambda: tpd.ProgressiveLogitStrategy(
          causal_lm.forward, causal_lm.forward, causal_lm.next_token_labels
      ),
  )
  ours.train(data, data[:1])
  np.testing.assert_allclose(
      toys.history(trainer, "distill/kl_div"),
      toys.history(ours, "distill/kl_div"), rtol=1e-5,
  )
  assert toys.history(trainer, "distill/kl_div_tau1", "eval").size == 4
