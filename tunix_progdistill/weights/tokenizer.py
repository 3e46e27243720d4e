"""Text to ids and back, as the model knows them."""

import dataclasses
import os
from typing import Any
from typing import Protocol

import numpy as np

from tunix_progdistill import errors
from tunix_progdistill.weights import fast_tokenizer
from tunix_progdistill.weights import sentencepiece_tokenizer
from tunix_progdistill.weights import tokenizer_files as files

FastTokenizer = fast_tokenizer.FastTokenizer
SentencePieceTokenizer = sentencepiece_tokenizer.SentencePieceTokenizer


class Tokenizer(Protocol):
  """Text to ids and back.

  `len` is the number of ids that the model knows: every id that `encode` gives
  is below it.

  Attributes:
    bos_id: id that begins a text, or None (Qwen has none).
    eos_id: id that ends a text.
    pad_id: id that fills up a row; the same as `eos_id` where the tokenizer has
      none of its own.
    chat_template: the model's Jinja template, or None.
  """

  @property
  def bos_id(self) -> int | None:
    ...

  @property
  def eos_id(self) -> int:
    ...

  @property
  def pad_id(self) -> int:
    ...

  @property
  def chat_template(self) -> str | None:
    ...

  def __len__(self) -> int:
    ...

  def encode(self, text: str, parse_special: bool = False) -> np.ndarray:
    """The ids of a text, int32 [n], with no <bos> or <eos> around it.

    Args:
      text: any text.
      parse_special: whether the spelling of a special piece, such as <bos>,
        becomes that piece. Otherwise it is a text like any other.
    """
    ...

  def decode(self, ids: Any) -> str:
    """The text of ids; special pieces and unknown ids have none."""
    ...

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes files from which `load_tokenizer` makes the same tokenizer."""
    ...


def load_tokenizer(
    path: str | os.PathLike[str],
    kind: str | None = None,
    *,
    vocab_size: int | None = None,
    field: str = files.FIELD,
) -> Tokenizer:
  """The tokenizer of a folder, or of its file.

  Args:
    path: a folder, or the file itself; a SentencePiece model may lie at gs://.
      What else the folder says is read beside a file of the usual name only.
    kind: Tunix's tokenizer_type, sentencepiece or huggingface; None or empty
      lets the files tell: tokenizer.model where it is one, else
      tokenizer.json.
    vocab_size: the number of ids that the model knows; None takes it from
      config.json, or from the tokenizer where there is none.
    field: the setting that named the path, for messages.

  Raises:
    ValueError: one line; a file is missing or not readable, or the tokenizer
      has more pieces than the model knows.
  """
  file, kind = files.find(path, kind or None, field)
  settings = files.Settings()
  if file.name in (files.MODEL_FILE, files.JSON_FILE) and not (
      str(path).startswith("gs://")
  ):
    settings = files.read_settings(file.parent, field)
  if vocab_size is not None:
    settings = dataclasses.replace(settings, vocab_size=vocab_size)
  if kind == files.HUGGINGFACE:
    return FastTokenizer(
        files.read_text(file, field), settings, field
    )
  data = files.read_bytes(file, field)
  if not files.is_sentencepiece(data):
    raise errors.invalid(
        field, "must be a SentencePiece model", str(file),
        "write tokenizer_type=huggingface for a folder with tokenizer.json",
    )
  return SentencePieceTokenizer(
      data, files.read_kept(file, field), settings, field
  )
