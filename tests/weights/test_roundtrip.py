"""Export, then load: the same logits by our loader and by Tunix's own."""

import importlib
import json

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.models.llama3 import model as llama3

from tests.weights import tiny
from tunix_progdistill import families
from tunix_progdistill import students
from tunix_progdistill import weights
from tunix_progdistill.families import hf
from tunix_progdistill.families import rope
from tunix_progdistill.weights import local

_FAMILY_NAMES = {f.name for f in families.KNOWN}


def _by_tunix(folder, family, config, dtype=None):
  loader = importlib.import_module(family.hf.loader)
  return loader.create_model_from_safe_tensors(
      file_dir=str(folder), config=config, dtype=dtype
  )


def test_every_family_is_tested():
  assert {n.split("-")[0].split(".")[0] for n in tiny.CONFIGS} == (
      _FAMILY_NAMES | {"gemma2"}
  )


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_same_logits_by_ours_and_by_tunix(tmp_path, name):
  made = tiny.write(tmp_path / "m", name)
  expected = tiny.logits(made)
  assert np.max(np.abs(expected)) > 1  # the weights say something
  ours, family, config, hf_config = local.load(tmp_path / "m")
  np.testing.assert_array_equal(tiny.logits(ours), expected)
  assert family.is_mine(ours)
  assert config == made.config == ours.config
  assert hf_config["vocab_size"] == tiny.VOCABULARY
  if name.split("-")[0] == "gemma":
    return  # see test_tunix_reads_gemma_1_wrong
  theirs = _by_tunix(tmp_path / "m", family, config)
  np.testing.assert_array_equal(tiny.logits(theirs), expected)


@pytest.mark.parametrize("name", ["gemma", "gemma-fused"])
def test_tunix_reads_gemma_1_wrong(tmp_path, name):
  """Its loader leaves the norm before the feed-forward block empty.

  Where this fails, Tunix was mended: `loader_is_right` can go.
  """
  tiny.write(tmp_path / "m", name)
  _, family, config, _ = local.load(tmp_path / "m")
  with pytest.raises((AttributeError, ValueError, TypeError)):
    tiny.logits(_by_tunix(tmp_path / "m", family, config))


@pytest.mark.parametrize(
    "name",
    ["gemma", "gemma2", "gemma3-fused", "gemma4", "llama3", "qwen3-tied"],
)
def test_bfloat16(tmp_path, name):
  made = tiny.write(tmp_path / "m", name, dtype=jnp.bfloat16)
  fields = json.loads((tmp_path / "m" / "config.json").read_text())
  assert fields["torch_dtype"] == "bfloat16"
  ours, *_ = local.load(tmp_path / "m", dtype="bfloat16")
  np.testing.assert_array_equal(tiny.logits(ours), tiny.logits(made))
  for leaf in jax.tree.leaves(_state(ours)):
    assert leaf.dtype == jnp.bfloat16
  wide, *_ = local.load(tmp_path / "m", dtype="float32")
  for a, b in zip(
      jax.tree.leaves(_state(wide)), jax.tree.leaves(_state(made)), strict=True
  ):
    assert a.dtype == jnp.float32
    np.testing.assert_array_equal(a, np.asarray(b, np.float32))


def _state(model):
  return nnx.state(model, nnx.Param)


