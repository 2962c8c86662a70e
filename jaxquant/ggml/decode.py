"""What the bytes of blocks mean, in jax.numpy (in C++: ffi/ggml/decode.h).

A decoder per format reads the fields of blocks [..., type_size] (the bytes, in int32) and gives integer codes
[..., block_size], a scale for each group of consecutive values [..., groups] and an offset alike, or None. A value is
``scale * code + offset``. In every format with an offset, and in every one with a half scale, the product is exact in
float32: whether the compiler contracts or reorders makes no difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxquant._core import ffi
from jaxquant.ggml.formats import BlockFormat

_Decoded = tuple[Any, Any, Any]  # codes, scale, offset or None

# ---- Fields of a block


def _unpack(packed: Any, width: int, run: int) -> Any:
    """The numbers of `width` bits in bytes [..., n], as [..., n * 8 // width].

    The bytes form runs: the lowest bits of all bytes of a run come first, then the next. A run of one byte is the
    plain order.
    """
    *lead, size = packed.shape
    shifts = jnp.arange(0, 8, width, dtype=jnp.int32)[:, None]
    runs = packed.reshape(*lead, size // run, 1, run)
    return ((runs >> shifts) & ((1 << width) - 1)).reshape(*lead, size * 8 // width)


def _words(data: Any, size: int) -> Any:
    """Little-endian words of `size` bytes, in int32."""
    *lead, count = data.shape
    parts = data.reshape(*lead, count // size, size)
    return functools.reduce(jnp.bitwise_or, (parts[..., i] << (8 * i) for i in range(size)))


def _signed(data: Any) -> Any:
    return jnp.where(data < 128, data, data - 256)


def _bits_to_float(bits: Any) -> Any:
    return lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


def _small_float(exponent: Any, mantissa: Any, width: int, bias: int) -> Any:
    """A finite float with a mantissa of `width` bits. Integers until the end: subnormals survive flush-to-zero."""
    significand = jnp.where(exponent > 0, mantissa + (1 << width), mantissa)
    power = jnp.maximum(exponent, 1) - (bias + width)
    return significand.astype(jnp.float32) * _bits_to_float((power + 127) << 23)


def _half_bits(bits: Any) -> Any:
    """float32 of the bits of float16."""
    exponent, mantissa = (bits >> 10) & 31, bits & 1023
    special = jnp.where(mantissa == 0, jnp.float32(jnp.inf), jnp.float32(jnp.nan))
    magnitude = jnp.where(exponent == 31, special, _small_float(exponent, mantissa, width=10, bias=15))
    return jnp.where(bits >> 15 == 1, -magnitude, magnitude)


def _half(block: Any, at: int) -> Any:
    return _half_bits(_words(block[..., at : at + 2], 2))


def _normal(bits: Any) -> tuple[Any, Any]:
    """(a, b), both normal or 0, whose product is the float32 of these bits: scale and codes share what is subnormal."""
    exponent, mantissa = (bits >> 23) & 255, bits & 0x7FFFFF
    small = jnp.where(bits < 0, -mantissa, mantissa)
    subnormal = exponent == 0
    scale = jnp.where(subnormal, small.astype(jnp.float32) * 2.0**-23, _bits_to_float(bits))
    return scale, jnp.where(subnormal, jnp.float32(2.0**-126), 1)


# ---- Lattices


@functools.cache
def _grids() -> dict[str, np.ndarray]:
    """Format -> the points of its lattice as words of codes (ffi/ggml/tables.h)."""
    module = ffi.module("cpu")
    assert module is not None
    return {name: np.array(words, np.int32) for name, words in module.ggml_grids().items()}


# Values of a coordinate's codes. In IQ1 there is a shift of an eighth besides: eight times the value is an integer.
_COORDINATES = {
    "IQ2_XXS": (8, 25, 43),
    "IQ2_XS": (8, 25, 43),
    "IQ2_S": (8, 25, 43),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
    "IQ1_S": (-8, 0, 8),
}
_VALUES_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_VALUES_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice those of E2M1


@functools.cache
def _lattice(name: str) -> np.ndarray:
    """The points [count, coordinates]."""
    values = np.array(_COORDINATES[name], np.int8)
    width, coordinates = (2, 8) if len(values) == 3 else (3, 4)
    shifts = np.arange(coordinates) * width
    return values[(_grids()[name][:, None] >> shifts) & ((1 << width) - 1)]


def _look_up(table: Any, index: Any) -> Any:
    """Rows of a small table, one after the other along the last axis. Every index is in range by its width."""
    table = jnp.asarray(np.asarray(table, np.int8))
    rows = jnp.take(table, index, axis=0, mode="clip").astype(jnp.int32)
    return rows if table.ndim == 1 else rows.reshape(*index.shape[:-1], index.shape[-1] * table.shape[1])


def _with_signs(magnitudes: Any, sign_bytes: Any) -> Any:
    return jnp.where(_unpack(sign_bytes, 1, 1) == 1, -magnitudes, magnitudes)


def _even_signs(sevens: Any) -> Any:
    """Sign bytes of seven stored bits: the eighth makes the number of minus signs even."""
    return sevens | ((lax.population_count(sevens) & 1) << 7)


def _signs_and_scale(words: Any) -> tuple[Any, Any]:
    """Words of four times seven sign bits and a scale of four bits."""
    sevens = (words[..., None] >> jnp.arange(0, 28, 7, dtype=jnp.int32)) & 127
    return _even_signs(sevens.reshape(*words.shape[:-1], words.shape[-1] * 4)), (words >> 28) & 15


# ---- Blocks with one scale


def _q1_0(b: Any) -> _Decoded:
    return 2 * _unpack(b[..., 2:], 1, 1) - 1, _half(b, 0), None


def _q2_0(b: Any) -> _Decoded:
    return _unpack(b[..., 2:], 2, 1) - 1, _half(b, 0), None


def _q4_0(b: Any) -> _Decoded:
    return _unpack(b[..., 2:], 4, 16) - 8, _half(b, 0), None


def _q4_1(b: Any) -> _Decoded:
    return _unpack(b[..., 4:], 4, 16), _half(b, 0), _half(b, 2)


def _q5_0(b: Any) -> _Decoded:
    return _unpack(b[..., 6:], 4, 16) + 16 * _unpack(b[..., 2:6], 1, 1) - 16, _half(b, 0), None


def _q5_1(b: Any) -> _Decoded:
    return _unpack(b[..., 8:], 4, 16) + 16 * _unpack(b[..., 4:8], 1, 1), _half(b, 0), _half(b, 2)


def _q8_0(b: Any) -> _Decoded:
    return _signed(b[..., 2:]), _half(b, 0), None


def _q8_1(b: Any) -> _Decoded:
    return _signed(b[..., 4:]), _half(b, 0), None


def _q8_k(b: Any) -> _Decoded:
    scale, factor = _normal(_words(b[..., 0:4], 4))
    return _signed(b[..., 4:260]) * factor, scale, None


def _iq4_nl(b: Any) -> _Decoded:
    return _look_up(_VALUES_IQ4, _unpack(b[..., 2:], 4, 16)), _half(b, 0), None


def _mxfp4(b: Any) -> _Decoded:
    # Half of E8M0, for the table holds twice the values. The two smallest are subnormal.
    exponent = b[..., 0:1]
    bits = jnp.where(exponent < 2, 0x200000 << jnp.minimum(exponent, 1), (exponent - 1) << 23)
    scale, factor = _normal(bits)
    return _look_up(_VALUES_FP4, _unpack(b[..., 1:], 4, 16)) * factor, scale, None


def _tq1_0(b: Any) -> _Decoded:
    # A byte is a fraction of 256 in base 3: times 3 ** i, its digit i is what carries out at the next multiplication.
    powers = jnp.array([1, 3, 9, 27, 81], jnp.int32)[:, None]

    def digits(packed: Any, count: int) -> Any:
        fraction = (packed[..., None, :] * powers[:count]) & 255
        return ((fraction * 3) >> 8).reshape(*packed.shape[:-1], count * packed.shape[-1])

    parts = digits(b[..., 0:32], 5), digits(b[..., 32:48], 5), digits(b[..., 48:52], 4)
    return jnp.concatenate(parts, axis=-1) - 1, _half(b, 52), None


def _tq2_0(b: Any) -> _Decoded:
    return _unpack(b[..., 0:64], 2, 32) - 1, _half(b, 64), None


# ---- Blocks of groups with scales of their own


def _q2_k(b: Any) -> _Decoded:
    scales = b[..., 0:16]
    return _unpack(b[..., 16:80], 2, 32), _half(b, 80) * (scales & 15), -(_half(b, 82) * (scales >> 4))


def _q3_k(b: Any) -> _Decoded:
    codes = _unpack(b[..., 32:96], 2, 32) + 4 * _unpack(b[..., 0:32], 1, 32) - 4
    scales = _unpack(b[..., 96:104], 4, 8) + 16 * _unpack(b[..., 104:108], 2, 4) - 32
    return codes, _half(b, 108) * scales, None


def _scales_and_minimums(b: Any) -> tuple[Any, Any]:
    """Scale and offset of the eight groups of Q4_K and Q5_K."""
    # Selections, not concatenations: those XLA compiles to a branch for every value.
    first, second, rest = b[..., None, 4:8], b[..., None, 8:12], b[..., None, 12:16]
    upper = jnp.arange(2, dtype=jnp.int32)[:, None] == 1
    scales = jnp.where(upper, (rest & 15) | ((first >> 6) << 4), first & 63)
    minimums = jnp.where(upper, (rest >> 4) | ((second >> 6) << 4), second & 63)
    scales, minimums = (v.reshape(*b.shape[:-1], 8) for v in (scales, minimums))
    return _half(b, 0) * scales, -(_half(b, 2) * minimums)


def _q4_k(b: Any) -> _Decoded:
    return _unpack(b[..., 16:], 4, 32), *_scales_and_minimums(b)


def _q5_k(b: Any) -> _Decoded:
    return _unpack(b[..., 48:], 4, 32) + 16 * _unpack(b[..., 16:48], 1, 32), *_scales_and_minimums(b)


def _q6_k(b: Any) -> _Decoded:
    codes = _unpack(b[..., 0:128], 4, 64) + 16 * _unpack(b[..., 128:192], 2, 32) - 32
    return codes, _half(b, 208) * _signed(b[..., 192:208]), None


def _iq4_xs(b: Any) -> _Decoded:
    scales = _unpack(b[..., 4:8], 4, 1) + 16 * _unpack(b[..., 2:4], 2, 1) - 32
    return _look_up(_VALUES_IQ4, _unpack(b[..., 8:], 4, 16)), _half(b, 0) * scales, None


def _nvfp4(b: Any) -> _Decoded:
    # Unsigned E4M3 whose top bit does not count; all ones is zero. The bias has one more than E4M3's: the table holds
    # twice the values.
    d = b[..., 0:4]
    scale = _small_float((d >> 3) & 15, d & 7, width=3, bias=8)
    return _look_up(_VALUES_FP4, _unpack(b[..., 4:], 4, 8)), jnp.where(d == 127, 0, scale), None


# ---- Lattices: eight (IQ3: four) values a point


def _iq2_xxs(b: Any) -> _Decoded:
    halves = b[..., 2:66].reshape(*b.shape[:-1], 8, 2, 4)
    index = halves[..., 0, :].reshape(*b.shape[:-1], 32)
    signs, scales = _signs_and_scale(_words(halves[..., 1, :], 4)[..., 0])
    codes = _with_signs(_look_up(_lattice("IQ2_XXS"), index), signs)
    return codes, _half(b, 0) * (2 * scales + 1) * 0.125, None


def _iq2_xs(b: Any) -> _Decoded:
    words = _words(b[..., 2:66], 2)
    codes = _with_signs(_look_up(_lattice("IQ2_XS"), words & 511), _even_signs(words >> 9))
    return codes, _half(b, 0) * (2 * _unpack(b[..., 66:74], 4, 1) + 1) * 0.125, None


def _iq2_s(b: Any) -> _Decoded:
    index = b[..., 2:34] | (_unpack(b[..., 66:74], 2, 1) << 8)
    codes = _with_signs(_look_up(_lattice("IQ2_S"), index), b[..., 34:66])
    return codes, _half(b, 0) * (2 * _unpack(b[..., 74:82], 4, 1) + 1) * 0.125, None


def _iq3_xxs(b: Any) -> _Decoded:
    signs, scales = _signs_and_scale(_words(b[..., 66:98], 4))
    codes = _with_signs(_look_up(_lattice("IQ3_XXS"), b[..., 2:66]), signs)
    return codes, _half(b, 0) * (2 * scales + 1) * 0.25, None


def _iq3_s(b: Any) -> _Decoded:
    index = b[..., 2:66] | (_unpack(b[..., 66:74], 1, 1) << 8)
    codes = _with_signs(_look_up(_lattice("IQ3_S"), index), b[..., 74:106])
    return codes, _half(b, 0) * (2 * _unpack(b[..., 106:110], 4, 1) + 1), None


def _each(values: Any, count: int) -> Any:
    """Every value `count` times."""
    *lead, size = values.shape
    return jnp.broadcast_to(values[..., None], (*values.shape, count)).reshape(*lead, size * count)


def _shifted(index: Any, down: Any) -> Any:
    """Codes of IQ1: a point, and an eighth up or down in all its coordinates."""
    return _look_up(_lattice("IQ1_S"), index) + _each(1 - 2 * down, 8)


def _iq1_s(b: Any) -> _Decoded:
    words = _words(b[..., 34:50], 2)
    high = (words[..., None] >> jnp.arange(0, 12, 3, dtype=jnp.int32)) & 7
    index = b[..., 2:34] | (high.reshape(*b.shape[:-1], 32) << 8)
    return _shifted(index, _each(words >> 15, 4)), _half(b, 0) * (2 * ((words >> 12) & 7) + 1) * 0.125, None


def _iq1_m(b: Any) -> _Decoded:
    high = _unpack(b[..., 32:48], 4, 1)
    words = _words(b[..., 48:56], 2)
    scales = (words[..., None] >> jnp.arange(0, 12, 3, dtype=jnp.int32)) & 7
    places = jnp.arange(0, 16, 4, dtype=jnp.int32)
    half = _half_bits(((words >> 12) << places).sum(axis=-1, keepdims=True, dtype=jnp.int32))
    codes = _shifted(b[..., 0:32] | ((high & 7) << 8), high >> 3)
    return codes, half * (2 * scales.reshape(*b.shape[:-1], 16) + 1) * 0.125, None


_DECODERS: dict[str, Callable[[Any], _Decoded]] = {
    "Q1_0": _q1_0, "Q2_0": _q2_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q8_1": _q8_1, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "Q8_K": _q8_k,
    "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s, "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}  # fmt: skip


def values(data: Any, format: BlockFormat) -> Any:
    """float32 [..., k]."""
    *lead, row_bytes = data.shape
    size = format.row_size(row_bytes)
    if format.is_float:
        bits = _words(data.astype(jnp.int32), format.type_size)
        return _half_bits(bits) if format.name == "F16" else _bits_to_float(bits << (8 * (4 - format.type_size)))
    blocks = data.reshape(*lead, size // format.block_size, format.type_size).astype(jnp.int32)
    codes, scale, offset = _DECODERS[format.name](blocks)
    groups = scale.shape[-1]
    codes = codes.astype(jnp.float32).reshape(*codes.shape[:-1], groups, format.block_size // groups)
    values = codes * scale[..., None]
    if offset is not None:
        values = values + offset[..., None]
    return values.reshape(*lead, size)
