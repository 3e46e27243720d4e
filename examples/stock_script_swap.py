"""`stock_script.py` with one name changed: the strategy's.

  python examples/stock_script_swap.py

The same losses, from a loss that is several times faster and leaves padding
out. A temperature that anneals needs one more line, `strategy.bind(trainer)`.
"""

import optax
import stock_script
from tunix.distillation import distillation_trainer

import tunix_progdistill as tpd


def main() -> None:
  strategy = tpd.ProgressiveLogitStrategy(  # was: strategies.LogitStrategy
      stock_script.forward, stock_script.forward, stock_script.labels,
      temperature=2.0, alpha=0.5,
  )
  trainer = distillation_trainer.DistillationTrainer(
      stock_script.model(seed=1, layers=2),
      stock_script.model(seed=0, layers=4), strategy, optax.adamw(1e-3),
      distillation_trainer.TrainingConfig(
          eval_every_n_steps=20, max_steps=stock_script.UPDATES
      ),
  )
  trainer.train(
      stock_script.batches(stock_script.UPDATES, seed=1),
      stock_script.batches(2, seed=2),
  )
  stock_script.report(trainer)


if __name__ == "__main__":
  main()
