"""What README and docs show runs."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parent.parent
_DOCS = sorted((_ROOT / "docs").glob("*.md"))
_ALL = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *_DOCS]


def _run(arguments, cwd=_ROOT):
  env = os.environ | {"PYTHONPATH": str(_ROOT)}
  done = subprocess.run(
      [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True,
      check=False, timeout=300, env=env,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


def _blocks(path, language):
  return re.findall(
      rf"```{language}\n(.*?)```", path.read_text(), flags=re.S
  )


def test_readme_snippet_runs_and_is_short():
  (snippet,) = _blocks(_ROOT / "README.md", "python")
  assert _run(["-c", snippet]) == "15 updates, compiled (1, 1, 1) times\n"
  lines = [s for s in snippet.splitlines() if s.strip()]
  imports = [s for s in lines if s.startswith(("import", "from"))]
  assert len(lines) - len(imports) <= 16


def test_quickstart_improves():
  out = _run(["examples/quickstart.py"])
  kl = [float(x) for x in re.findall(r"held-out KL ([\d.]+) nats", out)]
  assert len(kl) == 4
  assert kl[-1] < 0.5 * kl[0]
  assert re.search(r"^39,584 -> 20,832 parameters$", out, flags=re.M)


def test_snippet_from_a_script_runs():
  (snippet,) = _blocks(_ROOT / "docs" / "from_a_script.md", "python")
  out = _run(["-c", snippet])
  kl = [float(x) for x in re.findall(r"'([\d.]+)'", out)]
  assert len(kl) == 4
  assert kl[-1] < kl[0]


def test_snippets_of_the_kernels_run():
  by_hand, fused = _blocks(_ROOT / "docs" / "kernels.md", "python")
  one, other = _run(["-c", by_hand]).splitlines()
  assert re.fullmatch(r"[\d.]+ [\d.]+", one)
  assert other == one
  assert _run(["-c", fused]) == "True\n"


def test_tables_are_those_of_the_results():
  """A number of README or docs is printed by a script of the project."""
  speed, heads, memory = _run(["benchmarks/tables.py"]).strip().split("\n\n")
  readme = (_ROOT / "README.md").read_text()
  assert speed in readme
  assert memory in readme
  assert heads in (_ROOT / "docs" / "kernels.md").read_text()


def test_commands_of_readme_and_docs_run(tmp_path, monkeypatch):
  """Every `console` line, in order, in one folder that holds examples/.

  The first in a process of its own, as a user has it; the rest in this one.
  """
  from tunix_progdistill.cli import main as main_lib

  monkeypatch.chdir(tmp_path)
  (tmp_path / "examples").symlink_to(_ROOT / "examples")
  commands = []
  for path in (
      _ROOT / "docs" / "from_a_yaml.md",
      _ROOT / "docs" / "reading_the_report.md",
      _ROOT / "docs" / "kernels.md",
      _ROOT / "README.md",
  ):
    for block in _blocks(path, "console"):
      commands += block.strip().splitlines()
  assert len(commands) >= 8
  for i, line in enumerate(dict.fromkeys(commands)):
    program, *words = shlex.split(line)
    if program == "python":
      _run(words, cwd=tmp_path)
      continue
    assert program == "tunix-progdistill"
    if i:
      assert main_lib.main(words) == 0, line
    else:
      code = "import sys; from tunix_progdistill.cli.main import main; "
      _run(["-c", code + "sys.exit(main())", *words], cwd=tmp_path)
  runs = tmp_path / "runs"
  for name in ("tiny", "tiny_fast", "tiny_short", "tiny_lora", "tiny_rows"):
    assert (runs / name / "student" / "config.json").is_file()
  assert (tmp_path / "comparison.html").is_file()


@pytest.mark.parametrize("path", _ALL, ids=lambda p: p.name)
def test_what_is_named_is_there(path):
  """Every make target, script, YAML and page."""
  text = path.read_text()
  makefile = (_ROOT / "Makefile").read_text()
  targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
  named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.M))
  assert named <= targets
  for script in re.findall(
      r"\b(?:examples|benchmarks)/[\w/]+\.(?:py|yaml)\b", text
  ):
    assert (_ROOT / script).is_file(), script
  for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
    assert (path.parent / link).exists(), link


def test_yaml_of_the_docs_is_accepted(tmp_path):
  """Parts of a YAML, laid over the tiny one."""
  from tunix_progdistill import schema

  tiny = _ROOT / "examples" / "tiny" / "tiny.yaml"
  parts = _blocks(_ROOT / "docs" / "from_a_yaml.md", "yaml")
  assert len(parts) == 2
  for i, part in enumerate(parts):
    over = tmp_path / f"{i}.yaml"
    over.write_text(part)
    schema.resolve([
        str(tiny), f"override_config_file={over}", "model_config.layers=null",
    ] if i == 0 else [str(tiny), f"override_config_file={over}"])


def test_snippets_of_opting_in_run():
  """As one script; the trainer is Tunix's own where the flag is off."""
  snippets = _blocks(_ROOT / "docs" / "opting_in.md", "python")
  out = _run(["-c", "\n".join(snippets)]).splitlines()
  assert out[0] == "6 updates, compiled (1, 1, 1) times"
  assert out[1:3] == ["ProgressiveDistillationTrainer", "DistillationTrainer"]
  assert out[3] == (
      "('cosine', 'exponential', 'halfway', 'linear') 1.0"
  )
  assert out[4].startswith("int8: kernels at 0.")
