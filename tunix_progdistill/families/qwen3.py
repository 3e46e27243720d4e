"""Qwen3: tied or separate head; Tunix's attention ignores its rope_theta."""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
from typing import Any

from flax import nnx

from tunix_progdistill.families import base
from tunix_progdistill.families import heads
from tunix_progdistill.families import hf
from tunix_progdistill.families import hf_config
from tunix_progdistill.families import llama3
from tunix_progdistill.families import quantised
from tunix_progdistill.families import qwen2
from tunix_progdistill.families import rope

_PACKAGE = "tunix.models.qwen3."
# What transformers takes where a field is absent.
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "vocab_size": 151_936, "hidden_size": 4096,
        "intermediate_size": 22_016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
        "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_bias": False,
    },
}


def _config_from_hf(raw: Mapping[str, Any], dtype: Any) -> Any:
  fields = hf_config.Fields(raw, DEFAULTS["qwen3"])
  fields.only("attention_bias", False, None, remedy="use another model")
  return qwen2.dense_config(
      fields, raw, dtype, package=_PACKAGE, derived=False
  )


def _config_to_hf(config: Any) -> dict[str, Any]:
  if config.num_experts is not None:
    raise ValueError(
        "num_experts must be None for a Qwen3 to be written, got "
        f"{config.num_experts}; a mixture of experts is not exported"
    )
  return qwen2.dense_to_hf(config) | {
      "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
      "head_dim": config.head_dim, "attention_bias": False,
  }


def _tensors(config: Any) -> list[hf.Tensor]:
  return llama3.tensors(config, tied=config.use_tied_embedding, more={
      f"self_attn.{x}_norm.weight": (f"attn/{x}_norm/w", "") for x in "qk"
  })


@contextlib.contextmanager
def _mend(model: nnx.Module) -> Iterator[None]:
  with rope.theta_of_config(model), quantised.einsum_without_cast(model):
    yield


FAMILY = base.Family(
    name="qwen3",
    class_names=("Qwen3",),
    package=_PACKAGE,
    head=lambda model: heads.Head.of(
        tied=model.config.use_tied_embedding, dtype=model.config.dtype
    ),
    mend=_mend,
    hf=hf.HuggingFace(
        model_types=("qwen3",),
        loader="tunix.models.qwen3.params",
        config_from_hf=_config_from_hf,
        config_to_hf=_config_to_hf,
        tensors=_tensors,
        tied=lambda config: config.use_tied_embedding,
    ),
)
