"""LoRA students and quantised teachers through qwix."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import toys
from tests.weights import tiny
import tunix_progdistill as tpd
from tunix_progdistill import families
from tunix_progdistill import modules
from tunix_progdistill.families import causal_lm
from tunix_progdistill.students import adapters
from tunix_progdistill.teachers import quantised

_LORA = {"module_path": ".*(attn|mlp).*", "rank": 2, "alpha": 3.0}
_NAMES = ("gemma", "gemma3", "gemma4", "llama3", "qwen2", "qwen3")
# Of all pairs, what is not slow: every type at least once.
_FEW = {
    ("gemma", None), ("gemma3", "int8"), ("llama3", None), ("qwen3", "nf4"),
}


def _logits(model):
  tokens = np.random.default_rng(0).integers(3, 64, (2, 10)).astype(np.int32)
  with families.tracing(model):
    return np.asarray(causal_lm.forward(model, tokens, np.ones_like(tokens)))


def _model(name, **changes):
  return tiny.model(tiny.config(name, **changes))


def _wake(model):
  """Gives every adapter a value, as training would."""
  state = nnx.state(model, nnx.LoRAParam)
  leaves, tree = jax.tree.flatten(state)
  noise = [
      x + 0.1 * jax.random.normal(jax.random.key(i), x.shape)
      for i, x in enumerate(leaves)
  ]
  nnx.update(model, jax.tree.unflatten(tree, noise))


@pytest.mark.parametrize(
    ("name", "qtype"), [
        pytest.param(
            name, qtype, marks=[pytest.mark.slow] * ((name, qtype) not in _FEW)
        ) for name in _NAMES for qtype in (None, "int8", "nf4")
    ],
)
def test_merged_is_the_adapted_model(name, qtype):
  """W + (alpha / r) A B, in each family's own axes."""
  plain = _model(name)
  model = adapters.add(plain, {**_LORA, "weight_qtype": qtype})
  if qtype is None:  # B starts at 0
    np.testing.assert_allclose(_logits(model), _logits(plain), atol=1e-5)
  _wake(model)
  expected = _logits(model)
  assert np.abs(expected - _logits(plain)).max() > 0.05
  merged = adapters.merged(model, alpha=3.0)
  assert type(merged) is type(plain)
  assert not nnx.to_flat_state(nnx.state(merged, nnx.LoRAParam))
  assert toys.parameters(merged).keys() == toys.parameters(plain).keys()
  np.testing.assert_allclose(_logits(merged), expected, atol=2e-4)
  np.testing.assert_array_equal(_logits(model), expected)  # left as it was


@pytest.mark.parametrize("name", [
    name if name == "llama3" else
    pytest.param(name, marks=pytest.mark.slow) for name in _NAMES
])
def test_int8_kernels_take_a_quarter(name):
  """At most 0.27x of their float32 bytes; embedding and norms are shared."""
  wide = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
  if name == "gemma4":
    wide["global_head_dim"] = 64
  if name == "gemma3":
    wide["query_pre_attn_scalar"] = 64
  model = _model(name, **wide)
  made, size = quantised.quantise(model, "int8")
  assert 0.25 < size.kernel_ratio <= 0.27
  assert size.kernel_ratio < size.total_ratio < 1
  before, after = (
      dict(modules.LiveVariables(m)) for m in (model, made)
  )
  shared = before["embedder/input_embedding"].get_value()
  assert after["embedder/input_embedding"].get_value() is shared
  assert size.embedding_bytes >= shared.nbytes
  assert size.total_float32_bytes == 4 * tpd.students.num_parameters(model)
  assert tpd.students.num_parameters(made) == (
      tpd.students.num_parameters(model)
  )
  close = np.corrcoef(_logits(made).ravel(), _logits(model).ravel())[0, 1]
  assert 0.98 < close < 1


@pytest.mark.parametrize(
    "name", ["gemma3", pytest.param("qwen3", marks=pytest.mark.slow)]
)
def test_nf4_is_coarser(name):
  model = _model(name)
  errors = []
  for kind in ("int8", "nf4"):
    made, size = quantised.quantise(model, kind)
    assert size.kind == kind
    errors.append(np.abs(_logits(made) - _logits(model)).max())
  assert 0 < errors[0] < errors[1]


