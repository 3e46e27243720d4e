"""Every fault of a folder is one line, and is found from headers alone."""

import dataclasses
import json
import pathlib
import re
import shutil

from flax import nnx
import numpy as np
import pytest
import safetensors.numpy

from tests.weights import tiny
from tunix_progdistill import families
from tunix_progdistill import weights
from tunix_progdistill.weights import config as config_lib
from tunix_progdistill.weights import local


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """One export per family name, to be copied."""
  made = {}

  def get(name):
    if name not in made:
      made[name] = tmp_path_factory.mktemp(name) / "m"
      tiny.write(made[name], name)
    return made[name]

  return get


@pytest.fixture
def folder(whole, tmp_path):
  return pathlib.Path(shutil.copytree(whole("llama3"), tmp_path / "m"))


def _refused(folder, *parts, field="teacher.model_path"):
  with pytest.raises(ValueError) as e:
    local.check(folder, field)
  message = str(e.value)
  assert "\n" not in message
  for part in parts:
    assert part in message, message
  with pytest.raises(ValueError):
    local.load(folder)
  return message


def test_whole_folder_is_accepted(folder):
  local.check(folder, "x")


def test_no_folder(tmp_path):
  _refused(tmp_path / "none", "teacher.model_path must be a folder")
  _refused("", "teacher.model_path must be a folder")


def test_no_config(folder):
  (folder / "config.json").unlink()
  _refused(folder, "must hold a config.json")


@pytest.mark.parametrize("text", ["{", "[1]", "\x00\xff"])
def test_config_that_is_no_json_object(folder, text):
  (folder / "config.json").write_bytes(text.encode("latin-1"))
  _refused(folder, "config.json")


def test_unknown_model_type_names_near_ones(folder):
  tiny.edit_config(folder, model_type="qwen4")
  _refused(
      folder, "teacher.model_path: config.json: model_type", "qwen2", "qwen3"
  )
  tiny.edit_config(folder, model_type="llama", mlp_bias=True)
  _refused(folder, "teacher.model_path: config.json: mlp_bias must be false")


def test_values_that_jax_could_not_take(folder):
  tiny.edit_config(folder, model_type=["llama"])
  _refused(folder, "config.json: model_type must be one of", "['llama']")
  tiny.edit_config(folder, model_type="llama", rms_norm_eps=10**30)
  _refused(folder, "config.json: rms_norm_eps must be a number above 0")


def test_missing_tensor(folder):
  with tiny.edited(folder) as tensors:
    for i in range(4):
      del tensors[f"model.layers.{i}.mlp.up_proj.weight"]
  _refused(
      folder, "no model.layers.0.mlp.up_proj.weight", "and 1 more",
      "every tensor",
  )


def test_missing_head_of_an_untied_model(folder):
  with tiny.edited(folder) as tensors:
    del tensors["lm_head.weight"]
  _refused(folder, "no lm_head.weight", "set tie_word_embeddings to true")


def test_unknown_tensor(folder):
  with tiny.edited(folder) as tensors:
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(
        32, np.float32
    )
  _refused(folder, "no others", "model.layers.0.self_attn.q_proj.bias")


def test_tensors_of_a_layer_too_many(folder):
  tiny.edit_config(folder, num_hidden_layers=3)
  _refused(folder, "no others", "model.layers.3.", "more")


@pytest.mark.parametrize("transposed", [False, True])
def test_wrong_shape(folder, transposed):
  name = "model.layers.1.mlp.down_proj.weight"
  with tiny.edited(folder) as tensors:
    value = tensors[name]
    tensors[name] = np.ascontiguousarray(value.T if transposed else value[1:])
  _refused(folder, name, "for [32, 48]", "shapes")


def test_wrong_dtype(folder):
  with tiny.edited(folder) as tensors:
    tensors["model.norm.weight"] = np.zeros(32, np.int8)
  _refused(folder, "model.norm.weight (I8)", "F32, BF16, F16")


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -5000])
def test_file_cut_short(folder, keep):
  file = folder / "model.safetensors"
  file.write_bytes(file.read_bytes()[:keep])
  _refused(folder, "whole safetensors files", "model.safetensors of")


