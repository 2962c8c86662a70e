"""Integer products: exact ones of codes, and those of quantised matrices with their scales.

    int_matmul()     ->  int_matmul_p     ->  ffi/matmul/
    scaled_matmul()  ->  scaled_matmul_p  ->  ffi/matmul/

A product with scales is, on every platform and in this order,

    acc[g] = the integer sum over group g of (a - a_zero_point) * (w - w_zero_point), in int32 (it wraps)
    t      = float(acc[0]) * w_scale[0]; t = t + float(acc[g]) * w_scale[g] for g = 1, 2, ...
    y      = t * a_scale;  y = y + bias if there is one;  rounded to the result's dtype
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxquant._core import compat, ffi
from jaxquant._core.errors import refuse
from jaxquant._core.primitive import Axes, Operation, Result, bind, build, constant
from jaxquant.affine.exact import seal
from jaxquant.affine.layout import codes_of, columns_of, weight_axes

CODES = ("int8", "uint8")
RESULTS = ("float32", "float16", "bfloat16")


def int_matmul(a: Any, b: Any, *, implementation: str | None = None) -> jax.Array:
    """``jnp.matmul(a, b)`` of 8-bit integers, summed in int32 without an error.

    Args:
      a: int8 or uint8, ``[.., m, k]`` or ``[k]``.
      b: int8 or uint8, ``[.., k, n]`` or ``[k]``; not necessarily a's dtype.
      implementation: None, "ffi" or "xla", as for `fake_quantize`.

    Returns:
      int32 ``[.., m, n]``, leading axes broadcast as by ``jnp.matmul``. Exact for k up to 33025; a sum beyond int32
      wraps around. The same on every platform, instruction set, thread count and sharding; along a sharded k one
      all-reduce of integers.

    Gradients: integers have none. JAX gives integer arrays no tangents: a gradient through the result is zero without
    a warning. `qat_dense` trains.

    Raises:
      TypeError: operands of another dtype.
      ValueError: shapes that do not match.

    >>> int_matmul(jnp.array([[100, 100]], jnp.int8), jnp.array([[255], [255]], jnp.uint8))
    Array([[51000]], dtype=int32)
    """
    name = "int_matmul"
    a, b = jnp.asarray(a), jnp.asarray(b)
    for operand, x in (("a", a), ("b", b)):
        if x.dtype.name not in CODES:
            raise refuse(name, operand, "int8 or uint8", x.dtype.name, "quantise it, or use jnp.matmul", TypeError)
        if x.ndim == 0:
            raise refuse(name, operand, "at least one axis", "a scalar", "multiply by it")
    vectors = (a.ndim == 1, b.ndim == 1)
    a = a[None] if vectors[0] else a
    b = b[:, None] if vectors[1] else b
    if a.shape[-1] != b.shape[-2]:
        remedy = "a's last axis is contracted with b's last but one"
        raise refuse(name, "b", f"{a.shape[-1]} rows for a of shape {a.shape}", f"shape {b.shape}", remedy)
    try:
        lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        expected = f"leading axes that broadcast with a's {a.shape[:-2]}"
        raise refuse(name, "b", expected, str(b.shape[:-2]), "reshape one of them") from None
    implementation = ffi.check_implementation(name, implementation)
    m, n = a.shape[-2], b.shape[-1]
    if math.prod(b.shape[:-2]) == 1:  # more rows
        a, b = a.reshape(1, math.prod(a.shape[:-1]), a.shape[-1]), b.reshape(1, *b.shape[-2:])
    else:
        a, b = _flat(a, lead), _flat(b, lead)
    out = bind(int_matmul_p, a, b, implementation=implementation)
    out = out.reshape(*lead, m, n)
    out = out[..., 0] if vectors[1] else out
    return out.reshape((*lead, *([] if vectors[1] else [n]))) if vectors[0] else out


def _flat(x: Any, lead: tuple[Any, ...]) -> Any:
    """[b or 1, ., .]"""
    if math.prod(x.shape[:-2]) == 1:
        return x.reshape(1, *x.shape[-2:])
    return jnp.broadcast_to(x, (*lead, *x.shape[-2:])).reshape(math.prod(lead), *x.shape[-2:])


NONE = (0,)  # the shape of an operand that is not there


def scaled_matmul(
    a: Any, a_scale: Any, a_zero_point: Any, w: Any, w_scale: Any, w_zero_point: Any, bias: Any, *, bits: int,
    signed: bool, n: int, prepared: bool, dtype: Any, implementation: str | None,
) -> jax.Array:  # fmt: skip
    """A product of codes with the scales of both operands; see the head of this file.

    Args:
      a: int8 or uint8 codes ``[b or 1, m, k]``.
      a_scale: float32 ``[b or 1, m or 1, 1]``.
      a_zero_point: None, or the same shape in float32; rounded.
      w: ``[b, k, n]`` int8 or uint8 codes; uint8 ``[b, k, ceil(n * bits / 8)]``; or prepared (layout.py).
      w_scale: float32 ``[b, groups, n or 1]``; groups divide k.
      w_zero_point: None, or w_scale's shape in float32; rounded.
      bias: None or float32 ``[n]``.
      bits, signed, n, prepared: what w is.
      dtype: of the result, float32, float16 or bfloat16.

    Returns:
      ``[b, m, n]``.
    """
    none = jnp.zeros(NONE, jnp.float32)
    return bind(
        scaled_matmul_p, a, a_scale, none if a_zero_point is None else a_zero_point, w, w_scale,
        none if w_zero_point is None else w_zero_point, none if bias is None else bias,
        bits=bits, signed=signed, n=n, prepared=prepared, dtype=jnp.dtype(dtype), implementation=implementation,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- int_matmul
# a [b or 1, m, k], b [b or 1, k, n] -> [b, m, n]


def _exact_dot(a: Any, b: Any) -> Any:
    """[b, m, k], [b, k, n] -> [b, m, n]. XLA multiplies int8 by int8 best: unsigned codes are taken as c - 128."""
    shifts = [128 if x.dtype == jnp.uint8 else 0 for x in (a, b)]
    a, b = (jax.lax.bitcast_convert_type(x ^ jnp.uint8(128), jnp.int8) if x.dtype == jnp.uint8 else x for x in (a, b))
    dims = (((2,), (1,)), ((0,), (0,)))
    out = jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.int32)
    if shifts[0]:
        out = out + shifts[0] * b.sum(1, keepdims=True, dtype=jnp.int32)
    if shifts[1]:
        out = out + shifts[1] * a.sum(2, keepdims=True, dtype=jnp.int32)
    wrapped = (shifts[0] * shifts[1] * a.shape[2] + 2**31) % 2**32 - 2**31
    return out + jnp.int32(wrapped) if wrapped else out


def _int_matmul_reference(a: Any, b: Any) -> Any:
    size = _batch_size(a, b)
    return _exact_dot(*(jnp.broadcast_to(x, (size, *x.shape[1:])) for x in (a, b)))


def _batch_size(a: Any, b: Any) -> Any:
    return b.shape[0] if a.shape[0] == 1 else a.shape[0]


def _int_matmul_axes(a: Any, b: Any) -> Axes:
    size = _batch_size(a, b)
    names = ["b" if x.shape[0] == size else None for x in (a, b)]
    units = {"b": size, "m": a.shape[1], "k": a.shape[2], "n": b.shape[2]}
    return Axes([(names[0], "m", "k"), (names[1], "k", "n")], [("b", "m", "n")], units)


def _int_matmul_batch(operands: Any, dims: Any, **params: Any) -> Any:
    a, b = operands
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    if dims[1] is None:  # more rows
        rows = _rows(a, dims[0], size)
        out = bind(int_matmul_p, rows, b, **params)
        return jnp.moveaxis(out.reshape(out.shape[0], size, rows.shape[1] // max(size, 1), out.shape[2]), 1, 0)
    (a, b), each = _stacked((a, b), dims, size)
    out = bind(int_matmul_p, a, b, **params)
    return out.reshape(size, each, *out.shape[1:])


def _rows(x: Any, dim: int | None, size: int) -> Any:
    """[b, m, .], mapped or not -> [b, size * m, .]"""
    x = jnp.broadcast_to(x[:, None], (x.shape[0], size, *x.shape[1:])) if dim is None else jnp.moveaxis(x, dim, 1)
    return x.reshape(x.shape[0], size * x.shape[2], x.shape[3])


def _stacked(operands: Any, dims: Any, size: int) -> tuple[list[Any], int]:
    """Operands [b or 1, ...], mapped or not -> [size * b or 1, ...], and b. Those without elements stay."""
    each = max(
        (x.shape[0] if d is None else x.shape[1 if d == 0 else 0] for x, d in zip(operands, dims, strict=True)
         if x.shape != NONE),
        key=lambda b: b != 1,
    )  # fmt: skip
    out = []
    for x, d in zip(operands, dims, strict=True):
        if d is None and (x.shape == NONE or x.shape[0] == 1):
            out.append(x)
            continue
        x = x[None] if d is None else jnp.moveaxis(x, d, 0)
        x = jnp.broadcast_to(x, (size, each, *x.shape[2:]))
        out.append(x.reshape(size * each, *x.shape[2:]))
    return out, each


int_matmul_p = build(
    Operation(
        name="int_matmul",
        operands=("full", "full"),
        results=lambda a, b: [Result("full", (_batch_size(a, b), a.shape[1], b.shape[2]), jnp.int32)],
        reference=_int_matmul_reference,
        attributes=dict,
        dtypes=CODES,
        axes=_int_matmul_axes,
        batch=_int_matmul_batch,
        partial=lambda call, total, whole, a, b: total(call(a, b)[0]),
    )
)
constant(int_matmul_p)

# ------------------------------------------------------------------------------------------------------- scaled_matmul


def _zero_point(z: Any) -> Any:
    """As integers. Beyond every code type's range they are cut, so that no conversion depends on the platform."""
    z = jnp.where(z == z, jnp.clip(z, -65536, 65536), 0)
    return jnp.round(z).astype(jnp.int32)