@pytest.mark.parametrize(("name", "kind"), [
    ("llama3", "int8"),
    pytest.param("llama3", "nf4", marks=pytest.mark.slow),
    pytest.param("qwen2", "nf4", marks=pytest.mark.slow),
    pytest.param("qwen2", "int8", marks=pytest.mark.slow),
])
def test_quantised_teacher_and_student_train(name, kind):
  """QLoRA under a quantised teacher; committed arrays, as loaders give them."""
  whole = _model(name)
  nnx.update(whole, jax.device_put(nnx.state(whole), jax.devices()[0]))
  teacher, _ = quantised.quantise(whole, kind)
  student = adapters.add(
      tpd.students.from_layers(whole, (0, 3)), {**_LORA, "weight_qtype": kind}
  )
  trainer = toys.trainer(
      student=student, teacher=teacher, progressive=toys.plan(),
      strategy_fn=lambda: tpd.ProgressiveLogitStrategy(
          causal_lm.forward, causal_lm.forward, causal_lm.next_token_labels
      ),
  )
  before = toys.parameters(trainer.model)
  trainer.train(toys.batches(6, vocabulary=64), toys.batches(1, vocabulary=64))
  after = toys.parameters(trainer.model)
  moved = {p for p in before if np.any(before[p] != after[p])}
  assert moved and all("_lora_" in p for p in moved)
  assert trainer.engine.compiles == (1, 1, 1)


def test_gradient_of_a_lora_student_is_that_of_the_factors():
  """d loss / d A and d B by the merged kernel, as the chain rule has it."""
  model = adapters.add(
      _model("llama3"), {**_LORA, "module_path": ".*q_proj"}
  )
  _wake(model)
  graph, lora, rest = nnx.split(model, nnx.LoRAParam, ...)
  tokens = np.arange(12, dtype=np.int32).reshape(1, 12) + 3

  def loss(lora, merge):
    m = nnx.merge(graph, lora, rest)
    if merge:
      m = adapters.merged(m, alpha=3.0)
    with families.tracing(m):
      logits = causal_lm.forward(m, tokens, np.ones_like(tokens))
    return jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)

  own = jax.tree.leaves(jax.grad(loss)(lora, False))
  through = jax.tree.leaves(jax.grad(loss)(lora, True))
  for a, b in zip(own, through, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "lora_config.rank must be a whole number >= 1, got 0"),
        ({"rank": None}, "lora_config.rank must be a whole number >= 1"),
        ({"alpha": -1}, "lora_config.alpha must be > 0"),
        ({"module_path": "("}, "lora_config.module_path must be a regex"),
        ({"module_path": ""}, "lora_config.module_path must be a regex"),
        ({"dropout": 1.0}, "lora_config.dropout must lie in [0, 1)"),
        ({"weight_qtype": "int3"}, "lora_config.weight_qtype must be one of"),
        ({"tile_size": 0}, "lora_config.tile_size must be a whole number"),
        ({"ranks": 3}, "lora_config.ranks must be a known key"),
        ({"module_path": "nothing"},
         "lora_config.module_path must match a module that multiplies by a "
         "kernel, got 'nothing'; paths are such as "),
    ],
)
def test_lora_config_refused(change, message):
  with pytest.raises(ValueError) as e:
    adapters.add(_model("llama3"), {**_LORA, **change})
  assert message in str(e.value) and "\n" not in str(e.value)


def test_quantisation_refused():
  with pytest.raises(ValueError, match="quantization must be one of int8, nf4"):
    quantised.quantise(_model("llama3"), "int2")
  with pytest.raises(ValueError, match="must have get_model_input"):
    quantised.quantise(toys.Toy(), "int8")
  with pytest.raises(ValueError, match="must have get_model_input"):
    adapters.add(toys.Toy(), _LORA)


def test_optax_is_not_asked_for_frozen_kernels():
  """The optimizer of a QLoRA student holds adapters alone."""
  student = adapters.add(_model("llama3"), {**_LORA, "weight_qtype": "int8"})
  trainer = toys.trainer(
      student=student, teacher=_model("llama3"), optimizer=optax.adamw,
      progressive=toys.plan(),
      strategy_fn=lambda: tpd.ProgressiveLogitStrategy(
          causal_lm.forward, causal_lm.forward, causal_lm.next_token_labels
      ),
  )
  names = ["/".join(map(str, p)) for p, _ in nnx.to_flat_state(
      nnx.state(trainer.optimizer, nnx.optimizer.OptState)
  )]
  assert all("qvalue" not in n and "embedder" not in n for n in names)
