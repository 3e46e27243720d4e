"""Names for what a pipeline can choose, so that a config can say them.

Built-in names stand below as text, and an installed package adds its own by
entry points of the group `tunix_progdistill.<kind>`:

  [project.entry-points."tunix_progdistill.schedule"]
  step = "mypackage.schedules:step"

Neither is imported before it is asked for. A program adds names by a decorator:

  @register("schedule", "step")
  def step(start, end, x): ...
"""

from collections.abc import Callable
from collections.abc import Mapping
import difflib
import functools
import importlib
from importlib import metadata
import threading
from typing import Any
from typing import TypeVar

from tunix_progdistill import errors

_PACKAGE = "tunix_progdistill"

BUILT_IN: Mapping[str, Mapping[str, str]] = {
    "strategy": {
        "logit": "strategy:ProgressiveLogitStrategy",
    },
    "trainer": {
        "progressive": "trainer:ProgressiveDistillationTrainer",
    },
    "hook": {
        "progressive_freezing": "hook:ProgressiveFreezingHook",
    },
    "schedule": {  # (start, end, x in [0, 1]) -> value
        "linear": "plan.shapes:linear",
        "cosine": "plan.shapes:cosine",
        "exponential": "plan.shapes:exponential",
    },
    "divergence": {  # (student, teacher, *, where, ...) -> values per token
        "forward_kl": "kernels.chunked:forward_kl",
        "reverse_kl": "kernels.chunked:reverse_kl",
        "jsd": "kernels.chunked:jsd",
        "mse": "kernels.chunked:mse",
    },
    "objective": {  # see objectives.terms.Objective
        "logit": "objectives.adapter:LogitObjective",
        "foreign": "objectives.foreign:ForeignObjective",
        "loss_function": "objectives.foreign:LossFunction",
    },
    "teacher": {  # (teacher_model, inputs) -> outputs
        "online": "teachers.online:OnlineTeacher",
    },
}

_Value = TypeVar("_Value")


class Registry:
  """Kind and name -> object, loaded when it is asked for.

  Args:
    built_in: kind -> name -> `module:attribute` within this package.
  """

  def __init__(self, built_in: Mapping[str, Mapping[str, str]]):
    self._lock = threading.RLock()
    self._scanned: set[str] = set()
    # kind -> name -> (where it comes from, how it is loaded)
    self._known: dict[str, dict[str, tuple[str, Callable[[], Any]]]] = {
        kind: {
            name: (place, functools.partial(_load, place))
            for name, place in names.items()
        }
        for kind, names in built_in.items()
    }

  @property
  def kinds(self) -> tuple[str, ...]:
    """What there are names for."""
    return tuple(self._known)

  def names(self, kind: str) -> tuple[str, ...]:
    """The names of a kind, sorted.

    Raises:
      ValueError: no such kind, or two packages took one name.
    """
    return tuple(sorted(self._of(kind)))

  def get(self, kind: str, name: str) -> Any:
    """The object of that name.

    Raises:
      ValueError: no such kind or name; the known ones are listed.
    """
    known = self._of(kind)
    if name not in known:
      near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
      hint = f"did you mean {' or '.join(near)}? " if near else ""
      raise errors.invalid(
          kind, "must be a registered name", name,
          f"{hint}known are {', '.join(sorted(known))}",
      )
    return known[name][1]()

  def add(self, kind: str, name: str) -> Callable[[_Value], _Value]:
    """A decorator that gives what it decorates a name.

    Raises:
      ValueError: no such kind, an empty name, or one that is taken.
    """
    if not isinstance(name, str) or not name:
      raise errors.invalid(
          "name", "must be a text that is not empty", name, "name it"
      )

    def decorate(value: _Value) -> _Value:
      with self._lock:
        place = f"{getattr(value, '__module__', '')}:{name}"
        self._put(self._of(kind), kind, name, place, lambda: value)
      return value

    self._of(kind)  # a kind that does not exist is told at once
    return decorate

  def _of(self, kind: str) -> dict[str, tuple[str, Callable[[], Any]]]:
    if kind not in self._known:
      raise errors.invalid(
          "kind", f"must be one of {', '.join(self._known)}", kind,
          "see tunix_progdistill.registry",
      )
    with self._lock:
      if kind not in self._scanned:
        for point in metadata.entry_points(group=f"{_PACKAGE}.{kind}"):
          self._put(
              self._known[kind], kind, point.name, point.value, point.load
          )
        self._scanned.add(kind)
      return self._known[kind]

  def _put(self, known, kind, name, place, load) -> None:
    if name in known and known[name][0] != place:
      raise errors.invalid(
          f"{kind} {name}", "must be registered once",
          f"{known[name][0]} and {place}", "choose another name",
      )
    known[name] = (place, load)


def _load(place: str) -> Any:
  module, attribute = place.split(":")
  return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), attribute)


REGISTRY = Registry(BUILT_IN)


def register(kind: str | None = None, name: str | None = None) -> Any:
  """The registry; or, with a kind and a name, a decorator that adds to it.

  Args:
    kind: strategy, trainer, hook, schedule, divergence, objective or teacher.
    name: of what is decorated.

  Returns:
    The `Registry`, whose `get(kind, name)` and `names(kind)` a pipeline asks.

  Raises:
    ValueError: an unknown kind, or a name that is taken.

  >>> register().get("schedule", "linear")(4.0, 1.0, 0.5)
  2.5
  >>> register().names("divergence")
  ('forward_kl', 'jsd', 'mse', 'reverse_kl')
  """
  if kind is None and name is None:
    return REGISTRY
  if kind is None or name is None:
    raise errors.invalid(
        "kind and name", "must be given together", (kind, name),
        'write @register("schedule", "step")',
    )
  return REGISTRY.add(kind, name)
