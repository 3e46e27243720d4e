"""Loads the converted checkpoint into Tunix and proves that it works."""

import dataclasses
import math
import os

from flax import nnx
import jax
import jax.numpy as jnp
import text as text_lib
import tqdm
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma3 import params_safetensors
from tunix.sft import utils
import weights

# On news, with 8,192 pieces kept, it is about 55; a lost <bos> or a norm off by
# one gives hundreds or more. A smaller vocabulary needs a higher bound.
MAX_PERPLEXITY = 80.0

# Tunix's own name for what the checkpoint's config calls differently.
_SAME = {
    "num_layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "sliding_window_size": "sliding_window",
    "local_base_frequency": "rope_local_base_freq",
    "global_base_frequency": "rope_theta",
}


def model_config(config: weights.Config) -> gemma3.ModelConfig:
  """Tunix's Gemma 3 270M with the checkpoint's vocabulary, in float32.

  Raises:
    ValueError: If the checkpoint is of another Gemma 3.
  """
  result = dataclasses.replace(
      gemma3.ModelConfig.gemma3_270m(),
      num_embed=config.vocab_size,
      param_dtype=jnp.float32,
  )
  for ours, theirs in _SAME.items():
    want, got = getattr(result, ours), getattr(config, theirs)
    if want != got:
      raise ValueError(
          f"config.json: {theirs} must be {want}, as in Gemma 3 270M, got "
          f"{got}. Convert the {weights.PACKAGE} package."
      )
  return result


def load(
    folder: str | os.PathLike[str],
) -> tuple[gemma3.Gemma3, gemma3.ModelConfig]:
  """The model of a checkpoint folder, in float32.

  Returns:
    The model and its config.

  Raises:
    ValueError: If a tensor is absent, unknown or of the wrong shape, or if the
      checkpoint is of another Gemma 3.
  """
  config = model_config(weights.read_config(folder))
  model = params_safetensors.create_model_from_safe_tensors(
      os.fspath(folder), config, dtype=jnp.float32
  )
  for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    if not isinstance(leaf.get_value(), jax.Array):
      name = ".".join(map(str, path))
      raise ValueError(
          f"{folder}: the parameter {name} was not loaded. Delete the folder "
          "and convert again."
      )
  return model, config


@nnx.jit
def _negative_log_likelihood(
    model: nnx.Module, tokens: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """-sum log p(token | tokens before) over real tokens, and their number.

  Args:
    model: Takes (tokens, positions, cache, attention mask).
    tokens: int32 [B, T].
    mask: bool [B, T].

  Returns:
    float32 [] and int32 []. The first token of a window is no target.
  """
  positions = utils.build_positions_from_mask(mask)
  attention_mask = utils.make_causal_attn_mask(mask)
  logits, _ = model(tokens, positions, None, attention_mask)
  log_p = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
  log_p = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
  targets = mask[:, 1:]
  return -jnp.sum(log_p, where=targets), jnp.sum(targets)


def perplexity(
    model: nnx.Module,
    windows: text_lib.Windows,
    batch_size: int = 8,
) -> float:
  """exp of the mean negative log-likelihood over all real tokens.

  What does not fill the last batch is left out.

  Args:
    model: A causal language model of Tunix.
    windows: At least one batch.
    batch_size: B.

  Raises:
    ValueError: If one batch cannot be filled.
  """
  batches = text_lib.Batches(windows=windows, batch_size=batch_size)
  total, count = 0.0, 0
  bar = tqdm.tqdm(
      batches, desc="perplexity", unit="batch", disable=None
  )
  for batch in bar:
    nll, n = _negative_log_likelihood(model, batch.tokens, batch.input_mask)
    total += float(nll)
    count += int(n)
  return math.exp(total / count)


def check_perplexity(
    value: float, bound: float = MAX_PERPLEXITY
) -> None:
  """Stops a run whose teacher was converted wrongly.

  Raises:
    ValueError: If the perplexity is above the bound or not a number.
  """
  if not value <= bound:
    raise ValueError(
        f"the teacher's perplexity on held-out text must be <= {bound:g}, got "
        f"{value:.1f}: the conversion is wrong. Delete the cache and convert "
        "again."
    )
