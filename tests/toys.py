"""Tiny models, batches and plans that the tests share."""

from collections.abc import Callable
import pathlib
from typing import Any

from flax import nnx
import jax.numpy as jnp
import numpy as np
from tunix.distillation import distillation_trainer
from tunix.models.gemma3 import model as gemma3
from tunix.sft import peft_trainer

import tunix_progdistill as tpd
from tunix_progdistill.families import causal_lm

VOCABULARY = 16
F1_TEACHER, F1_STUDENT = [2.0, 0.0, -1.0], [0.0, 1.0, 0.0]
F1_KL, F2_KL = 0.91298290, 0.98257663  # F2 has the roles swapped
F1_CE = 1.55144471  # at label 0


class Block(nnx.Module):
  """A residual layer, with dropout if asked for."""

  def __init__(self, width: int, dropout: float, rngs: nnx.Rngs):
    self.linear = nnx.Linear(width, width, rngs=rngs)
    self.dropout = nnx.Dropout(dropout, rngs=rngs)

  def __call__(self, x):
    return x + self.dropout(jnp.tanh(self.linear(x)))


class Toy(nnx.Module):
  """Embedding, layers, norm, head (tied unless told otherwise)."""

  def __init__(
      self, *, seed: int = 0, vocabulary: int = VOCABULARY, width: int = 8,
      layers: int = 5, tied: bool = True, dropout: float = 0.0,
  ):
    rngs = nnx.Rngs(seed)
    self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
    self.layers = nnx.List(
        [Block(width, dropout, rngs) for _ in range(layers)]
    )
    self.final_norm = nnx.LayerNorm(width, rngs=rngs)
    self.lm_head = (
        None if tied else nnx.Linear(width, vocabulary, rngs=rngs)
    )

  def __call__(self, tokens):
    x = self.embed(tokens)
    for layer in self.layers:
      x = layer(x)
    x = self.final_norm(x)
    return self.embed.attend(x) if self.lm_head is None else self.lm_head(x)


class Table(nnx.Module):
  """Logits by lookup: the token is the row. For cases with given logits."""

  def __init__(self, rows):
    self.rows = nnx.Param(jnp.asarray(rows, jnp.float32))

  def __call__(self, tokens):
    return self.rows[...][tokens]


def forward(model, input_tokens, input_mask, **_):
  del input_mask
  return model(input_tokens)


def identity_labels(input_tokens, input_mask, **_):
  """Every valid position has label 0."""
  return jnp.where(input_mask != 0, jnp.zeros_like(input_tokens), -1)


def strategy(**kwargs: Any) -> tpd.ProgressiveLogitStrategy:
  labels_fn = kwargs.pop("labels_fn", causal_lm.next_token_labels)
  return tpd.ProgressiveLogitStrategy(forward, forward, labels_fn, **kwargs)


def batch(tokens, mask=None) -> distillation_trainer.TrainingInput:
  tokens = np.asarray(tokens, np.int32)
  if mask is None:
    mask = np.ones_like(tokens)
  return distillation_trainer.TrainingInput(
      input_tokens=tokens, input_mask=np.asarray(mask, np.int32)
  )


def batches(
    number: int, *, rows: int = 4, length: int = 6, seed: int = 0,
    vocabulary: int = VOCABULARY, ragged: bool = False,
) -> list[distillation_trainer.TrainingInput]:
  """Random batches; `ragged` pads rows to random lengths."""
  rng = np.random.default_rng(seed)
  out = []
  for _ in range(number):
    mask = np.ones((rows, length), np.int32)
    if ragged:
      lengths = rng.integers(2, length + 1, rows)
      mask = (np.arange(length) < lengths[:, None]).astype(np.int32)
    out.append(batch(rng.integers(0, vocabulary, (rows, length)), mask))
  return out


def plan(*, updates=(2, 2, 2), rate: float = 1e-2, **kwargs) -> tpd.StagePlan:
  """80 %, 50 % and 0 % frozen, with rates in ratio 10 : 5 : 1."""
  return tpd.StagePlan(
      stages=tuple(
          tpd.Stage(freeze_fraction=f, updates=n, learning_rate=rate * r)
          for f, n, r in zip(
              (0.8, 0.5, 0.0), updates, (1.0, 0.5, 0.1), strict=True
          )
      ),
      **kwargs,
  )


def config(progressive: Any, **kwargs: Any) -> tpd.TrainingConfig:
  kwargs.setdefault("eval_every_n_steps", 1000)
  return tpd.TrainingConfig(progressive=progressive, **kwargs)


