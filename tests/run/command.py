"""Tiny checkpoints, text and YAMLs for runs of the whole command."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import tokenizers

from tests.weights import tiny
from tunix_progdistill import families
from tunix_progdistill import weights

WORDS = (
    "the", "old", "ship", "left", "before", "rain", "came", "and", "nobody",
    "saw", "it", "go",
)
PIECES = ["<pad>", "<eos>", "<bos>", *WORDS]


def tokenizer(folder: pathlib.Path) -> weights.Tokenizer:
  """A word-level tokenizer whose special ids are those of `tests.weights`."""
  folder.mkdir(parents=True, exist_ok=True)
  made = tokenizers.Tokenizer(
      tokenizers.models.WordLevel(
          {p: i for i, p in enumerate(PIECES)}, unk_token="<pad>"
      )
  )
  made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  made.add_special_tokens(["<pad>", "<eos>", "<bos>"])
  made.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps({
      "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
  }))
  return weights.load_tokenizer(folder)


def checkpoint(folder: pathlib.Path, name: str, **changes) -> pathlib.Path:
  """A Hugging Face folder of one of `tiny.CONFIGS`, with a tokenizer."""
  raw = tiny.config(name, **changes)
  model = tiny.model(raw)
  family = families.of(model)
  weights.export(
      model, folder / "teacher",
      loaded=weights.Loaded(
          model=model, family=family, model_config=model.config,
          hf_config=raw, tokenizer=tokenizer(folder / "tokenizer"),
      ),
  )
  return folder / "teacher"


def texts(folder: pathlib.Path, number: int = 30) -> pathlib.Path:
  """Documents of the tokenizer's words."""
  folder.mkdir(parents=True, exist_ok=True)
  for i in range(number):
    words = np.random.default_rng(i).choice(WORDS, size=25)
    (folder / f"{i:02}.txt").write_text(" ".join(words))
  return folder


def config(folder: pathlib.Path, layers, **extra) -> pathlib.Path:
  """The YAML of a run of three stages of four updates each."""
  body = {
      "model_config": {
          "model_source": "local", "model_path": str(folder / "teacher"),
          "layers": list(layers),
      },
      "data_source": "text",
      "data_directory": str(texts(folder / "text")),
      "batch_size": 4, "max_target_length": 12, "num_train_epochs": 2,
      "data_config": {"eval_fraction": 0.2},
      "run_directory": str(folder / "run"),
      "training_config": {
          "eval_every_n_steps": 5,
          "checkpointing_options": {
              "save_interval_steps": 2, "max_to_keep": 2,
          },
      },
      "progressive": {
          "temperature": {"start": 3.0, "end": 1.0, "shape": "linear"},
          "alpha": 1.0, "max_grad_norm": 1.0,
          "stages": [
              {"freeze_fraction": 0.8, "updates": 4, "learning_rate": 3e-3},
              {"freeze_fraction": 0.5, "updates": 4, "learning_rate": 2e-3},
              {"updates": 4, "learning_rate": 1e-3},
          ],
      },
      "prompts": ["the old ship"], "prompt_tokens": 4,
      **extra,
  }
  path = folder / "run.yaml"
  path.write_text(json.dumps(body))  # JSON is YAML
  return path


def world(folder: pathlib.Path, other: pathlib.Path) -> pathlib.Path:
  """The YAML of a run in `folder`, with the teacher that lies in `other`."""
  (folder / "teacher").symlink_to(other / "teacher")
  return config(folder, (0, 1, 3))


def held_out(folder: pathlib.Path) -> pathlib.Path:
  """Four documents that `config`'s own text does not hold."""
  for file in sorted(texts(folder, 34).iterdir())[:30]:
    file.unlink()
  return folder


def environment() -> dict[str, str]:
  """Of a process with one device; conftest's, with its cache, for the rest."""
  root = pathlib.Path(__file__).parent.parent.parent
  return os.environ | {
      "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "",
      "PYTHONPATH": str(root),
  }


def start(*words: str, log: pathlib.Path) -> subprocess.Popen:
  """The command, as a process of its own."""
  code = (
      "import sys; from tunix_progdistill.cli.main import main; "
      "sys.exit(main())"
  )
  with open(log, "a", encoding="utf-8") as out:
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=out, stderr=out,
        env=environment(),
    )


def records(folder: pathlib.Path, kind: str) -> list[dict]:
  """The lines of a kind in a run's metrics.jsonl."""
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [r for r in map(json.loads, lines) if r["kind"] == kind]
