"""Chats as tokens, and which of them are the assistant's.

The Jinja template runs in a sandbox. What it writes and what the messages say
are told apart by marks (Unicode noncharacters, which are replaced by U+FFFD
where a message holds them) and tokenised apart:

- a special piece in the template becomes that piece;
- the spelling of a special piece in a message stays ordinary text, so that
  nothing said can end a turn or begin one. A template that does more with a
  message than trim it or put it somewhere (splits it, searches it, escapes it)
  cannot be marked; its messages are then tokenised with it, and a message that
  spells a special piece is refused. So is the name of a field that spells one
  (an argument of a tool call).

The borders of messages are therefore borders of tokens.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import itertools
import json
import pathlib
import re
from typing import Any
from typing import NamedTuple

import jinja2
from jinja2 import ext
from jinja2 import nodes
from jinja2 import sandbox
import numpy as np

from tunix_progdistill import errors
from tunix_progdistill.data import tokenizer as tokenizer_lib

# Noncharacters: said begins and ends, <eos>, an assistant's part begins and
# ends.
_SAID, _UNSAID, _EOS, _OURS, _THEIRS = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4"
_MARK = re.compile("[\ufdd0-\ufdd4]")
_RESERVED = re.compile("[\ufdd0-\ufdef]")
# What a template can raise. It is a small program of someone else's.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError,
    AttributeError, RecursionError,
)


class _Generation(ext.Extension):
  """`{% generation %}` ... `{% endgeneration %}` round the assistant's part."""

  tags = {"generation"}  # noqa: RUF012 (as in the base class)
  used = False

  def parse(self, parser):
    self.used = True
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    mark = lambda text: nodes.Output(
        [nodes.TemplateData(text, lineno=line)], lineno=line
    )
    return [mark(_OURS), *body, mark(_THEIRS)]


def _raise_exception(message: str):
  raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
  return json.dumps(value, ensure_ascii=False, indent=indent)


class Template:
  """A chat template.

  It sees `messages`, `add_generation_prompt`, `bos_token` (empty: <bos> is put
  in front once, whatever the template does), `eos_token`, `raise_exception` and
  the filter `tojson`, and no clock: the same chat gives the same tokens on
  another day.
  """

  def __init__(self, source: str, origin: str, field: str):
    """Compiles a template.

    Args:
      source: Jinja.
      origin: file or tokenizer that it is from, for messages.
      field: field of the configuration to blame.

    Raises:
      ValueError: it is not a template.
    """
    self.origin = origin
    self.field = field
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True,
        extensions=[_Generation, ext.LoopControlExtension],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    try:
      self._template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as e:
      raise errors.invalid(
          field, "must be a Jinja template", origin,
          f"line {e.lineno}: {e.message}",
      ) from None
    generation = environment.extensions[_Generation.identifier]
    self.marks_generation = bool(getattr(generation, "used", False))

  def render(
      self, messages: Sequence[Any], *, place: str, prompt: bool = False,
      eos: str = _EOS,
  ) -> str:
    """The text of messages.

    Args:
      messages: mappings with role and content.
      place: of the record, for messages.
      prompt: whether the header of an assistant's turn follows.
      eos: what stands for <eos>.

    Raises:
      ValueError: the template refuses them or fails.
    """
    try:
      return self._template.render(
          messages=messages, add_generation_prompt=prompt, bos_token="",
          eos_token=eos,
      )
    except _TEMPLATE_ERRORS as e:
      raise errors.invalid(
          self.field, "must be a template that takes the messages",
          self.origin, f"at {place}: {str(e).split(chr(10))[0]}",
      ) from None


def load_template(
    named: str, tokenizer: tokenizer_lib.Tokenizer | None, field: str
) -> Template:
  """The template that a configuration names.

  Args:
    named: a file; empty or "tokenizer" for the tokenizer's own.
    tokenizer: may be None where a file is named.
    field: field of the configuration, for messages.

  Raises:
    ValueError: there is no such file, it is no template, or the tokenizer has
      none.
  """
  if named not in ("", "tokenizer"):
    path = pathlib.Path(named).expanduser()
    try:
      source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
      reason = getattr(e, "strerror", None) or "it is not UTF-8"
      raise errors.invalid(
          field, "must be a file with a Jinja template", named, reason
      ) from None
    return Template(source, named, field)
  own = None if tokenizer is None else tokenizer.chat_template
  if not own:
    raise errors.invalid(
        field, "must name a file, for the tokenizer has no template", named,
        "write the path of a Jinja template",
    )
  return Template(own, "the tokenizer's own", field)


