"""ggml itself, as a contender: the wheel libggml-python through ctypes, with the repacked layouts it has for x86."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_P, _I64, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_int


class _Init(ctypes.Structure):
    _fields_ = [("size", _SIZE), ("buffer", _P), ("no_alloc", ctypes.c_bool)]


class _ThreadpoolParams(ctypes.Structure):
    _fields_ = [
        ("cpumask", ctypes.c_bool * 512), ("n_threads", _INT), ("priority", _INT), ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool), ("paused", ctypes.c_bool),
    ]  # fmt: skip


# What has kernels for interleaved rows on x86 with AVX2.
REPACKED = ("Q4_0", "Q4_K", "IQ4_NL", "MXFP4")
# What has kernels for the tiles of AMX, products of one matrix alone: Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_XS.
TILED = (2, 3, 8, 12, 13, 14, 23)


@functools.cache
def has_tiles() -> bool:
    """A build with AMX, on a machine with it: the wheel is none."""
    _, cpu = load()
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "GGML_NO_AMX" in os.environ or "amx_int8" not in flags or not hasattr(cpu, "_Z28ggml_backend_amx_buffer_typev"):
        return False
    cpu._Z28ggml_backend_amx_buffer_typev.restype = _P
    return cpu._Z28ggml_backend_amx_buffer_typev() is not None


@functools.cache
def load() -> tuple[Any, Any]:
    if "GGML_LIBRARIES" in os.environ:  # a folder with a build of your own: libggml-base.so.0, libggml-cpu.so.0
        folder = Path(os.environ["GGML_LIBRARIES"])
    else:
        spec = importlib.util.find_spec("libggml")
        assert spec is not None and spec.submodule_search_locations, "pip install libggml-python"
        folder = Path(next(iter(spec.submodule_search_locations))) / "lib64"
    base = ctypes.CDLL(str(folder / "libggml-base.so.0"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(folder / "libggml-cpu.so.0"))
    signatures = [
        (base, "ggml_init", _P, [_Init]), (base, "ggml_free", None, [_P]),
        (base, "ggml_new_tensor_2d", _P, [_P, _INT, _I64, _I64]),
        (base, "ggml_new_tensor_3d", _P, [_P, _INT, _I64, _I64, _I64]),
        (base, "ggml_mul_mat", _P, [_P, _P, _P]), (base, "ggml_mul_mat_id", _P, [_P, _P, _P, _P]),
        (base, "ggml_new_graph", _P, [_P]), (base, "ggml_build_forward_expand", None, [_P, _P]),
        (base, "ggml_backend_alloc_ctx_tensors_from_buft", _P, [_P, _P]),
        (base, "ggml_backend_buffer_free", None, [_P]),
        (base, "ggml_backend_get_default_buffer_type", _P, [_P]),
        (base, "ggml_backend_tensor_set", None, [_P, _P, _SIZE, _SIZE]),
        (base, "ggml_backend_tensor_get", None, [_P, _P, _SIZE, _SIZE]),
        (base, "ggml_backend_graph_compute", _INT, [_P, _P]), (base, "ggml_backend_free", None, [_P]),
        (base, "ggml_quantize_chunk", _SIZE, [_INT, _P, _P, _I64, _I64, _I64, _P]),
        (cpu, "ggml_backend_cpu_init", _P, []), (cpu, "ggml_backend_cpu_set_n_threads", None, [_P, _INT]),
        (base, "ggml_threadpool_params_default", _ThreadpoolParams, [_INT]),
        (cpu, "ggml_threadpool_new", _P, [ctypes.POINTER(_ThreadpoolParams)]),
        (cpu, "ggml_threadpool_pause", None, [_P]), (cpu, "ggml_threadpool_resume", None, [_P]),
        (cpu, "ggml_backend_cpu_set_threadpool", None, [_P, _P]),
        (cpu, "_Z35ggml_backend_cpu_repack_buffer_typev", _P, []),
    ]  # fmt: skip
    for library, name, result, arguments in signatures:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return base, cpu


class _Traits(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p), ("block_size", _I64), ("interleave", _I64), ("type_size", _SIZE),
        ("is_quantized", ctypes.c_bool), ("to_float", ctypes.CFUNCTYPE(None, _P, _P, _I64)), ("from_float", _P),
    ]  # fmt: skip


def to_float(type_id: int) -> Any:
    base, _ = load()
    base.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    return base.ggml_get_type_traits(type_id).contents.to_float


@functools.cache
def _threadpool(threads: int) -> Any:
    """One for all products: each would keep its threads, and they look for work for a while after each call."""
    base, cpu = load()
    parameters = base.ggml_threadpool_params_default(threads)
    return cpu.ggml_threadpool_new(ctypes.byref(parameters))


@contextlib.contextmanager
def awake(product: Any) -> Iterator[None]:
    """ggml's threads look for work for tenths of a second after a call: they sleep unless it is ggml's turn."""
    _, cpu = load()
    pool = _threadpool(len(os.sched_getaffinity(0)))
    cpu.ggml_threadpool_resume(pool)
    product()
    yield
    cpu.ggml_threadpool_pause(pool)


class Product:
    """x [m, k] @ w.T, or with ids [m, slots] the products of w [experts, n, k], computed at each call."""

    def __init__(
        self, type_id: int, w: np.ndarray, shape: tuple[int, ...], x: np.ndarray, threads: int, repack: bool,
        ids: np.ndarray | None = None,
    ):  # fmt: skip
        base, cpu = self._base, _ = load()
        *experts, n, k = shape
        m = x.shape[0]
        self._backend = cpu.ggml_backend_cpu_init()
        cpu.ggml_backend_cpu_set_n_threads(self._backend, threads)
        cpu.ggml_backend_cpu_set_threadpool(self._backend, _threadpool(threads))
        plain = base.ggml_backend_get_default_buffer_type(self._backend)
        weight_type = cpu._Z35ggml_backend_cpu_repack_buffer_typev() if repack else plain
        if not experts and type_id in TILED and has_tiles():
            weight_type = cpu._Z28ggml_backend_amx_buffer_typev()
        self._contexts = [base.ggml_init(_Init(1 << 20, None, True)) for _ in range(2)]
        if experts:
            weight = base.ggml_new_tensor_3d(self._contexts[0], type_id, k, n, experts[0])
            operand = base.ggml_new_tensor_3d(self._contexts[1], 0, k, 1, m)
            chosen = base.ggml_new_tensor_2d(self._contexts[1], 26, ids.shape[1], m)
            self._out = base.ggml_mul_mat_id(self._contexts[1], weight, operand, chosen)
        else:
            weight = base.ggml_new_tensor_2d(self._contexts[0], type_id, k, n)
            operand = base.ggml_new_tensor_2d(self._contexts[1], 0, k, m)
            self._out = base.ggml_mul_mat(self._contexts[1], weight, operand)
        self._graph = base.ggml_new_graph(self._contexts[1])
        base.ggml_build_forward_expand(self._graph, self._out)
        self._buffers = [
            base.ggml_backend_alloc_ctx_tensors_from_buft(context, kind)
            for context, kind in zip(self._contexts, (weight_type, plain), strict=True)
        ]
        w, x = np.ascontiguousarray(w), np.ascontiguousarray(x, np.float32)
        base.ggml_backend_tensor_set(weight, w.ctypes.data, 0, w.nbytes)
        base.ggml_backend_tensor_set(operand, x.ctypes.data, 0, x.nbytes)
        if ids is not None:
            ids = np.ascontiguousarray(ids, np.int32)
            base.ggml_backend_tensor_set(chosen, ids.ctypes.data, 0, ids.nbytes)
        self._shape = (*(ids.shape if ids is not None else (m,)), n)

    def __call__(self, *_: Any) -> int:
        return self._base.ggml_backend_graph_compute(self._backend, self._graph)

    def result(self) -> np.ndarray:
        out = np.zeros(self._shape, np.float32)
        self._base.ggml_backend_tensor_get(self._out, out.ctypes.data, 0, out.nbytes)
        return out

    def close(self) -> None:
        for buffer in self._buffers:
            self._base.ggml_backend_buffer_free(buffer)
        for context in self._contexts:
            self._base.ggml_free(context)
        self._base.ggml_backend_free(self._backend)