def test_tensor_in_two_files(folder):
  safetensors.numpy.save_file(
      {"model.norm.weight": np.zeros(32, np.float32)},
      folder / "other.safetensors",
  )
  _refused(
      folder,
      "model.norm.weight in model.safetensors and other.safetensors",
  )


def test_tensor_under_two_prefixes(whole, tmp_path):
  folder = shutil.copytree(whole("gemma3-fused"), tmp_path / "m")
  with tiny.edited(folder) as tensors:
    tensors["language_model.model.norm.weight"] = tensors["model.norm.weight"]
  _refused(folder, "each tensor once", "language_model.model.norm.weight")


def test_index_names_what_is_not_there(folder):
  index = folder / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": {
      "model.norm.weight": "model-00002-of-00002.safetensors",
  }}))
  _refused(folder, "no model-00002-of-00002.safetensors")
  index.write_text(json.dumps({"weight_map": {
      "model.other.weight": "model.safetensors",
  }}))
  _refused(folder, "must hold tensors where", "model.other.weight")
  index.write_text("{}")
  _refused(folder, "weight_map")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pt"])
def test_pickles_are_never_read(folder, name):
  (folder / "model.safetensors").rename(folder / name)
  _refused(folder, "never read", name, "save_pretrained")


def test_no_files(folder):
  (folder / "model.safetensors").unlink()
  _refused(folder, "must hold *.safetensors files")


# -- config.json


@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        ("gemma", {"hidden_activation": "relu"}, ["hidden_activation"]),
        ("gemma", {"hidden_act": "silu", "hidden_activation": None},
         ["hidden_act must be gelu_pytorch_tanh or gelu"]),
        ("gemma", {"rope_theta": 5e5}, ["rope_theta must be 10000"]),
        ("gemma", {"tie_word_embeddings": False}, ["tie_word_embeddings"]),
        ("gemma", {"attention_bias": True}, ["attention_bias"]),
        ("gemma2", {"query_pre_attn_scalar": 144},
         ["query_pre_attn_scalar must be 8"]),
        ("gemma2", {"rms_norm_eps": 1e-5}, ["rms_norm_eps"]),
        ("gemma2", {"layer_types": ["full_attention"]}, ["layer_types"]),
        ("gemma3", {"layer_types": ["sliding_attention"] * 7},
         ["layer_types[5] must be full_attention"]),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 3},
         ["layer_types[2] must be sliding_attention"]),
        ("gemma3", {"query_pre_attn_scalar": 7}, ["query_pre_attn_scalar"]),
        ("gemma3", {"final_logit_softcapping": 30.0},
         ["final_logit_softcapping must be null"]),
        ("gemma3", {"use_bidirectional_attention": True},
         ["use_bidirectional_attention"]),
        ("gemma3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
         ["rope_scaling must be of type default or linear", "yarn"]),
        ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
         ["rope_scaling.factor must be at least 1"]),
        ("gemma4", {"enable_moe_block": True}, ["enable_moe_block"]),
        ("gemma4", {"num_kv_shared_layers": 1}, ["num_kv_shared_layers"]),
        ("llama3", {"hidden_act": "gelu"}, ["hidden_act must be silu"]),
        ("llama3", {"mlp_bias": True}, ["mlp_bias"]),
        ("llama3", {"head_dim": 7}, ["head_dim must be even"]),
        ("llama3", {"num_key_value_heads": 3},
         ["num_attention_heads must divide by num_key_value_heads (3)"]),
        ("llama3", {"rope_scaling": {"type": "linear", "factor": 2.0}},
         ["rope_scaling must be of type default or llama3"]),
        ("llama3", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
         ["rope_scaling.low_freq_factor"]),
        ("llama3", {"rope_parameters": {"rope_type": "dynamic"},
                    "rope_scaling": None}, ["dynamic"]),
        ("llama3", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ("llama3", {"num_hidden_layers": "4"}, ["num_hidden_layers"]),
        ("llama3", {"hidden_size": 0}, ["hidden_size"]),
        ("llama3", {"quantization_config": {"bits": 4}},
         ["quantization_config"]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4,
                   "max_window_layers": 2}, ["use_sliding_window"]),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4},
         ["layer_types must leave full attention"]),
        ("qwen3", {"attention_bias": True}, ["attention_bias"]),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn"}}, ["yarn"]),
    ],
)
def test_what_tunix_cannot_express_is_refused(name, change, parts):
  family, text = families.of_config(tiny.config(name, **change))
  with pytest.raises(ValueError) as e:
    family.hf.config_from_hf(text, np.float32)
  message = str(e.value)
  assert message.startswith("config.json: ") and "\n" not in message
  assert re.search(r" must .*, got .*; \w", message)
  for part in parts:
    assert part in message


