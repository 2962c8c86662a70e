"""Products of floating-point rows with matrices of integer codes, and their transposes.

    weight_only_matmul_p, weight_only_gradient_p  ->  ffi/matmul/weight_only/{cpu.cc,cuda.cu}  ->  math.h

    weight_only_matmul:    x [b or 1, m, k], w [b, k, n]  ->  x @ ((q - zero_point) * scale)  [b, m, n]
    weight_only_gradient:  dy [b, m, n], w [b, k, n]  ->  dy @ ((q - zero_point) * scale).T  [b, m, k]

The operands of a matrix are its codes (int8 or uint8 [b, k, n]; below 8 bits packed along n; or the prepared layout),
its scale, float32 [b, groups along k, n or 1], and its zero point, float32 of the scale's shape or, for none, without
elements. Both primitives are linear in their first operand and in the scale, and each is the other's transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxquant._core import compat
from jaxquant._core.primitive import Axes, Operation, Result, bind, build
from jaxquant.affine.layout import codes_of, codes_per_word, columns_of, weight_axes

FLOATS = ("float32", "float16", "bfloat16")


class Weight(NamedTuple):
    """What the primitives must know of a matrix beside its operands. Of a shard, n and k are upper bounds."""

    bits: int
    signed: bool
    n: int
    k: int
    layout: Literal["plain", "prepared"] = "plain"

    def columns(self, data: Any) -> Any:
        """n of a matrix or of its shard, which has whole bytes or panels."""
        return columns_of(data, self.bits, self.layout == "prepared", self.n)

    def rows(self, data: Any) -> Any:
        return min(self.k, data.shape[2] * codes_per_word(self.bits)) if self.layout == "prepared" else data.shape[1]


def no_zero_point() -> jax.Array:
    """The operand that stands for none."""
    return jnp.zeros((0, 0, 0), jnp.float32)


# ---------------------------------------------------------------------------------------------------------- jax.numpy


def _codes(data: Any, weight: Weight) -> Any:
    """The codes [b, k, n]."""
    bits, signed, _, _, layout = weight
    k, n = weight.rows(data), weight.columns(data)
    return codes_of(data, bits=bits, signed=signed, k=k, n=n, prepared=layout == "prepared")


def _values(data: Any, scale: Any, zero_point: Any, weight: Weight) -> Any:
    """(q - zero_point) * scale in float32, [b, k, n]."""
    codes = _codes(data, weight).astype(jnp.float32)
    b, k, n = codes.shape
    groups = scale.shape[1]
    if 0 in (b, k, n):
        return codes
    codes = codes.reshape(b, groups, k // groups, n)
    if zero_point.size:
        codes = codes - zero_point[:, :, None]
    return (codes * scale[:, :, None]).reshape(b, k, n)


def _dot(a: Any, b: Any, dimensions: str) -> Any:
    return jnp.einsum(dimensions, a, b, precision="highest", preferred_element_type=jnp.float32)


def _matmul_reference(x: Any, data: Any, scale: Any, zero_point: Any, *, weight: Weight) -> Any:
    values = _values(data, scale, zero_point, weight)
    x32 = jnp.broadcast_to(x.astype(jnp.float32), (values.shape[0], *x.shape[1:]))
    return _dot(x32, values, "bmk,bkn->bmn").astype(x.dtype)


def _gradient_reference(dy: Any, data: Any, scale: Any, zero_point: Any, *, weight: Weight) -> Any:
    values = _values(data, scale, zero_point, weight)
    return _dot(dy.astype(jnp.float32), values, "bmn,bkn->bmk").astype(dy.dtype)


# ---------------------------------------------------------------------------------------------------------- primitives


def _matrix_axes(data: Any, scale: Any, zero_point: Any, weight: Weight) -> tuple[list[Any], dict[str, Any]]:
    """Names of the axes of a matrix's operands, and what may not be cut: groups, words, panels, bytes."""
    bits, _, n, k, layout = weight
    groups, word = scale.shape[1], codes_per_word(bits) if layout == "prepared" else 1
    names, cut_k, cut_n = weight_axes(data, bits, layout == "prepared", k, n)
    if groups > 1:
        cut_k = groups if k // groups % word == 0 else 1
    of_scale = ("b", "k" if groups > 1 else None, None if scale.shape[2] == 1 else "n")
    of_zero_point = of_scale if zero_point.size else (None, None, None)
    return [names, of_scale, of_zero_point], {"b": data.shape[0], "n": cut_n, "k": cut_k}


def _matmul_axes(x: Any, data: Any, scale: Any, zero_point: Any, *, weight: Weight) -> Axes:
    names, units = _matrix_axes(data, scale, zero_point, weight)
    batch = "b" if x.shape[0] == data.shape[0] != 1 else None
    return Axes([(batch, "m", "k"), *names], [("b", "m", "n")], {**units, "m": x.shape[1]})


def _gradient_axes(dy: Any, data: Any, scale: Any, zero_point: Any, *, weight: Weight) -> Axes:
    names, units = _matrix_axes(data, scale, zero_point, weight)
    return Axes([("b", "m", "n"), *names], [("b", "m", "k")], {**units, "m": dy.shape[1]})


