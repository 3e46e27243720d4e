"""`stock_script.py` with a hook: stages in Tunix's own trainer.

  python examples/stock_script_hook.py

The trainer is constructed as before. Its own optimizer is not used, and
`optax.set_to_zero()` keeps it from holding memory.
"""

import optax
import stock_script
from tunix.distillation import distillation_trainer
from tunix.distillation import strategies

import tunix_progdistill as tpd

PLAN = tpd.StagePlan(
    stages=(
        tpd.Stage(freeze_fraction=0.5, updates=30, learning_rate=1e-3),
        tpd.Stage(updates=30, learning_rate=3e-4),
    ),
    temperature=tpd.anneal(3.0, 1.0, "linear"),
)


def main() -> None:
  strategy = strategies.LogitStrategy(
      stock_script.forward, stock_script.forward, stock_script.labels,
      temperature=2.0, alpha=0.5,
  )
  trainer = distillation_trainer.DistillationTrainer(
      stock_script.model(seed=1, layers=2),
      stock_script.model(seed=0, layers=4), strategy, optax.set_to_zero(),
      distillation_trainer.TrainingConfig(
          eval_every_n_steps=20, max_steps=stock_script.UPDATES
      ),
  )
  hook = tpd.ProgressiveFreezingHook(PLAN, optimizer=optax.adamw)
  hook.attach(trainer)
  trainer.train(
      stock_script.batches(stock_script.UPDATES, seed=1),
      stock_script.batches(2, seed=2),
  )
  stock_script.report(trainer)


if __name__ == "__main__":
  main()
