"""`stock_script.py` with our trainer: the stages of the hook, as a config.

  python examples/stock_script_trainer.py

`enabled=False` in the section gives Tunix's own trainer back.
"""

import optax
import stock_script
from stock_script_hook import PLAN
from tunix.distillation import strategies

import tunix_progdistill as tpd


def main() -> None:
  strategy = strategies.LogitStrategy(
      stock_script.forward, stock_script.forward, stock_script.labels,
      temperature=2.0, alpha=0.5,
  )
  trainer = tpd.make_trainer(
      stock_script.model(seed=1, layers=2),
      stock_script.model(seed=0, layers=4), strategy, optax.adamw,
      tpd.TrainingConfig(
          eval_every_n_steps=20, max_steps=stock_script.UPDATES,
          progressive=tpd.ProgressiveConfig(plan=PLAN, enabled=True),
      ),
  )
  trainer.train(
      stock_script.batches(stock_script.UPDATES, seed=1),
      stock_script.batches(2, seed=2),
  )
  stock_script.report(trainer)


if __name__ == "__main__":
  main()
