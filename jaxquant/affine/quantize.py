"""Quantisation: the integer codes of x, in an integer array or carried in floating point.

quantize()           ->  quantize or stochastic_quantize  ->  ffi/affine/quantize/{cpu.cc,cuda.cu}  ->  math.h
quantize_backward()  ->  quantize_gradient                ->  the same files
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxquant._core import ffi
from jaxquant._core.errors import refuse
from jaxquant._core.primitive import Operation, Result, bind, build
from jaxquant.affine import packing, qtypes, scales, stochastic
from jaxquant.affine.custom_rules import straight_through
from jaxquant.affine.exact import over, round_zero_point
from jaxquant.affine.straight_through import PARAMETERS, X_ONLY, Family, Terms, build_gradient, gradient, value_jvp


def quantize(
    x: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    axis: int | None = None,
    block_shape: tuple[int, ...] | None = None,
    qtype: Any = jnp.int8,
    qmin: int | None = None,
    qmax: int | None = None,
    dtype: Any = None,
    packed: bool = False,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    key: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """The codes ``clamp(round(x / scale) + zero_point, qmin, qmax)`` of ``x``, rounding half to even by default.

    Args:
      x, scale, zero_point, axis, block_shape, qtype, qmin, qmax, rounding, key, implementation: as for `fake_quantize`.
      dtype: None returns the code type's container (int4, uint4, int2 and uint2 codes live in int8 or uint8). A
        floating dtype carries the codes as floating-point numbers: the function is then differentiable. It must hold
        every code exactly (bfloat16 holds integers to 256, float16 to 2048), otherwise TypeError.
      packed: 4- and 2-bit codes packed along the last axis, as `pack` would, in the same pass.

    Returns:
      An array of x's shape; packed, of uint8 with the last axis ``ceil(n * bits / 8)``. NaN gives the code of the
      clamped zero point, which dequantises to 0.

    Gradients: integers have none. JAX gives integer arrays no tangents, so a gradient through an int8 result is zero
    without a warning; to train, use `fake_quantize`, or codes in a floating ``dtype``. There
    ``dx = dy / scale`` where the rounded value was in range, else 0; ``dscale = -(dy / scale) * (x / scale)`` and
    ``dzero_point = dy`` in range, else 0, summed over the elements that share them.

    >>> quantize(jnp.array([0.26, -0.05, 9.0]), 0.1, qtype=jnp.int4)
    Array([3, 0, 7], dtype=int8)
    >>> jax.grad(lambda x: quantize(x, 0.5, dtype=jnp.float32).sum())(jnp.array([1.0, 1000.0]))
    Array([2., 0.], dtype=float32)
    """
    return _quantize(
        "quantize",
        x,
        scale,
        zero_point,
        axis,
        block_shape,
        qtype,
        qmin,
        qmax,
        dtype,
        packed,
        rounding,
        key,
        implementation,
    )


def _quantize(*arguments: Any) -> jax.Array:
    operands, params, cast = _resolve(*arguments)
    floating = jnp.issubdtype(dict(params)["out_dtype"], jnp.floating)
    family = QUANTIZE[len(operands) > 3]
    out = family.straight_through(params, *operands) if floating else bind(family.value, *operands, **dict(params))
    return out.astype(cast)


def quantize_forward_mode(
    x: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    axis: int | None = None,
    block_shape: tuple[int, ...] | None = None,
    qtype: Any = jnp.int8,
    qmin: int | None = None,
    qmax: int | None = None,
    dtype: Any = None,
    packed: bool = False,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    key: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """`quantize` without its custom_vjp: the same values, differentiable by ``jvp`` and ``linearize`` as well.

    >>> jax.jvp(lambda x: quantize(x, 0.5, dtype=jnp.float32), (jnp.float32(1.2),), (jnp.float32(1.0),))
    (Array(2., dtype=float32), Array(2., dtype=float32))
    """
    operands, params, cast = _resolve(
        "quantize",
        x,
        scale,
        zero_point,
        axis,
        block_shape,
        qtype,
        qmin,
        qmax,
        dtype,
        packed,
        rounding,
        key,
        implementation,
    )
    return bind(QUANTIZE[len(operands) > 3].value, *operands, **dict(params)).astype(cast)


def quantize_backward(
    dy: Any,
    x: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    axis: int | None = None,
    block_shape: tuple[int, ...] | None = None,
    qtype: Any = jnp.int8,
    qmin: int | None = None,
    qmax: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The backward of `quantize` in x, callable by itself: ``dy / scale`` where x was in range, else 0.

    The mask ``qmin <= round(x / scale) + zero_point <= qmax`` is recomputed from x, so a forward pass saves nothing
    else. An infinite or NaN upstream gradient outside the mask is selected away, not multiplied.

    Args:
      dy: upstream gradient of x's shape, any float dtype.
      x, scale, zero_point, axis, block_shape, qtype, qmin, qmax, implementation: as for `fake_quantize`.

    Returns:
      An array of x's shape and dtype. Linear in ``dy``, and differentiable.

    >>> quantize_backward(jnp.ones(2), jnp.array([1.0, 1000.0]), 0.5)
    Array([2., 0.], dtype=float32)
    """
    return _quantize_backward(
        "quantize_backward", dy, x, scale, zero_point, axis, block_shape, qtype, qmin, qmax, implementation
    )


