"""The engine with the output heads fused with the loss."""

import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix

from tests import toys
from tests.weights import tiny
import tunix_progdistill as tpd
from tunix_progdistill import families
from tunix_progdistill import outputs
from tunix_progdistill.families import causal_lm as lm
from tunix_progdistill.families import heads
from tunix_progdistill.objectives import fused

ROWS, LENGTH, WIDTH = 4, 7, 16  # 28 tokens, unlike any other size here


def strategy(**kwargs):
  functions = {"student_hidden_fn": lm.hidden, "teacher_hidden_fn": lm.hidden}
  return tpd.ProgressiveLogitStrategy(
      lm.forward, lm.forward, kwargs.pop("labels_fn", lm.next_token_labels),
      **(functions | kwargs),
  )


def trainer(student, teacher, *, fused_head=True, stages=None, **kwargs):
  stages = stages or (tpd.Stage(updates=4, learning_rate=0.05),)
  return tpd.ProgressiveDistillationTrainer(
      student, teacher, kwargs.pop("strategy", None) or strategy(), optax.sgd,
      tpd.TrainingConfig(
          eval_every_n_steps=2, progressive=tpd.ProgressiveConfig(
              plan=tpd.StagePlan(stages=stages), fused_head=fused_head,
              log_kl_div_tau1=True,
          ), **kwargs,
      ),
  )


def batches(number=4, shape=(ROWS, LENGTH), vocabulary=64):
  rng = np.random.default_rng(0)
  mask = np.ones(shape, np.int32)
  mask[1, 4:] = 0
  return [
      toys.batch(rng.integers(0, vocabulary, shape), mask)
      for _ in range(number)
  ]


def run(*models, number=4, **kwargs):
  """All records, and the weights after them."""
  made, records = trainer(*models, **kwargs), []
  made.with_record_sink(lambda *record: records.append(record))
  data = batches(number)
  made.train(data, data[:2])
  assert set(made.engine.compiles) == {1}
  return records, toys.parameters(made.model)


def same(one, other):
  """Losses and metrics agree, and weights to 1e-6."""
  for (kind, update, a), (kind2, update2, b) in zip(*(
      x[0] for x in (one, other)
  ), strict=True):
    assert (kind, update) == (kind2, update2)
    for name in a:
      if not name.endswith("per_sec"):
        assert b[name] == pytest.approx(a[name], rel=2e-5, abs=2e-6), name
  for name, value in one[1].items():
    np.testing.assert_allclose(other[1][name], value, atol=1e-6)


@pytest.mark.parametrize("name", sorted(tiny.CONFIGS))
def test_hidden_states_times_head_are_the_logits(name):
  model = tiny.model(tiny.config(name))
  head = families.of(model).head(model)
  assert head.fault(model) is None

  @jax.jit
  def both(values):
    merged = nnx.merge(graph, values)
    mask = jnp.ones_like(tiny.TOKENS)
    hidden = lm.hidden(merged, tiny.TOKENS, mask)
    matrix = head.matrix(merged)
    product = head.cast(hidden) @ (
        matrix.T if head.layout == "vd" else matrix
    )
    if head.softcap is not None:
      product = head.softcap * jnp.tanh(product / head.softcap)
    return product, lm.forward(merged, tiny.TOKENS, mask)

  graph, state = nnx.split(model)
  with families.tracing(model):
    product, logits = both(state)
  assert float(jnp.std(logits)) > 0.1
  np.testing.assert_allclose(product, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "accumulation", [pytest.param(None, marks=pytest.mark.slow), 3]
)
def test_same_run_as_by_logits(accumulation):
  """Other widths, two stages, and a window that a filler ends."""
  stages = (
      tpd.Stage(updates=1, freeze_fraction=0.5, learning_rate=0.05),
      tpd.Stage(updates=1 if accumulation else 3, learning_rate=0.05),
  )
  ask = lambda fused_head: run(
      toys.gemma3_model(seed=1), toys.gemma3_model(seed=0, embed_dim=24),
      fused_head=fused_head, stages=stages,
      gradient_accumulation_steps=accumulation,
  )
  same(ask(False), ask(True))


