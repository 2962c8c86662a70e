"""The weight-only products' part of `jaxquant.testing.conformance`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxquant.affine.layout import PANEL
from jaxquant.affine.weight_only import Weight, no_zero_point, weight_only_gradient_p, weight_only_matmul_p

_K, _N, _GROUPS = 96, 37, 3
_ROWS = (1, 5, 40)


def _prepared(codes: np.ndarray, bits: int) -> np.ndarray:
    """Panels of columns, in them words of four bytes along k."""
    k, n = codes.shape
    per = 8 // bits
    codes = np.pad(codes & (2**bits - 1), ((0, -k % (4 * per)), (0, -n % PANEL)))
    codes = codes.reshape(-1, per, 4, codes.shape[1] // PANEL, PANEL).transpose(3, 0, 4, 2, 1)
    codes = np.bitwise_or.reduce(codes << (bits * np.arange(per)), axis=-1)
    return codes.reshape(*codes.shape[:2], 4 * PANEL).astype(np.uint8)


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    per = 8 // bits
    codes = np.pad(codes & (2**bits - 1), ((0, 0), (0, -codes.shape[1] % per)))
    codes = codes.reshape(codes.shape[0], -1, per) << (bits * np.arange(per))
    return np.bitwise_or.reduce(codes, axis=-1).astype(np.uint8)


def check(close: Callable[[str, str, Any, np.ndarray, float], None], implementation: str | None) -> None:
    """Every width, both layouts, with and without zero points, against float64."""
    rng = np.random.default_rng(0)
    for bits in (8, 4, 2):
        for signed in (True, False):
            low = -(2 ** (bits - 1)) if signed else 0
            codes = rng.integers(low, low + 2**bits, (_K, _N))
            scale = rng.uniform(0.5, 1.0, (_GROUPS, _N)).astype(np.float32)
            zeros = rng.integers(low, low + 2**bits, (_GROUPS, _N)).astype(np.float32)
            byte = codes.astype(np.int8 if signed else np.uint8)
            plain = byte if bits == 8 else _packed(codes, bits)
            for layout, data in (("plain", plain), ("prepared", _prepared(codes, bits))):
                for with_zeros in (False, True):
                    each = _K // _GROUPS
                    offset = np.repeat(zeros, each, 0).astype(np.float64) if with_zeros else 0.0
                    values = (codes - offset) * np.repeat(scale, each, 0).astype(np.float64)
                    operands = (
                        jnp.asarray(data)[None],
                        jnp.asarray(scale)[None],
                        jnp.asarray(zeros)[None] if with_zeros else no_zero_point(),
                    )
                    keywords = {
                        "weight": Weight(bits, signed, _N, _K, layout),  # pyright: ignore[reportArgumentType]
                        "implementation": implementation,
                    }
                    what = f"{'' if signed else 'u'}int{bits}, {layout}{', zero points' if with_zeros else ''}"
                    for rows in _ROWS:
                        x = rng.standard_normal((rows, _K)).astype(np.float32)
                        dy = rng.standard_normal((rows, _N)).astype(np.float32)
                        y = weight_only_matmul_p.bind(jnp.asarray(x)[None], *operands, **keywords)[0]
                        close("weight_only_matmul", f"{what}, {rows} rows", y, x @ values, 1e-10)
                        dx = weight_only_gradient_p.bind(jnp.asarray(dy)[None], *operands, **keywords)[0]
                        close("weight_only_gradient", f"{what}, {rows} rows", dx, dy @ values.T, 1e-10)
