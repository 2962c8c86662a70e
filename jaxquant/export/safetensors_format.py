"""The safetensors format: an 8-byte length, a JSON header, and the arrays' bytes without gaps.

Read and written here, so that a file is checked as strictly as GGUF files are and is written one array at a time.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxquant._core.errors import refuse
from jaxquant._core.files import replacement

DTYPES = {
    name: np.dtype(dtype).newbyteorder("<") if np.dtype(dtype).kind != "V" else np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "F16": np.float16,
        "BF16": ml_dtypes.bfloat16, "U32": np.uint32, "I32": np.int32, "F32": np.float32, "U64": np.uint64,
        "I64": np.int64, "F64": np.float64, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
        "C64": np.complex64,
    }.items()
}  # fmt: skip
NAMES = {dtype.name: name for name, dtype in DTYPES.items()}
MOST_HEADER = 100_000_000  # the format's own limit


def write(path: str | os.PathLike[str], arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Writes beside `path`, syncs and renames. arrays: of NumPy or JAX, of a dtype of the format."""
    # The widest first, as other writers have it: every array is then aligned.
    order = sorted(arrays, key=lambda name: (-np.dtype(arrays[name].dtype).itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + arrays[name].size * np.dtype(arrays[name].dtype).itemsize
        dtype = NAMES[np.dtype(arrays[name].dtype).name]
        header[name] = {"dtype": dtype, "shape": [int(n) for n in arrays[name].shape], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER:
        got = f"{len(text)} bytes"
        raise refuse("save_safetensors", "tree", f"a header of at most {MOST_HEADER} bytes", got, "use several files")
    with replacement(os.path.realpath(path)) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            value = np.asarray(arrays[name])
            little = value.astype(DTYPES[NAMES[value.dtype.name]], copy=False)
            file.write(memoryview(np.ascontiguousarray(little).reshape(-1).view(np.uint8)))


def read(operation: str, path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays, as read-only views of the mapped file, and the metadata. ValueError where anything is wrong."""
    path = os.fspath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise refuse(operation, path, "a file", "something else", "give the path of a safetensors file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    header, start = _header(operation, path, data)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(operation, path, "__metadata__ of strings", "other values")
    rest = np.frombuffer(data, np.uint8)[start:]
    arrays, ends = {}, []
    for name, entry in header.items():
        arrays[name], extent = _array(operation, f"{path}: {name!r}", entry, rest)
        ends.append(extent)
    position = 0
    for begin, end in sorted(ends):
        if begin != position:
            raise _damaged(operation, path, f"an array that begins at byte {position}", f"one at {begin}")
        position = end
    if position != len(rest):
        raise _damaged(operation, path, f"{position} bytes of arrays", str(len(rest)))
    return arrays, metadata


def _header(operation: str, path: str, data: Any) -> tuple[dict[str, Any], int]:
    if len(data) < 8:
        raise _damaged(operation, path, "a safetensors file", f"{len(data)} bytes")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(MOST_HEADER, len(data) - 8):
        got = f"one of {length} bytes in a file of {len(data)}"
        raise _damaged(operation, path, "a safetensors header", got)
    try:
        header = json.loads(data[8 : 8 + length].decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise _damaged(operation, path, "a header in JSON", f"{type(error).__name__}") from None
    if not isinstance(header, dict):
        raise _damaged(operation, path, "a header that maps names", type(header).__name__)
    return header, 8 + length


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def _array(operation: str, what: str, entry: Any, rest: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:  # type: ignore[arg-type]
        raise _damaged(operation, what, "dtype, shape and data_offsets", repr(entry)[:100])
    assert isinstance(shape, list) and isinstance(offsets, list)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise refuse(operation, what, f"one of {', '.join(DTYPES)}", repr(dtype)[:100], "convert the array")
    begin, end = offsets
    wanted = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != wanted or end > len(rest) or len(shape) > 64:
        expected = f"{wanted} bytes for {dtype} of shape {shape} within {len(rest)}"
        raise _damaged(operation, what, expected, f"bytes {begin} to {end}")
    return rest[begin:end].view(DTYPES[dtype]).reshape(shape), (begin, end)


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**63 for n in values)


def _damaged(operation: str, what: str, expected: str, got: str) -> Exception:
    return refuse(operation, what, expected, got, "the file is damaged or of another kind")
