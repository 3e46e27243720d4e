"""`ModelConfig`: each error is one line with a near name or a remedy."""

import dataclasses
import re

import numpy as np
import pytest

from tunix_progdistill.weights import config as config_lib
from tunix_progdistill.weights.config import ModelConfig


def test_defaults_and_tunix_own_values():
  assert ModelConfig().model_source == "local"
  assert ModelConfig(model_source="").model_source == "local"
  found = ModelConfig(
      model_source="kaggle", lora_config={}, rng_seed=np.int64(3),
      mesh={"shape": "(1,2)", "axis_names": "('fsdp','tp')"}, layers=[0, 2],
  )
  assert found.layers == (0, 2)
  assert type(found.rng_seed) is int
  ModelConfig(mesh={"shape": [2, 4], "axis_names": ["fsdp", "tp"]})


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"model_source": "hugingface"}, "did you mean huggingface?"),
        ({"model_source": "maxtext"}, "convert the checkpoint"),
        ({"model_source": "internal"}, "convert the checkpoint"),
        ({"model_source": None}, "must be a string"),
        ({"model_name": 3}, "model_config.model_name must be a string"),
        ({"dtype": "bf16"}, "did you mean bfloat16?"),
        ({"dtype": "x"}, "try float32"),
        ({"rng_seed": -1}, "at least 0"),
        ({"rng_seed": True}, "rng_seed"),
        ({"flash_attention_block_size": 0}, "at least 1"),
        ({"vocabulary_size": 0}, "at least 1"),
        ({"vocabulary_size": 1.5}, "vocabulary_size"),
        ({"model_display": "yes"}, "must be true or false"),
        ({"lora_config": "rank 4"}, "must be a mapping"),
        ({"quantization": "int9"}, "did you mean int8?"),
        ({"layers": []}, "at least one layer"),
        ({"layers": (0, -1)}, "layers"),
        ({"layers": "0"}, "layers"),
        ({"layers": 3}, "layers"),
        ({"layers": (True,)}, "layers"),
        ({"mesh": {"shape": "(1,2)"}}, "shape and axis_names"),
        ({"mesh": "(1,2)"}, "shape and axis_names"),
        ({"mesh": {"shape": "(1,2)", "axis_names": "('x',)"}}, "each axis"),
        ({"mesh": {"shape": "(0,2)", "axis_names": "('x','y')"}}, "each axis"),
        ({"mesh": {"shape": "1 2", "axis_names": "('x','y')"}}, "each axis"),
    ],
)
def test_refused(fields, part):
  with pytest.raises(ValueError) as e:
    ModelConfig(**fields)
  message = str(e.value)
  assert message.startswith(f"model_config.{next(iter(fields))} must ")
  assert "\n" not in message and part in message
  assert re.search(r", got .*; \w", message)


def test_docstring_describes_every_field():
  text = config_lib.ModelConfig.__doc__
  described = re.findall(r"^    (\w+): ", text, flags=re.M)
  assert described[:-1] == [
      f.name for f in dataclasses.fields(ModelConfig)
  ]  # the last one is ValueError
