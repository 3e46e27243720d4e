"""What the README shows runs."""

import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parent.parent


def _run(arguments):
  done = subprocess.run(
      [sys.executable, *arguments], cwd=_ROOT, capture_output=True, text=True,
      check=False, timeout=300,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


def _python_blocks():
  text = (_ROOT / "README.md").read_text()
  return re.findall(r"```python\n(.*?)```", text, flags=re.S)


def test_readme_snippet_runs_and_is_short():
  (snippet,) = _python_blocks()
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


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_commands_exist(document):
  """Every make target and every script that is named is there."""
  text = (_ROOT / document).read_text()
  makefile = (_ROOT / "Makefile").read_text()
  targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
  named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.M))
  assert named
  assert named <= targets
  for script in re.findall(r"\b(?:examples|benchmarks)/[\w/]+\.py\b", text):
    assert (_ROOT / script).is_file(), script
