"""What Tunix's own tests ask of its logit strategy and distillation trainer.

Told in our words and asked of our classes. `BEHAVIOURS` is the table: a line
for each behaviour, and the test here that asks for it.
"""

import inspect
import sys

from flax import nnx
import jax
import jax.numpy as jnp
import jax.sharding as shd
import numpy as np
import optax
import pytest
from tunix.distillation import distillation_trainer
from tunix.distillation import strategies
from tunix.tests import test_common

import tunix_progdistill as tpd

BEHAVIOURS = {
    "strategy: temperature, alpha and top-k are kept as given":
        "test_settings_are_kept",
    "strategy: temperature <= 0 and alpha outside [0, 1] are refused":
        "test_bad_settings_are_refused",
    "strategy: the loss mixes soft and hard loss by alpha":
        "test_loss_mixes_by_alpha",
    "strategy: the metrics carry soft, hard, KL and teacher loss":
        "test_loss_mixes_by_alpha",
    "strategy: a top-k teacher changes the KL": "test_top_k_changes_the_loss",
    "strategy: the evaluation loss is the cross-entropy, whatever alpha":
        "test_eval_loss_is_cross_entropy",
    "strategy: get_train_loss is compute_loss of the forward functions":
        "test_get_train_loss",
    "strategy: get_eval_loss is compute_eval_loss of the forward function":
        "test_get_eval_loss",
    "trainer: with_loss_fn is refused": "test_with_loss_fn_is_refused",
    "trainer: training moves every parameter":
        "test_training_moves_every_parameter",
    "trainer: an attention strategy over wrapped modules trains":
        "test_attention_strategy",
    "trainer: a mesh keeps the shardings and equals one device":
        "test_mesh_keeps_shardings_and_equals_one_device",
}
_VOCABULARY = 256


def test_table_names_tests_that_are_here():
  own = {n for n, _ in inspect.getmembers(
      sys.modules[__name__], inspect.isfunction
  )}
  assert set(BEHAVIOURS.values()) <= own


def _nothing():
  pass


def _strategy(**kwargs):
  return tpd.ProgressiveLogitStrategy(_nothing, _nothing, _nothing, **kwargs)


def _arrays(*shape):
  rng = np.random.default_rng(0)
  student, teacher = (
      jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)
  )
  ids = rng.integers(0, shape[-1], shape[:-1])
  return student, teacher, jax.nn.one_hot(ids, shape[-1])


# -- the strategy


@pytest.mark.parametrize(
    ("tau", "alpha", "k"), [(2.0, 0.5, 0), (3, 0.0, 0), (2.0, 1.0, 50)]
)
def test_settings_are_kept(tau, alpha, k):
  made = _strategy(temperature=tau, alpha=alpha, distill_top_k=k)
  assert (made.temperature, made.alpha, made.distill_top_k) == (tau, alpha, k)
  assert isinstance(made, strategies.LogitStrategy)


