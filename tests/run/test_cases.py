"""Public faults and traps, through the command."""

import json
import shutil
import sys

from flax import nnx
import jax
import numpy as np
import pytest
import safetensors.numpy
from tunix.sft import metrics_logger

from tests.run import command
from tunix_progdistill import weights
from tunix_progdistill.cli import main as main_lib
from tunix_progdistill.run import backends


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
  folder = tmp_path_factory.mktemp("teacher")
  command.checkpoint(folder, "llama3")
  return folder


def said(capsys) -> str:
  return capsys.readouterr().err.strip().splitlines()[-1]


def test_k17_1_vocabularies_that_differ_before_anything_loads(
    tmp_path, teacher, capsys, monkeypatch
):
  other = tmp_path / "other"
  other.mkdir()
  command.checkpoint(other, "llama3", vocab_size=72)
  path = command.world(tmp_path, teacher)

  def load(*args, **kwargs):
    raise AssertionError("loaded")

  monkeypatch.setattr(weights, "load", load)
  assert main_lib.main([
      "train", str(path), "model_config.layers=null",
      "teacher_model_config.model_source=local",
      f"teacher_model_config.model_path={other / 'teacher'}",
  ]) == 2
  line = said(capsys)
  assert "vocabulary size of model_config and teacher_model_config" in line
  assert "(64, 72)" in line and "; " in line
  assert not (tmp_path / "run").exists()


def test_k31_1_one_batch_one_update(tmp_path, teacher):
  path = command.world(tmp_path, teacher)
  assert main_lib.main([
      "train", str(path), "batch_size=20", "training_config.max_steps=1",
      "num_train_epochs=1", "prompts=[]",
  ]) == 0
  (record,) = command.records(tmp_path / "run", "train")
  assert record["update"] == 1
  assert np.isfinite(record["loss"])
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert summary["updates"] == 1


@pytest.mark.parametrize("break_it, line", [
    ("nothing", "data_directory must"),
    ("blank", "data_directory must"),
    ("one", "must leave documents on both sides"),
    ("few", "batch_size must be at most"),
])
def test_k31_1_too_little_data_is_one_line(
    tmp_path, teacher, capsys, break_it, line
):
  path = command.world(tmp_path, teacher)
  texts = sorted((tmp_path / "text").iterdir())
  keep = {"nothing": 0, "blank": 2, "one": 1, "few": 30}[break_it]
  for text in texts[keep:]:
    text.unlink()
  if break_it == "blank":
    for text in texts[:keep]:
      text.write_text(" \n ")
  words = ["train", str(path)]
  if break_it == "few":
    words.append("batch_size=1000")
  assert main_lib.main(words) == 2
  assert line in said(capsys)
  assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_k31_1_data_that_end_before_the_plan(tmp_path, teacher, capsys):
  path = command.world(tmp_path, teacher)
  assert main_lib.main(
      ["train", str(path), "num_train_epochs=1", "max_target_length=60"]
  ) == 2
  assert "num_train_epochs must be at least" in said(capsys)


@pytest.mark.parametrize("word, line", [
    ("training_config.max_steps=0", "training_config.max_steps must be >= 1"),
    ("progressive.temperature=0", "progressive.temperature must be > 0"),
    ("progressive.temperature=-1", "progressive.temperature must be > 0"),
    ("progressive.temperature=.nan", "progressive.temperature must be"),
    ("progressive.alpha=1.5", "progressive.alpha must lie in [0, 1]"),
    ("progressive.topk=0", "progressive.topk must be a known key"),
])
def test_k31_2_values_out_of_range(tmp_path, teacher, capsys, word, line):
  path = command.world(tmp_path, teacher)
  assert main_lib.main(["train", str(path), word]) == 2
  assert line in said(capsys)
  assert not (tmp_path / "run").exists()