def trainer(
    *, student=None, teacher=None, optimizer: Any = None,
    progressive: Any = None, strategy_fn: Callable[[], Any] = strategy,
    **kwargs: Any,
) -> tpd.ProgressiveDistillationTrainer:
  """A trainer over toys; keywords go to `TrainingConfig`."""
  import optax  # pylint: disable=g-import-not-at-top

  return tpd.ProgressiveDistillationTrainer(
      Toy(seed=1) if student is None else student,
      Toy(seed=0) if teacher is None else teacher,
      strategy_fn(),
      optax.adamw if optimizer is None else optimizer,
      config(plan() if progressive is None else progressive, **kwargs),
  )


def stock(
    *, student=None, teacher=None, optimizer: Any = None,
    strategy_fn: Callable[[], Any] = strategy,
    kind: type = distillation_trainer.DistillationTrainer, **kwargs: Any,
) -> distillation_trainer.DistillationTrainer:
  """Tunix's own trainer over toys; keywords go to its `TrainingConfig`."""
  import optax  # pylint: disable=g-import-not-at-top

  kwargs.setdefault("eval_every_n_steps", 1000)
  return kind(
      Toy(seed=1) if student is None else student,
      Toy(seed=0) if teacher is None else teacher,
      strategy_fn(),
      optax.set_to_zero() if optimizer is None else optimizer,
      distillation_trainer.TrainingConfig(**kwargs),
  )


def hooked(
    *, optimizer: Any = None, progressive: Any = None, **kwargs: Any
) -> distillation_trainer.DistillationTrainer:
  """Tunix's own trainer with a hook attached; keywords as in `trainer`."""
  import optax  # pylint: disable=g-import-not-at-top

  made = stock(**kwargs)
  hook = tpd.ProgressiveFreezingHook(
      plan() if progressive is None else progressive,
      optimizer=optax.adamw if optimizer is None else optimizer,
  ).attach(made)
  # Where the tests look for it after the run, which detaches.
  vars(made)["engine"] = hook.engine
  return made


def plain(**kwargs: Any) -> peft_trainer.PeftTrainer:
  """Tunix's trainer without a teacher, over a Gemma 3; its own loss."""
  import optax  # pylint: disable=g-import-not-at-top

  kwargs.setdefault("eval_every_n_steps", 2)
  optimizer = kwargs.pop("optimizer", optax.set_to_zero())
  trainer = peft_trainer.PeftTrainer(
      kwargs.pop("model", None) or gemma3_model(seed=1), optimizer,
      peft_trainer.TrainingConfig(**kwargs),
  )

  def inputs(batch):
    mask = batch.input_mask != 0
    return {
        "input_tokens": batch.input_tokens, "input_mask": mask,
        "positions": jnp.cumsum(mask, axis=-1) - 1,
        "attention_mask": jnp.tril(
            jnp.ones((mask.shape[-1],) * 2, bool)
        )[None] & mask[:, None, :],
    }

  return trainer.with_gen_model_input_fn(inputs)


def saved(root: pathlib.Path) -> pathlib.Path:
  """Where a run in `root` has its checkpoints; a hook's are one below."""
  below = root / "progressive"
  return below if below.exists() else root


def files(root: pathlib.Path) -> list[pathlib.Path]:
  """Every file below `root`."""
  return [path for path in root.rglob("*") if path.is_file()]


def history(trainer_, name: str, mode: str = "train") -> np.ndarray:
  """Everything that was logged under `name`."""
  return trainer_.metrics_logger.get_metric_history("", name, mode)


def parameters(model: nnx.Module) -> dict[str, np.ndarray]:
  """Copies of all parameters by path."""
  return {
      "/".join(map(str, path)): np.array(variable.get_value())
      for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
  }


def gemma3_config(**kwargs: Any) -> gemma3.ModelConfig:
  fields = {
      "num_layers": 6, "num_embed": 64, "embed_dim": 16, "hidden_dim": 32,
      "num_heads": 2, "head_dim": 8, "num_kv_heads": 1,
      "sliding_window_size": 8, "local_base_frequency": 10_000,
      "global_base_frequency": 1_000_000, "param_dtype": jnp.float32,
  }
  return gemma3.ModelConfig(**(fields | kwargs))


def gemma3_model(*, seed: int = 0, **kwargs: Any) -> gemma3.Gemma3:
  """A Gemma 3 whose FFN kernels, which start at zero, are filled."""
  model = gemma3.Gemma3(gemma3_config(**kwargs), rngs=nnx.Rngs(seed))
  rng = np.random.default_rng(seed)
  for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    if "mlp" in path:
      shape = variable.get_value().shape
      value = rng.normal(size=shape) * shape[0] ** -0.5
      nnx.update(
          model,
          nnx.from_flat_state(
              [(path, variable.replace(jnp.asarray(value, jnp.float32)))]
          ),
      )
  return model


def one_hot(tokens):
  """Next-token one-hot rows, as a Tunix script makes them."""
  import jax  # pylint: disable=g-import-not-at-top

  return jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), VOCABULARY)
