"""The reference, the base YAML and `--help`, all written from the keys."""

from collections.abc import Iterator
import textwrap
from typing import Any

import yaml

from tunix_progdistill.schema import keys
from tunix_progdistill.schema import optimizer
from tunix_progdistill.schema import tree

_ANNEAL = (
    "A rate, temperature or alpha is a number, or `{start, end, shape, "
    "updates}`: it then moves from start to end, with shape linear, cosine or "
    "exponential, over so many updates (without: over the stage or run that it "
    "is given to)."
)
_ARGUMENTS = (
    "Beside these keys stand the arguments of the chosen optimizer and "
    "schedule, under optax's names; what is left out has optax's default. "
    "`tunix-progdistill train --help` lists those of the installed optax."
)
_TEACHER = "Its keys are those of model_config."
_INTRODUCTION = """\
# Configuration

Written from the schema by `python -m tunix_progdistill.schema`; do not edit.

```
tunix-progdistill train CONFIG.yaml [override_config_file=F] [key=value ...]
```

Later wins: the defaults below, `CONFIG.yaml`, the override file, variables
`T_KEY` of the environment (`T_BATCH_SIZE=8`), `key=value`. Sections are merged
key by key. An item of a list is reached by its number:

```
tunix-progdistill train run.yaml progressive.stages.0.learning_rate=3e-4
```

`key=` is an empty text, `null` is null, lists are written `[0, 1, 2]`, and
`${other.key}` takes the value of another key. Names and meanings are Tunix's
where Tunix has the key. Sections of Tunix's other commands (such as
`rl_training_config`) are accepted and not read, any other unknown key is an
error. A key that both the environment and the command line set is one too.
"""


def document() -> str:
  """docs/configuration.md, the same whichever optax and Tunix are installed."""
  out = [_INTRODUCTION]
  for title, meaning, rows in _tables():
    out.append(f"## {title}\n")
    if meaning:
      out.append(meaning + "\n")
    shown = [(name, key) for name, key in rows if not key.implied]
    if shown:
      out.append("| key | type | default | meaning |\n|---|---|---|---|")
    out.extend(
        f"| `{name}` | {_cell(key.type_name)} | {_cell(_default(key, '`'))} |"
        f" {_cell(key.meaning)} |"
        for name, key in shown
    )
    out.append("")
  return "\n".join(out).rstrip("\n") + "\n"


def help_text(width: int = 80) -> str:
  """Every key with type, default and meaning, for a terminal."""
  out = []
  for title, meaning, rows in _tables():
    out.append(f"{title}:")
    if meaning:
      out.append(_wrapped(meaning.replace("`", ""), width, "  "))
    for name, key in rows:
      default = _default(key, "")
      default = f", default {default}" if default else ""
      out.append(
          _wrapped(f"{name}  ({key.type_name}{default})", width, "  ", "      ")
      )
      out.append(_wrapped(key.meaning, width, "      "))
    out.append("")
  for title, names in (
      ("opt_type", optimizer.optimizers()),
      ("schedule_type", optimizer.schedules()),
  ):
    out.append(f"optimizer_config.{title} may be:")
    out.append(_wrapped(", ".join(sorted(names)) + ".", width, "  "))
    out.append("")
  return "\n".join(out)


def base_yaml() -> str:
  """base_config.yaml: every key with its default and its meaning."""
  out = [
      "# Every key with its default. Written from the schema by",
      "# `python -m tunix_progdistill.schema`; do not edit.",
      "",
  ]
  for key in tree.root().keys:
    out.extend(_yaml_lines(key, ""))
    out.append("")
  return "\n".join(out).rstrip("\n") + "\n"


def _tables() -> Iterator[tuple[str, str, list[tuple[str, keys.Key]]]]:
  """(title, meaning, rows) of each group of keys; a row has its full path."""
  top = tree.root().keys
  data_keys = [(k.name, k) for k in top if k.name in tree.DATA_KEYS]
  for key in top:
    if key.name == "data_source":
      yield "Data, at the top level", "", data_keys
    if key.kind != "section":
      continue
    meaning = _sentence(key.meaning)
    if key.name == "progressive":
      meaning += " " + _ANNEAL
    if key.name == "optimizer_config":
      meaning += " " + _ARGUMENTS
    if key.name == "teacher_model_config":
      yield key.name, f"{meaning} {_TEACHER}", []
      continue
    yield key.name, meaning, list(_rows(key, key.name))
  rest = [
      (k.name, k) for k in top
      if k.kind != "section" and k.name not in tree.DATA_KEYS
  ]
  yield "The run, at the top level", "", rest


def _rows(key: keys.Key, path: str) -> Iterator[tuple[str, keys.Key]]:
  for child in key.keys:
    name = keys.below(path, child.name)
    yield name, child
    if child.kind == "section":
      yield from _rows(child, name)
    elif child.kind == "sections":
      yield from _rows(child, f"{name}.N")


def _default(key: keys.Key, quote: str) -> str:
  if key.implied:
    return "its own"
  if key.kind in ("section", "sections") and not key.nullable:
    return "one open stage" if key.kind == "sections" else ""
  return f"{quote}{_flow(key.default)}{quote}"


def _flow(value: Any) -> str:
  """A value as YAML on one line."""
  text = yaml.safe_dump(
      value, default_flow_style=True, width=10**6, allow_unicode=True
  )
  return text.removesuffix("...\n").strip().replace("''", '""')


def _cell(text: str) -> str:
  return text.replace("|", "\\|")


def _sentence(text: str) -> str:
  return text[:1].upper() + text[1:]


def _wrapped(text: str, width: int, first: str, rest: str = "") -> str:
  return textwrap.fill(
      text, width, initial_indent=first, subsequent_indent=rest or first,
      break_long_words=False, break_on_hyphens=False,
  )


def _comment(text: str, indent: str) -> str:
  return _wrapped(text, 80, f"{indent}# ")


def _yaml_lines(key: keys.Key, indent: str) -> Iterator[str]:
  if key.implied:
    return
  yield _comment(key.meaning, indent)
  if key.kind == "section" and not key.nullable:
    yield f"{indent}{key.name}:"
    for child in key.keys:
      yield from _yaml_lines(child, indent + "  ")
    if key.name == "optimizer_config":
      yield _comment(_ARGUMENTS, indent + "  ")
  elif key.kind == "sections":
    yield f"{indent}{key.name}:"
    for i, child in enumerate(key.keys):
      lines = list(_yaml_lines(child, indent + "    "))
      if i == 0:
        lines[-1] = lines[-1].replace(f"{indent}    ", f"{indent}  - ", 1)
      yield from lines
  else:
    yield f"{indent}{key.name}: {_flow(key.default)}"
    if key.keys and key.name != "teacher_model_config":
      for child in key.keys:
        yield _wrapped(
            f"{child.name}: {child.meaning}", 80, f"{indent}#   ",
            f"{indent}#     ",
        )

