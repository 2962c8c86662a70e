"""The histograms' part of `jaxquant.testing.conformance`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.affine.granularity import PerBlock
from jaxquant.affine.histogram import histogram, percentile

_SHAPE = (6, 350)
_BLOCKS = ((6, 350), (1, 350), (6, 1), (3, 50))
_PERCENTAGES = (0.1, 100)


def _counted(x: np.ndarray, block: tuple[int, ...], magnitude: bool) -> list[np.ndarray]:
    """The finite values of each block as float32."""
    values = np.abs(x.astype(np.float32)) if magnitude else x.astype(np.float32)
    parts = [
        part for rows in np.split(values, _SHAPE[0] // block[0]) for part in np.split(rows, len(rows.T) // block[1], 1)
    ]
    return [part[np.isfinite(part)] for part in parts]


def _bins(values: np.ndarray, low: np.float32, high: np.float32, bins: int) -> np.ndarray:
    slots = np.floor((values - low) * (np.float32(bins) / (high - low)))
    return np.bincount(np.clip(slots, 0, bins - 1).astype(np.int64), minlength=bins).astype(np.int32)


def _percentile(values: np.ndarray, q: float) -> np.float32:
    if not len(values):
        return np.float32(np.nan)
    position = Fraction(q) / 100 * (len(values) - 1)
    whole = math.floor(position)
    t = np.float32(math.floor((position - whole) * 2**24)) * np.float32(2**-24)
    a, b = np.sort(values)[[whole, min(whole + 1, len(values) - 1)]]
    return a + (b - a) * t if t < 0.5 else b - (b - a) * (1 - t)


def check(bits: Callable[[str, str, Any, np.ndarray], None], implementation: str | None) -> None:
    """Counts of bins, and the percentiles that counts of digits give, against NumPy's counting and sorting."""
    rng = np.random.default_rng(3)
    for dtype in ("float32", "float16", "bfloat16"):
        x = rng.normal(size=_SHAPE).astype(jnp.dtype(dtype))
        x[0, :4] = [np.nan, np.inf, -np.inf, -0.0]
        # Every way to share on one dtype: what XLA compiles for each takes far longer than the counting.
        for i, block in enumerate(_BLOCKS if dtype == "float32" else _BLOCKS[1:3]):
            grid = (_SHAPE[0] // block[0], _SHAPE[1] // block[1])
            magnitude = i % 2 == 1
            how = {"granularity": PerBlock(block), "magnitude": magnitude, "implementation": implementation}
            counted = _counted(x, block, magnitude)
            name = f"{dtype}, blocks of {block}{', magnitudes' * magnitude}"
            low, high = rng.uniform(-2, -1, grid).astype(np.float32), rng.uniform(1, 2, grid).astype(np.float32)
            expected = [_bins(v, a, b, 37) for v, a, b in zip(counted, low.flat, high.flat, strict=True)]
            got = jax.jit(functools.partial(histogram, bins=37, **how))(x, low, high)
            bits("histogram", f"histogram, {name}", got, np.stack(expected).reshape(*grid, 37))
            expected = np.array([[_percentile(v, q) for v in counted] for q in _PERCENTAGES], np.float32)
            got = jax.jit(functools.partial(percentile, q=_PERCENTAGES, **how))(x)
            bits("digit_histogram", f"percentile, {name}", got, expected.reshape(-1, *grid))
