"""Batches: their order, their ids, and where they go on after a restore."""

import dataclasses
import hashlib
import json
import logging

import datasets as hf_datasets
import numpy as np
import pytest

from tests.data import common
from tunix_progdistill import data
from tunix_progdistill.data import documents

_TOKENIZER = common.Characters()


@pytest.fixture
def folder(tmp_path):
  """Twenty documents of four tokens."""
  path = tmp_path / "docs"
  path.mkdir()
  for i in range(20):
    (path / f"{i:02d}.txt").write_text(f"a{i:02d}.")
  return path


def _config(folder, **kwargs):
  fields = {
      "data_directory": str(folder), "batch_size": 2, "max_target_length": 5,
      "pack": False, "eval_fraction": 0.3,
  }
  return data.DataConfig(**(fields | kwargs))


def _open(folder, **kwargs):
  return data.open_datasets(_config(folder, **kwargs), _TOKENIZER)


def _ids(batches):
  return [batch["example_id"].tolist() for batch in batches]


def _said(batches):
  return [
      _TOKENIZER.decode(tokens[mask])
      for batch in batches
      for tokens, mask in zip(
          batch["input_tokens"], batch["input_mask"], strict=True
      )
      if mask.any()
  ]


def test_shapes_and_kinds(folder):
  found = _open(folder, eval_batch_size=3)
  for batches, rows in ((found.train, 2), (found.eval, 3)):
    for batch in batches:
      assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
          "input_tokens": ((rows, 5), "int32"),
          "input_mask": ((rows, 5), "bool"),
          "loss_mask": ((rows, 5), "bool"),
          "example_id": ((rows,), "int32"),
      }
  every = {
      i for side in (found.train, found.eval) for ids in _ids(side) for i in ids
  }
  assert len(every - {-1}) == 20 - len(found.train.rows) % 2


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize("taken", [0, 1, 4, 7, 8, 12, 21])
def test_k26_1_batches_after_a_restore_are_the_missing_ones(
    folder, seed, taken
):
  """Also at the end of an epoch, in the second one, and with shuffle."""
  kwargs = {"shuffle_seed": seed, "num_train_epochs": 3}
  every = _ids(_open(folder, **kwargs).train)
  assert len(every) == 21  # 15 of 20 documents train: seven batches an epoch
  straight = iter(_open(folder, **kwargs).train)
  seen = _ids([next(straight) for _ in range(taken)])
  state = json.loads(json.dumps(straight.get_state()))
  assert _ids(straight) == every[taken:]

  read = []

  class Counting(data.Rows):
    def __getitem__(self, n):
      read.append(n)
      return super().__getitem__(n)

  again = _open(folder, **kwargs).train
  fields = {
      f.name: getattr(again.rows, f.name) for f in dataclasses.fields(data.Rows)
  }
  restored = iter(dataclasses.replace(again, rows=Counting(**fields)))
  restored.set_state(state)
  assert read == []  # what was skipped is not read
  rest = _ids(restored)
  assert seen + rest == every
  assert len(read) == 2 * len(rest)
  assert restored.get_state()["next_batch"] == 21


def test_state_after_a_restore_goes_on(folder):
  batches = _open(folder).train
  first = iter(batches)
  next(first)
  second = iter(batches)
  second.set_state(first.get_state())
  assert second.get_state() == first.get_state()
  assert _ids([next(second)]) == _ids([next(first)])


def test_state_of_other_data_is_refused(folder):
  state = iter(_open(folder).train).get_state()
  for other in (
      {"batch_size": 3}, {"shuffle_seed": 1}, {"max_target_length": 4},
      {"max_train_rows": 8}, {"eval_fraction": 0.2}, {"pack": True},
  ):
    with pytest.raises(ValueError) as e:
      iter(_open(folder, **other).train).set_state(state)
    assert "must be one in the same rows" in common.one_line(e)
  iter(_open(folder, num_train_epochs=2).train).set_state(state)  # longer run
  for position in (-1, 99, None):
    with pytest.raises(ValueError, match=r"must be in \[0, 7\]"):
      iter(_open(folder).train).set_state(state | {"next_batch": position})


def test_iterating_again_gives_the_same(folder):
  batches = _open(folder, num_train_epochs=2).train
  assert _ids(batches) == _ids(batches)
  assert len(_ids(batches)) == len(batches) == 2 * batches.batches_per_epoch


def test_every_epoch_has_an_order_of_its_own(folder):
  found = _open(folder, num_train_epochs=4, batch_size=1).train
  ids = np.reshape(_ids(found), (4, 15))
  assert len({tuple(epoch) for epoch in ids}) == 4
  assert all(sorted(epoch) == list(range(15)) for epoch in ids)
  # Neighbouring seeds do not share the orders of their epochs.
  other = _open(
      folder, num_train_epochs=4, batch_size=1, shuffle_seed=1
  ).train
  shared = {tuple(e) for e in ids} & {
      tuple(e) for e in np.reshape(_ids(other), (4, 15))
  }
  assert shared == set()


