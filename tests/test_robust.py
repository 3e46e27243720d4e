"""What an attack on the package found, by kind."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import resume_worker
from tests import toys
import tunix_progdistill as tpd

_RATE = 0.01


def _one_stage(updates=2, **kwargs):
  return tpd.StagePlan(
      stages=(tpd.Stage(updates=updates, learning_rate=_RATE, **kwargs),)
  )


def test_newer_unreadable_checkpoint_is_set_aside_and_saving_goes_on(tmp_path):
  """Orbax writes nothing at or below its latest step."""
  first = resume_worker.make(tmp_path, 1)
  first.train(resume_worker.data(1))
  for file in (tmp_path / "checkpoints" / "6").rglob("*"):
    if file.is_file():
      file.write_bytes(b"")
  resumed = resume_worker.make(tmp_path, 1)
  assert resumed.train_steps == 5
  assert (tmp_path / "checkpoints" / "unreadable-6").is_dir()
  resumed.train(resume_worker.data(1))
  again = resume_worker.make(tmp_path, 1)
  assert again.train_steps == 6
  for name, value in toys.parameters(again.model).items():
    np.testing.assert_array_equal(value, toys.parameters(first.model)[name])


def test_half_deleted_checkpoint_is_passed_over(tmp_path):
  first = resume_worker.make(tmp_path, 1)
  first.train(resume_worker.data(1))
  (tmp_path / "checkpoints" / "6" / "_CHECKPOINT_METADATA").unlink()
  assert resume_worker.make(tmp_path, 1).train_steps == 5


def test_passing_read_error_is_not_a_bad_checkpoint(tmp_path, monkeypatch):
  """A file system that fails for a moment must not cost an update."""
  import orbax.checkpoint as ocp

  first = resume_worker.make(tmp_path, 1)
  first.train(resume_worker.data(1))

  def fail(*_, **__):
    raise OSError(5, "Input/output error")

  monkeypatch.setattr(ocp.CheckpointManager, "restore", fail)
  with pytest.raises(OSError, match="Input/output"):
    resume_worker.make(tmp_path, 1)
  monkeypatch.undo()
  assert resume_worker.make(tmp_path, 1).train_steps == 6


@pytest.mark.parametrize("accumulation", [1, 2])
def test_decay_mask_by_path_chooses_the_leaves_that_optax_would(accumulation):
  """Also after a stage has changed the groups."""

  def kernels(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(
            getattr(k, "key", None) == "kernel" for k in path
        ),
        params,
    )

  factory = lambda lr: optax.adamw(lr, weight_decay=0.5, mask=kernels)
  plan = tpd.StagePlan(
      stages=(
          # Rate 0: both runs come to the second stage with the same weights.
          tpd.Stage(trainable_layers=2, updates=1, learning_rate=0.0),
          tpd.Stage(updates=1, learning_rate=_RATE),
      )
  )
  decayed, plain = (
      toys.trainer(
          progressive=plan, optimizer=o,
          gradient_accumulation_steps=accumulation,
      )
      for o in (factory, lambda lr: optax.adamw(lr, weight_decay=0.0))
  )
  for trainer in (decayed, plain):
    trainer.train(toys.batches(2 * accumulation))
  others = toys.parameters(plain.model)
  for name, value in toys.parameters(decayed.model).items():
    moved = not np.allclose(value, others[name], atol=1e-5)
    assert moved == name.endswith("kernel"), name


def test_factory_with_a_rate_of_its_own_is_refused():
  with pytest.raises(ValueError, match="must use the learning rate"):
    toys.trainer(optimizer=lambda lr: optax.sgd(1e-3))


class Normed(nnx.Module):
  """A student with batch statistics."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(toys.VOCABULARY, 8, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.head = nnx.Linear(8, toys.VOCABULARY, rngs=rngs)

  def __call__(self, tokens):
    return self.head(self.norm(self.embed(tokens)))


def test_filler_leaves_batch_statistics_alone():
  statistics = []
  for accumulation in (1, 3):
    plan = tpd.StagePlan(stages=(tpd.Stage(learning_rate=0.0),))
    trainer = toys.trainer(
        student=Normed(), progressive=plan, optimizer=optax.sgd,
        gradient_accumulation_steps=accumulation,
    )
    trainer.train(toys.batches(4))
    statistics.append(np.array(trainer.model.norm.mean.get_value()))
  np.testing.assert_allclose(*statistics, atol=1e-6)


def test_numpy_scalars_are_numbers(tmp_path):
  """They must not fail at the first save, when the work is done."""
  trainer = toys.trainer(
      progressive=tpd.ProgressiveConfig(
          plan=_one_stage(
              updates=np.int64(2), temperature=np.float32(2.0),
              alpha=jnp.float32(0.5),
          ),
          max_grad_norm=np.float32(1.0),
      ),
      gradient_accumulation_steps=np.int64(2),
      checkpoint_root_directory=str(tmp_path),
      checkpointing_options=resume_worker.options(),
  )
  trainer.record_event("scale_rate", np.float32(0.5))
  trainer.train(toys.batches(4))
  assert (tmp_path / "2").is_dir()
  assert toys.history(trainer, "learning_rate") == pytest.approx(_RATE / 2)


