"""Hub, Kaggle and buckets, with a client that is not theirs."""

import json
import pathlib
import shutil

from flax import nnx
import httpx
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.models import automodel
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma3 import params as gemma3_params

from tests import toys
from tests.weights import gguf_files as files
from tests.weights import test_tokenizer
from tests.weights import tiny
from tunix_progdistill import weights
from tunix_progdistill.weights import remote

_REPOSITORY = "google/gemma-3-tiny"


def _no_call(*args, **kwargs):
  raise AssertionError(f"a client was called: {args} {kwargs}")


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
  """Nothing is fetched unless a test says how."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.setenv("KAGGLE_USERNAME", "someone")
  monkeypatch.setenv("KAGGLE_KEY", "key")
  monkeypatch.setattr(huggingface_hub, "snapshot_download", _no_call)
  monkeypatch.setattr(automodel.AutoModel, "from_pretrained", _no_call)
  kagglehub = pytest.importorskip(
      "kagglehub", reason="Tunix brings kagglehub; without it nothing to fake"
  )
  monkeypatch.setattr(kagglehub, "model_download", _no_call)


def _one_line(raised, start: str) -> None:
  text = str(raised.value)
  assert "\n" not in text and "; " in text and text.startswith(start), text


class _Hub:
  """A repository in a folder; downloads what the patterns let through."""

  def __init__(self, source: pathlib.Path, target: pathlib.Path):
    self.source, self.target = source, target
    self.calls = []

  def __call__(
      self, repo_id, *, allow_patterns, ignore_patterns, local_dir=None
  ):
    target = pathlib.Path(local_dir or self.target)
    names = [
        str(f.relative_to(self.source))
        for f in self.source.rglob("*") if f.is_file()
    ]
    names = list(
        huggingface_hub.utils.filter_repo_objects(
            names, allow_patterns=allow_patterns,
            ignore_patterns=ignore_patterns,
        )
    )
    self.calls.append((repo_id, sorted(names)))
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
      shutil.copyfile(self.source / name, target / name)
    return str(target)


@pytest.fixture(name="hub")
def _hub(tmp_path, monkeypatch):
  source = tmp_path / "repository"
  size = len(files.pieces())
  raw = tiny.config("gemma3", vocab_size=size)
  weights.export(tiny.model(raw), source, loaded=tiny.source(raw))
  (source / "tokenizer.model").write_bytes(test_tokenizer.sentencepiece())
  for name in (
      "pytorch_model.bin", "model.pt", "modeling_x.py", "README.md",
      "consolidated.safetensors", "original/other.safetensors",
  ):
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_bytes(b"x")
  hub = _Hub(source, tmp_path / "hub-cache")
  monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
  return hub


def _from_hub(**kwargs) -> weights.ModelConfig:
  return weights.ModelConfig(
      model_source="huggingface", **({"model_id": _REPOSITORY} | kwargs)
  )


class TestHub:

  def test_load(self, hub):
    weights.check(_from_hub())
    assert not hub.calls
    loaded = weights.load(_from_hub())
    assert isinstance(loaded.model, gemma3.Gemma3)
    small = ["config.json", "tokenizer.model"]
    assert hub.calls == [
        (_REPOSITORY, small),
        (_REPOSITORY, sorted([*small, "model.safetensors"])),
    ]
    assert len(loaded.tokenizer) == loaded.model_config.num_embed

  def test_a_cut_vocabulary(self, hub):
    loaded = weights.load(_from_hub(vocabulary_size=274), texts=files.TEXTS)
    assert len(loaded.tokenizer) == 274
    assert loaded.folder != hub.target

  def test_download_path(self, hub, tmp_path):
    loaded = weights.load(
        _from_hub(model_download_path=str(tmp_path / "here"))
    )
    assert loaded.folder == tmp_path / "here" / "google--gemma-3-tiny"
    assert not hub.target.exists()

  def test_the_config_is_judged_before_the_weights_come(self, hub):
    tiny.edit_config(hub.source, model_type="mamba")
    with pytest.raises(ValueError, match="got 'mamba'") as raised:
      weights.load(_from_hub())
    assert "\n" not in str(raised.value)
    assert len(hub.calls) == 1

  def test_no_tokenizer(self, hub):
    (hub.source / "tokenizer.model").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json") as raised:
      weights.load(_from_hub())
    _one_line(raised, "model_config.model_id")
    assert len(hub.calls) == 1

  def test_pickles_alone(self, hub):
    (hub.source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"\*\.safetensors") as raised:
      weights.load(_from_hub())
    _one_line(raised, "model_config.model_id")

  def test_tokenizer_alone(self, hub):
    tokenizer_file = hub.source / "tokenizer.json"
    tokenizer_file.write_text(test_tokenizer.bpe())
    (hub.source / "config.json").write_text(
        json.dumps({"vocab_size": 400, "eos_token_id": 2})
    )
    tokenizer = weights.load_tokenizer(_REPOSITORY, "huggingface")
    assert len(tokenizer) == 400
    assert hub.calls[0][1] == [
        "config.json", "tokenizer.json", "tokenizer.model"
    ]
    with pytest.raises(ValueError, match="must be a folder with a tokenizer"):
      weights.load_tokenizer(_REPOSITORY)

  @pytest.mark.parametrize(
      "error, match",
      [
          ("GatedRepoError", "may read.*accept its terms.*HF_TOKEN"),
          ("RepositoryNotFoundError", "repository on the hub.*HF_TOKEN"),
          ("LocalEntryNotFoundError", "within reach.*model_source local"),
          ("OfflineModeIsEnabled", "within reach.*HF_HUB_OFFLINE"),
          ("HfHubHTTPError", "within reach.*network"),
      ],
  )
  def test_errors_are_one_line(self, monkeypatch, error, match):
    kind = getattr(huggingface_hub.errors, error)
    response = httpx.Response(403, request=httpx.Request("GET", "https://x"))
    keywords = (
        {"response": response}
        if issubclass(kind, huggingface_hub.errors.HfHubHTTPError) else {}
    )

    def fail(*args, **kwargs):
      raise kind("first line\nsecond line", **keywords)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=match) as raised:
      weights.load(_from_hub(), field="teacher_model_config")
    _one_line(raised, "teacher_model_config.model_id")

  def test_describe(self):
    assert weights.describe(_from_hub()).family == "gemma3"
    assert weights.describe(_from_hub()).vocab_size is None
    other = weights.describe(_from_hub(model_id="someone/SmolLM2-135M"))
    assert other.family is None


class TestRefusedBeforeAnyDownload:
  """Every client fails the test when it is called."""

  @pytest.mark.parametrize(
      "fields, start, match",
      [
          (
              {"model_source": "huggingface"}, "model_id",
              "repository on the hub, owner/name",
          ),
          (
              {"model_source": "huggingface", "model_id": "gemma"},
              "model_id", "owner/name",
          ),
          (
              {
                  "model_source": "huggingface", "model_id": "someone/thing",
                  "model_name": "gema-3-270m",
              },
              "model_name", "Tunix knows, got 'gema-3-270m'; leave it empty"
              ".*gemma3_270m",
          ),
          (
              {
                  "model_source": "huggingface",
                  "model_id": "meta-llama/Llama-3.2-1B",
                  "model_name": "gemma-3-270m",
              },
              "model_name", "of the family of meta-llama/Llama-3.2-1B",
          ),
          (
              {
                  "model_source": "huggingface",
                  "model_id": "Qwen/Qwen3-0.6B", "vocabulary_size": 500,
              },
              "vocabulary_size", "byte-level BPE",
          ),
          (
              {
                  "model_source": "kaggle", "model_name": "gemma-3-270m",
                  "model_path": "google/gemma-3/flax/270m",
              },
              "model_source", "huggingface, gcs, local for gemma-3-270m",
          ),
          (
              {
                  "model_source": "gcs", "model_name": "llama-3.2-1b",
                  "model_path": "gs://bucket/llama",
              },
              "model_source", "huggingface, local for llama-3.2-1b",
          ),
          (
              {
                  "model_source": "gcs", "model_name": "gemma-2-2b",
                  "model_path": "gs://bucket/gemma2",
              },
              "model_source", "huggingface, kaggle, local for gemma-2-2b",
          ),
          (
              {"model_source": "kaggle", "model_name": "gemma-2-2b-it"},
              "model_path", "must be set for model_source kaggle.*gemma2-2b-it",
          ),
          (
              {"model_source": "gcs", "model_name": "gemma-3-270m"},
              "model_path", "must be set for model_source gcs.*gs://gemma",
          ),
          (
              {
                  "model_source": "gcs", "model_name": "gemma-3-280m",
                  "model_path": "gs://x/y",
              },
              "model_name", "Tunix knows, got 'gemma-3-280m'.*gemma3_270m",
          ),
          (
              {"model_source": "gcs", "model_path": "gs://x/y"},
              "model_name", "Tunix knows, got ''",
          ),
          (
              {
                  "model_source": "gcs", "model_name": "gemma-3-270m",
                  "model_path": "gs://x/y", "vocabulary_size": 500,
              },
              "vocabulary_size", "only a folder of safetensors is cut",
          ),
      ],
  )
  def test_check_and_load(self, fields, start, match):
    config = weights.ModelConfig(**fields)
    for call in (
        lambda: weights.check(config),
        lambda: weights.load(config, texts=files.TEXTS),
    ):
      with pytest.raises(ValueError, match=match) as raised:
        call()
      _one_line(raised, f"model_config.{start}")

  def test_kaggle_credentials(self, monkeypatch):
    """Tunix would ask for them on the terminal."""
    monkeypatch.delenv("KAGGLE_KEY")
    config = weights.ModelConfig(
        model_source="kaggle", model_name="gemma-2-2b-it",
        model_path="google/gemma-2/flax/gemma2-2b-it",
    )
    with pytest.raises(ValueError, match="no KAGGLE_KEY") as raised:
      weights.load(config)
    _one_line(raised, "model_config.model_source")

  def test_recipes_of_tunix_pass(self):
    for source, name, ident, path in (
        ("kaggle", "gemma2_2b_it", "gemma2_2b_it",
         "google/gemma-2/flax/gemma2-2b-it"),
        ("kaggle", "gemma_2b_it", "google/gemma_2b_it",
         "google/gemma/flax/2b-it"),
        ("gcs", "gemma-3-1b-it", "google/gemma-3-1b-it", "gs://b/c"),
        ("gcs", "gemma-4-e2b", "google/gemma-4-e2b", "gs://b/c"),
        ("huggingface", "llama-3.1-8b", "meta-llama/Llama-3.1-8B", ""),
        ("huggingface", "qwen3-1.7b-base", "Qwen/qwen3-1.7b-base", ""),
        ("huggingface", "", "HuggingFaceTB/SmolLM2-135M", ""),
    ):
      weights.check(weights.ModelConfig(
          model_source=source, model_name=name, model_id=ident, model_path=path
      ))


class _AutoModel:
  """Gives a model, and remembers how it was asked."""

  def __init__(self, model, path):
    self.model, self.path = model, path
    self.calls = []

  def __call__(self, model_id, mesh, **kwargs):
    self.calls.append((model_id, mesh, kwargs))
    return self.model, str(self.path)


def _fake_auto_model(monkeypatch, model, path):
  fake = _AutoModel(model, path)
  monkeypatch.setattr(automodel.AutoModel, "from_pretrained", fake)
  return fake


class TestAutoModel:

  def test_gcs(self, monkeypatch, tmp_path):
    size = len(files.pieces())
    model = toys.gemma3_model(num_embed=size, param_dtype=jnp.bfloat16)
    fake = _fake_auto_model(monkeypatch, model, tmp_path)
    path = tmp_path / "tokenizer_gemma3.model"
    path.write_bytes(test_tokenizer.sentencepiece())
    monkeypatch.setattr(gemma3_params, "GEMMA3_TOKENIZER", str(path))
    config = weights.ModelConfig(
        model_source="gcs", model_name="gemma-3-270m", rng_seed=3,
        model_path="gs://gemma-data/checkpoints/gemma3-270m-pt",
    )
    loaded = weights.load(config)
    (name, mesh, kwargs), = fake.calls
    assert name == "gemma-3-270m"
    assert mesh.axis_names == ("fsdp", "tp") and mesh.size == 1
    assert kwargs["model_source"] is automodel.ModelSource.GCS
    assert kwargs["model_path"] == config.model_path
    assert kwargs["rng_seed"] == 3
    assert loaded.family.name == "gemma3" and loaded.folder is None
    leaves = jax.tree.leaves(nnx.state(loaded.model, nnx.Param))
    assert {leaf.dtype.name for leaf in leaves} == {"float32"}
    assert loaded.hf_config["model_type"] == "gemma3_text"
    assert loaded.hf_config["bos_token_id"] == loaded.tokenizer.bos_id == 2
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the")) == "the"
    weights.export(loaded.model, tmp_path / "out", loaded=loaded)
    again = weights.load(weights.ModelConfig(model_path=str(tmp_path / "out")))
    np.testing.assert_array_equal(
        tiny.logits(again.model), tiny.logits(loaded.model)
    )

  def test_kaggle(self, monkeypatch, tmp_path):
    raw = tiny.config("gemma2", vocab_size=len(files.pieces()))
    fake = _fake_auto_model(monkeypatch, tiny.model(raw), tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(test_tokenizer.sentencepiece())
    config = weights.ModelConfig(
        model_source="kaggle", model_name="gemma-2-2b-it", dtype="bfloat16",
        model_path="google/gemma-2/flax/gemma2-2b-it",
    )
    mesh = jax.make_mesh((2, 1), ("fsdp", "tp"))
    loaded = weights.load(config, mesh=mesh)
    (name, used, kwargs), = fake.calls
    assert name == "gemma-2-2b-it" and used is mesh
    for key in ("model_download_path", "intermediate_ckpt_dir"):
      assert pathlib.Path(kwargs[key]).is_absolute(), key
    leaves = jax.tree.leaves(nnx.state(loaded.model, nnx.Param))
    assert {leaf.dtype.name for leaf in leaves} == {"bfloat16"}
    assert loaded.hf_config["model_type"] == "gemma2"

  def test_a_parameter_that_was_not_loaded(self, monkeypatch, tmp_path):
    model = toys.gemma3_model()
    shape = jax.ShapeDtypeStruct((16,), jnp.float32)
    model.final_norm.scale.set_value(shape)
    _fake_auto_model(monkeypatch, model, tmp_path)
    config = weights.ModelConfig(
        model_source="gcs", model_name="gemma-3-270m", model_path="gs://a/b"
    )
    with pytest.raises(ValueError, match="1 such as final_norm/scale") as e:
      weights.load(config)
    _one_line(e, "model_config.model_path")

  @pytest.mark.parametrize(
      "error", [OSError("a\nb"), ImportError("gcsfs"), ValueError("no\nsuch")]
  )
  def test_errors_are_one_line(self, monkeypatch, error):
    def fail(*args, **kwargs):
      raise error

    monkeypatch.setattr(automodel.AutoModel, "from_pretrained", fail)
    config = weights.ModelConfig(
        model_source="gcs", model_name="gemma-3-270m", model_path="gs://a/b"
    )
    with pytest.raises(ValueError, match="checkpoint within reach") as raised:
      weights.load(config)
    _one_line(raised, "model_config.model_path")

  def test_the_tokenizer_is_out_of_reach(self, monkeypatch, tmp_path):
    _fake_auto_model(monkeypatch, toys.gemma3_model(), tmp_path)
    monkeypatch.setattr(
        gemma3_params, "GEMMA3_TOKENIZER", str(tmp_path / "none.model")
    )
    config = weights.ModelConfig(
        model_source="gcs", model_name="gemma-3-270m", model_path="gs://a/b"
    )
    with pytest.raises(ValueError, match=r"none\.model") as raised:
      weights.load(config)
    _one_line(raised, "model_config.model_path")

  def test_describe(self):
    found = weights.describe(weights.ModelConfig(
        model_source="gcs", model_name="gemma-3-270m", model_path="gs://a/b"
    ))
    assert (found.family, found.vocab_size, found.num_layers) == (
        "gemma3", 262_144, 18
    )


def test_names_are_those_of_tunix():
  names = remote._named_configs()
  assert {"gemma3_270m", "llama3p2_1b", "qwen3_0p6b", "gemma2_2b"} <= {*names}
