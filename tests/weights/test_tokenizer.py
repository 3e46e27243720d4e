"""Tokenizers: text and ids, special pieces, files, a cut vocabulary."""

import json

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tokenizers

from tests.weights import gguf_files as files
from tunix_progdistill import weights
from tunix_progdistill.weights import gguf_tokenizer
from tunix_progdistill.weights import sentencepiece_model
from tunix_progdistill.weights import sentencepiece_tokenizer
from tunix_progdistill.weights import tokenizer as tokenizer_lib
from tunix_progdistill.weights import tokenizer_files
from tunix_progdistill.weights import vocabulary

# SentencePiece turns its own sign for a blank into one; surrogates are no text.
_TEXT = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\u2581\0"),
    max_size=40,
)
_WORDS = st.lists(
    st.sampled_from([
        "the", " cat", "ten", "\n\n", "  ", "caf\u00e9", "\u65e5", "<bos>",
        "<start_of_turn>", "<|im_start|>", "<unused0>", "<0x0A>", "<unk>",
    ]),
    max_size=8,
).map("".join)
_quick = hypothesis.settings(
    max_examples=60, deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


def sentencepiece(turns: int = files.CONTROL) -> bytes:
  """A Gemma-like model; in Google's own, turn markers are user-defined."""
  pieces, scores, kinds = map(list, zip(*files.pieces(), strict=True))
  data = gguf_tokenizer.build_sentencepiece(
      pieces, scores, kinds, files.SPECIAL
  )
  proto = sentencepiece_model.ModelProto.FromString(data)
  for piece in proto.pieces:
    if piece.piece == "<start_of_turn>":
      piece.type = turns
  return proto.SerializeToString()


def bpe() -> str:
  pieces = files.bpe_pieces()
  kinds = [
      files.CONTROL if p in files.BPE_CONTROL else files.NORMAL for p in pieces
  ]
  return gguf_tokenizer.build_bpe(pieces, files.BPE_MERGES, kinds, "smollm")


_BPE_CONFIG = {
    "bos_token": "<|im_start|>", "pad_token": None,
    "eos_token": {"content": "<|im_end|>", "special": True},
    "chat_template": "{{ messages }}",
}


def _fast(**changes) -> tokenizer_lib.FastTokenizer:
  config = _BPE_CONFIG | changes
  return tokenizer_lib.FastTokenizer(
      bpe(), tokenizer_files.Settings(config=config)
  )


@pytest.fixture(
    name="tokenizer", params=["control", "user_defined", "cut", "bpe"]
)
def _tokenizer(request):
  if request.param == "bpe":
    return _fast()
  turns = files.USER if request.param == "user_defined" else files.CONTROL
  model = sentencepiece(turns)
  kept = None
  if request.param == "cut":
    kept = vocabulary.choose_pieces(model, files.TEXTS, 274)
    model = vocabulary.cut_model(model, kept)
  return tokenizer_lib.SentencePieceTokenizer(model, kept)


class TestBoth:

  @_quick
  @hypothesis.given(text=_TEXT | _WORDS)
  def test_round_trip(self, tokenizer, text):
    """Any text comes back, that which spells special pieces too."""
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert np.all((ids >= 0) & (ids < len(tokenizer)))
    assert tokenizer.decode(ids) == text

  @_quick
  @hypothesis.given(text=_WORDS)
  def test_parsing_changes_special_pieces_alone(self, tokenizer, text):
    special = {
        tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id
    }
    assert not special & set(tokenizer.encode(text).tolist())
    spelled = ("<bos>", "<start_of_turn>", "<|im_start|>", "<unk>", "<unused0>")
    if not any(s in text for s in spelled):
      np.testing.assert_array_equal(
          tokenizer.encode(text, parse_special=True), tokenizer.encode(text)
      )

  def test_special_pieces(self, tokenizer):
    bpe_like = isinstance(tokenizer, tokenizer_lib.FastTokenizer)
    opening = "<|im_start|>" if bpe_like else "<bos>"
    text = f"{opening}the cat{opening}"
    plain = tokenizer.encode(text)
    parsed = tokenizer.encode(text, parse_special=True)
    assert tokenizer.bos_id not in plain
    assert tokenizer.decode(plain) == text
    assert parsed[0] == parsed[-1] == tokenizer.bos_id
    np.testing.assert_array_equal(parsed[1:-1], tokenizer.encode("the cat"))
    assert tokenizer.decode(parsed) == "the cat"

  def test_nothing_is_added(self, tokenizer):
    assert len(tokenizer.encode("")) == 0
    assert len(tokenizer.encode("", parse_special=True)) == 0
    assert tokenizer.decode([]) == ""

  def test_special_pieces_have_no_text(self, tokenizer):
    unknown = 0 if isinstance(tokenizer, tokenizer_lib.FastTokenizer) else 3
    ids = [tokenizer.bos_id, unknown, tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(ids) == ""

  def test_ids_that_are_none(self, tokenizer):
    ids = [*tokenizer.encode("the"), len(tokenizer) + 5, -1]
    assert tokenizer.decode(ids) == "the"

  def test_save_and_load(self, tokenizer, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir(), second.mkdir()
    tokenizer.save(first)
    again = weights.load_tokenizer(first)
    assert type(again) is type(tokenizer)
    for name in ("bos_id", "eos_id", "pad_id", "chat_template"):
      assert getattr(again, name) == getattr(tokenizer, name), name
    assert len(again) == len(tokenizer)
    for text in ("the cat", "<bos>the <|im_start|><start_of_turn>\u65e5"):
      for parse in (False, True):
        np.testing.assert_array_equal(
            again.encode(text, parse), tokenizer.encode(text, parse)
        )
    again.save(second)
    for file in first.iterdir():
      assert (second / file.name).read_bytes() == file.read_bytes()
      assert file.suffix in (".model", ".json")

  def test_the_model_knows_more_ids(self, tokenizer, tmp_path):
    """As Qwen's, whose head is padded."""
    if getattr(tokenizer, "full_ids", None) is not None:
      return  # a cut model has exactly the kept ones
    tokenizer.save(tmp_path)
    size = len(tokenizer) + 7
    bigger = tokenizer_lib.load_tokenizer(tmp_path, vocab_size=size)
    assert len(bigger) == size
    bigger.save(tmp_path)
    assert len(weights.load_tokenizer(tmp_path)) == size
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size + 1}))
    assert len(weights.load_tokenizer(tmp_path)) == size + 1

  def test_the_model_knows_fewer_ids(self, tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    with pytest.raises(ValueError, match="must") as raised:
      tokenizer_lib.load_tokenizer(tmp_path, vocab_size=100)
    assert "\n" not in str(raised.value)


class TestSentencePiece:

  @pytest.mark.parametrize("turns", [files.CONTROL, files.USER])
  def test_turn_markers(self, turns):
    """The same whether the model has them as control or user-defined."""
    tokenizer = tokenizer_lib.SentencePieceTokenizer(sentencepiece(turns))
    text = "<start_of_turn>the"
    assert 7 not in tokenizer.encode(text)
    parsed = tokenizer.encode(text, parse_special=True)
    assert parsed[0] == 7
    np.testing.assert_array_equal(parsed[1:], tokenizer.encode("the"))
    assert tokenizer.decode(parsed) == "the"

  def test_blanks_and_newlines_stay_text(self):
    tokenizer = tokenizer_lib.SentencePieceTokenizer(sentencepiece())
    np.testing.assert_array_equal(
        tokenizer.encode("\n  "), tokenizer.encode("\n  ", parse_special=True)
    )
    assert tokenizer.encode("\n  ").tolist() == [5, 6]

  def test_a_special_token_that_the_config_names(self):
    settings = tokenizer_files.Settings(
        config={"additional_special_tokens": ["\u2581\u2581"]}
    )
    tokenizer = tokenizer_lib.SentencePieceTokenizer(
        sentencepiece(), None, settings
    )
    assert 6 not in tokenizer.encode("a  b")
    assert 6 in tokenizer.encode("a\u2581\u2581b", parse_special=True)

  def test_without_padding(self):
    """As Tunix does: the end of a text fills up a row."""
    proto = sentencepiece_model.ModelProto.FromString(sentencepiece())
    proto.trainer_spec.pad_piece = "<none>"
    tokenizer = tokenizer_lib.SentencePieceTokenizer(proto.SerializeToString())
    assert tokenizer.pad_id == tokenizer.eos_id == 1

  def test_kept_is_checked(self):
    model = sentencepiece()
    for kept, match in (
        ([2, 1, 0], "strictly increasing"),
        ([0, 1, 9999], "strictly increasing"),
        ([0, 1, 3], "must keep the bos piece"),
    ):
      with pytest.raises(ValueError, match=match):
        tokenizer_lib.SentencePieceTokenizer(model, kept)

  def test_ids_both_ways(self):
    model = sentencepiece()
    kept = vocabulary.choose_pieces(model, files.TEXTS, 274)
    tokenizer = tokenizer_lib.SentencePieceTokenizer(
        vocabulary.cut_model(model, kept), kept
    )
    ids = np.arange(len(kept))
    np.testing.assert_array_equal(tokenizer.to_full(ids), kept)
    np.testing.assert_array_equal(tokenizer.to_cut(kept), ids)
    with pytest.raises(ValueError, match=r"<unused0>.*full id 4"):
      tokenizer.to_cut([2, 4])

  def test_is_marker(self):
    proto = sentencepiece_model.ModelProto()
    names = {
        "<unused7>": True, "<start_of_image>": True, "<|turn>": True,
        "<turn|>": True, "<mask>": True, "<h1>": False, "</td>": False,
        "\n\n": False, "\u2581\u2581": False, "<b>": False,
    }
    for name, wanted in names.items():
      piece = proto.pieces.add(piece=name, type=files.USER)
      assert sentencepiece_tokenizer.is_marker(piece) == wanted, name


class TestFast:

  def test_same_as_the_library(self):
    theirs = tokenizers.Tokenizer.from_str(bpe())
    ours = _fast()
    for text in ("the cat the cat\n", "1234", "caf\u00e9 \u65e5", " the"):
      assert ours.encode(text).tolist() == theirs.encode(text).ids

  def test_digits_stand_alone(self):
    assert len(_fast().encode("12")) == 2

  def test_no_bos(self):
    """As Qwen: a null in tokenizer_config.json is a word of its own."""
    tokenizer = tokenizer_lib.FastTokenizer(bpe(), tokenizer_files.Settings(
        config=_BPE_CONFIG | {"bos_token": None}, ids={"bos": 0}
    ))
    assert tokenizer.bos_id is None
    assert tokenizer.eos_id == tokenizer.pad_id == 2

  def test_ids_of_config_json(self, tmp_path):
    (tmp_path / "tokenizer.json").write_text(bpe())
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "gemma3", "text_config": {"vocab_size": 300},
        "bos_token_id": 1, "eos_token_id": [2, 0],
    }))
    tokenizer = weights.load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    assert len(tokenizer) == 300

  def test_special_tokens_map(self, tmp_path):
    (tmp_path / "tokenizer.json").write_text(bpe())
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({
        "eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>",
    }))
    tokenizer = weights.load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (
        None, 2, 0
    )

  def test_truncation_in_the_file_is_off(self):
    made = tokenizers.Tokenizer.from_str(bpe())
    made.enable_truncation(2)
    made.enable_padding(length=9)
    tokenizer = tokenizer_lib.FastTokenizer(
        made.to_str(), tokenizer_files.Settings(config=_BPE_CONFIG)
    )
    assert tokenizer.decode(tokenizer.encode("the cat the")) == "the cat the"

  def test_a_special_id_that_the_model_does_not_know(self):
    """As Gemma 3's <image_soft_token>, whose id is one too high."""
    made = tokenizers.Tokenizer.from_str(bpe())
    own = made.get_vocab_size()
    made.add_special_tokens(["<image>"])
    tokenizer = tokenizer_lib.FastTokenizer(
        made.to_str(),
        tokenizer_files.Settings(config=_BPE_CONFIG, vocab_size=own),
    )
    assert len(tokenizer) == own
    assert tokenizer.decode(tokenizer.encode("a<image>")) == "a<image>"
    with pytest.raises(ValueError, match=rf"ids below {own}.*<image>"):
      tokenizer.encode("a<image>", parse_special=True)

  def test_no_eos(self):
    with pytest.raises(ValueError, match="must have an eos token"):
      _fast(eos_token=None)

  def test_a_token_that_is_not_there(self):
    with pytest.raises(ValueError, match=r"bos_token of .* got '<s>'"):
      _fast(bos_token="<s>")

  @pytest.mark.parametrize("text", ['{"model": ', "[]", '{"a": 1}'])
  def test_a_damaged_file(self, text):
    with pytest.raises(ValueError, match=r"must be a .*tokenizer\.json") as e:
      tokenizer_lib.FastTokenizer(text)
    assert "\n" not in str(e.value)


