"""The command, end to end: from a folder of weights to a student's folder."""

import json
import pathlib
import random
import shutil
import time

import numpy as np
import pytest
import safetensors.numpy

from tests.run import command
from tests.weights import tiny
from tunix_progdistill import weights
from tunix_progdistill.cli import main as main_lib

LAYERS = {
    "gemma": (0, 1, 3), "gemma3": (0, 1, 3), "gemma4": (0, 1, 5),
    "llama3": (0, 1, 3), "qwen2-tied": (0, 1, 3), "qwen3": (0, 1, 3),
}


def student(folder) -> dict[str, np.ndarray]:
  return safetensors.numpy.load_file(folder / "student" / "model.safetensors")


@pytest.mark.parametrize("name", [
    name if name in ("gemma3", "qwen2-tied") else
    pytest.param(name, marks=pytest.mark.slow) for name in LAYERS
])
def test_family_from_folder_to_folder(name, tmp_path, capsys):
  more = {}
  if name == "gemma4":
    kinds = tiny.config(name)["layer_types"]
    more = {"num_hidden_layers": 6, "layer_types": kinds * 2}
  command.checkpoint(tmp_path, name, **more)
  path = command.config(tmp_path, LAYERS[name])
  assert main_lib.main(["train", str(path)]) == 0
  run = tmp_path / "run"
  kl = [r["distill/kl_div_tau1"] for r in command.records(run, "eval")]
  assert kl[-1] < kl[0]
  trained = command.records(run, "train")
  assert [r["update"] for r in trained] == list(range(1, 13))
  stages = [r["progressive/stage"] for r in trained]
  assert stages == [0] * 4 + [1] * 4 + [2] * 4

  # The student that was exported is the one that was trained.
  exported = weights.load(
      weights.ModelConfig(model_path=str(run / "student"))
  )
  again = weights.load(weights.ModelConfig(model_path=str(run / "student")))
  weights.export(again.model, tmp_path / "twice", loaded=again)
  twice = weights.load(weights.ModelConfig(model_path=str(tmp_path / "twice")))
  logits = tiny.logits(exported.model)
  np.testing.assert_array_equal(logits, tiny.logits(twice.model))
  summary = json.loads((run / "summary.json").read_text())
  assert summary["status"] == "finished"
  assert [s["compiles"] for s in summary["stages"]] == [1, 1, 1]
  assert {m["name"] for m in summary["models"]} == {
      "teacher", "student before", "student after", "unigram floor"
  }
  after = next(m for m in summary["models"] if m["name"] == "student after")
  assert after["kl_div_tau1"] == pytest.approx(kl[-1])
  assert after["parameters"] == sum(
      x.size for x in _parameters(exported.model)
  )
  for entry in ("config.yaml", "command.txt", "versions.json", "report.html"):
    assert (run / entry).is_file()
  assert list((run / "tensorboard").glob("events*"))
  assert "held-out KL at tau = 1" in capsys.readouterr().out


def _parameters(model):
  from flax import nnx
  import jax

  return jax.tree.leaves(nnx.state(model, nnx.Param))


def test_student_of_the_folder_is_the_student_of_the_trainer(tmp_path):
  """Logits of the exported folder against those of the last checkpoint."""
  command.checkpoint(tmp_path, "llama3")
  path = command.config(tmp_path, (0, 3))
  assert main_lib.main(["train", str(path)]) == 0
  from flax import nnx
  import orbax.checkpoint as ocp

  exported = weights.load(
      weights.ModelConfig(model_path=str(tmp_path / "run" / "student"))
  )
  params = nnx.state(exported.model, nnx.Param)
  saved = ocp.StandardCheckpointer().restore(
      tmp_path / "run" / "checkpoints" / "12" / "model_params"
  )
  found = {
      "/".join(str(k) for k in p): v
      for p, v in nnx.to_flat_state(params)
  }
  flat = _flat(saved)
  assert len(found) == len(flat) > 10
  for name, variable in found.items():
    np.testing.assert_array_equal(variable.get_value(), flat[name])


def _flat(tree, path=""):
  if isinstance(tree, dict) and set(tree) == {"value"}:
    return {path: tree["value"]}
  if isinstance(tree, dict):
    out = {}
    for k, v in tree.items():
      out |= _flat(v, f"{path}/{k}" if path else str(k))
    return out
  return {path: tree}