def test_k31_2_clipping_changes_the_run(tmp_path, teacher):
  """A clip that is accepted is a clip that is applied."""
  path = command.world(tmp_path, teacher)
  students = []
  for norm in ("1.0", "1e-3"):
    run = tmp_path / f"run{norm}"
    assert main_lib.main([
        "train", str(path), f"progressive.max_grad_norm={norm}",
        f"run_directory={run}", "optimizer_config.opt_type=sgd",
        "training_config.max_steps=2", "prompts=[]",
    ]) == 0
    students.append(weights.load(
        weights.ModelConfig(model_path=str(run / "student"))
    ).model)
  before = weights.load(
      weights.ModelConfig(model_path=str(tmp_path / "teacher"))
  ).model
  moved = [_distance(before, s) for s in students]
  assert 0 < moved[1] < 0.01 * moved[0]


def _distance(teacher_model, student):
  """Of the student's norm weights and head, which it has from the teacher."""
  a, b = teacher_model.final_norm, student.final_norm
  head = (teacher_model.lm_head, student.lm_head)
  return sum(
      float(abs(x - y).sum())
      for m, n in ((a, b), head)
      for x, y in zip(
          jax.tree.leaves(nnx.state(m)), jax.tree.leaves(nnx.state(n)),
          strict=True,
      )
  )


def test_trap_24_wandb_starts_only_when_it_is_named(monkeypatch):
  started = []

  class Backend:
    def __init__(self, name, **kwargs):
      started.append(name)

    def log_scalar(self, *args, **kwargs):
      pass

    def close(self):
      pass

  monkeypatch.setattr(
      metrics_logger, "WandbBackend", lambda **k: Backend("wandb")
  )
  monkeypatch.setattr(
      metrics_logger, "TensorboardBackend", lambda **k: Backend("tensorboard")
  )
  common = {
      "log_dir": "x", "project": "p", "run": "r", "flush_every_n_steps": 1
  }
  for names in (
      ("jsonl",), ("tensorboard",), ("wandb",), ("tensorboard", "wandb")
  ):
    started.clear()
    options = backends.tunix_options(names, **common)
    if options is not None:
      options.create_backends()
    assert started == [n for n in names if n != "jsonl"]


def test_trap_24_wandb_that_is_not_there_is_one_line(
    tmp_path, teacher, capsys, monkeypatch
):
  monkeypatch.setitem(sys.modules, "wandb", None)
  path = command.world(tmp_path, teacher)
  assert main_lib.main(["train", str(path), "logging=[jsonl, wandb]"]) == 2
  assert "logging must name" in said(capsys)


def test_trap_24_records_outlive_cleared_listeners(tmp_path, teacher):
  """Tunix clears all listeners of jax.monitoring when a trainer closes."""
  path = command.world(tmp_path, teacher)
  for name in ("a", "b"):
    assert main_lib.main([
        "train", str(path), f"run_directory={tmp_path / name}",
        "training_config.max_steps=3", "prompts=[]",
    ]) == 0
    updates = [r["update"] for r in command.records(tmp_path / name, "train")]
    assert updates == [1, 2, 3]


def test_trap_22_remat_from_the_yaml(tmp_path, teacher, monkeypatch):
  """Tunix's number for whole layers, as its own scripts pass it."""
  from tunix_progdistill.families import remat

  calls = []
  real = remat.set_remat
  monkeypatch.setattr(
      remat, "set_remat",
      lambda model, value: calls.append((value, real(model, value))),
  )
  path = command.world(tmp_path, teacher)
  assert main_lib.main([
      "train", str(path), "model_config.remat_config=3",
      "training_config.max_steps=2", "prompts=[]",
  ]) == 0
  ((value, modules),) = calls
  assert value == "decoder"
  assert modules > 3


