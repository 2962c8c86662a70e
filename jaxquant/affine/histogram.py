"""Counts of values in bins, and exact percentiles built on them.

    histogram()   ->  histogram_p        ->  ffi/affine/histogram/{cpu.cc,cuda.cu}  ->  math.h
    percentile()  ->  digit_histogram_p  ->  the same loops, with a digit of the bits in place of a bin

Counts are integers: any order of adding gives the same ones, on every platform, thread count and sharding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant._core import ffi
from jaxquant._core.errors import refuse
from jaxquant._core.primitive import Operation, Result, bind, build, constant
from jaxquant.affine import exact
from jaxquant.affine import granularity as granularities

MAX_BINS = 1 << 16
_FLOATS = ("float32", "float16", "bfloat16")


def histogram(
    x: Any,
    low: Any,
    high: Any,
    granularity: Any = granularities.PerTensor(),  # noqa: B008
    *,
    bins: int = 2048,
    magnitude: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """How many values lie in each of ``bins`` equal parts of [low, high].

    ``bin = clip(floor((x - low) * (bins / (high - low))), 0, bins - 1)``, each operation rounded to float32 (after x,
    low and high are scaled by a power of two, so that none overflows). Values outside the range count in the end bins,
    NaN and infinities nowhere. A range that is empty, reversed or not finite counts everything in bin 0.

    Args:
      x: float array of any shape; float64 is rounded to float32 first, and stays finite.
      low, high: floats that broadcast to the blocks of ``granularity``.
      granularity: which elements share a histogram.
      bins: 1 to 65536.
      magnitude: count ``|x|`` in place of x.
      implementation: None, "ffi" or "xla".

    Returns:
      int32 of shape ``[*blocks, bins]``, where ``blocks`` counts the blocks along each axis of x (1 for a whole axis).
      Exact: the same on every platform, thread count and sharding, where one all-reduce adds the shards' counts. More
      than 2^31 - 1 elements in a block overflow. Integers: no gradient.

    >>> histogram(jnp.array([0.1, 0.2, 0.9, 5.0, jnp.nan]), 0.0, 1.0, bins=4)
    Array([[2, 0, 0, 2]], dtype=int32)
    """
    name = "histogram"
    x, grid = prepare(name, x, granularity)
    if isinstance(bins, bool) or not isinstance(bins, int) or not 1 <= bins <= MAX_BINS:
        raise refuse(name, "bins", f"an integer from 1 to {MAX_BINS}", repr(bins), "2048 suits most uses")
    bounds = []
    for operand, value in (("low", low), ("high", high)):
        value = jnp.asarray(value, jnp.float32)
        try:
            bounds.append(jnp.broadcast_to(value, grid))
        except ValueError:
            remedy = "give a scalar or a bound for each block"
            raise refuse(name, operand, f"a shape that broadcasts to {grid}", str(value.shape), remedy) from None
    return count(x, *bounds, bins=bins, magnitude=magnitude, implementation=implementation)


def percentile(
    x: Any,
    q: float | Sequence[float],
    granularity: Any = granularities.PerTensor(),  # noqa: B008
    *,
    magnitude: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Exact percentiles of the finite values, without sorting.

    Of n finite values in ascending order, the value at position ``h = q / 100 * (n - 1)`` (exact, to 2^-24), between
    its neighbours a and b by ``a + (b - a) * t`` for a fraction t below 0.5, else ``b - (b - a) * (1 - t)``, in
    float32: the rule of ``numpy.percentile(method="linear")`` on the values as float64, but for the last rounding.
    The neighbours are found by counting: 11, then 10 or 11, then 10 bits of the float at a time.

    Args:
      x: float array of any shape; float64 is rounded to float32 first.
      q: a static percentage from 0 to 100, or a sequence of them.
      granularity: which elements belong together.
      magnitude: of ``|x|`` in place of x.
      implementation: None, "ffi" or "xla".

    Returns:
      float32, one value for each block (x's rank); for a sequence, stacked along a new first axis. NaN where a block
      has no finite value. The same bits on every platform, but for GPU and TPU without kernels. Under sharding each of
      the three steps adds counts with one all-reduce. No gradient: a constant.

    >>> percentile(jnp.arange(11.0), [50, 99])
    Array([[5. ],
           [9.9]], dtype=float32)
    """
    x, grid = prepare("percentile", x, granularity)
    qs = tuple(q) if isinstance(q, Sequence) else (q,)
    for value in qs:
        if isinstance(value, (bool, str)) or not isinstance(value, (int, float)) or not 0 <= value <= 100:
            remedy = "percentages are static: pass a float"
            raise refuse("percentile", "q", "numbers from 0 to 100", repr(value), remedy)
    values, counted = percentiles(x, grid, qs, magnitude, implementation)
    out = jnp.moveaxis(jnp.where(counted[..., None] > 0, values, jnp.nan), -1, 0)
    return out if isinstance(q, Sequence) else out[0]


