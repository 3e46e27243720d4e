"""Continues prompts greedily, for the eye."""

from collections.abc import Sequence
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from tunix_progdistill import families
from tunix_progdistill import modules
from tunix_progdistill.families import causal_lm


@functools.partial(nnx.jit, static_argnames=("length",))
def _greedy(
    model: nnx.Module, tokens: jax.Array, start: jax.Array, length: int
) -> jax.Array:
  """Fills tokens[0, start:length] with the most likely next token."""
  graph, state = nnx.split(model)

  def body(i, tokens):
    # Adapters write on their modules, which must be of the loop's own trace.
    inner = nnx.merge(graph, state)
    mask = jnp.arange(length)[None] < i
    with families.tracing(inner):
      logits = causal_lm.forward(inner, tokens, mask)
    return tokens.at[0, i].set(jnp.argmax(logits[0, i - 1]))

  return jax.lax.fori_loop(start, length, body, tokens)


def continuations(
    model: nnx.Module, tokenizer: Any, prompts: Sequence[str], new_tokens: int
) -> list[str]:
  """The text that `model` puts after each prompt; it ends at <eos>.

  Args:
    model: in any mode; it runs in eval mode.
    tokenizer: with `encode`, `decode`, `bos_id`, `eos_id` and `pad_id`.
    prompts: texts.
    new_tokens: at most so many for each.
  """
  out = []
  for prompt in prompts:
    ids = np.asarray(tokenizer.encode(prompt), np.int32)
    if tokenizer.bos_id is not None:
      ids = np.concatenate([[tokenizer.bos_id], ids]).astype(np.int32)
    # One compiled program for prompts of about the same length.
    length = -(-(len(ids) + new_tokens) // 16) * 16
    tokens = np.full((1, length), tokenizer.pad_id, np.int32)
    tokens[0, : len(ids)] = ids
    filled: Any = _greedy(  # type: ignore[call-arg]
        modules.evaluating(model), jnp.asarray(tokens), jnp.asarray(len(ids)),
        length,
    )
    new = np.asarray(filled)[0, len(ids) : len(ids) + new_tokens]
    ends = np.flatnonzero(new == tokenizer.eos_id)
    out.append(tokenizer.decode(new[: ends[0]] if len(ends) else new))
  return out