def _group_sums(a: Any, za: Any, w: Any, zw: Any) -> Any:
    """sum of (a - za) * (w - zw) in int32: a [b, m, k], za [b, m, 1] or None, w [b, k, n], zw [b, 1, n] or None."""
    acc = _exact_dot(a, w)
    if za is not None:
        acc = acc - za * w.sum(1, keepdims=True, dtype=jnp.int32)
    if zw is not None:
        acc = acc - zw * a.sum(2, keepdims=True, dtype=jnp.int32)
    if za is not None and zw is not None:
        acc = acc + za * zw * a.shape[2]
    return acc


def _scaled_matmul_reference(
    a: Any, a_scale: Any, a_zero_point: Any, w: Any, w_scale: Any, w_zero_point: Any, bias: Any, *, bits: int,
    signed: bool, n: int, prepared: bool, dtype: Any,
) -> Any:  # fmt: skip
    n, k, groups = columns_of(w, bits, prepared, n), a.shape[2], w_scale.shape[1]
    w = codes_of(w, bits=bits, signed=signed, k=k, n=n, prepared=prepared)
    b, m = w.shape[0], a.shape[1]
    a = jnp.broadcast_to(a, (b, m, k))
    za = None if a_zero_point.shape == NONE else _zero_point(a_zero_point)
    zw = None if w_zero_point.shape == NONE else _zero_point(w_zero_point)

    def group(g: Any) -> Any:
        def part(x: Any, axis: int, size: int) -> Any:
            return x if groups == 1 else jax.lax.dynamic_slice_in_dim(x, g * size, size, axis)

        zero = None if zw is None else part(zw, 1, 1)
        return _group_sums(part(a, 2, k // groups), za, part(w, 1, k // groups), zero)

    def scaled(g: Any) -> Any:
        scale = w_scale if groups == 1 else jax.lax.dynamic_slice_in_dim(w_scale, g, 1, 1)
        return seal(group(g).astype(jnp.float32) * scale)

    if dtype == jnp.int32:
        return group(0)
    t = scaled(0)
    if groups > 1:
        t = jax.lax.fori_loop(1, groups, lambda g, t: t + scaled(g), t)
    return _finish(t, a_scale, bias, dtype)


def _finish(t: Any, a_scale: Any, bias: Any, dtype: Any) -> Any:
    y = seal(t * a_scale)
    if bias.shape != NONE:
        y = y + bias
    return seal(y.astype(dtype))


def _scaled_matmul_axes(
    a: Any, a_scale: Any, a_zero_point: Any, w: Any, w_scale: Any, w_zero_point: Any, bias: Any, *, bits: int,
    signed: bool, n: int, prepared: bool, dtype: Any,
) -> Axes:  # fmt: skip
    del signed, dtype
    b, m, k, groups = w.shape[0], a.shape[1], a.shape[2], w_scale.shape[1]
    names, whole_k, whole_n = weight_axes(w, bits, prepared, k, n)

    def rows(x: Any) -> tuple[str | None, ...]:
        return ("b" if x.shape[0] == b != 1 else None, "m" if x.shape[1] == m != 1 else None)

    def columns(x: Any) -> tuple[str | None, ...]:
        if x.shape == NONE:
            return (None,)
        return ("b", "k" if groups > 1 else None, "n" if x.shape[2] == n != 1 else None)

    operands = [
        (rows(a)[0], "m", "k"),
        (*rows(a_scale), None),
        (None,) if a_zero_point.shape == NONE else (*rows(a_zero_point), None),
        names,
        columns(w_scale),
        columns(w_zero_point),
        (None,) if bias.shape == NONE else ("n",),
    ]
    units = {"b": b, "m": m, "k": math.gcd(whole_k, groups) if groups > 1 else whole_k, "n": whole_n}
    return Axes(operands, [("b", "m", "n")], units)


def _scaled_matmul_batch(operands: Any, dims: Any, **params: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    if dims[6] is not None:
        # A bias for each example is added afterwards: the same additions.
        bias = jnp.moveaxis(operands[6], dims[6], 0)
        rest = (*operands[:6], jnp.zeros(NONE, jnp.float32)), (*dims[:6], None)
        wide = {**params, "dtype": jnp.dtype(jnp.float32)}
        if all(d is None for d in dims[:6]):
            out = bind(scaled_matmul_p, *rest[0], **wide)[None]
        else:
            out = _scaled_matmul_batch(*rest, **wide)
        return (out + bias[:, None, None]).astype(params["dtype"])
    operands, dims = list(operands), list(dims)
    if operands[2].shape != NONE and (dims[1] is None) != (dims[2] is None):  # zero points are shaped like scales
        i = 1 if dims[1] is None else 2
        operands[i], dims[i] = jnp.broadcast_to(operands[i], (size, *operands[i].shape)), 0
    a, a_scale, a_zero_point, w, w_scale, w_zero_point, bias = operands
    if all(d is None for d in dims[3:]):  # more rows
        m = a.shape[1] if dims[0] is None else jnp.moveaxis(a, dims[0], 0).shape[2]
        of_rows = []
        for x, d in zip((a_scale, a_zero_point), dims[1:3], strict=True):
            if x.shape != NONE and (d is not None or x.shape[1] != 1):
                x = x if d is None else jnp.moveaxis(x, d, 0)
                x = _rows(jnp.broadcast_to(x, (*x.shape[:-2], m, 1)), None if d is None else 0, size)
            of_rows.append(x)
        out = bind(scaled_matmul_p, _rows(a, dims[0], size), *of_rows, w, w_scale, w_zero_point, bias, **params)
        return jnp.moveaxis(out.reshape(out.shape[0], size, m, out.shape[2]), 1, 0)
    stacked, each = _stacked(operands[:6], dims[:6], size)
    # A matrix for each example, even where only its scales differ.
    for i in (3, 4, 5):
        x = stacked[i]
        if x.shape != NONE and x.shape[0] != size * each:
            stacked[i] = jnp.broadcast_to(x, (size * each, *x.shape[1:]))
    out = bind(scaled_matmul_p, *stacked, bias, **params)
    return out.reshape(size, each, *out.shape[1:])


def _scaled_matmul_partial(
    call: Any, total: Any, whole: Any, a: Any, a_scale: Any, a_zero_point: Any, w: Any, w_scale: Any,
    w_zero_point: Any, bias: Any, *, dtype: Any, **_: Any,
) -> Any:  # fmt: skip
    """k is spread over shards: sums of integers where w has one group, exact as ever; else of float32."""
    operands = (a, a_scale, a_zero_point, w, w_scale, w_zero_point, jnp.zeros(NONE, jnp.float32))
    if whole[4].shape[1] == 1:
        acc = total(call(*operands, changed={"dtype": jnp.dtype(jnp.int32)})[0])
        return _finish(seal(acc.astype(jnp.float32) * w_scale), a_scale, bias, dtype)
    t = total(call(a, jnp.ones_like(a_scale), *operands[2:], changed={"dtype": jnp.dtype(jnp.float32)})[0])
    return _finish(t, a_scale, bias, dtype)


scaled_matmul_p = build(
    Operation(
        name="scaled_matmul",
        operands=("full", "scale", "scale", "packed", "scale", "scale", "scale"),
        results=lambda a, a_scale, a_zero_point, w, *_, bits, signed, n, prepared, dtype: [
            Result("full", (w.shape[0], a.shape[1], columns_of(w, bits, prepared, n)), dtype)
        ],
        reference=_scaled_matmul_reference,
        attributes=lambda *, bits, signed, n, prepared, dtype: {
            "bits": bits,
            "is_signed": int(signed),
            "prepared": int(prepared),
        },
        dtypes=CODES,
        axes=_scaled_matmul_axes,
        batch=_scaled_matmul_batch,
        partial=_scaled_matmul_partial,
    )
)


def _scaled_matmul_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """Linear in each scale and in the bias; zero points are integers. Forward mode only: see `qat_dense`."""
    out = bind(scaled_matmul_p, *primals, **params)
    total = None
    none = jnp.zeros(NONE, jnp.float32)
    for i in (1, 4, 6):
        if compat.is_zero(tangents[i]) or primals[i].shape == NONE:
            continue
        if i == 6:
            term = jnp.broadcast_to(tangents[i].astype(out.dtype), out.shape)
        else:
            operands = [*primals[:6], none]
            operands[i] = tangents[i]
            term = bind(scaled_matmul_p, *operands, **params)
        total = term if total is None else total + term
    return out, ad.Zero(jax.typeof(out).to_tangent_aval()) if total is None else total


ad.primitive_jvps[scaled_matmul_p] = _scaled_matmul_jvp
