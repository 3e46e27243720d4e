"""Models that are downloaded: from the hub, from Kaggle, from a bucket.

From the hub come config.json, safetensors and the tokenizer's files, which are
then read as a local folder. Kaggle and gcs go through Tunix's `AutoModel`,
which reads Google's own checkpoints of Gemma there and nothing else.
"""

import difflib
import importlib
import os
import pathlib
import re
from typing import Any

from absl import logging
from flax import nnx
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
from tunix.models import automodel
from tunix.models import naming

from tunix_progdistill import errors
from tunix_progdistill import families
from tunix_progdistill.weights import cache
from tunix_progdistill.weights import config as config_lib
from tunix_progdistill.weights import loaded as loaded_lib
from tunix_progdistill.weights import local
from tunix_progdistill.weights import tokenizer
from tunix_progdistill.weights import tokenizer_files

# What `AutoModel` reads from where, by Tunix's model_family.
_READS = {
    "kaggle": ("gemma", "gemma1p1", "gemma2"),
    "gcs": ("gemma3", "gemma4"),
}
_CREDENTIALS = ("KAGGLE_USERNAME", "KAGGLE_KEY")
_CATEGORIES = ("gemma", "gemma3", "gemma4", "llama3", "qwen2", "qwen3")
_SMALL = (
    "config.json", "generation_config.json", "model.safetensors.index.json",
    *tokenizer_files.FILES,
)
_WEIGHTS = "*.safetensors"
# Folders of a repository hold the same weights in other forms.
_IGNORED = ("*/*", "consolidated*")
_REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"


def _named_configs() -> list[str]:
  """The names of all of Tunix's model configs, such as gemma3_270m."""
  names = []
  for category in _CATEGORIES:
    module = importlib.import_module(f"tunix.models.{category}.model")
    names += [
        name for name, value in vars(module.ModelConfig).items()
        if isinstance(value, classmethod) and not name.startswith("_")
    ]
  return names


def _unknown(name: str, field: str, remedy: str) -> ValueError:
  plain = name.split("/")[-1].lower().replace("-", "_").replace(".", "p")
  names = _named_configs()
  near = difflib.get_close_matches(plain, names, n=4, cutoff=0.5)
  shown = ", ".join(near or names[:6])
  return errors.invalid(
      field, "must be the name of a model that Tunix knows", name,
      f"{remedy} (names are such as {shown})",
  )


def _naming(name: str, field: str, remedy: str) -> naming.ModelNaming:
  """What Tunix says of a name.

  Raises:
    ValueError: it does not know it.
  """
  try:
    return naming.ModelNaming(model_id=name)
  except ValueError:
    raise _unknown(name, field, remedy) from None


def _tunix_config(found: naming.ModelNaming) -> Any | None:
  """Tunix's config of this very name, or None."""
  module = importlib.import_module(
      f"tunix.models.{found.model_config_category}.model"
  )
  make = getattr(module.ModelConfig, str(found.model_config_id), None)
  return None if make is None else make()


# -- before any download


def check(config: config_lib.ModelConfig, field: str) -> None:
  """Refuses what cannot work, without a connection.

  Raises:
    ValueError: one line.
  """
  if config.model_source == "huggingface":
    _check_hub(config, field)
    return
  source = config.model_source
  key = "model_id" if config.model_id else "model_name"
  name = config.model_id or config.model_name
  remedy = "write the model's name"
  found = _naming(name, f"{field}.{key}", remedy)
  _check_names(config, found, field)
  family = str(found.model_family)
  if family not in _READS[source]:
    other = next((s for s, f in _READS.items() if family in f), None)
    works = f"huggingface{f', {other}' if other else ''}, local"
    raise errors.invalid(
        f"{field}.model_source", f"must be one of {works} for {name}, for "
        f"Tunix reads {', '.join(_READS[source])} alone from {source}", source,
        "write model_source: huggingface",
    )
  if _tunix_config(found) is None:
    raise _unknown(name, f"{field}.{key}", remedy)
  if not config.model_path:
    example = (
        "google/gemma-2/flax/gemma2-2b-it" if source == "kaggle"
        else "gs://gemma-data/checkpoints/gemma3-270m-pt"
    )
    raise errors.invalid(
        f"{field}.model_path", f"must be set for model_source {source}",
        config.model_path, f"write a path such as {example}",
    )
  if config.vocabulary_size is not None:
    raise errors.invalid(
        f"{field}.vocabulary_size", f"must be null for model_source {source}, "
        "for only a folder of safetensors is cut", config.vocabulary_size,
        "leave it out, or take the model from huggingface",
    )
  absent = [n for n in _CREDENTIALS if not os.environ.get(n)]
  if source == "kaggle" and absent:
    raise errors.invalid(
        f"{field}.model_source", "must not be kaggle where the environment "
        f"has no {' and no '.join(absent)}", source,
        "set them as kaggle.com/settings gives them",
    )


