"""What stands in the smaller sections, and what they mean."""

import dataclasses

from tunix_progdistill import errors
from tunix_progdistill.schema import keys

TOKENIZERS = ("", "sentencepiece", "huggingface")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
  """Tunix's `tokenizer_config`.

  Attributes:
    tokenizer_path: file or folder of the tokenizer; empty for the teacher's
      own.
    tokenizer_type: sentencepiece or huggingface; empty to tell by the files.
    add_bos: put the piece that opens a text at the start of every row.
    add_eos: put the piece that ends a text at the end of every plain text,
      instead of an empty line.
  """

  tokenizer_path: str = ""
  tokenizer_type: str = ""
  add_bos: bool = True
  add_eos: bool = False

  def __post_init__(self):
    if self.tokenizer_type not in TOKENIZERS:
      raise errors.invalid(
          "tokenizer_type", "must be sentencepiece, huggingface or empty",
          self.tokenizer_type, "leave it empty to tell by the files",
      )
    if not self.add_bos:
      raise errors.invalid(
          "add_bos", "must be true", self.add_bos,
          "leave it out: models that know <bos> need it in every row",
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Targets:
  """What a good run reaches on held-out data; the report draws them.

  Attributes:
    kl_div_tau1: the KL from teacher to student at temperature 1 that the run
      is to fall below, >= 0; null draws none.
    correlation: the correlation of teacher's and student's logits that the run
      is to rise above, in [-1, 1]; null draws none.
  """

  kl_div_tau1: float | None = 0.1
  correlation: float | None = 0.95

  def __post_init__(self):
    if self.kl_div_tau1 is not None and self.kl_div_tau1 < 0:
      raise errors.invalid(
          "kl_div_tau1", "must be >= 0", self.kl_div_tau1, "try 0.1"
      )
    if self.correlation is not None and not -1 <= self.correlation <= 1:
      raise errors.invalid(
          "correlation", "must lie in [-1, 1]", self.correlation, "try 0.95"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
  """Tunix's mesh of devices.

  Attributes:
    shape: devices along each axis, such as "(1,2)".
    axis_names: a name for each axis, such as "('fsdp','tp')".
    allocation_policy: not read; Tunix's RL carves several meshes out of one
      pool of devices by it.
  """

  shape: str = ""
  axis_names: str = ""
  allocation_policy: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageKeys:
  """One stage, as `progressive.stages` has it in a YAML.

  Attributes:
    name: what logs and the report call the stage; empty for its number.
    freeze_fraction: this part of the layers, the first ones, is frozen, in
      [0, 1]; at least one layer trains, and while one is frozen so is the input
      embedding.
    trainable_layers: the last layers, this many, train, >= 1.
    trainable: regexes on parameter paths, such as layers/[45]; what matches
      trains, the rest is frozen.
    frozen: regexes likewise; what matches is frozen. Give at most one of these
      four; without any, everything trains.
    updates: length in optimizer updates, >= 1.
    epochs: length in passes over the training data, > 0; give one of the two.
      Only the last stage may leave both out, and then lasts as long as the run.
    learning_rate: rate, >= 0; null takes progressive.learning_rate.
    temperature: temperature of the soft loss, > 0; null takes
      progressive.temperature.
    alpha: weight of the soft loss, in [0, 1]; the hard loss has the rest; null
      takes progressive.alpha.
  """

  name: str = ""
  freeze_fraction: float | None = None
  trainable_layers: int | None = None
  trainable: tuple[str, ...] | None = None
  frozen: tuple[str, ...] | None = None
  updates: int | None = None
  epochs: float | None = None
  learning_rate: keys.Scalar | None = None
  temperature: keys.Scalar | None = None
  alpha: keys.Scalar | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgressiveKeys:
  """The section `progressive`, as a YAML has it.

  A rate, temperature or alpha is a number, or {start, end, shape, updates}: it
  then moves from start to end, with shape linear, cosine or exponential, over
  so many updates (without: over the stage or run that it is given to).

  Attributes:
    stages: the stages, in order; at least one.
    learning_rate: rate of the stages that have none, over the run; null takes
      the optimizer_config's.
    temperature: temperature of the stages that have none, over the run; null
      is 2.0.
    alpha: weight of the soft loss in the stages that have none, over the run;
      null is 0.5.
    updates_per_epoch: optimizer updates in an epoch, >= 1; null counts the
      training data.
    max_grad_norm: clip of the gradient by its global norm over all trainable
      parameters, > 0; null does not clip.
    log_kl_div_tau1: also log the KL at temperature 1 at every update; it costs
      one more pass over the logits.
    fused_head: fuse the output heads with the loss, so that no logits of the
      whole batch are ever made; a little slower, and far less memory. null does
      it on one device where they would take more than half of the memory.
    enabled: false trains everything in one stage, whatever the stages say.
  """

  stages: tuple[StageKeys, ...] = (StageKeys(),)
  learning_rate: keys.Scalar | None = None
  temperature: keys.Scalar | None = None
  alpha: keys.Scalar | None = None
  updates_per_epoch: int | None = None
  max_grad_norm: float | None = None
  log_kl_div_tau1: bool = False
  fused_head: bool | None = None
  enabled: bool = True