class TestFiles:

  def test_a_file_by_its_path(self, tmp_path):
    (tmp_path / "any.model").write_bytes(sentencepiece())
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    path = tmp_path / "any.model"
    assert weights.load_tokenizer(path).bos_id == 2
    assert weights.load_tokenizer(path, "sentencepiece").bos_id == 2

  def test_the_kind_chooses(self, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece())
    (tmp_path / "tokenizer.json").write_text(bpe())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>"})
    )
    kinds = {
        None: tokenizer_lib.SentencePieceTokenizer,
        "sentencepiece": tokenizer_lib.SentencePieceTokenizer,
        "huggingface": tokenizer_lib.FastTokenizer,
    }
    for kind, wanted in kinds.items():
      assert type(weights.load_tokenizer(tmp_path, kind)) is wanted

  def test_a_tokenizer_model_that_is_something_else(self, tmp_path):
    """Llama 3 has ranks of tiktoken under this name."""
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    (tmp_path / "tokenizer.json").write_text(bpe())
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    tokenizer = weights.load_tokenizer(tmp_path)
    assert isinstance(tokenizer, tokenizer_lib.FastTokenizer)
    with pytest.raises(ValueError, match="must be a SentencePiece model"):
      weights.load_tokenizer(tmp_path, "sentencepiece")

  def test_chat_template(self, tmp_path):
    _fast().save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "tools", "template": "T"}, {"name": "default", "template": "D"}
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert weights.load_tokenizer(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert weights.load_tokenizer(tmp_path).chat_template == "J"

  @pytest.mark.parametrize(
      "kind, match",
      [
          (None, r"tokenizer\.model or tokenizer\.json"),
          ("huggingface", r"must hold a tokenizer\.json"),
          ("sentencepiece", r"must hold a tokenizer\.model"),
          ("word", "must be one of sentencepiece, huggingface"),
      ],
  )
  def test_refusals(self, tmp_path, kind, match):
    with pytest.raises(ValueError, match=match) as raised:
      weights.load_tokenizer(tmp_path, kind)
    assert "\n" not in str(raised.value)

  def test_no_such_folder(self):
    with pytest.raises(ValueError, match="must be a folder with a tokenizer"):
      weights.load_tokenizer("nowhere")

  def test_damaged_kept_ids(self, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece())
    for text in ("[1, 2", '{"a": 1}', "[1, 2.5]"):
      (tmp_path / "kept_ids.json").write_text(text)
      with pytest.raises(ValueError, match=r"kept_ids\.json"):
        weights.load_tokenizer(tmp_path)


def test_tokenizer_json_that_is_no_text_is_one_line(tmp_path):
  (tmp_path / "tokenizer.json").write_bytes(b"{\x8c\xff")
  with pytest.raises(ValueError, match=r"must hold a tokenizer[.]json in"):
    weights.load_tokenizer(tmp_path)
