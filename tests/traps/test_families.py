"""What the model families need, and what Tunix's code of them gets wrong."""

import inspect
import warnings

from flax import nnx
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

from tests import toys
import tunix_progdistill as tpd
from tunix_progdistill import families
from tunix_progdistill import freezing
from tunix_progdistill import students
from tunix_progdistill.families import causal_lm

_CLASSES = {
    "llama3": (llama3, llama3.Llama3, "weight_tying"),
    "qwen3": (qwen3, qwen3.Qwen3, "use_tied_embedding"),
    "qwen2": (qwen2, qwen2.Qwen2, "use_tied_embedding"),
}
_TOKENS = np.random.default_rng(0).integers(0, 32, (2, 12)).astype(np.int32)
_INPUTS = {"input_tokens": _TOKENS, "input_mask": np.ones_like(_TOKENS)}


def _model(name, *, theta=10_000, tied=False, layers=2, seed=0, **kwargs):
  module, kind, tie = _CLASSES[name]
  fields = {
      "num_layers": layers, "vocab_size": 32, "embed_dim": 16,
      "hidden_dim": 16, "num_heads": 2, "head_dim": 8, "num_kv_heads": 1,
      "rope_theta": theta, "norm_eps": 1e-6, tie: tied,
  }
  model = kind(module.ModelConfig(**(fields | kwargs)), rngs=nnx.Rngs(seed))
  # Fresh weights are too small for attention to look anywhere.
  rng = np.random.default_rng(seed)
  filled = [
      (path, variable.replace(jnp.asarray(rng.normal(
          size=variable.get_value().shape
      ) * 0.3, variable.get_value().dtype)))
      for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
      if "norm" not in str(path)
  ]
  nnx.update(model, nnx.from_flat_state(filled))
  return model


def _strategy():
  return tpd.ProgressiveLogitStrategy(
      causal_lm.forward, causal_lm.forward, causal_lm.next_token_labels
  )


def _reference(monkeypatch, name, model, theta):
  """The logits with theta handed to every call of `apply_rope`."""
  module = _CLASSES[name][0]
  real = module.apply_rope

  def with_theta(*args, **kwargs):
    bound = inspect.signature(real).bind_partial(*args, **kwargs)
    bound.arguments["rope_theta"] = theta
    return real(*bound.args, **bound.kwargs)

  with monkeypatch.context() as patch:
    patch.setattr(module, "apply_rope", with_theta)
    return np.asarray(causal_lm.forward(model, **_INPUTS))


# -- rope_theta


@pytest.mark.parametrize("remat", ["NONE", "BLOCK", "DECODER"])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_rope_theta_of_the_config_is_used(monkeypatch, name, remat):
  """Trap 20: Tunix always rotates by its default of 1,000,000."""
  module = _CLASSES[name][0]
  defaults = module.apply_rope.__defaults__
  model = _model(name, remat_config=module.RematConfig[remat])
  expected = _reference(monkeypatch, name, model, 10_000)
  default = _reference(monkeypatch, name, model, 1_000_000)
  assert np.max(np.abs(expected - default)) > 1e-4
  # A call without the mend, before and between: its trace must not stick.
  causal_lm.forward(model, **_INPUTS)
  strategy = _strategy()
  teacher = strategy.teacher_logits(model, _INPUTS)
  student = strategy.get_student_outputs(model, _INPUTS)
  np.testing.assert_allclose(teacher, expected, atol=2e-5)
  np.testing.assert_allclose(student, expected, atol=2e-5)
  assert module.apply_rope.__defaults__ == defaults
  # Another theta, in the same process and with the same strategy.
  other = _model(
      name, theta=500_000, remat_config=module.RematConfig[remat]
  )
  np.testing.assert_allclose(
      strategy.teacher_logits(other, _INPUTS),
      _reference(monkeypatch, name, other, 500_000), atol=2e-5,
  )


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_a_model_with_adapters_stays_in_its_family(monkeypatch, name):
  """qwix hands back a class of its own: its theta would be the default."""
  plain = _model(name)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    adapted = qwix.apply_lora_to_model(
        plain, qwix.LoraProvider(module_path=".*q_proj", rank=2, alpha=2.0),
        **plain.get_model_input(), rngs=nnx.Rngs(0),
    )
  assert type(adapted) is not type(plain)
  assert families.of(adapted) is families.of(plain)
  # A fresh adapter changes nothing.
  expected = _reference(monkeypatch, name, plain, 10_000)
  np.testing.assert_allclose(
      _strategy().get_student_outputs(adapted, _INPUTS), expected, atol=2e-5
  )


