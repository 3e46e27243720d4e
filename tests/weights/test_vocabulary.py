"""A vocabulary cut to what a text uses, and the folder that goes with it."""

import json

import numpy as np
import pytest
import safetensors.numpy

from tests.weights import gguf_files as files
from tests.weights import test_tokenizer
from tests.weights import tiny
from tunix_progdistill import weights
from tunix_progdistill.weights import cut
from tunix_progdistill.weights import gguf
from tunix_progdistill.weights import gguf_tokenizer
from tunix_progdistill.weights import sentencepiece_model
from tunix_progdistill.weights import stream
from tunix_progdistill.weights import vocabulary


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(name="model", scope="module")
def _model() -> bytes:
  return test_tokenizer.sentencepiece()


class TestChoose:

  def test_what_is_kept(self, model):
    kept = vocabulary.choose_pieces(model, files.TEXTS, 274)
    pieces = [p for p, _, _ in files.pieces()]
    names = {pieces[i] for i in kept}
    assert len(kept) == 274
    assert np.all(np.diff(kept) > 0)
    assert {"<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>"} <= names
    assert {f"<0x{b:02X}>" for b in range(256)} <= names
    assert set("\u2581thenca\n") <= names
    assert "\u2581the" in names and "<unused0>" not in names
    assert not {"d", "\u00e9", "\u2581ten"} & names

  @pytest.mark.parametrize(
      "size, extra",
      [
          (275, "the \u2581the \u2581cat \u2581hat \u2581then \u2581ten"),
          (272, "the \u2581the \u2581cat"),
          # "at" is no piece of the text, but two dropped ones split into it.
          (271, "the at"),
      ],
  )
  def test_rare_pieces_give_way_to_their_parts(self, model, size, extra):
    kept = vocabulary.choose_pieces(model, files.TEXTS, size)
    pieces = [files.pieces()[i][0] for i in kept]
    fixed = set("\u2581thenca\n")
    assert len(kept) == size
    assert {
        p for p in pieces if p not in fixed and not p.startswith("<")
    } == set(extra.split())

  def test_no_dropped_character_keeps_its_name(self, model):
    """SentencePiece 0.2.0 would give its dropped id."""
    kept = vocabulary.choose_pieces(model, files.TEXTS, 274)
    cut_ = sentencepiece_model.ModelProto.FromString(
        vocabulary.cut_model(model, kept)
    )
    unused = [
        p.piece for p in cut_.pieces
        if p.type == sentencepiece_model.Types.UNUSED
    ]
    assert "\u2581ten" in unused and len(unused) >= 3
    assert min(map(len, unused)) > 1

  def test_too_small_a_size(self, model):
    with pytest.raises(ValueError, match=r"must be >= 269, .*got 100"):
      vocabulary.choose_pieces(model, files.TEXTS, 100)

  def test_unused_pieces_do_not_fill_up(self, model):
    kept = vocabulary.choose_pieces(model, files.TEXTS, 10_000)
    assert len(kept) == 275 < len(files.pieces())

  def test_another_algorithm(self, model):
    proto = sentencepiece_model.ModelProto.FromString(model)
    proto.trainer_spec.model_type = sentencepiece_model.TrainerSpec.UNIGRAM
    with pytest.raises(ValueError, match="not BPE, got 'UNIGRAM'"):
      vocabulary.choose_pieces(proto.SerializeToString(), files.TEXTS, 300)

  def test_duplicate_pieces_are_refused(self):
    with pytest.raises(ValueError, match=r"0 and 4 are the same, got '<pad>'"):
      gguf_tokenizer.build_sentencepiece(
          ["<pad>", "<eos>", "<bos>", "<unk>", "<pad>"],
          [0.0] * 5,
          [files.CONTROL] * 5,
          files.SPECIAL,
      )


def _folder(path, name: str = "gemma3", **changes):
  """A local folder with a Gemma-like tokenizer."""
  size = len(files.pieces())
  raw = tiny.config(name, vocab_size=size, **changes)
  if "vocab_size_per_layer_input" in raw:
    raw["vocab_size_per_layer_input"] = size
  made = tiny.model(raw)
  weights.export(made, path, loaded=tiny.source(raw))
  (path / "tokenizer.model").write_bytes(test_tokenizer.sentencepiece())
  return made


def _config(path, size: int = 274) -> weights.ModelConfig:
  return weights.ModelConfig(model_path=str(path), vocabulary_size=size)


