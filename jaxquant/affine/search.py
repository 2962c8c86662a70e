"""Ranges of values to quantise: percentiles, least squared error, least divergence.

Each gives float32 low and high bounds for each block, of the scale's shape, from finite values alone; a block without
any has the range [0, 0]. What becomes of a range is the business of `jaxquant.affine.choose`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.affine import choose, histogram
from jaxquant.affine import granularity as granularities

BINS = 2048
# Ends of the ranges that are tried, as parts of the whole: 2^(-k / 16), the last about 1 / 245.
_FRACTIONS = 2.0 ** (-np.arange(128) / 16)


def percentile_range(
    x: Any,
    block_shape: tuple[int, ...],
    percentile: float,
    symmetric: bool = True,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The range that leaves out the largest values.

    symmetric: [-h, h] for the percentile h of ``|x|``. Otherwise the percentiles ``100 - percentile`` and
    ``percentile`` of x, widened to include 0.
    """
    x, grid = histogram.countable(x), granularities.scale_shape(x.shape, block_shape)
    return percentiles_seen(x, grid, percentile, symmetric, implementation=implementation)[:2]


def percentiles_seen(
    x: Any, grid: tuple[int, ...], percentile: float, symmetric: bool, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`percentile_range` of a countable x, and which blocks have a finite value."""
    qs = (percentile,) if symmetric else (100 - percentile, percentile)
    values, counted = histogram.percentiles(x, grid, qs, symmetric, implementation)
    seen = counted > 0
    values = jnp.where(seen[..., None], values, 0)
    if symmetric:
        return -values[..., 0], values[..., 0], seen
    return jnp.minimum(values[..., 0], 0), jnp.maximum(values[..., 1], 0), seen


def mse_range(
    x: Any, block_shape: tuple[int, ...], qmin: int, qmax: int, symmetric: bool, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """The range whose codes have the least mean squared error, rounding and clipping together.

    On a histogram of 2048 bins between the extremes, within which values are taken as evenly spread; see
    `least_squares` for the ranges that are tried.
    """
    x, grid = histogram.countable(x), granularities.scale_shape(x.shape, block_shape)
    low, high, _ = finite_range(x, grid, implementation=implementation)
    if symmetric:
        low, high = jnp.zeros_like(low), jnp.maximum(-low, high)
    counts = histogram.count(x, low, high, bins=BINS, magnitude=symmetric, implementation=implementation)
    return least_squares(counts.astype(jnp.float32), low, high, qmin, qmax, symmetric)


def finite_range(
    x: Any, grid: tuple[int, ...], *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The extremes of the finite values of each block and 0, as float32, and which blocks have any."""
    low, high = choose.block_range(x, block_of(x.shape, grid), absolute=False, implementation=implementation)
    return jnp.minimum(low, 0), jnp.maximum(high, 0), low <= high


def block_of(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, ...]:
    """The block shape of so many blocks."""
    return tuple(n if m == 1 else n // m if m else 1 for n, m in zip(shape, grid, strict=True))


# ------------------------------------------------------------------------------------------------------ on histograms


# Compiled once for each shape and code range, outside jit too: a scan's body is a function made anew at each call.
@functools.partial(jax.jit, static_argnames=("qmin", "qmax", "symmetric"))
def least_squares(
    counts: Any, low: Any, high: Any, qmin: int, qmax: int, symmetric: bool
) -> tuple[jax.Array, jax.Array]:
    """The range of least mean squared error.

    Tried are parts ``2^(-k / 16)``, k = 0 to 127, of each end: of both alike where symmetric, else of the upper end, of
    the lower, and of the upper again. Ranges whose errors agree to rounding may be chosen differently from platform to
    platform.

    Args:
      counts: float32 ``[*blocks, bins]`` over [low, high]; of magnitudes over [0, high] where symmetric.
      low, high: float32 ``[*blocks]``, the one not above 0, the other not below.
      qmin, qmax: the code range. Symmetric ranges use qmax on both sides.
    """
    fractions = jnp.asarray(_FRACTIONS, jnp.float32)
    if symmetric:
        weights = jnp.asarray(_symmetric_errors(counts.shape[-1], qmax))
        errors = jnp.einsum("...b,jb->...j", counts, weights, precision=jax.lax.Precision.HIGHEST)
        high = high * fractions[errors.argmin(axis=-1)]
        return -high, high

    edges = jnp.arange(counts.shape[-1] + 1, dtype=jnp.float32) / counts.shape[-1]
    # In units of the whole range, which may be too wide for float32.
    whole = jnp.maximum(high / 2 - low / 2, jnp.finfo(jnp.float32).tiny)
    bottom, top = low / 2 / whole, high / 2 / whole
    edges = bottom[..., None] + edges

    def errors_of(low: Any, high: Any) -> Any:
        step = jnp.maximum(high - low, 1e-9)[..., None] / (qmax - qmin)
        zero = jnp.clip(jnp.round(qmin - low[..., None] / step), qmin, qmax)
        u = edges / step
        n = jnp.clip(jnp.round(u) + zero, qmin, qmax) - zero
        primitive, a, b = (u - n) ** 3 / 3, slice(None, -1), slice(1, None)
        area = (n[..., b] - n[..., a]) / 12 + (primitive[..., b] - primitive[..., a])
        return (counts * area).sum(axis=-1) * step[..., 0] ** 3

    def best(low_of: Any, high_of: Any) -> Any:
        def try_one(found: Any, fraction: Any) -> tuple[Any, None]:
            least, kept = found
            error = errors_of(low_of(fraction), high_of(fraction))
            return (jnp.minimum(error, least), jnp.where(error < least, fraction, kept)), None

        # Not constants: inside shard_map the state varies over the axes that the counts vary over.
        start = (bottom * 0 + jnp.inf, bottom * 0 + 1)
        return jax.lax.scan(try_one, start, fractions)[0][1]

    upper = best(lambda f: bottom, lambda f: top * f)
    lower = best(lambda f: bottom * f, lambda f: top * upper)
    upper = best(lambda f: bottom * lower, lambda f: top * f)
    return low * lower, high * upper


@functools.cache
def _symmetric_errors(bins: int, qmax: int) -> np.ndarray:
    """[fractions, bins]: the mean squared error within each bin of [0, 1], for each end of the code range.

    The integral of ``(u - round(u))^2`` from 0 to u is ``n / 12 + (u - n)^3 / 3`` with n = round(u); with n held at
    qmax beyond it, the formula includes clipping.
    """
    step = _FRACTIONS[:, None] / qmax
    u = np.arange(bins + 1) / bins / step
    n = np.minimum(np.round(u), qmax)
    area = np.diff(n, axis=1) / 12 + np.diff((u - n) ** 3, axis=1) / 3
    return (area / np.diff(u, axis=1) * step**2).astype(np.float32)


@functools.partial(jax.jit, static_argnames="levels")
def least_divergence(counts: Any, high: Any, levels: int) -> jax.Array:
    """The clipping threshold of entropy calibration (S. Migacz, "8-bit inference with TensorRT", GTC 2017).

    For each threshold of i bins, the distribution of the first i bins, with what lies beyond added to the last of them,
    is compared with the same bins quantised to `levels` levels, each level's counts spread evenly over its bins that
    hold any. The threshold of the least Kullback-Leibler divergence wins. i runs from `levels` (all that fewer bins
    hold is kept as it is) to the number of bins, in at most 128 steps.

    Args:
      counts: float32 ``[*blocks, bins]`` of magnitudes over [0, high].
      high: float32 ``[*blocks]``.
      levels: non-negative codes: 128 for int8.
    """
    bins = counts.shape[-1]
    levels = min(levels, bins)
    index = jnp.arange(bins)
    ends = jnp.cumsum(counts, axis=-1)
    total = jnp.maximum(ends[..., -1:], 1)
    step = max(1, (bins - levels) // 128)
    thresholds = jnp.arange(levels, bins + 1, step)

    def divergence(i: Any) -> Any:
        inside = index < i
        beyond = jnp.where(index >= i, counts, 0).sum(axis=-1, keepdims=True)
        p = jnp.where(inside, counts, 0) + jnp.where(index == i - 1, beyond, 0)
        level = jnp.where(inside, index * levels // i, -1)
        # Sums by products with 0 and 1: differences of running sums would drown small levels.
        member = (level[:, None] == jnp.arange(levels)).astype(jnp.float32)
        kept = jnp.where(inside, counts, 0)
        sums = jnp.matmul(kept, member, precision=jax.lax.Precision.HIGHEST)
        held = jnp.matmul((kept > 0).astype(jnp.float32), member, precision=jax.lax.Precision.HIGHEST)
        mean = jnp.matmul(sums / jnp.maximum(held, 1), member.T, precision=jax.lax.Precision.HIGHEST)
        q = jnp.where(kept > 0, mean, 0)
        p, q = p / total, q / jnp.maximum(q.sum(axis=-1, keepdims=True), 1)
        # A last bin that holds nothing but what was clipped has no counterpart: the smallest one stands for it.
        q = jnp.where((p > 0) & (q == 0), jnp.float32(1e-10), q)
        return jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p / jnp.where(q > 0, q, 1), 1)), 0).sum(axis=-1)

    divergences = jax.lax.map(divergence, thresholds)
    chosen = thresholds[divergences.argmin(axis=0)]
    return high * (chosen.astype(jnp.float32) / bins)


def counted_percentile(counts: Any, low: Any, high: Any, percentile: float) -> jax.Array:
    """The percentile of a histogram over [low, high], values evenly spread within a bin."""
    ends = jnp.cumsum(counts, axis=-1)
    wanted = ends[..., -1:] * jnp.float32(percentile / 100)
    bins = counts.shape[-1]
    index = jnp.minimum((ends < wanted).sum(axis=-1, keepdims=True), bins - 1)
    inside = jnp.take_along_axis(counts, index, axis=-1)
    before = jnp.take_along_axis(ends, index, axis=-1) - inside
    part = jnp.where(inside > 0, (wanted - before) / jnp.maximum(inside, 1), 0)
    position = ((index + jnp.clip(part, 0, 1)) / bins)[..., 0]
    return low * (1 - position) + high * position
