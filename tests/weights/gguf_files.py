"""Tiny GGUF files of both architectures, as llama.cpp writes them."""

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from tunix_progdistill.weights import gguf as gguf_lib

BYTE, NORMAL, CONTROL, USER = 6, 1, 3, 4
SPECIAL = {"pad": 0, "eos": 1, "bos": 2, "unk": 3}
TEXTS = ["the cat then the hat", "the ten cat\n\n", "the hat the cat"]

# Merges in order of rank; "\u2581" is a blank.
_MERGES = (
    "th", "the", "\u2581the", "\u2581c", "at", "\u2581cat", "\u2581h",
    "\u2581hat", "\u2581then", "en", "ten", "\u2581t", "\u2581ten",
)  # fmt: skip
_CHARACTERS = "\u2581thencad\u00e9"
BPE_MERGES = ("t h", "th e", "\u0120 the", "c a", "ca t")
BPE_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def pieces(turns: int = CONTROL) -> list[tuple[str, float, int]]:
  """Text, score and type of each piece of a SentencePiece vocabulary."""
  found = [(p, -1000.0, CONTROL) for p in ("<pad>", "<eos>", "<bos>")]
  found += [("<unk>", -1000.0, CONTROL), ("<unused0>", -1000.0, CONTROL)]
  found += [("\n", -1000.0, USER), ("  ", -1000.0, USER)]
  found += [("<start_of_turn>", -1000.0, turns)]
  found += [(f"<0x{b:02X}>", 0.0, BYTE) for b in range(256)]
  found += [(m, -float(i), NORMAL) for i, m in enumerate(_MERGES)]
  found += [(c, -100.0 - i, NORMAL) for i, c in enumerate(_CHARACTERS)]
  return found


def byte_letters() -> list[str]:
  """The letter that byte-level BPE writes for each byte, in its order."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [b for b in range(256) if b not in plain]
  letters = {b: chr(b) for b in plain}
  letters |= {b: chr(256 + i) for i, b in enumerate(others)}
  return [letters[b] for b in sorted(letters)]


def bpe_pieces() -> list[str]:
  merged = [m.replace(" ", "") for m in BPE_MERGES]
  return [*BPE_CONTROL, *byte_letters(), *merged]


GEMMA: Mapping[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": len(pieces()),
    "sliding_window": 8,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": len(bpe_pieces()),
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def architecture(config: Mapping[str, Any]) -> str:
  return "gemma3" if config["model_type"] == "gemma3_text" else "llama"


def specs(config: Mapping[str, Any]) -> dict[str, gguf_lib.TensorSpec]:
  kind = gguf_lib.ARCHITECTURES[architecture(config)]
  return gguf_lib.tensor_specs(kind, config)


def hugging_face(
    config: Mapping[str, Any], seed: int = 0
) -> dict[str, np.ndarray]:
  """Random tensors of a model, by their Hugging Face name."""
  rng = np.random.default_rng(seed)
  return {
      spec.name: (rng.normal(size=spec.shape) * 0.3).astype(np.float32)
      for spec in specs(config).values()
  }


def interleave(value: np.ndarray, heads: int) -> np.ndarray:
  """q or k with the two halves of each head row by row, spelled out."""
  width = len(value) // heads
  out = np.empty_like(value)
  for h in range(heads):
    for i in range(width // 2):
      out[h * width + 2 * i] = value[h * width + i]
      out[h * width + 2 * i + 1] = value[h * width + width // 2 + i]
  return out


def stored(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
  """The same tensors as llama.cpp stores them, by their GGUF name."""
  values = hugging_face(config, seed)
  gemma = config["model_type"] == "gemma3_text"
  out = {}
  for source, spec in specs(config).items():
    value = values[spec.name]
    if gemma and value.ndim == 1:
      value = value + 1.0
    if not gemma and ".attn_q." in source:
      value = interleave(value, config["num_attention_heads"])
    if not gemma and ".attn_k." in source:
      value = interleave(value, config["num_key_value_heads"])
    out[source] = value.astype(np.float32)
  return out


def write(
    path: Any,
    config: Mapping[str, Any],
    *,
    name: str = "",
    tensors: Mapping[str, np.ndarray | None] | None = None,
    metadata: Mapping[str, Any] | None = None,
    quantised: bool = False,
) -> None:
  """Writes a file.

  Args:
    path: the file.
    config: Hugging Face's fields.
    name: the architecture, if another than the config's.
    tensors: in place of those of `stored`; None leaves one out.
    metadata: strings in place of what would be written; None leaves one out.
    quantised: whether matrices are stored in Q8_0.
  """
  prefix = name or architecture(config)
  writer = gguf.GGUFWriter(path, prefix)
  writer.add_block_count(config["num_hidden_layers"])
  writer.add_context_length(128)
  writer.add_embedding_length(config["hidden_size"])
  writer.add_feed_forward_length(config["intermediate_size"])
  writer.add_head_count(config["num_attention_heads"])
  writer.add_head_count_kv(config["num_key_value_heads"])
  writer.add_rope_freq_base(config["rope_theta"])
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  strings = dict(metadata or {})
  if config["model_type"] == "gemma3_text":
    writer.add_key_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    tokens, scores, kinds = map(list, zip(*pieces(), strict=True))
    writer.add_token_scores(scores)
    ids = SPECIAL
    strings = {"tokenizer.ggml.model": "llama"} | strings
  else:
    tokens = bpe_pieces()
    kinds = [CONTROL if p in BPE_CONTROL else NORMAL for p in tokens]
    writer.add_token_merges(list(BPE_MERGES))
    ids = {"unk": 0, "bos": 1, "eos": 2, "pad": 2}
    strings = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.chat_template": "{{ messages[0].content }}",
    } | strings
  for key, value in strings.items():
    if value is not None:
      writer.add_string(key, value)
  writer.add_token_list(tokens)
  writer.add_token_types(kinds)
  writer.add_pad_token_id(ids["pad"])
  writer.add_eos_token_id(ids["eos"])
  writer.add_bos_token_id(ids["bos"])
  writer.add_unk_token_id(ids["unk"])
  for key, value in (stored(config) | dict(tensors or {})).items():
    if value is None:
      continue
    kind = gguf.GGMLQuantizationType.F32
    if quantised and value.ndim == 2:
      kind = gguf.GGMLQuantizationType.Q8_0
      value = gguf.quantize(value, kind)
    writer.add_tensor(key, value, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
