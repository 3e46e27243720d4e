"""`ProgressivePipeline`: Tunix's config class, with the section `progressive`.

A pipeline class of Tunix's command line inherits from `HyperParameters`. Let it
inherit from this class instead, and it takes the flag from its YAML:

  class MyPipeline(ProgressivePipeline):
    def run(self):
      ...
      trainer = self.make_trainer(student, teacher, strategy)
      trainer.train(train_ds, eval_ds)

`HyperParameters` reads overrides key by key, replaces sections whole and turns
`stages.0.learning_rate=3e-4` into text: the section `progressive` is resolved
here, by OmegaConf, before it sees the rest.
"""

from collections.abc import Sequence
import pathlib
import tempfile
from typing import Any

from flax import nnx
import omegaconf
from tunix.cli import config as tunix_config
from tunix.distillation import distillation_trainer
from tunix.distillation import strategies
import yaml

from tunix_progdistill import config as config_lib
from tunix_progdistill import errors
from tunix_progdistill import trainer as trainer_lib

_SECTION = "progressive"
_OVERRIDE = "override_config_file="
_Conf = omegaconf.OmegaConf


class ProgressivePipeline(tunix_config.HyperParameters):
  """A Tunix pipeline whose YAML may hold the section `progressive`.

  The section holds the fields of `ProgressiveConfig` and `StagePlan`. Without
  it, or with `enabled: false`, the pipeline runs Tunix's own trainer.

  Args:
    argv: as Tunix takes it: the program, the YAML, and `key=value` words, such
      as `progressive.stages.0.learning_rate=3e-4`.
    **kwargs: handed on.

  Raises:
    ValueError: the section cannot be read; see also Tunix's class.

  Attributes:
    progressive: the section; None without one.
  """

  def __init__(self, argv: Sequence[str], **kwargs: Any):
    """See the class."""
    section, rest, override = _split(list(argv))
    with tempfile.TemporaryDirectory() as folder:
      if override is not None:
        path = pathlib.Path(folder) / "override.yaml"
        path.write_text(yaml.safe_dump(override))
        rest.append(f"{_OVERRIDE}{path}")
      super().__init__(rest, **kwargs)
    self.config.pop(_SECTION, None)
    self.progressive = config_lib.as_progressive(section)

  def training_config(
      self, key: str = "training_config"
  ) -> config_lib.TrainingConfig:
    """The section `key` as a `TrainingConfig`, with `progressive` in it."""
    return config_lib.TrainingConfig(
        **self.obtain_training_config_dict(key), progressive=self.progressive
    )

  def make_trainer(
      self,
      student_model: nnx.Module,
      teacher_model: nnx.Module,
      strategy: strategies.BaseStrategy,
  ) -> distillation_trainer.DistillationTrainer:
    """The trainer that the YAML asks for, by `optimizer_config` and the flag.

    Args:
      student_model: see `ProgressiveDistillationTrainer`.
      teacher_model: likewise.
      strategy: likewise.

    Raises:
      ValueError: likewise.
    """
    return trainer_lib.make_trainer(
        student_model, teacher_model, strategy,
        self.create_optimizer("optimizer_config"), self.training_config(),
    )


def _split(argv: list[str]) -> tuple[Any, list[str], dict[str, Any] | None]:
  """The section; the words without it; the override file without it."""
  if len(argv) < 2:
    return None, argv, None  # Tunix's class says what is missing
  section = _read(argv[1]).get(_SECTION)
  rest, override = argv[:2], None
  words = []
  for word in argv[2:]:
    if word.startswith(_OVERRIDE) and override is None:
      override = _read(word.removeprefix(_OVERRIDE))
    elif word.split("=", 1)[0].split(".")[0] == _SECTION and "=" in word:
      words.append(word)
    else:
      rest.append(word)
  if override is not None and _SECTION in override:
    section = _merged(section, override.pop(_SECTION))
  for word in words:
    section = _assigned(section, *word.split("=", 1))
  return section, rest, override


def _read(path: str) -> dict[str, Any]:
  try:
    read: Any = _Conf.to_container(_Conf.load(path), resolve=False)
  except (OSError, yaml.YAMLError) as e:
    raise errors.invalid(
        "config", f"must be a YAML file that can be read ({e})", path,
        "check the path",
    ) from None
  return read if isinstance(read, dict) else {}


def _merged(old: Any, new: Any) -> Any:
  if not (isinstance(old, dict) and isinstance(new, dict)):
    return new
  return _Conf.to_container(_Conf.merge(old, new))


def _assigned(section: Any, key: str, text: str) -> Any:
  """The section with `key`, such as `progressive.stages.0.name`, set."""
  whole = _Conf.create({_SECTION: section})
  try:
    value = _Conf.from_dotlist([f"value={text}"]).value
    _Conf.update(whole, key, value, force_add=True)
  except (omegaconf.errors.OmegaConfBaseException, yaml.YAMLError) as e:
    raise errors.invalid(
        key, "must name a key of the section, and an item that is there",
        text, " ".join(str(e).split())[:200],
    ) from None
  made: Any = _Conf.to_container(whole)
  return made[_SECTION]
