"""The wiring of a Tunix language model for next-token distillation.

`forward` and `next_token_labels` are a strategy's `student_forward_fn`,
`teacher_forward_fn` and `labels_fn` for any model with Tunix's call
`(tokens, positions, cache, attention_mask) -> (logits, cache)`:

  ProgressiveLogitStrategy(forward, forward, next_token_labels)

`hidden` is `forward` without the output head, for a loss that never makes the
logits:

  ProgressiveLogitStrategy(forward, forward, next_token_labels,
                           student_hidden_fn=hidden, teacher_hidden_fn=hidden)
"""

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int
from tunix.sft import utils as sft_utils

from tunix_progdistill.families import heads


def forward(
    model: nnx.Module,
    input_tokens: Int[Array, "B T"],
    input_mask: Int[Array, "B T"] | Bool[Array, "B T"],
    loss_mask: Array | None = None,
) -> Float[Array, "B T V"]:
  """Logits at every position, causal, padding on either side.

  Positions count from the first valid token, so that a row gives the same
  logits padded left, padded right and unpadded.

  Args:
    model: a Tunix language model.
    input_tokens: token ids.
    input_mask: non-zero where a token is valid.
    loss_mask: taken for `next_token_labels`; the model does not see it.
  """
  del loss_mask
  mask = jnp.asarray(input_mask) != 0
  logits, _ = model(
      input_tokens,
      sft_utils.build_positions_from_mask(mask),
      None,
      sft_utils.make_causal_attn_mask(mask),
  )
  return logits


def hidden(
    model: nnx.Module,
    input_tokens: Int[Array, "B T"],
    input_mask: Int[Array, "B T"] | Bool[Array, "B T"],
    loss_mask: Array | None = None,
) -> Float[Array, "B T D"]:
  """What the model's output head turns into the logits of `forward`.

  For a strategy's `student_hidden_fn` and `teacher_hidden_fn`.

  Args:
    model: a Tunix language model.
    input_tokens: token ids.
    input_mask: non-zero where a token is valid.
    loss_mask: taken for `next_token_labels`; the model does not see it.

  Raises:
    ValueError: the model has no final norm of Tunix's name.
  """
  return heads.hidden_states(
      model, lambda model: forward(model, input_tokens, input_mask, loss_mask)
  )


def next_token_labels(
    input_tokens: Int[Array, "B T"],
    input_mask: Int[Array, "B T"] | Bool[Array, "B T"],
    loss_mask: Array | None = None,
) -> Int[Array, "B T"]:
  """The id that each position must predict, or -1 where it must not.

  The logits at t are judged by the token at t + 1; the last position has no
  target.

  Args:
    input_tokens: token ids.
    input_mask: non-zero where a token is valid.
    loss_mask: non-zero at the *tokens* that are targets (the answer, not the
      prompt); None for all valid ones.

  >>> tokens = jnp.array([[5, 6, 7, 0]])
  >>> next_token_labels(tokens, tokens != 0).tolist()
  [[6, 7, -1, -1]]
  """
  mask = jnp.asarray(input_mask) != 0
  target = mask if loss_mask is None else mask & (jnp.asarray(loss_mask) != 0)
  ahead = lambda x, fill: jnp.concatenate(
      [x[:, 1:], jnp.full_like(x[:, :1], fill)], axis=1
  )
  counts = mask & ahead(target, False)
  ids = ahead(jnp.asarray(input_tokens), 0)
  return jax.lax.select(counts, ids, jnp.full_like(ids, -1))
