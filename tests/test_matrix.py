"""Every family, full and LoRA, by trainer and by hook: three stages.

Frozen leaves stay bit-identical and the rest moves.
"""

import jax
import numpy as np
import optax
import pytest
from tunix.distillation import distillation_trainer

from tests import toys
from tests.weights import tiny
import tunix_progdistill as tpd
from tunix_progdistill import families
from tunix_progdistill import freezing

_FAMILIES = ("gemma", "gemma3", "gemma4", "llama3", "qwen2", "qwen3")
_LORA = {
    "module_path": ".*(attn|mlp).*", "rank": 2, "alpha": 4.0,
}
# The diagonal: every family, and every other choice, at least once.
_DIAGONAL = {
    ("gemma", "full", "hook"), ("gemma3", "lora", "trainer"),
    ("gemma4", "full", "trainer"), ("llama3", "lora", "hook"),
    ("qwen2", "qlora", "hook"), ("qwen3", "full", "trainer"),
}
_ALL = [
    (family, student, adapter) for family in _FAMILIES
    for student in ("full", "lora", "qlora") for adapter in ("hook", "trainer")
]


def _strategy():
  lm = tpd.causal_lm
  return tpd.ProgressiveLogitStrategy(
      lm.forward, lm.forward, lm.next_token_labels, alpha=1.0
  )


def _student(name, kind):
  student = tpd.students.from_layers(tiny.model(tiny.config(name)), (0, 1, 2))
  if kind == "full":
    return student
  qtype = {"weight_qtype": "int8"} if kind == "qlora" else {}
  return tpd.students.add_lora(student, {**_LORA, **qtype})


def _trainer(adapter, student, teacher, plan):
  if adapter == "trainer":
    return tpd.ProgressiveDistillationTrainer(
        student, teacher, _strategy(), optax.adamw, toys.config(plan)
    )
  trainer = distillation_trainer.DistillationTrainer(
      student, teacher, _strategy(), optax.set_to_zero(),
      distillation_trainer.TrainingConfig(eval_every_n_steps=1000),
  )
  tpd.ProgressiveFreezingHook(plan, optimizer=optax.adamw).attach(trainer)
  return trainer


@pytest.mark.parametrize(
    ("family", "student", "adapter"),
    [
        pytest.param(
            *case, marks=[pytest.mark.slow] * (case not in _DIAGONAL)
        ) for case in _ALL
    ],
)
def test_three_stages(family, student, adapter):
  name = "gemma3-fused" if family == "gemma3" else family
  teacher = tiny.model(tiny.config(name))
  model = _student(name, student)
  assert families.of(model).name == family
  layers = [
      families.of(model).layer_of(p) for p in toys.parameters(model)
  ]
  assert max(i for i in layers if i is not None) == 2
  trainer = _trainer(adapter, model, teacher, toys.plan(updates=(2, 2, 2)))
  engine = trainer.engine
  snapshots = []

  def data():
    for batch in toys.batches(6, vocabulary=tiny.VOCABULARY, length=8):
      snapshots.append(toys.parameters(trainer.model))
      yield batch

  trainer.train(data())
  snapshots.append(toys.parameters(trainer.model))
  wrt = engine._wrt
  every = freezing.trainable_paths(model, tpd.Stage(), wrt)
  assert engine.compiles == (1, 1, 1)
  for stage in range(3):
    before, after = snapshots[2 * stage], snapshots[2 * stage + 2]
    moved = {p for p in before if np.any(before[p] != after[p])}
    trains = engine._paths[stage]
    assert moved <= trains <= every
    # What gets no gradient in so small a model (a bias that softmax forgets).
    still = {p for p in trains - moved if "bias" not in p}
    assert still == set(), sorted(still)
    first = {0: 2, 1: 1, 2: 0}[stage]
    assert not any(
        (families.of(model).layer_of(p) or 9) < first for p in trains
    )
  assert np.all(np.isfinite(toys.history(trainer, "distill/kl_div")))
  jax.clear_caches()
