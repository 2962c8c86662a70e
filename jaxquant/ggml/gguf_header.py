"""Headers of GGUF files: metadata and tensor descriptions, read and written.

Little-endian: magic, version, tensor count, metadata count; per key its string, type and value; per tensor its name,
dimensions (the fastest first), type and offset. The data follows at the next multiple of the alignment.

Files are strangers' input: every count, length and product is checked against the bytes that are there before anything
is allocated or repeated, so that time and memory are bounded by the size of the file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxquant._core.errors import refuse
from jaxquant.ggml.formats import REMOVED, BlockFormat, by_type_id

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**24
MAX_DIMENSIONS = 4

# Tensor types without blocks that are no weight formats.
PLAIN = {24: ("I8", "<i1"), 25: ("I16", "<i2"), 26: ("I32", "<i4"), 27: ("I64", "<i8"), 28: ("F64", "<f8")}

_NUMBERS = {
    "uint8": (0, "<u1"), "int8": (1, "<i1"), "uint16": (2, "<u2"), "int16": (3, "<i2"), "uint32": (4, "<u4"),
    "int32": (5, "<i4"), "float32": (6, "<f4"), "bool": (7, "?"), "uint64": (10, "<u8"), "int64": (11, "<i8"),
    "float64": (12, "<f8"),
}  # fmt: skip
_NUMBER_OF_ID = {id: (name, np.dtype(dtype)) for name, (id, dtype) in _NUMBERS.items()}
_STRING, _ARRAY = 8, 9


class Metadata(dict[str, Any]):
    """The metadata of a file: Python scalars and strings, NumPy arrays, lists of strings.

    ``types`` names the stored type of each key ("uint32", "string", "float32[]", ...): a Python int does not tell
    uint32 from int64, and readers insist. ``copy()`` and ``|`` keep the types; keys without one get a default when
    they are saved (see `save_gguf`).
    """

    def __init__(self, values: Mapping[str, Any] | None = None, types: Mapping[str, str] | None = None):
        super().__init__(values or {})
        self.types = dict(getattr(values, "types", {}) if types is None else types)

    def copy(self) -> Metadata:
        return Metadata(self)

    def __or__(self, other: Mapping[str, Any]) -> Metadata:  # type: ignore[override]
        kept = {key: name for key, name in self.types.items() if key not in other}
        return Metadata({**self, **other}, {**kept, **getattr(other, "types", {})})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping) or self.keys() != other.keys():
            return False
        types = getattr(other, "types", self.types)
        return all(self.types.get(k) == types.get(k) and _same(value, other[k]) for k, value in self.items())

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return a == b or (a != a and b != b)  # a NaN equals itself here


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. shape: NumPy's order, the fastest last. nbytes: None where the type is not known."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    nbytes: int | None

    @property
    def format(self) -> BlockFormat | None:
        return by_type_id.get(self.type_id)

    @property
    def type_name(self) -> str:
        if self.format:
            return self.format.name
        return PLAIN[self.type_id][0] if self.type_id in PLAIN else REMOVED.get(self.type_id, f"type {self.type_id}")


@dataclass(frozen=True)
class Header:
    version: int
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]


def row_bytes(type_id: int, row_size: int) -> int | None:
    """Bytes of a row, or None for a type that is not known. ValueError where the row is no multiple of the block."""
    if type_id in PLAIN:
        return row_size * np.dtype(PLAIN[type_id][1]).itemsize
    format = by_type_id.get(type_id)
    return format.row_bytes(row_size) if format else None


class Cursor:
    """Takes numbers and strings from bytes, and refuses to pass their end."""

    def __init__(self, operation: str, path: str, data: Any, size: int):
        self.operation, self.path, self.data, self.size, self.position = operation, path, data, size, 0

    def refuse(self, what: str, expected: str, got: str, remedy: str) -> Exception:
        return refuse(self.operation, f"{self.path}: {what}", expected, got, remedy)

    @property
    def left(self) -> int:
        return self.size - self.position

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            raise self.refuse(what, f"{count} bytes", f"{self.left} before the end", "the file is truncated or damaged")
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, code: str, what: str) -> int:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, what: str, length: str = "Q") -> str:
        # Bytes that are no UTF-8 survive a round trip as surrogates.
        return self.take(self.number(length, what), what).decode("utf-8", "surrogateescape")

    def count(self, what: str, smallest: int) -> int:
        """A count of items that take at least `smallest` bytes each."""
        count = self.number("Q", what)
        if count * smallest > self.left:
            raise self.refuse(
                what, f"at most {self.left // smallest}, all that fits", f"{count}", "the file is truncated or damaged"
            )
        return count


def read(operation: str, path: str, data: Any, size: int) -> Header:
    """The header of a file of `size` bytes, of which `data[a:b]` gives bytes."""
    cursor = Cursor(operation, path, data, size)
    version = _read_version(cursor)
    tensor_count = cursor.count("tensor count", 8 + 4 + 4 + 8)
    key_count = cursor.count("metadata count", 8 + 4 + 1)
    metadata = Metadata()
    for _ in range(key_count):
        key = cursor.string("metadata key")
        if key in metadata:
            raise cursor.refuse(f"metadata key {key!r}", "one value", "two", "the file is damaged")
        metadata[key], metadata.types[key] = _read_value(cursor, f"metadata {key!r}")
    alignment = _alignment(cursor.refuse, metadata)
    described = [_read_tensor(cursor) for _ in range(tensor_count)]
    data_start = cursor.position + -cursor.position % alignment
    return Header(version, metadata, _place(cursor, described, data_start, alignment))


def _read_version(cursor: Cursor) -> int:
    magic = cursor.take(4, "magic")
    if magic != MAGIC:
        raise cursor.refuse("magic", f"{MAGIC!r}", f"{magic!r}", "give a GGUF file")
    version = cursor.number("I", "version")
    if version and version & 0xFFFF == 0:
        raise cursor.refuse(
            "byte order", "little-endian", "big-endian", "convert the file with gguf-convert-endian of the gguf package"
        )
    if version not in (2, 3):
        raise cursor.refuse("version", "2 or 3", f"{version}", "convert the model again with a current llama.cpp")
    return version


def _read_value(cursor: Cursor, what: str) -> tuple[Any, str]:
    type_id = cursor.number("I", what)
    if type_id in _NUMBER_OF_ID:
        name, dtype = _NUMBER_OF_ID[type_id]
        return _read_numbers(cursor, what, dtype, 1)[0].item(), name
    if type_id == _STRING:
        return cursor.string(what), "string"
    if type_id != _ARRAY:
        raise cursor.refuse(what, "a value type of 0 to 12", f"{type_id}", "the file is damaged or newer than GGUF 3")
    type_id = cursor.number("I", what)
    if type_id in _NUMBER_OF_ID:
        name, dtype = _NUMBER_OF_ID[type_id]
        return _read_numbers(cursor, what, dtype, cursor.count(what, dtype.itemsize)), name + "[]"
    if type_id == _STRING:
        return [cursor.string(what) for _ in range(cursor.count(what, 8))], "string[]"
    kind = "arrays" if type_id == _ARRAY else f"type {type_id}"
    raise cursor.refuse(what, "an array of numbers or strings", f"one of {kind}", "ggml reads no such files")


def _read_numbers(cursor: Cursor, what: str, dtype: np.dtype[Any], count: int) -> np.ndarray:
    data = cursor.take(count * dtype.itemsize, what)
    # Any byte but 0 is true; NumPy takes only 0 and 1.
    return np.frombuffer(data, np.uint8) != 0 if dtype.kind == "b" else np.frombuffer(data, dtype)


def _alignment(refuse: Any, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    whole = isinstance(alignment, int | np.integer) and not isinstance(alignment, bool)
    valid = whole and 0 < alignment <= MAX_ALIGNMENT
    if not valid or alignment & (alignment - 1):
        expected = f"a power of two of at most {MAX_ALIGNMENT}"
        raise refuse("metadata 'general.alignment'", expected, f"{alignment!r}", "correct it, or leave it out for 32")
    return int(alignment)


def _read_tensor(cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("tensor name")
    what = f"tensor {name!r}"
    rank = cursor.number("I", what)
    if rank > MAX_DIMENSIONS:
        raise cursor.refuse(what, f"at most {MAX_DIMENSIONS} dimensions", f"{rank}", "the file is damaged")
    shape = tuple(cursor.number("Q", what) for _ in range(rank))[::-1]
    return name, shape, cursor.number("I", what), cursor.number("Q", what)


def _place(cursor: Cursor, described: Sequence[Any], data_start: int, alignment: int) -> tuple[TensorInfo, ...]:
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_id, offset in described:
        what = f"tensor {name!r}"
        if name in tensors:
            raise cursor.refuse(what, "one description", "two", "the file is damaged")
        _check_shape(cursor.refuse, what, shape)
        try:
            row = row_bytes(type_id, shape[-1] if shape else 1)
        except ValueError as error:
            raise ValueError(f"{cursor.operation}: {cursor.path}: {what}: {error}") from None
        nbytes = None if row is None else math.prod(shape[:-1]) * row
        if offset % alignment:
            raise cursor.refuse(what, f"an offset that {alignment} divides", f"{offset}", "the file is damaged")
        start = data_start + offset
        if start + (nbytes or 0) > cursor.size:
            raise cursor.refuse(
                what, f"{nbytes or 0} bytes at byte {start}", f"a file of {cursor.size} bytes",
                "the file is truncated or damaged: download it again",
            )  # fmt: skip
        tensors[name] = TensorInfo(name, shape, type_id, start, nbytes)
    end, before = data_start, "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.start < end:
            raise cursor.refuse(
                f"tensor {tensor.name!r}", f"to begin after {before}", "an overlap", "the file is damaged"
            )
        end, before = tensor.start + (tensor.nbytes or 0), f"tensor {tensor.name!r}"
    return tuple(tensors.values())


def _check_shape(refuse: Any, what: str, shape: Sequence[int]) -> None:
    if len(shape) > MAX_DIMENSIONS:
        raise refuse(what, f"at most {MAX_DIMENSIONS} dimensions", f"{len(shape)}", "reshape it")
    if not all(shape) or math.prod(shape) >= 2**63:
        raise refuse(what, "between 1 and 2**63 values", f"shape {tuple(shape)}", "GGUF has no such tensors")


def build(
    path: str, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, tuple[int, ...]]]
) -> tuple[bytes, list[int], int]:
    """The header of a file with these tensors (name: type id, shape), where each begins, and the file's size."""

    def refuse_(what: str, expected: str, got: str, remedy: str) -> Exception:
        return refuse("save_gguf", f"{path}: {what}", expected, got, remedy)

    alignment = _alignment(refuse_, metadata)
    parts = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    types = getattr(metadata, "types", {})
    for key, value in metadata.items():
        parts += [_string(key), _encode(refuse_, f"metadata {key!r}", value, types.get(key))]
    offsets, end = [], 0
    for name, (type_id, shape) in tensors.items():
        _check_shape(refuse_, f"tensor {name!r}", shape)
        row = row_bytes(type_id, shape[-1] if shape else 1)
        assert row is not None, "callers pass known types"
        parts += [_string(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], type_id, end)]
        offsets.append(end)
        end += math.prod(shape[:-1]) * row
        end += -end % alignment
    header = b"".join(parts)
    data_start = len(header) + -len(header) % alignment
    return header, [data_start + offset for offset in offsets], data_start + end


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _encode(refuse: Any, what: str, value: Any, type_name: str | None) -> bytes:
    """Type and value as bytes; the type is the recorded one, else what the value suggests."""
    name = type_name or _default_type(value)
    element, is_array = (name[:-2], True) if name and name.endswith("[]") else (name, False)
    remedy = "give it a value of its type, or change metadata.types"
    if element == "string":
        texts = list(value) if is_array and isinstance(value, (list, tuple, np.ndarray)) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise refuse(what, name, f"{value!r:.80}", remedy)
        body = b"".join(map(_string, texts))
        id = _STRING
    elif element in _NUMBERS:
        id, dtype = _NUMBERS[element]
        numbers = _as_numbers(value, np.dtype(dtype))
        if numbers is None or numbers.ndim != is_array:
            raise refuse(what, name, f"{value!r:.80}", remedy)
        texts, body = numbers, numbers.tobytes()
    else:
        raise refuse(
            what, "a bool, int, float or string, or an array or list of one of them", f"{type_name or value!r:.80}",
            "convert it; NumPy arrays may be empty",
        )  # fmt: skip
    return (struct.pack("<IIQ", _ARRAY, id, len(texts)) if is_array else struct.pack("<I", id)) + body


