"""Damages files at random and reads them: every one either loads or is a ValueError, in bounded time and memory.

python tests/fuzz_gguf.py [mutations] [seed]
"""

from __future__ import annotations

import random
import shutil
import struct
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import gguf_files
import numpy as np

from jaxquant.ggml.gguf import load_gguf, save_gguf
from jaxquant.ggml.imatrix import load_imatrix

_NUMBERS = [0, 1, 2, 3, 4, 7, 31, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
_WORDS = [b"GGUF", gguf_files.string("general.alignment"), gguf_files.string("floats"), b"\xff\xfe", b"\x00" * 8]


def seeds() -> list[tuple[bytes, bool]]:
    """Valid files, and whether each is an importance matrix."""
    keys, tensors = [("general.alignment", 4, 64)], [gguf_files.tensor("x", [32], 8, 0)]
    aligned = gguf_files.gguf(keys, tensors, bytes(34), alignment=64)
    plain = {"a": (3, [1.0, 2.0, 3.0]), "b": (0, [0.0] * 4)}
    return [
        (gguf_files.small(), False),
        (gguf_files.small(version=2), False),
        (aligned, False),
        (gguf_files.imatrix_gguf({"a": ([[1.0, 2.0], [3.0, 4.0]], [2.0, 0.0]), "b": ([[1.0] * 5], [7.0])}), True),
        (gguf_files.imatrix_legacy(plain), True),
    ]  # fmt: skip


def mutate(data: bytes, source: random.Random) -> bytes:
    """One to four damages, most of them near the front, where the header is."""
    result = bytearray(data)
    for _ in range(source.randint(1, 4)):
        at = min(int(source.random() ** 1.5 * len(result)), max(len(result) - 1, 0))
        kind = source.randrange(7)
        if kind == 0 and result:
            result[at] ^= 1 << source.randrange(8)
        elif kind == 1 and result:
            result[at] = source.randrange(256)
        elif kind == 2:
            size = source.choice("BHIQ")
            number = struct.pack("<" + size, source.choice(_NUMBERS) % 2 ** (8 * struct.calcsize(size)))
            result[at : at + len(number)] = number
        elif kind == 3:
            del result[at : at + source.choice((1, 4, 8, source.randint(1, 64)))]
        elif kind == 4:
            result[at:at] = source.choice((*_WORDS, source.randbytes(source.randint(1, 16))))
        elif kind == 5:
            del result[at:]
        else:
            other = source.randrange(len(result) + 1)
            result[at:at] = result[other : other + source.randint(1, 64)]
    return bytes(result)


def fuzz(mutations: int, seed: int, folder: Path) -> dict[str, int]:
    """Returns how many files loaded and how many were refused. An AssertionError names any other file."""
    source, outcomes, files = random.Random(seed), {"loaded": 0, "refused": 0}, seeds()
    path = folder / "mutant.gguf"
    tracemalloc.start()
    try:
        for index in range(mutations):
            valid, is_imatrix = source.choice(files)
            data = mutate(valid, source)
            path.write_bytes(data)
            tracemalloc.reset_peak()
            before, begin = tracemalloc.get_traced_memory()[0], time.perf_counter()
            try:
                loaded = read(path, is_imatrix)
            except Exception as error:
                raise AssertionError(f"mutation {index} of seed {seed}: {error!r}; the file: {path}") from error
            seconds, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1] - before
            assert seconds < 5 and peak < 2**18 + 100 * len(data), (index, seed, seconds, peak, path)
            outcomes["loaded" if loaded else "refused"] += 1
    finally:
        tracemalloc.stop()
    return outcomes


def read(path: Path, is_imatrix: bool) -> bool:
    """Uses everything that a file offers. False: it was refused."""
    try:
        if is_imatrix:
            for weights in load_imatrix(path).values():
                assert weights.dtype == np.float32 and np.isfinite(weights).all() and (weights >= 0).all()
                assert weights.any(axis=-1).all()
            return True
        file = load_gguf(path)
    except ValueError as error:
        assert str(path) in str(error), error
        return False
    readable = {}
    for name, tensor in file.items():
        try:
            assert tensor.raw.nbytes == tensor.nbytes and tensor.raw.copy().dtype == np.uint8  # every byte is read
            readable[name] = tensor
        except ValueError as error:  # of an unknown type
            assert repr(name) in str(error), error
    if len(file.metadata) % 8 == 0:
        again = path.with_suffix(".saved")
        save_gguf(again, readable, file.metadata)
        copy = load_gguf(again)
        assert copy.metadata == file.metadata and list(copy) == list(readable)
        assert all(np.array_equal(copy[name].raw, tensor.raw) for name, tensor in readable.items())
    return True


if __name__ == "__main__":
    mutations, seed = (int(a) for a in (sys.argv[1:] + ["100000", "0"][len(sys.argv) - 1 :]))
    folder = Path(tempfile.mkdtemp())  # stays when a file fails
    begin = time.perf_counter()
    result = fuzz(mutations, seed, folder)
    print(f"{mutations} mutations in {time.perf_counter() - begin:.1f} s: {result}")
    shutil.rmtree(folder)
