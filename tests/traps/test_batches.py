"""All of a batch reaches the model, whatever its type."""

import dataclasses

import flax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import toys
import tunix_progdistill as tpd


@flax.struct.dataclass
class Struct:
  """A user's batch, as a pytree."""

  input_tokens: np.ndarray
  input_mask: np.ndarray
  positions: np.ndarray
  example_ids: np.ndarray


@dataclasses.dataclass
class Plain:
  """A user's batch that is no pytree."""

  input_tokens: np.ndarray
  input_mask: np.ndarray
  positions: np.ndarray
  example_ids: np.ndarray


def _attributes(x):
  return {
      "input_tokens": x.input_tokens, "input_mask": x.input_mask,
      "positions": x.positions, "example_ids": x.example_ids,
  }


def _items(x):
  return {name: x[name] for name in _FIELDS}


def _mapping(x):
  """What a script does with the dicts that grain yields."""
  out = {**x}
  assert "positions" in x
  assert x.get("images") is None
  assert set(x.keys()) == set(_FIELDS)
  return out


_FIELDS = ("input_tokens", "input_mask", "positions", "example_ids")


def _trainer(seen):
  """A trainer whose models and mask depend on positions and example ids."""

  def forward(who):
    def call(model, input_tokens, input_mask, positions, example_ids):
      del input_mask
      seen.setdefault(who, set()).update(
          {"positions", "example_ids"}
          if positions.shape == input_tokens.shape
          and example_ids.shape == input_tokens.shape[:1]
          else set()
      )
      return model(input_tokens) * (1.0 + positions[..., None])

    return call

  strategy = tpd.ProgressiveLogitStrategy(
      forward("student"),
      forward("teacher"),
      lambda input_tokens, **_: jnp.zeros_like(input_tokens),
      temperature=1.0,
      alpha=1.0,
      loss_mask_fn=lambda input_tokens, example_ids, **_: jnp.broadcast_to(
          example_ids[:, None] == 7, input_tokens.shape
      ),
  )
  return toys.trainer(
      student=toys.Table([toys.F1_STUDENT]),
      teacher=toys.Table([toys.F1_TEACHER]),
      strategy_fn=lambda: strategy,
      optimizer=optax.sgd,
      progressive=tpd.StagePlan(
          stages=(tpd.Stage(updates=2),), learning_rate=0.0
      ),
  )


@pytest.mark.parametrize(
    ("kind", "reads"),
    [
        (Struct, _attributes),
        (Plain, _attributes),
        (dict, _items),
        (dict, _attributes),
        (dict, _mapping),
    ],
    ids=["struct", "dataclass", "dict-items", "dict-attributes", "dict"],
)
def test_every_field_reaches_both_models(kind, reads):
  """Trap 4: Tunix rebuilds the batch from tokens and mask alone."""
  seen = {}
  trainer = _trainer(seen)
  trainer.with_gen_model_input_fn(reads)
  positions = np.array([[0.0, 1.0], [5.0, 5.0]], np.float32)
  batch = kind(
      input_tokens=np.zeros((2, 2), np.int32),
      input_mask=np.ones((2, 2), np.int32),
      positions=positions,
      example_ids=np.array([7, 8], np.int32),
  )
  trainer.train([batch, batch], [batch])
  both = {"positions", "example_ids"}
  assert seen == {"student": both, "teacher": both}
  # Row 1 is masked by its example id; row 0 is scaled by its positions.
  kls = []
  for scale in (1.0, 2.0):
    t, s = (
        scale * np.array(x) - np.log(np.sum(np.exp(scale * np.array(x))))
        for x in (toys.F1_TEACHER, toys.F1_STUDENT)
    )
    kls.append(np.sum(np.exp(t) * (t - s)))
  for name, mode in (
      ("distill/kl_div", "train"), ("distill/kl_div_tau1", "eval")
  ):
    np.testing.assert_allclose(
        toys.history(trainer, name, mode)[0], np.mean(kls), rtol=1e-5
    )
    assert toys.history(trainer, "distill/valid_tokens", mode)[0] == 2


def test_dict_batch_without_any_function():
  """Trap 4: a dict of tokens and mask works as Tunix's own class does."""
  after = []
  for make in (
      lambda b: b,
      lambda b: {"input_tokens": b.input_tokens, "input_mask": b.input_mask},
  ):
    trainer = toys.trainer()
    trainer.train([make(b) for b in toys.batches(3)])
    after.append(toys.parameters(trainer.model))
  for path, value in after[0].items():
    np.testing.assert_array_equal(after[1][path], value, err_msg=path)