class TestCutFolder:

  @pytest.mark.parametrize("name", ["gemma", "gemma3", "gemma4-per-layer"])
  def test_rows(self, tmp_path, name):
    _folder(tmp_path / "m", name)
    weights.check(_config(tmp_path / "m"))
    loaded = weights.load(_config(tmp_path / "m"), texts=files.TEXTS)
    assert len(loaded.tokenizer) == 274
    kept = loaded.tokenizer.full_ids
    old = safetensors.numpy.load_file(tmp_path / "m" / "model.safetensors")
    new = safetensors.numpy.load_file(loaded.folder / "model.safetensors")
    assert set(old) == set(new)
    for key, value in old.items():
      rows = kept if "embed_tokens" in key else slice(None)
      np.testing.assert_array_equal(new[key], value[rows], err_msg=key)
    config = json.loads((loaded.folder / "config.json").read_text())
    assert config["vocab_size"] == 274
    assert config["bos_token_id"] == loaded.tokenizer.bos_id == 2

  def test_shards_and_an_index(self, tmp_path):
    made = _folder(tmp_path / "m")
    raw = tiny.config("gemma3", vocab_size=len(files.pieces()))
    weights.export(
        made, tmp_path / "m", loaded=tiny.source(raw), max_shard_bytes=30_000
    )
    (tmp_path / "m" / "tokenizer.model").write_bytes(
        test_tokenizer.sentencepiece()
    )
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    loaded = weights.load(_config(tmp_path / "m"), texts=files.TEXTS)
    assert loaded.model_config.num_embed == 274

  def test_made_once_and_again_for_another_file(self, tmp_path):
    _folder(tmp_path / "m")
    first = weights.load(_config(tmp_path / "m"), texts=files.TEXTS).folder
    same = weights.load(_config(tmp_path / "m"), texts=files.TEXTS).folder
    assert first == same
    with tiny.edited(tmp_path / "m") as tensors:
      tensors["model.norm.weight"][:] = 0
    other = weights.load(_config(tmp_path / "m"), texts=files.TEXTS).folder
    assert other != first

  def test_a_cut_model_is_not_cut_again(self, tmp_path):
    _folder(tmp_path / "m")
    loaded = weights.load(_config(tmp_path / "m"), texts=files.TEXTS)
    with pytest.raises(ValueError, match="cut already") as raised:
      weights.check(_config(loaded.folder, 270))
    assert str(raised.value).startswith("model_config.vocabulary_size")

  def test_a_bpe_tokenizer(self, tmp_path):
    _folder(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.model").unlink()
    (tmp_path / "m" / "tokenizer.json").write_text(test_tokenizer.bpe())
    with pytest.raises(ValueError, match="byte-level BPE") as raised:
      weights.check(_config(tmp_path / "m"))
    assert "\n" not in str(raised.value)

  def test_the_student_keeps_its_tokenizer(self, tmp_path):
    _folder(tmp_path / "m")
    loaded = weights.load(_config(tmp_path / "m"), texts=files.TEXTS)
    weights.export(loaded.model, tmp_path / "out", loaded=loaded)
    again = weights.load(
        weights.ModelConfig(model_path=str(tmp_path / "out"))
    )
    np.testing.assert_array_equal(
        again.tokenizer.full_ids, loaded.tokenizer.full_ids
    )
    np.testing.assert_array_equal(
        tiny.logits(again.model), tiny.logits(loaded.model)
    )


def test_special_ids_become_rows():
  config = {
      "bos_token_id": 5, "eos_token_id": [9, 7], "pad_token_id": 3, "other": 5
  }
  gguf.cut_ids(config, np.array([1, 5, 9]))
  assert config == {
      "bos_token_id": 1, "eos_token_id": [2], "pad_token_id": None, "other": 5
  }


def test_texts_key_tells_texts_apart():
  keys = {
      cut.texts_key(t) for t in (["ab"], ["a", "b"], ["b", "a"], ["ab", ""])
  }
  assert len(keys) == 4


class TestStream:

  def test_same_as_the_library(self, tmp_path):
    values = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(3, dtype=np.float32),
    }
    path = tmp_path / "x.safetensors"
    stream.write(
        path, {k: stream.entry("F32", v.shape) for k, v in values.items()},
        lambda name: iter(values[name]), "test",
    )
    found = safetensors.numpy.load_file(path)
    assert set(found) == set(values)
    for name, value in values.items():
      np.testing.assert_array_equal(found[name], value)
    header = stream.read_header(path)
    assert list(header) == ["b", "a"]
    raw = path.read_bytes()
    entry = header["a"]
    assert raw[entry.start : entry.start + entry.size_bytes] == (
        values["a"].tobytes()
    )

  def test_blocks_of_another_size(self, tmp_path):
    with pytest.raises(ValueError, match="a must have 12 bytes, got 8"):
      stream.write(
          tmp_path / "x", {"a": stream.entry("F32", (3,))},
          lambda name: [np.zeros(2, np.float32)], "test",
      )


def test_a_local_folder_needs_a_tokenizer(tmp_path):
  _folder(tmp_path / "m")
  (tmp_path / "m" / "tokenizer.model").unlink()
  config = weights.ModelConfig(model_path=str(tmp_path / "m"))
  for call in (weights.check, weights.load):
    with pytest.raises(ValueError, match=r"tokenizer\.json") as raised:
      call(config)
    assert str(raised.value).startswith("model_config.model_path must hold")


def test_display(tmp_path, monkeypatch):
  _folder(tmp_path / "m")
  shown = []
  monkeypatch.setattr(weights.nnx, "display", shown.append)
  for display in (False, True):
    weights.load(weights.ModelConfig(
        model_path=str(tmp_path / "m"), model_display=display
    ))
  assert len(shown) == 1
