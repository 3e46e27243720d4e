"""Names for what a pipeline can choose."""

from importlib import metadata
import inspect
import subprocess
import sys

import pytest

from tests import toys
import tunix_progdistill as tpd
from tunix_progdistill import registry

_ALL = [(k, n) for k, names in registry.BUILT_IN.items() for n in names]


@pytest.mark.parametrize(("kind", "name"), _ALL)
def test_built_in(kind, name):
  found = tpd.register().get(kind, name)
  assert callable(found) and inspect.getdoc(found)
  assert found.__module__.startswith("tunix_progdistill.")


def test_kinds():
  assert tpd.register().kinds == (
      "strategy", "trainer", "hook", "schedule", "divergence", "objective",
      "teacher",
  )
  assert tpd.register().get("trainer", "progressive") is (
      tpd.ProgressiveDistillationTrainer
  )


def test_nothing_is_imported_before_it_is_asked_for():
  code = (
      "import sys\n"
      "from tunix_progdistill import registry\n"
      "before = set(sys.modules)\n"
      "r = registry.Registry({'schedule': {'x': 'cli.arguments:parse'}})\n"
      "assert r.names('schedule') == ('x',)\n"
      "assert 'tunix_progdistill.cli.arguments' not in sys.modules\n"
      "r.get('schedule', 'x')\n"
      "assert 'tunix_progdistill.cli.arguments' in sys.modules\n"
  )
  subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.fixture
def own():
  return registry.Registry(registry.BUILT_IN)


def test_decorator_adds_and_returns(own):
  @own.add("divergence", "mine")
  def mine():
    """Mine."""

  assert own.get("divergence", "mine") is mine
  assert "mine" in own.names("divergence")
  assert "mine" not in registry.REGISTRY.names("divergence")


def _points(monkeypatch, *points):
  asked = []

  def entry_points(*, group):
    asked.append(group)
    return [p for p in points if p.group == group]

  monkeypatch.setattr(metadata, "entry_points", entry_points)
  return asked


def _point(name, value, kind="schedule"):
  return metadata.EntryPoint(
      name=name, value=value, group=f"tunix_progdistill.{kind}"
  )


def test_entry_points_are_loaded_when_asked_for(own, monkeypatch):
  asked = _points(
      monkeypatch, _point("root", "math:sqrt"), _point("bad", "no.such:thing")
  )
  assert own.names("schedule") == (
      "bad", "cosine", "exponential", "linear", "root"
  )
  assert own.get("schedule", "root")(4.0) == 2.0
  assert asked == ["tunix_progdistill.schedule"]
  with pytest.raises(ModuleNotFoundError):
    own.get("schedule", "bad")


def test_two_packages_with_one_name(own, monkeypatch):
  _points(monkeypatch, _point("a", "math:sqrt"), _point("a", "math:exp"))
  with pytest.raises(ValueError, match="schedule a must be registered once"):
    own.names("schedule")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda r: r.get("schedule", "exponentiell"),
         "schedule must be a registered name, got 'exponentiell'; did you mean "
         "exponential? known are cosine, exponential, linear"),
        (lambda r: r.get("loss", "kl"), "kind must be one of strategy, "),
        (lambda r: r.names("loss"), "kind must be one of strategy, trainer"),
        (lambda r: r.add("loss", "kl"), "kind must be one of strategy, "),
        (lambda r: r.add("schedule", ""), "name must be a text"),
        (lambda r: r.add("schedule", "linear")(abs),
         "schedule linear must be registered once"),
    ],
)
def test_refused(own, act, message):
  with pytest.raises(ValueError) as e:
    act(own)
  assert message in str(e.value) and "\n" not in str(e.value)


def test_register_needs_both():
  with pytest.raises(ValueError, match="kind and name must be given together"):
    tpd.register("schedule")


@pytest.fixture
def step_shape():
  @tpd.register("schedule", "step_for_this_test")
  def step(start, end, x):
    """The start until the end."""
    return end if x == 1 else start

  yield
  del registry.REGISTRY._known["schedule"]["step_for_this_test"]


def test_own_shape_in_a_run(step_shape):
  """A registered shape is a shape of `anneal`, in Python and in a mapping."""
  trainer = toys.trainer(progressive={
      "stages": [{"updates": 3, "learning_rate": 1e-3}],
      "temperature": {
          "start": 4.0, "end": 1.0, "shape": "step_for_this_test",
      },
  })
  trainer.train(toys.batches(3))
  assert toys.history(trainer, "distill/temperature").tolist() == [4, 4, 1]


def test_unknown_shape_lists_the_known():
  with pytest.raises(ValueError, match="one of cosine, exponential, linear"):
    tpd.anneal(1.0, 2.0, "lin")
