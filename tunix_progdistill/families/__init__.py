"""All that is said of one model family, and how a model finds its own."""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import difflib
from typing import Any

from flax import nnx

from tunix_progdistill import errors
from tunix_progdistill.families import base
from tunix_progdistill.families import gemma
from tunix_progdistill.families import gemma3
from tunix_progdistill.families import gemma4
from tunix_progdistill.families import generic
from tunix_progdistill.families import heads
from tunix_progdistill.families import hf_config
from tunix_progdistill.families import llama3
from tunix_progdistill.families import qwen2
from tunix_progdistill.families import qwen3

Family = base.Family
Head = heads.Head

KNOWN = (
    gemma.FAMILY,
    gemma3.FAMILY,
    gemma4.FAMILY,
    llama3.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
)


def of(model: nnx.Module) -> Family:
  """The family of `model`: one of `KNOWN` by its class, else by discovery.

  Raises:
    ValueError: no known class, and not exactly one list of layers in it.
  """
  for family in KNOWN:
    if family.is_mine(model):
      return family
  return generic.discover(model)


def of_config(raw: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
  """The family of a `config.json`, and its text model's part of the file.

  Raises:
    ValueError: no family answers to its `model_type`.
  """
  outer = raw.get("model_type")
  named = {
      kind: family
      for family in KNOWN if family.hf is not None
      for kind in family.hf.model_types
  }
  if not isinstance(outer, str) or outer not in named:
    near = difflib.get_close_matches(str(outer), named, n=3, cutoff=0.5)
    raise hf_config.invalid(
        "model_type", "must be one of a family of Tunix", outer,
        f"valid are {', '.join(near or sorted(named))}",
    )
  text = hf_config.text_config(raw)
  if text is not raw and named.get(text["model_type"]) is not named[outer]:
    raise hf_config.invalid(
        "text_config.model_type", f"must be of the family of {outer}",
        text["model_type"], "download the file again",
    )
  return named[outer], text


@contextlib.contextmanager
def tracing(model: nnx.Module) -> Iterator[None]:
  """Mends what Tunix's own code of the family gets wrong, while it is traced.

  Hold it round every call of `model`'s forward pass. It restores what it
  touched; nothing stays patched.
  """
  for family in KNOWN:
    if family.is_mine(model):
      with family.mend(model):
        yield
      return
  yield


def check_pair(student: nnx.Module, teacher: nnx.Module) -> None:
  """Raises ValueError where two models cannot be traced in one run.

  The two must agree in vocabulary size and in RoPE theta, where both tell.
  """
  pairs = (
      ("vocabulary size", "give both the same vocabulary (cut or pad one)",
       base.vocabulary_size),
      ("rope_theta", "build the student with the teacher's rope_theta",
       base.rope_theta),
  )
  for what, remedy, read in pairs:
    ours, theirs = read(student), read(teacher)
    if ours is not None and theirs is not None and ours != theirs:
      raise errors.invalid(
          f"{what} of student and teacher", "must be the same",
          (ours, theirs), remedy,
      )
