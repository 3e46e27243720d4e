"""Documents as rows of T tokens."""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
from typing import Any

from absl import logging
import numpy as np
import tqdm

from tunix_progdistill import errors
from tunix_progdistill.data import chat
from tunix_progdistill.data import config as config_lib
from tunix_progdistill.data import documents as documents_lib
from tunix_progdistill.data import tokenizer as tokenizer_lib

# Training rows are numbered from 0, held-out rows from here.
FIRST_HELD_OUT_ID = 2**30
# The id of a row that only fills up a batch.
FILLER_ID = -1
_JOIN = "\n\n"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
  """N rows of T tokens, a random-access source for grain.

  Kept without padding: row n is tokens[ends[n - 1]:ends[n]].

  Invariants: a row has at least one target; its first token is none, for no
  logits predict it; `example_id` is first_id + n.

  Attributes:
    tokens: int32 [sum of lengths].
    targets: bool, of the same shape: tokens that count in the loss.
    ends: int64 [N].
    length: T.
    pad_id: what fills up a row.
    first_id: the first row's example_id.
  """

  tokens: np.ndarray
  targets: np.ndarray
  ends: np.ndarray
  length: int
  pad_id: int
  first_id: int = 0

  def __len__(self) -> int:
    return len(self.ends)

  def __repr__(self) -> str:
    return f"Rows({len(self)} x {self.length}, {self.fingerprint})"

  def __getitem__(self, index: Any) -> dict[str, Any]:
    """Row `index`: int32, bool and bool [T], and an int32."""
    n = index.__index__()
    if not 0 <= n < len(self):
      raise IndexError(f"row {n} of {len(self)}")
    start = int(self.ends[n - 1]) if n else 0
    end = int(self.ends[n])
    row = self.filler()
    row["input_tokens"][: end - start] = self.tokens[start:end]
    row["input_mask"][: end - start] = True
    row["loss_mask"][: end - start] = self.targets[start:end]
    row["example_id"] = np.int32(self.first_id + n)
    return row

  def filler(self) -> dict[str, Any]:
    """A row of padding that counts nothing."""
    return {
        "input_tokens": np.full(self.length, self.pad_id, np.int32),
        "input_mask": np.zeros(self.length, np.bool_),
        "loss_mask": np.zeros(self.length, np.bool_),
        "example_id": np.int32(FILLER_ID),
    }

  @functools.cached_property
  def fingerprint(self) -> str:
    """A hash of all that the rows hold."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{self.length} {self.pad_id} {self.first_id}".encode())
    for array in (self.ends, self.tokens, self.targets):
      digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()

  @property
  def target_tokens(self) -> int:
    """Tokens that count in the loss, over all rows."""
    return int(self.targets.sum())


class Builder:
  """Collects rows, and drops those without a target."""

  def __init__(self, length: int, pad_id: int, first_id: int, most: int | None):
    """Starts with no row.

    Args:
      length: T.
      pad_id: what fills up a row.
      first_id: the first row's example_id.
      most: rows to collect at most; None for all.
    """
    self._length = length
    self._pad_id = pad_id
    self._first_id = first_id
    self._most = most
    self._tokens: list[np.ndarray] = []
    self._targets: list[np.ndarray] = []

  def __len__(self) -> int:
    return len(self._tokens)

  @property
  def full(self) -> bool:
    return self._most is not None and len(self) >= self._most

  def add(self, tokens: np.ndarray, targets: np.ndarray) -> bool:
    """Takes a row of at most T tokens; says whether it has a target."""
    targets = targets & (np.arange(len(targets)) > 0)
    if not targets.any():
      return False
    if not self.full:
      self._tokens.append(np.asarray(tokens, np.int32))
      self._targets.append(targets)
    return True

  def rows(self) -> Rows:
    """The rows so far."""
    lengths = np.array([len(t) for t in self._tokens], np.int64)
    return Rows(
        tokens=np.concatenate([np.zeros(0, np.int32), *self._tokens]),
        targets=np.concatenate([np.zeros(0, np.bool_), *self._targets]),
        ends=np.cumsum(lengths), length=self._length, pad_id=self._pad_id,
        first_id=self._first_id,
    )


def _windows(
    stream: np.ndarray, bos: int | None, length: int
) -> Iterator[np.ndarray]:
  """Cuts a stream of tokens into rows that begin with <bos>."""
  head = np.array([] if bos is None else [bos], np.int32)
  body = length - len(head)
  for start in range(0, len(stream), body):
    yield np.concatenate([head, stream[start : start + body]])


def _encode_text(
    text: str, tokenizer: tokenizer_lib.Tokenizer
) -> np.ndarray:
  """Ids of a text, in which nothing spells a special piece."""
  ids = tokenizer.encode(text, parse_special=False)
  return np.asarray(ids, np.int32)


def _pack(
    texts: Iterator[str], tokenizer: tokenizer_lib.Tokenizer, builder: Builder,
    length: int,
    add_eos: bool,
) -> None:
  """Joins texts, by an empty line or <eos>, and cuts them into full rows.

  Each row is <bos>, where the tokenizer has one, and the next tokens; the last
  row may be shorter. No token is lost or twice in it, but for a single last
  token without a <bos> before it, which nothing could predict.
  """
  bos = tokenizer.bos_id
  body = length - (bos is not None)
  rest = np.zeros(0, np.int32)
  for text in texts:
    ids = (
        _closed(_encode_text(text, tokenizer), tokenizer) if add_eos
        else _encode_text(text + _JOIN, tokenizer)
    )
    rest = np.concatenate([rest, ids])
    whole = len(rest) - len(rest) % body
    for row in _windows(rest[:whole], bos, length):
      builder.add(row, np.ones(len(row), np.bool_))
    rest = rest[whole:]
    if builder.full:
      return
  for row in _windows(rest, bos, length):
    builder.add(row, np.ones(len(row), np.bool_))


def _closed(
    ids: np.ndarray, tokenizer: tokenizer_lib.Tokenizer
) -> np.ndarray:
  """`ids` with <eos> behind them, where the tokenizer has one."""
  if tokenizer.eos_id is None:
    return ids
  return np.append(ids, np.int32(tokenizer.eos_id))


class _Single:
  """Gives each document rows of its own."""

  def __init__(
      self, config: config_lib.DataConfig, tokenizer: tokenizer_lib.Tokenizer,
      section: str, add_eos: bool,
  ):
    self._add_eos = add_eos
    self._config = config
    self._tokenizer = tokenizer
    self._section = section
    self._template: chat.Template | None = None
    self.skipped = 0
    self.cut = 0

  def template(self) -> chat.Template:
    """The chat template, read at its first use."""
    if self._template is None:
      self._template = chat.load_template(
          self._config.chat_template, self._tokenizer,
          config_lib.name("chat_template", self._section),
      )
    return self._template

  def add(self, document: documents_lib.Document, builder: Builder) -> None:
    """Adds a document's rows, as `on_long` says."""
    if document.format == "text":
      rows = self._text(document)
    elif document.format == "prompt" and not self._config.chat_template:
      rows = self._prompt(document)
    else:
      rows = self._chat(document)
    added = False
    for tokens, targets in rows:
      added |= builder.add(tokens, targets)
    self.skipped += not added

  def _fits(self, document: documents_lib.Document, number: int) -> bool:
    """Whether a document fits; counts it, or raises, where it does not."""
    length = self._config.max_target_length
    if number <= length:
      return True
    if self._config.on_long == "raise":
      raise errors.invalid(
          "max_target_length",
          f"must be at least {number}, the tokens of {document.place}", length,
          "make it longer, or set "
          f"{config_lib.name('on_long', self._section)} to truncate or skip",
      )
    self.cut += self._config.on_long == "truncate"
    return False

  def _text(self, document):
    bos = self._tokenizer.bos_id
    ids = _encode_text(document.value, self._tokenizer)
    if self._add_eos:
      ids = _closed(ids, self._tokenizer)
    number = len(ids) + (bos is not None)
    if not self._fits(document, number) and self._config.on_long == "skip":
      return
    for row in _windows(ids, bos, self._config.max_target_length):
      yield row, np.ones(len(row), np.bool_)

  def _prompt(self, document):
    length = self._config.max_target_length
    prompt, answer = document.value
    tokens, targets = chat.encode_prompt(prompt, answer, self._tokenizer)
    if not self._fits(document, len(tokens)):
      if self._config.on_long == "skip":
        return
      # The prompt loses its start, but for <bos>; then the answer its end.
      head = int(self._tokenizer.bos_id is not None)
      asked = int(len(targets) - targets.sum()) - head
      lost = min(len(tokens) - length, asked)
      kept = np.ones(len(tokens), np.bool_)
      kept[head : head + lost] = False
      tokens, targets = tokens[kept][:length], targets[kept][:length]
    yield tokens, targets

  def _chat(self, document):
    length = self._config.max_target_length
    messages = document.value
    if document.format == "prompt":
      messages = [
          {"role": role, "content": content}
          for role, content in zip(
              ("user", "assistant"), document.value, strict=True
          )
      ]
    tokens, targets = chat.encode(
        self.template(), messages, self._tokenizer, document.place
    )
    if not self._fits(document, len(tokens)):
      if self._config.on_long == "skip":
        return
      tokens, targets = tokens[:length], targets[:length]
    yield tokens, targets


