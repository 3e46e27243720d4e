"""Documents: what a record says, and which of them are held out."""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import functools
import hashlib
import json
from typing import Any

from absl import logging
import tqdm

from tunix_progdistill import errors
from tunix_progdistill.data import config as config_lib
from tunix_progdistill.data import sources

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
  """One document, prompt with answer, or chat.

  Attributes:
    format: text, prompt or chat.
    value: the text; (prompt, answer); or the messages.
    text: everything that it says, for choosing a vocabulary.
    place: where it was read.
  """

  format: str
  value: Any
  text: str
  place: str

  @functools.cached_property
  def digest(self) -> bytes:
    """sha256 of the content: equal content, equal digest."""
    if self.format == "text":
      said = self.text
    else:
      said = json.dumps(self.value, sort_keys=True, default=str)
    return hashlib.sha256(said.encode("utf-8")).digest()


def resolve_format(
    record: sources.Record,
    config: config_lib.DataConfig,
    section: str = config_lib.SECTION,
) -> str:
  """What the records hold: text, prompt or chat.

  Args:
    record: the first one.
    config: `format`, and the names of the fields.
    section: of the configuration, for messages.

  Raises:
    ValueError: the record lacks the fields; those that it has are listed.
  """
  needs = {
      "chat": ("messages_field",),
      "prompt": ("prompt_field", "answer_field"),
      "text": ("text_field",),
  }
  if config.data_source == "text":
    return "text"
  has = ", ".join(map(repr, record.fields)) or "none"
  if config.format != "auto":
    for option in needs[config.format]:
      _field(record, option, config, section)
    return config.format
  for kind, options in needs.items():
    if all(getattr(config, option) in record.fields for option in options):
      return kind
  raise errors.invalid(
      config_lib.name("format", section),
      f"must be told by the fields {config.messages_field!r}, "
      f"{config.prompt_field!r} with {config.answer_field!r}, or "
      f"{config.text_field!r}",
      config.format,
      f"{record.place} has {has}; set {section}.text_field, prompt_field and "
      "answer_field, or messages_field",
  )


def _field(
    record: sources.Record, option: str, config: config_lib.DataConfig,
    section: str,
) -> Any:
  field = getattr(config, option)
  if field not in record.fields:
    raise errors.invalid(
        config_lib.name(option, section), "must be a field of every record",
        field,
        f"{record.place} has {', '.join(map(repr, record.fields)) or 'none'}",
    )
  return record.fields[field]


def _clean(text: str, place: str, mode: str, section: str) -> str:
  """Refuses or replaces halves of surrogate pairs, which JSON can spell."""
  try:
    text.encode("utf-8")
    return text
  except UnicodeEncodeError as e:
    if mode == "replace":
      raw = text.encode("utf-16-le", "surrogatepass")
      return raw.decode("utf-16-le", "replace")
    raise errors.invalid(
        config_lib.name("encoding_errors", section),
        "must be replace for text with half a surrogate pair", mode,
        f"{place} has one at character {e.start} of a field",
    ) from None


def _wrong(record: sources.Record, field: str, value: Any, rule: str):
  return errors.invalid(f"field {field!r}", rule, value, f"see {record.place}")


def _string(
    record: sources.Record, option: str, config: config_lib.DataConfig,
    section: str,
) -> str:
  value = _field(record, option, config, section)
  if not isinstance(value, str):
    raise _wrong(
        record, getattr(config, option), value,
        f"must hold a string, not a {type(value).__name__}",
    )
  return _clean(value, record.place, config.encoding_errors, section)


def _texts_of(content: Any) -> list[str] | None:
  """The texts of a message's content, or None if it is something else."""
  if isinstance(content, str):
    return [content]
  if isinstance(content, list) and all(
      isinstance(part, Mapping) and isinstance(part.get("text"), str)
      for part in content
  ):
    return [part["text"] for part in content]
  return None


def _cleaned(value: Any, *args: str) -> Any:
  """`_clean` for every string in a tree of dicts and lists."""
  if isinstance(value, str):
    return _clean(value, *args)
  if isinstance(value, Mapping):
    return {_cleaned(k, *args): _cleaned(v, *args) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_cleaned(v, *args) for v in value]
  return value


def _messages(
    record: sources.Record, config: config_lib.DataConfig, section: str
) -> list[dict[str, Any]]:
  field = config.messages_field
  value = _field(record, "messages_field", config, section)
  if not isinstance(value, list | tuple) or not all(
      isinstance(m, Mapping) for m in value
  ):
    raise _wrong(
        record, field, value, "must hold a list of messages with role and "
        "content",
    )
  for i, message in enumerate(value):
    here = f"{field}[{i}]"
    if "role" not in message or "content" not in message:
      raise _wrong(
          record, here, sorted(map(str, message)), "must have role and content"
      )
    if message["role"] not in ROLES:
      raise _wrong(
          record, f"{here}.role", message["role"],
          f"must be one of {', '.join(ROLES)}",
      )
    if _texts_of(message["content"]) is None:
      raise _wrong(
          record, f"{here}.content", message["content"],
          "must hold a string, or a list of parts with text",
      )
  return _cleaned(value, record.place, config.encoding_errors, section)