def _finish(path, log):
  process = command.start("train", str(path), log=log)
  assert process.wait(timeout=300) == 0, log.read_text()[-2000:]


def _done(metrics) -> int:
  """Updates that stand in a metrics.jsonl."""
  return metrics.read_text().count('"kind": "train"') if metrics.exists() else 0


def _kill_while_running(folder, path, kills, seed):
  """Runs the command and kills it `kills` times, then lets it finish."""
  random.seed(seed)
  log, metrics = folder / "log", folder / "run" / "metrics.jsonl"
  moments = []
  for _ in range(kills):
    before = _done(metrics)
    process = command.start("train", str(path), log=log)
    # At most two updates beyond the last kill, or still while it starts.
    wanted = before + random.randint(0, 2)
    delay = random.random() * (6.0 if wanted == before else 0.3)
    end = time.monotonic() + 240
    while time.monotonic() < end and process.poll() is None:
      if _done(metrics) >= wanted:
        break
      time.sleep(0.02)
    time.sleep(delay)
    process.kill()
    process.wait()
    moments.append(_done(metrics))
  _finish(path, log)
  return moments


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
  """A run that nobody disturbed."""
  folder = tmp_path_factory.mktemp("straight")
  command.checkpoint(folder, "llama3")
  path = command.config(folder, (0, 1, 3))
  _finish(path, folder / "log")
  return folder


def _same_run(folder, straight, extra=()):
  trained = command.records(folder / "run", "train")
  expected = command.records(straight / "run", "train")
  assert [r["update"] for r in trained] == list(range(1, 13))
  for a, b in zip(trained, expected, strict=True):
    for key in ("loss", "grad_norm", "learning_rate", "distill/temperature"):
      assert a[key] == b[key], (a["update"], key)
  evaluated = [r["update"] for r in command.records(folder / "run", "eval")]
  assert len(evaluated) == len(set(evaluated))
  assert {0, 5, 10, 12, *extra} <= set(evaluated)
  for name, value in student(straight / "run").items():
    np.testing.assert_array_equal(student(folder / "run")[name], value)


def _killed(tmp_path, straight, kills, seed):
  path = command.world(tmp_path, straight)
  moments = _kill_while_running(tmp_path, path, kills, seed)
  _same_run(tmp_path, straight)
  return moments


def test_kill_9_loses_nothing(tmp_path, straight):
  _killed(tmp_path, straight, kills=2, seed=0)


@pytest.mark.slow
def test_kill_9_ten_times(tmp_path, straight):
  print(_killed(tmp_path, straight, kills=10, seed=1))


def test_the_same_command_again_changes_nothing(tmp_path, straight, capsys):
  run = straight / "run"
  before = student(run)
  metrics = command.records(run, "train")
  assert main_lib.main(["train", str(straight / "run.yaml")]) == 0
  after = student(run)
  for name, value in before.items():
    np.testing.assert_array_equal(after[name], value)
  assert command.records(run, "train") == metrics
  capsys.readouterr()

  # Another config in the same folder is refused, and nothing is lost.
  assert main_lib.main(
      ["train", str(straight / "run.yaml"), "batch_size=2"]
  ) == 2
  said = capsys.readouterr().err.strip().splitlines()[-1]
  assert "batch_size: 4 -> 2" in said and "--restart" in said
  assert command.records(run, "train") == metrics


def test_config_of_the_folder_makes_the_run_again(tmp_path, straight):
  """config.yaml is whole: it gives the same student in another folder."""
  assert main_lib.main([
      "train", str(straight / "run" / "config.yaml"),
      f"run_directory={tmp_path / 'again'}", "logging=[jsonl]",
  ]) == 0
  for name, value in student(straight / "run").items():
    np.testing.assert_array_equal(student(tmp_path / "again")[name], value)
  assert not (tmp_path / "again" / "tensorboard").exists()


