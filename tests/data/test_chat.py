"""The loss counts the assistant's tokens, and nothing said forges a piece."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from tests.data import common
from tunix_progdistill.data import chat

_TOKENIZERS = {"characters": common.Characters(), "bytes": common.Bytes()}
_FIELD = "data_config.chat_template"


def _template(source):
  return chat.Template(source, "test.jinja", _FIELD)


def _tokenizer(name, bos):
  found = _TOKENIZERS[name]
  if bos == found.bos_id:
    return found
  if name == "characters":
    return common.Characters(bos_id=bos)
  other = common.Bytes()
  other.bos_id = bos
  return other


def _parts(tokens, targets, tokenizer):
  """Runs of targets, decoded."""
  edges = np.flatnonzero(np.diff([0, *targets.astype(int), 0]))
  return [
      tokenizer.decode(tokens[a:b])
      for a, b in zip(edges[::2], edges[1::2], strict=True)
  ]


def _encode(source, messages, tokenizer):
  return chat.encode(_template(source), messages, tokenizer, "x.jsonl:1")


def _turns(messages, end):
  return [
      m["content"].strip() + end for m in messages if m["role"] == "assistant"
  ]


@pytest.mark.parametrize("name", common.TEMPLATES)
@pytest.mark.parametrize("kind", _TOKENIZERS)
def test_masked_tokens_are_the_assistants_turns(name, kind):
  source, bos, end = common.TEMPLATES[name]
  tokenizer = _tokenizer(kind, bos)
  tokens, targets = _encode(source, common.CHAT, tokenizer)
  assert tokens.dtype == np.int32 and targets.dtype == np.bool_
  assert _parts(tokens, targets, tokenizer) == ["sat on" + end, "the mat" + end]
  if bos is not None:
    assert tokens[0] == bos and (tokens == bos).sum() == 1 and not targets[0]


def test_tokens_are_those_of_the_whole_text():
  """Where nothing is forged, apart gives what the template's text gives."""
  tokenizer = _tokenizer("characters", 2)
  tokens, _ = _encode(common.GEMMA, common.CHAT, tokenizer)
  assert tokenizer.decode(tokens) == (
      "<bos><start_of_turn>user\nthe cat?<end_of_turn>\n"
      "<start_of_turn>model\nsat on<end_of_turn>\n"
      "<start_of_turn>user\nand \n\nthen<end_of_turn>\n"
      "<start_of_turn>model\nthe mat<end_of_turn>\n"
  )
  assert tokens[1] == common.SPECIAL.index("<start_of_turn>")


_WORDS = st.lists(
    st.one_of(
        st.sampled_from([*common.SPECIAL, "user", "model", "\n", " "]),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=8,
).map("".join).filter(str.strip)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(common.TEMPLATES)),
    said=st.lists(st.tuples(_WORDS, _WORDS), min_size=1, max_size=3),
    data=st.data(),
)
def test_law_of_the_mask(name, said, data):
  """Any chat: masked tokens spell the answers; no piece comes from a message.

  Noncharacters that are marks inside come out as U+FFFD.
  """
  kind = data.draw(st.sampled_from(sorted(_TOKENIZERS)))
  source, bos, end = common.TEMPLATES[name]
  tokenizer = _tokenizer(kind, bos)
  messages = []
  for asked, answered in said:
    messages.append({"role": "user", "content": asked})
    messages.append({"role": "assistant", "content": answered})
  tokens, targets = _encode(source, messages, tokenizer)
  clean = chat._without_marks(messages)
  keep = str if name == "chatml" else str.strip
  assert _parts(tokens, targets, tokenizer) == [
      keep(m["content"]) + end for m in clean if m["role"] == "assistant"
  ]
  pieces = tokens[tokens < len(common.SPECIAL)]
  per_turn = {"gemma": 2, "llama3": 3, "chatml": 2}[name]
  assert len(pieces) == per_turn * len(messages) + (bos is not None)


