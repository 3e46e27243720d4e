"""What a config may hold: a tree of `Key`, made from dataclasses.

The tree is what values are checked against, and what `--help`, the base YAML
and the reference are written from.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import difflib
import math
import types
import typing
from typing import Any
from typing import NoReturn

from tunix_progdistill import errors
from tunix_progdistill.plan import schedules
from tunix_progdistill.schema import docstrings

# A rate, temperature or alpha: a number, or a mapping of an anneal's fields.
Scalar = float | schedules.Anneal

_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "ints": "a list of whole numbers",
    "floats": "a list of numbers",
    "strs": "a list of texts",
    "scalar": "a number or {start, end, shape, updates}",
    "section": "a section of keys",
    "sections": "a list of sections",
    "mapping": "a mapping",
    "any": "anything",
}
_REMEDY = {
    "bool": "write true or false",
    "int": "write a whole number such as 8",
    "float": "write a number such as 0.1",
    "str": "write one text, in quotes if it looks like something else",
    "ints": "write a list such as [0, 2, 5]",
    "floats": "write a list such as [0.1, 0.2]",
    "strs": "write a list such as [one, two]",
    "scalar": (
        "write a number, or a mapping such as "
        "{start: 3.0, end: 1.0, shape: linear}"
    ),
    "sections": "write a list such as [{...}, {...}]",
    "mapping": "write a mapping such as {key: value}",
}
_ITEMS = {"ints": "int", "floats": "float", "strs": "str"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
  """One key of the config.

  Attributes:
    name: as it is written.
    kind: what it holds, one of the words above.
    meaning: one sentence or more, for a reader.
    default: the plain value that stands where nothing is given.
    nullable: whether it may be null.
    keys: of a section, or of each item of a list of sections.
    implied: absent unless given, for it depends on what is installed.
  """

  name: str
  kind: str
  meaning: str = ""
  default: Any = None
  nullable: bool = False
  keys: tuple["Key", ...] = ()
  implied: bool = False

  @property
  def type_name(self) -> str:
    """What it holds, in words."""
    return _WORDS[self.kind] + (" or null" if self.nullable else "")

  @property
  def item(self) -> "Key":
    """The key that stands for one item of a list."""
    if self.kind == "sections":
      return Key(name=self.name, kind="section", keys=self.keys)
    return Key(name=self.name, kind=_ITEMS[self.kind])

  @property
  def is_list(self) -> bool:
    return self.kind == "sections" or self.kind in _ITEMS

  def child(self, name: str) -> "Key | None":
    """The key of this section that is called `name`."""
    for key in self.keys:
      if key.name == name:
        return key
    return None


def below(path: str, name: str | int) -> str:
  """The path of a key, or of an item of a list, below another.

  >>> below(below("progressive.stages", 1), "alpha")
  'progressive.stages[1].alpha'
  """
  if isinstance(name, int):
    return f"{path}[{name}]"
  return f"{path}.{name}" if path else name


def of(
    owner: type,
    *,
    sections: Mapping[str, tuple[Key, ...]] | None = None,
    only: Sequence[str] | None = None,
    without: Sequence[str] = (),
    implied: Sequence[str] = (),
) -> tuple[Key, ...]:
  """The keys of a dataclass.

  Args:
    owner: a dataclass whose docstring says what its fields mean.
    sections: keys of the fields that are sections, where their classes do not
      tell.
    only: take these fields.
    without: leave these fields out.
    implied: these fields are absent unless given.

  Raises:
    TypeError: the docstring leaves a field out, or its type is not known here.
  """
  meanings = docstrings.attributes(owner)
  hints = typing.get_type_hints(owner)
  found = []
  for field in dataclasses.fields(owner):
    if field.name in without or (only is not None and field.name not in only):
      continue
    if field.name not in meanings:
      raise TypeError(f"{owner.__name__}.{field.name} has no meaning")
    hint = hints[field.name]
    if sections and field.name in sections:
      kind, nullable = "section", type(None) in typing.get_args(hint)
      nested = sections[field.name]
    else:
      kind, nullable, described = _kind(hint)
      nested = of(described) if described is not None else ()
    section = kind == "section" and not nullable
    found.append(
        Key(
            name=field.name,
            kind=kind,
            nullable=nullable,
            meaning=meanings[field.name],
            default=None if section else _plain_default(field),
            keys=nested,
            implied=field.name in implied,
        )
    )
  return tuple(found)


def _plain_default(field: dataclasses.Field) -> Any:
  value: Any = None
  if field.default is not dataclasses.MISSING:
    value = field.default
  elif field.default_factory is not dataclasses.MISSING:
    value = field.default_factory()
  if isinstance(value, tuple):
    value = [
        {k: v for k, v in vars(i).items() if v is not None}
        if dataclasses.is_dataclass(i) else i for i in value
    ]
  return value


def _kind(hint: Any) -> tuple[str, bool, type | None]:
  """(kind, nullable, class of the nested section) of an annotation."""
  arguments = set(typing.get_args(hint))
  if isinstance(hint, types.UnionType) or (
      typing.get_origin(hint) is typing.Union
  ):
    nullable = type(None) in arguments
    arguments.discard(type(None))
    if arguments == set(typing.get_args(Scalar)):
      return "scalar", nullable, None
    if len(arguments) == 1:
      kind, _, nested = _kind(arguments.pop())
      return kind, nullable, nested
    raise TypeError(f"{hint} cannot stand in a config")
  if hint in (bool, int, float, str):
    return hint.__name__, False, None
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    return "section", False, hint
  origin = typing.get_origin(hint)
  if origin is tuple:
    (item,) = arguments - {Ellipsis}
    if item in (int, float, str):
      return f"{item.__name__}s", False, None
    return "sections", False, item
  if origin is Mapping or hint is Mapping:
    return "mapping", False, None
  raise TypeError(f"{hint} cannot stand in a config")


def checked(
    key: Key, path: str, value: Any, *, root: Key, lenient: bool = False
) -> Any:
  """`value` as this key holds it; what is given is checked, all the way down.

  A section comes back as a dict of the keys that were given, a list as a tuple
  (of sections: as a list), a whole number where a number is due as a float.

  Args:
    key: what may stand here.
    path: where this is, for messages.
    value: what was given.
    root: the tree, to find the key that an unknown one may mean.
    lenient: let interpolations (`${...}`) pass, and keep lists as lists.

  Raises:
    ValueError: an unknown key, or a value of another type.
  """
  if lenient and isinstance(value, str) and "${" in value:
    return value
  if value is None:
    if key.nullable:
      return None
    if key.kind == "str":
      return ""  # as in Tunix
    raise wrong(key, path, value)
  if key.kind in ("section", "mapping"):
    if not isinstance(value, Mapping):
      raise wrong(key, path, value)
    if key.kind == "mapping":
      return dict(value)
    found = {}
    for name, item in value.items():
      child = key.child(name) if isinstance(name, str) else None
      if child is None:
        unknown(key, path, name, root=root)
      found[name] = checked(
          child, below(path, name), item, root=root, lenient=lenient
      )
    return found
  if key.is_list:
    if not isinstance(value, (list, tuple)):
      raise wrong(key, path, value)
    items = [
        checked(key.item, below(path, i), v, root=root, lenient=lenient)
        for i, v in enumerate(value)
    ]
    return items if lenient or key.kind == "sections" else tuple(items)
  if key.kind == "scalar" and isinstance(value, Mapping):
    return _anneal(key, path, value, root=root, lenient=lenient)
  return _leaf(key, path, value)


def _leaf(key: Key, path: str, value: Any) -> Any:
  number = isinstance(value, (int, float)) and not isinstance(value, bool)
  good = {
      "bool": isinstance(value, bool),
      "int": isinstance(value, int) and not isinstance(value, bool),
      "float": number,
      "scalar": number,
      "str": isinstance(value, str),
      "any": True,
  }[key.kind]
  if not good:
    raise wrong(key, path, value)
  if key.kind in ("float", "scalar"):
    if not math.isfinite(value):
      raise errors.invalid(
          path, "must be finite", value, _REMEDY[key.kind]
      )
    return float(value)
  return value


_ANNEAL = (
    Key(name="start", kind="float"),
    Key(name="end", kind="float"),
    Key(name="shape", kind="str"),
    Key(name="updates", kind="int", nullable=True),
)


def _anneal(key: Key, path: str, value: Mapping, *, root: Key, lenient: bool):
  section = Key(name=key.name, kind="section", keys=_ANNEAL)
  fields = checked(section, path, value, root=root, lenient=lenient)
  if lenient:
    return fields
  for name in ("start", "end", "shape"):
    if name not in fields:
      raise errors.invalid(
          f"{path}.{name}", "must be given", None, _REMEDY["scalar"]
      )
  if fields["shape"] not in schedules.kinds():
    raise errors.invalid(
        f"{path}.shape", f"must be one of {', '.join(schedules.kinds())}",
        fields["shape"], "name how the value moves from start to end",
    )
  try:
    return schedules.anneal(
        fields["start"], fields["end"], fields["shape"],
        updates=fields.get("updates"),
    )
  except ValueError as e:
    text = str(e).replace("anneal.", f"{path}.").replace(" kind ", " shape ")
    raise ValueError(text) from None


def wrong(key: Key, path: str, value: Any) -> ValueError:
  """The error for a value of another type."""
  remedy = _REMEDY.get(key.kind)
  if remedy is None:
    names = [k.name for k in key.keys if not k.implied]
    remedy = f"set one of its keys, such as {below(path, names[0])}=..."
  if key.kind == "str" and isinstance(value, (bool, int, float)):
    remedy = "put it in quotes"
  if key.nullable:
    remedy += ", or null"
  return errors.invalid(path, f"must be {key.type_name}", value, remedy)


def unknown(key: Key, path: str, name: Any, *, root: Key) -> NoReturn:
  """Raises the error for a key that is not known, naming what is near."""
  names = [k.name for k in key.keys]
  shown = [k.name for k in key.keys if not k.implied]
  near = []
  if isinstance(name, str):
    near = [below(path, n) for n in _near(name, names)]
    elsewhere = [p for p in paths(root) if p.split(".")[-1] == name]
    near = elsewhere[:3] or near
  if near:
    remedy = f"did you mean {' or '.join(near)}?"
  else:
    remedy = f"known {'in ' + path if path else 'here'} are {', '.join(shown)}"
  raise errors.invalid(
      below(path, str(name)), "must be a known key", name, remedy
  )


def _near(name: str, names: Sequence[str]) -> list[str]:
  return difflib.get_close_matches(name, names, n=3, cutoff=0.6)


def near(name: str, names: Sequence[str], *, shown: int = 40) -> str:
  """What to write instead of an unknown name: near ones, else all."""
  found = _near(name, names)
  if found:
    return f"did you mean {' or '.join(found)}?"
  return f"known are {', '.join(list(names)[:shown])}"


def paths(key: Key, path: str = "") -> list[str]:
  """The paths of all leaves; the items of a list of sections as item 0."""
  if key.kind == "section":
    return [p for k in key.keys for p in paths(k, below(path, k.name))]
  if key.kind == "sections":
    return [p for k in key.keys for p in paths(k, f"{path}[0].{k.name}")]
  return [path]
