"""Importance matrices of llama.cpp: how much each column of a weight matters, for `quantize`."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from jaxquant._core.errors import refuse
from jaxquant.ggml.gguf import open_gguf
from jaxquant.ggml.gguf_header import MAGIC, Cursor

_SUMS, _COUNTS = ".in_sum2", ".counts"


def load_imatrix(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads an importance matrix, in either form that llama.cpp writes: GGUF, or the older .dat.

    Args:
      path: the file; what it holds is told from its first bytes.
    Returns:
      Tensor name to float32 weights, the mean squares of the activations: [k], or [E, k] with one row per expert. An
      old file does not say where experts begin: there E experts are one row of E * k (see `for_tensor`).

    Entries or experts without data (a count of 0, or nothing but zeros) get ones: all their columns matter alike, as
    in llama.cpp. Negative or non-finite weights are a ValueError.

    >>> import struct
    >>> entry = struct.pack("<ii1sii2f", 1, 1, b"w", 2, 2, 8.0, 4.0)
    >>> _ = open("imatrix.dat", "wb").write(entry)
    >>> ggml.load_imatrix("imatrix.dat")["w"]
    array([4., 2.], dtype=float32)
    """
    path = os.fspath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise refuse("load_imatrix", path, "a file", "something else", "give the path of an importance matrix")
    with open(path, "rb") as file:
        magic = file.read(4)
    return _load_gguf(path) if magic == MAGIC else _load_legacy(path)


def for_tensor(name: str, weights: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The weights in the form that `quantize` takes for a tensor of this shape: [k], or [E, k] for [E, n, k]."""
    k = shape[-1]
    experts = shape[0] if len(shape) == 3 else 1
    if weights.shape == (k,) or (experts > 1 and weights.shape == (experts, k)):
        return weights
    if weights.size == experts * k:
        return _with_ones(weights.reshape(experts, k) if experts > 1 else weights.reshape(k))
    raise refuse(
        "quantize", f"imatrix of {name!r}", f"{experts} x {k} weights for shape {tuple(shape)}",
        " x ".join(map(str, weights.shape)), "use the one of this model",
    )  # fmt: skip


def _load_gguf(path: str) -> dict[str, np.ndarray]:
    file = open_gguf("load_imatrix", path)
    kind = file.metadata.get("general.type")
    if kind != "imatrix":
        raise refuse("load_imatrix", f"{path}: general.type", "'imatrix'", f"{kind!r}", "give an importance matrix")
    result = {}
    for key in file:
        if not key.endswith(_SUMS):
            continue
        name = key[: -len(_SUMS)]
        if name + _COUNTS not in file:
            raise refuse("load_imatrix", f"{path}: {name!r}", f"a tensor {name + _COUNTS!r}", "none", "make it again")
        sums, counts = file[key].numpy(), file[name + _COUNTS].numpy()
        sums = np.atleast_1d(sums)
        if sums.dtype != np.float32 or counts.dtype != np.float32 or counts.size * sums.shape[-1] != sums.size:
            raise refuse(
                "load_imatrix", f"{path}: {name!r}", "F32 sums [experts, k] and a count per expert",
                f"{sums.dtype}{list(sums.shape)} and {counts.dtype}{list(counts.shape)}", "make it again",
            )  # fmt: skip
        counts = counts.reshape(-1, 1)
        with np.errstate(all="ignore"):  # what is not finite is refused below
            weights = np.where(counts > 0, sums.reshape(len(counts), -1) / counts, np.float32(0))
        _check(path, name, counts)
        result[name] = _checked(path, name, weights[0] if len(weights) == 1 else weights)
    return result


def _load_legacy(path: str) -> dict[str, np.ndarray]:
    """Entry count; per entry its name, how often it was called, how many values, and their sums."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    cursor = Cursor("load_imatrix", path, data, size)
    entries = cursor.number("i", "entry count")
    if not 0 < entries <= cursor.left // 12:
        got = f"{entries} entries in {size} bytes"
        raise cursor.refuse("header", "a GGUF file or a table of entries", got, "give an importance matrix")
    result: dict[str, np.ndarray] = {}
    for _ in range(entries):
        name = cursor.string("entry name", "I")
        calls, values = cursor.number("i", f"{name!r}"), cursor.number("i", f"{name!r}")
        if name in result or calls < 0 or values < 1:
            got = "two" if name in result else f"{calls} calls, {values} values"
            raise cursor.refuse(f"{name!r}", "one entry with values", got, "the file is damaged")
        sums = np.frombuffer(cursor.take(4 * values, f"{name!r}"), "<f4")
        result[name] = _checked(path, name, sums / np.float32(calls) if calls else np.zeros_like(sums))
    return result  # what follows is the number of chunks and the name of the text: not used


def _checked(path: str, name: str, weights: np.ndarray) -> np.ndarray:
    _check(path, name, weights)
    return _with_ones(weights.astype(np.float32, copy=False))


def _check(path: str, name: str, values: np.ndarray) -> None:
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        raise refuse(
            "load_imatrix", f"{path}: {name!r}", "finite weights of at least 0", f"{values[wrong][0]}",
            "make it again: the model produced non-finite activations, or the file is damaged",
        )  # fmt: skip


def _with_ones(weights: np.ndarray) -> np.ndarray:
    return np.where(weights.any(axis=-1, keepdims=True), weights, np.float32(1))