def _quantize_backward(
    name, dy, x, scale, zero_point, axis, block_shape, qtype, qmin, qmax, implementation
) -> jax.Array:
    x, dy = scales.as_float_array(name, "x", x), scales.as_float_array(name, "dy", dy)
    if dy.shape != x.shape:
        raise refuse(name, "dy", f"x's shape {x.shape}", f"{dy.shape}", "pass the gradient of the codes of x")
    r = scales.resolve(name, x, scale, zero_point, axis, block_shape, qtype, qmin, qmax)
    implementation = ffi.check_implementation(name, implementation)
    dx, _, _ = gradient(
        QUANTIZE[False].gradient,
        dy,
        r.x,
        r.scale,
        r.zero_point,
        want=X_ONLY,
        qmin=r.qmin,
        qmax=r.qmax,
        implementation=implementation,
    )
    return dx


def quantize_per_channel(
    x: Any,
    scale: Any,
    zero_point: Any,
    axis: int,
    *,
    qtype: Any = jnp.int8,
    qmin: int | None = None,
    qmax: int | None = None,
    dtype: Any = None,
    packed: bool = False,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    key: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """`quantize` with one scale for each index of ``axis``.

    Args:
      x: float array of any shape.
      scale: ``[C]``, C the length of x along ``axis``.
      zero_point: ``[C]``, a scalar or None.
      axis: the channel axis; negative counts from the end.
      qtype, qmin, qmax, dtype, packed, rounding, key, implementation: as for `quantize`.

    Returns, raises, gradients: as `quantize`.

    >>> quantize_per_channel(jnp.ones((2, 2)), jnp.array([0.5, 0.25]), None, 0)
    Array([[2, 2],
           [4, 4]], dtype=int8)
    """
    return _quantize(
        "quantize_per_channel",
        x,
        scale,
        zero_point,
        axis,
        None,
        qtype,
        qmin,
        qmax,
        dtype,
        packed,
        rounding,
        key,
        implementation,
    )


def quantize_per_channel_backward(
    dy: Any,
    x: Any,
    scale: Any,
    zero_point: Any,
    axis: int,
    *,
    qtype: Any = jnp.int8,
    qmin: int | None = None,
    qmax: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`quantize_backward` with one scale for each index of ``axis``.

    Args:
      dy: upstream gradient of x's shape.
      x: what was quantised.
      scale: ``[C]``, C the length of x along ``axis``.
      zero_point: ``[C]``, a scalar or None.
      axis: the channel axis; negative counts from the end.
      **keywords: qtype, qmin, qmax and implementation, as for `quantize`.

    Returns, raises: as `quantize_backward`.

    >>> quantize_per_channel_backward(jnp.ones((2, 2)), jnp.ones((2, 2)), jnp.array([0.5, 0.25]), None, 0)
    Array([[2., 2.],
           [4., 4.]], dtype=float32)
    """
    return _quantize_backward(
        "quantize_per_channel_backward", dy, x, scale, zero_point, axis, None, qtype, qmin, qmax, implementation
    )


def _resolve(
    name, x, scale, zero_point, axis, block_shape, qtype, qmin, qmax, dtype, packed, rounding, key, implementation
):
    """Operands, parameters of the primitive, and the dtype that the caller wants its result in."""
    x = scales.as_float_array(name, "x", x)
    r = scales.resolve(name, x, scale, zero_point, axis, block_shape, qtype, qmin, qmax)
    packed_bits = 0
    if packed:
        packed_bits = packing.check_bits(name, r.qtype)
        if dtype is not None:
            raise refuse(name, "dtype", "None with packed=True", str(jnp.dtype(dtype)), "packed codes are uint8")
        if x.ndim == 0:
            raise refuse(name, "x", "at least one axis with packed=True", "a scalar", "reshape it to (1,)")
        cast = out_dtype = jnp.dtype(jnp.uint8)
    elif dtype is None:
        cast = out_dtype = r.qtype.container
    else:
        cast = qtypes.check_carrier(name, dtype, r.qmin, r.qmax)
        out_dtype = r.qtype.container
        if jnp.issubdtype(cast, jnp.floating):
            # The kernel writes x's type or float32; the codes are exact in either, or it is not used.
            out_dtype = cast if cast == x.dtype else jnp.dtype(jnp.float32)
    implementation = ffi.check_implementation(name, implementation)
    operands, placed = stochastic.operands(name, rounding, key, r)
    params = (
        ("qmin", r.qmin), ("qmax", r.qmax), ("out_dtype", out_dtype), ("packed_bits", packed_bits), *placed,
        ("implementation", implementation),
    )  # fmt: skip
    return operands, params, cast


def _results(x: Any, *_: Any, out_dtype: Any, packed_bits: int, **__: Any) -> list[Result]:
    if packed_bits:
        return [Result("packed", packing.packed_shape(x.shape, packed_bits), jnp.uint8)]
    return [Result("full", x.shape, out_dtype)]


def _reference(
    x: Any,
    scale: Any,
    zero_point: Any,
    *key: Any,
    qmin: int,
    qmax: int,
    out_dtype: Any,
    packed_bits: int,
    index_rank: int = 0,
) -> Any:
    x_real = x.astype(scale.dtype)
    full_scale, full_zero = over(x_real, scale, zero_point)
    v = stochastic.rounding(x.shape, key, index_rank)(x_real / full_scale) + full_zero
    v = jnp.where(v == v, v, scales.spread(round_zero_point(zero_point), x.shape))
    # As in the kernels, even a NaN zero point gives a code.
    q = jnp.minimum(jnp.where(v >= qmin, v, qmin), qmax)
    if packed_bits:
        return packing.pack_reference(q.astype(jnp.int32).astype(jnp.uint8), packed_bits)
    if jnp.issubdtype(out_dtype, jnp.integer):
        return q.astype(jnp.int32).astype(out_dtype)
    return q.astype(out_dtype)


def _first(dy: Any, x: Any, scale: Any, zero_point: Any, qmin: int, qmax: int, rounding: Any) -> Any:
    t = x / scale
    v = rounding(t) + zero_point
    inside = (v >= qmin) & (v <= qmax)
    slope = dy / scale
    return jnp.where(inside, slope, 0), jnp.where(inside, -(slope * t), 0), jnp.where(inside, dy, 0)


def _smooth(dy: Any, x: Any, scale: Any, zero_point: Any, inside: Any, outside: Any) -> Any:
    del zero_point, outside
    # Selected before dividing, so that what lies outside contributes no NaN.
    x, dy = jnp.where(inside > 0, x, 0), jnp.where(inside > 0, dy, 0)
    return dy / scale, -(dy / scale) * (x / scale), dy


def _attributes(*, qmin: int, qmax: int, packed_bits: int, **_: Any) -> dict[str, int]:
    return {"qmin": qmin, "qmax": qmax, "packed_bits": packed_bits}


def _to_gradient(*, out_dtype: Any, packed_bits: int, **params: Any) -> dict[str, Any]:
    del out_dtype, packed_bits
    return params


def _build(name: str, keyed: bool) -> Family:
    value = build(
        Operation(
            name=name,
            operands=("full", *PARAMETERS[keyed]),
            results=_results,
            reference=_reference,
            attributes=_attributes,
            placed=keyed,
        )
    )
    slope = build_gradient(name, Terms(_first, _smooth), keyed=keyed)
    ad.primitive_jvps[value] = partial(value_jvp, value, slope, _to_gradient)
    return Family(value, slope, straight_through(value, slope, _to_gradient))


# By whether it takes a key.
QUANTIZE = {False: _build("quantize", False), True: _build("stochastic_quantize", True)}
quantize_p, quantize_gradient_p, _ = QUANTIZE[False]
stochastic_quantize_p, stochastic_quantize_gradient_p, _ = QUANTIZE[True]
