"""Tiny models of all families, by their config.json, and their folders."""

import contextlib
import json
import pathlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from tunix_progdistill import families
from tunix_progdistill import weights
from tunix_progdistill.families import causal_lm
from tunix_progdistill.weights import loaded

VOCABULARY = 64
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}
_GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 5}
_FUSED = {"num_key_value_heads": 4}
_LLAMA31 = {
    "rope_theta": 10_000.0, "max_position_embeddings": 64,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    },
}
_PATTERN4 = ["sliding_attention", "sliding_attention", "full_attention"]

# name -> what differs from the common sizes
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma"},
    "gemma-fused": {"model_type": "gemma", **_FUSED},
    "gemma2": {"model_type": "gemma2", **_GEMMA},
    "gemma2-fused": {"model_type": "gemma2", **_GEMMA, **_FUSED},
    "gemma3": {
        "model_type": "gemma3_text", **_GEMMA, "num_hidden_layers": 7,
        "rope_theta": 2e6, "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3-fused": {"model_type": "gemma3_text", **_GEMMA, **_FUSED},
    "gemma4": {
        "model_type": "gemma4_text", "num_hidden_layers": 3,
        "layer_types": _PATTERN4, "sliding_window": 5, "global_head_dim": 16,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
    },
    "gemma4-one-key": {
        "model_type": "gemma4_text", "num_hidden_layers": 3,
        "layer_types": _PATTERN4, "sliding_window": 5, "global_head_dim": 16,
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4-per-layer": {
        "model_type": "gemma4_text", "num_hidden_layers": 6,
        "layer_types": _PATTERN4 * 2, "sliding_window": 5,
        "global_head_dim": 16, "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    "llama3": {"model_type": "llama", "rope_theta": 10_000.0},
    "llama3-tied": {
        "model_type": "llama", "tie_word_embeddings": True,
        "rope_theta": 500_000.0, "rms_norm_eps": 1e-5,
    },
    "llama3.1": {"model_type": "llama", **_LLAMA31},
    "qwen2": {"model_type": "qwen2", "rope_theta": 10_000.0},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "rope_theta": 10_000.0, "head_dim": 16},
    "qwen3-tied": {
        "model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16,
    },
}
TOKENS = np.random.default_rng(0).integers(
    3, VOCABULARY, (2, 14)
).astype(np.int32)


def config(name: str, **changes: Any) -> dict[str, Any]:
  """The config.json of one of `CONFIGS`."""
  return _SIZES | CONFIGS[name] | changes


def model(raw: dict[str, Any], *, dtype: Any = jnp.float32, seed: int = 0):
  """A model of a config.json with weights that make every part count."""
  family, text = families.of_config(raw)
  made = family.model_class()(
      family.hf.config_from_hf(text, dtype), rngs=nnx.Rngs(0)
  )
  rng = np.random.default_rng(seed)
  filled = []
  for path, variable in nnx.to_flat_state(nnx.state(made, nnx.Param)):
    old = variable.get_value()
    small = "norm" in str(path) or "scale" in str(path)
    value = rng.normal(size=old.shape) * (0.1 if small else 0.3)
    base = np.asarray(old, np.float64) if small else 0
    filled.append(
        (path, variable.replace(jnp.asarray(base + value, dtype)))
    )
  nnx.update(made, nnx.from_flat_state(filled))
  return made


def logits(of: nnx.Module) -> np.ndarray:
  with families.tracing(of):
    return np.asarray(
        jax.jit(
            lambda state: causal_lm.forward(
                nnx.merge(nnx.graphdef(of), state),
                TOKENS, np.ones_like(TOKENS),
            )
        )(nnx.state(of)), np.float32,
    )


def source(raw: dict[str, Any], **changes: Any) -> loaded.Loaded:
  """A `Loaded` without a tokenizer."""
  fields = {
      "model": None, "family": None, "model_config": None, "hf_config": raw,
      "tokenizer": None,
  }
  return loaded.Loaded(**(fields | changes))


def write(
    folder: pathlib.Path, name: str, *, dtype: Any = jnp.float32,
    **changes: Any
) -> nnx.Module:
  """Exports a tiny model into `folder`; gives the model."""
  raw = config(name, **changes)
  made = model(raw, dtype=dtype)
  weights.export(made, folder, loaded=source(raw))
  return made


@contextlib.contextmanager
def edited(folder: pathlib.Path, file: str = "model.safetensors"):
  """The tensors of a file, to be changed in place."""
  tensors = safetensors.numpy.load_file(folder / file)
  yield tensors
  safetensors.numpy.save_file(tensors, folder / file)


def edit_config(folder: pathlib.Path, **changes: Any) -> None:
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))