# ------------------------------------------------------------------------------------------ for the rest of the package


def prepare(name: str, x: Any, granularity: Any) -> tuple[jax.Array, tuple[int, ...]]:
    """x in a type that is counted, and how many blocks there are along each axis."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise refuse(name, "x", "a float array", x.dtype.name, "convert it", TypeError)
    block = granularities.resolve(name, granularity, x.shape)
    return countable(x), granularities.scale_shape(x.shape, block)


def countable(x: Any) -> jax.Array:
    """float64 as float32, in which what is finite stays finite."""
    x = jnp.asarray(x)
    if x.dtype.name in _FLOATS:
        return x
    largest = float(jnp.finfo(jnp.float32).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(jnp.float32)


def count(x: Any, low: Any, high: Any, *, bins: int, magnitude: bool, implementation: str | None = None) -> jax.Array:
    """`histogram` of arrays that are ready: low and high have a value for each block."""
    params = {"bins": bins, "magnitude": magnitude}
    implementation = ffi.check_implementation("histogram", implementation)
    return bind(histogram_p, x[..., None], low[..., None], high[..., None], **params, implementation=implementation)


def percentiles(
    x: Any, grid: tuple[int, ...], qs: Sequence[float], magnitude: bool, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Percentiles ``[*grid, len(qs)]`` of each block, meaningless where nothing was counted, and the counts."""
    implementation = ffi.check_implementation("percentile", implementation)
    prefix = jnp.zeros((*grid, 1), jnp.uint32)
    counted: Any = None
    ranks: Any = None
    fractions: Any = None
    for shift, width in _digits(x.dtype, magnitude):
        params = {"shift": shift, "width": width, "magnitude": magnitude, "implementation": implementation}
        counts = bind(digit_histogram_p, x[..., None], prefix, **params)
        counts = counts.reshape(*prefix.shape, 1 << width)
        if ranks is None:
            counted = counts.sum(axis=(-2, -1), dtype=jnp.int32)
            whole, fractions = _positions(counted, qs)
            ranks = jnp.stack([whole, whole + 1], axis=-1).reshape(*counted.shape, 2 * len(qs))
            ranks = jnp.clip(ranks, 0, jnp.maximum(counted - 1, 0)[..., None])
        digit, below = _locate(counts, ranks)
        ranks = ranks - below
        prefix = prefix << width | digit.astype(jnp.uint32)
    values = _from_key(prefix, x.dtype, magnitude)
    return _interpolate(values[..., ::2], values[..., 1::2], fractions), counted


