"""Scales, zero points and codes chosen from data, in plain NumPy, one block at a time; nothing of the library."""

import itertools

import numpy as np
import oracle

TINY, LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max


def limits(qtype, symmetric, narrow_range=None):
    low, high = oracle.RANGES[qtype]
    return low + bool(symmetric if narrow_range is None else narrow_range), high


def blocks(shape, block):
    """(index of the block, slices of its elements) of every block."""
    counts = [1 if b == n else n // b for n, b in zip(shape, block, strict=True)]
    for index in itertools.product(*map(range, counts)):
        yield index, tuple(slice(i * b, (i + 1) * b) for i, b in zip(index, block, strict=True))


def grid(shape, block):
    return tuple(1 if b == n else n // b for n, b in zip(shape, block, strict=True))


def finite(values):
    """The finite values as float32 numbers; larger ones count as the largest."""
    values = np.asarray(values).ravel()
    wide = values[np.isfinite(values.astype(np.float64))].astype(np.float64)
    return oracle.flush(np.clip(wide, -float(LARGEST), float(LARGEST)).astype(np.float32))


def range_of(values):
    values = finite(values)
    if not len(values):
        return np.float32(np.inf), np.float32(-np.inf)
    return values.min() + np.float32(0), values.max() + np.float32(0)


@np.errstate(all="ignore")
def parameters(low, high, qmin, qmax, symmetric):
    """Scale and zero point of one range."""
    low, high = min(low, np.float32(0)), max(high, np.float32(0))
    if symmetric:
        extent = max(-low, high)
        scale = extent / np.float32(qmax)
    else:
        extent, steps = high - low, np.float32(qmax - qmin)
        scale = extent / steps
        if not np.isfinite(extent):
            half = np.float32(0.5)
            scale = (high * half - low * half) / steps * np.float32(2)
    scale = np.float32(1) if extent < TINY else max(scale, TINY)
    if symmetric:
        return scale, 0
    return scale, int(np.clip(qmin - np.rint(oracle.flush(low / scale)), qmin, qmax))


def choose(x, block, qtype="int8", symmetric=True, narrow_range=None, *, centred=False):
    """Scale and zero point of every block. centred: of the range from -a to a of the largest magnitude a."""
    shape, (qmin, qmax) = grid(x.shape, block), limits(qtype, symmetric, narrow_range)
    scale, zero_point = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    for index, elements in blocks(x.shape, block):
        low, high = range_of(x[elements])
        if centred:
            high = max(-min(low, np.float32(0)), high, np.float32(0))
            low = -high
        scale[index], zero_point[index] = parameters(low, high, qmin, qmax, symmetric)
    return scale, zero_point


def quantize(x, block, qtype="int8", symmetric=True, narrow_range=None):
    """Codes, scale and zero point."""
    scale, zero_point = choose(x, block, qtype, symmetric, narrow_range)
    qmin, qmax = limits(qtype, symmetric, narrow_range)
    return oracle.quantize(x, scale, zero_point, qtype=qtype, qmin=qmin, qmax=qmax), scale, zero_point


def fake_quantize(x, block, qtype="int8", symmetric=True, narrow_range=None):
    scale, zero_point = choose(x, block, qtype, symmetric, narrow_range)
    qmin, qmax = limits(qtype, symmetric, narrow_range)
    return oracle.fake_quantize(x, scale, zero_point, qtype=qtype, qmin=qmin, qmax=qmax)
