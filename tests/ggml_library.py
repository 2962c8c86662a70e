"""The reference library itself, through ctypes: the wheel libggml-python holds ggml 0.20.2."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np

_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _Traits(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", _TO_FLOAT),
        ("from_float_ref", _TO_FLOAT),
    ]


@functools.cache
def library() -> Any:
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    spec = importlib.util.find_spec("libggml")
    assert spec is not None and spec.submodule_search_locations, "install the test extra: libggml-python"
    folder = Path(next(iter(spec.submodule_search_locations))) / "lib64"
    base = ctypes.CDLL(str(folder / "libggml-base.so.0"), mode=ctypes.RTLD_GLOBAL)
    base.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    base.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    base.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    return base


def traits(type_id: int) -> Any:
    return library().ggml_get_type_traits(type_id).contents


def quantize(type_id: int, x: np.ndarray, imatrix: np.ndarray | None = None) -> np.ndarray:
    """Bytes [rows, row_bytes] of x [rows, n]: ggml_quantize_chunk, or the reference quantiser of activation formats.

    imatrix: [n], for all rows.
    """
    x = np.ascontiguousarray(x, np.float32)
    t = traits(type_id)
    out = np.zeros((x.shape[0], x.shape[1] // t.block_size * t.type_size), np.uint8)
    weights = None if imatrix is None else np.ascontiguousarray(imatrix, np.float32)
    if type_id in (9, 15):  # Q8_1, Q8_K
        function = library()[{9: "quantize_row_q8_1_ref", 15: "quantize_row_q8_K_ref"}[type_id]]
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        for row, bytes_ in zip(x, out, strict=True):
            function(row.ctypes.data, bytes_.ctypes.data, x.shape[1])
    elif out.size:
        pointer = None if weights is None else weights.ctypes.data
        library().ggml_quantize_chunk(type_id, x.ctypes.data, out.ctypes.data, 0, x.shape[0], x.shape[1], pointer)
    return out


def dequantize(type_id: int, data: np.ndarray) -> np.ndarray:
    """float32 [rows, n] of bytes [rows, row_bytes]."""
    data = np.ascontiguousarray(data, np.uint8)
    if type_id == 0:
        return data.view(np.float32).copy()
    t = traits(type_id)
    out = np.zeros((data.shape[0], data.shape[1] // t.type_size * t.block_size), np.float32)
    if type_id == 15:
        to_float = library().dequantize_row_q8_K
        to_float.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    else:
        to_float = t.to_float
    if out.size:
        to_float(data.ctypes.data, out.ctypes.data, out.size)
    return out