def test_trap_25_the_last_student_stays_until_the_next_is_whole(
    tmp_path, teacher, monkeypatch
):
  """Tunix's own export deletes its folder first."""
  path = command.world(tmp_path, teacher)
  words = ["train", str(path), "training_config.max_steps=2", "prompts=[]"]
  assert main_lib.main(words) == 0
  old = (tmp_path / "run" / "student" / "model.safetensors").read_bytes()

  import safetensors.numpy as writer

  def full(*args, **kwargs):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(writer, "save_file", full)
  words[2] = "training_config.max_steps=4"
  assert main_lib.main(words) != 0
  assert (
      tmp_path / "run" / "student" / "model.safetensors"
  ).read_bytes() == old
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert summary["status"] == "failed"
  assert "No space left" in summary["cause"]


@pytest.mark.parametrize("words, line, updates", [
    (["progressive.stages.0.learning_rate=1e6",
      "progressive.max_grad_norm=null"], "the student diverged", 4),
])
def test_a_run_that_diverged_is_a_failure(
    tmp_path, teacher, capsys, words, line, updates
):
  """It ended with exit code 0 and a student of NaN."""
  path = command.world(tmp_path, teacher)
  assert main_lib.main(["train", str(path), "prompts=[]", *words]) == 1
  assert line in said(capsys)
  assert len(command.records(tmp_path / "run", "train")) == updates
  assert not (tmp_path / "run" / "student").exists()
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert summary["status"] == "failed"
  assert line in summary["cause"]
  page = (tmp_path / "run" / "report.html").read_text()
  assert "The run failed after update" in page
  assert "The last one was not finite." in page


def test_a_run_that_never_moved_is_a_failure(tmp_path, teacher, capsys):
  """Logits that are finite at tau = 1 and beyond float32 at the run's."""
  path = command.world(tmp_path, teacher)
  loud = tmp_path / "loud"
  shutil.copytree(teacher / "teacher", loud)
  file = loud / "model.safetensors"
  tensors = safetensors.numpy.load_file(file)
  tensors["model.norm.weight"] *= 1e22
  safetensors.numpy.save_file(tensors, file, {"format": "pt"})
  assert main_lib.main([
      "train", str(path), "prompts=[]", f"model_config.model_path={loud}",
      "progressive.temperature=2e-19", "progressive.alpha=1",
  ]) == 1
  assert "all 12 updates did nothing" in said(capsys)


def test_a_teacher_of_nan_is_a_failure(tmp_path, teacher, capsys):
  path = command.world(tmp_path, teacher)
  broken = tmp_path / "broken"
  shutil.copytree(teacher / "teacher", broken)
  file = broken / "model.safetensors"
  tensors = safetensors.numpy.load_file(file)
  tensors["model.layers.2.mlp.up_proj.weight"][0, 0] = np.nan
  safetensors.numpy.save_file(tensors, file, {"format": "pt"})
  assert main_lib.main([
      "train", str(path), "prompts=[]", f"model_config.model_path={broken}",
  ]) == 1
  assert "must be finite before the first update" in said(capsys)
  assert not command.records(tmp_path / "run", "train")


def test_a_teacher_from_another_folder(tmp_path, teacher):
  """Student and teacher of different depth and width, one vocabulary."""
  small = tmp_path / "small"
  small.mkdir()
  command.checkpoint(small, "llama3", hidden_size=16, num_hidden_layers=2)
  path = command.world(tmp_path, teacher)
  body = json.loads(path.read_text())
  body["model_config"] = {
      "model_source": "local", "model_path": str(small / "teacher")
  }
  body["teacher_model_config"] = {
      "model_path": str(teacher / "teacher")
  }
  path.write_text(json.dumps(body))
  assert main_lib.main(["train", str(path), "prompts=[]"]) == 0
  kl = [
      r["distill/kl_div_tau1"]
      for r in command.records(tmp_path / "run", "eval")
  ]
  assert kl[-1] < kl[0]
  exported = json.loads(
      (tmp_path / "run" / "student" / "config.json").read_text()
  )
  assert exported["hidden_size"] == 16

