"""Makes what the commands in the docs run on: a tiny teacher and some text.

  python examples/tiny/make.py tiny

writes tiny/text, 80 short documents, and tiny/teacher, a Llama of 4 layers x 32
that was trained on them for some seconds, as a Hugging Face checkpoint. Nothing
is downloaded, and every command works on them in seconds.
"""

import argparse
import dataclasses
import pathlib
import random

from flax import nnx
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from tunix.models.llama3 import model as llama3

import tunix_progdistill as tpd
from tunix_progdistill import families
from tunix_progdistill import weights

_SUBJECTS = ("The minister", "A farmer", "The old ship", "My neighbour",
             "The orchestra", "A clever fox", "The market", "Nobody")
_VERBS = ("saw", "left", "found", "sold", "heard", "forgot", "carried")
_OBJECTS = ("the harbour", "a letter", "two apples", "the answer", "a bridge",
            "the winter", "an empty house", "the last train")
_ENDS = ("in the morning.", "without a word.", "before the rain came.",
         "for the second time.", "and went home.")


def documents(number: int, seed: int = 0) -> list[str]:
  """Texts of eight sentences each."""
  choose = random.Random(seed).choice
  parts = (_SUBJECTS, _VERBS, _OBJECTS, _ENDS)
  return [
      " ".join(" ".join(map(choose, parts)) for _ in range(8))
      for _ in range(number)
  ]


def tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
  """A byte-level BPE of about 300 pieces."""
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False
  )
  made.decoder = tokenizers.decoders.ByteLevel()
  made.train_from_iterator(
      texts,
      tokenizers.trainers.BpeTrainer(
          vocab_size=320, special_tokens=["<s>", "</s>"], show_progress=False,
          initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      ),
  )
  return made


def train(
    model: nnx.Module, ids: np.ndarray, updates: int = 200, length: int = 32
) -> float:
  """Plain next-token training on random windows; returns the last loss."""
  optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
  lm = tpd.causal_lm

  @nnx.jit
  def step(model, optimizer, tokens):
    mask = jnp.ones_like(tokens)

    def loss_fn(model):
      with families.tracing(model):
        logits = lm.forward(model, tokens, mask)
      return optax.softmax_cross_entropy_with_integer_labels(
          logits[:, :-1], tokens[:, 1:]
      ).mean()

    loss, gradient = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradient)
    return loss

  rng, loss = np.random.default_rng(0), jnp.inf
  for _ in range(updates):
    starts = rng.integers(0, len(ids) - length, size=16)
    tokens = np.stack([ids[s : s + length] for s in starts]).astype(np.int32)
    loss = step(model, optimizer, jnp.asarray(tokens))
  return float(loss)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folder", type=pathlib.Path, help="where to")
  folder = parser.parse_args().folder
  texts = documents(80)
  (folder / "text").mkdir(parents=True, exist_ok=True)
  for i, text in enumerate(texts):
    (folder / "text" / f"{i:02}.txt").write_text(text, encoding="utf-8")
  pieces = tokenizer(texts)
  scratch = folder / "tokenizer"
  scratch.mkdir(exist_ok=True)
  pieces.save(str(scratch / "tokenizer.json"))
  (scratch / "tokenizer_config.json").write_text(
      '{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}'
  )
  config = llama3.ModelConfig(
      num_layers=4, vocab_size=pieces.get_vocab_size(), embed_dim=32,
      hidden_dim=64, num_heads=2, head_dim=16, num_kv_heads=1,
      rope_theta=10_000, norm_eps=1e-5,
  )
  model = llama3.Llama3(config, rngs=nnx.Rngs(0))
  ids = np.concatenate([[0, *pieces.encode(text).ids] for text in texts])
  loss = train(model, ids)
  weights.export(
      model, folder / "teacher",
      loaded=weights.Loaded(
          model=model, family=families.of(model), model_config=config,
          hf_config={}, tokenizer=weights.load_tokenizer(scratch),
      ),
  )
  size = dataclasses.asdict(config)
  print(f"{folder / 'teacher'}: {size['num_layers']} layers x "
        f"{size['embed_dim']}, {size['vocab_size']} pieces, loss {loss:.2f}")
  print(f"{folder / 'text'}: {len(texts)} documents")


if __name__ == "__main__":
  main()
