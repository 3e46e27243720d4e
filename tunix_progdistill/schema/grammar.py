"""From a command line to a `RunConfig`: Tunix's grammar, over our keys.

Later wins: defaults, CONFIG.yaml, override_config_file=F, T_KEY variables of
the environment, key=value. A section is merged key by key, never replaced.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import os
import pathlib
import re
from typing import Any

from absl import logging
import omegaconf
import yaml

from tunix_progdistill import errors
from tunix_progdistill.schema import keys
from tunix_progdistill.schema import run_config
from tunix_progdistill.schema import tree as tree_lib

_PREFIX = "T_"
_OVERRIDE = "override_config_file="
_BASE = "base_config.yaml"
BASE_FILE = pathlib.Path(__file__).parent / _BASE
_ESCAPE = "write \\${ for a plain ${"

Tree = dict[str, Any]


def resolve(argv: Sequence[str]) -> run_config.RunConfig:
  """The config that a command line asks for.

  Args:
    argv: CONFIG.yaml, then any of override_config_file=F and key=value.
      base_config.yaml is the one that comes with the package, where there is
      no file of that name.

  Raises:
    ValueError: anything wrong with it, in one line.
  """
  if not argv or "=" in argv[0]:
    raise errors.invalid(
        "CONFIG", "must be a YAML file and the first argument",
        argv[0] if argv else None,
        "write tunix-progdistill train CONFIG.yaml [key=value ...]",
    )
  config, *arguments = argv
  files = [a[len(_OVERRIDE):] for a in arguments if a.startswith(_OVERRIDE)]
  if len(files) > 1:
    raise errors.invalid(
        "override_config_file", "must be given at most once", files,
        "put both into one file",
    )
  overrides = [_split(a) for a in arguments if not a.startswith(_OVERRIDE)]
  root = tree_lib.root()
  tree = tree_lib.defaults(root)
  not_read: list[str] = []
  given = {parts[0] for parts, _ in overrides}
  for i, file in enumerate([config, *files]):
    read = _known(root, load(file), not_read)
    if i > 0:
      given |= read.keys()
    tree = merge(tree, keys.checked(root, "", read, root=root, lenient=True))
  environment = _environment(root, given)
  named = [([n[len(_PREFIX):].lower()], v) for n, v in environment]
  for parts, text in [*named, *overrides]:
    if parts[0] in tree_lib.NOT_READ:
      not_read.append(parts[0])
    else:
      tree = _assign(root, tree, parts, "", text, root)
  checked = keys.checked(root, "", _interpolated(tree), root=root)
  not_read += [
      f"{name}.mesh.allocation_policy"
      for name in ("model_config", "teacher_model_config")
      if "allocation_policy" in ((checked[name] or {}).get("mesh") or {})
  ]
  source = run_config.Source(
      config=config,
      arguments=tuple(arguments),
      environment=environment,
      not_read=tuple(dict.fromkeys(not_read)),
  )
  made = tree_lib.build(checked, source)
  _report(made)
  return made


def to_yaml(config: run_config.RunConfig) -> str:
  """The config as a YAML with every key; resolving it gives an equal one.

  Raises:
    ValueError: a schedule that was made in Python.
  """
  container = omegaconf.OmegaConf.create(_escaped(tree_lib.plain(config)))
  return omegaconf.OmegaConf.to_yaml(container)


def load(path: str) -> Tree:
  """The mapping that a YAML file holds.

  Raises:
    ValueError: it is not there, cannot be read, or is no mapping.
  """
  file = pathlib.Path(path)
  if path == _BASE and not file.exists():
    file = BASE_FILE
  try:
    text = file.read_text(encoding="utf-8")
  except OSError as e:
    raise errors.invalid(
        path, f"must be a YAML file ({e.strerror})", path,
        "check the path; it starts from the current folder",
    ) from None
  except UnicodeDecodeError as e:
    raise errors.invalid(
        path, "must be text in UTF-8", e.reason, "save it as UTF-8"
    ) from None
  try:
    found = _top(text)
    if found != "a mapping":
      raise errors.invalid(
          path, "must hold a mapping of keys", found, "write key: value lines"
      )
    made = omegaconf.OmegaConf.create(text)
  except yaml.YAMLError as e:
    raise errors.invalid(
        path, "must be readable YAML", _problem(e), "mend it there"
    ) from None
  except (omegaconf.errors.OmegaConfBaseException, RecursionError) as e:
    raise errors.invalid(
        path, "must hold plain keys and values", str(e).splitlines()[0],
        "mend it there",
    ) from None
  return _plain(made)


def merge(old: Any, new: Any) -> Any:
  """`new` over `old`: mappings are merged key by key, the rest replaced."""
  if isinstance(old, Mapping) and isinstance(new, Mapping):
    return {**old, **{k: merge(old.get(k), v) for k, v in new.items()}}
  return new


def _plain(made: Any, *, resolve: bool = False) -> Tree:
  found: Any = omegaconf.OmegaConf.to_container(made, resolve=resolve)
  return found


def _top(text: str) -> str:
  """What a YAML holds at its top, in words."""
  for event in yaml.parse(text, Loader=yaml.SafeLoader):
    if isinstance(event, yaml.MappingStartEvent):
      return "a mapping"
    if isinstance(event, yaml.SequenceStartEvent):
      return "a list"
    if isinstance(event, yaml.ScalarEvent) and event.value:
      return event.value
  return "nothing"


def _problem(error: yaml.YAMLError) -> str:
  mark = getattr(error, "problem_mark", None)
  text = getattr(error, "problem", None) or str(error).splitlines()[0]
  if mark is None:
    return text
  return f"{text} (line {mark.line + 1}, column {mark.column + 1})"


def _known(root: keys.Key, read: Tree, not_read: list[str]) -> Tree:
  """What is ours of a file; notes Tunix's other sections."""
  names = {k.name for k in root.keys}
  not_read += [
      k for k in read if k in tree_lib.NOT_READ and k not in names
  ]
  return {k: v for k, v in read.items() if k not in tree_lib.NOT_READ}


