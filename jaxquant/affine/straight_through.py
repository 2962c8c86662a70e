"""Gradients of the affine operations: one primitive each, and the rules that make them differentiable again.

For an operation f(x, scale, zero_point, *key) the primitive `<f>_gradient` maps an upstream gradient to dx, dscale and
dzero_point, in one pass, computing only what is wanted. It is linear in the upstream gradient, and everything else
follows from it:

* the part for x is its own transpose, so it also serves as the tangent map of f in x;
* with a scale for every element and an upstream gradient of ones, its sums are the derivatives of f in the scale and
  the zero point, element by element: the tangent map of f in those, and the transpose of the sums;
* higher orders differentiate the terms of `docs/numerics` with the mask and the rounding residual held constant.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxquant._core import compat
from jaxquant._core.primitive import Operation, Result, Role, bind, build
from jaxquant.affine import scales, stochastic
from jaxquant.affine.exact import over, seal

# What a gradient primitive computes: dx, dscale, dzero_point.
Want = tuple[bool, bool, bool]
X_ONLY: Want = (True, False, False)
PARAMETERS_ONLY: Want = (False, True, True)

# The roles of scale and zero point and, of a keyed operation, of the two words of its key.
PARAMETERS: dict[bool, tuple[Role, ...]] = {
    False: ("scale", "scale"),
    True: ("scale", "scale", "scale", "scale"),
}


class Family(NamedTuple):
    """An operation's primitives and its function with gradients: f(params, x, scale, zero_point, *key)."""

    value: Primitive
    gradient: Primitive
    straight_through: Callable[..., Any]


class Terms(NamedTuple):
    """One operation's derivatives.

    first(dy, x, scale, zero_point, qmin, qmax, rounding) -> terms of (dx, dscale, dzero_point), full-sized, in the
    arithmetic type, from full-sized parameters.
    smooth(dy, x, scale, zero_point, inside, outside) -> the same terms as functions that jax may differentiate, with
    the rounding residual left out and the indicators constant: the derivatives of `first` in x, scale and zero_point.
    """

    first: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    smooth: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def build_gradient(name: str, terms: Terms, *, keyed: bool = False) -> Primitive:
    """The primitive `<name>_gradient`: (dy, x, scale, zero_point) -> the wanted ones of dx, dscale, dzero_point.

    keyed: of stochastic rounding, whose key (two more operands) tells again how each element was rounded.
    """
    operation = Operation(
        name=f"{name}_gradient",
        operands=("full", "full", *PARAMETERS[keyed]),
        placed=keyed,
        results=_results,
        pad_results=_padded_results,
        scratch=_scratch,
        reference=partial(_reference, terms.first),
        attributes=lambda *, qmin, qmax, want, **_: {
            "qmin": qmin,
            "qmax": qmax,
            "want": sum(w << i for i, w in enumerate(want)),
        },
    )
    primitive = build(operation, multiple_results=True)
    ad.primitive_jvps[primitive] = partial(_jvp, primitive, terms)
    ad.primitive_transposes[primitive] = partial(_transpose, primitive)
    return primitive


def _padded_results(
    dy: Any, x: Any, scale: Any, zero_point: Any, *key: Any, want: Want, **params: Any
) -> list[Result | None]:
    del dy, zero_point, key, params
    every = (
        Result("full", x.shape, x.dtype),
        Result("scale", scale.shape, scale.dtype),
        Result("scale", scale.shape, scale.dtype),
    )
    return [result if wanted else None for result, wanted in zip(every, want, strict=True)]


def _results(*operands: Any, **params: Any) -> list[Result]:
    return [result for result in _padded_results(*operands, **params) if result is not None]


