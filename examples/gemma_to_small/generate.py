"""Continues a prompt greedily."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import vocabulary

import tunix_progdistill as tpd


@functools.partial(nnx.jit, static_argnames=("length",))
def _greedy(
    model: nnx.Module, tokens: jax.Array, start: jax.Array, length: int
) -> jax.Array:
  """Fills tokens[0, start:length] with the most likely next token."""

  def body(i, tokens):
    mask = jnp.arange(length)[None] < i
    logits = tpd.causal_lm.forward(model, tokens, mask)
    return tokens.at[0, i].set(jnp.argmax(logits[0, i - 1]))

  return jax.lax.fori_loop(start, length, body, tokens)


def continue_prompt(
    model: nnx.Module, tokenizer: vocabulary.Tokenizer, prompt: str,
    new_tokens: int = 20,
) -> str:
  """The text that `model` puts after `prompt`, on one line."""
  ids = np.concatenate([[tokenizer.bos_id], tokenizer.encode(prompt)])
  length = len(ids) + new_tokens
  tokens = np.full((1, length), tokenizer.pad_id, np.int32)
  tokens[0, : len(ids)] = ids
  out = _greedy(model, jnp.asarray(tokens), jnp.asarray(len(ids)), length)
  text = tokenizer.decode(np.asarray(out)[0, len(ids):])
  return text.replace("\n", " ")