def test_another_teacher_under_a_run_is_refused(tmp_path, capsys):
  """The same path, other weights: the student would change its teacher."""
  command.checkpoint(tmp_path, "llama3")
  path = command.config(tmp_path, (0, 1, 3))
  words = ["train", str(path), "prompts=[]"]
  assert main_lib.main([*words, "training_config.max_steps=2"]) == 0
  file = tmp_path / "teacher" / "model.safetensors"
  tensors = safetensors.numpy.load_file(file)
  tensors["model.layers.2.mlp.up_proj.weight"][:] += 0.01
  safetensors.numpy.save_file(tensors, file, {"format": "pt"})
  assert main_lib.main(words) == 2
  said = capsys.readouterr().err.strip().splitlines()[-1]
  assert "the teacher's weights must be what this run began with" in said
  assert len(command.records(tmp_path / "run", "train")) == 2
  assert main_lib.main([*words, "--restart"]) == 0


def test_a_folder_that_was_meddled_with(tmp_path, straight, capsys):
  """Records are mended where they can be; the rest is one line."""
  path = command.world(tmp_path, straight)
  words = ["train", str(path)]
  assert main_lib.main([*words, "training_config.max_steps=6"]) == 0
  run = tmp_path / "run"
  (run / "summary.json").write_text(
      '{"models": [{}, 3], "stages": 4, "wall_sec": "x", "samples": [1]}'
  )
  (run / "inputs.json").write_bytes(b"\xff\x00")
  with open(run / "metrics.jsonl", "ab") as f:
    f.write(b'[1]\n\xff\xfe\n{"kind": "train", "update": "x"}\n')
    f.write(b'{"update": 3}\n{"upd')
  assert main_lib.main(words) == 0
  _same_run(tmp_path, straight, extra={6})

  capsys.readouterr()
  (run / "config.yaml").write_text("model_config: [\n")
  assert main_lib.main(words) == 2
  said = capsys.readouterr().err.strip().splitlines()[-1]
  assert "must hold a config.yaml that can be read" in said
  (run / "config.yaml").write_text("- a list")
  assert main_lib.main(words) == 2


class Kill(Exception):
  """Stands for kill -9: nothing may be cleaned up after it."""


def _begin(where, text, restart=False):
  from tunix_progdistill.run import folder as folder_lib

  with folder_lib.RunFolder(where) as folder, folder.begin(
      text=text, command="x", root=str(where / "checkpoints"), restart=restart
  ):
    (where / "inputs.json").write_text("{}")


def test_a_kill_between_any_two_files_of_the_folder(tmp_path, monkeypatch):
  """The folder stays one that the same command can begin in."""
  from tunix_progdistill import files
  from tunix_progdistill.run import aside

  real = files.write_text
  for stop in range(4):
    written = []

    def write(path, text, stop=stop, written=written):
      if len(written) == stop:
        path.with_name(path.name + ".partial").write_text(text[:3])
        raise Kill
      written.append(path)
      real(path, text)

    where = tmp_path / str(stop)
    with monkeypatch.context() as patched:
      patched.setattr(files, "write_text", write)
      patched.setattr(aside.Aside, "put_back", lambda self: None)
      with pytest.raises(Kill):
        _begin(where, "a: 1\n")
    _begin(where, "a: 1\n")
    assert (where / "config.yaml").read_text() == "a: 1\n"
    assert not list(where.glob(".aside*"))