def test_ids_do_not_depend_on_the_seed(folder):
  by_seed = []
  for seed in (0, 5):
    found = {}
    for batch in _open(folder, shuffle_seed=seed, batch_size=1).train:
      found[int(batch["example_id"][0])] = batch["input_tokens"].tolist()
    by_seed.append(found)
  assert by_seed[0] == by_seed[1] and len(by_seed[0]) == 15


def test_rows_do_not_depend_on_the_names_of_files(folder):
  """So that the first rows are a fair sample: files are sorted by topic."""
  before = _open(folder, max_train_rows=6)
  for file in sorted(folder.iterdir()):
    file.rename(folder / f"{99 - int(file.stem)}.txt")
  after = _open(folder, max_train_rows=6)
  assert before.train.fingerprint == after.train.fingerprint
  assert before.eval.fingerprint == after.eval.fingerprint
  said = _said(_open(folder, batch_size=1).train)
  texts = sorted(
      (t.removeprefix("<bos>") for t in said),
      key=lambda t: hashlib.sha256(t.encode()).digest(),
  )
  assert set(_said(after.train)) == {"<bos>" + t for t in texts[:6]}


def test_without_a_seed_the_order_is_that_of_the_files(folder):
  said = _said(_open(folder, shuffle_seed=None, batch_size=1).train)
  assert said == sorted(said) and len(said) == 15


def test_training_leaves_out_what_does_not_fill_a_batch(folder):
  found = _open(folder, batch_size=6, num_train_epochs=2).train
  assert (len(found), found.batches_per_epoch) == (4, 2)
  ids = np.reshape(_ids(found), (2, 12))
  assert [len(set(epoch)) for epoch in ids] == [12, 12]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
