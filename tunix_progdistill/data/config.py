"""`DataConfig`: which text, and how it becomes batches."""

import dataclasses
import difflib
from typing import Any

from tunix_progdistill import errors

SOURCES = ("text", "jsonl", "hf_disk", "array_record", "tfds", "huggingface")
FORMATS = ("auto", "text", "prompt", "chat")
ON_LONG = ("truncate", "skip", "raise")
ENCODING_ERRORS = ("strict", "replace")
SECTION = "data_config"
# Tunix's keys: they stand at the top level of a YAML.
TOP_LEVEL = (
    "data_source", "data_directory", "dataset_name", "batch_size",
    "max_target_length", "num_train_epochs", "num_batches", "tfds_download",
)

_MOST_EPOCHS = 1_000_000_000


def name(field: str, section: str = SECTION) -> str:
  """A field as a user writes it.

  >>> name("batch_size"), name("pack")
  ('batch_size', 'data_config.pack')
  """
  return field if field in TOP_LEVEL else f"{section}.{field}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
  """Which text, and how it becomes batches.

  The first group are Tunix's keys, which stand at the top level of a YAML; the
  others stand in its section `data_config`.

  Attributes:
    data_source: text (plain files, one document each), jsonl (JSON lines),
      hf_disk (a dataset that Hugging Face's `save_to_disk` wrote),
      array_record (array records of JSON, or of plain text); tfds or
      huggingface: a translation dataset by name, as Tunix's own command reads
      it.
    data_directory: file, folder or glob of the training data, several
      separated by commas; package:NAME/PATH is a path in an installed package.
      A document that occurs twice counts once.
    dataset_name: name of the dataset, for tfds and huggingface.
    batch_size: rows in a batch, >= 1. What does not fill the last batch of an
      epoch is left out.
    max_target_length: tokens in a row, with <bos>, >= 2.
    num_train_epochs: passes over the training data, >= 1.
    num_batches: use only the first num_batches * batch_size training rows, in
      every epoch; 0 uses all.
    tfds_download: let tfds download.
    eval_directory: like data_directory, of held-out data; empty holds out a
      part of the training data (hf_disk: its validation or test split, if it
      has one).
    eval_fraction: part of the documents that is held out where there is no
      eval_directory, in (0, 1), chosen by the hash of their content.
    eval_batch_size: rows in a batch of held-out data, >= 1; null for
      batch_size. The last batch is filled up with rows that count nothing.
    max_eval_rows: use at most this many held-out rows, >= 1; null for all.
    max_train_rows: use at most this many training rows, >= 1; null for all.
    format: text, prompt (prompt and answer) or chat (messages): what a record
      holds; auto decides by the fields of the first record.
    text_field: field of a record with its text.
    prompt_field: field with the prompt.
    answer_field: field with the answer; only its tokens count in the loss.
      Nothing is put between prompt and answer.
    messages_field: field with the list of messages, each with role and content;
      only the assistant's turns count in the loss.
    chat_template: file with a Jinja template for messages; empty for the
      tokenizer's own. A file, or the word tokenizer for the tokenizer's own,
      also makes a prompt and its answer into two messages.
    pack: join documents by an empty line and cut them into full rows (text
      only); false gives each document rows of its own.
    shuffle_seed: seed of the order of training rows, >= 0, another order in
      every epoch; null keeps the order of the files.
    encoding_errors: strict refuses text that is not UTF-8; replace puts U+FFFD
      in its place.
    on_long: what becomes of a record (or, without pack, of a document) that is
      too long for a row. truncate: a prompt loses its start (and then the
      answer its end), a chat its end (and is left out if no answer remains),
      a text goes on in further rows; skip: it is left out; raise: an error.

  Raises:
    ValueError: on a value out of range.
  """

  data_source: str = "text"
  data_directory: str = ""
  dataset_name: str = ""
  batch_size: int = 16
  max_target_length: int = 256
  num_train_epochs: int = 1
  num_batches: int = 0
  tfds_download: bool = True

  eval_directory: str = ""
  eval_fraction: float = 0.1
  eval_batch_size: int | None = None
  max_eval_rows: int | None = None
  max_train_rows: int | None = None
  format: str = "auto"
  text_field: str = "text"
  prompt_field: str = "prompt"
  answer_field: str = "answer"
  messages_field: str = "messages"
  chat_template: str = ""
  pack: bool = True
  shuffle_seed: int | None = 0
  encoding_errors: str = "strict"
  on_long: str = "truncate"

  def __post_init__(self):
    errors.plain_fields(self)
    self._one_of("data_source", SOURCES)
    self._one_of("format", FORMATS)
    self._one_of("encoding_errors", ENCODING_ERRORS)
    self._one_of("on_long", ON_LONG)
    for field in ("data_directory", "dataset_name", "eval_directory",
                  "chat_template"):
      self._require(
          field, isinstance(getattr(self, field), str), "must be a string",
          "leave it out, or write a string in quotes",
      )
    for field in ("tfds_download", "pack"):
      self._require(
          field, isinstance(getattr(self, field), bool),
          "must be true or false", "write it without quotes",
      )
    self._whole("batch_size", 1)
    self._whole("max_target_length", 2)
    self._whole("num_train_epochs", 1)
    if self.num_train_epochs > _MOST_EPOCHS:
      raise errors.invalid(
          "num_train_epochs", f"must be at most {_MOST_EPOCHS:,}",
          self.num_train_epochs, "the plan or max_steps ends the run earlier",
      )
    self._whole("num_batches", 0)
    self._whole("eval_batch_size", 1, none="batch_size")
    self._whole("max_eval_rows", 1, none="all")
    self._whole("max_train_rows", 1, none="all")
    self._whole("shuffle_seed", 0, none="the order of the files")
    part = self.eval_fraction
    self._require(
        "eval_fraction",
        isinstance(part, float) and 0.0 < part < 1.0,
        "must be a number in (0, 1)", "try 0.1",
    )
    self._fields()
    if self.data_source == "text" and self.format not in ("auto", "text"):
      raise errors.invalid(
          name("format"), "must be text where data_source is text",
          self.format, "prompts and chats are records: use data_source: jsonl",
      )

  def _fields(self) -> None:
    names = ("text_field", "prompt_field", "answer_field", "messages_field")
    for field in names:
      value = getattr(self, field)
      self._require(
          field, isinstance(value, str) and bool(value),
          "must be the name of a field", f"leave it out for {field[:-6]!r}",
      )
    if self.prompt_field == self.answer_field:
      raise errors.invalid(
          name("answer_field"), "must differ from prompt_field",
          self.answer_field, "name the field that holds the answer",
      )

  def _require(self, field: str, holds: bool, rule: str, remedy: str) -> None:
    if not holds:
      raise errors.invalid(name(field), rule, getattr(self, field), remedy)

  def _one_of(self, field: str, valid: tuple[str, ...]) -> None:
    value: Any = getattr(self, field)
    if isinstance(value, str) and value in valid:
      return
    near = difflib.get_close_matches(str(value), valid, n=1)
    raise errors.invalid(
        name(field), f"must be one of {', '.join(valid)}", value,
        f"did you mean {near[0]}?" if near else f"try {valid[0]}",
    )

  def _whole(self, field: str, low: int, none: str = "") -> None:
    value: Any = getattr(self, field)
    if value is None and none:
      return
    right = isinstance(value, int) and not isinstance(value, bool)
    self._require(
        field, right and value >= low,
        f"must be a whole number >= {low}" + (" or null" if none else ""),
        f"write null for {none}" if none else f"try {max(low, 1)}",
    )
