"""Choosing scales and zero points from data: the range of each block, and the rules that make parameters of it.

choose_qparams()  ->  range_p  ->  ffi/affine/dynamic/{cpu.cc,cuda.cu}
                  ->  parameters(), the twin in jax.numpy of ffi/affine/dynamic/math.h
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant._core import ffi
from jaxquant._core.errors import refuse
from jaxquant._core.primitive import Operation, Result, bind, build, constant
from jaxquant.affine import granularity as granularities
from jaxquant.affine import qtypes, scales
from jaxquant.affine.exact import seal
from jaxquant.affine.granularity import Granularity, PerTensor
from jaxquant.affine.qparams import QParams

METHODS = ("absmax", "minmax", "percentile", "mse")
LARGEST, SMALLEST = np.finfo(np.float32).max, np.finfo(np.float32).tiny


def choose_qparams(
    x: Any,
    granularity: Granularity = PerTensor(),  # noqa: B008
    *,
    qtype: Any = jnp.int8,
    symmetric: bool = True,
    narrow_range: bool | None = None,
    method: str | None = None,
    percentile: float = 99.9,
    implementation: str | None = None,
) -> QParams:
    """Scale and zero point that suit the values of ``x``.

    A method finds a range ``[low, high]`` of each block; the range gives the parameters:

    * symmetric: ``scale = max(-low, high) / qmax`` and no zero point;
    * asymmetric: the range is widened to include 0, ``scale = (high - low) / (qmax - qmin)`` and
      ``zero_point = qmin - round(low / scale)``, in the code range.

    Divisions are IEEE divisions in float32, and the scale is float32 whatever x's dtype. It is never zero, subnormal,
    infinite or NaN: a block of zeros (or of subnormal numbers, or without a finite value) has scale 1 and codes that
    dequantise to exact zeros; otherwise the scale is at least the smallest normal float32, 2^-126. Values that are not
    finite are ignored here and saturate when they are quantised.

    Args:
      x: float array of any shape.
      granularity: which elements share a scale.
      qtype: the code type.
      symmetric: no zero point; needs a signed ``qtype``.
      narrow_range: drop the lowest code. None: where symmetric. The code ranges are

        ============================  ============  ============
        ..                            int8          uint8
        ============================  ============  ============
        symmetric (narrow)            -127 ... 127  ValueError
        symmetric, not narrow         -128 ... 127  ValueError
        asymmetric (not narrow)       -128 ... 127  0 ... 255
        asymmetric, narrow            -127 ... 127  1 ... 255
        ============================  ============  ============

        and likewise for other widths. Symmetric scales are absmax / 127 with either range.
      method: how the range is found. None: "absmax" where symmetric, else "minmax".

        "absmax": ``[-a, a]`` of the largest magnitude a. With ``symmetric=False`` the codes are centred on 0, as
        unsigned code types need for data of both signs.
        "minmax": the smallest and the largest value. With ``symmetric=True`` the same as "absmax".
        "percentile": the magnitudes up to the given percentile; asymmetric, the values between the percentiles
        ``100 - percentile`` and ``percentile``. What lies beyond saturates.
        "mse": the range that makes the mean squared error of quantisation smallest.
      percentile: of "percentile", 0 to 100.
      implementation: None chooses; "ffi" the kernels; "xla" jax.numpy.

    Returns:
      A `QParams` with a scale of x's rank (one element per block along each axis), an int32 zero point or None, and
      ``block_shape`` where the granularity divides an axis into blocks. It stands for the scale in `quantize`,
      `fake_quantize` and `dequantize`.

    Sharded: the choice is global. Where shards cut a block, one all-reduce of the ranges makes the parameters those of
    the whole array, to the bit. For one choice per shard, call it inside ``jax.shard_map``.

    Gradients: none flows through the choice; scale and zero point are constants.

    Raises:
      ValueError: symmetric with an unsigned qtype; an unknown method; a granularity that does not fit.

    >>> choose_qparams(jnp.array([[1.0, -2.0], [0.5, jnp.inf]]), PerToken(), qtype=jnp.int4).scale
    Array([[0.2857143 ],
           [0.07142857]], dtype=float32)
    >>> choose_qparams(jnp.array([-1.0, 1.55]), qtype=jnp.uint8, symmetric=False)
    QParams(scale=Array([0.01], dtype=float32), zero_point=Array([100], dtype=int32), ... qmin=0, qmax=255, ...)
    """
    name = "choose_qparams"
    x = jax.lax.stop_gradient(scales.as_float_array(name, "x", x))
    block = granularities.resolve(name, granularity, x.shape)
    code, qmin, qmax = code_limits(name, qtype, symmetric, narrow_range)
    implementation = ffi.check_implementation(name, implementation)
    low, high = _range(name, x, block, method, percentile, symmetric, qmin, qmax, implementation)
    scale, zero_point = parameters(low, high, qmin, qmax, symmetric)
    return QParams(
        jax.lax.stop_gradient(scale),
        None if symmetric else jax.lax.stop_gradient(zero_point).astype(jnp.int32),
        qtype=jnp.dtype(code.name),
        qmin=qmin,
        qmax=qmax,
        block_shape=_block_shape(x.shape, block),
    )


def code_limits(
    operation: str, qtype: Any, symmetric: bool, narrow_range: bool | None
) -> tuple[qtypes.QType, int, int]:
    """The code type and the range of its codes."""
    code = qtypes.lookup(operation, qtype)
    for name, value in (("symmetric", symmetric), ("narrow_range", narrow_range)):
        if not isinstance(value, (bool, np.bool_)) and not (name == "narrow_range" and value is None):
            raise refuse(operation, name, "a bool", repr(value), "pass True or False", TypeError)
    if symmetric and code.qmin == 0:
        remedy = "use symmetric=False, or a signed qtype"
        raise refuse(operation, "qtype", "a signed code type with symmetric=True", code.name, remedy)
    narrow = symmetric if narrow_range is None else narrow_range
    return code, code.qmin + int(bool(narrow)), code.qmax


def _range(
    name: str, x: jax.Array, block: tuple[int, ...], method: str | None, percentile: float, symmetric: bool,
    qmin: int, qmax: int, implementation: str | None,
) -> tuple[Any, Any]:  # fmt: skip
    method = ("absmax" if symmetric else "minmax") if method is None else method
    if method not in METHODS:
        raise refuse(name, "method", f"one of {', '.join(METHODS)}", repr(method), "None chooses by symmetric")
    if method == "absmax" or (method == "minmax" and symmetric):
        (largest,) = block_range(x, block, absolute=True, implementation=implementation)
        return -largest, largest
    if method == "minmax":
        low, high = block_range(x, block, absolute=False, implementation=implementation)
        return low, high
    if not isinstance(percentile, (int, float, np.floating, np.integer)) or not 0 <= percentile <= 100:
        raise refuse(name, "percentile", "a number from 0 to 100", repr(percentile), "99.9 is usual")
    from jaxquant.affine import search

    if method == "percentile":
        return search.percentile_range(x, block, float(percentile), symmetric, implementation=implementation)
    return search.mse_range(x, block, qmin, qmax, symmetric, implementation=implementation)


def _block_shape(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...] | None:
    """None where the scale's shape alone says which elements share a scale."""
    return None if all(b in (1, n) for b, n in zip(block, shape, strict=True)) else tuple(whole_axes(block, shape))