def blocks_last(x: Any, grid: tuple[int, ...]) -> jax.Array:
    """[*grid, n]: the elements of each block along one axis."""
    split = [size for n, m in zip(x.shape, grid, strict=True) for size in (m, n // m if m else 1)]
    order = [*range(0, len(split), 2), *range(1, len(split), 2)]
    return x.reshape(split).transpose(order).reshape(*grid, math.prod(split[1::2]))


# ---------------------------------------------------------------------------------------------------------- percentiles


def _digits(dtype: Any, magnitude: bool) -> list[tuple[int, int]]:
    """(shift, width) of each digit of a key. 16-bit floats have nothing in the last 10 bits."""
    digits = [(20, 11), (10, 10), (0, 10)] if magnitude else [(21, 11), (10, 11), (0, 10)]
    return digits if dtype == jnp.float32 else digits[:2]


def _key(x: Any, magnitude: bool) -> tuple[Any, Any]:
    """Unsigned integers in the order of the values, and which are finite."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    absolute = bits & jnp.uint32(0x7FFFFFFF)
    finite = absolute < 0x7F800000
    return absolute if magnitude else jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000)), finite


def _from_key(prefix: Any, dtype: Any, magnitude: bool) -> jax.Array:
    key = prefix
    if dtype != jnp.float32:
        key = prefix << 10
        if not magnitude:  # the bits below are those of a mantissa that ends in zeros, inverted where negative
            key = jnp.where(key >> 31 == 1, key, key | jnp.uint32(0x3FF))
    if not magnitude:
        key = jnp.where(key >> 31 == 1, key ^ jnp.uint32(0x80000000), ~key)
    return jax.lax.bitcast_convert_type(key, jnp.float32)


def _positions(counted: Any, qs: Sequence[float]) -> tuple[Any, Any]:
    """Of each q / 100 * (counted - 1) the whole part as int32 and the fraction as float32: exact to 2^-24. [..., qs].

    A float32 product would miss the rank by one from 2^24 elements on: the product is of 16-bit digits.
    """
    last = jnp.maximum(counted - 1, 0)[..., None]
    shares = [int(Fraction(q) / 100 * 2**64) for q in qs]
    digits = [np.array([share >> (48 - 16 * i) & 0xFFFF for share in shares], np.uint32) for i in range(4)]
    halves = [last.astype(jnp.uint32) >> 16, last.astype(jnp.uint32) & 0xFFFF]  # weights 2^16 and 1
    # sums[i]: weight 2^(16 - 16 i); of the digits: 2^-16, ..., 2^-64
    sums: list[Any] = [jnp.zeros((*counted.shape, len(qs)), jnp.uint32) for _ in range(6)]
    for i, half in enumerate(halves):
        for j, digit in enumerate(digits):
            product = half * digit
            sums[i + j] = sums[i + j] + (product >> 16)
            sums[i + j + 1] = sums[i + j + 1] + (product & 0xFFFF)
    for i in range(5, 0, -1):
        sums[i - 1] = sums[i - 1] + (sums[i] >> 16)
        sums[i] = sums[i] & 0xFFFF
    whole = (sums[0] << 16 | sums[1]).astype(jnp.int32)
    fraction = ((sums[2] << 16 | sums[3]) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    end = np.array([q == 100 for q in qs])  # a share of 1 has no digits
    return jnp.where(end, last, whole), jnp.where(end, 0, fraction)


def _locate(counts: Any, ranks: Any) -> tuple[Any, Any]:
    """The bin that holds each rank, and how many lie in the bins before it. counts [..., k or 1, bins], ranks [..., k].

    First among bins of bins: a running sum over all of them takes longer than the counting.
    """
    part = 32
    parts = counts.reshape(*counts.shape[:-1], counts.shape[-1] // part, part)
    outer, before = _first_beyond(parts.sum(axis=-1, dtype=jnp.int32), ranks)
    parts = jnp.broadcast_to(parts, (*ranks.shape, *parts.shape[-2:]))
    chosen = jnp.take_along_axis(parts, outer[..., None, None], axis=-2)[..., 0, :]
    inner, between = _first_beyond(chosen, ranks - before)
    return outer * part + inner, before + between


def _first_beyond(counts: Any, ranks: Any) -> tuple[Any, Any]:
    ends = jnp.cumsum(counts, axis=-1, dtype=jnp.int32)
    found = jnp.minimum((ends <= ranks[..., None]).sum(axis=-1, dtype=jnp.int32), counts.shape[-1] - 1)
    starts = jnp.broadcast_to(ends - counts, (*ranks.shape, counts.shape[-1]))
    return found, jnp.take_along_axis(starts, found[..., None], axis=-1)[..., 0]


def _interpolate(a: Any, b: Any, t: Any) -> jax.Array:
    difference, rest = b - a, 1 - t
    near_a, near_b = a + exact.seal(difference * t), b - exact.seal(difference * rest)
    # From far below zero to far above it the difference overflows.
    far = exact.seal(a * rest) + exact.seal(b * t)
    return jnp.where(jnp.isfinite(difference), jnp.where(t < 0.5, near_a, near_b), far)


# ----------------------------------------------------------------------------------------------------------- primitives
# Trailing axes of x: 1; of the bounds: 1; of prefixes: how many are looked for; of counts: all their bins.


def binning(low: Any, high: Any, bins: int) -> tuple[Any, Any, Any]:
    """(unit, origin, factor) of ``bin = (x * unit - origin) * factor``, as `Binning` of math.h computes them."""
    low, high = low.astype(jnp.float32), high.astype(jnp.float32)
    largest = jax.lax.bitcast_convert_type(jnp.maximum(jnp.abs(low), jnp.abs(high)), jnp.uint32) >> 23
    largest = largest.astype(jnp.int32) & 0xFF
    unit = jax.lax.bitcast_convert_type(jnp.clip(254 - largest, 1, 253) << 23, jnp.float32)
    origin = low * unit
    width = high * unit - origin
    factor = jnp.float32(bins) / width
    good = (width > 0) & (jnp.abs(width) < jnp.inf) & (jnp.abs(factor) < jnp.inf)
    return unit, jnp.where(good, origin, 0), jnp.where(good, factor, 0)


def _count(slots: Any, bins: int) -> jax.Array:
    """How often each slot comes along the last axis; other slots than 0 to bins - 1 are left out."""
    flat = slots.reshape(math.prod(slots.shape[:-1]), slots.shape[-1])
    one = jax.vmap(lambda s: jnp.zeros(bins, jnp.int32).at[s].add(1, mode="drop"))
    counts = one(flat) if flat.shape[0] else jnp.zeros((0, bins), jnp.int32)
    return counts.reshape(*slots.shape[:-1], bins)


def _histogram_reference(x: Any, low: Any, high: Any, *, bins: int, magnitude: bool) -> Any:
    unit, origin, factor = binning(low, high, bins)
    values = blocks_last(x[..., 0], low.shape[:-1]).astype(jnp.float32)
    values = jnp.abs(values) if magnitude else values
    t = exact.seal(values * unit - origin) * factor
    slot = jnp.where(t >= bins - 1, bins - 1, jnp.where(t > 0, t, 0)).astype(jnp.int32)
    return _count(jnp.where(jnp.abs(values) < jnp.inf, slot, bins), bins)


def _digit_histogram_reference(x: Any, prefix: Any, *, shift: int, width: int, magnitude: bool) -> Any:
    key, finite = _key(blocks_last(x[..., 0], prefix.shape[:-1]), magnitude)
    digit = ((key >> shift) & jnp.uint32((1 << width) - 1)).astype(jnp.int32)
    # Another shift by `width`: one by 32 would be undefined.
    same = ((key >> shift) >> width)[..., None, :] == prefix[..., None]
    slots = jnp.where(same & finite[..., None, :], digit[..., None, :], 1 << width)
    return _count(slots, 1 << width).reshape(*prefix.shape[:-1], prefix.shape[-1] << width)


histogram_p = build(
    Operation(
        name="histogram",
        operands=("full", "scale", "scale"),
        results=lambda x, low, high, *, bins, **_: [Result("scale", (*low.shape[:-1], bins), jnp.int32)],
        reference=_histogram_reference,
        attributes=lambda *, bins, magnitude: {"bins": bins, "magnitude": int(magnitude)},
        dtypes=_FLOATS,
    )
)
digit_histogram_p = build(
    Operation(
        name="digit_histogram",
        operands=("full", "scale"),
        results=lambda x, prefix, *, width, **_: [
            Result("scale", (*prefix.shape[:-1], prefix.shape[-1] << width), jnp.int32)
        ],
        reference=_digit_histogram_reference,
        attributes=lambda *, shift, width, magnitude: {"shift": shift, "width": width, "magnitude": int(magnitude)},
        dtypes=_FLOATS,
    )
)
constant(histogram_p, digit_histogram_p)