@pytest.mark.parametrize("fails", [False, True])
def test_a_kill_at_any_step_of_a_restart(tmp_path, monkeypatch, fails):
  """The old run is there, whole, or the new one is; never a half of each."""
  names = ("rename", "mkdir", "rmdir", "unlink")
  old = {"config.yaml", "metrics.jsonl", "checkpoints", ".run_id"}

  def world(where):
    _begin(where, "a: 1\n")
    (where / "checkpoints" / "7").mkdir(parents=True)
    (where / "metrics.jsonl").write_text('{"kind": "train", "update": 1}\n')

  def restart(where):
    from tunix_progdistill.run import folder as folder_lib

    with folder_lib.RunFolder(where) as folder, folder.begin(
        text="b: 2\n", command="x", root=str(where / "checkpoints"),
        restart=True,
    ):
      (where / "checkpoints" / "new").mkdir(parents=True)
      if fails:
        raise ValueError("the new config cannot work")

  stop, kills = 0, 0
  while True:
    where = tmp_path / str(stop)
    world(where)
    steps = []
    with monkeypatch.context() as patched:
      for name in names:
        real = getattr(pathlib.Path, name)

        def step(self, *args, real=real, steps=steps, stop=stop, **kwargs):
          if len(steps) >= stop:
            raise Kill
          steps.append(self)
          return real(self, *args, **kwargs)

        patched.setattr(pathlib.Path, name, step)
      try:
        restart(where)
      except Kill:
        kills += 1
      except ValueError:
        break
      else:
        break
    from tunix_progdistill.run import folder as folder_lib

    with folder_lib.RunFolder(where):
      pass
    found = {p.name for p in where.iterdir()} - {".lock"}
    if (where / "config.yaml").exists() and (
        (where / "config.yaml").read_text() == "b: 2\n"
    ):
      assert not fails
      assert not (where / "metrics.jsonl").exists()
    else:
      assert old <= found, found
      assert [p.name for p in (where / "checkpoints").iterdir()] == ["7"]
    assert not {n for n in found if n.startswith(".aside")}
    stop += 1
  assert kills > 8
  final = (where / "config.yaml").read_text()
  assert final == ("a: 1\n" if fails else "b: 2\n")


def _bytes(run):
  """All but TensorBoard's folder, whose writer opens its file by itself."""
  return {
      p: p.read_bytes() for p in run.rglob("*")
      if p.is_file() and "tensorboard" not in p.parts
  }


def test_restart_with_a_config_that_cannot_work_keeps_the_run(
    tmp_path, straight, capsys
):
  """Rules that match nothing are known only once the model is there."""
  path = command.world(tmp_path, straight)
  words = ["train", str(path), "training_config.max_steps=2", "prompts=[]"]
  assert main_lib.main(words) == 0
  before = _bytes(tmp_path / "run")
  bad = [
      "progressive.stages.0.freeze_fraction=null",
      'progressive.stages.0.trainable=["nothing/.*"]',
  ]
  capsys.readouterr()
  assert main_lib.main([*words, *bad, "--restart"]) == 2
  assert "nothing/" in capsys.readouterr().err
  assert _bytes(tmp_path / "run") == before


def test_a_first_start_that_failed_binds_nobody(tmp_path, straight, capsys):
  """The corrected command begins in the same folder."""
  path = command.world(tmp_path, straight)
  words = ["train", str(path), "training_config.max_steps=2", "prompts=[]"]
  bad = [
      "progressive.stages.0.freeze_fraction=null",
      'progressive.stages.0.trainable=["nothing/.*"]',
  ]
  assert main_lib.main([*words, *bad]) == 2
  assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]
  assert main_lib.main(words) == 0

  # One whose teacher is NaN fails a little later, and binds as little.
  file = tmp_path / "other" / "model.safetensors"
  shutil.copytree(tmp_path / "teacher", file.parent)
  good = file.read_bytes()
  tensors = safetensors.numpy.load_file(file)
  tensors["model.layers.2.mlp.up_proj.weight"][0, 0] = np.nan
  safetensors.numpy.save_file(tensors, file, {"format": "pt"})
  words += [
      f"model_config.model_path={file.parent}",
      f"run_directory={tmp_path / 'second'}",
  ]
  assert main_lib.main(words) == 1
  file.write_bytes(good)
  assert main_lib.main([*words, "batch_size=5"]) == 0
  assert len(command.records(tmp_path / "second", "train")) == 2


def test_what_a_killed_export_left_is_gone(tmp_path, straight):
  path = command.world(tmp_path, straight)
  words = ["train", str(path), "training_config.max_steps=2", "prompts=[]"]
  assert main_lib.main(words) == 0
  run = tmp_path / "run"
  expected = student(run)
  (run / "student").rename(run / ".student.old-1234abcd")
  (run / ".student.new-1234abcd").mkdir()
  assert main_lib.main(words) == 0
  assert not list(run.glob(".student*"))
  for name, value in expected.items():
    np.testing.assert_array_equal(student(run)[name], value)


