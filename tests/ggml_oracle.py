"""The GGML operations in NumPy, with the reference library for the weights: what every implementation is compared with.

quantised, random_bytes      data of a format
dequantize                   float32, the library's bits
linear, moe_linear           float64 products with the dequantised weights
nmse                         sum (a - b)^2 / sum b^2
"""

import ggml_library
import numpy as np

from jaxquant.ggml.formats import formats

QUANTISED = [name for name, f in formats.items() if not f.is_float]
NAMES = list(formats)


def quantised(name, x):
    """Bytes [..., row_bytes] of x [..., k] by the library; an importance matrix where the format wants one."""
    format = formats[name]
    rows = np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])
    imatrix = (rows**2).sum(0) + 1e-3 if format.requires_imatrix else None
    data = ggml_library.quantize(format.type_id, rows, imatrix)
    return data.reshape(*x.shape[:-1], data.shape[-1])


# Where the half scales lie in a block, where not at its start alone.
_HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q8_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "Q8_K": (), "MXFP4": (), "NVFP4": (),
}  # fmt: skip


def random_bytes(name, rows, blocks, seed=0):
    """Uniformly random bytes whose half scales are finite, of either sign, some subnormal, some zero."""
    rng = np.random.default_rng(seed)
    format = formats[name]
    data = rng.integers(0, 256, (rows, blocks, format.type_size), np.uint8)
    for at in () if format.is_float else _HALVES.get(name, (0,)):
        half = rng.integers(0, 2**16, (rows, blocks), np.uint16)
        half = np.where(half & 0x7C00 == 0x7C00, half & 0xBFFF, half)
        kind = rng.integers(0, 8, (rows, blocks))
        half = np.where(kind == 0, half & 0x83FF, np.where(kind == 1, half & 0x8000, half)).astype("<u2")
        data[..., at : at + 2] = half.view(np.uint8).reshape(rows, blocks, 2)
    if name == "IQ1_M":  # its sign and three bits of the exponent are the last byte's high nibble
        high = data[..., 55]
        data[..., 55] = np.where(high & 0x70 == 0x70, high & 0xBF, high)
    return data.reshape(rows, blocks * format.type_size)


def dequantize(data, name):
    """float32 [..., k], the library's bits."""
    format = formats[name]
    rows = data.reshape(-1, data.shape[-1])
    if name == "Q8_1":  # the library reads it nowhere; without the sum it is Q8_0
        blocks = rows.reshape(len(rows), -1, format.type_size)
        rows, format = np.delete(blocks, (2, 3), axis=-1).reshape(len(rows), -1), formats["Q8_0"]
    values = ggml_library.dequantize(format.type_id, rows)
    return values.reshape(*data.shape[:-1], values.shape[-1])


def linear(x, data, name):
    """float64 [..., m, n] of x [..., m, k] and data [..., n, row_bytes]; leading axes broadcast."""
    return np.asarray(x, np.float64) @ np.swapaxes(dequantize(data, name).astype(np.float64), -1, -2)


def linear_dx(dy, data, name):
    return np.asarray(dy, np.float64) @ dequantize(data, name).astype(np.float64)


def moe_linear(x, data, ids, name, transpose=False):
    """float64 [tokens, top_k, n] of x [tokens, 1 | top_k, k]; ids out of range: zero rows. transpose: for dx."""
    weights = dequantize(data, name).astype(np.float64)
    weights = weights if transpose else np.swapaxes(weights, -1, -2)
    x = np.broadcast_to(np.asarray(x, np.float64), (*ids.shape, x.shape[-1]))
    y = np.zeros((*ids.shape, weights.shape[-1]))
    for place in np.ndindex(*ids.shape):
        if 0 <= ids[place] < len(weights):
            y[place] = x[place] @ weights[ids[place]]
    return y


def nmse(actual, expected):
    expected = np.asarray(expected, np.float64)
    error = ((np.asarray(actual, np.float64) - expected) ** 2).sum()
    return 0.0 if error == 0 else error / (expected**2).sum()


def assert_same_bits(actual, expected):
    """Equal bits; any NaN for a NaN. Subnormals: a zero of their sign will do."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    tiny = np.abs(expected.astype(np.float32)) < np.finfo(np.float32).tiny
    unsigned = f"u{expected.dtype.itemsize}"
    same = actual.view(unsigned) == expected.view(unsigned)
    nan = np.isnan(expected)
    same |= nan & np.isnan(actual)
    same |= tiny & (actual == 0) & (np.signbit(actual) == np.signbit(expected))
    where = np.argwhere(~same)
    assert not len(where), (
        f"{len(where)} of {same.size}; first at {where[0]}: {actual[tuple(where[0])]!r}, "
        f"expected {expected[tuple(where[0])]!r}"
    )
