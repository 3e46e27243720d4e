"""Teacher, student and tokenizer of a run."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import itertools
import math
from typing import Any

from absl import logging
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.utils import mesh as mesh_lib

from tunix_progdistill import errors
from tunix_progdistill import families
from tunix_progdistill import kernels
from tunix_progdistill import modules
from tunix_progdistill import schema
from tunix_progdistill import students
from tunix_progdistill import weights
from tunix_progdistill.families import causal_lm
from tunix_progdistill.families import remat
from tunix_progdistill.teachers import quantised as quantised_lib
from tunix_progdistill.weights import config as weights_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
  """What is distilled into what.

  Attributes:
    teacher: with its tokenizer.
    student: its `model` is what trains.
    tokenizer: of both.
    mesh: of devices, or None for one device.
    quantised: what quantising the teacher saves; None where it is not.
    quantised_kl_div: KL of the whole teacher to the quantised one, at
      temperature 1, in nats per token.
    whole_teacher: the teacher before it was quantised, until it was compared.
  """

  teacher: weights.Loaded
  student: weights.Loaded
  tokenizer: Any
  mesh: Any
  quantised: quantised_lib.Size | None = None
  quantised_kl_div: float | None = None
  whole_teacher: nnx.Module | None = None

  def compared(self, batches: Iterable[Any]) -> "Models":
    """Itself, with the cost of the teacher's quantisation taken down.

    Args:
      batches: of held-out data.
    """
    if self.whole_teacher is None:
      return self
    kl = kl_div(self.whole_teacher, self.teacher.model, batches)
    return dataclasses.replace(self, whole_teacher=None, quantised_kl_div=kl)

  def notes(self) -> list[str]:
    """What a reader of the numbers must know of the models."""
    notes = []
    full = getattr(self.tokenizer, "full_size", None)
    kept = len(self.tokenizer)
    if full is not None and full != kept:
      width = self.teacher.model_config.embed_dim
      notes.append(
          f"The teacher's vocabulary was cut from {full:,} to {kept:,} pieces "
          f"first, which took {(full - kept) * width:,} parameters of the "
          "embedding; sizes and ratios are of the cut model."
      )
    if (size := self.quantised) is not None:
      mb = lambda n: f"{n / 1e6:,.1f} MB"
      notes.append(
          f"The teacher's kernels are {size.kind}: {mb(size.kernel_bytes)}, "
          f"{size.kernel_ratio:.3f}x of their float32 bytes; with the "
          f"embedding ({mb(size.embedding_bytes)}, not quantised) the whole is "
          f"{mb(size.total_bytes)}, {size.total_ratio:.3f}x. KL of the "
          f"teacher to the quantised one: {self.quantised_kl_div:.5f} nats "
          "per token."
      )
    return notes

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


def kl_div(
    model: nnx.Module, other: nnx.Module, batches: Iterable[Any],
    most: int = 8,
) -> float:
  """KL(P_model || P_other) at temperature 1, a mean over the valid tokens.

  Args:
    model: a language model.
    other: another one, of the same vocabulary.
    batches: with input_tokens and input_mask.
    most: as many batches are enough.
  """
  views = [modules.evaluating(m) for m in (model, other)]

  def sums(model: Any, other: Any, inputs: Any) -> Any:
    logits = []
    for m in (model, other):
      with families.tracing(m):
        logits.append(causal_lm.forward(m, **inputs))
    where = causal_lm.next_token_labels(**inputs) >= 0
    values = kernels.chunked.forward_kl(logits[1], logits[0], where=where)
    return kernels.reduce.masked_sum(values, where), jnp.sum(where)

  compiled: Any = nnx.jit(sums)
  total = count = 0.0
  for batch in itertools.islice(batches, most):
    part = compiled(*views, {
        k: batch[k] for k in ("input_tokens", "input_mask", "loss_mask")
        if k in batch
    })
    total, count = total + float(part[0]), count + float(part[1])
  return total / max(count, 1.0)


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
  whole = _weights_alone(own)
  if whole == _weights_alone(other):
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
  if own.lora_config:
    model = students.add_lora(
        model, own.lora_config, seed=own.rng_seed,
        field="model_config.lora_config",
    )
  student = dataclasses.replace(
      source, model=model,
      model_config=getattr(model, "config", source.model_config),
  )
  tokenizer = teacher.tokenizer
  if (path := config.tokenizer_folder()) is not None:
    tokenizer = weights.load_tokenizer(
        path, config.tokenizer_config.tokenizer_type or None
    )
  size, unquantised = None, None
  if other.quantization is not None:
    unquantised = teacher.model
    made, size = quantised_lib.quantise(unquantised, other.quantization)
    teacher = dataclasses.replace(teacher, model=made)
  return Models(
      teacher=teacher, student=student, tokenizer=tokenizer, mesh=mesh,
      quantised=size, whole_teacher=unquantised,
  )


def _weights_alone(config: weights.ModelConfig) -> weights.ModelConfig:
  """The config without what is made of the weights once they are loaded."""
  return dataclasses.replace(
      config, layers=None, lora_config=None, quantization=None
  )
