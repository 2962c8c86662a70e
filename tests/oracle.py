"""The quantiser in plain NumPy: what every kernel, lowering and transform is compared with.

Independent on purpose: nothing here imports the library or JAX, so no shared mistake can hide. The arithmetic is spelt
out one IEEE operation at a time, in float32 (float64 for float64 data), and subnormal numbers count as zero after each
operation, as they do under the flush-to-zero mode in which XLA runs code on CPU.

    steps(x, scale, ...)         t, round(t), v, mask: the intermediate values of the rule
    quantize, dequantize, fake_quantize, quantize_backward
    *_gradient(dy, ...)          terms per element, and their sums in the documented order (`ordered_sum`)
    pack, unpack                 4- and 2-bit codes
    cases()                      the stored reference cases
    assert_same_bits             the one comparison of the value tests
"""

import dataclasses
import math
import pathlib

import ml_dtypes
import numpy as np

RANGES = {
    "int2": (-2, 1),
    "uint2": (0, 3),
    "int4": (-8, 7),
    "uint4": (0, 15),
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int16": (-32768, 32767),
    "uint16": (0, 65535),
}
CONTAINERS = {
    "int2": np.int8,
    "uint2": np.uint8,
    "int4": np.int8,
    "uint4": np.uint8,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "uint16": np.uint16,
}
BITS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4}
DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def qtype_name(qtype):
    """The name of a code type given as a string, a NumPy dtype or a JAX scalar type."""
    return qtype if isinstance(qtype, str) else np.dtype(getattr(qtype, "dtype", qtype)).name


def code_range(qtype, qmin=None, qmax=None):
    low, high = RANGES[qtype_name(qtype)]
    return low if qmin is None else int(qmin), high if qmax is None else int(qmax)


def arithmetic_type(dtype):
    """float64 computes in float64, everything else in float32."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


@np.errstate(invalid="ignore")
def flush(a):
    """``a`` with subnormals (of its arithmetic type) replaced by a zero of their sign."""
    a = np.asarray(a)
    if a.dtype.kind not in "fV" or a.dtype == np.float16:  # every float16 is a normal float32
        return a
    return np.where(
        np.abs(a) < np.finfo(arithmetic_type(a.dtype)).tiny.astype(a.dtype), np.copysign(a.dtype.type(0), a), a
    )


def _grid_shape(shape, scale_shape, rank, axis):
    """The shape, with x's rank, of a scale or of a zero point that broadcasts to the scale."""
    shape = (1,) * (len(scale_shape) - len(shape)) + tuple(shape)
    if axis is None:
        return shape if shape else (1,) * rank
    grid = [1] * rank
    grid[axis] = shape[0]
    return tuple(grid)


def to_grid(a, scale_shape, x_shape, axis):
    """A scale or zero point with x's rank, as the public functions reshape it."""
    a = np.broadcast_to(np.asarray(a), scale_shape)
    return a.reshape(_grid_shape(scale_shape, scale_shape, len(x_shape), axis))