def test_a_students_place_that_is_taken_is_said_before_training(
    tmp_path, straight, capsys
):
  path = command.world(tmp_path, straight)
  words = ["train", str(path), "prompts=[]"]
  assert main_lib.main([*words, "training_config.max_steps=2"]) == 0
  run = tmp_path / "run"
  shutil.rmtree(run / "student")
  (run / "student").mkdir()
  (run / "student" / "photo.jpg").write_text("x")
  trained = command.records(run, "train")
  capsys.readouterr()
  assert main_lib.main(words) == 2
  assert "must be empty or an earlier export" in capsys.readouterr().err
  assert command.records(run, "train") == trained
  shutil.rmtree(run / "student")
  (run / "student").write_text("x")
  assert main_lib.main(words) == 2
  assert "files for files and folders for folders" in capsys.readouterr().err


def test_checkpoints_elsewhere_belong_to_one_run(tmp_path, straight, capsys):
  """Another run's checkpoints would end it at once, with that run's student."""
  path = command.world(tmp_path, straight)
  root = tmp_path / "elsewhere"
  words = [
      "train", str(path), "prompts=[]",
      f"training_config.checkpoint_root_directory={root}",
  ]
  short = "training_config.max_steps=4"
  assert main_lib.main([*words, short]) == 0
  line = "checkpoint_root_directory must be empty or hold checkpoints of this"
  capsys.readouterr()
  other = f"run_directory={tmp_path / 'other'}"
  assert main_lib.main([*words, other, "model_config.layers=[1,2]"]) == 2
  assert line in capsys.readouterr().err
  assert not (tmp_path / "other" / "config.yaml").exists()

  before = command.records(tmp_path / "run", "train")
  assert main_lib.main([*words, short, "--restart"]) == 2
  assert line in capsys.readouterr().err
  assert command.records(tmp_path / "run", "train") == before
  assert main_lib.main(words) == 0  # its own are gone on with
  for name, value in student(straight / "run").items():
    np.testing.assert_array_equal(student(tmp_path / "run")[name], value)


def test_other_held_out_data_are_noticed(tmp_path, straight, capsys):
  """One curve must not be of two sets of documents."""
  path = command.world(tmp_path, straight)
  held = command.held_out(tmp_path / "held")
  words = [
      "train", str(path), "prompts=[]", f"data_config.eval_directory={held}"
  ]
  assert main_lib.main([*words, "training_config.max_steps=2"]) == 0
  min(held.iterdir()).unlink()
  assert main_lib.main(words) == 2
  assert "held-out data must be what this run began" in capsys.readouterr().err


def test_prompts_may_change(tmp_path, straight):
  path = command.world(tmp_path, straight)
  short = "training_config.max_steps=2"
  assert main_lib.main(["train", str(path), short, "prompts=[]"]) == 0
  assert main_lib.main(
      ["train", str(path), short, "prompts=[the ship, it]"]
  ) == 0
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert [s["prompt"] for s in summary["samples"]] == ["the ship", "it"]


def test_edited_data_are_noticed(tmp_path, straight, capsys):
  """One word of one document changed between a kill and the resume."""
  path = command.world(tmp_path, straight)
  held = command.held_out(tmp_path / "held")
  words = [
      "train", str(path), "prompts=[]", f"data_config.eval_directory={held}"
  ]
  assert main_lib.main([*words, "training_config.max_steps=2"]) == 0
  for file in (tmp_path / "text").glob("*.txt"):
    file.write_text(file.read_text() + " nobody")
  assert main_lib.main(words) == 2
  said = capsys.readouterr().err.strip().splitlines()[-1]
  assert "the position in the data must be one in the same rows" in said


def test_a_folder_in_use_and_a_folder_of_something_else(
    tmp_path, straight, capsys
):
  from tunix_progdistill.run import folder as folder_lib

  path = command.world(tmp_path, straight)
  with folder_lib.RunFolder(tmp_path / "run"):
    assert main_lib.main(["train", str(path)]) == 2
  assert "must not be in use by another process" in capsys.readouterr().err
  for name in ("holiday", "file"):
    where = tmp_path / name
    if name == "holiday":
      where.mkdir()
      (where / "photo.jpg").write_text("x")
    else:
      where.write_text("x")
    assert main_lib.main(
        ["train", str(path), f"run_directory={where}", "--restart"]
    ) == 2
    assert "run_directory must be" in capsys.readouterr().err
  assert (tmp_path / "holiday" / "photo.jpg").read_text() == "x"