def _default_type(value: Any) -> str | None:
    if isinstance(value, str):
        return "string"
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return "string[]" if value else None  # an empty list of what?
    try:
        array = np.asarray(value)
    except ValueError:  # a ragged list
        return None
    if isinstance(value, (np.ndarray, np.generic)):
        name = "string" if array.dtype.kind == "U" else array.dtype.name
    else:
        # What llama.cpp reads: uint32 and float32 scalars, int32 and float32 arrays; wider only where they must be.
        name = {"b": "bool", "f": "float32", "i": "int64", "u": "uint64"}.get(array.dtype.kind)
        narrow = ["int32"] if array.ndim else ["uint32", "int32"]
        fitting = [n for n in narrow if array.dtype.kind in "iu" and _as_numbers(value, np.dtype(n)) is not None]
        name = fitting[0] if fitting else name
    return name and name + "[]" * array.ndim


def _as_numbers(value: Any, dtype: np.dtype[Any]) -> np.ndarray | None:
    """The value in this type, or None where it does not fit."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):
        return None
    if array.size and array.dtype.kind not in {"b": "b", "i": "iu", "u": "iu", "f": "fiu"}[dtype.kind]:
        return None
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            return None
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    return None if dtype.kind == "f" and (np.isfinite(array) != np.isfinite(converted)).any() else converted