def test_qwen_that_names_a_window_and_does_not_use_it():
  family, text = families.of_config(tiny.config(
      "qwen2", use_sliding_window=False, sliding_window=4, max_window_layers=2
  ))
  family.hf.config_from_hf(text, np.float32)


def test_old_and_new_form_of_rope_say_the_same():
  for name, change in {
      "llama3.1": {"rope_parameters": {
          **tiny.CONFIGS["llama3.1"]["rope_scaling"], "rope_theta": 10_000.0,
      }},
      "gemma3": {"rope_parameters": {
          "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
          "full_attention": {
              "rope_type": "linear", "factor": 8.0, "rope_theta": 2e6
          },
      }},
      "qwen3": {"rope_parameters": {
          "rope_type": "default", "rope_theta": 10_000.0
      }},
  }.items():
    old = tiny.config(name)
    new = {k: v for k, v in old.items() if k not in (
        "rope_theta", "rope_scaling", "rope_local_base_freq"
    )} | change
    family, _ = families.of_config(old)
    assert family.hf.config_from_hf(old, np.float32) == (
        family.hf.config_from_hf(new, np.float32)
    )


def test_defaults_are_those_of_transformers():
  """An absent field means what transformers takes it to mean."""
  transformers = pytest.importorskip("transformers")
  for family in families.KNOWN:
    module = __import__(
        f"tunix_progdistill.families.{family.name}", fromlist=["DEFAULTS"]
    )
    for kind, defaults in module.DEFAULTS.items():
      theirs = transformers.CONFIG_MAPPING[kind]().to_dict()
      assert defaults == {k: theirs[k] for k in defaults}, kind


def test_exported_config_is_read_by_transformers(whole):
  transformers = pytest.importorskip("transformers")
  for name in tiny.CONFIGS:
    config = transformers.AutoConfig.from_pretrained(whole(name))
    raw = tiny.config(name)
    assert config.model_type == raw["model_type"]
    for field in (
        "hidden_size", "head_dim", "num_key_value_heads", "rms_norm_eps",
        "bos_token_id", "vocab_size",
    ):
      assert getattr(config, field) == raw[field], (name, field)
  llama = transformers.AutoConfig.from_pretrained(whole("llama3.1"))
  assert llama.rope_parameters == {
      **tiny.CONFIGS["llama3.1"]["rope_scaling"], "rope_theta": 10_000.0
  }
  gemma3 = transformers.AutoConfig.from_pretrained(whole("gemma3"))
  assert gemma3.rope_parameters == {
      "full_attention": {
          "rope_type": "linear", "factor": 8.0, "rope_theta": 2e6
      },
      "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
  }


def test_fields_without_a_meaning_are_named(caplog):
  family, text = families.of_config(tiny.config("qwen3", a_new_field=1))
  caplog.set_level("WARNING", logger="absl")
  family.hf.config_from_hf(text, np.float32)
  assert [r.message for r in caplog.records] == [
      "config.json: fields without a meaning here: a_new_field"
  ]


# -- load's other arguments


def test_flash_attention(folder, whole):
  ask = config_lib.ModelConfig(
      use_flash_attention=True, flash_attention_block_size=64
  )
  with pytest.raises(ValueError, match="Tunix has none for llama3"):
    local.load(folder, config=ask)
  _, _, config, _ = local.load(whole("qwen3"), config=ask)
  assert (config.use_flash_attention, config.flash_attention_block_size) == (
      True, 64
  )


