"""Gemma 4: local and global layers of different widths, by a pattern.

The small ones (E2B, E4B) have embeddings per layer, and their last layers take
the keys and values of earlier ones.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from absl import logging

from tunix_progdistill.families import base
from tunix_progdistill.families import gemma
from tunix_progdistill.families import gemma3
from tunix_progdistill.families import heads
from tunix_progdistill.families import hf
from tunix_progdistill.families import hf_config
from tunix_progdistill.families import quantised

_PACKAGE = "tunix.models.gemma4."
_ACTIVATION = "gelu_pytorch_tanh"
# What transformers takes where a field is absent.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "vocab_size": 262_144, "hidden_size": 2304,
        "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_activation": _ACTIVATION, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "attention_bias": False,
        "sliding_window": 512, "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256, "global_head_dim": 512,
        "attention_k_eq_v": False, "num_kv_shared_layers": 0,
        "enable_moe_block": False, "use_double_wide_mlp": False,
    },
}


def _layer_types(fields: hf_config.Fields, num_layers: int) -> list[str]:
  """The kind of each layer; where none is said, the last one is global."""
  types = fields.layer_types(num_layers)
  if types is None:
    types = [
        "sliding_attention" if (i + 1) % 6 and i + 1 < num_layers
        else "full_attention" for i in range(num_layers)
    ]
  elif types[-1] == "sliding_attention":
    logging.warning(
        "config.json: the last layer of this Gemma 4 is local, as it is said; "
        "transformers would make it global"
    )
  return types


def _period(types: Sequence[str]) -> Sequence[str]:
  """The shortest pattern that, repeated, gives `types`."""
  for n in range(1, len(types)):
    if all(t == types[i % n] for i, t in enumerate(types)):
      return types[:n]
  return types


def _shared_fraction(
    fields: hf_config.Fields, types: Sequence[str]
) -> float:
  """Tunix's frac_shared_layers, for num_kv_shared_layers.

  Tunix's last layers take the keys and values of the last two layers before
  them, a global and a local one in this order from the end.
  """
  shared = fields.get("num_kv_shared_layers") or 0
  if not shared:
    return 0.0
  shared = fields.integer("num_kv_shared_layers")
  before = types[: len(types) - shared]
  if list(before[-2:]) != ["sliding_attention", "full_attention"]:
    raise hf_config.invalid(
        "num_kv_shared_layers", "must leave a local and then a global layer "
        "as the last two that have keys and values of their own, for Tunix "
        "shares those", shared, "use a model of Gemma 4's own pattern",
    )
  fraction = shared / len(types)
  if int(len(types) - fraction * len(types)) != len(before):
    fraction = (shared - 0.5) / len(types)  # Tunix rounds down
  return fraction


def _ropes(raw: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of Tunix's config that say how positions are rotated."""
  local = hf_config.rope(raw, 10_000, "sliding_attention")
  hf_config.rope_type(local, "default")
  if raw.get("rope_parameters") is None:
    found: dict[str, Any] = {
        "rope_type": "proportional", "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000,
    }
  else:
    found = hf_config.rope(raw, 1_000_000, "full_attention")
  kind = hf_config.rope_type(found, "default", "proportional")
  scaled = kind == "proportional"
  return {
      "local_base_frequency": local["rope_theta"],
      "local_rope_proportion": 1.0,
      "global_base_frequency": found["rope_theta"],
      "global_rope_proportion": float(
          hf_config.rope_number(found, "partial_rotary_factor", 1.0)
      ) if scaled else 1.0,
      "global_scale_factor": float(
          hf_config.rope_number(found, "factor", 1.0)
      ) if scaled else 1.0,
  }