# --------------------------------------------------------------------------------------------- ranges into parameters


def parameters(low: Any, high: Any, qmin: int, qmax: int, symmetric: bool) -> tuple[jax.Array, jax.Array]:
    """Scale and zero point (both float32) of ranges; where low > high there was no value."""
    low, high = jnp.minimum(jnp.asarray(low, jnp.float32), 0), jnp.maximum(jnp.asarray(high, jnp.float32), 0)
    if symmetric:
        largest = jnp.maximum(-low, high)
        quotient = largest / _constant(qmax, largest)
        return _positive_normal(quotient, largest), jnp.zeros_like(largest)
    steps, span = _constant(qmax - qmin, low), high - low
    # The same quotient where the span overflows.
    halved = seal(seal(high * 0.5 - low * 0.5) / steps) * 2
    scale = _positive_normal(jnp.where(span <= LARGEST, span / steps, halved), span)
    zero_point = qmin - jnp.round(low / scale)
    return scale, jnp.clip(zero_point, qmin, qmax)


def _constant(value: int, like: Any) -> Any:
    """A divisor that XLA cannot tell to be constant: it would multiply by its reciprocal."""
    return jnp.where(like == like, jnp.float32(value), like)


def _positive_normal(scale: Any, extent: Any) -> Any:
    # Sealed, since XLA turns x / (a / b) into x * b / a.
    return seal(jnp.where(extent >= SMALLEST, jnp.maximum(scale, SMALLEST), jnp.float32(1)))


