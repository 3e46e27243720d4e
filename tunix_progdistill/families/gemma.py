"""Gemma 1 and 2: embedding under `embedder`, decoder layers under `layers`.

Both are one class in Tunix. In a file of Gemma 1, post_attention_layernorm is
the norm before the feed-forward block; Tunix's loader takes it for the norm
after attention, which only Gemma 2 has, and leaves the other one empty. Such a
file is therefore read by this table.
"""

from collections.abc import Mapping
from typing import Any

from tunix_progdistill.families import base
from tunix_progdistill.families import heads
from tunix_progdistill.families import hf
from tunix_progdistill.families import hf_config

_PACKAGE = "tunix.models.gemma."
_ACTIVATION = "gelu_pytorch_tanh"
# What transformers takes where a field is absent.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {
        "vocab_size": 256_000, "hidden_size": 3072,
        "intermediate_size": 24_576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256,
        "hidden_act": _ACTIVATION, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "attention_bias": False,
    },
    "gemma2": {
        "vocab_size": 256_000, "hidden_size": 2304,
        "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_activation": _ACTIVATION, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "attention_bias": False,
        "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    },
}


def only_gemma(fields: hf_config.Fields) -> None:
  """Refuses what no Gemma of Tunix has."""
  fields.only("rms_norm_eps", 1e-6, remedy="use another model")
  fields.only("attention_bias", False, None, remedy="use another model")
  fields.only("tie_word_embeddings", True, None, remedy="use another model")
  fields.only(
      "use_bidirectional_attention", False, None, "vision",
      remedy="use a model with causal attention",
  )


def _config_from_hf(raw: Mapping[str, Any], dtype: Any) -> Any:
  del dtype  # Gemma's config has none; the loader casts.
  kind = raw["model_type"]
  fields = hf_config.Fields(raw, DEFAULTS[kind])
  module = hf.module(_PACKAGE)
  only_gemma(fields)
  if kind == "gemma" and fields.get("hidden_activation") is None:
    # Early files of Gemma 1 say gelu and mean its approximation by tanh.
    fields.only("hidden_act", _ACTIVATION, "gelu", remedy="use another model")
  else:
    fields.only("hidden_activation", _ACTIVATION, remedy="use another model")
  found = hf_config.rope(raw, 10_000)
  hf_config.rope_type(found, "default")
  if found["rope_theta"] != 10_000:
    raise hf_config.invalid(
        "rope_theta", "must be 10000, for Tunix's Gemma has no other",
        found["rope_theta"], "use another model",
    )
  num_layers = fields.integer("num_hidden_layers")
  num_heads, num_kv_heads = hf_config.heads(fields)
  head_dim = hf_config.head_dim(fields, derived=False)
  types = ["full_attention"] * num_layers
  second = kind == "gemma2"
  if second:
    fields.only(
        "query_pre_attn_scalar", head_dim,
        remedy="use a model whose queries are scaled by the root of head_dim",
    )
    types = fields.layer_types(num_layers) or [
        "full_attention" if i % 2 else "sliding_attention"
        for i in range(num_layers)
    ]
  attention = module.AttentionType
  config = module.ModelConfig(
      num_layers=num_layers,
      num_embed=fields.integer("vocab_size"),
      embed_dim=fields.integer("hidden_size"),
      hidden_dim=fields.integer("intermediate_size"),
      num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads,
      final_logit_softcap=(
          fields.number("final_logit_softcapping") if second else None
      ),
      attn_logits_soft_cap=(
          fields.number("attn_logit_softcapping") if second else None
      ),
      use_post_attn_norm=second, use_post_ffw_norm=second,
      attention_types=tuple(
          attention.GLOBAL if t == "full_attention" else
          attention.LOCAL_SLIDING for t in types
      ),
      sliding_window_size=fields.integer("sliding_window") if second else None,
  )
  fields.finish()
  return config


def _is_second(config: Any) -> bool:
  return bool(config.use_post_attn_norm and config.use_post_ffw_norm)


