"""Staged distillation of a tiny model, in under a minute, without downloads.

  python examples/quickstart.py

A random Gemma 3 of four layers is the teacher; the student starts as its first
and last layers. Every batch is random tokens: what is learned is the teacher.
"""

from flax import nnx
import numpy as np
import optax
from tunix.distillation import distillation_trainer
from tunix.models.gemma3 import model as gemma3

import tunix_progdistill as tpd

VOCABULARY, ROWS, LENGTH = 64, 8, 16


def teacher_model() -> gemma3.Gemma3:
  config = gemma3.ModelConfig(
      num_layers=4, num_embed=VOCABULARY, embed_dim=32, hidden_dim=64,
      num_heads=2, head_dim=16, num_kv_heads=1, sliding_window_size=16,
      param_dtype=np.float32,
  )
  model = gemma3.Gemma3(config, rngs=nnx.Rngs(0))
  # Fresh Gemma FFN kernels are zero, and its embedding is tiny: make the
  # teacher say something.
  rng = np.random.default_rng(0)
  for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    value = variable.get_value()
    if value.ndim >= 2:
      scale = 0.3 if "embedder" in path else value.shape[-2] ** -0.5
      new = (scale * rng.normal(size=value.shape)).astype(np.float32)
      nnx.update(model, nnx.from_flat_state([(path, variable.replace(new))]))
  return model


def batches(number: int, seed: int) -> list[distillation_trainer.TrainingInput]:
  rng = np.random.default_rng(seed)
  return [
      distillation_trainer.TrainingInput(
          input_tokens=rng.integers(0, VOCABULARY, (ROWS, LENGTH), np.int32),
          input_mask=np.ones((ROWS, LENGTH), np.int32),
      )
      for _ in range(number)
  ]


def main() -> None:
  teacher = teacher_model()
  student = tpd.students.from_layers(teacher, (0, 3))
  plan = tpd.StagePlan(
      stages=(
          tpd.Stage(freeze_fraction=0.8, updates=40, learning_rate=1e-2),
          tpd.Stage(freeze_fraction=0.5, updates=40, learning_rate=5e-3),
          tpd.Stage(updates=40, learning_rate=1e-3),
      ),
      temperature=tpd.anneal(3.0, 1.0, "linear"),
      alpha=1.0,
  )
  trainer = tpd.ProgressiveDistillationTrainer(
      student,
      teacher,
      tpd.ProgressiveLogitStrategy(
          tpd.causal_lm.forward,
          tpd.causal_lm.forward,
          tpd.causal_lm.next_token_labels,
      ),
      optax.adamw,
      tpd.TrainingConfig(eval_every_n_steps=40, progressive=plan),
  )
  trainer.train(batches(120, seed=1), batches(4, seed=2))
  kl = trainer.metrics_logger.get_metric_history(
      "", "distill/kl_div_tau1", "eval"
  )
  print(
      f"{tpd.students.num_parameters(teacher):,} -> "
      f"{tpd.students.num_parameters(student):,} parameters"
  )
  for update, value in zip((0, 40, 80, 120), kl, strict=True):
    print(f"update {update:3d}: held-out KL {value:.4f} nats")


if __name__ == "__main__":
  main()
