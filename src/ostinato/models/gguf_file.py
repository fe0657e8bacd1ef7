"""Reads GGUF files: a direct parser of the header, and tensors as memory-mapped bytes.

The `gguf` package's reader wraps every string of the vocabulary in a NumPy view, which takes seconds for
a 49k vocabulary. This parser takes tens of milliseconds, and checks every count and offset against the
size of the file, so that a corrupt or truncated file gives a `ModelFormatError` and nothing else.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from ostinato.errors import ModelFormatError

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_ARRAY_DEPTH = 4
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = _SCALARS[4]
_U64 = _SCALARS[10]
_SHORTEST_KV = 8 + 4 + 1
_SHORTEST_TENSOR_INFO = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is row-major: the last dimension is contiguous in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class GGUFFile:
    """The metadata and the tensor directory of one GGUF file. Tensor data is read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        parser = _HeaderParser(path, self._map)
        self.metadata: dict[str, Any] = parser.metadata
        self.tensors: dict[str, GGUFTensor] = parser.tensors

    def data(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """The tensor's bytes as `[rows, bytes per row]`, mapped from the file (no copy)."""
        rows = math.prod(tensor.shape[:-1])
        flat = np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
        return flat.reshape(rows, tensor.nbytes // rows)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ModelFormatError(f"{path} is empty. Download it again.")
            # Copy-on-write rather than read-only: torch warns about arrays that cannot be written.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error.strerror or error}.") from error


class _HeaderParser:
    """Walks the header once. `_at` never passes the end of the file: `_take` checks before each read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0
        self._what = "the header"
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        tensor_count, kv_count = self._read_preamble()
        for index in range(kv_count):
            self._what = f"metadata entry {index}"
            key = self._read_string()
            self._what = f"metadata key {key!r}"
            if key in self.metadata:
                raise self._corrupt("the key occurs twice")
            self.metadata[key] = self._read_value(self._read_u32(), depth=0)
        self._read_tensor_directory(tensor_count)

    def _corrupt(self, why: str) -> ModelFormatError:
        return ModelFormatError(
            f"{self._path} is not a sound GGUF file: in {self._what}, {why}. Download or convert it again."
        )

    def _take(self, count: int) -> int:
        """Moves past `count` bytes and returns where they start."""
        start = self._at
        if count > self._size - start:
            raise self._corrupt(
                f"{count} bytes are needed at offset {start}, but the file ends at {self._size} (truncated?)"
            )
        self._at = start + count
        return start

    def _read_preamble(self) -> tuple[int, int]:
        magic = self._data[:4]
        if magic != _MAGIC:
            raise ModelFormatError(
                f"{self._path} is not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}."
            )
        self._take(4)
        version = self._read_u32()
        if version not in (2, 3):
            if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
                raise ModelFormatError(
                    f"{self._path} is a big-endian GGUF file; convert it to little-endian."
                )
            raise ModelFormatError(
                f"{self._path} has GGUF version {version}; versions 2 and 3 are supported. Convert it again."
            )
        tensor_count, kv_count = self._read_u64(), self._read_u64()
        self._check_count(tensor_count, _SHORTEST_TENSOR_INFO, "tensors")
        self._check_count(kv_count, _SHORTEST_KV, "metadata entries")
        return tensor_count, kv_count

    def _check_count(self, count: int, least_bytes: int, noun: str) -> None:
        if count * least_bytes > self._size - self._at:
            raise self._corrupt(f"{count} {noun} are announced, more than the rest of the file can hold")

    def _read_u32(self) -> int:
        return _U32.unpack_from(self._data, self._take(4))[0]

    def _read_u64(self) -> int:
        return _U64.unpack_from(self._data, self._take(8))[0]

    def _read_string(self) -> str:
        length = self._read_u64()
        start = self._take(length)
        try:
            return str(self._data[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self._corrupt(f"the string at offset {start} is not UTF-8") from error

    def _read_value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._read_string()
        if kind == _ARRAY:
            return self._read_array(depth + 1)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self._corrupt(f"value type {kind} does not exist")
        return scalar.unpack_from(self._data, self._take(scalar.size))[0]

    def _read_array(self, depth: int) -> list[Any]:
        if depth > _MAX_ARRAY_DEPTH:
            raise self._corrupt("arrays are nested too deeply")
        kind, count = self._read_u32(), self._read_u64()
        if kind == _STRING:
            self._check_count(count, 8, "strings")
            return self._read_strings(count)
        if kind == _ARRAY:
            self._check_count(count, 12, "arrays")
            return [self._read_array(depth + 1) for _ in range(count)]
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self._corrupt(f"array element type {kind} does not exist")
        self._check_count(count, scalar.size, "array elements")
        start = self._take(count * scalar.size)
        dtype = np.dtype(scalar.format.replace("?", "B"))
        values = np.frombuffer(self._data, dtype=dtype, count=count, offset=start).tolist()
        return [bool(value) for value in values] if kind == 7 else values

    def _read_strings(self, count: int) -> list[str]:
        # The vocabulary and its merges come through here, so the loop is kept free of method calls.
        data, size, unpack, at = self._data, self._size, _U64.unpack_from, self._at
        strings: list[str] = []
        try:
            for _ in range(count):
                end = at + 8 + unpack(data, at)[0]
                if end > size:
                    raise self._corrupt(
                        f"the string at offset {at} ends past the end of the file (truncated?)"
                    )
                strings.append(str(data[at + 8 : end], "utf-8"))
                at = end
        except struct.error as error:
            raise self._corrupt(f"the file ends within the strings at offset {at} (truncated?)") from error
        except UnicodeDecodeError as error:
            raise self._corrupt(f"the string at offset {at} is not UTF-8") from error
        self._at = at
        return strings

    def _read_tensor_directory(self, count: int) -> None:
        entries: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]] = []
        for index in range(count):
            self._what = f"tensor entry {index}"
            entries.append(self._read_tensor_entry())
        self._what = "metadata key 'general.alignment'"
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._corrupt(f"{alignment!r} is not a power of two of at least 8")
        base = (self._at + alignment - 1) // alignment * alignment
        end_of_last, last = 0, ""
        for name, shape, kind, relative, nbytes in sorted(entries, key=lambda entry: entry[3]):
            self._what = f"tensor {name!r}"
            if name in self.tensors:
                raise self._corrupt("the name occurs twice")
            if relative % alignment:
                raise self._corrupt(f"its offset {relative} is not a multiple of the alignment {alignment}")
            if base + relative + nbytes > self._size:
                raise self._corrupt(
                    f"its data ends at byte {base + relative + nbytes}, "
                    f"but the file at {self._size} (truncated?)"
                )
            if relative < end_of_last:
                raise self._corrupt(f"its data overlaps that of tensor {last!r}")
            end_of_last, last = relative + nbytes, name
            self.tensors[name] = GGUFTensor(name, shape, kind, base + relative, nbytes)

    def _read_tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
        name = self._read_string()
        self._what = f"tensor {name!r}"
        dimensions = self._read_u32()
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._corrupt(f"it has {dimensions} dimensions instead of 1 to {_MAX_DIMENSIONS}")
        # GGUF lists the contiguous dimension first.
        shape = tuple(reversed([self._read_u64() for _ in range(dimensions)]))
        number, relative = self._read_u32(), self._read_u64()
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise self._corrupt(f"its type {number} is unknown to the installed gguf package") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape:
            raise self._corrupt(f"its shape {list(shape)} is empty")
        if shape[-1] % block:
            raise self._corrupt(f"its rows of {shape[-1]} are not whole {kind.name} blocks of {block}")
        return name, shape, kind, relative, math.prod(shape) // block * block_bytes