def test_dtype_of_load(folder):
  with pytest.raises(ValueError, match="dtype must be float32 or bfloat16"):
    local.load(folder, dtype="float64")


# -- export


def test_export_replaces_nothing_but_exports(tmp_path):
  raw = tiny.config("qwen2")
  model = tiny.model(raw)
  ours = tmp_path / "precious"
  ours.mkdir()
  (ours / "diary.txt").write_text("dear diary")
  with pytest.raises(ValueError, match="must be empty or an earlier export"):
    weights.export(model, ours, loaded=tiny.source(raw))
  assert (ours / "diary.txt").read_text() == "dear diary"
  file = tmp_path / "file"
  file.write_text("")
  with pytest.raises(ValueError, match="must be a folder"):
    weights.export(model, file, loaded=tiny.source(raw))
  empty = tmp_path / "empty"
  empty.mkdir()
  weights.export(model, empty, loaded=tiny.source(raw))
  with pytest.raises(ValueError, match="folder that the weights came from"):
    weights.export(model, empty, loaded=tiny.source(raw, folder=empty))


def test_export_that_fails_leaves_the_old_one(tmp_path):
  """The new folder takes the place of the old one only when it is whole."""
  raw = tiny.config("qwen2")
  target = tmp_path / "m"
  tiny.write(target, "qwen2")
  before = {p.name: p.read_bytes() for p in target.iterdir()}

  class Tokenizer:
    bos_id, eos_id, pad_id = 5, 6, -1

    def save(self, folder):
      assert folder != target
      assert (folder / "model.safetensors").exists()
      raise OSError("no space left on device")

  with pytest.raises(OSError, match="no space"):
    weights.export(
        tiny.model(raw, seed=1), target,
        loaded=tiny.source(raw, tokenizer=Tokenizer()),
    )
  assert {p.name: p.read_bytes() for p in target.iterdir()} == before
  assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_export_takes_ids_from_the_tokenizer(tmp_path):
  """A cut vocabulary has other ids; a list of ends is kept where it fits."""
  raw = tiny.config("qwen2", eos_token_id=[1, 9])

  class Tokenizer:
    bos_id, eos_id, pad_id = 5, 9, -1

    def save(self, folder):
      (folder / "tokenizer.model").write_bytes(b"x")

  model = tiny.model(raw)
  loaded = tiny.source(raw, tokenizer=Tokenizer())
  weights.export(model, tmp_path / "m", loaded=loaded)
  fields = json.loads((tmp_path / "m" / "config.json").read_text())
  assert fields["bos_token_id"] == 5
  assert fields["eos_token_id"] == [1, 9]
  assert fields["pad_token_id"] == 0
  Tokenizer.eos_id = 11
  weights.export(model, tmp_path / "m", loaded=loaded)
  fields = json.loads((tmp_path / "m" / "config.json").read_text())
  assert fields["eos_token_id"] == 11
  assert (tmp_path / "m" / "tokenizer.model").exists()


def test_export_refuses_what_it_cannot_say(tmp_path):
  family, text = families.of_config(tiny.config("gemma2"))
  config = dataclasses.replace(
      family.hf.config_from_hf(text, np.float32), use_post_ffw_norm=False
  )
  with pytest.raises(ValueError, match="must be like Gemma 1"):
    weights.export(
        family.model_class()(config, rngs=nnx.Rngs(0)), tmp_path / "m",
        loaded=tiny.source(text),
    )
  raw = tiny.config("qwen2")
  model = tiny.model(raw)
  model.final_norm.w.set_value(
      model.final_norm.w.get_value().astype("bfloat16")
  )
  with pytest.raises(ValueError, match="parameters of one dtype"):
    weights.export(model, tmp_path / "m", loaded=tiny.source(raw))
  model = tiny.model(raw)
  del model.layers[0].attn.q_bias
  with pytest.raises(ValueError, match="layers/0/attn/q_bias"):
    weights.export(model, tmp_path / "m", loaded=tiny.source(raw))
  assert not list(tmp_path.iterdir())