def _config_from_hf(raw: Mapping[str, Any], dtype: Any) -> Any:
  fields = hf_config.Fields(raw, DEFAULTS["gemma4_text"])
  gemma.only_gemma(fields)
  fields.only("hidden_activation", _ACTIVATION, remedy="use another model")
  fields.only(
      "enable_moe_block", False, None,
      remedy="use a dense Gemma 4; a mixture of experts is not read",
  )
  fields.seen |= {"num_experts", "top_k_experts", "moe_intermediate_size"}
  num_layers = fields.integer("num_hidden_layers")
  types = _layer_types(fields, num_layers)
  num_heads, num_kv_heads = hf_config.heads(fields)
  vocabulary = fields.integer("vocab_size")
  per_layer = fields.get("hidden_size_per_layer_input") or 0
  if per_layer:
    fields.only(
        "vocab_size_per_layer_input", vocabulary,
        remedy="use a model with one vocabulary",
    )
  fields.seen |= {"vocab_size_per_layer_input", "num_global_key_value_heads"}
  shared_keys = fields.flag("attention_k_eq_v")
  hidden = fields.integer("intermediate_size")
  module = hf.module(_PACKAGE)
  config = module.ModelConfig(
      num_layers=num_layers, num_embed=vocabulary,
      embed_dim=fields.integer("hidden_size"), hidden_dim=hidden,
      num_heads=num_heads, head_dim=hf_config.head_dim(fields, derived=False),
      num_kv_heads=num_kv_heads,
      final_logit_softcap=fields.number("final_logit_softcapping"),
      sliding_window_size=fields.integer("sliding_window"),
      per_layer_input_dim=per_layer,
      num_global_kv_heads=(
          fields.get("num_global_key_value_heads") if shared_keys else None
      ),
      global_key_size=fields.get("global_head_dim") or None,
      attention_pattern=tuple(
          module.AttentionType.GLOBAL if t == "full_attention" else
          module.AttentionType.LOCAL_SLIDING for t in _period(types)
      ),
      frac_shared_layers=_shared_fraction(fields, types),
      k_eq_v_global=shared_keys,
      override_kv_shared_ffw_hidden=(
          2 * hidden if fields.flag("use_double_wide_mlp") else None
      ),
      dtype=dtype, param_dtype=dtype, **_ropes(raw),
  )
  fields.finish()
  return config


def _kinds(config: Any) -> list[str]:
  pattern = config.attention_pattern or hf.module(
      _PACKAGE
  ).GEMMA4_ATTENTION_PATTERN
  return [
      "full_attention" if pattern[i % len(pattern)].name == "GLOBAL"
      else "sliding_attention" for i in range(config.num_layers)
  ]


def _config_to_hf(config: Any) -> dict[str, Any]:
  hidden = config.override_kv_shared_ffw_hidden
  if (
      config.enable_moe or config.local_scale_factor != 1
      or config.local_rope_proportion != 1
      or hidden not in (None, config.hidden_dim, 2 * config.hidden_dim)
  ):
    raise ValueError(
        "a Gemma 4 must be dense, with unscaled local RoPE and shared layers "
        "of once or twice the width, to be written, got "
        f"{config.enable_moe=}, {config.local_scale_factor=}, "
        f"{config.local_rope_proportion=}, "
        f"{config.override_kv_shared_ffw_hidden=}; build it from a dense one"
    )
  n = config.num_layers
  kinds = _kinds(config)
  if kinds[-1] == "sliding_attention":
    logging.warning(
        "the last layer of this Gemma 4 is local: transformers would make it "
        "global, so only Tunix computes the exported model right"
    )
  return {
      "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"],
      "vocab_size": config.num_embed, "hidden_size": config.embed_dim,
      "intermediate_size": config.hidden_dim, "num_hidden_layers": n,
      "num_attention_heads": config.num_heads,
      "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
      "global_head_dim": config.global_key_size or config.head_dim,
      "num_global_key_value_heads": (
          config.num_global_kv_heads or config.num_kv_heads
      ) if config.k_eq_v_global else None,
      "attention_k_eq_v": config.k_eq_v_global,
      "hidden_activation": _ACTIVATION, "rms_norm_eps": 1e-6,
      "attention_bias": False, "tie_word_embeddings": True,
      "sliding_window": config.sliding_window_size, "layer_types": kinds,
      "final_logit_softcapping": hf_config.floating(
          config.final_logit_softcap
      ),
      "hidden_size_per_layer_input": config.per_layer_input_dim,
      "vocab_size_per_layer_input": config.num_embed,
      "num_kv_shared_layers": n - int(n - config.frac_shared_layers * n),
      "use_double_wide_mlp": hidden == 2 * config.hidden_dim,
      "enable_moe_block": False,
      "rope_parameters": {
          "sliding_attention": {
              "rope_type": "default",
              "rope_theta": float(config.local_base_frequency),
          },
          "full_attention": {
              "rope_type": "proportional",
              "rope_theta": float(config.global_base_frequency),
              "partial_rotary_factor": float(config.global_rope_proportion),
          } | (
              {"factor": float(config.global_scale_factor)}
              if config.global_scale_factor != 1 else {}
          ),
      },
  }


