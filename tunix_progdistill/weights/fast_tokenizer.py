"""A `tokenizer.json`, read by the `tokenizers` library."""

import functools
import json
import os
import pathlib
from typing import Any

import numpy as np
import tokenizers

from tunix_progdistill import errors
from tunix_progdistill.weights import tokenizer_files


class FastTokenizer:
  """Text <-> ids of a `tokenizer.json`.

  The library turns the spelling of a special token into that token wherever it
  stands in a text, unless told not to; so there are two of it, one for each.

  Attributes:
    bos_id: id that begins a text, or None.
    eos_id: id that ends a text.
    pad_id: id that fills up a row.
    chat_template: the model's Jinja template, or None.
  """

  def __init__(
      self,
      text: str,
      settings: tokenizer_files.Settings | None = None,
      field: str = "tokenizer",
  ):
    """Takes the text of a `tokenizer.json` and what stands beside it.

    Raises:
      ValueError: it is none, it has more ids than the model knows, or no end
        of text is named.
    """
    self._settings = settings or tokenizer_files.Settings()
    self._text = text
    self._field = field
    _check_json(text, field)
    self._plain = self._make()
    self._plain.encode_special_tokens = True
    own = self._plain.get_vocab_size(with_added_tokens=False)
    self._size = self._settings.vocab_size or self._own_size()
    if own > self._size:
      raise errors.invalid(
          field, f"must have at most the model's {self._size} ids", own,
          "take the tokenizer that came with the model",
      )
    self.bos_id, self.eos_id, self.pad_id = tokenizer_files.special_ids(
        self._settings, {}, self._plain.token_to_id, field
    )

  def _make(self) -> Any:
    made = tokenizers.Tokenizer.from_str(self._text)
    made.no_truncation()
    made.no_padding()
    return made

  def _own_size(self) -> int:
    return max(self._plain.get_vocab(with_added_tokens=True).values()) + 1

  @functools.cached_property
  def _parsing(self) -> Any:
    return self._make()

  @property
  def chat_template(self) -> str | None:
    return self._settings.chat_template

  def __len__(self) -> int:
    return self._size

  def encode(self, text: str, parse_special: bool = False) -> np.ndarray:
    """int32 [n]; see `tokenizer.Tokenizer`."""
    library = self._parsing if parse_special else self._plain
    ids = library.encode(text, add_special_tokens=False).ids
    return tokenizer_files.check_known(
        np.array(ids, np.int32), len(self), library.id_to_token
    )

  def decode(self, ids: Any) -> str:
    """See `tokenizer.Tokenizer`."""
    ids = np.asarray(ids, np.int64).reshape(-1)
    return self._plain.decode(
        ids[ids >= 0].tolist(), skip_special_tokens=True
    )

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    folder = pathlib.Path(folder)
    (folder / tokenizer_files.JSON_FILE).write_text(
        self._text, encoding="utf-8"
    )
    spell = lambda i: None if i is None else self._plain.id_to_token(i)
    tokenizer_files.write_config(
        folder, self._settings, self._own_size(), len(self),
        {
            "bos": spell(self.bos_id), "eos": spell(self.eos_id),
            "pad": spell(self.pad_id),
        },
    )


def _check_json(text: str, field: str) -> None:
  """Refuses what is cut short or is no tokenizer's file."""
  try:
    whole = json.loads(text)
  except ValueError as e:
    raise errors.invalid(
        field, "must be a readable tokenizer.json", " ".join(str(e).split()),
        "download the file again",
    ) from e
  if not isinstance(whole, dict) or "model" not in whole:
    raise errors.invalid(
        field, "must be a tokenizer.json with a model",
        sorted(whole) if isinstance(whole, dict) else whole,
        "download the file again",
    )
