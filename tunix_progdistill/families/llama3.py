"""Llama3: tied or separate head; Tunix's attention ignores its rope_theta.

The form of its files is Qwen's as well.
"""

from collections.abc import Mapping
from typing import Any

from tunix_progdistill.families import base
from tunix_progdistill.families import heads
from tunix_progdistill.families import hf
from tunix_progdistill.families import hf_config
from tunix_progdistill.families import rope

_PACKAGE = "tunix.models.llama3."
# What transformers takes where a field is absent.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32_000, "hidden_size": 4096,
        "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False,
    },
}
_SCALING = (
    "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings",
)


def sizes(fields: hf_config.Fields, derived: bool) -> dict[str, Any]:
  """The fields of Tunix's ModelConfig that Llama and Qwen share.

  Args:
    fields: the config.json.
    derived: whether the width of a head follows from the others by default.
  """
  fields.only("hidden_act", "silu", remedy="use another model")
  eps = fields.number("rms_norm_eps")
  num_heads, num_kv_heads = hf_config.heads(fields)
  return {
      "num_layers": fields.integer("num_hidden_layers"),
      "vocab_size": fields.integer("vocab_size"),
      "embed_dim": fields.integer("hidden_size"),
      "hidden_dim": fields.integer("intermediate_size"),
      "num_heads": num_heads, "num_kv_heads": num_kv_heads,
      "head_dim": hf_config.head_dim(fields, derived),
      "norm_eps": 1e-6 if eps is None else eps,
  }


def _config_from_hf(raw: Mapping[str, Any], dtype: Any) -> Any:
  del dtype  # Llama's config has none; the loader casts.
  fields = hf_config.Fields(raw, DEFAULTS["llama"])
  for name in ("attention_bias", "mlp_bias"):
    fields.only(name, False, None, remedy="use another model")
  found = hf_config.rope(raw, 10_000)
  theta = found["rope_theta"]
  if hf_config.rope_type(found, "default", "llama3") == "llama3":
    original = found.get(_SCALING[3]) or raw.get("max_position_embeddings")
    theta = rope.Llama3Theta(
        theta=theta,
        **{n: hf_config.rope_number(found, n) for n in _SCALING[:3]},
        original_max_position_embeddings=hf_config.rope_number(
            {_SCALING[3]: original}, _SCALING[3]
        ),
    )
    if theta.high_freq_factor <= theta.low_freq_factor:
      raise hf_config.invalid(
          "rope_scaling.high_freq_factor", "must be above low_freq_factor "
          f"({theta.low_freq_factor})", theta.high_freq_factor,
          "download the file again",
      )
  config = hf.module(_PACKAGE).ModelConfig(
      **sizes(fields, derived=True), rope_theta=theta,
      weight_tying=fields.flag("tie_word_embeddings"),
  )
  fields.finish()
  return config


def fields_to_hf(config: Any) -> dict[str, Any]:
  """The fields of config.json that Llama and Qwen share.

  Of these, Qwen2 alone has no field for the width of a head.
  """
  return {
      "vocab_size": config.vocab_size, "hidden_size": config.embed_dim,
      "intermediate_size": config.hidden_dim,
      "num_hidden_layers": config.num_layers,
      "num_attention_heads": config.num_heads,
      "num_key_value_heads": config.num_kv_heads,
      "head_dim": config.head_dim,
      "hidden_act": "silu", "rms_norm_eps": float(config.norm_eps),
      "rope_scaling": None,
  }


def _config_to_hf(config: Any) -> dict[str, Any]:
  theta = config.rope_theta
  scaling = None
  if isinstance(theta, rope.Llama3Theta):
    scaling = {"rope_type": "llama3"} | {
        name: getattr(theta, name) for name in _SCALING
    }
    for name in _SCALING[:3]:
      scaling[name] = float(scaling[name])
    theta = theta.theta
  return fields_to_hf(config) | {
      "model_type": "llama", "architectures": ["LlamaForCausalLM"],
      "attention_bias": False, "mlp_bias": False,
      "rope_theta": float(theta), "rope_scaling": scaling,
      "tie_word_embeddings": config.weight_tying,
  }


def tensors(
    config: Any, *, tied: bool, more: Mapping[str, Any]
) -> list[hf.Tensor]:
  """The tensors of a Llama or a Qwen.

  Args:
    config: Tunix's ModelConfig.
    tied: whether the head is the embedding.
    more: what a layer has besides.
  """
  table: dict[str, Any] = {
      f"self_attn.{x}_proj.weight": (f"attn/{x}_proj/w", "d n h -> (n h) d")
      for x in "qkv"
  }
  table["self_attn.o_proj.weight"] = ("attn/o_proj/w", "n h d -> d (n h)")
  for name in ("input_layernorm", "post_attention_layernorm"):
    table[f"{name}.weight"] = (f"{name}/w", "")
  ends = [
      hf.Tensor(
          name="model.embed_tokens.weight", param="embedder/input_embedding"
      ),
      hf.Tensor(name="model.norm.weight", param="final_norm/w"),
  ]
  if not tied:
    ends.append(
        hf.Tensor(name="lm_head.weight", param="lm_head/w", layout="d v -> v d")
    )
  table |= hf.FEED_FORWARD | dict(more)
  return [*ends, *hf.layer_tensors(range(config.num_layers), table)]


FAMILY = base.Family(
    name="llama3",
    class_names=("Llama3",),
    package=_PACKAGE,
    head=lambda model: heads.Head.of(tied=model.config.weight_tying),
    mend=rope.theta_of_config,
    hf=hf.HuggingFace(
        model_types=("llama",),
        loader="tunix.models.llama3.params",
        config_from_hf=_config_from_hf,
        config_to_hf=_config_to_hf,
        tensors=lambda config: tensors(
            config, tied=config.weight_tying, more={}
        ),
        tied=lambda config: config.weight_tying,
    ),
)
