"""Qwen2: biases on q, k and v; a tied or a separate head."""

from collections.abc import Mapping
from typing import Any

from tunix_progdistill.families import base
from tunix_progdistill.families import heads
from tunix_progdistill.families import hf
from tunix_progdistill.families import hf_config
from tunix_progdistill.families import llama3
from tunix_progdistill.families import quantised

_PACKAGE = "tunix.models.qwen2."
# What transformers takes where a field is absent.
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "vocab_size": 151_936, "hidden_size": 4096,
        "intermediate_size": 22_016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32,
        "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
}


def dense_config(
    fields: hf_config.Fields, raw: Mapping[str, Any], dtype: Any, *,
    package: str, derived: bool,
) -> Any:
  """A ModelConfig of Tunix's qwen2 or qwen3; takes all fields that are left.

  Args:
    fields: of `raw`.
    raw: config.json.
    dtype: of the parameters.
    package: of the family.
    derived: whether a head's width may follow from the model's.
  """
  found = hf_config.rope(raw, 10_000)
  hf_config.rope_type(found, "default")
  sizes = llama3.sizes(fields, derived=derived)
  hf_config.flat_layers(fields, sizes["num_layers"], window=True)
  config = hf.module(package).ModelConfig(
      **sizes, rope_theta=found["rope_theta"],
      use_tied_embedding=fields.flag("tie_word_embeddings"),
      dtype=dtype, param_dtype=dtype,
  )
  fields.finish()
  return config


def dense_to_hf(config: Any) -> dict[str, Any]:
  """What config.json says of either family."""
  return llama3.fields_to_hf(config) | {
      "rope_theta": float(config.rope_theta), "use_sliding_window": False,
      "tie_word_embeddings": config.use_tied_embedding,
  }


def _config_from_hf(raw: Mapping[str, Any], dtype: Any) -> Any:
  fields = hf_config.Fields(raw, DEFAULTS["qwen2"])
  return dense_config(fields, raw, dtype, package=_PACKAGE, derived=True)


def _config_to_hf(config: Any) -> dict[str, Any]:
  return dense_to_hf(config) | {
      "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
  }


def _tensors(config: Any) -> list[hf.Tensor]:
  return llama3.tensors(config, tied=config.use_tied_embedding, more={
      f"self_attn.{x}_proj.bias": (f"attn/{x}_bias", "") for x in "qkv"
  })


FAMILY = base.Family(
    name="qwen2",
    mend=quantised.einsum_without_cast,
    class_names=("Qwen2",),
    package=_PACKAGE,
    head=lambda model: heads.Head.of(
        tied=model.config.use_tied_embedding, dtype=model.config.dtype
    ),
    hf=hf.HuggingFace(
        model_types=("qwen2",),
        loader="tunix.models.qwen2.params",
        config_from_hf=_config_from_hf,
        config_to_hf=_config_to_hf,
        tensors=_tensors,
        tied=lambda config: config.use_tied_embedding,
    ),
)