@pytest.mark.parametrize("name", ["gemma-fused", "gemma3", "gemma4-per-layer"])
@pytest.mark.parametrize("mixed", [False, True])
def test_shards_and_mixed_dtypes(tmp_path, name, mixed):
  """Parts of one parameter may lie in two files; a file may mix dtypes."""
  made = tiny.model(tiny.config(name))
  folder = tmp_path / "m"
  weights.export(
      made, folder, loaded=tiny.source({}), max_shard_bytes=10_000
  )
  files = sorted(f.name for f in folder.glob("*.safetensors"))
  assert len(files) > 3
  index = json.loads((folder / "model.safetensors.index.json").read_text())
  assert set(index["weight_map"].values()) == set(files)
  assert index["metadata"]["total_size"] == sum(
      x.nbytes for x in jax.tree.leaves(_state(made))
  )
  expected = tiny.logits(made)
  if mixed:
    # The norms as float16, which holds 0.5 exactly.
    for file in files:
      with tiny.edited(folder, file) as tensors:
        for key in tensors:
          if "norm" in key:
            tensors[key] = np.full_like(tensors[key], 0.5, np.float16)
  ours, *_ = local.load(folder)
  if not mixed:
    np.testing.assert_array_equal(tiny.logits(ours), expected)
    return
  for path, leaf in jax.tree_util.tree_leaves_with_path(_state(ours)):
    assert leaf.dtype == jnp.float32
    if "norm" in str(path):
      np.testing.assert_array_equal(leaf, np.full(leaf.shape, 0.5))


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("gemma3", "language_model.model."),
        ("gemma3", "model.language_model."),
        ("gemma4", "model."),
        ("gemma4", "model.language_model."),
    ],
)
def test_text_model_of_a_multimodal_file(tmp_path, caplog, name, prefix):
  """Files of models with a vision tower name the text model's part so."""
  made = tiny.write(tmp_path / "m", name)
  family = families.of(made)
  with tiny.edited(tmp_path / "m") as tensors:
    for key in list(tensors):
      rest = key.removeprefix(family.hf.export_prefix)
      tensors[f"{prefix}{rest}"] = tensors.pop(key)
    for i in range(5):
      tensors[f"vision_tower.encoder.{i}"] = np.zeros(2, np.float32)
  raw = json.loads((tmp_path / "m" / "config.json").read_text())
  outer = {
      "model_type": name, "text_config": raw, "eos_token_id": [1, 7],
      "vision_config": {"hidden_size": 8},
  }
  (tmp_path / "m" / "config.json").write_text(json.dumps(outer))
  caplog.set_level("INFO", logger="absl")
  ours, _, _, hf_config = local.load(tmp_path / "m")
  np.testing.assert_array_equal(tiny.logits(ours), tiny.logits(made))
  assert hf_config["model_type"] == f"{name}_text"
  lines = [r.message for r in caplog.records if "not used" in r.message]
  assert lines == [
      "5 tensors are not used by the text model: vision_tower.encoder.0, "
      "vision_tower.encoder.1, vision_tower.encoder.2 and 2 more"
  ]


def test_head_in_a_tied_model(tmp_path):
  """A copy of the embedding is left aside, another head is refused."""
  made = tiny.write(tmp_path / "m", "qwen3-tied")
  with tiny.edited(tmp_path / "m") as tensors:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
  ours, *_ = local.load(tmp_path / "m")
  np.testing.assert_array_equal(tiny.logits(ours), tiny.logits(made))
  with tiny.edited(tmp_path / "m") as tensors:
    tensors["lm_head.weight"][-1, -1] += 1
  local.check(tmp_path / "m")  # headers tell nothing of it
  with pytest.raises(ValueError, match="head that equals the embedding"):
    local.load(tmp_path / "m")
  with tiny.edited(tmp_path / "m") as tensors:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
  with pytest.raises(ValueError, match=r"shapes .*lm_head.weight \[63, 32\]"):
    local.check(tmp_path / "m")


def test_students_of_layers_are_exported(tmp_path):
  teacher = tiny.write(tmp_path / "teacher", "gemma3")
  student = students.from_layers(teacher, (1, 3, 4))
  loaded = tiny.source(tiny.config("gemma3"), folder=tmp_path / "teacher")
  weights.export(student, tmp_path / "student", loaded=loaded)
  ours, _, config, _ = local.load(tmp_path / "student")
  assert config.num_layers == 3
  np.testing.assert_array_equal(tiny.logits(ours), tiny.logits(student))
  # A folder that holds an export is replaced by the next one.
  weights.export(teacher, tmp_path / "student", loaded=loaded)
  assert local.describe(tmp_path / "student").num_layers == 7
  assert sorted(p.name for p in tmp_path.iterdir()) == ["student", "teacher"]


