"""From installed packages to a teacher and windows of text.

    options = prepare.Options()
    prepared = prepare.prepare(options)

The first call converts the weights (about a quarter of a minute on two quiet
cores, 430 MB in the cache); later ones load them.
"""

import dataclasses
import hashlib
import pathlib
import tempfile

from absl import logging
import cache
import numpy as np
import teacher
import text as text_lib
from tunix.models.gemma3 import model as gemma3
import vocabulary
import weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """What to prepare.

  Attributes:
    text: "news" (BBC articles) or "reviews" (IMDB).
    vocabulary_size: K, pieces to keep of the teacher's 262,144.
    window_tokens: T, length of a window with its <bos>.
    train_windows: Training windows to cut, at most.
    held_out_windows: Held-out windows to cut, at most.
    held_out: Fraction of documents held out.
    max_perplexity: The teacher's, on the held-out windows; above it the
      conversion counts as wrong.

  Raises:
    ValueError: If a field is out of range.
  """

  text: str = "news"
  vocabulary_size: int = 8192
  window_tokens: int = 128
  train_windows: int = 320
  held_out_windows: int = 32
  held_out: float = 0.1
  max_perplexity: float = teacher.MAX_PERPLEXITY

  def __post_init__(self):
    for name, low in (
        ("vocabulary_size", 1),
        ("window_tokens", 2),
        ("train_windows", 1),
        ("held_out_windows", 1),
    ):
      value = getattr(self, name)
      if value < low:
        raise ValueError(f"Options.{name} must be >= {low}, got {value}.")
    if not 0.0 < self.held_out < 1.0:
      raise ValueError(
          f"Options.held_out must be in (0, 1), got {self.held_out}."
      )
    if not self.max_perplexity > 1.0:
      raise ValueError(
          f"Options.max_perplexity must be > 1, got {self.max_perplexity}."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
  """What training starts from.

  Attributes:
    model: The teacher, float32, its vocabulary cut to K pieces.
    config: Its config; `config.num_embed` is K.
    tokenizer: Text <-> ids of the K pieces.
    train: Training windows, at most `train_windows`.
    held_out: Held-out windows, of documents that are not in `train`.
    unigram_log_probs: float32 [K], of all training documents; see
      `unigram_log_probs`. A student worth its name is closer to the teacher.
    perplexity: The teacher's, on `held_out`.
    folder: The cached checkpoint.
  """

  model: gemma3.Gemma3
  config: gemma3.ModelConfig
  tokenizer: vocabulary.Tokenizer
  train: text_lib.Windows
  held_out: text_lib.Windows
  unigram_log_probs: np.ndarray
  perplexity: float
  folder: pathlib.Path


def unigram_log_probs(counts: np.ndarray) -> np.ndarray:
  """log p(piece), regardless of what stands before it.

  p(i) = (counts[i] + 1/2) / sum_j (counts[j] + 1/2), so that no piece is
  impossible and KL(teacher || unigram) is finite.

  Args:
    counts: int [K].

  Returns:
    float32 [K].
  """
  weight = counts.astype(np.float64) + 0.5
  return np.log(weight / weight.sum()).astype(np.float32)


def _convert(
    folder: pathlib.Path, documents: text_lib.Documents, size: int
) -> None:
  """Fills `folder` with the cut checkpoint, `kept.npy` and `counts.npy`."""
  with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
    logging.info("Reading the weights of %s", weights.PACKAGE)
    file = weights.GgufFile(weights.assemble(scratch))
    model = file.tokenizer()
    kept = vocabulary.choose_pieces(model, documents.train, size)
    tensors = file.tensors(kept)
  config = dataclasses.replace(file.config, vocab_size=len(kept))
  cut = vocabulary.cut_model(model, kept)
  weights.write_checkpoint(folder, tensors, config, cut)
  np.save(folder / "kept.npy", kept)
  full_counts = vocabulary.count_pieces(cut, documents.train)
  np.save(folder / "counts.npy", full_counts[kept])


def checkpoint(
    documents: text_lib.Documents, vocabulary_size: int
) -> pathlib.Path:
  """The teacher's checkpoint for this text, from the cache or made now.

  Args:
    documents: The training ones choose the vocabulary.
    vocabulary_size: K.

  Returns:
    A folder with model.safetensors, config.json, tokenizer.model, kept.npy
    (full ids) and counts.npy (of each kept piece in the training documents).

  Raises:
    ModuleNotFoundError: If the package of the weights is not installed.
    ValueError: If its file is not what it should be.
  """
  digest = hashlib.sha256()
  for text in documents.train:
    digest.update(hashlib.sha256(text.encode("utf-8")).digest())
  key: cache.Key = {
      "package": weights.PACKAGE,
      "package_version": weights.package_version(),
      "converter_version": weights.CONVERTER_VERSION,
      "vocabulary_size": vocabulary_size,
      "text_sha256": digest.hexdigest(),
  }
  return cache.get(
      "gemma3-270m",
      key,
      lambda folder: _convert(folder, documents, vocabulary_size),
  )


def prepare(options: Options) -> Prepared:
  """Reads the text, converts or finds the teacher, and checks it.

  Raises:
    ModuleNotFoundError: If a package is not installed; says which.
    ValueError: If the weights are not what they should be, or the teacher's
      perplexity is above the bound.
  """
  documents = text_lib.split(text_lib.read(options.text), options.held_out)
  folder = checkpoint(documents, options.vocabulary_size)
  tokenizer = vocabulary.Tokenizer(
      (folder / "tokenizer.model").read_bytes(), np.load(folder / "kept.npy")
  )
  train = text_lib.pack(
      documents.train, tokenizer, options.window_tokens, options.train_windows
  )
  held_out = text_lib.pack(
      documents.held_out,
      tokenizer,
      options.window_tokens,
      options.held_out_windows,
      first_id=len(train),
  )
  model, config = teacher.load(folder)
  perplexity = teacher.perplexity(model, held_out)
  logging.info("Teacher's perplexity on held-out text: %.1f", perplexity)
  teacher.check_perplexity(perplexity, options.max_perplexity)
  return Prepared(
      model=model,
      config=config,
      tokenizer=tokenizer,
      train=train,
      held_out=held_out,
      unigram_log_probs=unigram_log_probs(np.load(folder / "counts.npy")),
      perplexity=perplexity,
      folder=folder,
  )
