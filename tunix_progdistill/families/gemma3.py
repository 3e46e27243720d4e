"""Gemma 3: tied embedding; five local layers, then a global one, by position.

The text model's head is its embedding. Images enter before the first layer,
so the vision tower counts as an input.
"""

from collections.abc import Mapping
from typing import Any

from tunix_progdistill.families import base
from tunix_progdistill.families import gemma
from tunix_progdistill.families import heads
from tunix_progdistill.families import hf
from tunix_progdistill.families import hf_config

_PACKAGE = "tunix.models.gemma3."
_ACTIVATION = "gelu_pytorch_tanh"
# What transformers takes where a field is absent.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208, "hidden_size": 2304,
        "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_activation": _ACTIVATION, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "attention_bias": False,
        "query_pre_attn_scalar": 256, "sliding_window": 4096,
    },
}


def _layer_types(num_layers: int) -> list[str]:
  """The kinds of layers that Tunix's model has, by position."""
  module = hf.module(_PACKAGE)
  pattern = module.GEMMA3_ATTENTION_PATTERN
  return [
      "full_attention"
      if pattern[i % len(pattern)] == module.AttentionType.GLOBAL
      else "sliding_attention"
      for i in range(num_layers)
  ]


def _check_layer_types(fields: hf_config.Fields, num_layers: int) -> None:
  ours = _layer_types(num_layers)
  theirs = fields.layer_types(num_layers)
  if theirs is None:
    every = fields.raw.get("sliding_window_pattern") or 6
    theirs = [
        "sliding_attention" if (i + 1) % every else "full_attention"
        for i in range(num_layers)
    ]
  for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
    if a != b:
      raise hf_config.invalid(
          f"layer_types[{i}]", f"must be {a}, for Tunix's Gemma 3 makes every "
          "sixth layer global", b, "use a model of Gemma 3's own pattern",
      )


def _query_norm(fields: hf_config.Fields, head_dim: int) -> Any:
  """How queries are scaled: by head_dim, or by hidden_size / heads."""
  kinds = hf.module(_PACKAGE).QueryPreAttentionNormalisation
  scalar = fields.number("query_pre_attn_scalar")
  per_head = fields.integer("hidden_size") // fields.integer(
      "num_attention_heads"
  )
  if scalar == head_dim:
    return kinds.BY_ONE_OVER_SQRT_HEAD_DIM
  if scalar == per_head:
    return kinds.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
  raise hf_config.invalid(
      "query_pre_attn_scalar", f"must be head_dim ({head_dim}) or hidden_size "
      f"/ num_attention_heads ({per_head}), for Tunix's model has no other",
      scalar, "use another model",
  )


def _config_from_hf(raw: Mapping[str, Any], dtype: Any) -> Any:
  fields = hf_config.Fields(raw, DEFAULTS["gemma3_text"])
  gemma.only_gemma(fields)
  fields.only("hidden_activation", _ACTIVATION, remedy="use another model")
  for name in ("final_logit_softcapping", "attn_logit_softcapping"):
    fields.only(name, None, remedy="use another model")
  num_layers = fields.integer("num_hidden_layers")
  _check_layer_types(fields, num_layers)
  num_heads, num_kv_heads = hf_config.heads(fields)
  head_dim = hf_config.head_dim(fields, derived=False)
  ropes = {}
  for kind, theta in (("sliding", 10_000), ("full", 1_000_000)):
    found = hf_config.rope(raw, theta, f"{kind}_attention")
    linear = hf_config.rope_type(found, "default", "linear") == "linear"
    factor = hf_config.rope_number(found, "factor") if linear else 1
    if factor < 1:
      raise hf_config.invalid(
          "rope_scaling.factor", "must be at least 1", factor,
          "use another model",
      )
    ropes[kind] = (found["rope_theta"], float(factor))
  config = hf.module(_PACKAGE).ModelConfig(
      num_layers=num_layers,
      num_embed=fields.integer("vocab_size"),
      embed_dim=fields.integer("hidden_size"),
      hidden_dim=fields.integer("intermediate_size"),
      num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads,
      sliding_window_size=fields.integer("sliding_window"),
      local_base_frequency=ropes["sliding"][0],
      local_scale_factor=ropes["sliding"][1],
      global_base_frequency=ropes["full"][0],
      global_scale_factor=ropes["full"][1],
      query_pre_attn_norm=_query_norm(fields, head_dim),
      param_dtype=dtype,
  )
  fields.finish()
  return config


def _config_to_hf(config: Any) -> dict[str, Any]:
  if config.vision_config is not None:
    raise ValueError(
        "a Gemma 3 must be a text model to be written, got one with a vision "
        "tower; load it from a config without vision_config"
    )
  if config.local_scale_factor != 1:
    raise ValueError(
        "local_scale_factor must be 1 for a Gemma 3 to be written, got "
        f"{config.local_scale_factor}; build the student without it"
    )
  scaled = config.global_scale_factor != 1
  return {
      "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"],
      "vocab_size": config.num_embed, "hidden_size": config.embed_dim,
      "intermediate_size": config.hidden_dim,
      "num_hidden_layers": config.num_layers,
      "num_attention_heads": config.num_heads,
      "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
      "hidden_activation": _ACTIVATION, "rms_norm_eps": 1e-6,
      "attention_bias": False, "tie_word_embeddings": True,
      "query_pre_attn_scalar": (
          config.head_dim
          if config.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_HEAD_DIM"
          else config.embed_dim // config.num_heads
      ),
      "sliding_window": config.sliding_window_size,
      "layer_types": _layer_types(config.num_layers),
      "rope_theta": float(config.global_base_frequency),
      "rope_local_base_freq": float(config.local_base_frequency),
      "rope_scaling": {
          "rope_type": "linear", "factor": float(config.global_scale_factor)
      } if scaled else None,
      "final_logit_softcapping": None, "attn_logit_softcapping": None,
  }


def norm_tensors() -> dict[str, Any]:
  """The norms of a layer of Gemma 3 or 4."""
  return {
      f"{name}.weight": (f"{param}/scale", "")
      for name, param in (
          ("input_layernorm", "pre_attention_norm"),
          ("post_attention_layernorm", "post_attention_norm"),
          ("pre_feedforward_layernorm", "pre_ffw_norm"),
          ("post_feedforward_layernorm", "post_ffw_norm"),
          ("self_attn.q_norm", "attn/_query_norm"),
          ("self_attn.k_norm", "attn/_key_norm"),
      )
  }


def _tensors(config: Any) -> list[hf.Tensor]:
  table = (
      gemma.attention_tensors(config)
      | hf.FEED_FORWARD
      | norm_tensors()
  )
  return [*gemma.ENDS, *hf.layer_tensors(range(config.num_layers), table)]


FAMILY = base.Family(
    name="gemma3",
    class_names=("Gemma3",),
    package=_PACKAGE,
    head=lambda model: heads.Head.of(tied=True),
    inputs=(r"embedder/.*", r"vision_encoder/.*"),
    hf=hf.HuggingFace(
        model_types=("gemma3_text", "gemma3"),
        loader="tunix.models.gemma3.params_safetensors",
        config_from_hf=_config_from_hf,
        config_to_hf=_config_to_hf,
        tensors=_tensors,
        prefixes=("model.", "language_model.model.", "model.language_model."),
        loader_prefixes=("model.", "language_model.model."),
        unused=(
            r".*rotary_emb\.inv_freq",
            r"(model\.)?(vision_tower|multi_modal_projector)\..*",
        ),
    ),
)