def _tensors(config: Any) -> list[hf.Tensor]:
  heads = "n d h -> (n h) d"
  found = list(gemma.ENDS)
  if config.per_layer_input_dim:
    flat = _keeps_layers_flat()
    found += [
        hf.Tensor(
            name="model.embed_tokens_per_layer.weight",
            param="embedder/per_layer_input_embedding",
            layout="" if flat else "v l p -> v (l p)",
        ),
        hf.Tensor(
            name="model.per_layer_model_projection.weight",
            param="embedder/per_layer_model_projection/w",
            layout="d p -> p d" if flat else "d l p -> (l p) d",
        ),
        hf.Tensor(
            name="model.per_layer_projection_norm.weight",
            param="embedder/per_layer_projection_norm/scale",
        ),
    ]
  table = hf.FEED_FORWARD | gemma3.norm_tensors() | {
      "self_attn.q_proj.weight": ("attn/q_einsum/w", heads),
      "self_attn.o_proj.weight": (
          "attn/attn_vec_einsum/w", "n h d -> d (n h)"
      ),
      "layer_scalar": ("skip_scale", ""),
  }
  if config.per_layer_input_dim:
    table |= {
        "per_layer_input_gate.weight": ("per_layer_input_gate/w", "d p -> p d"),
        "per_layer_projection.weight": ("per_layer_projection/w", "p d -> d p"),
        "post_per_layer_input_norm.weight": (
            "post_per_layer_input_norm/scale", ""
        ),
    }
  both = {
      "self_attn.k_proj.weight": ("attn/kv_einsum/w", heads, 0),
      "self_attn.v_proj.weight": ("attn/kv_einsum/w", heads, 1),
  }
  one = {"self_attn.k_proj.weight": ("attn/k_einsum/w", heads)}
  for i, kind in enumerate(_kinds(config)):
    same = config.k_eq_v_global and kind == "full_attention"
    found += hf.layer_tensors([i], table | (one if same else both))
  return found


def _keeps_layers_flat() -> bool:
  """Whether Tunix keeps the embeddings of all layers in one axis.

  Up to 0.1.7 they have an axis of their own for the layers.
  """
  module = hf.module(_PACKAGE)
  config = module.ModelConfig(
      num_layers=1, num_embed=2, embed_dim=2, hidden_dim=2, num_heads=1,
      head_dim=2, num_kv_heads=1, per_layer_input_dim=2,
  )
  shapes = hf.abstract_parameters(module.Gemma4, config)
  return len(shapes["embedder/per_layer_input_embedding"].shape) == 2


FAMILY = base.Family(
    name="gemma4",
    mend=quantised.einsum_without_cast,
    class_names=("Gemma4",),
    package=_PACKAGE,
    head=lambda model: heads.Head.of(
        tied=True, softcap=model.config.final_logit_softcap,
        dtype=model.config.dtype,
    ),
    hf=hf.HuggingFace(
        model_types=("gemma4_text", "gemma4"),
        loader="tunix.models.gemma4.params_safetensors",
        config_from_hf=_config_from_hf,
        config_to_hf=_config_to_hf,
        tensors=_tensors,
        shapes=hf.abstract_parameters,  # its layers differ
        prefixes=("model.", "model.language_model.", ""),
        loader_prefixes=("model.language_model.", ""),
        export_prefix="",
        unused=(
            r".*rotary_emb\.inv_freq",
            r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*",
        ),
    ),
)