def _config_to_hf(config: Any) -> dict[str, Any]:
  kinds = [t.name for t in config.attention_types][: config.num_layers]
  second = _is_second(config)
  if not second and (
      config.use_post_attn_norm or config.use_post_ffw_norm
      or config.final_logit_softcap or config.attn_logits_soft_cap
      or "LOCAL_SLIDING" in kinds
  ):
    raise ValueError(
        "a Gemma of Tunix must be like Gemma 1 (no post norms, no caps, no "
        "sliding window) or have both post norms of Gemma 2, to be written "
        f"as a Hugging Face model, got {config.use_post_attn_norm=}, "
        f"{config.use_post_ffw_norm=}; build it from one of the two"
    )
  fields = {
      "model_type": "gemma2" if second else "gemma",
      "architectures": ["Gemma2ForCausalLM" if second else "GemmaForCausalLM"],
      "vocab_size": config.num_embed, "hidden_size": config.embed_dim,
      "intermediate_size": config.hidden_dim,
      "num_hidden_layers": config.num_layers,
      "num_attention_heads": config.num_heads,
      "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
      "hidden_act": _ACTIVATION, "hidden_activation": _ACTIVATION,
      "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "attention_bias": False,
      "tie_word_embeddings": True,
  }
  if second:
    fields |= {
        "query_pre_attn_scalar": config.head_dim,
        "sliding_window": config.sliding_window_size or 4096,
        "layer_types": [
            "full_attention" if k == "GLOBAL" else "sliding_attention"
            for k in kinds
        ],
        "final_logit_softcapping": hf_config.floating(
            config.final_logit_softcap
        ),
        "attn_logit_softcapping": hf_config.floating(
            config.attn_logits_soft_cap
        ),
    }
  return fields


def attention_tensors(config: Any) -> dict[str, Any]:
  """The projections of a layer of Gemma 1, 2 or 3.

  Where every query head has a key head of its own, Tunix keeps the three in
  one parameter.
  """
  heads = "n d h -> (n h) d"
  if config.num_heads == config.num_kv_heads:
    rows = [("attn/qkv_einsum/w", heads, i) for i in range(3)]
  else:
    rows = [
        ("attn/q_einsum/w", heads),  # type: ignore[list-item]
        ("attn/kv_einsum/w", heads, 0), ("attn/kv_einsum/w", heads, 1),
    ]
  return {
      f"self_attn.{name}_proj.weight": row
      for name, row in zip("qkv", rows, strict=True)
  } | {
      "self_attn.o_proj.weight": (
          "attn/attn_vec_einsum/w", "n h d -> d (n h)"
      ),
  }


ENDS = (
    hf.Tensor(
        name="model.embed_tokens.weight", param="embedder/input_embedding"
    ),
    hf.Tensor(name="model.norm.weight", param="final_norm/scale"),
)


def _tensors(config: Any) -> list[hf.Tensor]:
  norms = {"input_layernorm": "pre_attention_norm"}
  if config.use_post_attn_norm:
    norms |= {
        "post_attention_layernorm": "post_attn_norm",
        "pre_feedforward_layernorm": "pre_ffw_norm",
    }
  else:
    norms["post_attention_layernorm"] = "pre_ffw_norm"
  if config.use_post_ffw_norm:
    norms["post_feedforward_layernorm"] = "post_ffw_norm"
  table = attention_tensors(config) | hf.FEED_FORWARD | {
      f"{name}.weight": (f"{param}/scale", "") for name, param in norms.items()
  }
  return [*ENDS, *hf.layer_tensors(range(config.num_layers), table)]


FAMILY = base.Family(
    name="gemma",
    class_names=("Gemma",),
    package=_PACKAGE,
    head=lambda model: heads.Head.of(
        tied=True, softcap=model.final_logits_softcap
    ),
    hf=hf.HuggingFace(
        model_types=("gemma", "gemma2"),
        loader="tunix.models.gemma.params_safetensors",
        config_from_hf=_config_from_hf,
        config_to_hf=_config_to_hf,
        tensors=_tensors,
        loader_is_right=_is_second,
    ),
)
