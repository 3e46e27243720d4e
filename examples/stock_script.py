"""A plain Tunix distillation script; nothing of this package is in it.

  python examples/stock_script.py

A random Llama of four layers teaches one of two. `stock_script_swap.py`,
`stock_script_hook.py` and `stock_script_trainer.py` are this script with one
thing changed each: the three ways to opt in.
"""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tunix.distillation import distillation_trainer
from tunix.distillation import strategies
from tunix.models.llama3 import model as llama3
from tunix.sft import utils

VOCABULARY, UPDATES = 64, 60


def model(seed: int, layers: int) -> llama3.Llama3:
  config = llama3.ModelConfig(
      num_layers=layers, vocab_size=VOCABULARY, embed_dim=32, hidden_dim=64,
      num_heads=2, head_dim=16, num_kv_heads=1, rope_theta=1_000_000,
      norm_eps=1e-5,
  )
  made = llama3.Llama3(config, rngs=nnx.Rngs(seed))
  # Larger weights, so that a random model has something to say.
  nnx.update(made, jax.tree.map(lambda x: 3 * x, nnx.state(made)))
  return made


def batches(number: int, seed: int) -> list[distillation_trainer.TrainingInput]:
  rng = np.random.default_rng(seed)
  return [
      distillation_trainer.TrainingInput(
          input_tokens=rng.integers(0, VOCABULARY, (8, 16), np.int32),
          input_mask=np.ones((8, 16), np.int32),
      )
      for _ in range(number)
  ]


def forward(model, input_tokens, input_mask):
  mask = jnp.asarray(input_mask) != 0
  logits, _ = model(
      input_tokens, utils.build_positions_from_mask(mask), None,
      utils.make_causal_attn_mask(mask),
  )
  return logits[:, :-1]


def labels(input_tokens, input_mask):
  rows = jax.nn.one_hot(input_tokens[:, 1:], VOCABULARY)
  return rows * jnp.asarray(input_mask)[:, 1:, None]


def report(trainer: distillation_trainer.DistillationTrainer) -> None:
  losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
  for update in (1, len(losses) // 2, len(losses)):
    print(f"update {update:2d}: loss {losses[update - 1]:.4f}")


def main() -> None:
  strategy = strategies.LogitStrategy(
      forward, forward, labels, temperature=2.0, alpha=0.5
  )
  trainer = distillation_trainer.DistillationTrainer(
      model(seed=1, layers=2), model(seed=0, layers=4), strategy,
      optax.adamw(1e-3),
      distillation_trainer.TrainingConfig(
          eval_every_n_steps=20, max_steps=UPDATES
      ),
  )
  trainer.train(batches(UPDATES, seed=1), batches(2, seed=2))
  report(trainer)


if __name__ == "__main__":
  main()