def make(
    record: sources.Record,
    kind: str,
    config: config_lib.DataConfig,
    section: str = config_lib.SECTION,
) -> Document | None:
  """The document that a record holds, or None if it says nothing.

  A text loses the blanks around it. A prompt says nothing without an answer, a
  chat without a turn of the assistant.

  Args:
    record: where from.
    kind: text, prompt or chat.
    config: names of the fields.
    section: of the configuration, for messages.

  Raises:
    ValueError: a field is missing or holds the wrong type.
  """
  value: Any
  if kind == "text":
    value = text = _string(record, "text_field", config, section).strip()
    says = bool(text)
  elif kind == "prompt":
    value = (
        _string(record, "prompt_field", config, section),
        _string(record, "answer_field", config, section),
    )
    text, says = "\n".join(value), bool(value[1].strip())
  else:
    value = _messages(record, config, section)
    turns = ["".join(_texts_of(m["content"]) or ()) for m in value]
    text = "\n".join(turns)
    says = any(
        m["role"] == "assistant" and turn.strip()
        for m, turn in zip(value, turns, strict=True)
    )
  if not says:
    return None
  return Document(format=kind, value=value, text=text, place=record.place)


def read(
    config: config_lib.DataConfig,
    place: sources.Place,
    section: str = config_lib.SECTION,
) -> list[Document]:
  """All documents of a place, in the order of the files, each content once.

  Args:
    config: of a source of files.
    place: where they are.
    section: of the configuration, for messages.

  Raises:
    ValueError: as `sources.records` and `make`; or nothing says anything.
  """
  kind, empty, first_empty, twice = None, 0, "", 0
  found: dict[bytes, Document] = {}
  bar = tqdm.tqdm(
      sources.records(config, place), desc="read", unit="doc", disable=None
  )
  for record in bar:
    kind = kind or resolve_format(record, config, section)
    document = make(record, kind, config, section)
    if document is None:
      empty += 1
      first_empty = first_empty or record.place
    elif found.setdefault(document.digest, document) is not document:
      twice += 1
  if not found:
    raise errors.invalid(
        place.field, "must hold at least one document that says something",
        place.value,
        f"{empty} empty ones were found, the first is {first_empty}" if empty
        else "no record was found",
    )
  logging.info("%s: %d documents of format %s", place.field, len(found), kind)
  if empty:
    logging.warning(
        "%s: %d empty documents are left out, the first is %s",
        place.field, empty, first_empty,
    )
  if twice:
    logging.info(
        "%s: %d documents occur more than once and count once",
        place.field, twice,
    )
  return list(found.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents:
  """Documents for training and documents held out.

  Attributes:
    train: in an order that does not depend on the seed.
    held_out: ordered by their hash, so that a part is a fair sample.
  """

  train: tuple[Document, ...]
  held_out: tuple[Document, ...]


def by_hash(documents: Iterable[Document]) -> tuple[Document, ...]:
  """Ordered by digest: an order that has nothing to do with the content."""
  return tuple(sorted(documents, key=lambda d: d.digest))


def split(
    documents: Iterable[Document],
    fraction: float,
    section: str = config_lib.SECTION,
) -> Documents:
  """Splits by content, the same way every time.

  A document is held out if the first 8 bytes of its digest, as a number in
  [0, 1), are below `fraction`: the same content cannot be on both sides, and a
  document keeps its side when others come or go. Where few documents leave a
  side empty, the one with the least or greatest number goes there.

  Args:
    documents: each content once.
    fraction: in (0, 1).
    section: of the configuration, for messages.

  Returns:
    `train` in the given order, `held_out` by hash.

  Raises:
    ValueError: there are not two documents.
  """
  train: list[Document] = []
  held_out: list[Document] = []
  for document in documents:
    place = int.from_bytes(document.digest[:8], "big") / 2.0**64
    (held_out if place < fraction else train).append(document)
  if not held_out and len(train) > 1:
    held_out.append(min(train, key=lambda d: d.digest))
    train.remove(held_out[0])
  elif not train and len(held_out) > 1:
    train.append(max(held_out, key=lambda d: d.digest))
    held_out.remove(train[0])
  if not train or not held_out:
    raise errors.invalid(
        config_lib.name("eval_fraction", section),
        "must leave documents on both sides", fraction,
        f"of {len(train) + len(held_out)} distinct documents {len(train)} are "
        f"for training and {len(held_out)} held out; use more documents, "
        "another fraction, or eval_directory",
    )
  return Documents(train=tuple(train), held_out=by_hash(held_out))
