"""`config.json`, read field by field; what cannot be expressed is refused."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from absl import logging

from tunix_progdistill import errors

_WHERE = "config.json: "
# Fields that change nothing that a text model computes here.
_HARMLESS = frozenset({
    "_name_or_path", "_sliding_window_pattern", "_attn_implementation",
    "architectures", "attention_dropout", "auto_map", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "hidden_act", "hidden_activation", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id",
    "max_position_embeddings", "max_window_layers", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id",
    "pretraining_tp", "problem_type", "return_dict", "rope_local_base_freq",
    "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "sliding_window_pattern", "torch_dtype", "transformers_version",
    "use_cache", "image_token_id", "video_token_id", "audio_token_id",
})
_LAYER_TYPES = ("sliding_attention", "full_attention")
# No number of a model's config is as large; JAX could not hold a larger one.
_MOST = 1e12


def invalid(name: str, rule: str, value: Any, remedy: str) -> ValueError:
  """`errors.invalid` for a field of config.json."""
  return errors.invalid(f"{_WHERE}{name}", rule, value, remedy)


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
  """The text model's part of a config, with the token ids of the whole."""
  inner = raw.get("text_config")
  if inner is None:
    return dict(raw)
  if not isinstance(inner, Mapping):
    raise invalid(
        "text_config", "must be an object", inner, "download the file again"
    )
  outer = {
      k: raw[k]
      for k in (
          "bos_token_id", "eos_token_id", "pad_token_id",
          "tie_word_embeddings", "torch_dtype", "dtype", "quantization_config",
      )
      if k in raw
  }
  return outer | {"model_type": f"{raw.get('model_type')}_text"} | dict(inner)


class Fields:
  """The fields of one config.json; remembers which were read.

  Args:
    raw: the text model's config.
    defaults: what transformers takes where a field is absent.
  """

  def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]):
    self.raw = raw
    self.defaults = defaults
    self.seen = set(_HARMLESS)

  def get(self, name: str) -> Any:
    """The value; the default where it is absent, None where it is null."""
    self.seen.add(name)
    return self.raw.get(name, self.defaults.get(name))

  def integer(self, name: str, otherwise: int | None = None) -> int:
    """A whole number of at least 1; `otherwise` where it is absent or null."""
    value = self.get(name)
    if value is None:
      value = self.defaults.get(name) if otherwise is None else otherwise
    if isinstance(value, float) and value.is_integer():
      value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise invalid(
          name, "must be a whole number of at least 1", value,
          "download the file again",
      )
    return value

  def number(self, name: str) -> float | None:
    """A number above 0, or None where it is null."""
    value = self.get(name)
    return None if value is None else _number(name, value)

  def flag(self, name: str) -> bool:
    value = self.get(name)
    if value is not None and not isinstance(value, bool):
      raise invalid(
          name, "must be true or false", value, "download the file again"
      )
    return bool(value)

  def only(self, name: str, *allowed: Any, remedy: str) -> None:
    """Refuses every value of the field but these (and an absent one)."""
    value = self.get(name)
    if value not in allowed:
      raise invalid(
          name, f"must be {' or '.join(map(_json, allowed))}, for Tunix's "
          "model has no other", value, remedy,
      )

  def layer_types(self, num_layers: int) -> list[str] | None:
    """The kind of each layer, or None where it is not said."""
    value = self.get("layer_types")
    if value is None:
      return None
    if (
        not isinstance(value, Sequence)
        or len(value) < num_layers
        or any(v not in _LAYER_TYPES for v in value)
    ):
      raise invalid(
          "layer_types", "must be sliding_attention or full_attention for "
          f"each of {num_layers} layers", value, "use another model",
      )
    return list(value[:num_layers])

  def finish(self) -> None:
    """Names the fields that nothing here reads, once, in the log."""
    if self.raw.get("quantization_config"):
      raise invalid(
          "quantization_config", "must be absent: quantized tensors are not "
          "read", self.raw["quantization_config"],
          "take the model's unquantized repository",
      )
    unread = sorted(set(self.raw) - self.seen)
    if unread:
      logging.warning(
          "%sfields without a meaning here: %s", _WHERE, ", ".join(unread)
      )


def _json(value: Any) -> str:
  return {None: "null", True: "true", False: "false"}.get(value, str(value))


def _number(name: str, value: Any) -> Any:
  """A number above 0: an int where it is whole."""
  if (
      isinstance(value, bool)
      or not isinstance(value, int | float)
      or not 0 < value < _MOST
  ):
    raise invalid(
        name, "must be a number above 0", value, "download the file again"
    )
  return int(value) if float(value).is_integer() else float(value)


