"""Operands of products with quantised matrices, and their values by NumPy."""

import numpy as np
import oracle

from jaxquant import QArray

M, K, N, GROUPS = 6, 32, 12, 4


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weight(*shape, grid=None, qtype="int8", zero_point=False, seed=2):
    """A QArray, and its values in float64 by NumPy."""
    rng = np.random.default_rng(seed)
    low, high = oracle.RANGES[qtype]
    codes = rng.integers(low, high + 1, shape).astype(oracle.CONTAINERS[qtype])
    scale = (0.01 * rng.uniform(1, 2, (*(1,) * (len(shape) - 1), shape[-1]) if grid is None else grid)).astype(
        np.float32
    )
    zero = rng.integers(low, high + 1, scale.shape).astype(np.int32) if zero_point else None
    w = QArray.from_codes(codes, scale, zero, qtype=qtype)
    full = scale.astype(np.float64)
    shift = np.zeros_like(full) if zero is None else zero.astype(np.float64)
    for d, n in enumerate(shape):
        each = 1 if full.shape[d] in (1, n) else n // full.shape[d]
        full, shift = np.repeat(full, each, d), np.repeat(shift, each, d)
    return w, (codes.astype(np.float64) - shift) * full


def close(actual, expected, tolerance=1e-6):
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(initial=0), 1e-30))
