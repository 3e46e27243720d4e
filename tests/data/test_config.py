"""`DataConfig` refuses what is out of range, in one line."""

import dataclasses
import re

import pytest

from tests.data import common
from tunix_progdistill.data import config as config_lib

_BAD = {
    "data_source": ("jsnl", "json", None, 3),
    "data_directory": (None, ["a"]),
    "dataset_name": (1,),
    "batch_size": (0, -1, 2.0, True, "8", None),
    "max_target_length": (1, 0, 2.5),
    "num_train_epochs": (0, None, 10**18),
    "num_batches": (-1, None),
    "tfds_download": ("yes", 1),
    "eval_directory": (None,),
    "eval_fraction": (0.0, 1.0, -0.1, float("nan"), 1, "0.1"),
    "eval_batch_size": (0, 1.5),
    "max_eval_rows": (0, -3, "all"),
    "max_train_rows": (0, True),
    "format": ("chats", ""),
    "text_field": ("", None),
    "prompt_field": ("", "answer"),
    "answer_field": (3, "prompt"),
    "messages_field": ("",),
    "chat_template": (None,),
    "pack": ("false", 0),
    "shuffle_seed": (-1, 0.5, True),
    "encoding_errors": ("ignore",),
    "on_long": ("cut",),
}


def test_every_field_is_tried():
  names = {f.name for f in dataclasses.fields(config_lib.DataConfig)}
  assert set(_BAD) == names


@pytest.mark.parametrize(
    "field,value", [(f, v) for f, values in _BAD.items() for v in values]
)
def test_bad_value(field, value):
  with pytest.raises(ValueError) as e:
    config_lib.DataConfig(**{field: value})
  message = common.one_line(e)
  assert re.match(r"(data_config\.)?\w+ must .*, got .*; .", message)
  if field != "prompt_field":  # answer_field is blamed where they are equal
    assert message.startswith(config_lib.name(field) + " ")


def test_near_name_is_offered():
  with pytest.raises(ValueError, match=r"did you mean array_record\?"):
    config_lib.DataConfig(data_source="arrayrecord")


def test_prompts_need_records():
  with pytest.raises(ValueError, match="data_source: jsonl"):
    config_lib.DataConfig(format="chat")


def test_docstring_names_every_field_in_order():
  doc = config_lib.DataConfig.__doc__.partition("Attributes:")[2]
  doc = doc.partition("Raises:")[0]
  named = re.findall(r"^    (\w+): ", doc, re.MULTILINE)
  fields = [f.name for f in dataclasses.fields(config_lib.DataConfig)]
  assert named == fields
