"""K24: rules that freeze the wrong layers, or nothing at all."""

from flax import nnx
import numpy as np
import optax
import pytest
import qwix

from tests import toys
from tests.cases import common
from tunix_progdistill import freezing
from tunix_progdistill.plan import stages

TWELVE = toys.Toy(layers=12, width=2, vocabulary=4)


def trained(**selector):
  paths = freezing.trainable_paths(TWELVE, stages.Stage(**selector))
  return {p for p in paths if p.startswith("layers/")}


def of(*layers):
  return {
      f"layers/{i}/linear/{leaf}" for i in layers for leaf in ("kernel", "bias")
  }


@pytest.mark.parametrize("rule", ["layers.1", "layers/1", "layers/1/.*"])
def test_k24_1_layer_1_is_not_10_to_19(rule):
  assert trained(trainable=(rule,)) == of(1)
  assert trained(frozen=(rule,)) == of(0, *range(2, 12))


def test_k24_1_other_selectors():
  assert trained(trainable=("layers/1.",)) == of(10, 11)
  assert trained(trainable=("layers/[01]",)) == of(0, 1)
  assert trained(trainable=("layers/.*/bias", "layers/3")) == {
      p for p in of(*range(12)) if p.endswith("bias") or "/3/" in p
  }
  assert trained(freeze_fraction=0.8) == of(9, 10, 11)
  assert trained(freeze_fraction=0.5) == of(*range(6, 12))
  assert trained(freeze_fraction=1.0) == of(11)
  assert trained(trainable_layers=2) == of(10, 11)


@pytest.mark.parametrize("field", ["trainable", "frozen"])
@pytest.mark.parametrize(
    "rule",
    ["layer/1", "layers/12", "layers/1/lin", r"model\.layers\.1\..*", "kernel"],
)
@pytest.mark.parametrize("place", [0, 1])
def test_k24_1_rule_without_a_match(field, rule, place):
  """Refused at construction, in a later stage too, with names to choose."""
  bad = stages.Stage(learning_rate=0.1, updates=1, **{field: (rule,)})
  good = stages.Stage(learning_rate=0.1, updates=1)
  plan = stages.StagePlan(stages=(bad,) if place == 0 else (good, bad))
  with pytest.raises(ValueError, match="match") as e:
    toys.trainer(student=TWELVE, teacher=toys.Toy(layers=12), progressive=plan)
  assert rule in str(e.value).replace("\\\\", "\\")
  assert "layers/" in str(e.value)
  assert f"stages[{place}]" in str(e.value)


@pytest.mark.parametrize(
    "selector",
    [
        {"frozen": (".*",)},
        {"frozen": ("layers", "embed", "final_norm")},
    ],
)
def test_k24_1_nothing_left_to_train(selector):
  with pytest.raises(ValueError, match="must train at least one parameter"):
    toys.trainer(
        student=TWELVE, teacher=toys.Toy(layers=12),
        progressive=common.one_stage(1, **selector),
    )


def test_k24_1_rules_of_a_lora_student():
  """A rule that names base weights alone trains no adapter: refused."""
  student = qwix.apply_lora_to_model(
      toys.Toy(layers=2),
      qwix.LoraProvider(module_path=".*linear", rank=2, alpha=2.0),
      np.zeros((1, 3), np.int32),
  )
  with pytest.raises(ValueError, match="match"):
    toys.trainer(
        student=student,
        progressive=common.one_stage(1, trainable=("embed",)),
    )
  trainer = toys.trainer(
      student=student,
      progressive=common.one_stage(1, trainable=("layers/1",)),
  )
  before = toys.parameters(student)
  # B is 0 at first, so that A does not move at once: two updates would.
  trainer.train(toys.batches(1))
  after = toys.parameters(student)
  moved = {n for n, v in before.items() if not np.array_equal(after[n], v)}
  assert moved
  assert all(n.startswith("layers/1/") and "lora" in n for n in moved)


# -- tied embeddings


def moved_by(student, teacher, plan, **kwargs):
  before = toys.parameters(student)
  trainer = toys.trainer(
      student=student, teacher=teacher, progressive=plan,
      optimizer=optax.adamw, **kwargs,
  )
  trainer.train(toys.batches(2))
  after = toys.parameters(student)
  return {n for n, v in before.items() if not np.array_equal(after[n], v)}


@pytest.mark.parametrize(
    "selector", [{"frozen": ("embed",)}, {"freeze_fraction": 0.4}]
)
def test_k24_2_tied_embedding_is_frozen_whole(selector):
  student = toys.Toy(seed=1)
  moved = moved_by(student, toys.Toy(), common.one_stage(2, 0.1, **selector))
  assert "embed/embedding" not in moved
  assert "layers/4/linear/kernel" in moved


def test_k24_2_untied_head_trains_on():
  student = toys.Toy(seed=1, tied=False)
  plan = common.one_stage(2, 0.1, freeze_fraction=0.4)
  moved = moved_by(student, toys.Toy(tied=False), plan)
  assert {"lm_head/kernel", "lm_head/bias", "final_norm/scale"} <= moved
  assert "embed/embedding" not in moved


class TiedByVariable(toys.Toy):
  """The head is a module of its own that holds the embedding's Variable.

  nnx names a shared Variable by the first path that leads to it, which here
  is the head's: `classifier` comes before `embed`.
  """

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self.classifier = nnx.Module()
    self.classifier.table = self.embed.embedding


def test_k24_2_tied_under_the_heads_name():
  """While layers are frozen, the embedding is, whatever its first name."""
  student = TiedByVariable(seed=1)
  moved = moved_by(
      student, toys.Toy(), common.one_stage(2, 0.1, freeze_fraction=0.4)
  )
  assert "layers/4/linear/kernel" in moved
  assert not {"classifier/table", "embed/embedding"} & moved


@pytest.mark.parametrize("name", ["classifier", "embed"])
def test_k24_2_either_name_freezes_both(name):
  """Frozen by either name: both fixed, or an error; never trained on."""
  student = TiedByVariable(seed=1)
  try:
    plan = common.one_stage(2, 0.1, frozen=(name,))
    moved = moved_by(student, toys.Toy(), plan)
  except ValueError as e:
    assert name in str(e)
    assert "classifier/table" in str(e)  # the name that it goes by
    return
  assert not {"classifier/table", "embed/embedding"} & moved


def test_k24_2_gemma3():
  """A known family: its only embedding is input and head at once."""
  student = toys.gemma3_model(seed=1, num_layers=3, num_embed=16)
  paths = freezing.trainable_paths(student, stages.Stage(freeze_fraction=0.5))
  assert "embedder/input_embedding" not in paths
  assert {p.split("/")[1] for p in paths if p.startswith("layers/")} == {
      "1", "2"
  }
  assert "final_norm/scale" in paths
  everything = freezing.trainable_paths(student, stages.Stage())
  assert "embedder/input_embedding" in everything