def _split(argument: str) -> tuple[list[str], str]:
  """(the parts of the key, the text of the value) of one key=value."""
  key, sign, text = argument.partition("=")
  parts = re.sub(r"\[(-?\d+)\]", r".\1", key).split(".")
  if not sign or not all(parts):
    raise errors.invalid(
        argument, "must have the form key=value", argument,
        "write e.g. training_config.max_steps=100",
    )
  return parts, text


def _environment(root: keys.Key, given: set[str]) -> tuple[
    tuple[str, str], ...
]:
  """The variables T_KEY that set something.

  Raises:
    ValueError: one names no key, or one that the command line sets as well.
  """
  known = [k.name for k in root.keys] + sorted(tree_lib.NOT_READ)
  found = []
  for name, value in sorted(os.environ.items()):
    if not name.startswith(_PREFIX):
      continue
    key = name[len(_PREFIX):].lower()
    if key not in known or not name.isupper():
      raise errors.invalid(
          f"environment variable {name}",
          "must be T_ and the upper-case name of a top-level key", value,
          f"unset it, or rename it: {keys.near(key, known)}",
      )
    if key in given:
      raise errors.invalid(
          key,
          "must not be set both on the command line and by the environment",
          f"{name}={value}", "keep one of them",
      )
    found.append((name, value))
  return tuple(found)


def _assign(
    key: keys.Key, old: Any, parts: Sequence[str], path: str, text: str,
    root: keys.Key,
) -> Any:
  """`old` with one value below it set, and nothing else changed."""
  if not parts:
    value = keys.checked(
        key, path, _value(key, path, text), root=root, lenient=True
    )
    return merge(old, value) if key.kind == "section" else value
  head, rest = parts[0], parts[1:]
  if key.kind == "section":
    child = key.child(head)
    if child is None:
      keys.unknown(key, path, head, root=root)
    if isinstance(old, str):
      raise errors.invalid(
          path, "must be written out before one of its keys is set", old,
          f"set it in place of {old}",
      )
    section = old if isinstance(old, Mapping) else {}
    current = section.get(head, tree_lib.defaults(child))
    return {
        **section,
        head: _assign(child, current, rest, keys.below(path, head), text, root),
    }
  if key.is_list:
    items = list(old) if isinstance(old, (list, tuple)) else []
    index = _index(path, head, items)
    items[index] = _assign(
        key.item, items[index], rest, keys.below(path, index), text, root
    )
    return items
  if key.kind in ("mapping", "scalar") and isinstance(old, Mapping):
    inner = keys.Key(name=head, kind="any", nullable=True)
    if rest:
      raise errors.invalid(
          keys.below(path, ".".join(parts)), "must be a known key", rest[0],
          f"write {path}={{...}}",
      )
    new = {**old, head: _value(inner, path, text)}
    return keys.checked(key, path, new, root=root, lenient=True)
  value = "{start: 3.0, end: 1.0, shape: linear}"
  raise errors.invalid(
      keys.below(path, ".".join(parts)),
      f"must name a key, but {path} is a value", head,
      f"write {path}={value if key.kind == 'scalar' else '...'}",
  )


def _index(path: str, text: str, items: Sequence[Any]) -> int:
  inside = re.fullmatch(r"\d+", text) and int(text) < len(items)
  if not inside:
    rule = (
        f"must have an index from 0 to {len(items) - 1}" if items
        else "must hold items before one can be set"
    )
    raise errors.invalid(
        path, rule, text, f"write the whole list: {path}=[...]"
    )
  return int(text)


def _value(key: keys.Key, path: str, text: str) -> Any:
  """The value that a text stands for where `key` is due."""
  if key.kind == "str" and not text:
    return ""
  try:
    made = omegaconf.OmegaConf.from_dotlist([f"value={text}"])
    value = _plain(made)["value"]
  except yaml.YAMLError as e:
    if key.kind == "str":
      return text  # such as *.txt
    raise errors.invalid(
        path, "must be a readable value", text, _problem(e)
    ) from None
  except omegaconf.errors.OmegaConfBaseException:
    raise errors.invalid(
        path, "must hold readable interpolations", text, _ESCAPE
    ) from None
  scalar = isinstance(value, (bool, int, float))
  if key.kind == "str" and (
      scalar or (isinstance(value, Mapping) and not text.startswith("{"))
  ):
    return text
  return value


def _interpolated(tree: Tree) -> Tree:
  try:
    return _plain(omegaconf.OmegaConf.create(tree), resolve=True)
  except omegaconf.errors.OmegaConfBaseException as e:
    text = str(e).splitlines()[0]
    raise errors.invalid(
        getattr(e, "full_key", None) or "an interpolation",
        "must name what is there", text, _ESCAPE,
    ) from None


def _escaped(value: Any) -> Any:
  """Texts in which `${` is to stand for itself."""
  if isinstance(value, Mapping):
    return {k: _escaped(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_escaped(v) for v in value]
  if isinstance(value, str) and "${" in value:
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
  return value


def _report(config: run_config.RunConfig) -> None:
  if config.source.not_read:
    logging.info(
        "Not read by distillation: %s.", ", ".join(config.source.not_read)
    )
  if unused := config.unused():
    logging.warning(
        "Given, but not used by what was chosen: %s.", ", ".join(unused)
    )