def heads(fields: Fields) -> tuple[int, int]:
  """(query heads, key and value heads); the first divides by the second."""
  queries = fields.integer("num_attention_heads")
  keys = fields.integer("num_key_value_heads", fields.defaults.get(
      "num_key_value_heads", queries
  ))
  if queries % keys:
    raise invalid(
        "num_attention_heads", f"must divide by num_key_value_heads ({keys})",
        queries, "download the file again",
    )
  return queries, keys


def head_dim(fields: Fields, derived: bool) -> int:
  """The width of a head: even, as RoPE needs.

  Args:
    fields: the config.
    derived: whether hidden_size / num_attention_heads stands in for an absent
      field.
  """
  otherwise = None
  if derived:
    otherwise = fields.integer("hidden_size") // fields.integer(
        "num_attention_heads"
    )
  value = fields.integer("head_dim", otherwise)
  if value % 2:
    raise invalid("head_dim", "must be even", value, "use another model")
  return value


def rope(
    raw: Mapping[str, Any], default_theta: float, layer_type: str | None = None
) -> dict[str, Any]:
  """What the config says of RoPE, in one form for old and new files.

  transformers wrote `rope_theta` and `rope_scaling` up to version 4 and writes
  `rope_parameters` since, with one entry per layer type where they differ.

  Args:
    raw: the text model's config.
    default_theta: what transformers takes where none is written.
    layer_type: for a family with two kinds of layers, the kind that is asked
      for.

  Returns:
    rope_type, rope_theta and whatever else the type has.
  """
  old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
  theta = raw.get("rope_theta")
  if layer_type == "sliding_attention":
    # The old form scales global layers only, and calls the local base so.
    old, theta = None, raw.get("rope_local_base_freq")
  if isinstance(new, Mapping) and set(new) & set(_LAYER_TYPES):
    new = new.get(layer_type or "full_attention")
  elif new and layer_type:
    raise invalid(
        "rope_parameters", "must have an entry for full_attention and one for "
        "sliding_attention", new, "download the file again",
    )
  for name, value in (("rope_scaling", old), ("rope_parameters", new)):
    if value is not None and not isinstance(value, Mapping):
      raise invalid(name, "must be an object", value, "use another model")
  found = dict(old or new or {})
  found["rope_type"] = found.pop("rope_type", None) or found.get(
      "type", "default"
  )
  found.pop("type", None)
  found["rope_theta"] = _number(
      "rope_theta", found.get("rope_theta") or theta or default_theta
  )
  partial = found.get("partial_rotary_factor") or raw.get(
      "partial_rotary_factor"
  )
  if found["rope_type"] != "proportional" and partial not in (None, 1, 1.0):
    raise invalid(
        "partial_rotary_factor", "must be 1, for Tunix's model rotates every "
        "pair of a head", partial, "use another model",
    )
  return found


def rope_type(found: Mapping[str, Any], *allowed: str) -> str:
  """The type of RoPE, which must be one of `allowed`."""
  if found["rope_type"] not in allowed:
    raise invalid(
        "rope_scaling", f"must be of type {' or '.join(allowed)}, for Tunix's "
        "model computes no other", found["rope_type"],
        "use a model without it; dropping the field would change the model",
    )
  return found["rope_type"]


def rope_number(found: Mapping[str, Any], name: str, default: Any = None):
  """A number of the RoPE entry."""
  value = found.get(name, default)
  return _number(f"rope_scaling.{name}", value)


def flat_layers(fields: Fields, num_layers: int, window: bool) -> None:
  """Refuses sliding windows where Tunix's model has none (Qwen).

  Args:
    fields: the config.
    num_layers: the number of layers.
    window: whether the model_type has the field use_sliding_window.
  """
  types = fields.layer_types(num_layers)
  if types is None and window and fields.flag("use_sliding_window"):
    first = fields.raw.get("max_window_layers", 28)
    if fields.raw.get("sliding_window", 4096) is not None:
      types = ["sliding_attention"] * max(0, num_layers - (first or 0))
  fields.seen.add("use_sliding_window")
  if types and "sliding_attention" in types:
    raise invalid(
        "layer_types" if fields.raw.get("layer_types") else
        "use_sliding_window",
        "must leave full attention to every layer, for Tunix's model has no "
        "sliding window", "sliding_attention", "use another model",
    )



def floating(value: float | None) -> float | None:
  """A number as transformers' strict configs want it: 30.0, not 30."""
  return None if value is None else float(value)