def test_restart_forgets_the_run_and_nothing_else(tmp_path, straight):
  path = command.world(tmp_path, straight)
  assert main_lib.main(
      ["train", str(path), "training_config.max_steps=2"]
  ) == 0
  notes = tmp_path / "run" / "notes.txt"
  notes.write_text("mine")
  assert main_lib.main(
      ["train", str(path), "training_config.max_steps=3", "batch_size=5",
       "--restart"]
  ) == 0
  trained = command.records(tmp_path / "run", "train")
  assert [r["update"] for r in trained] == [1, 2, 3]
  assert notes.read_text() == "mine"


def test_a_longer_run_goes_on(tmp_path, straight):
  """max_steps may grow: the end of the plan is then reached."""
  path = command.world(tmp_path, straight)
  assert main_lib.main(
      ["train", str(path), "training_config.max_steps=5"]
  ) == 0
  assert main_lib.main(["train", str(path)]) == 0
  _same_run(tmp_path, straight)


def test_last_weights_are_evaluated_whatever_the_interval(tmp_path, straight):
  path = command.world(tmp_path, straight)
  assert main_lib.main([
      "train", str(path), "training_config.max_steps=3", "logging=[jsonl]",
  ]) == 0
  evaluated = command.records(tmp_path / "run", "eval")
  assert [r["update"] for r in evaluated] == [0, 3]


def test_mesh_of_two_devices_gives_the_same_student(tmp_path, straight):
  path = command.world(tmp_path, straight)
  assert main_lib.main([
      "train", str(path), "model_config.mesh.shape=(2,1)",
      "model_config.mesh.axis_names=('fsdp','tp')",
  ]) == 0
  for name, value in student(straight / "run").items():
    np.testing.assert_allclose(
        student(tmp_path / "run")[name], value, atol=2e-5, rtol=2e-4
    )


def test_more_devices_than_there_are_is_one_line(tmp_path, straight, capsys):
  path = command.world(tmp_path, straight)
  assert main_lib.main([
      "train", str(path), "model_config.mesh.shape=(64,1)",
      "model_config.mesh.axis_names=('fsdp','tp')",
  ]) == 2
  said = capsys.readouterr().err.strip().splitlines()[-1]
  assert "model_config.mesh.shape must ask for at most 8 devices" in said
  assert not (tmp_path / "run").exists()


def test_pathlib_is_where_the_folder_says(tmp_path, straight):
  """The command in the folder can be pasted: it names the YAML."""
  said = (straight / "run" / "command.txt").read_text()
  assert said.startswith("tunix-progdistill train ")
  assert pathlib.Path(said.split()[2]).name == "run.yaml"


def test_a_stop_by_the_user_says_where_the_run_goes_on(
    tmp_path, straight, capsys, monkeypatch
):
  from tunix_progdistill.run import watch

  path = command.world(tmp_path, straight)
  real = watch.Watcher.on_train_step_start

  def interrupted(self, train_ctx):
    if train_ctx.train_steps == 7:
      raise KeyboardInterrupt
    real(self, train_ctx)

  monkeypatch.setattr(watch.Watcher, "on_train_step_start", interrupted)
  assert main_lib.main(["train", str(path)]) == 130
  run = tmp_path / "run"
  said = capsys.readouterr().err.strip().splitlines()[-1]
  assert "stopped at update 7; the same command goes on from update 6" in said
  summary = json.loads((run / "summary.json").read_text())
  assert (summary["status"], summary["updates"]) == ("stopped", 7)
  assert "was stopped after update 7" in (run / "report.html").read_text()
  monkeypatch.undo()
  assert main_lib.main(["train", str(path)]) == 0
  _same_run(tmp_path, straight)


def test_max_steps_beyond_the_plan_lengthen_its_last_stage(tmp_path, straight):
  path = command.world(tmp_path, straight)
  assert main_lib.main([
      "train", str(path), "training_config.max_steps=14", "prompts=[]",
      "num_train_epochs=3", 'progressive.temperature=2.0',
  ]) == 0
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert summary["stages"][-1]["end_update"] == summary["updates"] == 14
