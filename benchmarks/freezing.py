"""What a frozen layer saves, against Tunix's own trainer in the same process.

  python benchmarks/freezing.py [--rounds 10]

Gemma 3 of 8 layers x 256 (FFN 1024, vocabulary 2048), batch 4 x 128, AdamW.
Prints a table: FLOPs and temporary bytes of the compiled train step (the
teacher's forward pass is not in it), bytes of the optimizer's state, and the
median time of an update (teacher included) over interleaved rounds. All
ratios are to Tunix's trainer with everything trained. About two minutes on two
cores.
"""

import argparse
import dataclasses
import statistics
import time

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tunix.distillation import distillation_trainer
from tunix.distillation import strategies
from tunix.models.gemma3 import model as gemma3

import tunix_progdistill as tpd
from tunix_progdistill import causal_lm

LAYERS, WIDTH, FFN, VOCABULARY, ROWS, LENGTH = 8, 256, 1024, 2048, 4, 128


@dataclasses.dataclass(kw_only=True)
class Row:
  """One variant: its costs, and how to run one update of it."""

  name: str
  flops: float
  optimizer_bytes: int
  temp_bytes: int
  update: object
  seconds: list[float] = dataclasses.field(default_factory=list)


def model(seed: int) -> gemma3.Gemma3:
  config = gemma3.ModelConfig(
      num_layers=LAYERS, num_embed=VOCABULARY, embed_dim=WIDTH, hidden_dim=FFN,
      num_heads=4, head_dim=64, num_kv_heads=1, sliding_window_size=512,
      param_dtype=jnp.float32,
  )
  return gemma3.Gemma3(config, rngs=nnx.Rngs(seed))


def batch() -> distillation_trainer.TrainingInput:
  rng = np.random.default_rng(0)
  return distillation_trainer.TrainingInput(
      input_tokens=rng.integers(0, VOCABULARY, (ROWS, LENGTH), np.int32),
      input_mask=np.ones((ROWS, LENGTH), np.int32),
  )


def one_hot_labels(input_tokens, input_mask):
  ids = causal_lm.next_token_labels(input_tokens, input_mask)
  return jax.nn.one_hot(ids, VOCABULARY)


def optimizer_bytes(optimizer: nnx.Optimizer) -> int:
  state = nnx.state(optimizer, nnx.optimizer.OptState)
  return sum(x.nbytes for x in jax.tree.leaves(state))


def tunix_row(name: str, optimizer: optax.GradientTransformation) -> Row:
  """Tunix's `DistillationTrainer` and `LogitStrategy`, as they come."""
  trainer = distillation_trainer.DistillationTrainer(
      model(1), model(0),
      strategies.LogitStrategy(
          causal_lm.forward, causal_lm.forward, one_hot_labels
      ),
      optimizer,
      distillation_trainer.TrainingConfig(eval_every_n_steps=10**6),
  )
  inputs = trainer._prepare_inputs(batch())  # pylint: disable=protected-access
  graph, state = nnx.split((trainer.model, trainer.optimizer))

  def step(state, inputs):
    student, opt = nnx.merge(graph, jax.tree.map(lambda x: x, state))
    out = trainer._train_step(student, opt, inputs)  # pylint: disable=protected-access
    return nnx.split((student, opt))[1], out

  compiled = jax.jit(step, donate_argnums=0).lower(state, inputs).compile()
  train_step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

  def update():
    jax.block_until_ready(train_step(trainer._prepare_inputs(batch())))  # pylint: disable=protected-access

  return Row(
      name=name, flops=compiled.cost_analysis()["flops"],
      optimizer_bytes=optimizer_bytes(trainer.optimizer),
      temp_bytes=compiled.memory_analysis().temp_size_in_bytes, update=update,
  )


def our_row(name: str, trainable_layers: int) -> Row:
  """`ProgressiveDistillationTrainer` in a stage of this many layers."""
  trainer = tpd.ProgressiveDistillationTrainer(
      model(1), model(0),
      tpd.ProgressiveLogitStrategy(
          causal_lm.forward, causal_lm.forward, causal_lm.next_token_labels
      ),
      optax.adamw,
      tpd.TrainingConfig(
          eval_every_n_steps=10**6,
          progressive=tpd.StagePlan(
              stages=(
                  tpd.Stage(
                      trainable_layers=trainable_layers, learning_rate=1e-4
                  ),
              )
          ),
      ),
  )
  train_step, _ = trainer.jit_train_and_eval_step()

  def update():
    jax.block_until_ready(train_step(trainer._prepare_inputs(batch())))  # pylint: disable=protected-access

  update()
  cost = trainer.engine.cost()
  return Row(
      name=name, flops=cost.flops, optimizer_bytes=cost.optimizer_bytes,
      temp_bytes=cost.temp_bytes, update=update,
  )


def zero_updates_below(frozen: int) -> optax.GradientTransformation:
  """Freezing as scripts do it: the updates of the first layers are zeroed."""

  def labels(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if any(
            isinstance(k, jax.tree_util.DictKey) and k.key in range(frozen)
            for k in path
        ) else "trained",
        params,
    )

  return optax.partition(
      {"trained": optax.adamw(1e-4), "frozen": optax.set_to_zero()}, labels
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=10)
  rounds = parser.parse_args().rounds
  rows = [
      tunix_row("Tunix, everything trained", optax.adamw(1e-4)),
      tunix_row("Tunix, updates of 6 layers zeroed", zero_updates_below(6)),
      our_row("everything trained", LAYERS),
      our_row("50 % frozen", 4),
      our_row("80 % frozen", 2),
  ]
  for _ in range(rounds):
    for row in rows:
      began = time.perf_counter()
      row.update()
      row.seconds.append(time.perf_counter() - began)
  base = rows[0]
  middle = lambda row: statistics.median(row.seconds[1:])
  print("| variant | FLOPs | optimizer state | temp memory | time |")
  print("|---|---|---|---|---|")
  for row in rows:
    print(
        f"| {row.name} | {row.flops / base.flops:.2f} "
        f"| {row.optimizer_bytes / 1e6:.1f} MB "
        f"| {row.temp_bytes / 1e6:.0f} MB "
        f"| {middle(row) / middle(base):.2f} |"
    )


if __name__ == "__main__":
  main()
