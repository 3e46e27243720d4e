"""Cuts a SentencePiece vocabulary down to what a text uses.

Gemma 3 270M has 262,144 pieces: 168 of its 268 million parameters are
embedding rows, and the float32 logits of 8 x 128 tokens take 1.1 GB. A few
thousand rows are enough for English news. The transformer stays untouched:
logits of kept pieces are exactly the old ones, and the softmax runs over fewer.

The tokenizer is not rebuilt. A dropped piece is marked UNUSED; SentencePiece
merges through it and then splits it into kept pieces again, so that nothing
becomes unknown: rare words only take more pieces.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import heapq
from typing import Any

import numpy as np
import tqdm

from tunix_progdistill import errors
from tunix_progdistill.weights import sentencepiece_model as spm_proto
from tunix_progdistill.weights import sentencepiece_tokenizer

_TYPES = spm_proto.Types
_BLANK = "\u2581"
# Markers that chats need, in Gemma 2 and 3 and in Gemma 4.
_TURNS = ("<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>")
_FIELD = "vocabulary_size"


def count_pieces(model: bytes, texts: Iterable[str]) -> np.ndarray:
  """How often each piece occurs.

  Args:
    model: the bytes of a `tokenizer.model` with V pieces.
    texts: one string per document.

  Returns:
    int64 [V].
  """
  processor = sentencepiece_tokenizer.processor(model)
  counts = np.zeros(processor.GetPieceSize(), np.int64)
  bar = tqdm.tqdm(texts, desc="count pieces", unit="document", disable=None)
  for text in bar:
    ids, n = np.unique(processor.EncodeAsIds(text), return_counts=True)
    counts[ids.astype(np.int64)] += n
  return counts


def _halves(piece: str, scores: Mapping[str, float]) -> list[str]:
  """What `piece` splits into: the last two parts that BPE would merge.

  Args:
    piece: at least two characters.
    scores: of the pieces that may be merged; the highest merges first.

  Returns:
    Usually two parts; more if no merge leads to `piece`.
  """
  parts = list(piece)
  while len(parts) > 2:
    merges = [
        (scores[parts[i] + parts[i + 1]], -i)
        for i in range(len(parts) - 1)
        if parts[i] + parts[i + 1] in scores
    ]
    if not merges:
      break
    i = -max(merges)[1]
    parts[i : i + 2] = [parts[i] + parts[i + 1]]
  return parts


def check_model(model: bytes, field: str = _FIELD) -> None:
  """Refuses a SentencePiece model that is not BPE.

  Raises:
    ValueError: the pieces of another kind are not made by merges.
  """
  kind = spm_proto.ModelProto.FromString(model).trainer_spec.model_type
  if kind != spm_proto.TrainerSpec.BPE:
    raise errors.invalid(
        field, "must be null for a SentencePiece model that is not BPE",
        spm_proto.TrainerSpec.ModelType.Name(kind), "leave it out",
    )


def _fixed(proto: Any, texts: Sequence[str]) -> set[int]:
  """Full ids that are kept whatever their count."""
  processor = sentencepiece_tokenizer.processor(proto.SerializeToString())
  characters: set[str] = set()
  for text in texts:
    characters |= set(processor.Normalize(text))
  if " " in characters:
    characters.add(_BLANK)
  special = {processor.bos_id(), processor.eos_id(), processor.pad_id()}
  return {
      i
      for i, p in enumerate(proto.pieces)
      if i in special
      or p.type in (_TYPES.UNKNOWN, _TYPES.BYTE)
      or p.piece in characters
      or p.piece in _TURNS
  }


def choose_pieces(
    model: bytes, texts: Sequence[str], size: int, field: str = _FIELD
) -> np.ndarray:
  """The full ids of the pieces to keep.

  Always kept are the unknown, padding, begin and end pieces, the turn markers,
  all 256 bytes and each single character of the text. To these come the pieces
  that the text uses; while there are too many, the rarest is dropped:

      count[part] += count[piece]   for the parts that the piece splits into

  so that parts of rare words earn a place, which they would not by their own
  count. Keeping simply the most frequent pieces leaves rare words in single
  letters, which the teacher has hardly seen: at 8,192 pieces the teacher's
  perplexity on news is 76 that way and 55 this way (28 uncut).

  Args:
    model: the bytes of a `tokenizer.model` with V pieces.
    texts: the training text only: held-out text would leak its words.
    size: K, the number of pieces to keep at most; fewer are kept if the text
      does not use as many.
    field: what messages call the size.

  Returns:
    int32 [K], increasing.

  Raises:
    ValueError: `size` is smaller than what must be kept, or the model is not
      BPE.
  """
  check_model(model, field)
  proto = spm_proto.ModelProto.FromString(model)
  fixed = _fixed(proto, texts)
  if len(fixed) > size:
    raise errors.invalid(
        field, f"must be >= {len(fixed)}, the number of special pieces, bytes "
        "and characters of the text", size, "ask for a larger vocabulary",
    )
  ids, scores = {}, {}
  for i, p in enumerate(proto.pieces):
    if p.type in (_TYPES.NORMAL, _TYPES.USER_DEFINED):
      ids[p.piece], scores[p.piece] = i, p.score
  counts = count_pieces(model, texts).tolist()
  kept = fixed | {i for i, count in enumerate(counts) if count}
  # Rarest first; of equally rare ones the later piece, which has more parts.
  heap = [(counts[i], -i) for i in kept - fixed]
  heapq.heapify(heap)
  with tqdm.tqdm(
      total=max(0, len(kept) - size),
      desc="drop pieces",
      unit="piece",
      disable=None,
  ) as bar:
    while len(kept) > size:
      count, i = heapq.heappop(heap)
      i = -i
      if i not in kept or count != counts[i]:
        continue  # an entry from before the count grew
      kept.remove(i)
      bar.update()
      for part in _halves(proto.pieces[i].piece, scores):
        j = ids.get(part)
        if j is None:
          continue  # a character without a piece: bytes
        counts[j] += count
        if j not in kept:
          kept.add(j)
          bar.update(-1)
        if j not in fixed:
          heapq.heappush(heap, (counts[j], -j))
  return np.array(sorted(kept), np.int32)


def cut_model(model: bytes, kept: np.ndarray) -> bytes:
  """Marks the pieces that are not kept as UNUSED.

  A dropped single character is renamed as well: SentencePiece 0.2.0 cannot
  split it further and would return its dropped id; unnamed, it falls back to
  bytes, as it does in later versions anyway.

  Args:
    model: the bytes of a `tokenizer.model`.
    kept: int [K], full ids.

  Returns:
    The bytes of the cut model, with as many pieces as before.
  """
  proto = spm_proto.ModelProto.FromString(model)
  stays = set(np.asarray(kept).tolist())
  for i, piece in enumerate(proto.pieces):
    if i in stays or piece.type not in (_TYPES.NORMAL, _TYPES.USER_DEFINED):
      continue
    piece.type = _TYPES.UNUSED
    if len(piece.piece) == 1:
      piece.piece = f"<dropped{i}>"
  return proto.SerializeToString()
