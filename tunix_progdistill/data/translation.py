"""Tunix's translation datasets (tfds, huggingface) as rows of ours."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tqdm

from tunix_progdistill import errors
from tunix_progdistill.data import config as config_lib
from tunix_progdistill.data import rows as rows_lib
from tunix_progdistill.data import tokenizer as tokenizer_lib


class _TunixTokenizer:
  """A tokenizer as Tunix's data loader calls it.

  Tunix puts <bos> before the source and before the target; here it stands
  before the source only, so that a row has it once.
  """

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer):
    self._tokenizer = tokenizer

  def pad_id(self) -> int:
    return self._tokenizer.pad_id

  def tokenize(
      self, example: str, prefix: str = "", suffix: str = "",
      add_eos: bool = True,
  ) -> np.ndarray:
    """Ids of a source (without <eos>) or of a target (with it)."""
    ids = self._tokenizer.encode(prefix + example + suffix, parse_special=False)
    own = self._tokenizer.eos_id if add_eos else self._tokenizer.bos_id
    ends = [] if own is None else [own]
    return np.concatenate(
        [ids, ends] if add_eos else [ends, ids]
    ).astype(np.int32)


class _Listener:
  """Stands for a tokenizer, and writes down what it is asked to tokenise."""

  def __init__(self) -> None:
    self.texts: list[str] = []

  def pad_id(self) -> int:
    return 0

  def tokenize(
      self, example: str, prefix: str = "", suffix: str = "",
      add_eos: bool = True,
  ) -> np.ndarray:
    del add_eos
    self.texts.append(prefix + example + suffix)
    return np.ones(1, np.int32)


def _create(config: config_lib.DataConfig, tokenizer: Any) -> tuple[Any, Any]:
  """Tunix's training and held-out examples, one by one, one epoch."""
  try:
    from tunix.examples.data import translation_dataset
  except ModuleNotFoundError as e:
    raise errors.invalid(
        "data_source", "must have its packages installed", config.data_source,
        f"run `pip install {str(e.name).partition('.')[0]}`",
    ) from None
  try:
    return translation_dataset.create_datasets(
        dataset_name=config.dataset_name,
        global_batch_size=1,
        max_target_length=config.max_target_length,
        num_train_epochs=1,
        tokenizer=tokenizer,
        tfds_download=config.tfds_download,
    )
  except ValueError as e:
    if "Unsupported dataset" not in str(e):
      raise
    raise errors.invalid(
        "dataset_name", "must be one that Tunix knows", config.dataset_name,
        str(e),
    ) from None


def _unpadded(batches: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Tokens and targets of each row of Tunix's batches, without padding.

  What Tunix calls input_mask marks the target's tokens, and they are last.
  """
  for batch in batches:
    all_tokens = np.asarray(batch.input_tokens)
    all_targets = np.asarray(batch.input_mask) != 0
    for tokens, targets in zip(all_tokens, all_targets, strict=True):
      end = int(np.flatnonzero(targets)[-1]) + 1 if targets.any() else 0
      yield tokens[:end], targets[:end]


def rows(
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    most_train: int | None,
    most_held_out: int | None,
) -> tuple[rows_lib.Rows, rows_lib.Rows]:
  """Training and held-out rows; pairs that are too long are left out by Tunix.

  Args:
    config: dataset_name and max_target_length.
    tokenizer: makes tokens.
    most_train: training rows at most; None for all.
    most_held_out: held-out rows at most; None for all.

  Raises:
    ValueError: Tunix does not know the dataset, a package is missing, or no
      row is left.
  """
  found = []
  loaders = _create(config, _TunixTokenizer(tokenizer))
  for loader, most, first in zip(
      loaders, (most_train, most_held_out), (0, rows_lib.FIRST_HELD_OUT_ID),
      strict=True,
  ):
    builder = rows_lib.Builder(
        config.max_target_length, tokenizer.pad_id, first, most
    )
    bar = tqdm.tqdm(
        _unpadded(loader), desc="tokenise", unit="pair", disable=None
    )
    for tokens, targets in bar:
      builder.add(tokens, targets)
      if builder.full:
        break
    if not len(builder):
      raise errors.invalid(
          "max_target_length", "must leave at least one row",
          config.max_target_length,
          f"every pair of {config.dataset_name} is longer; make it longer",
      )
    found.append(builder.rows())
  return found[0], found[1]


def training_texts(config: config_lib.DataConfig) -> tuple[str, ...]:
  """The training texts, sources and targets, without a tokenizer."""
  listener = _Listener()
  for _ in tqdm.tqdm(
      _create(config, listener)[0], desc="read", unit="pair", disable=None
  ):
    pass
  return tuple(listener.texts)
