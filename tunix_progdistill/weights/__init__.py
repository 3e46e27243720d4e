"""Models and tokenizers: from where they are to Tunix, and back to files.

    config = weights.ModelConfig(model_source="local", model_path="gemma")
    weights.check(config)            # before anything is read or fetched
    loaded = weights.load(config)    # model, tokenizer, configs
    weights.export(loaded.model, "student", loaded=loaded)
"""

from collections.abc import Sequence
import dataclasses
import os
import pathlib

from flax import nnx
import jax

from tunix_progdistill import errors
from tunix_progdistill.weights import config as config_lib
from tunix_progdistill.weights import cut
from tunix_progdistill.weights import export as export_lib
from tunix_progdistill.weights import gguf_source
from tunix_progdistill.weights import loaded as loaded_lib
from tunix_progdistill.weights import local
from tunix_progdistill.weights import remote
from tunix_progdistill.weights import tokenizer as tokenizer_lib
from tunix_progdistill.weights import tokenizer_files

Description = loaded_lib.Description
Loaded = loaded_lib.Loaded
ModelConfig = config_lib.ModelConfig
Tokenizer = tokenizer_lib.Tokenizer
check_export = export_lib.check_export
export = export_lib.export
recover_export = export_lib.recover_export

_FIELD = "model_config"


def check(config: ModelConfig, field: str = _FIELD) -> None:
  """Refuses a model that cannot be loaded, before anything is fetched.

  Args:
    config: which model.
    field: what messages call it, such as teacher_model_config.

  Raises:
    ValueError: one line that names field, rule, value and remedy.
  """
  if config.model_source == "local":
    path = f"{field}.model_path"
    local.check(config.model_path, path)
    tokenizer_files.find(config.model_path, None, path)
    if config.vocabulary_size is not None:
      cut.sentencepiece_model(
          pathlib.Path(config.model_path).expanduser(),
          f"{field}.vocabulary_size",
      )
  elif config.model_source == "gguf":
    gguf_source.check(config, field)
  else:
    remote.check(config, field)


def describe(config: ModelConfig, field: str = _FIELD) -> Description:
  """What is known of a model without its weights.

  Args:
    config: which model.
    field: what messages call it.

  Returns:
    The description; None for what only a download or, where the vocabulary is
    to be cut, only the texts could tell.

  Raises:
    ValueError: one line; the files that tell are missing or not readable.
  """
  if config.model_source == "local":
    found = local.describe(config.model_path, f"{field}.model_path")
  elif config.model_source == "gguf":
    found = gguf_source.describe(config, field)
  else:
    found = remote.describe(config)
  if config.vocabulary_size is not None:
    found = dataclasses.replace(
        found, vocab_size=None, bos_id=None, eos_id=None
    )
  return found


def load(
    config: ModelConfig,
    *,
    mesh: jax.sharding.Mesh | None = None,
    texts: Sequence[str] | None = None,
    field: str = _FIELD,
) -> Loaded:
  """A model with its tokenizer and its configs.

  `config.layers` is not applied: see `students.from_layers`.

  Args:
    config: which model.
    mesh: of devices; None for one.
    texts: the training texts, needed where `vocabulary_size` is set: they
      choose the pieces that are kept.
    field: what messages call the config.

  Raises:
    ValueError: one line; as `check`, or a download failed, or a file is not
      what it should be.
  """
  if config.vocabulary_size is not None and not texts:
    raise errors.invalid(
        f"{field}.vocabulary_size", "must be null where there are no training "
        "texts to choose the pieces by", config.vocabulary_size, "leave it out",
    )
  check(config, field)
  if config.model_source in ("kaggle", "gcs"):
    loaded = remote.load(config, mesh, field)
  else:
    loaded = _load_folder(config, _folder(config, texts, field), mesh, field)
  if config.model_display:
    nnx.display(loaded.model)
  return loaded


def _folder(
    config: ModelConfig, texts: Sequence[str] | None, field: str
) -> pathlib.Path:
  """The folder that the model is read from, its vocabulary cut if asked."""
  if config.model_source == "gguf":
    return gguf_source.folder_of(config, texts, field)
  folder = pathlib.Path(config.model_path).expanduser()
  if config.model_source == "huggingface":
    folder = remote.snapshot(config, field)
  if config.vocabulary_size is None:
    return folder
  return cut.folder_of(
      folder, texts or (), config.vocabulary_size, f"{field}.vocabulary_size"
  )


def _load_folder(
    config: ModelConfig, folder: pathlib.Path,
    mesh: jax.sharding.Mesh | None, field: str,
) -> Loaded:
  where = "model_id" if config.model_source == "huggingface" else "model_path"
  tokenizer = tokenizer_lib.load_tokenizer(folder, field=f"{field}.{where}")
  model, family, tunix_config, hf_config = local.load(
      folder, dtype=config.dtype, mesh=mesh, config=config,
      field=f"{field}.{where}",
  )
  return Loaded(
      model=model, family=family, model_config=tunix_config,
      hf_config=hf_config, tokenizer=tokenizer, folder=folder,
  )


def load_tokenizer(
    path: str | os.PathLike[str], kind: str | None = None
) -> Tokenizer:
  """The tokenizer of a folder, of a file, or of a repository on the hub.

  Args:
    path: Tunix's tokenizer_path: a folder, a file, or owner/name where the
      kind is huggingface and there is no such folder.
    kind: Tunix's tokenizer_type: sentencepiece or huggingface; None lets the
      files tell.

  Raises:
    ValueError: one line; there is none, or it cannot be read.
  """
  shown = os.fspath(path)
  if kind == tokenizer_files.HUGGINGFACE and remote.is_repository(shown) and (
      not pathlib.Path(shown).exists()
  ):
    path = remote.tokenizer_snapshot(shown)
  return tokenizer_lib.load_tokenizer(path, kind)


__all__ = [
    "Description",
    "Loaded",
    "ModelConfig",
    "Tokenizer",
    "check",
    "check_export",
    "describe",
    "export",
    "load",
    "load_tokenizer",
    "recover_export",
]
