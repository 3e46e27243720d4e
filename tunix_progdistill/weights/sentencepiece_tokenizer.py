"""A SentencePiece model, whole or with its vocabulary cut."""

from collections.abc import Sequence
import json
import os
import pathlib
import re
from typing import Any

import numpy as np
import sentencepiece

from tunix_progdistill import errors
from tunix_progdistill.weights import sentencepiece_model as spm_proto
from tunix_progdistill.weights import tokenizer_files

_TYPES = spm_proto.Types
# User-defined pieces that are markers and no text, in Gemma's models.
_MARKER = re.compile(
    r"<unused\d+>|<(start|end)_of_(turn|image|audio)>|<mask>|\[multimodal\]"
    r"|<\|.+\|?>|<.+\|>"
)


def processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
  """A processor of the bytes of a `tokenizer.model`."""
  result = sentencepiece.SentencePieceProcessor()
  result.LoadFromSerializedProto(model)
  return result


def is_marker(piece: Any) -> bool:
  """Whether a piece of the model is a marker by its type or its name."""
  return piece.type in (_TYPES.CONTROL, _TYPES.UNKNOWN) or (
      piece.type == _TYPES.USER_DEFINED and bool(_MARKER.fullmatch(piece.piece))
  )


class SentencePieceTokenizer:
  """Text <-> ids of a SentencePiece model.

  Where the vocabulary is cut, ids exist twice:

      full id   position in the model, 0 <= id < V
      id        row of the cut embedding, 0 <= id < K; increasing in the full id

  SentencePiece leaves the spelling of a control piece alone, but not that of a
  user-defined one: markers of this type are control pieces here. A text in
  which special pieces are parsed is split at them, and each part is encoded
  as a text of its own.

  Invariant: every id of `encode(text)` is in [0, len), and
  `decode(encode(text)) == text` where the model does not change the text
  itself (Gemma's do not).

  Attributes:
    bos_id: id that begins a text, or None.
    eos_id: id that ends a text.
    pad_id: id that fills up a row.
    chat_template: the model's Jinja template, or None.
    full_ids: int32 [K], the full ids of the pieces that are kept, or None.
  """

  def __init__(
      self,
      model: bytes,
      kept: Sequence[int] | np.ndarray | None = None,
      settings: tokenizer_files.Settings | None = None,
      field: str = "tokenizer",
  ):
    """Takes a model.

    Args:
      model: the bytes of a `tokenizer.model` with V pieces; if cut, what
        `vocabulary.cut_model` returned.
      kept: int [K], the full ids of the kept pieces, increasing; None for all.
      settings: what stands beside the model.
      field: what messages call it.

    Raises:
      ValueError: `kept` is not strictly increasing within [0, V), lacks a
        special piece, or does not fit the model.
    """
    self._settings = settings or tokenizer_files.Settings()
    self._model = model
    proto = spm_proto.ModelProto.FromString(model)
    self._full_size = len(proto.pieces)
    self.full_ids = None if kept is None else _checked(
        kept, self._full_size, field
    )
    self._to_cut = np.arange(self._full_size, dtype=np.int32)
    if self.full_ids is not None:
      self._to_cut = np.full(self._full_size, -1, np.int32)
      self._to_cut[self.full_ids] = np.arange(len(self.full_ids))
    self._size = self._known_size(field)
    named = self._settings.special_tokens()
    self._special: dict[str, int] = {}
    hidden = np.zeros(self._full_size, bool)
    for i, piece in enumerate(proto.pieces):
      if piece.type == _TYPES.UNUSED or not (
          is_marker(piece)
          or (piece.type == _TYPES.USER_DEFINED and piece.piece in named)
      ):
        continue
      hidden[i] = True
      if piece.type == _TYPES.USER_DEFINED:
        piece.type = _TYPES.CONTROL
      if self._to_cut[i] >= 0:
        self._special[piece.piece] = i
    self._hidden = hidden
    self._processor = processor(proto.SerializeToString())
    spellings = sorted(self._special, key=len, reverse=True)
    self._split = re.compile(f"({'|'.join(map(re.escape, spellings))})")
    self._find_special_ids(field)

  def _known_size(self, field: str) -> int:
    own = self._full_size if self.full_ids is None else len(self.full_ids)
    size = self._settings.vocab_size or own
    if self.full_ids is None and own > size:
      raise errors.invalid(
          field, f"must have at most the model's {size} pieces", own,
          "take the tokenizer that came with the model",
      )
    if self.full_ids is not None and size != own:
      raise errors.invalid(
          field, f"must be cut as the model is, to {size} pieces", own,
          "convert the model again",
      )
    return size

  def _find_special_ids(self, field: str) -> None:
    native = {}
    for name in ("bos", "eos", "pad"):
      full = getattr(self._processor, f"{name}_id")()
      if full < 0:
        continue
      native[name] = int(self._to_cut[full])
      if native[name] < 0:
        raise errors.invalid(
            field, f"must keep the {name} piece", f"full id {full}",
            "choose pieces with vocabulary.choose_pieces",
        )
    self.bos_id, self.eos_id, self.pad_id = tokenizer_files.special_ids(
        self._settings, native, self._id_of, field
    )

  def _id_of(self, piece: str) -> int | None:
    full = self._processor.PieceToId(piece)
    if self._processor.IdToPiece(full) != piece or self._to_cut[full] < 0:
      return None
    return int(self._to_cut[full])

  @property
  def chat_template(self) -> str | None:
    return self._settings.chat_template

  def __len__(self) -> int:
    return self._size

  @property
  def full_size(self) -> int:
    """V, the number of pieces before the cut."""
    return self._full_size

  def to_cut(self, full_ids: Any) -> np.ndarray:
    """Ids of full ids, int32 of the same shape.

    Raises:
      ValueError: a piece was dropped.
    """
    full_ids = np.asarray(full_ids, np.int32)
    ids = self._to_cut[full_ids]
    if np.any(ids < 0):
      i = int(full_ids[ids < 0].flat[0])
      raise errors.invalid(
          "id", f"must be one of the {len(self)} kept pieces",
          f"{self._processor.IdToPiece(i)!r} (full id {i})",
          "encode the text with this tokenizer",
      )
    return ids

  def to_full(self, ids: Any) -> np.ndarray:
    """Full ids, int32, of ids in [0, K)."""
    ids = np.asarray(ids, np.int32)
    return ids if self.full_ids is None else self.full_ids[ids]

  def encode(self, text: str, parse_special: bool = False) -> np.ndarray:
    """int32 [n]; see `tokenizer.Tokenizer`."""
    full: list[int] = []
    parts = self._split.split(text) if parse_special and self._special else [
        text
    ]
    for i, part in enumerate(parts):
      if i % 2:
        full.append(self._special[part])
      elif part:
        full += self._processor.EncodeAsIds(part)
    ids = self.to_cut(np.array(full, np.int32))
    return tokenizer_files.check_known(
        ids, len(self), self._processor.IdToPiece
    )

  def decode(self, ids: Any) -> str:
    """See `tokenizer.Tokenizer`."""
    ids = np.asarray(ids, np.int64).reshape(-1)
    known = self._full_size if self.full_ids is None else len(self.full_ids)
    full = self.to_full(ids[(ids >= 0) & (ids < known)])
    return self._processor.DecodeIds(full[~self._hidden[full]].tolist())

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes tokenizer.model, tokenizer_config.json and the kept ids."""
    folder = pathlib.Path(folder)
    (folder / tokenizer_files.MODEL_FILE).write_bytes(self._model)
    if self.full_ids is not None:
      write_kept(folder, self.full_ids)
    own = self._full_size if self.full_ids is None else len(self.full_ids)
    spell = lambda i: None if i is None else self._processor.IdToPiece(
        int(self.to_full(i))
    )
    tokenizer_files.write_config(
        folder, self._settings, own, len(self),
        {
            "bos": spell(self.bos_id), "eos": spell(self.eos_id),
            "pad": spell(self.pad_id),
        },
    )


def _checked(kept: Any, full_size: int, field: str) -> np.ndarray:
  ids = np.asarray(kept, np.int32)
  if (
      ids.ndim != 1
      or not ids.size
      or np.any(np.diff(ids) <= 0)
      or ids[0] < 0
      or ids[-1] >= full_size
  ):
    raise errors.invalid(
        field, "must keep ids that are strictly increasing within "
        f"[0, {full_size})", ids.tolist(),
        "choose pieces with vocabulary.choose_pieces",
    )
  return ids


def write_kept(folder: pathlib.Path, kept: np.ndarray) -> None:
  """Writes the full ids of the kept pieces beside a `tokenizer.model`."""
  text = json.dumps(np.asarray(kept).tolist())
  (folder / tokenizer_files.KEPT_FILE).write_text(text, encoding="utf-8")