def _check_names(
    config: config_lib.ModelConfig, found: naming.ModelNaming, field: str
) -> None:
  """`model_name` and `model_id` must be of one family where both are given."""
  if not (config.model_name and config.model_id):
    return
  named = _naming(
      config.model_name, f"{field}.model_name", "leave it empty"
  )
  if named.model_family != found.model_family:
    raise errors.invalid(
        f"{field}.model_name", f"must be of the family of {config.model_id}",
        config.model_name, "leave it empty",
    )


def _check_hub(config: config_lib.ModelConfig, field: str) -> None:
  if not re.fullmatch(_REPOSITORY, config.model_id):
    raise errors.invalid(
        f"{field}.model_id", "must be a repository on the hub, owner/name",
        config.model_id, "write e.g. google/gemma-3-270m",
    )
  try:
    found = naming.ModelNaming(model_id=config.model_id)
  except ValueError:
    found = None  # config.json tells
  if found is not None:
    _check_names(config, found, field)
  elif config.model_name:
    _naming(
        config.model_name, f"{field}.model_name",
        "leave it empty, for the repository's config.json tells",
    )
  if config.vocabulary_size is not None and found is not None and not str(
      found.model_family
  ).startswith("gemma"):
    raise errors.invalid(
        f"{field}.vocabulary_size", "must be null for a tokenizer that is no "
        "SentencePiece model (the merges of a byte-level BPE need every "
        "piece)", config.vocabulary_size, "leave it out",
    )


def describe(config: config_lib.ModelConfig) -> loaded_lib.Description:
  """What the name tells; None for what only a download could."""
  try:
    found = naming.ModelNaming(model_id=config.model_id or config.model_name)
  except ValueError:
    return loaded_lib.Description()
  family = found.model_config_category
  known = None if config.model_source == "huggingface" else _tunix_config(found)
  if known is None:
    return loaded_lib.Description(family=family)
  return loaded_lib.Description(
      family=family, vocab_size=known.num_embed, num_layers=known.num_layers,
      embed_dim=known.embed_dim,
  )


# -- the hub


def snapshot(
    config: config_lib.ModelConfig, field: str = "model_config"
) -> pathlib.Path:
  """The folder of a repository's config, safetensors and tokenizer.

  The small files come first, so that a model that cannot be read is refused
  before its weights are fetched. No pickled file and no code is fetched.

  Raises:
    ValueError: one line; the repository is gated, missing or out of reach, or
      its model cannot be read.
  """
  place = None
  if config.model_download_path:
    place = pathlib.Path(config.model_download_path).expanduser() / (
        config.model_id.replace("/", "--")
    )
  logging.info("Fetching %s from the hub", config.model_id)
  folder = _download(config.model_id, _SMALL, place, field)
  local.describe(folder, f"{field}.model_id")
  tokenizer_files.find(folder, None, f"{field}.model_id")
  return _download(config.model_id, (*_SMALL, _WEIGHTS), place, field)


def tokenizer_snapshot(
    repository: str, field: str = tokenizer_files.FIELD
) -> pathlib.Path:
  """The folder of a repository's tokenizer alone.

  Raises:
    ValueError: one line, as `snapshot`.
  """
  # config.json tells how many ids the model knows.
  patterns = ("config.json", *tokenizer_files.FILES)
  return _download(repository, patterns, None, field)


def is_repository(name: str) -> bool:
  """Whether `name` could be a repository on the hub: owner/name."""
  return re.fullmatch(_REPOSITORY, name) is not None


