"""Tunix's translation batches become ours: one <bos>, two masks."""

import sys
import types
from typing import NamedTuple

import numpy as np
import pytest
from tunix.examples.data import translation_dataset

from tests.data import common
from tunix_progdistill import data

_PAIRS = [("cat", "chat"), ("dog", "chien"), ("a", "b" * 99), ("no", "non")]
_CONFIG = {
    "data_source": "tfds", "dataset_name": "mtnt/en-fr", "batch_size": 2,
    "max_target_length": 64, "num_train_epochs": 2,
}


class _Source(list):
  """What tfds.data_source gives: records of bytes by number."""

  def __init__(self, pairs):
    super().__init__(
        {"src": s.encode(), "dst": d.encode()} for s, d in pairs
    )


@pytest.fixture
def fake(monkeypatch):
  """tfds with two splits; everything of Tunix itself is real."""
  asked = []

  def data_source(name, split, download):
    asked.append((name, split, download))
    return _Source(_PAIRS), _Source([("ox", "boeuf"), ("x", "y")])

  monkeypatch.setattr(translation_dataset.tfds, "data_source", data_source)
  monkeypatch.setitem(
      sys.modules, "tensorflow_datasets.translate.mtnt",
      types.ModuleType("mtnt"),
  )
  return asked


def test_rows_of_translations(fake):
  tokenizer = common.Characters()
  config = data.DataConfig(**_CONFIG, tfds_download=False)
  data.check(config)
  found = data.open_datasets(config, tokenizer)
  assert fake == [("mtnt/en-fr", ("train", "valid"), False)]
  assert (len(found.train), found.train.batches_per_epoch) == (2, 1)
  rows = [found.train.rows[n] for n in range(len(found.train.rows))]
  head = "<bos>Translate this into French:\n"
  assert [
      tokenizer.decode(r["input_tokens"][r["input_mask"]]) for r in rows
  ] == [
      f"{head}{said}<eos>" for said in ("cat\nchat", "dog\nchien", "no\nnon")
  ]
  assert [
      tokenizer.decode(r["input_tokens"][r["loss_mask"]]) for r in rows
  ] == ["chat<eos>", "chien<eos>", "non<eos>"]
  (batch,) = found.eval
  assert batch["input_tokens"].shape == (2, 64)
  assert len(set(batch["example_id"])) == 2


def test_texts_and_limits(fake):
  config = data.DataConfig(**_CONFIG, max_train_rows=2, max_eval_rows=1)
  found = data.open_datasets(config, common.Characters())
  assert (len(found.train.rows), len(found.eval.rows)) == (2, 1)
  texts = data.training_texts(config)
  assert texts[:2] == ("Translate this into French:\ncat\n", "chat")
  assert len(texts) == 8


def test_every_pair_too_long(fake):
  short = data.DataConfig(**(_CONFIG | {"max_target_length": 8}))
  with pytest.raises(ValueError) as e:
    data.open_datasets(short, common.Characters())
  assert "every pair of mtnt/en-fr is longer" in common.one_line(e)


def test_unknown_dataset_and_missing_package(monkeypatch):
  other = data.DataConfig(**(_CONFIG | {"dataset_name": "other"}))
  with pytest.raises(ValueError) as e:
    data.open_datasets(other, common.Characters())
  assert common.one_line(e) == (
      "dataset_name must be one that Tunix knows, got 'other'; "
      "Unsupported dataset: other"
  )
  monkeypatch.delitem(
      sys.modules, "tunix.examples.data.translation_dataset"
  )
  monkeypatch.delattr("tunix.examples.data.translation_dataset")
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
  with pytest.raises(ValueError) as e:
    data.open_datasets(data.DataConfig(**_CONFIG), common.Characters())
  assert "run `pip install tensorflow_datasets`" in common.one_line(e)


class _Batch(NamedTuple):
  input_tokens: np.ndarray
  input_mask: np.ndarray


def test_padding_is_told_from_the_masks(monkeypatch):
  """A pad id inside the text stays valid; a row without target is dropped."""
  batches = [
      _Batch(np.array([[7, 0, 8, 9, 0, 0], [5, 5, 0, 0, 0, 0]]),
             np.array([[0, 0, 1, 1, 0, 0], [0] * 6])),
  ]
  monkeypatch.setattr(
      translation_dataset, "create_datasets", lambda **_: (batches, batches)
  )
  config = data.DataConfig(
      **(_CONFIG | {"max_target_length": 6, "batch_size": 1})
  )
  rows = data.open_datasets(config, common.Characters()).train.rows
  assert len(rows) == 1
  assert rows[0]["input_tokens"].tolist() == [7, 0, 8, 9, 0, 0]
  assert rows[0]["input_mask"].tolist() == [True] * 4 + [False] * 2
  assert rows[0]["loss_mask"].tolist() == [False] * 2 + [True] * 2 + [False] * 2
