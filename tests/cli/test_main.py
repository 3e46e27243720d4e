"""The command: exit codes, one line for what is wrong, help."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

from tests.schema import yamls
from tunix_progdistill import report
from tunix_progdistill import run
from tunix_progdistill.cli import main as main_lib
from tunix_progdistill.schema import keys
from tunix_progdistill.schema import tree


@pytest.fixture(autouse=True)
def _apart(monkeypatch, tmp_path):
  for name in [n for n in os.environ if n.startswith("T_")]:
    monkeypatch.delenv(name)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("COLUMNS", "80")
  (tmp_path / "run.yaml").write_text(yamls.SMALL)


@pytest.fixture
def trained(monkeypatch):
  """What the pipeline was called with; `outcome` is raised by it."""
  made = types.SimpleNamespace(calls=[], outcome=None)

  def train(config, *, command, restart):
    made.calls.append((config, command, restart))
    if made.outcome is not None:
      raise made.outcome

  pipeline = types.ModuleType("tunix_progdistill.run.pipeline")
  pipeline.train = train
  monkeypatch.setitem(sys.modules, pipeline.__name__, pipeline)
  monkeypatch.setattr(run, "pipeline", pipeline, raising=False)
  return made


def _error(capsys):
  out, err = capsys.readouterr()
  assert not out
  lines = err.splitlines()
  assert len(lines) == 1
  assert lines[0].startswith("tunix-progdistill: error: ")
  return lines[0].removeprefix("tunix-progdistill: error: ")


def test_train_hands_the_config_over(trained):
  words = ["batch_size=3", "training_config.max_steps=4"]
  assert main_lib.main(["train", "run.yaml", *words]) == 0
  ((config, command, restart),) = trained.calls
  assert config.data().batch_size == 3
  assert config.training_config.max_steps == 4
  assert command == (
      "tunix-progdistill train run.yaml batch_size=3 "
      "training_config.max_steps=4"
  )
  assert restart is False


@pytest.mark.parametrize(
    "words",
    [
        ["--restart", "run.yaml", "batch_size=3", "prompt_tokens=4"],
        ["run.yaml", "--restart", "batch_size=3", "prompt_tokens=4"],
        ["run.yaml", "batch_size=3", "--restart", "prompt_tokens=4"],
        ["run.yaml", "batch_size=3", "prompt_tokens=4", "--restart"],
    ],
)
def test_restart_may_stand_anywhere(trained, words):
  assert main_lib.main(["train", *words]) == 0
  ((config, command, restart),) = trained.calls
  assert restart is True
  assert config.data().batch_size == 3
  assert config.prompt_tokens == 4
  assert "--restart" not in command


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train"], "CONFIG must be a YAML file and the first argument"),
        (["train", "none.yaml"], "none.yaml must be a YAML file"),
        (["train", "run.yaml", "batch_sise=3"], "did you mean batch_size?"),
        (["train", "run.yaml", "batch_size=[3]"], "must be a whole number"),
        (["train", "run.yaml", "more.yaml"], "must have the form key=value"),
        (["train", "run.yaml", "--restrt"], "unknown argument '--restrt'"),
        (["train", "run.yaml", "--batch_size=3"], "unknown argument '--batch"),
        (["trian", "run.yaml"], "invalid choice: 'trian'"),
        ([], "the following arguments are required: COMMAND"),
        (["report"], "the following arguments are required: RUN"),
        (["report", "a", "--out=b", "--x=y"], "unknown argument '--x=y'"),
    ],
)
def test_what_is_asked_wrongly_is_code_2(trained, capsys, words, expected):
  assert main_lib.main(words) == 2
  assert expected in _error(capsys)
  assert not trained.calls


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (ValueError("a must be b,\n got c; try d"), 2),
        (ModuleNotFoundError("No module named 'gguf'"), 2),
        (FileNotFoundError(2, "No such file", "weights"), 2),
        (RuntimeError("the loss is\nnot finite"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_goes_wrong_later(trained, capsys, outcome, code):
  trained.outcome = outcome
  assert main_lib.main(["train", "run.yaml"]) == code
  text = " ".join(str(outcome).split())
  assert _error(capsys) == text or code == 130


def test_a_fault_of_ours_is_not_hidden(trained):
  trained.outcome = TypeError("ours")
  with pytest.raises(TypeError, match="ours"):
    main_lib.main(["train", "run.yaml"])


@pytest.fixture
def reported(monkeypatch):
  calls = []

  def write(folder):
    calls.append(("write", folder))
    folder.mkdir()
    (folder / "report.html").write_text("page")
    return folder / "report.html"

  def compare(folders, out):
    calls.append(("compare", folders, out))
    return out

  monkeypatch.setattr(report, "write", write, raising=False)
  monkeypatch.setattr(report, "compare", compare, raising=False)
  return calls


@pytest.mark.parametrize(
    ("words", "call", "printed"),
    [
        (["a"], ("write", pathlib.Path("a")), "a/report.html"),
        (["a", "b"],
         ("compare", [pathlib.Path("a"), pathlib.Path("b")],
          pathlib.Path("comparison.html")), "comparison.html"),
        (["a", "b", "--output", "c.html"],
         ("compare", [pathlib.Path("a"), pathlib.Path("b")],
          pathlib.Path("c.html")), "c.html"),
        (["a", "--output", "c.html"], ("write", pathlib.Path("a")), "c.html"),
    ],
)
def test_report(reported, capsys, words, call, printed):
  assert main_lib.main(["report", *words]) == 0
  assert reported == [call]
  assert capsys.readouterr().out == f"{printed}\n"
  if call[0] == "write":
    assert pathlib.Path(printed).read_text() == "page"


def test_help_lists_every_key(capsys):
  assert main_lib.main(["train", "--help"]) == 0
  text = capsys.readouterr().out
  assert "progressive.stages.0.learning_rate=3e-4" in text  # an example
  assert "--restart" in text
  for path in keys.paths(tree.root()):
    if not path.startswith("teacher_model_config."):
      shown = path.replace("[0]", ".N")
      assert re.search(rf"^  {re.escape(shown)}  \(", text, flags=re.M)
  assert main_lib.main(["--help"]) == 0
  text = capsys.readouterr().out
  assert len(text.splitlines()) < 20
  assert "train" in text
  assert "report" in text


def test_version(capsys):
  assert main_lib.main(["--version"]) == 0
  version = importlib.metadata.version("tunix-progdistill")
  assert capsys.readouterr().out == f"{version}\n"


def test_as_a_process():
  """No device is touched and nothing but the line is printed."""
  code = (
      "import sys\n"
      "from tunix_progdistill.cli import main\n"
      "code = main.main(['train', 'run.yaml', 'batch_size=0'])\n"
      "import jax._src.xla_bridge as bridge\n"
      "assert not bridge.backends_are_initialized()\n"
      "sys.exit(code)\n"
  )
  done = subprocess.run(
      [sys.executable, "-c", code], capture_output=True, text=True,
      check=False, timeout=120,
  )
  assert done.returncode == 2
  assert done.stdout == ""
  assert done.stderr == (
      "tunix-progdistill: error: batch_size must be a whole number >= 1, got "
      "0; try 1\n"
  )