def spread(a, x_shape):
    """Repeats each element of a grid over the block of x that shares it."""
    for d, (n, m) in enumerate(zip(x_shape, a.shape, strict=True)):
        a = np.repeat(a, n // m if m else 0, axis=d) if m != n else a
    return a


@dataclasses.dataclass(frozen=True)
class Steps:
    """Intermediate values of the rule, in the arithmetic type and x's shape."""

    x: np.ndarray
    s: np.ndarray
    z: np.ndarray  # rounded half to even
    t: np.ndarray  # x / s
    rounded: np.ndarray
    v: np.ndarray
    clamped: np.ndarray  # NaN stays
    qmin: int
    qmax: int

    @property
    def mask(self):
        return (self.v >= self.qmin) & (self.v <= self.qmax)

    @property
    def above(self):
        return self.v > self.qmax

    @property
    def below(self):
        return self.v < self.qmin


def _operands(x_shape, real, scale, zero_point, axis):
    scale = np.asarray(scale)
    zero_point = np.asarray(0 if zero_point is None else zero_point)
    grid_scale = to_grid(flush(scale.astype(real)), scale.shape, x_shape, axis)
    # Adding +0 turns the -0 that -0.3 rounds to into +0: v is never -0.
    grid_zero = to_grid(np.rint(zero_point.astype(real)) + real.type(0), scale.shape, x_shape, axis)
    return spread(grid_scale, x_shape), spread(grid_zero, x_shape)


@np.errstate(all="ignore")
def steps(x, scale, zero_point=None, *, axis=None, qtype="int8", qmin=None, qmax=None, drawn=None, **_):
    """drawn: u of each element where rounding is stochastic (see threefry.py)."""
    x = np.asarray(x)
    qmin, qmax = code_range(qtype, qmin, qmax)
    real = arithmetic_type(x.dtype)
    s, z = _operands(x.shape, real, scale, zero_point, axis)
    x = flush(x.astype(real))
    t = flush(x / s)
    rounded = np.rint(t) if drawn is None else _rounded_as_drawn(t, drawn.astype(real))
    v = rounded + z
    clamped = np.where(v > qmax, real.type(qmax), np.where(v < qmin, real.type(qmin), v))
    return Steps(x, s, z, t, rounded, v, clamped, qmin, qmax)


def _rounded_as_drawn(t, u):
    """floor(t + u) without the rounding of the sum; NaN and infinities stay."""
    down = np.floor(t)
    return np.where(u >= 1 - (t - down), down + 1, down + t.dtype.type(0))


@np.errstate(all="ignore")
def quantize(x, scale, zero_point=None, *, qtype="int8", dtype=None, **keywords):
    """Codes, in the integer container of ``qtype`` or carried in the floating ``dtype``."""
    a = steps(x, scale, zero_point, qtype=qtype, **keywords)
    codes = np.where(np.isnan(a.v), np.clip(a.z, a.qmin, a.qmax), a.clamped)
    return codes.astype(CONTAINERS[qtype_name(qtype)] if dtype is None else dtype)


@np.errstate(all="ignore")
def dequantize(q, scale, zero_point=None, *, axis=None, dtype=np.float32, **_):
    q = np.asarray(q)
    real = arithmetic_type(dtype)
    s, z = _operands(q.shape, real, scale, zero_point, axis)
    return flush((q.astype(real) - z) * s).astype(dtype)


@np.errstate(all="ignore")
def fake_quantize(x, scale, zero_point=None, **keywords):
    a = steps(x, scale, zero_point, **keywords)
    return flush((a.clamped - a.z) * a.s).astype(np.asarray(x).dtype)


def quantize_backward(dy, x, scale, zero_point=None, **keywords):
    return quantize_gradient(dy, x, scale, zero_point, **keywords).dx


@dataclasses.dataclass(frozen=True)
class Sum:
    """The gradient of a scale or zero point: one term per element of x, summed over those that share an element."""

    terms: np.ndarray
    grid: tuple  # with x's rank
    shape: tuple  # as the user gave it
    ordered: bool = True  # False where the library sums in two steps: a zero point that is broadcast to the scale

    @property
    def value(self):
        return ordered_sum(self.terms, self.grid).reshape(self.shape)

    @property
    def bound(self):
        """How far a sum in any other order may lie from ours: 2 eps log2(n) times the sum of the absolute terms.

        And one smallest normal number for each term that may have counted as zero.
        """
        n = max(self.terms.size // max(math.prod(self.grid), 1), 1)
        sizes = ordered_sum(np.abs(self.terms), self.grid).reshape(self.shape)
        info = np.finfo(self.terms.dtype)
        return 2 * info.eps * math.log2(n) * sizes + n * info.tiny


@dataclasses.dataclass(frozen=True)
class Gradient:
    dx: np.ndarray
    dscale: Sum
    dzero_point: Sum


def _gradient(x, dx, dscale_terms, dzero_point_terms, scale, zero_point, axis):
    scale_shape, zero_shape = np.shape(scale), np.shape(zero_point)
    grid = _grid_shape(scale_shape, scale_shape, x.ndim, axis)
    if zero_point is None:
        zero_shape = scale_shape
    zero_grid = _grid_shape(zero_shape, scale_shape, x.ndim, axis)
    return Gradient(
        flush(dx).astype(x.dtype),
        Sum(flush(dscale_terms), grid, scale_shape),
        Sum(flush(dzero_point_terms), zero_grid, zero_shape, ordered=zero_grid == grid),
    )


@np.errstate(all="ignore")
def quantize_gradient(dy, x, scale, zero_point=None, *, axis=None, **keywords):
    """Of `quantize` seen as float to float."""
    x = np.asarray(x)
    a = steps(x, scale, zero_point, axis=axis, **keywords)
    dy, zero = flush(np.asarray(dy).astype(a.t.dtype)), a.t.dtype.type(0)
    quotient = flush(dy / a.s)
    dx = np.where(a.mask, quotient, zero)
    dscale = np.where(a.mask, -quotient * a.t, zero)
    dzero_point = np.where(a.mask, dy, zero)
    return _gradient(x, dx, dscale, dzero_point, scale, zero_point, axis)


@np.errstate(all="ignore")
def fake_quantize_gradient(dy, x, scale, zero_point=None, *, axis=None, **keywords):
    x = np.asarray(x)
    a = steps(x, scale, zero_point, axis=axis, **keywords)
    real = a.t.dtype.type
    dy, zero = flush(np.asarray(dy).astype(real)), real(0)
    dscale = np.where(a.mask, dy * flush(a.rounded - a.t), zero)
    dscale = np.where(a.above, dy * (real(a.qmax) - a.z), dscale)
    dscale = np.where(a.below, dy * (real(a.qmin) - a.z), dscale)
    dzero_point = np.where(a.above | a.below, -a.s * dy, zero)
    return _gradient(x, np.where(a.mask, dy, zero), dscale, dzero_point, scale, zero_point, axis)


@np.errstate(all="ignore")
def dequantize_gradient(dy, q, scale, zero_point=None, *, axis=None, **_):
    """Of `dequantize` of codes carried in a floating dtype; dy has dequantize's ``dtype``."""
    q, dy = np.asarray(q), np.asarray(dy)
    real = arithmetic_type(dy.dtype)
    s, z = _operands(q.shape, real, scale, zero_point, axis)
    dy = flush(dy.astype(real))
    return _gradient(q, dy * s, dy * (q.astype(real) - z), -dy * s, scale, zero_point, axis)


@np.errstate(all="ignore")
def ordered_sum(terms, grid):
    """Sums the terms that share a grid element, in the one order that every kernel follows.

    The m terms of an element, in row-major order, form chunks of 256. Within a chunk lane l adds the terms l, l + 32,
    l + 64, ... in that order, starting from +0; the 32 lanes combine as a tree with distance 16, 8, 4, 2, 1. Chunk sums
    are summed by the same rule until one is left.
    """
    terms = np.asarray(terms)
    split = [size for n, m in zip(terms.shape, grid, strict=True) for size in (m, n // m if m else 0)]
    rank = len(grid)
    order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
    per_element = math.prod(split[1::2])
    rows = terms.reshape(split).transpose(order).reshape(math.prod(grid), per_element)
    while True:
        chunks = max(-(-rows.shape[1] // 256), 1)
        # Padding with +0 changes nothing: a lane starts from +0 and so never holds -0.
        padded = np.zeros((len(rows), chunks * 256), terms.dtype)
        padded[:, : rows.shape[1]] = rows
        by_lane = padded.reshape(len(rows), chunks, 8, 32)
        lanes = np.zeros((len(rows), chunks, 32), terms.dtype)
        for step in range(8):
            lanes = flush(lanes + by_lane[:, :, step])
        for distance in (16, 8, 4, 2, 1):
            lanes = flush(lanes[..., :distance] + lanes[..., distance : 2 * distance])
        rows = lanes[..., 0]
        if chunks == 1:
            return rows.reshape(grid)


def pack(q, qtype):
    """4- or 2-bit codes along the last axis into bytes, low bits first; a last byte is filled with zeros."""
    bits = BITS[qtype_name(qtype)]
    per_byte = 8 // bits
    q = np.asarray(q)
    size = -(-q.shape[-1] // per_byte)
    padded = np.zeros((*q.shape[:-1], size * per_byte), np.uint8)
    padded[..., : q.shape[-1]] = q.astype(np.uint8) & (2**bits - 1)
    fields = padded.reshape(*q.shape[:-1], size, per_byte)
    packed = np.zeros((*q.shape[:-1], size), np.uint8)
    for place in range(per_byte):
        packed |= fields[..., place] << np.uint8(place * bits)
    return packed


def unpack(packed, qtype, size):
    name = qtype_name(qtype)
    bits = BITS[name]
    packed = np.asarray(packed)
    fields = np.stack([packed >> np.uint8(place) & np.uint8(2**bits - 1) for place in range(0, 8, bits)], axis=-1)
    codes = fields.reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))[..., :size].astype(np.int16)
    if not name.startswith("u"):
        codes = np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)
    return codes.astype(CONTAINERS[name])


@dataclasses.dataclass(frozen=True)
class Case:
    """A stored reference case: operands, the keywords of the call, and the expected values (``spec``)."""

    name: str
    x: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray
    dy: np.ndarray
    axis: int | None
    block_shape: tuple | None
    qtype: str
    qmin: int
    qmax: int
    spec: dict

    def __repr__(self):
        return self.name

    @property
    def keywords(self):
        """Of the oracle's functions; the library's take the same with ``qtype`` as a dtype."""
        names = ("axis", "block_shape", "qtype", "qmin", "qmax")
        return {name: getattr(self, name) for name in names}


def cases(family="affine"):
    """Every stored case of a family, sorted by name."""
    folder = pathlib.Path(__file__).parent / "cases" / family
    return [_load(path) for path in sorted(folder.glob("*.npz"))]


def _load(path):
    with np.load(path) as stored:
        arrays = dict(stored)
    marker = "__bf16bits"
    arrays = {
        key.removesuffix(marker): value.view(ml_dtypes.bfloat16) if key.endswith(marker) else value
        for key, value in arrays.items()
    }
    axis, group = int(arrays["axis"]), int(arrays["group_size"])
    return Case(
        name=path.stem,
        x=arrays["x"],
        scale=arrays["scale"],
        zero_point=arrays["zero_point"],
        dy=arrays["dy"],
        axis=None if axis == -999 else axis,
        block_shape=(1,) * (arrays["x"].ndim - 1) + (group,) if group else None,
        qtype=str(arrays["qdtype"]),
        qmin=int(arrays["qmin"]),
        qmax=int(arrays["qmax"]),
        spec={key.removeprefix("spec_"): value for key, value in arrays.items() if key.startswith("spec_")},
    )


def same_bits(actual, expected, *, flushed=True):
    """Where two arrays of one dtype agree: NaN equals NaN whatever its bits, +0 differs from -0."""
    if actual.dtype.kind not in "fV":
        return actual == expected
    if flushed:
        actual, expected = flush(actual), flush(expected)
    bits = f"u{actual.dtype.itemsize}"
    return (actual.view(bits) == expected.view(bits)) | (np.isnan(actual) & np.isnan(expected))


def assert_same_bits(actual, expected, *, flush=True, **context):
    """Fails unless shape, dtype and every bit agree (see `same_bits`); ``context`` is shown at the first mismatches.

    Context values (x, scale, codes, ...) are anything that broadcasts to the shape compared.
    """
    actual, expected = (np.asarray(a, order="C") for a in (actual, expected))
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    wrong = np.argwhere(~same_bits(actual, expected, flushed=flush))
    if not len(wrong):
        return
    lines = [f"{len(wrong)} of {actual.size} elements differ"]
    for index in map(tuple, wrong[:8]):
        beside = {
            name: np.broadcast_to(value, actual.shape)[index] for name, value in context.items() if value is not None
        }
        shown = "".join(f", {name} {value!r}" for name, value in beside.items())
        lines.append(f"  at {tuple(map(int, index))}: got {actual[index]!r}, expected {expected[index]!r}{shown}")
    raise AssertionError("\n".join(lines))


def assert_same_sum(actual, expected, dtype, *, exact):
    """A scale or zero-point gradient of ``dtype``: the same bits where an order is promised, else within the bound."""
    actual, value = np.asarray(actual, order="C"), np.asarray(expected.value.astype(dtype), order="C")
    if exact and expected.ordered:
        assert_same_bits(actual, value)
        return
    assert actual.dtype == value.dtype, f"dtype {actual.dtype}, expected {value.dtype}"
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    bound = expected.bound
    if value.dtype != expected.terms.dtype:  # rounded once more, to the dtype of the scale
        bound = bound + float(ml_dtypes.finfo(value.dtype).eps) * np.abs(expected.value)
    same = same_bits(actual, value)
    with np.errstate(invalid="ignore"):
        close = (np.abs(actual.astype(np.float64) - value.astype(np.float64)) <= bound) | same
    assert close.all(), f"got {actual[~close][:5]}, expected {value[~close][:5]} within {bound[~close][:5]}"
