"""Peak memory of the first two training steps, against stock Tunix's.

  python benchmarks/memory.py [--dtype float32] [--output FILE]

Gemma 3 270M, its vocabulary of 262,144 whole, distilled into 6 of its layers:
batch 4 x 128, AdamW, random weights. Each variant runs in a process of its own:

  tunix            `DistillationTrainer` and `LogitStrategy`, one-hot labels
  logits           ours, everything trained
  fused            ours with fused_head=True, everything trained
  fused, stage 1   the same, 80 % of the layers frozen

The peak is VmHWM, set back once both models are loaded: they are in it, as is
all that constructing the trainer and two steps take. Prints a table, appends it
to --output, and ends with exit code 1 where a gate of GATES is missed. About
five minutes on two cores.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

from flax import nnx
import jax.numpy as jnp
import measure
import numpy as np
import optax
from tunix.distillation import distillation_trainer
from tunix.distillation import strategies
from tunix.models.gemma3 import model as gemma3

import tunix_progdistill as tpd
from tunix_progdistill import causal_lm as lm

ROWS, LENGTH, STEPS = 4, 128, 2
KEPT = (0, 3, 6, 9, 12, 17)
# variant -> greatest share of Tunix's peak.
GATES = {"fused": 0.6, "fused, stage 1": 0.35}
VARIANTS = ("tunix", "logits", *GATES)
HERE = pathlib.Path(__file__).parent


def models(dtype: str) -> tuple[gemma3.Gemma3, gemma3.Gemma3]:
  config = gemma3.ModelConfig.gemma3_270m()
  config.param_dtype = jnp.dtype(dtype)
  teacher = gemma3.Gemma3(config, rngs=nnx.Rngs(0))
  return tpd.students.from_layers(teacher, KEPT), teacher


def batches():
  rng = np.random.default_rng(0)
  for _ in range(STEPS):
    yield distillation_trainer.TrainingInput(
        input_tokens=rng.integers(0, 262_144, (ROWS, LENGTH), np.int32),
        input_mask=np.ones((ROWS, LENGTH), np.int32),
    )


def one_hot(input_tokens, input_mask):
  import jax  # pylint: disable=g-import-not-at-top

  ids = lm.next_token_labels(input_tokens, input_mask)
  return jax.nn.one_hot(ids, 262_144)


def trainer(variant: str, student, teacher):
  if variant == "tunix":
    return distillation_trainer.DistillationTrainer(
        student, teacher,
        strategies.LogitStrategy(lm.forward, lm.forward, one_hot),
        optax.adamw(1e-4),
        distillation_trainer.TrainingConfig(
            eval_every_n_steps=10**6, max_steps=STEPS
        ),
    )
  stage = tpd.Stage(
      freeze_fraction=0.8 if variant.endswith("stage 1") else 0.0,
      learning_rate=1e-4,
  )
  return tpd.ProgressiveDistillationTrainer(
      student, teacher,
      tpd.ProgressiveLogitStrategy(
          lm.forward, lm.forward, lm.next_token_labels,
          student_hidden_fn=lm.hidden, teacher_hidden_fn=lm.hidden,
      ),
      optax.adamw,
      tpd.TrainingConfig(
          eval_every_n_steps=10**6, max_steps=STEPS,
          progressive=tpd.ProgressiveConfig(
              plan=tpd.StagePlan(stages=(stage,)),
              fused_head=variant.startswith("fused"),
          ),
      ),
  )


def measured(variant: str, dtype: str) -> dict[str, float]:
  """Runs a variant in this process."""
  student, teacher = models(dtype)
  loaded = measure.resident("VmRSS")
  measure.reset_peak()
  began = time.perf_counter()
  trainer(variant, student, teacher).train(list(batches()))
  return {
      "loaded_bytes": loaded, "peak_bytes": measure.resident("VmHWM"),
      "wall_sec": time.perf_counter() - began,
  }


def in_own_process(variant: str, options) -> dict[str, float]:
  out = subprocess.run(
      [
          sys.executable, __file__, "--variant", variant, "--dtype",
          options.dtype,
      ],
      check=True, stdout=subprocess.PIPE, text=True,
  ).stdout
  return json.loads(out.splitlines()[-1])


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
  parser.add_argument(
      "--output", type=pathlib.Path, default=HERE / "results" / "memory.csv"
  )
  options = parser.parse_args()
  if options.variant:
    found = measured(options.variant, options.dtype)
    print(json.dumps(found))
    return 0
  rows = []
  for variant in VARIANTS:
    found = in_own_process(variant, options)
    base = rows[0]["peak_bytes"] if rows else found["peak_bytes"]
    rows.append({
        **measure.machine(), "dtype": options.dtype,
        "variant": variant, **found, "peak_ratio": found["peak_bytes"] / base,
    })
    print(
        f"{variant:16} loaded {found['loaded_bytes'] / 1e9:5.2f} GB   "
        f"peak {found['peak_bytes'] / 1e9:5.2f} GB   "
        f"{rows[-1]['peak_ratio']:.2f}x   {found['wall_sec']:.0f} s",
        flush=True,
    )
  measure.append(options.output, rows)
  failures = [
      f"{row['variant']}: peak {row['peak_ratio']:.3f}x, gate {gate}x"
      for row in rows
      if (gate := GATES.get(row["variant"])) and row["peak_ratio"] > gate
  ]
  print("\n" + ("\n".join(failures) or "Every gate holds."))
  return 1 if failures else 0


if __name__ == "__main__":
  sys.exit(main())