def test_evaluation_counts_every_row_once(folder, size):
  found = _open(folder, eval_batch_size=size).eval
  batches = list(found)
  assert len(batches) == len(found) == found.batches_per_epoch == -(-5 // size)
  assert {b["input_tokens"].shape for b in batches} == {(size, 5)}
  ids = [i for batch in _ids(batches) for i in batch]
  real = [i for i in ids if i != -1]
  assert len(real) == len(set(real)) == 5
  assert sum(b["loss_mask"].sum() for b in batches) == 5 * 4
  for batch in batches:
    filler = batch["example_id"] == -1
    assert not batch["input_mask"][filler].any()
    assert not batch["loss_mask"][filler].any()
    assert (batch["input_tokens"][filler] == _TOKENIZER.pad_id).all()


def test_k31_too_little_data(folder, tmp_path):
  with pytest.raises(ValueError) as e:
    _open(folder, batch_size=16)
  message = common.one_line(e)
  assert message.startswith("batch_size must be at most 15, the number")
  one = _open(folder, batch_size=15).train
  assert len(one) == 1 and len(_ids(one)) == 1
  single = tmp_path / "one.txt"
  single.write_text("alone")
  with pytest.raises(ValueError) as e:
    _open(single)
  assert "must leave documents on both sides" in common.one_line(e)


def test_k31_empty_data(folder, tmp_path):
  empty = tmp_path / "e.txt"
  empty.write_text(" \n")
  with pytest.raises(ValueError) as e:
    _open(empty)
  message = common.one_line(e)
  assert "1 empty ones were found" in message and "e.txt" in message
  with pytest.raises(ValueError) as e:
    _open(folder, eval_directory=str(empty))
  assert common.one_line(e).startswith("data_config.eval_directory must hold")
  (tmp_path / "e.jsonl").write_text("\n")
  config = _config(tmp_path / "e.jsonl", data_source="jsonl")
  for call in (data.check, data.training_texts):
    with pytest.raises(ValueError, match="data_directory must hold at least"):
      call(config)


def test_an_empty_document_among_others_is_named(folder, caplog):
  (folder / "05.txt").write_text("")
  with caplog.at_level(logging.WARNING):
    found = _open(folder)
  assert len(found.train.rows) + len(found.eval.rows) == 19
  assert "1 empty documents" in caplog.text and "05.txt" in caplog.text


def test_held_out_is_told_by_content(folder, caplog):
  """A copy is on the side of its original; others keep theirs."""
  before = _open(folder)
  for i in range(20):
    (folder / f"copy{i}.txt").write_text(f"\n a{i:02d}. ")
  (folder / "new.txt").write_text("new.")
  with caplog.at_level(logging.INFO):
    after = _open(folder)
  assert "20 documents occur more than once" in caplog.text
  for side in ("train_texts", "eval_texts"):
    new = set(getattr(after, side)) - set(getattr(before, side))
    assert new <= {"new."}
    assert set(getattr(before, side)) <= set(getattr(after, side))
  assert not set(after.train_texts) & set(after.eval_texts)
  assert len(after.train_texts) + len(after.eval_texts) == 21


def test_split_is_by_the_hash_of_the_text():
  """The same side as the example gives: sha256 of the text, below 0.3."""
  found = [
      documents.Document(format="text", value=t, text=t, place=t)
      for t in map(str, range(50))
  ]
  split = documents.split(found, 0.3)
  held_out = {
      t for t in map(str, range(50))
      if int(hashlib.sha256(t.encode()).hexdigest()[:16], 16) < 0.3 * 2**64
  }
  assert {d.text for d in split.held_out} == held_out
  assert [d.text for d in split.train] == [
      t for t in map(str, range(50)) if t not in held_out
  ]


def test_eval_directory(folder, tmp_path, caplog):
  other = tmp_path / "other"
  other.mkdir()
  (other / "x.txt").write_text("x...")
  (other / "y.txt").write_text("a03.")
  with caplog.at_level(logging.WARNING):
    found = _open(folder, eval_directory=str(other))
  assert sorted(found.eval_texts) == ["a03.", "x..."]
  assert len(found.train_texts) == 20
  assert "1 of 2 documents of data_config.eval_directory" in caplog.text


def test_limits(folder):
  rows = lambda **kwargs: len(_open(folder, **kwargs).train.rows)
  assert rows(max_train_rows=5) == 5
  assert rows(num_batches=3) == 6
  assert rows(num_batches=3, max_train_rows=5) == 5
  assert rows(num_batches=99) == 15
  assert len(_open(folder, num_batches=3).train) == 3
  assert len(_open(folder, max_eval_rows=2).eval.rows) == 2


def test_training_texts_are_those_of_training(folder):
  config = _config(folder)
  assert data.training_texts(config) == _open(folder).train_texts


def test_chat_from_end_to_end(tmp_path):
  path = common.write_jsonl(
      tmp_path / "c.jsonl",
      [{"messages": [{"role": "user", "content": f"q{i}"},
                     {"role": "assistant", "content": f"a{i}"}]}
       for i in range(12)],
  )
  tokenizer = common.Characters(chat_template=common.GEMMA)
  config = _config(
      path, data_source="jsonl", max_target_length=40, batch_size=1
  )
  data.check(config)
  found = data.open_datasets(config, tokenizer)
  assert data.training_texts(config)[0] in [f"q{i}\na{i}" for i in range(12)]
  answers = sorted(
      tokenizer.decode(b["input_tokens"][b["loss_mask"]])
      for side in (found.train, found.eval) for b in side
  )
  assert answers == sorted(f"a{i}<end_of_turn>" for i in range(12))


def test_hf_disk_split_is_held_out(tmp_path):
  part = lambda *texts: hf_datasets.Dataset.from_dict({"text": list(texts)})
  splits = {"train": part(*"abcdef"), "validation": part(*"xyz")}
  hf_datasets.DatasetDict(splits).save_to_disk(tmp_path / "d")
  config = _config(tmp_path / "d", data_source="hf_disk")
  data.check(config)
  found = data.open_datasets(config, _TOKENIZER)
  assert sorted(found.train_texts) == list("abcdef")
  assert sorted(found.eval_texts) == list("xyz")


@pytest.mark.parametrize(
    "kwargs,says",
    [
        ({"data_directory": ""}, "data_directory must name the data"),
        ({"data_directory": "none"}, "data_directory must exist"),
        ({"eval_directory": "none"}, "mine.eval_directory must exist"),
        ({"dataset_name": "x"}, "dataset_name must be empty"),
        ({"data_source": "tfds"}, "data_directory must be empty"),
        ({"data_source": "tfds", "data_directory": "",
          "eval_directory": "x"}, "mine.eval_directory must be empty"),
        ({"data_source": "huggingface", "data_directory": ""},
         "dataset_name must name a dataset"),
        ({"data_source": "jsonl"}, "must hold files that end in .jsonl"),
    ],
)
def test_check_refuses(folder, kwargs, says):
  with pytest.raises(ValueError) as e:
    data.check(_config(folder, **kwargs), field="mine")
  assert common.one_line(e).startswith(says) or says in str(e.value)


def test_check_reads_the_first_record_only(folder, tmp_path):
  data.check(_config(folder))
  path = tmp_path / "x.jsonl"
  path.write_text('{"body": "x"}\nbroken\n')
  config = _config(path, data_source="jsonl")
  with pytest.raises(ValueError) as e:
    data.check(config, field="mine")
  assert "x.jsonl:1 has 'body'; set mine.text_field" in common.one_line(e)
  named = _config(path, data_source="jsonl", text_field="body")
  data.check(named)
  with pytest.raises(ValueError, match=r"x\.jsonl:2"):
    data.open_datasets(named, _TOKENIZER)


def test_check_compiles_the_template(folder, tmp_path):
  path = tmp_path / "t.jinja"
  path.write_text("{% if %}")
  with pytest.raises(ValueError, match=r"mine\.chat_template must be a Jinja"):
    data.check(_config(folder, chat_template=str(path)), field="mine")