def tokenise(
    documents: Sequence[documents_lib.Document],
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    held_out: bool,
    most: int | None = None,
    section: str = config_lib.SECTION,
    add_eos: bool = False,
) -> Rows:
  """Makes rows of documents, once and for all.

  Packed texts are joined by an empty line, and every row begins with <bos>
  where the tokenizer has one. The spelling of a special piece in a
  document stays ordinary text.

  Args:
    documents: in the order of the rows, all of one format.
    config: length, packing, and what becomes of what is too long.
    tokenizer: makes tokens.
    held_out: whether the rows are held-out data, which have ids of their own.
    most: rows at most; documents beyond are not even tokenised.
    section: of the configuration, for messages.
    add_eos: end each plain text by <eos>, which then takes the place of the
      empty line; prompts and chats end by it or by their template anyway.

  Returns:
    The rows: the same for the same documents.

  Raises:
    ValueError: there is no row, or a document is too long and on_long is
      raise.
  """
  first = FIRST_HELD_OUT_ID if held_out else 0
  length = config.max_target_length
  builder = Builder(length, tokenizer.pad_id, first, most)
  single = _Single(config, tokenizer, section, add_eos)
  what = "held-out" if held_out else "training"
  with tqdm.tqdm(
      documents, desc=f"tokenise {what}", unit="doc", disable=None
  ) as bar:
    if config.pack and documents[0].format == "text":
      _pack((d.value for d in bar), tokenizer, builder, length, add_eos)
    else:
      for document in bar:
        single.add(document, builder)
        if builder.full:
          break
  rows = builder.rows()
  if not len(rows):
    raise errors.invalid(
        "max_target_length",
        f"must leave at least one {what} row with a token to predict", length,
        f"{single.skipped} of {len(documents)} documents are too long or say "
        "nothing; make rows longer",
    )
  if len(rows) > FIRST_HELD_OUT_ID:
    raise errors.invalid(
        config_lib.name("max_train_rows", section),
        f"must be at most {FIRST_HELD_OUT_ID}, for ids are 32 bits wide",
        most, "use fewer rows",
    )
  logging.info(
      "%d %s rows of %d tokens out of %d documents; %d tokens count",
      len(rows), what, length, len(documents), rows.target_tokens,
  )
  if single.skipped or single.cut:
    logging.warning(
        "%s data: %d documents are longer than max_target_length=%d and were "
        "cut, %d are left out", what, single.cut, length, single.skipped,
    )
  return rows
