"""Tokenizers and chat templates that the tests share."""

import dataclasses
import gzip
import json
import pathlib

import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

SPECIAL = (
    "<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>",
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>",
    "<|start_header_id|>", "<|end_header_id|>",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Characters:
  """One id per character, after the special pieces."""

  bos_id: int | None = 2
  eos_id: int | None = 1
  pad_id: int = 0
  chat_template: str | None = None

  def encode(self, text: str, parse_special: bool = False) -> np.ndarray:
    ids = []
    while text:
      piece = next(
          (s for s in SPECIAL if parse_special and text.startswith(s)), None
      )
      ids.append(
          SPECIAL.index(piece) if piece else len(SPECIAL) + ord(text[0])
      )
      text = text[len(piece) if piece else 1:]
    return np.array(ids, np.int32)

  def decode(self, ids) -> str:
    return "".join(
        SPECIAL[i] if i < len(SPECIAL) else chr(i - len(SPECIAL))
        for i in map(int, ids)
    )


class Bytes:
  """A byte-level BPE of the tokenizers library, as Llama and Qwen have."""

  def __init__(self, chat_template: str | None = None):
    self._inner = tokenizers.Tokenizer(models.BPE())
    self._inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    self._inner.decoder = decoders.ByteLevel()
    self._inner.train_from_iterator(
        ["the cat sat on the mat", "user model assistant start_of_turn"] * 4,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=list(SPECIAL), show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    self.chat_template = chat_template
    self.pad_id, self.eos_id, self.bos_id = 0, 1, 2

  def encode(self, text: str, parse_special: bool = False) -> np.ndarray:
    self._inner.encode_special_tokens = not parse_special
    ids = self._inner.encode(text, add_special_tokens=False).ids
    return np.array(ids, np.int32)

  def decode(self, ids) -> str:
    return self._inner.decode(list(map(int, ids)), skip_special_tokens=False)


GEMMA = """{{ bos_token }}{% for m in messages %}\
<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}
{{ m['content'] | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

LLAMA3 = """{% for m in messages %}{% set content = \
'<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' \
+ m['content'] | trim + '<|eot_id|>' %}\
{% if loop.first %}{% set content = '<|begin_of_text|>' + content %}{% endif %}\
{{ content }}{% endfor %}{% if add_generation_prompt %}\
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

CHATML = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# (template, <bos>, end-of-turn piece)
TEMPLATES = {
    "gemma": (GEMMA, 2, "<end_of_turn>"),
    "llama3": (LLAMA3, SPECIAL.index("<|begin_of_text|>"), "<|eot_id|>"),
    "chatml": (CHATML, None, "<|im_end|>"),
}

CHAT = (
    {"role": "user", "content": "the cat?"},
    {"role": "assistant", "content": "sat on"},
    {"role": "user", "content": " and \n\nthen "},
    {"role": "assistant", "content": "the mat"},
)


def write_jsonl(path: pathlib.Path, records) -> pathlib.Path:
  text = "".join(json.dumps(record) + "\n" for record in records)
  opener = gzip.open if path.suffix == ".gz" else open
  with opener(path, "wt", encoding="utf-8") as f:
    f.write(text)
  return path


def one_line(error) -> str:
  """The message of a caught error, which must be one line."""
  text = str(error.value)
  assert "\n" not in text
  return text
