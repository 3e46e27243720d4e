"""Reads a GGUF file: metadata and, still quantised, tensors.

`gguf.GGUFReader` would do the same, but takes 20 seconds for the three arrays
of 262,144 entries that Gemma's tokenizer has; this takes less than one. The
layout, all little-endian:

    magic "GGUF", version u32, number of tensors u64, number of fields u64
    field:   key string, type u32, value
    tensor:  name string, rank u32, dimensions u64 (fastest first), type u32,
             offset u64
    padding to `general.alignment` (32), then the tensors' data

A string is its length u64 and UTF-8; an array is its type u32, its length u64
and its values.
"""

import importlib
import math
import mmap
import os
import pathlib
from typing import Any

import numpy as np

from tunix_progdistill import errors

_STRING, _ARRAY = 8, 9
_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_VERSIONS = (2, 3)
_AGAIN = "download the file, or install its package, again"


def library(field: str) -> Any:
  """The package `gguf`, which knows how tensors are quantised.

  Raises:
    ValueError: it is not installed.
  """
  try:
    return importlib.import_module("gguf")
  except ModuleNotFoundError as e:
    raise errors.invalid(
        field, "must not be a GGUF file where the package gguf is missing",
        e.name, "pip install 'tunix-progdistill[gguf]'",
    ) from e


class _Cursor:
  """A position in the file that moves on with every value read."""

  def __init__(self, data: Any, field: str):
    self._data = data
    self._field = field
    self.position = 0

  def take(self, size: int) -> bytes:
    start, self.position = self.position, self.position + size
    if self.position > len(self._data):
      raise errors.invalid(
          self._field,
          f"must be a whole GGUF file, of {self.position} bytes or more",
          len(self._data), _AGAIN,
      )
    return self._data[start : self.position]

  def array(self, dtype: str, size: int = 1) -> np.ndarray:
    return np.frombuffer(self.take(np.dtype(dtype).itemsize * size), dtype)

  def integer(self, dtype: str) -> int:
    return int(self.array(dtype)[0])

  def string(self) -> str:
    return self.take(self.integer("<u8")).decode("utf-8", errors="replace")

  def value(self, kind: int) -> Any:
    """A Python scalar, a string or a list of them."""
    if kind == _STRING:
      return self.string()
    if kind == _ARRAY:
      kind, size = self.integer("<u4"), self.integer("<u8")
      if kind in _DTYPES:
        return self.array(_DTYPES[kind], size).tolist()
      return [self.value(kind) for _ in range(size)]
    if kind not in _DTYPES:
      raise errors.invalid(
          self._field, "must hold metadata of types "
          f"{sorted([*_DTYPES, _STRING, _ARRAY])}", kind, _AGAIN,
      )
    return self.array(_DTYPES[kind])[0].item()


class GgufReader:
  """An open GGUF file.

  Attributes:
    fields: the metadata, by key.
    tensors: for each name the stored array, (out, packed in), and its type;
      `gguf.dequantize(*reader.tensors[name])` is the tensor, (out, in). The
      arrays are views of the file, read when used.
    shapes: for each name the shape of the tensor, (out, in).
  """

  def __init__(
      self, path: str | os.PathLike[str], field: str = "the GGUF file"
  ):
    """Reads the metadata.

    Args:
      path: the file.
      field: what messages call it.

    Raises:
      ValueError: this is no GGUF file of a known version, or a part is
        missing.
    """
    self._field = field
    gguf = library(field)
    data: Any = b""
    if pathlib.Path(path).stat().st_size:
      with open(path, "rb") as f:
        data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(data, field)
    magic, version = cursor.take(4), cursor.integer("<u4")
    if magic != b"GGUF" or version not in _VERSIONS:
      raise errors.invalid(
          field, f"must be a GGUF file of version {_VERSIONS}",
          f"magic {magic!r} and version {version}",
          "name a .gguf file; safetensors are of model_source local",
      )
    tensor_count, field_count = cursor.array("<u8", 2).tolist()
    self.fields: dict[str, Any] = {}
    for _ in range(field_count):
      key = cursor.string()
      self.fields[key] = cursor.value(cursor.integer("<u4"))
    entries = []
    for _ in range(tensor_count):
      name, rank = cursor.string(), cursor.integer("<u4")
      dimensions = tuple(cursor.array("<u8", rank).tolist())
      kind = cursor.integer("<u4")
      entries.append((name, dimensions[::-1], kind, cursor.integer("<u8")))
    align = self.fields.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    start = -(-cursor.position // align) * align
    self.tensors: dict[str, tuple[np.ndarray, Any]] = {}
    self.shapes: dict[str, tuple[int, ...]] = {}
    for name, shape, kind, offset in entries:
      self.shapes[name] = shape
      self.tensors[name] = self._tensor(
          data, name, shape, kind, start + offset
      )

  def _tensor(
      self, data: Any, name: str, shape: tuple[int, ...], kind: int, start: int
  ) -> tuple[np.ndarray, Any]:
    gguf = library(self._field)
    kinds = gguf.GGMLQuantizationType
    if kind not in set(kinds):
      raise errors.invalid(
          self._field, "must hold tensors of types that gguf knows",
          f"type {kind} of {name}", "pip install --upgrade gguf",
      )
    kind = kinds(kind)
    if kind == kinds.F32:
      dtype = "<f4"
    elif kind == kinds.F16:
      dtype = "<f2"
    else:
      dtype = "<u1"
      shape = gguf.quant_shape_to_byte_shape(shape, kind)
    size = math.prod(shape)
    end = start + size * np.dtype(dtype).itemsize
    if end > len(data):
      raise errors.invalid(
          self._field, f"must be a whole GGUF file, of {end} bytes or more "
          f"for the tensor {name}", len(data), _AGAIN,
      )
    array = np.frombuffer(data, dtype, size, start)
    return array.reshape(shape), kind