def _without_marks(value: Any) -> Any:
  """A message whose strings hold no noncharacter that we use."""
  if isinstance(value, str):
    return _RESERVED.sub("\ufffd", value)
  if isinstance(value, Mapping):
    return {k: _without_marks(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_without_marks(v) for v in value]
  return value


def _is_name(value: str, key: str) -> bool:
  """Whether a string says what a part is; templates compare these."""
  return key == "role" or (key == "type" and value.isidentifier())


def _marked(value: Any, key: str = "") -> Any:
  """A message whose strings are marked as said, blanks around them aside.

  A template that trims then leaves the marks where they are.
  """
  if isinstance(value, str):
    core = value.strip()
    if not core or _is_name(value, key):
      return value
    start = value.index(core)
    return (
        f"{value[:start]}{_SAID}{core}{_UNSAID}{value[start + len(core):]}"
    )
  if isinstance(value, Mapping):
    return {k: _marked(v, k) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_marked(v, key) for v in value]
  return value


def _strings(value: Any, key: str = "", *, fields: bool) -> list[str]:
  """What a message says: its strings, or the names of its fields."""
  if isinstance(value, str):
    return [] if fields or _is_name(value, key) else [value]
  if isinstance(value, Mapping):
    inner = [s for k, v in value.items() for s in _strings(v, k, fields=fields)]
    return [*value, *inner] if fields else inner
  if isinstance(value, list | tuple):
    return [s for v in value for s in _strings(v, key, fields=fields)]
  return []


def _refuse_special(
    said: Sequence[str], template: "Template",
    tokenizer: tokenizer_lib.Tokenizer, place: str,
) -> None:
  """Refuses what spells a special piece where it cannot be marked."""
  for text in said:
    ordinary = tokenizer.encode(text, parse_special=False)
    special = tokenizer.encode(text, parse_special=True)
    if not np.array_equal(ordinary, special):
      raise errors.invalid(
          template.field,
          "must put messages down as they are where one spells a special "
          "piece", template.origin, f"see {place}",
      )


def _told_apart(text: str, plain: Sequence[Any]) -> bool:
  """Whether all that is marked in `text` is a whole string of the messages.

  A string may stand there as JSON spells it.
  """
  cores = {s.strip() for s in _strings(plain, fields=False)}
  cores |= {_to_json(core)[1:-1] for core in cores}
  for i, part in enumerate(re.split(f"([{_SAID}{_UNSAID}])", text)):
    wanted = (None, _SAID, None, _UNSAID)[i % 4]
    if (wanted and part != wanted) or (i % 4 == 2 and part not in cores):
      return False
  return True


class Segment(NamedTuple):
  """A part of a rendered chat.

  Attributes:
    text: its text; "" stands for <eos>.
    said: whether a message says it, rather than the template.
    target: whether it is the assistant's.
  """

  text: str
  said: bool
  target: bool


def _marked_ranges(text: str) -> list[tuple[int, int]]:
  ranges, start = [], None
  for match in _MARK.finditer(text):
    if match.group() == _OURS:
      start = match.end()
    elif match.group() == _THEIRS and start is not None:
      ranges.append((start, match.start()))
      start = None
  return ranges


def _turn_end(turn: str) -> int:
  """Where a turn ends: after its end-of-turn piece, without the blanks after.

  Where nothing but blanks follow what is said, they end the turn.
  """
  tail = turn[turn.rfind(_UNSAID) + 1:]
  return len(turn.rstrip()) if tail.strip() else len(turn)


def _grown_ranges(
    render: Callable[..., str], template: Template, messages: Sequence[Any],
    whole: str, place: str,
) -> list[tuple[int, int]]:
  """The assistant's turns, found by rendering ever longer parts of the chat."""
  ranges = []
  for k, message in enumerate(messages):
    if message["role"] != "assistant":
      continue
    before = render(messages[:k], prompt=True)
    after = whole if k + 1 == len(messages) else render(messages[: k + 1])
    if not (after.startswith(before) and whole.startswith(after)):
      raise errors.invalid(
          template.field,
          "must render a turn the same whatever follows it", template.origin,
          f"message {k} at {place} changes; put {{% generation %}} round the "
          "assistant's part in a template of your own, or give each answer a "
          "record of its own",
      )
    start = len(before)
    ranges.append((start, start + _turn_end(after[start:])))
  return ranges


def _render(
    template: Template, messages: Sequence[Any],
    tokenizer: tokenizer_lib.Tokenizer, place: str,
) -> tuple[str, list[tuple[int, int]]]:
  """The chat as text with marks, and the ranges of the assistant's parts."""
  render = functools.partial(
      template.render, place=place,
      eos="" if tokenizer.eos_id is None else _EOS,
  )
  plain = [_without_marks(m) for m in messages]
  marked = [_marked(m) for m in plain]
  as_is, text = render(plain), render(marked)
  apart = _told_apart(text, plain) and (
      text.replace(_SAID, "").replace(_UNSAID, "") == as_is
  )
  names = _strings(plain, fields=True)
  names = [name for name in names if not name.isidentifier()]
  _refuse_special(names, template, tokenizer, place)
  if not apart:
    said = _strings(plain, fields=False)
    _refuse_special(said, template, tokenizer, place)
    marked, text = plain, as_is
  if template.marks_generation:
    ranges = _marked_ranges(text)
  else:
    ranges = _grown_ranges(render, template, marked, text, place)
  return text, ranges


def segments(
    template: Template, messages: Sequence[Any],
    tokenizer: tokenizer_lib.Tokenizer, place: str,
) -> list[Segment]:
  """A chat in parts that are tokenised apart.

  Args:
    template: how it is written.
    messages: mappings with role and content.
    tokenizer: says whether there is an <eos>, and what a special piece is.
    place: of the record, for messages.

  Raises:
    ValueError: the template fails, renders a turn otherwise when more follows,
      or a message forges a special piece in a template that cannot be marked.
  """
  text, ranges = _render(template, messages, tokenizer, place)
  cuts = {0, len(text)}
  cuts.update(itertools.chain.from_iterable(ranges))
  for match in _MARK.finditer(text):
    cuts.update(match.span())
  found, said, pending = [], False, list(ranges)
  for start, end in itertools.pairwise(sorted(cuts)):
    while pending and pending[0][1] <= start:
      pending.pop(0)
    target = bool(pending) and pending[0][0] <= start
    part = text[start:end]
    if part in (_SAID, _UNSAID):
      said = part == _SAID
    elif part == _EOS:
      found.append(Segment("", False, target))
    elif not _MARK.match(part):
      found.append(Segment(part, said, target))
  return found


def encode(
    template: Template, messages: Sequence[Any],
    tokenizer: tokenizer_lib.Tokenizer, place: str,
) -> tuple[np.ndarray, np.ndarray]:
  """A chat as tokens, <bos> first and once.

  Args:
    template: how it is written.
    messages: mappings with role and content.
    tokenizer: makes tokens of the parts.
    place: of the record, for messages.

  Returns:
    int32 [n] tokens, and bool [n], True on every turn of the assistant from
    after its header to its end-of-turn piece.

  Raises:
    ValueError: as `segments`.
  """
  ids: list[np.ndarray] = []
  targets: list[np.ndarray] = []
  for part in segments(template, messages, tokenizer, place):
    if part.text:
      piece = tokenizer.encode(part.text, parse_special=not part.said)
    else:
      piece = np.array([tokenizer.eos_id], np.int32)
    ids.append(np.asarray(piece, np.int32))
    targets.append(np.full(len(piece), part.target))
  tokens = np.concatenate([np.zeros(0, np.int32), *ids])
  target = np.concatenate([np.zeros(0, np.bool_), *targets])
  bos = tokenizer.bos_id
  if bos is not None:
    own = 0
    while own < len(tokens) and tokens[own] == bos:
      own += 1
    tokens = np.concatenate([np.array([bos], np.int32), tokens[own:]])
    target = np.concatenate([np.array([False]), target[own:]])
  return tokens, target


def encode_prompt(
    prompt: str, answer: str, tokenizer: tokenizer_lib.Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
  """<bos> prompt answer <eos> as tokens, without a template.

  Prompt and answer are tokenised apart, as they are when the model is asked,
  and neither can spell a special piece.

  Returns:
    int32 [n] tokens, and bool [n], True on the answer and its <eos>.
  """
  bos, eos = tokenizer.bos_id, tokenizer.eos_id
  head = [] if bos is None else [bos]
  tail = [] if eos is None else [eos]
  asked = tokenizer.encode(prompt, parse_special=False)
  said = tokenizer.encode(answer, parse_special=False)
  tokens = np.concatenate([head, asked, said, tail]).astype(np.int32)
  start = len(head) + len(asked)
  return tokens, np.arange(len(tokens)) >= start