# ------------------------------------------------------------------------------------------------------------- ranges


def block_range(
    x: Any, block: tuple[int, ...], *, absolute: bool, implementation: str | None = None
) -> tuple[jax.Array, ...]:
    """The range of the finite values of each block, in float32: lowest and highest, or the largest magnitude alone.

    Without a finite value they are +inf and -inf (so that ranges merge by minimum and maximum), or 0.
    """
    params = {"block": whole_axes(block, x.shape), "absolute": absolute, "implementation": implementation}
    return tuple(bind(range_p, x, **params))


def whole_axes(block: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """A block shape with -1 for whole axes, which stays right for a shard. It is aligned with the last axes: in front
    of them, as under vmap, each index has blocks of its own."""
    return tuple(-1 if b == n else b for b, n in zip(block, shape, strict=True))


def scale_shape(shape: tuple[Any, ...], block: tuple[int, ...]) -> tuple[Any, ...]:
    """How many blocks there are along each axis."""
    own = shape[len(shape) - len(block) :]
    counts = tuple(1 if b == -1 else n if b == 1 else n // b for n, b in zip(own, block, strict=True))
    return (*shape[: len(shape) - len(block)], *counts)


def _results(x: Any, **params: Any) -> list[Result]:
    return [result for result in _padded_results(x, **params) if result is not None]


def _padded_results(x: Any, *, block: tuple[int, ...], absolute: bool) -> list[Result | None]:
    extreme = Result("scale", scale_shape(x.shape, block), jnp.float32)
    return [None if absolute else extreme, extreme]


def range_reference(x: Any, *, block: tuple[int, ...], absolute: bool) -> list[Any]:
    finite = jnp.isfinite(x)
    if x.dtype == jnp.float64:
        x = jnp.clip(x, -float(LARGEST), float(LARGEST))
    x = x.astype(jnp.float32)
    if absolute:
        return [_reduce(jnp.where(finite, jnp.abs(x), 0), block, jnp.max, 0)]
    low = _reduce(jnp.where(finite, x, jnp.inf), block, jnp.min, jnp.inf)
    high = _reduce(jnp.where(finite, x, -jnp.inf), block, jnp.max, -jnp.inf)
    return [jnp.where(extreme == 0, 0, extreme) for extreme in (low, high)]  # never -0


def _reduce(values: Any, block: tuple[int, ...], reduce: Callable[..., Any], initial: float) -> Any:
    first = values.ndim - len(block)
    for d, b in enumerate(block, first):
        if b == -1:
            values = reduce(values, axis=d, keepdims=True, initial=initial)
        elif b != 1:
            split = values.reshape(*values.shape[:d], values.shape[d] // b, b, *values.shape[d + 1 :])
            values = reduce(split, axis=d + 1, initial=initial)
    return values


def range_across(x: Any, *, axes: tuple[str, ...], absolute: bool, **params: Any) -> list[Any]:
    """Of a shard: the range of all shards along mesh axes, in one all-reduce."""
    parts = bind(range_p, x, absolute=absolute, **params)
    if absolute:
        return [jax.lax.pmax(parts[0], axes)]
    low, high = jax.lax.pmax(jnp.stack([-parts[0], parts[1]]), axes)
    return [jnp.where(extreme == 0, 0, extreme) for extreme in (-low, high)]


range_p = build(
    Operation(
        name="range",
        operands=("full",),
        results=_results,
        pad_results=_padded_results,
        reference=range_reference,
        attributes=lambda *, block, absolute: {"absolute": int(absolute)},
        across=range_across,
    ),
    multiple_results=True,
)


constant(range_p)