@pytest.mark.parametrize("bos", [None, 2])
def test_bos_once_whatever_the_template_does(bos):
  tokenizer = common.Characters(bos_id=bos)
  for source in ("", "{{ bos_token }}", "<bos>", "<bos>{{ bos_token }}<bos>"):
    body = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    tokens, _ = _encode(
        source + body, [{"role": "assistant", "content": "hi <bos>"}], tokenizer
    )
    if bos is not None:
      assert tokenizer.decode(tokens) == "<bos>hi <bos><eos>"
      assert (tokens == bos).sum() == 1 and tokens[0] == bos


def test_eos_of_the_template_is_a_target():
  source = (
      "{% for m in messages %}{{ m.role }}: {{ m.content }}"
      "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
      "{% if add_generation_prompt %}assistant: {% endif %}"
  )
  tokenizer = common.Characters()
  tokens, targets = _encode(source, common.CHAT, tokenizer)
  assert _parts(tokens, targets, tokenizer) == ["sat on<eos>", "the mat<eos>"]
  assert (tokens == tokenizer.eos_id).sum() == 2


def test_blanks_end_a_turn_that_has_no_piece():
  source = (
      "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
      "{% if add_generation_prompt %}assistant: {% endif %}"
  )
  tokens, targets = _encode(source, common.CHAT, common.Characters())
  found = _parts(tokens, targets, common.Characters())
  assert found == ["sat on\n\n", "the mat\n\n"]


def test_generation_blocks_are_honoured():
  source = (
      "{% for m in messages %}<|im_start|>{{ m.role }}\n"
      "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
      "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
      "{% if not loop.last %}({{ messages | length }}){% endif %}{% endfor %}"
  )
  tokenizer = common.Characters(bos_id=None)
  tokens, targets = _encode(source, common.CHAT, tokenizer)
  assert _parts(tokens, targets, tokenizer) == _turns(common.CHAT, "<|im_end|>")
  assert "\ufdd3" not in tokenizer.decode(tokens)


_FORGETFUL = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}\
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


_CLOSING = common.CHATML.replace("<|im_end|>\n'", (
    "<|im_end|>' + ('the end' if loop.last and m.role == 'assistant' else '')"
))


@pytest.mark.parametrize("source", [_FORGETFUL, _CLOSING])
def test_template_that_changes_earlier_turns_is_refused(source):
  tokenizer = common.Characters()
  single, targets = _encode(source, common.CHAT[:2], tokenizer)
  assert "sat on<|im_end|>" in _parts(single, targets, tokenizer)[0]
  with pytest.raises(ValueError) as e:
    _encode(source, common.CHAT, tokenizer)
  message = common.one_line(e)
  assert message.startswith(f"{_FIELD} must render a turn the same")
  assert "x.jsonl:1" in message and "generation" in message




def test_template_that_edits_messages():
  """It is taken as it is, unless a message spells a special piece."""
  tokenizer = common.Characters(bos_id=None)
  source = common.CHATML.replace("m.content", "m.content.split('|')[-1]")
  chats = [{"role": "user", "content": "a|b"},
           {"role": "assistant", "content": "c|d"}]
  tokens, targets = _encode(source, chats, tokenizer)
  assert _parts(tokens, targets, tokenizer) == ["d<|im_end|>"]
  assert "a|" not in tokenizer.decode(tokens)
  # What the template puts into a message is a piece, as elsewhere.
  inside = common.CHATML.replace(
      "m.content", "m.content | replace('|', '<|im_end|>')"
  )
  tokens, targets = _encode(inside, chats, tokenizer)
  assert (tokens[targets] < len(common.SPECIAL)).sum() == 2
  chats[0]["content"] = "a|b<|im_end|>"
  with pytest.raises(ValueError) as e:
    _encode(source, chats, tokenizer)
  assert "spells a special piece" in common.one_line(e)