def _download(
    repository: str, patterns: tuple[str, ...], place: pathlib.Path | None,
    field: str,
) -> pathlib.Path:
  hub = huggingface_hub.errors
  name = field if "tokenizer" in field else f"{field}.model_id"
  where = f"https://huggingface.co/{repository}"
  try:
    return pathlib.Path(
        huggingface_hub.snapshot_download(
            repository, allow_patterns=list(patterns),
            ignore_patterns=list(_IGNORED), local_dir=place,
        )
    )
  except hub.GatedRepoError as e:
    raise errors.invalid(
        name, "must be a repository that you may read", repository,
        f"accept its terms at {where} and set HF_TOKEN in the environment",
    ) from e
  except (hub.RepositoryNotFoundError, hub.HFValidationError) as e:
    raise errors.invalid(
        name, "must be a repository on the hub", repository,
        f"look at {where}; a private one needs HF_TOKEN in the environment",
    ) from e
  except OSError as e:
    reason = " ".join(str(e).split())[:160]
    raise errors.invalid(
        name, f"must be within reach ({type(e).__name__}: {reason})",
        repository, "check the network and HF_HUB_OFFLINE, or download it "
        "elsewhere and give the folder as model_source local",
    ) from e


# -- Kaggle and gcs


def load(
    config: config_lib.ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    field: str = "model_config",
) -> loaded_lib.Loaded:
  """A Gemma from Kaggle or from a bucket, by Tunix's `AutoModel`.

  Args:
    config: which model.
    mesh: of devices; None for one of the first device.
    field: what messages call the config.

  Raises:
    ValueError: one line; the checkpoint cannot be read, or does not fill every
      parameter.
  """
  check(config, field)
  if mesh is None:
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")
    )
  name = config.model_id or config.model_name
  found = naming.ModelNaming(model_id=name)
  dtype = jnp.dtype(config.dtype)
  downloads = config.model_download_path or str(cache.root() / "kaggle")
  converted = config.intermediate_ckpt_dir or str(
      cache.root() / f"kaggle-{found.model_config_id}"
  )
  try:
    model, path = automodel.AutoModel.from_pretrained(
        name, mesh,
        model_source=automodel.ModelSource(config.model_source),
        model_path=config.model_path,
        model_download_path=downloads,
        intermediate_ckpt_dir=converted,
        rng_seed=config.rng_seed,
        use_flash_attention=config.use_flash_attention,
        flash_attention_block_size=config.flash_attention_block_size,
        dtype=dtype,
        param_dtype=dtype,
    )
  except (OSError, ImportError, ValueError, KeyError) as e:
    reason = " ".join(str(e).split())[:160]
    raise errors.invalid(
        f"{field}.model_path", "must be a checkpoint within reach "
        f"({type(e).__name__}: {reason})", config.model_path,
        "check the path, the network and your credentials, or take the model "
        "from huggingface",
    ) from e
  _check_filled(model, f"{field}.model_path", config.model_path)
  _cast(model, dtype)
  family = families.of(model)
  tunix_config: Any = model.config
  side = family.hf
  assert side is not None, family.name
  hf_config = side.config_to_hf(tunix_config)
  text = tokenizer.load_tokenizer(
      _tokenizer_path(config, found, path), "sentencepiece",
      vocab_size=tunix_config.num_embed, field=f"{field}.model_path",
  )
  hf_config |= {
      "bos_token_id": text.bos_id, "eos_token_id": text.eos_id,
      "pad_token_id": text.pad_id,
  }
  return loaded_lib.Loaded(
      model=model, family=family, model_config=tunix_config,
      hf_config=hf_config, tokenizer=text, folder=None,
  )


def _tokenizer_path(
    config: config_lib.ModelConfig, found: naming.ModelNaming, path: str | None
) -> str:
  """Where Google keeps the tokenizer of a model."""
  if config.model_source == "kaggle":
    return os.path.join(path or "", tokenizer_files.MODEL_FILE)
  category = found.model_config_category
  module = importlib.import_module(f"tunix.models.{category}.params")
  return getattr(module, f"{str(category).upper()}_TOKENIZER")


def _check_filled(model: nnx.Module, field: str, path: str) -> None:
  """A parameter that was not loaded is a shape and no array."""
  state = nnx.to_flat_state(nnx.state(model, nnx.Param))
  empty = [
      "/".join(map(str, where)) for where, variable in state
      if not isinstance(variable.get_value(), jax.Array)
  ]
  if empty:
    raise errors.invalid(
        field, "must be a checkpoint with every parameter of its model, but "
        f"{len(empty)} such as {empty[0]} are not filled", path,
        "check that the path is that of the model that is named",
    )


def _cast(model: nnx.Module, dtype: Any) -> None:
  state = nnx.state(model, nnx.Param)
  nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), state))
