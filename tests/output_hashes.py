"""A hash of the bits of every affine output.

What an instruction set, a thread count or a flag could change shows as a different hash.
"""

import hashlib

import calls
import granularities
import jax
import numpy as np

import jaxquant


def digest(a):
    """NaN counts as NaN, whatever its bits: sign and payload are not promised."""
    a = np.ascontiguousarray(a)
    if a.dtype.kind in "fV":
        a = np.where(np.isnan(a), np.full_like(a, np.nan), a)
    return hashlib.sha256(a.tobytes()).hexdigest()[:16]


def stochastic(keywords):
    keywords = calls.library_keywords(keywords) | {"rounding": "stochastic", "implementation": "ffi"}

    def call(x, scale, zero_point, dy):
        key = jax.random.key(5)
        y, backward = jax.vjp(lambda *a: jaxquant.fake_quantize(*a, zero_point, key=key, **keywords), x, scale)
        return y, backward(dy), jaxquant.quantize(x, scale, zero_point, key=key, **keywords)

    return call


def every_hash():
    large = granularities.Granularity("large", (515, 2053), (515,), axis=0)
    one_scale = granularities.Granularity("one_scale", (1_060_001,), ())
    chosen = [
        *((granularity, "float32", "int8") for granularity in granularities.FEW),
        *((granularities.PER_CHANNEL_FIRST, dtype, "uint4") for dtype in ("float16", "bfloat16", "float64")),
        (granularities.PER_CHANNEL_LAST, "float64", "int16"),
        (large, "float32", "int8"),
        (large, "bfloat16", "uint8"),
        (one_scale, "float32", "int8"),
    ]
    hashes = {}
    for granularity, dtype, qtype in chosen:
        operands = granularity.operands(dtype, qtype)
        x = operands.x.copy()
        x.flat[::97] = np.nan
        x.flat[5::89] = np.inf
        with calls.precision(x.dtype):
            call = calls.results({"qtype": qtype, **granularity.keywords}, x.dtype, "ffi")
            outputs = jax.jit(call)(x, operands.scale, operands.zero_point, operands.dy)
            drawn = jax.jit(stochastic({"qtype": qtype, **granularity.keywords}))
            outputs["stochastic"] = drawn(x, operands.scale, operands.zero_point, operands.dy)
        for name, value in outputs.items():
            hashes[f"{granularity} {dtype} {qtype} {name}"] = [digest(leaf) for leaf in jax.tree.leaves(value)]
    return hashes