def _batch(primitive: Callable[[], Any], shared: bool) -> Callable[..., Any]:
    def batch(operands: Any, dims: Any, **params: Any) -> Any:
        x, *matrix = operands
        size = next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)
        if all(d is None for d in dims[1:]):  # more rows
            x = jnp.moveaxis(x, dims[0], 1)
            b, _, m, columns = x.shape
            out = bind(primitive(), x.reshape(b, size * m, columns), *matrix, **params)
            return jnp.moveaxis(out.reshape(out.shape[0], size, m, out.shape[2]), 1, 0)

        def more(a: Any, d: int | None) -> Any:
            a = jnp.broadcast_to(a[None], (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
            return a.reshape(size * a.shape[1], *a.shape[2:])

        b = matrix[0].shape[0 if dims[1] is None or dims[1] > 0 else 1]
        zero_point = more(matrix[2], dims[3]) if matrix[2].size else no_zero_point()
        matrix = [*(more(a, d) for a, d in zip(matrix[:2], dims[1:3], strict=True)), zero_point]
        # One x for all matrices stays one in the product; the gradient has a dy for each.
        if dims[0] is not None or x.shape[0] != 1 or not shared:
            x = jnp.broadcast_to(x[None], (size, *x.shape)) if dims[0] is None else jnp.moveaxis(x, dims[0], 0)
            x = jnp.broadcast_to(x, (size, b, *x.shape[2:])).reshape(size * b, *x.shape[2:])
        out = bind(primitive(), x, *matrix, **params)
        return out.reshape(size, b, *out.shape[1:])

    return batch


def _attributes(*, weight: Weight) -> dict[str, int]:
    return {
        "bits": weight.bits,
        "is_signed": int(weight.signed),
        "prepared": int(weight.layout == "prepared"),
    }


_SAME_BITS = "on each platform: any batch, thread count and layout"
_ROLES: Any = ("full", "packed", "scale", "scale")

weight_only_matmul_p = build(
    Operation(
        name="weight_only_matmul",
        operands=_ROLES,
        results=lambda x, data, *_, weight: [
            Result("full", (data.shape[0], x.shape[1], weight.columns(data)), x.dtype)
        ],
        reference=_matmul_reference,
        attributes=_attributes,
        dtypes=FLOATS,
        axes=_matmul_axes,
        batch=_batch(lambda: weight_only_matmul_p, shared=True),
        same_bits=_SAME_BITS,
    )
)
weight_only_gradient_p = build(
    Operation(
        name="weight_only_gradient",
        operands=_ROLES,
        results=lambda dy, data, *_, weight: [
            Result("full", (data.shape[0], dy.shape[1], weight.rows(data)), dy.dtype)
        ],
        reference=_gradient_reference,
        attributes=_attributes,
        dtypes=FLOATS,
        axes=_gradient_axes,
        batch=_batch(lambda: weight_only_gradient_p, shared=False),
        same_bits=_SAME_BITS,
    )
)

# ----------------------------------------------------------------------------------------------------- differentiation


def _derive(primitive: Any, transpose: Any, reference: Callable[..., Any], wide: Callable[..., Any]) -> None:
    """Rules of a product that is linear in its first operand and in the scale, and affine in the zero point.

    wide(x, slope): the product with a matrix that holds slope [b, groups, n or 1] all over each group.
    """

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        x, data, scale, zero_point = primals
        out = bind(primitive, *primals, **params)
        terms = []
        if not compat.is_zero(tangents[0]):
            terms.append(bind(primitive, tangents[0], data, scale, zero_point, **params))
        if not compat.is_zero(tangents[2]):
            terms.append(bind(primitive, x, data, tangents[2], zero_point, **params))
        if not compat.is_zero(tangents[3]) and zero_point.size:
            terms.append(wide(x, -scale * tangents[3], out.shape).astype(out.dtype))
        return out, sum(terms[1:], terms[0]) if terms else ad.Zero(jax.typeof(out).to_tangent_aval())

    def transposed(cotangent: Any, x: Any, data: Any, scale: Any, zero_point: Any, **params: Any) -> Any:
        by_scale = ad.is_undefined_primal(scale)
        aval = (scale if by_scale else x).aval
        if compat.is_zero(cotangent):
            found = ad.Zero(aval)
        elif by_scale:
            public = {key: value for key, value in params.items() if key != "implementation"}
            by = jax.linear_transpose(lambda scale: reference(x, data, scale, zero_point, **public), aval)
            (found,) = by(cotangent)
        else:
            found = bind(transpose, cotangent, data, scale, zero_point, **params)
            if aval.shape[0] == 1 != found.shape[0]:  # shared by the matrices
                found = found.sum(0, keepdims=True)
        return [None, None, found, None] if by_scale else [found, None, None, None]

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transposed


def _wide_matmul(x: Any, slope: Any, shape: tuple[int, ...]) -> Any:
    groups = slope.shape[1]
    sums = x.astype(jnp.float32).reshape(*x.shape[:2], groups, -1).sum(-1)
    return jnp.broadcast_to(jnp.matmul(sums, slope, precision="highest"), shape)


def _wide_gradient(dy: Any, slope: Any, shape: tuple[int, ...]) -> Any:
    full = jnp.broadcast_to(slope, (*slope.shape[:2], dy.shape[2]))
    sums = jnp.einsum("bmn,bgn->bmg", dy.astype(jnp.float32), full, precision="highest")
    return jnp.repeat(sums, shape[2] // slope.shape[1], axis=2)


_derive(weight_only_matmul_p, weight_only_gradient_p, _matmul_reference, _wide_matmul)
_derive(weight_only_gradient_p, weight_only_matmul_p, _gradient_reference, _wide_gradient)