@pytest.mark.parametrize("name", [
    "gemma2", "qwen3-tied",
    pytest.param("gemma4", marks=pytest.mark.slow),
    pytest.param("llama3", marks=pytest.mark.slow),
])
def test_same_run_in_other_families(name):
  """A cap, a dtype of the config, a head of its own, a tied one."""
  raw = tiny.config(name)
  ask = lambda fused_head: run(
      tiny.model(raw, seed=1), tiny.model(raw, seed=0), fused_head=fused_head,
      number=2, stages=(tpd.Stage(updates=2, learning_rate=0.01),),
  )
  same(ask(False), ask(True))


@pytest.mark.slow
def test_step_by_step_without_jit():
  models = lambda: (toys.gemma3_model(seed=1), toys.gemma3_model(seed=0))
  compiled = run(*models(), number=2)
  made = trainer(*models())
  made.train(batches(2), skip_jit=True)
  for name, value in toys.parameters(made.model).items():
    # Summed in another order, operation by operation, through two updates.
    np.testing.assert_allclose(value, compiled[1][name], atol=5e-6)


def arrays(compiled) -> set[tuple[int, ...]]:
  """The shapes of all arrays of a compiled program."""
  return {
      tuple(map(int, dims.split(",")))
      for dims in re.findall(r"(?:f32|bf16|pred|u16)\[([\d,]+)\]",
                             compiled.as_text())
  }


def prepared(made):
  """A batch as the step takes it."""
  return made._prepare(batches(1)[0])  # pylint: disable=protected-access


@pytest.mark.parametrize("fused_head", [False, True])
def test_no_array_of_the_logits_size(fused_head):
  """Trap 21: neither in the step nor in the teacher's program."""
  shape, vocabulary = (8, 31), 50_021  # more than a block of tokens
  made = trainer(
      toys.gemma3_model(seed=1, num_embed=vocabulary),
      toys.gemma3_model(seed=0, num_embed=vocabulary), fused_head=fused_head,
  )
  data = batches(1, shape)
  made.train(data)
  step, = made.engine._steps.values()
  teacher = made._staged.parts.teacher
  teacher = teacher._run.lower(
      teacher._variables.read(), made._prepare(data[0]).inputs
  ).compile()
  sizes = {
      np.prod(s) for program in (step, teacher) for s in arrays(program)
      if vocabulary in s and WIDTH not in s
  }
  found = any(size >= np.prod(shape) * vocabulary for size in sizes)
  assert found == (not fused_head)


def test_a_frozen_head_gets_no_gradient():
  """Its sum, as large as the head, is not in the step of such a stage."""
  costs = []
  for fraction in (0.5, 0.0):
    made = trainer(
        toys.gemma3_model(seed=1, num_embed=50_000),
        toys.gemma3_model(seed=0, num_embed=50_000),
        stages=(tpd.Stage(freeze_fraction=fraction, learning_rate=0.05),),
        max_steps=1,
    )
    made.train(batches(1))
    costs.append(made.engine.cost().temp_bytes)
  assert costs[1] - costs[0] > 0.9 * 4 * WIDTH * 50_000


def test_no_batch_carries_the_teachers_head():
  made = trainer(toys.gemma3_model(seed=1), toys.gemma3_model(seed=0))
  batch = prepared(made)
  assert isinstance(batch.teacher_output, outputs.Hidden)
  assert {x.shape for x in jax.tree.leaves(batch.teacher_output)} == {
      (ROWS, LENGTH, WIDTH)
  }


def test_a_teacher_that_is_changed_is_followed():
  student, teacher = toys.gemma3_model(seed=1), toys.gemma3_model(seed=0)
  made = trainer(student, teacher)
  before = made.evaluate(batches(1))
  embedding = teacher.embedder.input_embedding
  embedding.set_value(embedding.get_value() + 0.5 * np.sin(
      np.arange(embedding.get_value().size).reshape(embedding.get_value().shape)
  ).astype(np.float32))
  after = made.evaluate(batches(1))
  fresh = trainer(student, teacher, fused_head=False).evaluate(batches(1))
  key = "distill/kl_div_tau1"
  assert after[key] != pytest.approx(before[key], rel=1e-3)
  assert after[key] == pytest.approx(fresh[key], rel=1e-5)


