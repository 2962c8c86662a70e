"""Dynamic quantisation: scales chosen from the values themselves, and the codes, in one pass over them.

dynamic_quantize()       ->  dynamic_quantize_p       ->  ffi/affine/dynamic/{cpu.cc,cuda.cu}  ->  math.h
dynamic_fake_quantize()  ->  dynamic_fake_quantize_p  ->  the same files
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxquant._core import compat, ffi
from jaxquant._core.primitive import Operation, Result, bind, build, constant
from jaxquant.affine import choose, packing, scales
from jaxquant.affine import granularity as granularities
from jaxquant.affine.fake_quantize import fake_quantize_gradient_p, fake_quantize_p
from jaxquant.affine.granularity import Granularity, PerToken
from jaxquant.affine.qarray import QArray
from jaxquant.affine.quantize import quantize_p
from jaxquant.affine.straight_through import tangent


def dynamic_quantize(
    x: Any,
    granularity: Granularity = PerToken(),  # noqa: B008
    *,
    qtype: Any = jnp.int8,
    symmetric: bool = True,
    narrow_range: bool | None = None,
    implementation: str | None = None,
) -> QArray:
    """Codes of ``x`` with scales chosen from ``x``, in one pass over it.

    The scale and the zero point are those of `choose_qparams` ("absmax" where symmetric, else "minmax"), the codes
    those of `quantize` with them, bit for bit; 4- and 2-bit codes come packed along the last axis. On CPU a block is
    read twice only where it reaches across the outermost axis or is too large for the caches. On CUDA a block of
    consecutive elements, as per token or group, is read once up to 64 KiB, for codes of 8 bits and below.

    Args:
      x: float array of any shape.
      granularity: which elements share a scale; by default each row along the last axis.
      qtype, symmetric, narrow_range, implementation: as for `choose_qparams`.

    Returns:
      A `QArray` of x's shape with a float32 scale, and an int32 zero point unless symmetric. What is not finite
      saturates by its sign; NaN gives the code of the zero point, which dequantises to 0.

    Sharded: the scales are those of the whole array, with one all-reduce where shards cut a block and none where they
    do not. Inside ``jax.shard_map`` each shard has its own.

    Gradients: none (integers carry none, and the choice is constant); see `dynamic_fake_quantize`.

    Raises:
      ValueError, TypeError: as `choose_qparams`.

    >>> q = dynamic_quantize(jnp.array([[1.0, -2.0, 4.0], [0.0, 0.0, 0.0]]), qtype=jnp.int4)
    >>> q.qvalue, q.scale.ravel()
    (Array([[ 2, -3,  7],
           [ 0,  0,  0]], dtype=int8), Array([0.5714286, 1.       ], dtype=float32))
    """
    name = "dynamic_quantize"
    x, code, params = _resolve(
        name, jax.lax.stop_gradient(x), granularity, qtype, symmetric, narrow_range, implementation
    )
    packed_bits = code.bits if code.bits < 8 and x.ndim else 0
    out_dtype = jnp.dtype(jnp.uint8) if packed_bits else code.container
    data, scale, zero_point = bind(dynamic_quantize_p, x, out_dtype=out_dtype, packed_bits=packed_bits, **params)
    return QArray(
        data,
        scale.astype(jnp.float32),
        None if symmetric else zero_point.astype(jnp.int32),
        code.name,
        params["qmin"],
        params["qmax"],
        x.shape[-1:] if packed_bits else (),
    )


def dynamic_fake_quantize(
    x: Any,
    granularity: Granularity = PerToken(),  # noqa: B008
    *,
    qtype: Any = jnp.int8,
    symmetric: bool = True,
    narrow_range: bool | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The values that `dynamic_quantize` would keep, in x's dtype: `fake_quantize` with scales chosen from ``x``.

    Args:
      x: float array of any shape.
      granularity, qtype, symmetric, narrow_range, implementation: as for `dynamic_quantize`.

    Returns:
      An array of x's shape and dtype. NaN stays NaN; infinities saturate. No codes are stored.

    Sharded: as `dynamic_quantize`.

    Gradients (straight-through): ``dx = dy`` where the rounded value was in range, else 0, with scale and zero point
    held constant. Finite values are in range, but for the edge of an asymmetric range, which the rounding of the zero
    point may cut off by half a step. Forward mode works too, as do higher orders.

    >>> dynamic_fake_quantize(jnp.array([1.0, -2.0, 4.0]), qtype=jnp.int4)
    Array([ 1.1428572, -1.7142859,  4.       ], dtype=float32)
    >>> jax.grad(lambda x: dynamic_fake_quantize(x, qtype=jnp.int4).sum())(jnp.array([1.0, -2.0, jnp.inf]))
    Array([1., 1., 0.], dtype=float32)
    """
    x, _, params = _resolve("dynamic_fake_quantize", x, granularity, qtype, symmetric, narrow_range, implementation)
    return bind(dynamic_fake_quantize_p, x, **params)[0]