def test_rope_default_is_restored_after_a_failure():
  """Trap 20: nothing stays patched, whatever happens."""
  defaults = llama3.apply_rope.__defaults__
  with (
      pytest.raises(ZeroDivisionError),
      families.tracing(_model("llama3")),
  ):
    assert 10_000 in llama3.apply_rope.__defaults__
    raise ZeroDivisionError
  assert llama3.apply_rope.__defaults__ == defaults
  assert 1_000_000 in defaults


def test_rope_theta_inside_training(monkeypatch):
  """Trap 20: the compiled step and the evaluation honour it as well."""
  student, teacher = (_model("llama3", seed=i, layers=1) for i in (1, 0))
  s, t = (
      _reference(monkeypatch, "llama3", m, 10_000)[:, :-1]
      for m in (student, teacher)
  )
  log = lambda x: x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))
  log_s, log_t = log(np.float64(s)), log(np.float64(t))
  kl = np.mean(np.sum(np.exp(log_t) * (log_t - log_s), axis=-1))
  trainer = tpd.ProgressiveDistillationTrainer(
      student, teacher, _strategy(), optax.sgd,
      toys.config(
          tpd.StagePlan(
              stages=(tpd.Stage(updates=1),),
              learning_rate=0.0, temperature=1.0,
          )
      ),
  )
  batch = toys.batch(_TOKENS)
  trainer.train([batch], [batch])
  found = toys.history(trainer, "distill/kl_div")[0]
  assert found == pytest.approx(kl, rel=1e-4)
  held_out = toys.history(trainer, "distill/kl_div_tau1", "eval")[0]
  assert held_out == pytest.approx(kl, rel=1e-4)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_different_theta_is_refused(name):
  """Trap 20: one default cannot serve two models."""
  with pytest.raises(ValueError, match="rope_theta of student") as e:
    tpd.ProgressiveDistillationTrainer(
        _model(name, theta=10_000), _model(name, theta=500_000),
        _strategy(), optax.adamw, toys.config(toys.plan()),
    )
  assert "\n" not in str(e.value)
  assert "(10000, 500000)" in str(e.value)


# -- embeddings and heads


@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen2"])
def test_tied_and_separate_heads(name):
  """Trap 8: a tied embedding drags the gradient through frozen layers."""
  half = tpd.Stage(freeze_fraction=0.5)
  for tied in (True, False):
    model = _model(name, tied=tied)
    paths = freezing.trainable_paths(model, half)
    everything = set(freezing.parameter_sizes(model))
    embedding = {p for p in everything if p.startswith("embedder/")}
    assert embedding
    assert not embedding & paths
    assert "final_norm/w" in paths
    assert ("lm_head/w" in everything) == (not tied)
    assert ("lm_head/w" in paths) == (not tied)
    assert not any(p.startswith("layers/0/") for p in paths)
    assert {p for p in everything if p.startswith("layers/1/")} <= paths
    assert freezing.trainable_paths(model, tpd.Stage()) == everything


@pytest.mark.parametrize(
    ("fraction", "first"), [(0.8, 4), (0.5, 2), (0.0, 0)]
)
def test_tied_embedding_of_gemma3(fraction, first):
  """Trap 8: frozen as long as any layer is; the final norm never."""
  model = toys.gemma3_model(num_layers=5)
  paths = freezing.trainable_paths(model, tpd.Stage(freeze_fraction=fraction))
  tops = {"/".join(p.split("/")[:2]) for p in paths}
  assert tops == {f"layers/{i}" for i in range(first, 5)} | {
      "final_norm/scale"
  } | ({"embedder/input_embedding"} if first == 0 else set())


def test_toy_with_a_tied_embedding_freezes_it():
  """Trap 8: found by discovery, not by name."""
  model = toys.Toy(tied=True)
  paths = freezing.trainable_paths(model, tpd.Stage(freeze_fraction=0.2))
  assert {p.split("/")[0] for p in paths} == {"layers", "final_norm"}


def test_toy_with_a_separate_head_trains_it_in_every_stage():
  """Trap 8: the head and the final norm are above all layers."""
  model = toys.Toy(tied=False)
  paths = freezing.trainable_paths(model, tpd.Stage(freeze_fraction=0.8))
  assert {p.split("/")[0] for p in paths} == {
      "layers", "final_norm", "lm_head"
  }