class TestByItself:

  def _output(self, monkeypatch, memory, **kwargs):
    monkeypatch.setattr(fused, "_memory_bytes", lambda: memory)
    made = trainer(
        toys.gemma3_model(seed=1), toys.gemma3_model(seed=0), fused_head=None,
        **kwargs,
    )
    return prepared(made).teacher_output

  def test_where_logits_do_not_fit(self, monkeypatch):
    need = 2 * 3 * 4 * ROWS * LENGTH * 64
    small = self._output(monkeypatch, need - 1.0)
    assert isinstance(small, outputs.Hidden)
    assert self._output(monkeypatch, need + 1.0).shape == (ROWS, LENGTH, 64)

  def test_never_without_hidden_functions(self, monkeypatch):
    made = tpd.ProgressiveLogitStrategy(
        lm.forward, lm.forward, lm.next_token_labels
    )
    out = self._output(monkeypatch, 1.0, strategy=made)
    assert out.shape == (ROWS, LENGTH, 64)

  def test_never_where_the_head_is_not_known(self, monkeypatch):
    monkeypatch.setattr(fused, "_memory_bytes", lambda: 1.0)
    made = tpd.ProgressiveDistillationTrainer(
        toys.Toy(seed=1), toys.Toy(seed=0),
        tpd.ProgressiveLogitStrategy(
            toys.forward, toys.forward, lm.next_token_labels,
            student_hidden_fn=toys.forward, teacher_hidden_fn=toys.forward,
        ), optax.sgd, toys.config(toys.plan()),
    )
    assert made._prepare(toys.batches(1)[0]).teacher_output.ndim == 3

  def test_the_machines_memory_is_read(self):
    assert 2**28 < fused._memory_bytes() < 2**45


class TestRefused:

  def _refused(self, match, student=None, **kwargs):
    with pytest.raises(ValueError, match=match) as e:
      trainer(
          student or toys.gemma3_model(seed=1), toys.gemma3_model(seed=0),
          **kwargs,
      )
    assert "fused_head" in str(e.value)
    assert "\n" not in str(e.value)

  def test_no_hidden_functions(self):
    self._refused(
        "needs the strategy's student_hidden_fn and teacher_hidden_fn",
        strategy=strategy(teacher_hidden_fn=None),
    )

  def test_top_k(self):
    self._refused("distill_top_k=4", strategy=strategy(distill_top_k=4))

  def test_a_model_that_nobody_knows(self):
    self._refused(
        "a student whose output head is known, got 'Toy'",
        student=toys.Toy(seed=1, vocabulary=64),
    )

  def test_an_adapter_on_the_head(self):
    model = tiny.model(tiny.config("qwen3"))
    student = qwix.apply_lora_to_model(
        model, qwix.LoraProvider(module_path="lm_head", rank=2, alpha=2.0),
        **model.get_model_input(), rngs=nnx.Rngs(0),
    )
    self._refused("lm_head has an adapter", student=student)

  def test_several_devices(self):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(
        jax.sharding.AxisType.Auto,
    ))
    student = toys.gemma3_model(seed=1)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    nnx.update(student, jax.device_put(nnx.state(student), everywhere))
    self._refused("a student on one device, got '8 devices'", student=student)

  def test_rows_for_labels(self):
    rows = lambda input_tokens, input_mask: jax.nn.one_hot(input_tokens, 64)
    made = trainer(
        toys.gemma3_model(seed=1), toys.gemma3_model(seed=0),
        strategy=strategy(labels_fn=rows),
    )
    with pytest.raises(ValueError, match=r"labels must be ids .* fused_head="):
      made.train(batches(1))

  @pytest.mark.parametrize("value", ["yes", 2, 0.5])
  def test_a_flag_that_is_none(self, value):
    self._refused("must be true, false or null", fused_head=value)


def test_hidden_states_of_a_model_without_a_final_norm():
  with pytest.raises(ValueError, match="must have a final_norm, got Table"):
    heads.hidden_states(toys.Table([[0.0]]), lambda model: model(0))


def test_hidden_states_of_two_passes():
  model = toys.Toy()
  tokens = jnp.zeros((1, 2), jnp.int32)
  with pytest.raises(ValueError, match="must run the model once, got 2 times"):
    heads.hidden_states(model, lambda model: (model(tokens), model(tokens)))
  assert type(model.final_norm) is nnx.LayerNorm
