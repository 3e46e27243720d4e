"""From a configuration to batches."""

import dataclasses
import functools
import math
from typing import Any

from absl import logging
import grain
import numpy as np

from tunix_progdistill import errors
from tunix_progdistill.data import chat
from tunix_progdistill.data import config as config_lib
from tunix_progdistill.data import documents as documents_lib
from tunix_progdistill.data import rows as rows_lib
from tunix_progdistill.data import sources
from tunix_progdistill.data import tokenizer as tokenizer_lib
from tunix_progdistill.data import translation

_BY_NAME = ("tfds", "huggingface")
# Rows are in memory: threads would only wait for each other.
_READ = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class _Filled:
  """Rows, and as many fillers as fill up the last batch."""

  def __init__(self, rows: rows_lib.Rows, batch_size: int):
    self._rows = rows
    self._number = math.ceil(len(rows) / batch_size) * batch_size

  def __len__(self) -> int:
    return self._number

  def __getitem__(self, index: Any) -> dict[str, Any]:
    if index < len(self._rows):
      return self._rows[index]
    return self._rows.filler()


class BatchIterator:
  """One pass over batches, which can say and be told where it is."""

  def __init__(self, batches: "Batches", inner: grain.DatasetIterator):
    self._batches = batches
    self._inner = inner

  def __iter__(self) -> "BatchIterator":
    return self

  def __next__(self) -> dict[str, np.ndarray]:
    return next(self._inner)

  def get_state(self) -> dict[str, Any]:
    """How many batches were given, and of which data; JSON can hold it."""
    return {
        "next_batch": int(self._inner.get_state()["next_index"]),
        "data": self._batches.fingerprint,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on where `get_state` was called; nothing skipped is read.

    Args:
      state: what it gave, perhaps in another process.

    Raises:
      ValueError: it is of other data, batch size or seed, or past the end.
    """
    position, data = state.get("next_batch"), state.get("data")
    if data != self._batches.fingerprint:
      raise errors.invalid(
          "the position in the data",
          f"must be one in the same rows ({self._batches.fingerprint}), batch "
          "size and shuffle_seed", data,
          "give this run the data that it began with, or start a new run",
      )
    if not isinstance(position, int) or not (
        0 <= position <= len(self._batches)
    ):
      raise errors.invalid(
          "the position in the data",
          f"must be in [0, {len(self._batches)}], the number of batches",
          position, "num_train_epochs must not be less than it was",
      )
    self._inner.set_state({"next_index": position})


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batches:
  """Batches of B rows of T tokens; may be iterated again and again.

  A batch is a dict of numpy arrays: input_tokens int32 [B, T], input_mask and
  loss_mask bool [B, T], example_id int32 [B]. Every iteration gives the same
  batches: epoch e visits the rows in an order that follows from (seed, e). In
  several processes each reads everything and gives the whole batch.

  Attributes:
    rows: the rows.
    batch_size: B.
    epochs: passes over the rows.
    seed: of the order; None keeps the order of the rows.
    fill: what becomes of rows that do not fill the last batch of an epoch: if
      true, fillers (no valid token, example_id -1) come to them, so that every
      batch has one shape; if false, they are left out.

  Raises:
    ValueError: not one batch can be filled.
  """

  rows: rows_lib.Rows
  batch_size: int
  epochs: int = 1
  seed: int | None = None
  fill: bool = False

  def __post_init__(self):
    if not self.batches_per_epoch:
      raise errors.invalid(
          "batch_size",
          f"must be at most {len(self.rows)}, the number of training rows",
          self.batch_size, "use more data, shorter rows or smaller batches",
      )

  @property
  def batches_per_epoch(self) -> int:
    whole, rest = divmod(len(self.rows), self.batch_size)
    return whole + (self.fill and rest > 0)

  def __len__(self) -> int:
    return self.epochs * self.batches_per_epoch

  @functools.cached_property
  def fingerprint(self) -> str:
    """Rows, batch size and order; not the number of epochs."""
    return f"{self.rows.fingerprint}-{self.batch_size}-{self.seed}"

  def __iter__(self) -> BatchIterator:
    source = _Filled(self.rows, self.batch_size) if self.fill else self.rows
    data = grain.MapDataset.source(source)
    if self.seed is not None:
      # grain adds the epoch to the seed: neighbours must not share orders.
      spread = np.random.SeedSequence(self.seed).generate_state(1)[0]
      data = data.shuffle(seed=int(spread))
    data = data.batch(self.batch_size, drop_remainder=True).repeat(self.epochs)
    return BatchIterator(self, iter(data.to_iter_dataset(_READ)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Datasets:
  """What `open_datasets` gives.

  Attributes:
    train: the training batches, all epochs.
    eval: the held-out batches, one pass; every row counts once.
    train_texts: the training documents' text; () for tfds and huggingface.
    eval_texts: the held-out documents' text; () for tfds and huggingface.
  """

  train: Batches
  eval: Batches
  train_texts: tuple[str, ...] = ()
  eval_texts: tuple[str, ...] = ()


def _places(
    config: config_lib.DataConfig, section: str
) -> tuple[sources.Place, sources.Place | None]:
  """Where training data is, and where held-out data, if that is told apart."""
  train = sources.Place(value=config.data_directory, field="data_directory")
  held_out = sources.Place(
      value=config.eval_directory,
      field=config_lib.name("eval_directory", section), held_out=True,
  )
  if config.eval_directory.strip():
    return train, held_out
  if sources.held_out_split(config.data_source, train):
    return train, dataclasses.replace(train, held_out=True)
  return train, None


def _documents(
    config: config_lib.DataConfig, section: str
) -> documents_lib.Documents:
  """All documents, those for training in the order of their rows."""
  place, apart = _places(config, section)
  train = documents_lib.read(config, place, section)
  if apart is None:
    found = documents_lib.split(train, config.eval_fraction, section)
  else:
    held_out = documents_lib.read(config, apart, section)
    twice = {d.digest for d in train} & {d.digest for d in held_out}
    if twice:
      logging.warning(
          "%d of %d documents of %s are training data too",
          len(twice), len(held_out), apart.field,
      )
    found = documents_lib.Documents(
        train=tuple(train), held_out=documents_lib.by_hash(held_out)
    )
  if config.shuffle_seed is None:
    return found
  # So that the first rows are a fair sample, whatever the order of the files.
  return dataclasses.replace(found, train=documents_lib.by_hash(found.train))


def _most_train(config: config_lib.DataConfig) -> int | None:
  limits = [config.max_train_rows, config.num_batches * config.batch_size]
  return min((limit for limit in limits if limit), default=None)


def open_datasets(
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    section: str = config_lib.SECTION,
    *,
    add_eos: bool = False,
) -> Datasets:
  """Reads, splits and tokenises the data.

  The rows and their ids do not depend on the seed, which orders batches only.

  Args:
    config: which data.
    tokenizer: makes tokens.
    section: of the configuration, for messages.
    add_eos: end each plain text by <eos>, instead of an empty line.

  Raises:
    ValueError: the data is missing, unreadable, empty or too little; one line.
  """
  texts: dict[str, tuple[str, ...]] = {}
  if config.data_source in _BY_NAME:
    train, held_out = translation.rows(
        config, tokenizer, most_train=_most_train(config),
        most_held_out=config.max_eval_rows,
    )
  else:
    found = _documents(config, section)
    make = functools.partial(
        rows_lib.tokenise, config=config, tokenizer=tokenizer, section=section,
        add_eos=add_eos,
    )
    train = make(found.train, held_out=False, most=_most_train(config))
    held_out = make(found.held_out, held_out=True, most=config.max_eval_rows)
    texts = {
        "train_texts": tuple(d.text for d in found.train),
        "eval_texts": tuple(d.text for d in found.held_out),
    }
  return Datasets(
      train=Batches(
          rows=train, batch_size=config.batch_size,
          epochs=config.num_train_epochs, seed=config.shuffle_seed,
      ),
      eval=Batches(
          rows=held_out, fill=True,
          batch_size=config.eval_batch_size or config.batch_size,
      ),
      **texts,
  )


def training_texts(
    config: config_lib.DataConfig, section: str = config_lib.SECTION
) -> tuple[str, ...]:
  """The text of the training documents, for choosing a vocabulary.

  Of prompts and chats it is what they say, without a template. Held-out text
  is not in it.

  Raises:
    ValueError: as `open_datasets`.
  """
  if config.data_source in _BY_NAME:
    return translation.training_texts(config)
  return tuple(d.text for d in _documents(config, section).train)


def check(
    config: config_lib.DataConfig, field: str = config_lib.SECTION
) -> None:
  """Refuses what cannot work, before anything large is read.

  Looks for the files, reads the first record of each side, and compiles the
  chat template, if it is a file.

  Args:
    config: which data.
    field: the configuration's name, for messages.

  Raises:
    ValueError: one line: field, rule, value, remedy.
  """
  if config.data_source in _BY_NAME:
    for other in ("data_directory", "eval_directory"):
      if getattr(config, other):
        raise errors.invalid(
            config_lib.name(other, field),
            f"must be empty where data_source is {config.data_source}",
            getattr(config, other), "the dataset is named by dataset_name",
        )
    if not config.dataset_name:
      raise errors.invalid(
          "dataset_name",
          f"must name a dataset where data_source is {config.data_source}",
          config.dataset_name, "Tunix knows mtnt/en-fr and "
          "Helsinki-NLP/opus-100",
      )
    return
  if config.dataset_name:
    raise errors.invalid(
        "dataset_name",
        f"must be empty where data_source is {config.data_source}",
        config.dataset_name, "name the data by data_directory",
    )
  for place in _places(config, field):
    if place is not None:
      first = next(sources.records(config, place), None)
      if first is None:
        raise errors.invalid(
            place.field, "must hold at least one record", place.value,
            "no file holds one",
        )
      kind = documents_lib.resolve_format(first, config, field)
      documents_lib.make(first, kind, config, field)
  if config.chat_template not in ("", "tokenizer"):
    chat.load_template(
        config.chat_template, None, config_lib.name("chat_template", field)
    )
