"""Dequantisation: the values of codes.

dequantize()  ->  dequantize_p  ->  ffi/affine/dequantize/{cpu.cc,cuda.cu}  ->  math.h
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxquant._core import ffi
from jaxquant._core.errors import refuse
from jaxquant._core.primitive import Operation, Result, bind, build
from jaxquant.affine import scales
from jaxquant.affine.custom_rules import straight_through
from jaxquant.affine.exact import round_zero_point, seal
from jaxquant.affine.straight_through import Terms, build_gradient, value_jvp


def dequantize(
    q: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    axis: int | None = None,
    block_shape: tuple[int, ...] | None = None,
    dtype: Any = jnp.float32,
    implementation: str | None = None,
) -> jax.Array:
    """The values ``(q - zero_point) * scale`` of codes.

    Args:
      q: codes in an integer array, or carried in a floating one.
      scale, zero_point, axis, block_shape, implementation: as for `fake_quantize`, over q's shape. A `QParams` stands
        for scale, zero_point and block_shape.
      dtype: of the result. The arithmetic is float64 for float64, else float32.

    Returns:
      An array of q's shape and ``dtype``.

    Gradients: for codes carried in floating point ``dq = dy * scale`` (integer codes have none); for the scale
    ``dy * (q - zero_point)`` and for a float zero point ``-dy * scale``, summed over the elements that share them.
    Direct forward mode: `jaxquant.forward_mode.dequantize`.

    >>> dequantize(jnp.array([3, 0, 7], jnp.int8), 0.5)
    Array([1.5, 0. , 3.5], dtype=float32)
    """
    operands, params = _resolve(q, scale, zero_point, axis, block_shape, dtype, implementation)
    return _straight_through(params, *operands)


def dequantize_forward_mode(
    q: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    axis: int | None = None,
    block_shape: tuple[int, ...] | None = None,
    dtype: Any = jnp.float32,
    implementation: str | None = None,
) -> jax.Array:
    """`dequantize` without its custom_vjp: the same values, differentiable by ``jvp`` and ``linearize`` as well.

    >>> jax.jvp(lambda s: dequantize(jnp.float32(3), s), (jnp.float32(0.5),), (jnp.float32(1.0),))
    (Array(1.5, dtype=float32), Array(3., dtype=float32))
    """
    operands, params = _resolve(q, scale, zero_point, axis, block_shape, dtype, implementation)
    return bind(dequantize_p, *operands, **dict(params))


_KERNEL_INTEGERS = ("int8", "uint8", "int16", "uint16")


def _resolve(q, scale, zero_point, axis, block_shape, dtype, implementation):
    name = "dequantize"
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if dtype.name not in scales.FLOATS:
        raise refuse(
            name, "dtype", f"one of {', '.join(scales.FLOATS)}", dtype.name, "choose a floating type", TypeError
        )
    q = jnp.asarray(q)
    arithmetic = scales.arithmetic_dtype(dtype)
    if jnp.issubdtype(q.dtype, jnp.integer):
        if q.dtype.name not in _KERNEL_INTEGERS:
            # Sub-byte arrays take a byte per code here; wide integers are computed in the arithmetic type anyway.
            narrow = q.dtype.name in ("int4", "uint4", "int2", "uint2")
            q = q.astype(("int8" if q.dtype.name.startswith("int") else "uint8") if narrow else arithmetic)
    elif q.dtype.name not in scales.FLOATS:
        raise refuse(
            name, "q", "an integer array, or codes carried in a floating one", q.dtype.name, "convert it", TypeError
        )
    elif q.dtype == jnp.float64 and arithmetic != jnp.float64:
        q = q.astype(arithmetic)  # codes are integers, exact in either
    r = scales.resolve(
        name, q, scale, zero_point, axis, block_shape, None, None, None, arithmetic=arithmetic, operand="q"
    )
    implementation = ffi.check_implementation(name, implementation)
    return (r.x, r.scale, r.zero_point), (("dtype", dtype), ("implementation", implementation))


def _reference(q: Any, scale: Any, zero_point: Any, *, dtype: Any) -> Any:
    full_scale, full_zero = scales.spread(scale, q.shape), scales.spread(round_zero_point(zero_point), q.shape)
    return seal(((q.astype(scale.dtype) - full_zero) * full_scale).astype(dtype))


def _first(dy: Any, q: Any, scale: Any, zero_point: Any, qmin: int, qmax: int, rounding: Any) -> Any:
    del qmin, qmax, rounding
    return dy * scale, dy * (q - zero_point), -(dy * scale)


def _smooth(dy: Any, q: Any, scale: Any, zero_point: Any, inside: Any, outside: Any) -> Any:
    del inside, outside
    return _first(dy, q, scale, zero_point, 0, 0, None)


dequantize_p = build(
    Operation(
        name="dequantize",
        operands=("full", "scale", "scale"),
        results=lambda q, scale, zero_point, *, dtype: [Result("full", q.shape, dtype)],
        reference=_reference,
        attributes=lambda *, dtype: {"qmin": 0, "qmax": 0, "packed_bits": 0},
        dtypes=(*_KERNEL_INTEGERS, *scales.FLOATS),
    )
)
dequantize_gradient_p = build_gradient("dequantize", Terms(_first, _smooth))


def _to_gradient(*, implementation: str | None, **_: Any) -> dict[str, Any]:
    return {"qmin": 0, "qmax": 0, "implementation": implementation}


ad.primitive_jvps[dequantize_p] = partial(value_jvp, dequantize_p, dequantize_gradient_p, _to_gradient)
_straight_through = straight_through(dequantize_p, dequantize_gradient_p, _to_gradient)
