"""The command with a LoRA student and a quantised teacher."""

import json

import numpy as np
import pytest

from tests.run import command
from tests.weights import tiny
from tunix_progdistill import weights
from tunix_progdistill.cli import main as main_lib


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "qtype", "quantization"),
    [("gemma3-fused", None, "int8"), ("qwen3", "nf4", "nf4")],
)
def test_run(tmp_path, capsys, name, qtype, quantization):
  """Trained, exported with the adapters in its weights, and reported."""
  command.checkpoint(tmp_path, name)
  path = command.config(tmp_path, (0, 1, 3))
  lora = {
      "module_path": ".*(attn|mlp).*", "rank": 4, "alpha": 8.0,
      "weight_qtype": qtype,
  }
  assert main_lib.main([
      "train", str(path), f"model_config.lora_config={json.dumps(lora)}",
      f"teacher_model_config.quantization={quantization}",
  ]) == 0
  run = tmp_path / "run"
  kl = [r["distill/kl_div_tau1"] for r in command.records(run, "eval")]
  assert kl[-1] < kl[0]
  summary = json.loads((run / "summary.json").read_text())
  (note,) = summary["notes"]
  assert f"kernels are {quantization}" in note and "nats per token" in note
  assert "nan" not in note
  assert "kernels are" in (run / "report.html").read_text()
  exported = weights.load(
      weights.ModelConfig(model_path=str(run / "student"))
  )
  logits = tiny.logits(exported.model)
  assert np.all(np.isfinite(logits))
  # The table's last row is of what was exported: the same KL but for rounding.
  student = {m["name"]: m for m in summary["models"]}["student after"]
  assert student["kl_div_tau1"] == pytest.approx(kl[-1], rel=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model_config.quantization=int8"],
         "model_config.quantization must be null, for it is a teacher's"),
        (["teacher_model_config.quantization=int7"],
         "teacher_model_config.quantization must be one of int8, nf4"),
        (["model_config.lora_config={rank: 3}"],
         "model_config.lora_config.module_path must be a regex"),
        (["teacher_model_config.lora_config="
          "{module_path: .*, rank: 3, alpha: 1.0}"],
         "teacher_model_config.lora_config must be empty"),
    ],
)
def test_refused(tmp_path, capsys, words, message):
  command.checkpoint(tmp_path, "llama3")
  path = command.config(tmp_path, (0, 1, 3))
  assert main_lib.main(["train", str(path), *words]) == 2
  assert message in capsys.readouterr().err.strip().splitlines()[-1]
  assert not (tmp_path / "run").exists()
