"""The block formats' part of `jaxquant.testing.conformance`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant._core import ffi
from jaxquant.ggml import codec, products, reference
from jaxquant.ggml import layout as layouts
from jaxquant.ggml.formats import BlockFormat, formats
from jaxquant.ggml.qtensor import QTensor, quantize

# bits(operation, what, actual, expected), close(operation, what, actual, expected, most): comparisons that count.
Bits = Callable[[str, str, Any, np.ndarray], None]

_EXPERTS, _ROWS = 3, 9
_TOKENS = (1, 5, 20)  # a few, and more than a tile; the emulated kernels are slow
_CHOSEN = np.array([[0, 2], [2, 2], [-1, 0]], np.int32)


def _host_quantize(kind: BlockFormat, x: np.ndarray, imatrix: np.ndarray | None) -> np.ndarray:
    module = ffi.module("cpu")
    assert module is not None
    out = np.zeros((*x.shape[:-1], kind.row_bytes(x.shape[-1])), np.uint8)
    weights = (
        None if imatrix is None else np.ascontiguousarray(np.broadcast_to(imatrix, x.shape)).reshape(-1, x.shape[-1])
    )
    module.ggml_quantize(kind.type_id, x.reshape(-1), x.shape[-1], weights, out.reshape(-1))
    return out


def _values(kind: BlockFormat, data: np.ndarray) -> np.ndarray:
    """By jax.numpy on the host, which shares nothing with the kernels."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return np.asarray(jax.jit(reference.dequantize, static_argnums=1)(data, kind.name))


def check(bits: Bits, close: Callable[[str, str, Any, np.ndarray, float], None], implementation: str | None) -> None:
    """Every format and operation on the default platform.

    Values against jax.numpy on the host, bytes against the host's quantiser, products against float64.
    """
    rng = np.random.default_rng(0)
    use = {"implementation": implementation}

    # Compiled as a whole: alone, each small step around a kernel is a program too.
    @jax.jit
    def linear(x: Any, w: QTensor, dy: Any) -> Any:
        y, backward = jax.vjp(lambda x: products.linear(x, w[0], **use), x)
        return products.linear(x, w[0], lhs_qtype=None, **use), y, backward(dy)[0]

    @jax.jit
    def moe(x: Any, w: QTensor, dy: Any) -> Any:
        y, backward = jax.vjp(lambda x: products.moe_linear(x, w, _CHOSEN, lhs_qtype=None, **use), x)
        return y, backward(dy)[0]

    for kind in formats.values():
        k = max(2 * kind.block_size, 64)
        x = rng.standard_normal((_EXPERTS, _ROWS, k)).astype(np.float32)
        imatrix = (x**2).sum((0, 1))
        data = _host_quantize(kind, x, imatrix)
        bits("ggml_quantize", f"{kind.name}, importances", quantize(x, kind, imatrix=imatrix, **use).data, data)
        if not kind.requires_imatrix:
            bits("ggml_quantize", kind.name, quantize(x, kind, **use).data, _host_quantize(kind, x, None))

        w, wide = QTensor(jnp.asarray(data), kind), _values(kind, data)
        bits("ggml_dequantize", kind.name, w.dequantize(**use), wide)
        half = wide.astype(np.float16)
        bits("ggml_dequantize", f"{kind.name} to float16", w.dequantize(jnp.float16, **use), half)
        ids = np.array([0, _ROWS - 1, -1, _ROWS, 3])
        inside = ((ids >= 0) & (ids < _ROWS))[:, None]
        taken = np.where(inside, wide[0][np.clip(ids, 0, _ROWS - 1)], np.float32(0))
        bits("ggml_take", kind.name, w[0].take(ids, **use), taken)
        forms = [("plain", w)]
        if layouts.has_prepared_form(kind.name):
            there = codec.prepare(w.data, kind.name, implementation)
            prepared = QTensor(there, kind, "prepared", _ROWS)
            bits("ggml_prepare", kind.name, there, np.asarray(layouts.prepare(jnp.asarray(data), kind.name)))
            back = codec.plain(there, kind.name, prepared._layout, implementation)
            bits("ggml_prepare", f"{kind.name}, back", back, data)
            bits("ggml_dequantize", f"{kind.name}, prepared", prepared.dequantize(**use), wide)
            bits("ggml_take", f"{kind.name}, prepared", prepared[0].take(ids, **use), taken)
            forms.append(("prepared", prepared))

        exact = wide.astype(np.float64)
        for tokens in _TOKENS if implementation != "cuda_emulation" else _TOKENS[1:2]:
            tall = rng.standard_normal((tokens, k)).astype(np.float32)
            product = tall.astype(np.float64) @ exact[0].T
            dy = rng.standard_normal((tokens, _ROWS)).astype(np.float32)
            dx_exact = dy.astype(np.float64) @ exact[0]
            # The bound of 1e-4 is for many products; a few scatter.
            most = 1e-4 if tokens * _ROWS > 100 else 4e-4
            for layout, each in forms:
                what = f"{kind.name}, {layout}, {tokens} tokens"
                y, y_int8, dx = linear(tall, each, dy)
                close("ggml_linear", f"{what}, float", y, product, 1e-10)
                close("ggml_linear", f"{what}, int8", y_int8, product, most)
                close("ggml_linear_gradient", what, dx, dx_exact, 1e-10)
        few = rng.standard_normal((3, 1, k)).astype(np.float32)
        known = (_CHOSEN >= 0)[..., None]
        product = np.where(known, np.einsum("tk,tsnk->tsn", few[:, 0].astype(np.float64), exact[_CHOSEN]), 0.0)
        dy = rng.standard_normal((3, 2, _ROWS)).astype(np.float32)
        gradient = np.where(known, np.einsum("tsn,tsnk->tsk", dy.astype(np.float64), exact[_CHOSEN]), 0.0)
        for layout, each in forms:
            y, dx = moe(few, each, dy)
            close("ggml_moe_linear", f"{kind.name}, {layout}", y, product, 1e-10)
            close("ggml_moe_linear_gradient", f"{kind.name}, {layout}", dx, gradient.sum(1, keepdims=True), 1e-10)