@pytest.mark.parametrize("name", ["gemma", "gemma2", "qwen2"])
def test_mesh(tmp_path, name):
  made = tiny.write(tmp_path / "m", name)
  mesh = jax.sharding.Mesh(
      np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp")
  )
  ours, *_ = local.load(tmp_path / "m", mesh=mesh)
  embedding = ours.embedder.input_embedding.get_value()
  assert len(embedding.sharding.device_set) == 4
  assert embedding.addressable_shards[0].data.shape == (32, 16)
  np.testing.assert_allclose(tiny.logits(ours), tiny.logits(made), atol=2e-5)
  with pytest.raises(ValueError, match="mesh must have the axes fsdp and tp"):
    local.load(tmp_path / "m", mesh=jax.make_mesh((2,), ("x",)))


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_table_and_layouts(name):
  """Each tensor's layout is undone by its inverse, of the right shape."""
  family, text = families.of_config(tiny.config(name))
  config = family.hf.config_from_hf(text, jnp.float32)
  shapes = hf.abstract_parameters(family.model_class(), config)
  short = family.hf.shapes(family.model_class(), config)
  assert {k: v.shape for k, v in short.items()} == {
      k: v.shape for k, v in shapes.items()
  }
  table = family.hf.tensors(config)
  assert {t.param for t in table} == set(shapes)
  assert len({t.name for t in table}) == len(table)
  rng = np.random.default_rng(0)
  for tensor in table[:20]:
    value = rng.normal(size=shapes[tensor.param].shape)
    there = tensor.to_hf(value)
    assert there.shape == tensor.hf_shape(value.shape)
    back = tensor.from_hf(there, value.shape)
    np.testing.assert_array_equal(
        back, value if tensor.part is None else value[tensor.part]
    )


def test_describe(tmp_path):
  tiny.write(tmp_path / "m", "llama3")
  (tmp_path / "m" / "model.safetensors").unlink()  # it opens no tensor file
  found = local.describe(tmp_path / "m")
  assert (found.family, found.vocab_size, found.num_layers) == (
      "llama3", tiny.VOCABULARY, 4
  )
  assert (found.embed_dim, found.bos_id, found.eos_id) == (32, 2, 1)
  assert found.rope_theta == 10_000


# -- RoPE of Llama 3.1


def _turned(q, positions, timescale):
  """RoPE in float64 on [T, H], a pair being (i, i + H / 2)."""
  half = q.shape[-1] // 2
  angle = positions[:, None] / timescale[None]
  a, b = q[:, :half], q[:, half:]
  return np.concatenate(
      [a * np.cos(angle) - b * np.sin(angle),
       b * np.cos(angle) + a * np.sin(angle)], axis=-1,
  )


def _scaled_timescale(theta, head, factor, low, high, original):
  """Llama 3.1's timescales, by the three cases, one pair at a time."""
  found = []
  for i in range(head // 2):
    frequency = theta ** (-2 * i / head)
    wavelength = 2 * np.pi / frequency
    if wavelength > original / low:
      frequency /= factor
    elif wavelength >= original / high:
      s = (original / wavelength - low) / (high - low)
      frequency = (1 - s) * frequency / factor + s * frequency
    found.append(1 / frequency)
  return np.array(found)


@pytest.mark.parametrize("head", [8, 64])
def test_llama_3_1_rope_against_float64(head):
  """Values of Llama 3.1: all three kinds of pairs are there."""
  made = tiny.model(tiny.config(
      "llama3.1", head_dim=head, rope_theta=500_000.0,
      rope_scaling=tiny.CONFIGS["llama3.1"]["rope_scaling"]
      | {"original_max_position_embeddings": 8192},
  ))
  assert isinstance(made.config.rope_theta, rope.Llama3Theta)
  expected = _scaled_timescale(500_000.0, head, 8.0, 1.0, 4.0, 8192)
  plain = 500_000.0 ** (np.arange(head // 2) * 2 / head)
  ratio = expected / plain
  assert ratio[0] == pytest.approx(1) and ratio[-1] == pytest.approx(8)
  if head == 64:
    assert np.any((ratio > 1.01) & (ratio < 7.9))
  rng = np.random.default_rng(0)
  q = rng.normal(size=(1, 300, 1, head)).astype(np.float32)
  positions = np.arange(300)
  before = llama3.apply_rope.__defaults__
  with families.tracing(made):
    found = llama3.apply_rope(q, positions[None], head_dim=head)
  assert llama3.apply_rope.__defaults__ == before
  np.testing.assert_allclose(
      found[0, :, 0], _turned(np.float64(q[0, :, 0]), positions, expected),
      atol=2e-4,
  )


def test_llama_3_1_rope_changes_the_model():
  scaled = tiny.model(tiny.config("llama3.1"))
  plain = tiny.model(tiny.config("llama3.1", rope_scaling=None))
  assert np.max(np.abs(tiny.logits(scaled) - tiny.logits(plain))) > 1e-2
  with pytest.raises(ValueError, match="rope_theta of student and teacher"):
    families.check_pair(plain, scaled)
  families.check_pair(scaled, tiny.model(tiny.config("llama3.1"), seed=1))
