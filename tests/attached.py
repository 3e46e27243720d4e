"""Tests of our trainer, asked of stock trainers that a hook is attached to.

A module that takes both fixtures and calls `gather` runs the tests of others
with `toys.trainer` giving attached instances.
"""

from collections.abc import Iterable
import types
from typing import Any

import pytest

from tests import toys

_made: list[dict[str, Any]] = []
# The class by which pytest knows a fixture.
_FIXTURE = type(pytest.fixture(lambda: None))


@pytest.fixture(scope="module", autouse=True)
def attached():
  """Of the module, for so are the fixtures that train."""

  def hooked(**kwargs):
    _made.append(kwargs)
    return toys.hooked(**kwargs)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(toys, "trainer", hooked)
    yield


@pytest.fixture(autouse=True)
def asked(request):
  """A test that trains nothing of `toys` would only be run twice."""
  before = len(_made)
  yield
  by_fixture = {"all_updates", "run"} & set(request.fixturenames)
  given = getattr(request.node, "callspec", None)
  # K14's way without a trainer, beside the way with one.
  path = given and given.params.get("path")
  if getattr(path, "__name__", "") == "by_strategy":
    return
  assert by_fixture or len(_made) > before, (
      "asks nothing of an attached trainer: leave it out"
  )


def gather(
    namespace: dict[str, Any],
    modules: Iterable[types.ModuleType],
    left_out: Iterable[tuple[types.ModuleType, str]],
) -> None:
  """Puts the fixtures and tests of `modules` into `namespace`.

  Args:
    namespace: of the module that asks.
    modules: whose tests.
    left_out: (module, name of a test without `test_`) that are not asked.
  """
  left_out = set(left_out)
  for module, name in left_out:
    assert hasattr(module, f"test_{name}"), (module, name)
  for module in modules:
    short = module.__name__.split(".")[-1].removeprefix("test_")
    for name, value in list(vars(module).items()):
      told = name.removeprefix("test_")
      if isinstance(value, _FIXTURE):
        namespace[name] = value
      elif told != name and callable(value) and (module, told) not in left_out:
        told = told.removeprefix(f"{short}_")
        namespace[f"test_{short}_{told}"] = value
