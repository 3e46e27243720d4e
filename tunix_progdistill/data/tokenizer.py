"""What the data needs of a tokenizer."""

from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
  """Text to ids and special ids. `weights.load_tokenizer` gives one.

  Attributes:
    bos_id: id that begins a row, or None (Qwen has none).
    eos_id: id that ends an answer, or None.
    pad_id: id that fills up a row.
    chat_template: the model's own Jinja template, or None.
  """

  @property
  def bos_id(self) -> int | None:
    ...

  @property
  def eos_id(self) -> int | None:
    ...

  @property
  def pad_id(self) -> int:
    ...

  @property
  def chat_template(self) -> str | None:
    ...

  def encode(self, text: str, parse_special: bool = False) -> np.ndarray:
    """The ids of `text`, int32 [n], without <bos> or <eos> around it.

    Args:
      text: any text.
      parse_special: whether the spelling of a special piece becomes that piece
        or stays ordinary text.
    """
    ...