def _scratch(dy: Any, x: Any, scale: Any, zero_point: Any, *key: Any, want: Want, **params: Any) -> Result:
    """Room for the chunk sums of both reductions (see ffi/affine/arguments.h)."""
    del dy, zero_point, key, params
    terms, sums = 1, 1
    for n, m in zip(x.shape, scale.shape, strict=True):
        terms, sums = terms * (1 if m == n else n // m if m else 1), sums * m
    if not any(want[1:]):
        return Result("scale", (0,), scale.dtype)
    if not isinstance(terms, int):
        # Symbolic: at least the sum of the levels, terms / 256 + terms / 256^2 + ..., each rounded up.
        return Result("scale", (2 * sums * (terms // 255 + 8),), scale.dtype)
    total, level = 0, -(-terms // 256)
    while level > 1:
        total, level = total + level, -(-level // 256)
    return Result("scale", (2 * sums * total,), scale.dtype)


def _reference(
    first: Callable[..., Any],
    dy: Any,
    x: Any,
    scale: Any,
    zero_point: Any,
    *key: Any,
    qmin: int,
    qmax: int,
    want: Want,
    index_rank: int = 0,
) -> list[Any]:
    real = scale.dtype
    x_real = x.astype(real)
    rounding = stochastic.rounding(x.shape, key, index_rank)
    terms = first(dy.astype(real), x_real, *over(x_real, scale, zero_point), qmin, qmax, rounding)
    results = []
    if want[0]:
        results.append(seal(terms[0].astype(x.dtype)))
    results += [scales.sum_to(term, scale.shape) for term, wanted in zip(terms[1:], want[1:], strict=True) if wanted]
    return results


# ------------------------------------------------------------------------------------------------------ differentiation


def parameter_derivatives(
    primitive: Primitive, x: Any, scale: Any, zero_point: Any, *key: Any, **params: Any
) -> list[Any]:
    """The derivatives of the operation in scale and zero point at every element, in the arithmetic type."""
    real = scale.dtype
    x = x.astype(real)
    full_scale, full_zero = scales.spread(scale, x.shape), scales.spread(zero_point, x.shape)
    return bind(primitive, jnp.ones_like(x), x, full_scale, full_zero, *key, **{**params, "want": PARAMETERS_ONLY})


def tangent(primitive: Primitive, operands: Any, tangents: Any, dtype: Any, **params: Any) -> Any:
    """The tangent of the operation itself, from its gradient primitive. None: zero."""
    x, scale, zero_point, *key = operands
    x_dot, scale_dot, zero_dot = tangents[:3]
    parts = []
    if x_dot is not None:
        like = _gradient_dtype(x.dtype, dtype)
        full = (x_dot.astype(like), x.astype(like))
        (dx,) = bind(primitive, *full, scale, zero_point, *key, **{**params, "want": X_ONLY})
        parts.append(dx.astype(dtype))
    if scale_dot is not None or zero_dot is not None:
        by_scale, by_zero = parameter_derivatives(primitive, x, scale, zero_point, *key, **params)
        if scale_dot is not None:
            parts.append((by_scale * scales.spread(scale_dot, x.shape)).astype(dtype))
        if zero_dot is not None:
            parts.append((by_zero * scales.spread(zero_dot, x.shape)).astype(dtype))
    return sum(parts[1:], parts[0]) if parts else None


def _gradient_dtype(x: Any, dy: Any) -> Any:
    """The type a gradient is computed from: wide enough for x and dy, but float64 only for float64 arithmetic."""
    x, dy = jnp.dtype(x), jnp.dtype(dy)
    if x == dy:
        return x
    if x == jnp.float64 or dy == jnp.float64:
        return jnp.dtype(jnp.float64)
    return jnp.dtype(jnp.float32)


def gradient(
    primitive: Primitive, dy: Any, x: Any, scale: Any, zero_point: Any, *key: Any, want: Want, **params: Any
) -> tuple[Any, Any, Any]:
    """dx in x's type, dscale and dzero_point, None where not wanted; dy and x may have different float types."""
    if not any(want):
        return None, None, None
    like = _gradient_dtype(x.dtype, dy.dtype)
    if scale.dtype != jnp.float64 and like == jnp.float64:
        like = jnp.dtype(jnp.float32)
    results = iter(bind(primitive, dy.astype(like), x.astype(like), scale, zero_point, *key, want=want, **params))
    dx, dscale, dzero = (next(results) if wanted else None for wanted in want)
    return (dx.astype(x.dtype) if dx is not None and jnp.issubdtype(x.dtype, jnp.floating) else dx), dscale, dzero


def value_jvp(
    value: Primitive,
    gradient_primitive: Primitive,
    to_gradient: Callable[..., dict[str, Any]],
    primals: Any,
    tangents: Any,
    **params: Any,
) -> Any:
    """The JVP rule of an operation's value primitive."""
    out = bind(value, *primals, **params)
    if not jnp.issubdtype(out.dtype, jnp.floating):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    dots = [None if compat.is_zero(t) or t.dtype == jax.dtypes.float0 else t for t in tangents]
    dot = tangent(gradient_primitive, primals, dots, out.dtype, **to_gradient(**params))
    return out, (ad.Zero(jax.typeof(out).to_tangent_aval()) if dot is None else dot)


def _jvp(primitive: Primitive, terms: Terms, primals: Any, tangents: Any, *, want: Want, **params: Any) -> Any:
    dy, x, scale, zero_point, *key = primals
    out = bind(primitive, *primals, want=want, **params)
    dots = [None if compat.is_zero(t) else t for t in tangents]
    sums = [jnp.zeros_like(o) for o in out]
    if dots[0] is not None:
        sums = bind(primitive, dots[0], x, scale, zero_point, *key, want=want, **params)
    if any(dot is not None for dot in dots[1:4]):
        real = scale.dtype
        shape = x.shape
        inside, outside = terms_indicators(x.astype(real), scale, zero_point, key, params)

        def smooth(x: Any, scale: Any, zero_point: Any) -> list[Any]:
            full_scale, full_zero = scales.spread(scale, shape), scales.spread(zero_point, shape)
            every = terms.smooth(dy.astype(real), x.astype(real), full_scale, full_zero, inside, outside)
            every = (every[0], *(scales.sum_to(term, scale.shape) for term in every[1:]))
            return [term for term, wanted in zip(every, want, strict=True) if wanted]

        args = (x, scale, zero_point)
        filled = tuple(jnp.zeros_like(a) if dot is None else dot for a, dot in zip(args, dots[1:4], strict=True))
        _, extra = jax.jvp(smooth, args, filled)
        sums = [a + b.astype(a.dtype) for a, b in zip(sums, extra, strict=True)]
    return out, sums


def terms_indicators(x: Any, scale: Any, zero_point: Any, key: Any, params: dict[str, Any]) -> tuple[Any, Any]:
    """1 where the rounded value was in range, and 1 where it was out (NaN is neither), as constants."""
    from jaxquant.affine.fake_quantize import FAKE_QUANTIZE

    primitive = FAKE_QUANTIZE[bool(key)].gradient
    inside, out_scale = None, None
    x, scale, zero_point = map(jax.lax.stop_gradient, (x, scale, zero_point))
    (inside,) = bind(primitive, jnp.ones_like(x), x, scale, zero_point, *key, want=X_ONLY, **params)
    _, out_scale = parameter_derivatives(primitive, x, scale, zero_point, *key, **params)
    return jax.lax.stop_gradient(inside), jax.lax.stop_gradient((out_scale != 0).astype(x.dtype))


def _transpose(
    primitive: Primitive,
    cotangents: Any,
    dy: Any,
    x: Any,
    scale: Any,
    zero_point: Any,
    *key: Any,
    want: Want,
    **params: Any,
) -> Any:
    if not ad.is_undefined_primal(dy):
        raise NotImplementedError(f"{primitive.name} is linear in dy only.")
    given = iter(cotangents)
    of_x, of_scale, of_zero = (next(given) if wanted else None for wanted in want)
    tangents = [None if ct is None or compat.is_zero(ct) else ct for ct in (of_x, of_scale, of_zero)]
    ct = tangent(primitive, (x, scale, zero_point, *key), tangents, dy.aval.dtype, **params)
    return (ad.Zero(dy.aval) if ct is None else ct), *(None for _ in (x, scale, zero_point, *key))