@pytest.mark.parametrize(
    "source,says",
    [
        ("{{ raise_exception('no system turns\nhere') }}", "no system turns"),
        ("{{ messages[0].content + 1 }}", "at x.jsonl:1"),
        ("{{ messages.nothing.more }}", "at x.jsonl:1"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ strftime_now('%d') }}", "strftime_now"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "at x.jsonl:1"),
    ],
)
def test_template_that_fails(source, says):
  with pytest.raises(ValueError) as e:
    _encode(source, common.CHAT, common.Characters())
  message = common.one_line(e)
  assert says in message and "test.jinja" in message


def test_not_a_template():
  with pytest.raises(ValueError, match=r"must be a Jinja template.*line 2"):
    _template("\n{% for %}")


def test_load_template(tmp_path):
  own = common.Characters(chat_template="{{ messages }}")
  for named in ("", "tokenizer"):
    assert chat.load_template(named, own, _FIELD).origin.startswith("the tok")
    with pytest.raises(ValueError) as e:
      chat.load_template(named, common.Characters(), _FIELD)
    assert "the tokenizer has no template" in common.one_line(e)
  path = tmp_path / "x.jinja"
  with pytest.raises(ValueError, match="No such file"):
    chat.load_template(str(path), own, _FIELD)
  path.write_bytes(b"\xff")
  with pytest.raises(ValueError, match="not UTF-8"):
    chat.load_template(str(path), own, _FIELD)
  path.write_text("{{ 1 }}")
  assert chat.load_template(str(path), None, _FIELD).origin == str(path)


def test_parts_and_other_fields_of_a_message():
  """Text in parts, and a name, cannot forge either."""
  source = (
      "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}\n"
      "{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>{% endif %}"
  )
  evil = "<|im_end|>"
  messages = [
      {"role": "assistant", "name": evil,
       "content": [{"type": "text", "text": evil}, {"text": "b"}]},
  ]
  tokenizer = common.Characters(bos_id=None)
  tokens, _ = _encode(source, messages, tokenizer)
  assert (tokens < len(common.SPECIAL)).sum() == 2
  assert tokenizer.decode(tokens) == (
      f"<|im_start|>assistant {evil}\n{evil}b<|im_end|>"
  )


def test_tool_calls_cannot_forge():
  source = (
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
      "{{ m.calls | tojson }}<|im_end|>{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
  )
  call = {"type": "<|im_end|>", "arguments": {"x": '"<|im_end|>\n'}}
  message = {"role": "assistant", "content": "", "calls": [call]}
  tokenizer = common.Characters(bos_id=None)
  tokens, targets = _encode(source, [message], tokenizer)
  assert (tokens < len(common.SPECIAL)).sum() == 2
  assert _parts(tokens, targets, tokenizer) == [
      '[{"type": "<|im_end|>", "arguments": {"x": "\\"<|im_end|>\\n"}}]'
      "<|im_end|>"
  ]
  call["arguments"] = {"<|im_end|>": 1}
  with pytest.raises(ValueError, match="spells a special piece"):
    _encode(source, [message], tokenizer)


@pytest.mark.parametrize("bos,eos", [(2, 1), (None, 1), (2, None)])
def test_prompt_and_answer(bos, eos):
  tokenizer = common.Characters(bos_id=bos, eos_id=eos)
  tokens, targets = chat.encode_prompt("q<bos> ", "a<eos>", tokenizer)
  head, tail = "<bos>" * (bos is not None), "<eos>" * (eos is not None)
  assert tokenizer.decode(tokens) == f"{head}q<bos> a<eos>{tail}"
  assert _parts(tokens, targets, tokenizer) == ["a<eos>" + tail]
  assert (tokens < len(common.SPECIAL)).sum() == len(head + tail) // 5
  empty, targets = chat.encode_prompt("", "a", tokenizer)
  assert tokenizer.decode(empty[targets]) == "a" + tail
