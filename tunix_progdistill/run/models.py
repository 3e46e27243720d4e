"""Teacher, student and tokenizer of a run."""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import math
from typing import Any

from absl import logging
from flax import nnx
import jax
import numpy as np
from tunix.utils import mesh as mesh_lib

from tunix_progdistill import errors
from tunix_progdistill import modules
from tunix_progdistill import schema
from tunix_progdistill import students
from tunix_progdistill import weights
from tunix_progdistill.families import remat
from tunix_progdistill.weights import config as weights_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
  """What is distilled into what.

  Attributes:
    teacher: with its tokenizer.
    student: its `model` is what trains.
    tokenizer: of both.
    mesh: of devices, or None for one device.
  """

  teacher: weights.Loaded
  student: weights.Loaded
  tokenizer: Any
  mesh: Any

  def notes(self) -> list[str]:
    """What a reader of the numbers must know of the models."""
    full = getattr(self.tokenizer, "full_size", None)
    kept = len(self.tokenizer)
    if full is None or full == kept:
      return []
    width = self.teacher.model_config.embed_dim
    return [
        f"The teacher's vocabulary was cut from {full:,} to {kept:,} pieces "
        f"first, which took {(full - kept) * width:,} parameters of the "
        "embedding; sizes and ratios are of the cut model."
    ]

  def on_mesh(self) -> Any:
    """Context manager that the models are trained in."""
    return contextlib.nullcontext() if self.mesh is None else self.mesh


def digest(model: nnx.Module, entries: int = 4096) -> str:
  """A hash of a model: every parameter's name and shape, and some of its bits.

  Args:
    model: the model.
    entries: of each parameter, evenly spaced; a parameter that differs only
      between them is not told apart.
  """
  found = hashlib.sha256()
  for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    value = variable.get_value()
    step = max(1, value.size // entries)
    sample = np.asarray(value.reshape(-1)[::step])
    found.update(f"{modules.path_name(path)} {value.shape}".encode())
    found.update(np.ascontiguousarray(sample).tobytes())
  return found.hexdigest()


def make_mesh(config: Mapping[str, Any] | None, field: str) -> Any:
  """The mesh of devices that a `mesh` section asks for; None for none.

  Raises:
    ValueError: it asks for devices that are not there.
  """
  if not config:
    return None
  shape, names = weights_config.mesh_axes(config)
  wanted, there = math.prod(shape), jax.device_count()
  if wanted > there:
    raise errors.invalid(
        f"{field}.mesh.shape", f"must ask for at most {there} devices, all "
        "that there are", shape, f'write "({there},)", or null for one device',
    )
  return mesh_lib.create_mesh(shape, names, jax.devices()[:wanted])


def load(
    config: schema.RunConfig, texts: Sequence[str] | None, mesh: Any
) -> Models:
  """Loads the teacher, and makes or loads the student.

  A student of some of the teacher's layers is made of the teacher that is
  loaded already.

  Args:
    config: of the run.
    texts: training texts, where a vocabulary is to be cut.
    mesh: of devices, or None.

  Raises:
    ValueError: a file is not what it should be, or the two do not fit.
  """
  own, other = config.model_config, config.teacher()
  logging.info("Loading the teacher.")
  given = config.teacher_model_config is not None
  teacher = weights.load(
      other, mesh=mesh, texts=texts,
      field="teacher_model_config" if given else "model_config",
  )
  whole = dataclasses.replace(own, layers=None)
  if whole == dataclasses.replace(other, layers=None):
    source = teacher
  else:
    logging.info("Loading the student.")
    source = weights.load(whole, mesh=mesh, texts=texts)
  if own.layers is not None:
    model = students.from_layers(source.model, own.layers)
  elif source is teacher:
    model = nnx.clone(teacher.model)
  else:
    model = source.model
  if own.remat_config != "none":
    remat.set_remat(model, own.remat_config)
  student = dataclasses.replace(
      source, model=model,
      model_config=getattr(model, "config", source.model_config),
  )
  tokenizer = teacher.tokenizer
  if (path := config.tokenizer_folder()) is not None:
    tokenizer = weights.load_tokenizer(
        path, config.tokenizer_config.tokenizer_type or None
    )
  return Models(
      teacher=teacher, student=student, tokenizer=tokenizer, mesh=mesh
  )
