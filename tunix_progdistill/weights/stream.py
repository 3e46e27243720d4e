"""Writes a safetensors file tensor by tensor, and reads one as raw bytes.

The library's own writer needs all tensors in memory at once. The layout:

    length of the header u64, header (JSON, padded with blanks to 8 bytes),
    then the tensors' bytes in the order of the header
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import json
import math
import os
import struct
from typing import Any

import numpy as np
import tqdm

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """One tensor of a header.

  Attributes:
    dtype: in the spelling of safetensors, such as BF16.
    shape: its shape.
    size_bytes: the length of its data.
    start: where its data begins in the file.
  """

  dtype: str
  shape: tuple[int, ...]
  size_bytes: int
  start: int = 0


def entry(dtype: str, shape: tuple[int, ...]) -> Entry:
  """An entry of a tensor that is yet to be written."""
  return Entry(
      dtype=dtype, shape=shape, size_bytes=math.prod(shape) * ITEM_BYTES[dtype]
  )


def write(
    path: str | os.PathLike[str],
    entries: Mapping[str, Entry],
    blocks: Callable[[str], Iterable[np.ndarray]],
    label: str,
) -> None:
  """Writes a file of which one block at a time is in memory.

  Args:
    path: the file.
    entries: dtype and shape of each tensor, in the order of the file.
    blocks: name -> the tensor's values, in any number of arrays.
    label: what the bar says.

  Raises:
    ValueError: the blocks of a tensor are not of its size.
  """
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for name, tensor in entries.items():
    start, end = end, end + tensor.size_bytes
    header[name] = {
        "dtype": tensor.dtype, "shape": list(tensor.shape),
        "data_offsets": [start, end],
    }
  text = json.dumps(header).encode("utf-8")
  text += b" " * (-len(text) % 8)
  with open(path, "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text)
    bar = tqdm.tqdm(entries.items(), desc=label, unit="tensor", disable=None)
    for name, tensor in bar:
      written = 0
      for block in blocks(name):
        raw = np.ascontiguousarray(block).tobytes()
        f.write(raw)
        written += len(raw)
      if written != tensor.size_bytes:
        raise ValueError(
            f"tensor {name} must have {tensor.size_bytes} bytes, got {written}"
        )


def read_header(path: str | os.PathLike[str]) -> dict[str, Entry]:
  """The entries of a file, in its order."""
  with open(path, "rb") as f:
    (length,) = struct.unpack("<Q", f.read(8))
    header = json.loads(f.read(length))
  header.pop("__metadata__", None)
  found = {}
  for name, value in sorted(
      header.items(), key=lambda item: item[1]["data_offsets"]
  ):
    start, end = value["data_offsets"]
    found[name] = Entry(
        dtype=value["dtype"], shape=tuple(value["shape"]),
        size_bytes=end - start, start=8 + length + start,
    )
  return found
