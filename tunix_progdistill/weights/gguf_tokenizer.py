"""The tokenizer of a GGUF file, as the files that it was made of.

llama.cpp keeps a token list and, of SentencePiece, scores or, of byte-level
BPE, merges. How the text is split before that is only named
(`tokenizer.ggml.pre`), so that each name needs its own entry here.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import json
from typing import Any

import tokenizers

from tunix_progdistill import errors
from tunix_progdistill.weights import sentencepiece_model as spm_proto

_TYPES = spm_proto.Types
_BLANK = "\u2581"


def _smollm() -> Any:
  pre = tokenizers.pre_tokenizers
  return pre.Sequence([
      pre.Digits(individual_digits=True),
      pre.ByteLevel(add_prefix_space=False, use_regex=True),
  ])


PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {"smollm": _smollm}


def _check_distinct(pieces: Sequence[str], field: str) -> None:
  seen: dict[str, int] = {}
  for i, piece in enumerate(pieces):
    if seen.setdefault(piece, i) != i:
      raise errors.invalid(
          field, f"must have a tokenizer of distinct pieces, but {seen[piece]} "
          f"and {i} are the same", piece, "use another file",
      )


def _check_ids(ids: Mapping[str, int], size: int, field: str) -> None:
  for name, i in ids.items():
    if not 0 <= i < size:
      raise errors.invalid(
          field, f"must have a {name} id in [0, {size})", i, "use another file"
      )


def build_sentencepiece(
    pieces: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    ids: Mapping[str, int],
    field: str = "the GGUF file",
) -> bytes:
  """A SentencePiece BPE model of a token list.

  Runs of blanks and of newlines are user-defined pieces, in which llama.cpp
  spells U+2581 (SentencePiece's blank) as a space. It is put back.

  Args:
    pieces: the text of each piece.
    scores: the score of each; higher scores merge first.
    kinds: GGUF token types, whose numbers are SentencePiece's own.
    ids: of `unk`, `bos`, `eos` and `pad`.
    field: what messages call the file.

  Returns:
    The bytes of a `tokenizer.model`.

  Raises:
    ValueError: two pieces are the same, which SentencePiece refuses, or the
      lists differ in length.
  """
  if not len(pieces) == len(scores) == len(kinds):
    raise errors.invalid(
        field, "must have a score and a type for each piece of the tokenizer",
        (len(pieces), len(scores), len(kinds)), "use another file",
    )
  _check_ids(ids, len(pieces), field)
  spelled = [
      piece.replace(" ", _BLANK) if kind == _TYPES.USER_DEFINED else piece
      for piece, kind in zip(pieces, kinds, strict=True)
  ]
  _check_distinct(spelled, field)
  model = spm_proto.ModelProto()
  for i, piece in enumerate(spelled):
    model.pieces.add(
        piece=piece, score=scores[i],
        type=_TYPES.UNKNOWN if i == ids["unk"] else kinds[i],
    )
  trainer = model.trainer_spec
  trainer.model_type = spm_proto.TrainerSpec.BPE
  trainer.vocab_size = len(pieces)
  trainer.byte_fallback = True
  for name, i in ids.items():
    setattr(trainer, f"{name}_id", i)
    setattr(trainer, f"{name}_piece", pieces[i])
  normalizer = model.normalizer_spec
  normalizer.name = "identity"
  normalizer.add_dummy_prefix = False
  normalizer.remove_extra_whitespaces = False
  normalizer.escape_whitespaces = True
  return model.SerializeToString()


def build_bpe(
    pieces: Sequence[str],
    merges: Sequence[str],
    kinds: Sequence[int],
    pre: str,
    field: str = "the GGUF file",
) -> str:
  """A byte-level BPE tokenizer of a token list and its merges.

  Args:
    pieces: the text of each piece.
    merges: "left right", in order of rank.
    kinds: GGUF token types: control pieces are special.
    pre: name of the pre-tokenizer, a key of `PRE_TOKENIZERS`.
    field: what messages call the file.

  Returns:
    The text of a `tokenizer.json`.

  Raises:
    ValueError: an unknown pre-tokenizer, or lists that do not fit.
  """
  if pre not in PRE_TOKENIZERS:
    raise errors.invalid(
        field, "must have a pre-tokenizer that can be rebuilt "
        f"({', '.join(PRE_TOKENIZERS)})", pre,
        "take the model's safetensors from the hub (model_source huggingface)",
    )
  if len(pieces) != len(kinds):
    raise errors.invalid(
        field, "must have a type for each piece of the tokenizer",
        (len(pieces), len(kinds)), "use another file",
    )
  _check_distinct(pieces, field)
  vocabulary = {piece: i for i, piece in enumerate(pieces)}
  pairs = [tuple(merge.split(" ")) for merge in merges]
  for pair in pairs:
    if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
      raise errors.invalid(
          field, "must have merges of two pieces into a third", " ".join(pair),
          "use another file",
      )
  built = tokenizers.Tokenizer(
      tokenizers.models.BPE(vocab=vocabulary, merges=pairs)
  )
  built.pre_tokenizer = PRE_TOKENIZERS[pre]()
  built.decoder = tokenizers.decoders.ByteLevel()
  built.add_special_tokens([
      tokenizers.AddedToken(piece, special=True, normalized=False)
      for piece, kind in zip(pieces, kinds, strict=True)
      if kind == _TYPES.CONTROL
  ])
  built.add_tokens([
      tokenizers.AddedToken(piece, special=False, normalized=False)
      for piece, kind in zip(pieces, kinds, strict=True)
      if kind == _TYPES.USER_DEFINED
  ])
  return built.to_str()


def _ids(fields: Mapping[str, Any]) -> dict[str, int]:
  names = {"unk": "unknown", "bos": "bos", "eos": "eos", "pad": "padding"}
  found = {
      short: fields.get(f"tokenizer.ggml.{name}_token_id")
      for short, name in names.items()
  }
  return {short: i for short, i in found.items() if i is not None}


def files(
    fields: Mapping[str, Any], model: str, field: str
) -> dict[str, bytes]:
  """The tokenizer's files, by name.

  Args:
    fields: the metadata of the GGUF file.
    model: what `tokenizer.ggml.model` must be: "llama" is SentencePiece,
      "gpt2" byte-level BPE.
    field: what messages call the file.

  Raises:
    ValueError: it cannot be rebuilt.
  """
  found = fields.get("tokenizer.ggml.model")
  if found != model:
    raise errors.invalid(
        field, f"must have a tokenizer of the kind {model!r}, as models of "
        "this architecture that were verified have", found,
        "take the model's safetensors from the hub (model_source huggingface)",
    )
  need = ["tokens", "token_type", "merges" if model == "gpt2" else "scores"]
  need += ["eos_token_id"]
  if model == "llama":
    need += ["bos_token_id", "unknown_token_id", "padding_token_id"]
  absent = [n for n in need if f"tokenizer.ggml.{n}" not in fields]
  if absent:
    raise errors.invalid(
        field, "must have the metadata of a tokenizer",
        f"no tokenizer.ggml.{absent[0]}", "use another file",
    )
  pieces, kinds, last = (fields[f"tokenizer.ggml.{n}"] for n in need[:3])
  ids = _ids(fields)
  _check_ids(ids, len(pieces), field)
  settings: dict[str, Any] = {
      f"{name}_token": pieces[i] for name, i in ids.items()
  }
  if template := fields.get("tokenizer.chat_template"):
    settings["chat_template"] = template
  if model == "llama":
    result = {
        "tokenizer.model": build_sentencepiece(pieces, last, kinds, ids, field)
    }
    settings["tokenizer_class"] = "GemmaTokenizer"
  else:
    pre = fields.get("tokenizer.ggml.pre", "default")
    text = build_bpe(pieces, last, kinds, pre, field)
    result = {"tokenizer.json": text.encode("utf-8")}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
  result["tokenizer_config.json"] = json.dumps(settings, indent=2).encode()
  return result