def _resolve(name, x, granularity, qtype, symmetric, narrow_range, implementation):
    x = scales.as_float_array(name, "x", x)
    block = granularities.resolve(name, granularity, x.shape)
    code, qmin, qmax = choose.code_limits(name, qtype, symmetric, narrow_range)
    params = {
        "block": choose.whole_axes(block, x.shape), "qmin": qmin, "qmax": qmax, "symmetric": bool(symmetric),
        "implementation": ffi.check_implementation(name, implementation),
    }  # fmt: skip
    return x, code, params


# --------------------------------------------------------------------------------------------------------- primitives


def _parameter_results(x: Any, block: tuple[int, ...]) -> list[Result]:
    """Scale and zero point, in the arithmetic type. Both are float32 numbers."""
    return [Result("scale", choose.scale_shape(x.shape, block), scales.arithmetic_dtype(x.dtype))] * 2


def _quantize_results(x: Any, *, block: Any, out_dtype: Any, packed_bits: int, **_: Any) -> list[Result]:
    codes = Result("full", x.shape, out_dtype)
    if packed_bits:
        codes = Result("packed", packing.packed_shape(x.shape, packed_bits), jnp.uint8)
    return [codes, *_parameter_results(x, block)]


def _in_two_steps(value: Any, ranges: Any, x: Any, block: Any, symmetric: bool, params: Any) -> list[Any]:
    low, high = (-ranges[0], ranges[0]) if symmetric else ranges
    parameters = choose.parameters(low, high, params["qmin"], params["qmax"], symmetric)
    scale, zero_point = (p.astype(scales.arithmetic_dtype(x.dtype)) for p in parameters)
    return [bind(value, x, scale, zero_point, **params), scale, zero_point]


def _reference(value: Any, x: Any, *, block: Any, symmetric: bool, **params: Any) -> list[Any]:
    ranges = choose.range_reference(x, block=block, absolute=symmetric)
    return _in_two_steps(value, ranges, x, block, symmetric, {**params, "implementation": "xla"})


def _across(value: Any, x: Any, *, axes: Any, block: Any, symmetric: bool, implementation: Any, **params: Any) -> Any:
    """Where shards cut a block: the range of all shards first, then the codes."""
    ranges = choose.range_across(x, axes=axes, absolute=symmetric, block=block, implementation=implementation)
    return _in_two_steps(value, ranges, x, block, symmetric, {**params, "implementation": implementation})


def _attributes(
    *, block: Any, qmin: int, qmax: int, symmetric: bool, out_dtype: Any = None, packed_bits: int = 0
) -> dict[str, int]:
    del block, out_dtype
    return {"qmin": qmin, "qmax": qmax, "symmetric": int(symmetric), "packed_bits": packed_bits}


dynamic_quantize_p = build(
    Operation(
        name="dynamic_quantize",
        operands=("full",),
        results=_quantize_results,
        reference=partial(_reference, quantize_p),
        attributes=_attributes,
        across=partial(_across, quantize_p),
    ),
    multiple_results=True,
)
dynamic_fake_quantize_p = build(
    Operation(
        name="dynamic_fake_quantize",
        operands=("full",),
        results=lambda x, *, block, **_: [Result("full", x.shape, x.dtype), *_parameter_results(x, block)],
        reference=partial(_reference, fake_quantize_p),
        attributes=_attributes,
        across=partial(_across, fake_quantize_p),
    ),
    multiple_results=True,
)


def _fake_jvp(primals: Any, tangents: Any, *, block: Any, symmetric: bool, **params: Any) -> Any:
    y, scale, zero_point = bind(dynamic_fake_quantize_p, *primals, block=block, symmetric=symmetric, **params)
    zeros = [ad.Zero(jax.typeof(o).to_tangent_aval()) for o in (y, scale, zero_point)]
    if compat.is_zero(tangents[0]):
        return (y, scale, zero_point), zeros
    constants = map(jax.lax.stop_gradient, (scale, zero_point))
    dot = tangent(fake_quantize_gradient_p, (*primals, *constants), (*tangents, None, None), y.dtype, **params)
    return (y, scale, zero_point), (dot, *zeros[1:])


constant(dynamic_quantize_p)
ad.primitive_jvps[dynamic_fake_quantize_p] = _fake_jvp
