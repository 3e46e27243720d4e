"""K04: the loss grows with the length or the number of rows."""

import numpy as np
import pytest

from tests import toys
from tests.cases import common


@pytest.mark.parametrize("path", common.PATHS)
@pytest.mark.parametrize(
    ("rows", "length"), [(1, 4), (3, 16)]
)
def test_k04_1_mean_over_tokens(path, rows, length):
  inputs = common.batch(np.zeros((rows, length)))
  loss, grad = common.PATHS[path](
      {}, common.STUDENT, common.TEACHER, inputs
  )
  assert loss == pytest.approx(0.91298290, abs=1e-6)
  expected = common.softmax(toys.F1_STUDENT) - common.softmax(toys.F1_TEACHER)
  np.testing.assert_allclose(grad[0], expected, atol=1e-6)
  assert np.all(grad[1] == 0.0)


@pytest.mark.parametrize("length", [1, 16])
def test_k04_1_evaluation(length):
  trainer = toys.trainer(
      student=toys.Table(common.STUDENT), teacher=toys.Table(common.TEACHER),
      progressive=common.one_stage(1), strategy_fn=common.strategy,
  )
  inputs = common.as_training_input(common.batch(np.zeros((3, length))))
  trainer.train([inputs], [inputs])
  kl = toys.history(trainer, "distill/kl_div_tau1", "eval")
  assert kl[0] == pytest.approx(0.91298290, abs=1e-6)
  ce = toys.history(trainer, "loss", "eval")
  assert ce[0] == pytest.approx(1.55144471, abs=1e-6)