def test_hook_that_sets_weights(monkeypatch):
  """Its arrays, jax or numpy, are copied before they are donated."""
  trainer = toys.trainer(progressive=_one_stage(updates=4))
  kept = jnp.ones_like(trainer.model.final_norm.scale.get_value())
  values = [kept, kept, np.asarray(kept), kept]

  def batches():
    for value, batch in zip(values, toys.batches(4), strict=True):
      trainer.model.final_norm.scale.set_value(value)
      yield batch

  trainer.train(batches())
  np.testing.assert_array_equal(kept, np.ones(8))
  assert trainer.engine.compiles == (1,)


def test_schedule_is_judged_within_the_run_only():
  """tau = 3 - 0.02 u is fine for 100 updates."""
  plan = tpd.StagePlan(
      stages=(tpd.Stage(learning_rate=_RATE),),
      temperature=lambda u: 3.0 - 0.02 * u,
  )
  assert plan.resolve(max_steps=100).scalars(99).temperature > 1.0
  with pytest.raises(ValueError, match="at update 1000: temperature"):
    plan.resolve()


def test_events_without_effect_are_refused():
  trainer = toys.trainer(progressive=_one_stage())
  with pytest.raises(ValueError, match="must not be advance in the last"):
    trainer.record_event("advance")
  bare = toys.trainer(
      progressive=tpd.StagePlan(stages=(tpd.Stage(updates=1),)),
      optimizer=optax.sgd(0.1),
  )
  with pytest.raises(ValueError, match="must not be scale_rate"):
    bare.record_event("scale_rate", 0.5)


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps"),
        ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps"),
        ({"eval_every_n_steps": 0}, "eval_every_n_steps"),
        ({"eval_every_n_steps": None}, "eval_every_n_steps"),
        ({"max_steps": "3"}, "max_steps"),
        ({"checkpoint_root_directory": ""}, "checkpoint_root_directory"),
        ({"student": "x"}, "student_model"),
        ({"teacher": "x"}, "teacher_model"),
        ({"strategy_fn": lambda: "x"}, "strategy"),
        ({"optimizer": "adamw"}, "optimizer"),
    ],
)
def test_trainer_refuses(kwargs, field):
  with pytest.raises(ValueError, match=f"^{field} must ") as e:
    toys.trainer(**kwargs)
  assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, "plan must hold stages"),
        ({"stages": [{"freeze": 0.5}]}, r"stages\[0\] must hold known keys"),
        ({"stages": [{"updates": 0}]}, r"stages\[0\]\.updates must be"),
        ({"stages": [{}], "alpa": 1}, "progressive must hold known keys"),
        ({"plan": {"stages": [{}], "x": 1}}, "plan must hold known keys"),
        ({"stages": [{}], "max_grad_norm": "1"}, r"max_grad_norm must be > 0"),
        ({"stages": [{}], "updates_per_epoch": 2.5}, "updates_per_epoch must"),
        ({"stages": [{}], "updates_per_epoch": []}, "updates_per_epoch must"),
        ({"stages": [{"trainable": 5}]}, "trainable must hold at least one"),
        (7, "progressive must be a StagePlan"),
    ],
)
def test_section_refuses(section, words):
  with pytest.raises(ValueError, match=words) as e:
    toys.config(section)
  assert "\n" not in str(e.value)


@pytest.mark.parametrize("layers", [0, None, "01", (), (0.5,), (9,), (-1,)])
def test_from_layers_refuses(layers):
  with pytest.raises(ValueError, match=r"^layers(\[0\])? must"):
    tpd.students.from_layers(toys.Toy(), layers)


def test_lora_student_with_dropout_resumes(tmp_path):
  """Dropout keys are saved beside the adapters."""
  import qwix

  def student():
    provider = qwix.LoraProvider(module_path=".*linear", rank=2, alpha=2.0)
    return qwix.apply_lora_to_model(
        toys.Toy(seed=1, dropout=0.3), provider, jnp.ones((1, 4), jnp.int32)
    )

  straight = resume_worker.make(tmp_path / "a", 1, student=student())
  straight.train(resume_worker.data(1))
  cut = resume_worker.make(tmp_path / "b", 1, student=student(), max_steps=3)
  cut.train(resume_worker.data(1))
  resumed = resume_worker.make(tmp_path / "b", 1, student=student())
  assert resumed.train_steps == 3
  resumed.train(resume_worker.data(1))
  expected = toys.parameters(straight.model)
  assert any("lora" in name for name in expected)
  for name, value in toys.parameters(resumed.model).items():
    np.testing.assert_array_equal(value, expected[name], err_msg=name)
