"""The integer products' part of `jaxquant.testing.conformance`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.affine import layout
from jaxquant.affine.int_matmul import int_matmul, scaled_matmul

_SIZES = ((1, 70, 33), (3, 16, 64), (9, 65, 130), (70, 40, 20))  # m, n, k: of each kernel, and beyond its tiles


def _codes(rng: np.random.Generator, bits: int, signed: bool, *shape: int) -> np.ndarray:
    low = -(1 << (bits - 1)) if signed else 0
    return rng.integers(low, low + (1 << bits), shape).astype(np.int8 if signed else np.uint8)


def _scaled(a: Any, a_scale: Any, a_zero: Any, w: Any, w_scale: Any, w_zero: Any, bias: Any) -> np.ndarray:
    groups = w_scale.shape[1]
    size, t = a.shape[2] // groups, np.float32(0)
    for g in range(groups):
        x = a[:, :, g * size : (g + 1) * size].astype(np.int64) - a_zero.astype(np.int64)
        y = w[:, g * size : (g + 1) * size].astype(np.int64) - w_zero[:, g : g + 1].astype(np.int64)
        product = (x @ y).astype(np.float32) * w_scale[:, g : g + 1]
        t = product if g == 0 else t + product
    return t * a_scale + bias


def check(bits: Callable[[str, str, Any, np.ndarray], None], implementation: str | None) -> None:
    """Sums against int64, scaled products against float32 operations one by one, layouts both ways."""
    rng = np.random.default_rng(0)
    for m, n, k in _SIZES:
        for signed_a in (True, False):
            for signed_b in (True, False):
                a, b = _codes(rng, 8, signed_a, m, k), _codes(rng, 8, signed_b, k, n)
                expected = (a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32)
                name = f"{a.dtype} {m}x{k} by {b.dtype} {k}x{n}"
                bits("int_matmul", name, int_matmul(a, b, implementation=implementation), expected)
    for width, signed in ((8, True), (8, False), (4, True), (2, False)):
        for m, groups in ((1, 1), (5, 2), (40, 2)):
            n, k = 37, 96
            a, w = _codes(rng, 8, True, 2, m, k), _codes(rng, width, signed, 2, k, n)
            a_scale, w_scale = (rng.uniform(0.5, 2, s).astype(np.float32) for s in ((2, m, 1), (2, groups, n)))
            a_zero, w_zero = (rng.integers(-8, 8, s).astype(np.float32) for s in ((2, m, 1), (2, groups, n)))
            bias = rng.standard_normal(n).astype(np.float32)
            low = w if width == 8 else np.zeros((2, k, -(-n * width // 8)), np.uint8)
            for c in range(n) if width < 8 else ():
                field = (w[:, :, c].view(np.uint8) & ((1 << width) - 1)) << (c * width % 8)
                low[:, :, c * width // 8] |= field.astype(np.uint8)
            name = f"{width} bits, {m} rows, {groups} groups"
            prepared = layout.prepare(jnp.asarray(low), bits=width, n=n, implementation=implementation)
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                host = layout.prepare(jnp.asarray(low), bits=width, n=n, implementation="xla")
            bits("prepare", name, prepared, np.asarray(host))
            back = layout.plain(prepared, bits=width, k=k, n=n, dtype=low.dtype, implementation=implementation)
            bits("plain", name, back, low)
            expected = _scaled(a, a_scale, a_zero, w, w_scale, w_zero, bias)
            for data in (jnp.asarray(low), prepared):
                actual = scaled_matmul(
                    a, a_scale, a_zero, data, w_scale, w_zero, bias, bits=width, signed=signed, n=n,
                    prepared=data.ndim == 4, dtype=jnp.float32, implementation=implementation,
                )  # fmt: skip
                bits("scaled_matmul", name, actual, expected)
