"""Rows: no token is lost or twice, masks are right, <bos> is first."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from tests.data import common
from tunix_progdistill import data
from tunix_progdistill.data import documents
from tunix_progdistill.data import rows as rows_lib

_CHARACTERS = common.Characters()
_BYTES = common.Bytes()


def _documents(*values, kind="text"):
  text = {"text": str, "prompt": "\n".join, "chat": str}[kind]
  return [
      documents.Document(
          format=kind, value=value, text=text(value), place=f"x.jsonl:{i + 1}"
      )
      for i, value in enumerate(values)
  ]


def _rows(found, length, tokenizer=_CHARACTERS, *, held_out=False, most=None,
          **kwargs):
  config = data.DataConfig(
      data_source="jsonl", max_target_length=length, **kwargs
  )
  return rows_lib.tokenise(
      found, config, tokenizer, held_out=held_out, most=most
  )


def _decoded(rows, tokenizer=_CHARACTERS):
  return [
      tokenizer.decode(row["input_tokens"][row["input_mask"]])
      for row in map(rows.__getitem__, range(len(rows)))
  ]


def _targets(rows, tokenizer=_CHARACTERS):
  return [
      tokenizer.decode(row["input_tokens"][row["loss_mask"]])
      for row in map(rows.__getitem__, range(len(rows)))
  ]


_TEXTS = st.lists(
    st.text(st.sampled_from("ab \n<é"), min_size=1), min_size=1, max_size=6
)


@settings(max_examples=80, deadline=None)
@given(
    texts=_TEXTS, length=st.integers(2, 9), bos=st.booleans(),
    pack=st.booleans(), whole=st.booleans(),
)
def test_law_of_packing(texts, length, bos, pack, whole):
  """The rows' bodies, one after the other, are the tokens of the texts."""
  tokenizer = _BYTES if whole else common.Characters(bos_id=2 if bos else None)
  bos = tokenizer.bos_id is not None
  made = [tokenizer.encode(t + "\n\n" if pack else t) for t in texts]
  bodies = [np.concatenate(made)] if pack else made
  # Alone in its row and without <bos>, a token could not be predicted.
  size = length - bos
  bodies = [
      b if bos or len(b) % size != 1 else b[:-1] for b in bodies
  ]
  expected = np.concatenate(bodies)
  if not len(expected):
    with pytest.raises(ValueError, match="at least one training row"):
      _rows(_documents(*texts), length, tokenizer, pack=pack)
    return
  rows = _rows(_documents(*texts), length, tokenizer, pack=pack)
  assert len(rows) == sum(-(-len(b) // size) for b in bodies)
  found = []
  for n in range(len(rows)):
    row = rows[n]
    tokens, mask, loss = (
        row[k] for k in ("input_tokens", "input_mask", "loss_mask")
    )
    assert tokens.shape == mask.shape == loss.shape == (length,)
    assert (tokens.dtype, mask.dtype, loss.dtype) == (np.int32, bool, bool)
    assert row["example_id"].dtype == np.int32 and row["example_id"] == n
    valid = mask.sum()
    assert mask[:valid].all() and (tokens[valid:] == tokenizer.pad_id).all()
    assert not loss[0] and (loss[1:] == mask[1:]).all() and loss.any()
    if bos:
      assert tokens[0] == tokenizer.bos_id
    if pack and n < len(rows) - 1:
      assert mask.all()
    found.append(tokens[bos:valid])
  assert np.array_equal(np.concatenate(found), expected)
  assert rows.target_tokens == sum(len(f) - (not bos) for f in found)


def test_packed_rows_are_joined_by_an_empty_line():
  rows = _rows(_documents("ab", "cd"), 5)
  assert _decoded(rows) == ["<bos>ab\n\n", "<bos>cd\n\n"]


def test_text_cannot_spell_a_special_piece():
  rows = _rows(_documents("<eos>"), 20)
  assert (rows.tokens < len(common.SPECIAL)).sum() == 1  # <bos>


def test_a_limit_stops_the_tokeniser():
  seen = []

  class Counting(common.Characters):
    def encode(self, text, parse_special=False):
      seen.append(text)
      return super().encode(text, parse_special)

  for pack in (True, False):
    seen.clear()
    found = _documents(*"abcdefgh")
    rows = _rows(found, 4, Counting(), most=2, pack=pack)
    assert len(rows) == 2 and len(seen) == 2
    assert rows.fingerprint != _rows(found, 4, most=3, pack=pack).fingerprint


def test_a_limit_gives_the_first_rows():
  found = _documents("abcdef", "ghijkl")
  for pack in (True, False):
    every = _decoded(_rows(found, 3, pack=pack))
    assert _decoded(_rows(found, 3, pack=pack, most=4)) == every[:4]


def test_on_long_text():
  found = _documents("abcdef", "gh")
  single = lambda **kwargs: _decoded(_rows(found, 4, pack=False, **kwargs))
  assert single() == ["<bos>abc", "<bos>def", "<bos>gh"]
  assert single(on_long="skip") == ["<bos>gh"]
  with pytest.raises(ValueError) as e:
    single(on_long="raise")
  message = common.one_line(e)
  assert message.startswith("max_target_length must be at least 7")
  assert "x.jsonl:1" in message


def test_on_long_prompt():
  """A prompt loses its start; an answer is never cut off entirely."""
  found = _documents(
      ("xyz", "ab"), ("q", "abcdefgh"), ("q", "a"), kind="prompt"
  )
  rows = _rows(found, 6)
  assert _decoded(rows) == [
      "<bos>yzab<eos>", "<bos>abcde", "<bos>qa<eos>"
  ]
  assert _targets(rows) == ["ab<eos>", "abcde", "a<eos>"]
  assert _decoded(_rows(found, 6, on_long="skip")) == ["<bos>qa<eos>"]
  with pytest.raises(ValueError, match=r"at least 7, the tokens of x\.jsonl:1"):
    _rows(found, 6, on_long="raise")


@pytest.mark.parametrize("bos", [2, None])
@pytest.mark.parametrize("length", [2, 3, 4])
def test_no_row_is_without_a_target(bos, length):
  found = _documents(("xyz", "ab"), ("", "a"), ("x", "abc"), kind="prompt")
  rows = _rows(found, length, common.Characters(bos_id=bos))
  assert all(rows[n]["loss_mask"][1:].any() for n in range(len(rows)))
  assert not any(rows[n]["loss_mask"][0] for n in range(len(rows)))


def test_on_long_chat(caplog):
  """A chat loses its end, and is left out where no answer remains."""
  tokenizer = common.Characters(chat_template=common.GEMMA)
  chat = lambda asked, answered: [
      {"role": "user", "content": asked},
      {"role": "assistant", "content": answered},
  ]
  found = _documents(
      chat("q" * 9, "lost"), chat("q", "abcdef"), chat("q", "a"), kind="chat"
  )
  head = len("<user\nq>\n<model\n") + 1
  with caplog.at_level("WARNING"):
    rows = _rows(found, head + 4, tokenizer)
  assert _targets(rows) == ["abcd", "a<end_of_turn>"]
  assert "2 documents are longer than max_target_length=21" in caplog.text
  assert "1 are left out" in caplog.text
  assert _targets(_rows(found, head + 4, tokenizer, on_long="skip")) == [
      "a<end_of_turn>"
  ]
  with pytest.raises(ValueError) as e:
    _rows(found[:1], head, tokenizer)
  assert "1 of 1 documents are too long" in common.one_line(e)


def test_a_prompt_is_a_chat_where_a_template_is_named(tmp_path):
  (tmp_path / "t.jinja").write_text(common.CHATML)
  found = _documents(("q", "a"), kind="prompt")
  own = common.Characters(chat_template=common.CHATML)
  named = str(tmp_path / "t.jinja")
  as_chat = ["<bos><|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
             "a<|im_end|>\n"]
  assert _decoded(_rows(found, 60, own)) == ["<bos>qa<eos>"]
  assert _decoded(_rows(found, 60, own, chat_template="tokenizer")) == as_chat
  assert _decoded(_rows(found, 60, chat_template=named)) == as_chat
  with pytest.raises(ValueError, match="tokenizer has no template"):
    _rows(found, 60, chat_template="tokenizer")


def test_ids_of_held_out_rows_are_others():
  found = _documents("abcdef", "gh")
  train, held_out = (_rows(found, 4, held_out=h) for h in (False, True))
  ids = [r[n]["example_id"] for r in (train, held_out) for n in range(len(r))]
  assert len(set(ids)) == len(ids) and rows_lib.FILLER_ID not in ids
  assert max(ids) < 2**31 and train.fingerprint != held_out.fingerprint


def test_a_row_outside_is_refused():
  rows = _rows(_documents("ab"), 5)
  for n in (-1, 1):
    with pytest.raises(IndexError):
      rows[n]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_add_eos_ends_every_text(pack, add_eos):
  """<eos> in the place of the empty line; without it there is none."""
  texts = ("ab", "cde", "f")
  config = data.DataConfig(
      data_source="jsonl", max_target_length=32, pack=pack
  )
  rows = rows_lib.tokenise(
      _documents(*texts), config, _CHARACTERS, held_out=False, add_eos=add_eos
  )
  found = [
      int(i) for n in range(len(rows))
      for i in rows[n]["input_tokens"][rows[n]["input_mask"]]
  ]
  special = (_CHARACTERS.bos_id, _CHARACTERS.eos_id)
  assert found.count(_CHARACTERS.eos_id) == (3 if add_eos else 0)
  spelled = _CHARACTERS.decode(
      np.array([i for i in found if i not in special])
  )
  joint = "\n\n" if pack and not add_eos else ""
  assert spelled == joint.join([*texts, ""])