# -- students made of layers


def test_kept_layers_keep_their_attention_type():
  """Trap 20: Gemma 3 is local or global by position."""
  teacher = toys.gemma3_model(num_layers=12)
  kinds = [layer.attn.attn_type for layer in teacher.layers]
  assert kinds[5] == kinds[11] == gemma3.AttentionType.GLOBAL
  assert len([k for k in kinds if k == kinds[0]]) == 10
  student = students.from_layers(teacher, (0, 2, 4, 6, 8, 11))
  rebuilt = gemma3.Gemma3(student.config, rngs=nnx.Rngs(0))
  assert [layer.attn.attn_type for layer in student.layers] == [
      layer.attn.attn_type for layer in rebuilt.layers
  ]
  assert student.config.num_layers == 6
  # A loader that fills the rebuilt model gets the same logits.
  nnx.update(rebuilt, nnx.state(student, nnx.Param))
  np.testing.assert_allclose(
      causal_lm.forward(rebuilt, **_INPUTS),
      causal_lm.forward(student, **_INPUTS), atol=1e-6,
  )


@pytest.mark.parametrize(
    ("layers", "place", "choice"),
    [
        ((0, 5), r"layers\[1\]", "0, 1, 2, 3, 4"),
        ((5,), r"layers\[0\]", "0, 1, 2, 3, 4"),
        ((0, 1, 2, 3, 4, 0), r"layers\[5\]", r"\[5\]"),
    ],
)
def test_wrong_place_is_refused(layers, place, choice):
  """Trap 20: a global layer in a local place would lose its reach."""
  with pytest.raises(ValueError, match=f"{place} must be a layer of") as e:
    students.from_layers(toys.gemma3_model(num_layers=6), layers)
  assert "\n" not in str(e.value)
  with pytest.raises(ValueError, match=choice):
    students.from_layers(toys.gemma3_model(num_layers=6), layers)


def test_kept_layers_keep_their_feed_forward():
  """Trap 20: fresh Gemma FFN kernels are zero; a copy's must not be."""
  fresh = gemma3.Gemma3(toys.gemma3_config(), rngs=nnx.Rngs(0))
  kernel = lambda m, i: np.asarray(m.layers[i].mlp.down_proj.kernel.get_value())
  assert not np.any(kernel(fresh, 0))  # the trap itself
  teacher = toys.gemma3_model()
  student = students.from_layers(teacher, (1, 3))
  for i, layer in enumerate((1, 3)):
    assert np.any(kernel(student, i))
    np.testing.assert_array_equal(kernel(student, i), kernel(teacher, layer))
  # Copies, not references: training the student leaves the teacher alone.
  student.layers[0].mlp.down_proj.kernel.set_value(
      jnp.zeros_like(student.layers[0].mlp.down_proj.kernel.get_value())
  )
  assert np.any(kernel(teacher, 1))


# -- <bos>


def test_bos_is_never_a_target():
  """Trap 20: `<bos>` opens a window: it is read, and nothing predicts it."""
  bos = 2
  tokens = np.array([[bos, 5, 6, 7], [0, 0, bos, 9], [bos, 8, 0, 0]])
  mask = np.array([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]])
  labels = np.asarray(causal_lm.next_token_labels(tokens, mask))
  np.testing.assert_array_equal(
      labels, [[5, 6, 7, -1], [-1, -1, 9, -1], [8, -1, -1, -1]]
  )
  assert bos not in labels


def test_bos_stands_at_position_zero_wherever_padding_is():
  """Trap 20: the same logits padded left, right and not at all."""
  model = toys.gemma3_model(num_layers=1)
  forward = nnx.jit(causal_lm.forward)
  row = np.array([2, 5, 6, 7])
  right = np.array([[*row, 0, 0]])
  left = np.array([[0, 0, *row]])
  call = lambda t, m: np.asarray(
      forward(model, t.astype(np.int32), m.astype(np.int32))
  )
  plain = call(row[None], np.ones((1, 4)))[0]
  np.testing.assert_allclose(
      call(right, right != 0)[0, :4], plain, atol=1e-5
  )
  np.testing.assert_allclose(call(left, left != 0)[0, 2:], plain, atol=1e-5)
