"""The files of a tokenizer, and what they say beside it.

A folder's tokenizer is `tokenizer.model` (SentencePiece) or `tokenizer.json`
(the `tokenizers` library). Which ids begin, end and fill up a text is said by
the SentencePiece model, else by tokenizer_config.json, special_tokens_map.json
or config.json, in this order. A tokenizer without a padding id pads with the
id that ends a text, as Tunix does. Nothing of transformers is imported, and no
code that came with a model is run.
"""

from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
from typing import Any

from etils import epath
from google.protobuf import message
import numpy as np

from tunix_progdistill import errors
from tunix_progdistill.weights import sentencepiece_model as spm_proto

SENTENCEPIECE, HUGGINGFACE = "sentencepiece", "huggingface"
KINDS = (SENTENCEPIECE, HUGGINGFACE)
MODEL_FILE, JSON_FILE = "tokenizer.model", "tokenizer.json"
KEPT_FILE = "kept_ids.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
# All files that a tokenizer may be read from.
FILES = (
    MODEL_FILE, JSON_FILE, CONFIG_FILE, "special_tokens_map.json",
    TEMPLATE_FILE, KEPT_FILE,
)
FIELD = "tokenizer_config.tokenizer_path"
_VOCABULARY = "model_vocab_size"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What stands beside a tokenizer.

  Attributes:
    config: tokenizer_config.json, with the special tokens of
      special_tokens_map.json and the template of chat_template.jinja.
    ids: special ids that config.json names: bos, eos, pad.
    vocab_size: the number of ids that the model knows, where that is told.
  """

  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
  vocab_size: int | None = None

  def token(self, name: str) -> str | None:
    """The spelling of a special token, if one is named."""
    return spelling(self.config.get(f"{name}_token"))

  @property
  def chat_template(self) -> str | None:
    found = self.config.get("chat_template")
    if isinstance(found, list):
      named = {t.get("name"): t.get("template") for t in found}
      found = named.get("default") or next(iter(named.values()), None)
    return found or None

  def special_tokens(self) -> set[str]:
    """The spellings of all pieces that the files call special."""
    found: set[str | None] = {
        self.token(n) for n in ("bos", "eos", "pad", "unk")
    }
    for key in ("additional_special_tokens", "extra_special_tokens"):
      listed = self.config.get(key) or ()
      if isinstance(listed, Mapping):
        listed = listed.values()
      found |= {spelling(token) for token in listed}
    added = self.config.get("added_tokens_decoder") or {}
    found |= {
        spelling(token) for token in added.values()
        if isinstance(token, Mapping) and token.get("special")
    }
    return {token for token in found if token}


def spelling(token: Any) -> str | None:
  """A token as the files spell it, bare or as an object with its content."""
  if isinstance(token, Mapping):
    token = token.get("content")
  return token if isinstance(token, str) and token else None


def special_ids(
    settings: Settings, native: Mapping[str, int | None], find: Any,
    field: str,
) -> tuple[int | None, int, int]:
  """The ids of bos, eos and pad.

  Args:
    settings: what stands beside the tokenizer.
    native: what the tokenizer itself says.
    find: the spelling of a token -> its id, or None.
    field: what messages call it.

  Raises:
    ValueError: a named token is not in the vocabulary, or there is no eos.
  """
  found: dict[str, int | None] = {}
  for name in ("bos", "eos", "pad"):
    found[name] = native.get(name)
    if found[name] is not None:
      continue
    if f"{name}_token" in settings.config:
      token = settings.token(name)
      found[name] = None if token is None else find(token)
      if token is not None and found[name] is None:
        raise errors.invalid(
            field, f"must have the {name}_token of {CONFIG_FILE} in its "
            "vocabulary", token, "download the tokenizer's files again",
        )
    else:
      found[name] = settings.ids.get(name)
  eos = found["eos"]
  if eos is None:
    raise errors.invalid(
        field, "must have an eos token", None,
        f"name one as eos_token in {CONFIG_FILE}",
    )
  pad = found["pad"]
  return found["bos"], eos, eos if pad is None else pad


def check_known(ids: np.ndarray, size: int, spell: Any) -> np.ndarray:
  """`ids`, all of them below `size`.

  Raises:
    ValueError: an id is not.
  """
  if np.any(ids >= size):
    i = int(ids[ids >= size][0])
    raise errors.invalid(
        "text", f"must have pieces that the model knows (ids below {size})",
        f"{spell(i)} (id {i})", "remove it from the text",
    )
  return ids


def write_config(
    folder: pathlib.Path, settings: Settings, own_size: int, size: int,
    tokens: Mapping[str, str | None],
) -> None:
  """Writes tokenizer_config.json, and the chat template beside it.

  Args:
    folder: must exist.
    settings: as read.
    own_size: the number of ids of the tokenizer.
    size: the number of ids that the model knows.
    tokens: the spelling of bos, eos and pad.
  """
  config = {k: v for k, v in settings.config.items() if k != "chat_template"}
  config.pop(_VOCABULARY, None)
  config |= {f"{name}_token": token for name, token in tokens.items()}
  if size != own_size:
    config[_VOCABULARY] = size
  if settings.chat_template is not None:
    config["chat_template"] = settings.chat_template
  text = json.dumps(config, indent=2, ensure_ascii=False)
  (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


# -- reading


def _json(path: Any, field: str) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as e:
    raise errors.invalid(
        field, f"must hold a readable {path.name}", " ".join(str(e).split()),
        "download the file again",
    ) from e
  if not isinstance(value, dict):
    raise errors.invalid(
        field, f"must hold a {path.name} with a JSON object", value,
        "download the file again",
    )
  return value


def read_settings(folder: Any, field: str = FIELD) -> Settings:
  """What the files of a folder say beside the tokenizer itself.

  Raises:
    ValueError: a file is not readable.
  """
  config: dict[str, Any] = {}
  for name in ("special_tokens_map.json", CONFIG_FILE):
    if (folder / name).exists():
      config |= _json(folder / name, field)
  if (folder / TEMPLATE_FILE).exists():
    config["chat_template"] = (folder / TEMPLATE_FILE).read_text(
        encoding="utf-8"
    )
  ids, size = {}, config.get(_VOCABULARY)
  if (folder / "config.json").exists():
    whole = _json(folder / "config.json", field)
    text = whole.get("text_config")
    raw = whole | (text if isinstance(text, dict) else {})
    size = raw.get("vocab_size", size)
    for name in ("bos", "eos", "pad"):
      value = raw.get(f"{name}_token_id", whole.get(f"{name}_token_id"))
      value = value[0] if isinstance(value, list) and value else value
      if isinstance(value, int):
        ids[name] = value
  return Settings(config=config, ids=ids, vocab_size=size)


def is_sentencepiece(data: bytes) -> bool:
  """Whether these are the bytes of a SentencePiece model."""
  try:
    return bool(spm_proto.ModelProto.FromString(data).pieces)
  except message.DecodeError:
    return False


def _refuse_kind(kind: str | None) -> None:
  if kind is not None and kind not in KINDS:
    raise errors.invalid(
        "tokenizer_config.tokenizer_type", f"must be one of {', '.join(KINDS)}",
        kind, "leave it empty to let the files tell",
    )


def find(
    path: str | os.PathLike[str], kind: str | None = None, field: str = FIELD
) -> tuple[Any, str]:
  """The tokenizer's file and its kind.

  Args:
    path: a folder, or the file itself; sentencepiece may lie at gs://.
    kind: sentencepiece, huggingface, or None: tokenizer.model where it is one,
      else tokenizer.json.
    field: what messages call the path.

  Raises:
    ValueError: there is no such file.
  """
  _refuse_kind(kind)
  shown = os.fspath(path)
  place = epath.Path(shown).expanduser()
  names = {SENTENCEPIECE: MODEL_FILE, HUGGINGFACE: JSON_FILE}
  if shown and (shown.startswith("gs://") or place.is_file()):
    is_json = place.suffix == ".json"
    return place, kind or (HUGGINGFACE if is_json else SENTENCEPIECE)
  if not shown or not place.is_dir():
    raise errors.invalid(
        field, "must be a folder with a tokenizer, or its file", shown,
        "give the path of an existing one",
    )
  for candidate in KINDS if kind is None else (kind,):
    file = place / names[candidate]
    if not file.exists():
      continue
    other = kind is None and (place / JSON_FILE).exists()
    if candidate == SENTENCEPIECE and other and not is_sentencepiece(
        file.read_bytes()
    ):
      continue  # Llama 3 has a file of this name that is something else
    return file, candidate
  wanted = names[kind] if kind else f"{MODEL_FILE} or {JSON_FILE}"
  raise errors.invalid(
      field, f"must hold a {wanted}", shown,
      "download the tokenizer's files into it",
  )


def read_bytes(file: Any, field: str = FIELD) -> bytes:
  """The bytes of a tokenizer's file.

  Raises:
    ValueError: it cannot be read.
  """
  try:
    return file.read_bytes()
  except (OSError, ImportError) as e:
    raise errors.invalid(
        field, f"must be readable ({' '.join(str(e).split())})", str(file),
        "check the path and the network, or give a local file",
    ) from e


def read_text(file: Any, field: str = FIELD) -> str:
  """The text of a tokenizer's file.

  Raises:
    ValueError: it cannot be read, or is not UTF-8.
  """
  try:
    return read_bytes(file, field).decode("utf-8")
  except UnicodeDecodeError as e:
    raise errors.invalid(
        field, f"must hold a {JSON_FILE} in UTF-8 ({e.reason} at byte "
        f"{e.start})", str(file), "download the file again",
    ) from e


def read_kept(file: Any, field: str = FIELD) -> list[int] | None:
  """The full ids of the kept pieces beside a `tokenizer.model`, if it is cut.

  Raises:
    ValueError: they are not readable.
  """
  path = file.parent / KEPT_FILE
  if file.name != MODEL_FILE or not path.exists():
    return None
  try:
    kept = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as e:
    raise errors.invalid(
        field, f"must hold a readable {KEPT_FILE}", " ".join(str(e).split()),
        "convert the model again",
    ) from e
  if not isinstance(kept, list) or not all(type(i) is int for i in kept):
    raise errors.invalid(
        field, f"must hold a {KEPT_FILE} with a list of integers", kept,
        "convert the model again",
    )
  return kept
