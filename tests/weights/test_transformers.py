"""transformers computes what Tunix does, from the same exported folder.

transformers needs torch for it, which the extra `hf` brings.
"""

import numpy as np
import pytest

from tests.weights import tiny


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_same_logits_in_transformers(tmp_path, name):
  torch = pytest.importorskip(
      "torch", reason="torch is not installed: pip install '.[hf]'"
  )
  import transformers

  made = tiny.write(tmp_path / "m", name)
  # In float64, so that its own rounding stays out of the comparison.
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path / "m", dtype=torch.float64, attn_implementation="eager",
      output_loading_info=True,
  )
  assert not any(info.values()), info
  with torch.no_grad():
    theirs = model.eval()(torch.tensor(tiny.TOKENS).long()).logits.numpy()
  np.testing.assert_allclose(tiny.logits(made), theirs, atol=1e-4)
