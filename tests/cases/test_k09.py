"""K09: an API that another package takes away."""

import importlib
import pkgutil
import subprocess
import sys
import warnings

import jax
import numpy as np
import optax
import pytest

from tests import test_pmap_step
from tests import toys
import tunix_progdistill
import tunix_progdistill as tpd


def test_k09_1_a_deprecation_of_ours_is_an_error_in_every_test():
  """The setting of pytest that this case rests on is on, and reaches us."""
  for name in ("tunix_progdistill", "tunix_progdistill.engine.step"):
    with pytest.raises(DeprecationWarning, match="goes away"):
      warnings.warn_explicit(
          "it goes away", DeprecationWarning, "file.py", 1, module=name
      )
  with warnings.catch_warnings(record=True) as told:
    warnings.warn_explicit(
        "not ours", DeprecationWarning, "file.py", 1, module="elsewhere"
    )
  assert len(told) == 1


def test_k09_1_every_module_imports_without_a_deprecation_of_ours():
  """In a fresh process, where nothing was imported (and warned) before."""
  names = [
      m.name for m in pkgutil.walk_packages(
          tunix_progdistill.__path__, "tunix_progdistill."
      ) if not m.name.endswith("__main__")
  ]
  assert len(names) > 50
  for name in names:
    assert importlib.util.find_spec(name) is not None
  program = (
      "import importlib, warnings\n"
      "warnings.filterwarnings('error', module='tunix_progdistill')\n"
      f"for name in {names!r}: importlib.import_module(name)\n"
  )
  done = subprocess.run(
      [sys.executable, "-c", program], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr[-2000:]


def test_k09_1_pmap_gives_ordinary_arrays():
  """The state of a pmapped step goes into a jitted one as it is."""
  state, _ = test_pmap_step.run(8, jax.devices())
  leaves = jax.tree.leaves(state.trainable)
  assert leaves and all(x.is_fully_addressable for x in leaves)
  squares = jax.jit(lambda tree: jax.tree.map(lambda x: x * x, tree))
  for one, square in zip(
      leaves, jax.tree.leaves(squares(state.trainable)), strict=True
  ):
    np.testing.assert_array_equal(square, np.square(one))


def test_k09_2_two_updates_of_the_smallest_run():
  """What a fresh environment can do at once; `make test` is in one."""
  trainer = toys.trainer(
      optimizer=optax.sgd,
      progressive={"stages": [tpd.Stage(updates=2, learning_rate=0.1)]},
  )
  trainer.train(toys.batches(2))
  assert trainer.train_steps == 2