@pytest.mark.parametrize(
    ("tau", "alpha"), [(0, 0.5), (-1.0, 0.5), (2.0, -0.1), (2.0, 1.1)]
)
def test_bad_settings_are_refused(tau, alpha):
  with pytest.raises(ValueError, match=r"(temperature|alpha) must"):
    _strategy(temperature=tau, alpha=alpha)


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
def test_loss_mixes_by_alpha(alpha):
  """On one row a token, [B, V], as well as on [B, T, V]."""
  for shape in ((4, 10), (2, 3, 10)):
    student, teacher, labels = _arrays(*shape)
    loss, metrics = _strategy(temperature=3.0, alpha=alpha).compute_loss(
        student_output=student, teacher_output=teacher, labels=labels
    )
    t, s = (np.asarray(x, np.float64) for x in (teacher, student))
    log_p, log_q = (
        x / 3 - np.log(np.sum(np.exp(x / 3), -1, keepdims=True))
        for x in (t, s)
    )
    kl = np.mean(np.sum(np.exp(log_p) * (log_p - log_q), -1))
    ce = lambda x: np.mean(
        np.log(np.sum(np.exp(x), -1)) - np.sum(np.asarray(labels) * x, -1)
    )
    np.testing.assert_allclose(
        loss, alpha * 9 * kl + (1 - alpha) * ce(s), rtol=1e-5
    )
    expected = {
        "distill/soft_loss": 9 * kl, "distill/hard_loss": ce(s),
        "distill/kl_div": kl, "distill/teacher_loss": ce(t),
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
      np.testing.assert_allclose(metrics[name], value, rtol=1e-5)


def test_top_k_changes_the_loss():
  student, teacher, labels = _arrays(2, 20)
  losses = [
      _strategy(distill_top_k=k).compute_loss(student, teacher, labels)[0]
      for k in (0, 2)
  ]
  assert abs(losses[0] - losses[1]) > 1e-3


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
def test_eval_loss_is_cross_entropy(alpha):
  student, _, labels = _arrays(4, 10)
  loss, metrics = _strategy(alpha=alpha).compute_eval_loss(
      student_output=student, labels=labels
  )
  expected = np.mean(optax.softmax_cross_entropy(student, labels))
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  assert metrics == {}


class _Nobody(nnx.Module):
  """A model without parameters."""


def _of_inputs():
  """A strategy whose models are its inputs, of one row."""
  return tpd.ProgressiveLogitStrategy(
      lambda _, student_output, **kwargs: student_output,
      lambda _, teacher_output, **kwargs: teacher_output,
      lambda labels, **kwargs: labels,
  )


_ROW = {
    "student_output": jnp.array([1.0, 2.0, 3.0]),
    "teacher_output": jnp.array([4.0, 5.0, 7.0]),
    "labels": jnp.array([7.0, 8.0, 9.0]),
}


def test_get_train_loss():
  """Labels of any weight, and no axis but the vocabulary's."""
  made = _of_inputs()
  expected, expected_metrics = made.compute_loss(**_ROW)
  teacher_output = made.get_teacher_outputs(
      teacher_model=_Nobody(), inputs=_ROW
  )
  np.testing.assert_array_equal(teacher_output.logits, _ROW["teacher_output"])
  loss, metrics = made.get_train_loss(
      student_model=_Nobody(), teacher_output=teacher_output, inputs=_ROW
  )
  stock, _ = strategies.LogitStrategy(
      _nothing, _nothing, _nothing
  ).compute_loss(**_ROW)
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  np.testing.assert_allclose(loss, stock, rtol=1e-6)
  assert metrics.keys() == expected_metrics.keys()


def test_get_eval_loss():
  made = _of_inputs()
  expected, expected_metrics = made.compute_eval_loss(
      _ROW["student_output"], _ROW["labels"]
  )
  loss, metrics = made.get_eval_loss(student_model=_Nobody(), inputs=_ROW)
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  assert metrics == expected_metrics


# -- the trainer


def _forward(model, input_tokens, input_mask, positions, attention_mask):
  del input_mask
  return model(input_tokens, positions, None, attention_mask)[0][:, :-1]


def _labels(input_tokens, input_mask, **kwargs):
  del kwargs
  rows = jax.nn.one_hot(input_tokens[:, 1:], _VOCABULARY)
  return rows * input_mask[:, 1:, None]


def _logit():
  return strategies.LogitStrategy(_forward, _forward, _labels)


def _attention():
  return strategies.AttentionTransferStrategy(
      _forward, _forward, _labels, attention_layer=nnx.MultiHeadAttention
  )


def _inputs(x):
  return {
      "input_tokens": x.input_tokens, "input_mask": x.input_mask,
      "positions": jnp.arange(x.input_tokens.shape[1]),
      "attention_mask": jnp.ones_like(x.input_tokens),
  }


def _data():
  tokens = np.arange(128).reshape(2, 4, 16)
  return [
      distillation_trainer.TrainingInput(
          input_tokens=x, input_mask=np.ones(x.shape, np.int32)
      ) for x in tokens
  ]


def _model(seed, layers=4):
  return test_common.ToyTransformer(
      test_common.ModelConfig(vocab_size=_VOCABULARY, num_layers=layers),
      rngs=nnx.Rngs(seed),
  )


def _by_trainer(student, teacher, strategy):
  return tpd.ProgressiveDistillationTrainer(
      student, teacher, strategy, optax.sgd(1e-3),
      tpd.TrainingConfig(eval_every_n_steps=2, max_steps=100),
  )


def _by_hook(student, teacher, strategy):
  trainer = distillation_trainer.DistillationTrainer(
      student, teacher, strategy, optax.sgd(1e-3),
      distillation_trainer.TrainingConfig(eval_every_n_steps=2, max_steps=100),
  )
  tpd.ProgressiveFreezingHook(
      tpd.StagePlan(stages=(tpd.Stage(),))
  ).attach(trainer)
  return trainer


_BOTH = pytest.mark.parametrize("make", [_by_trainer, _by_hook])


def _parameters(model):
  return {
      p: np.array(v.get_value())
      for p, v in nnx.to_flat_state(nnx.state(model, nnx.Param))
  }


@_BOTH
def test_with_loss_fn_is_refused(make):
  trainer = make(_model(0), _model(1), _logit())
  with pytest.raises(NotImplementedError):
    trainer.with_loss_fn(lambda a, b: 0.0)


@_BOTH
def test_training_moves_every_parameter(make):
  student = _model(0)
  before = _parameters(student)
  trainer = make(student, _model(1), _logit()).with_gen_model_input_fn(_inputs)
  trainer.train(_data(), _data())
  for path, value in _parameters(student).items():
    assert np.any(value != before[path]), path


@_BOTH
def test_attention_strategy(make):
  """A deeper teacher, features of attention modules that the strategy wraps."""
  student = _model(0)
  before = _parameters(student)
  trainer = make(student, _model(1, layers=6), _attention())
  trainer.with_gen_model_input_fn(_inputs).train(_data(), _data())
  after = _parameters(trainer.model)
  assert after.keys() == before.keys()
  for path, value in after.items():
    assert np.any(value != before[path]), path


def _sharded(seed, mesh):
  @nnx.jit
  def make():
    model = _model(seed)
    state = nnx.state(model)
    nnx.update(
        model,
        jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)),
    )
    return model

  with mesh:
    return make()


@pytest.mark.parametrize(
    "make", [_by_hook, pytest.param(_by_trainer, marks=pytest.mark.slow)]
)
def test_mesh_keeps_shardings_and_equals_one_device(make):
  mesh = shd.Mesh(np.array(jax.devices()).reshape(2, -1), ("fsdp", "tp"))
  student = _sharded(0, mesh)
  before = _parameters(student)
  trainer = make(student, _sharded(1, mesh), _logit())
  trainer.with_gen_model_input_fn(_inputs)
  with mesh:
    trainer.train(_data(), _data())
  layer = student.layers[0]
  specs = [w.kernel.get_value().sharding.spec for w in (layer.w1, layer.w2)]
  assert specs == [
      shd.PartitionSpec("fsdp", "tp"), shd.PartitionSpec("tp", "fsdp")
  ]
  single = _model(0)
  other = make(single, _model(1), _logit())
  other.with_gen_model_input_fn(_inputs).train(_data(), _data())
  one, several = _parameters(single), _parameters(student)
  for path, value in several.items():
    assert np.any(value != before[path]), path
    np.testing.assert_allclose(value, one[path], atol=1e-6)
