"""The custom_vjp wrapper that the public training functions share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive

from jaxquant._core.primitive import bind
from jaxquant.affine.straight_through import Want, gradient


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Which operands somebody differentiates: static, but carried among the residuals."""

    want: Want


def straight_through(
    value: Primitive, gradient_primitive: Primitive, to_gradient: Callable[..., dict[str, Any]]
) -> Callable[..., Any]:
    """f(params, x, scale, zero_point, *key) with gradients recomputed from exactly these operands.

    The forward rule binds the primitive, not the custom_vjp function, so that forward-over-reverse (hessian,
    Hessian-vector products) finds the primitives' own rules. symbolic_zeros tells which gradients are wanted.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def function(params: tuple[tuple[str, Any], ...], *operands: Any) -> Any:
        return bind(value, *operands, **dict(params))

    def forward(params: Any, *operands: Any) -> Any:
        values = tuple(operand.value for operand in operands)
        wanted = _Wanted(tuple(operand.perturbed for operand in operands[:3]))
        return bind(value, *values, **dict(params)), (values, wanted)

    def backward(params: Any, saved: Any, dy: Any) -> Any:
        operands, wanted = saved
        constant = (None,) * (len(operands) - 3)
        if isinstance(dy, jax.custom_derivatives.SymbolicZero):
            return (None, None, None, *constant)
        found = gradient(gradient_primitive, dy, *operands, want=wanted.want, **to_gradient(**dict(params)))
        return (*found, *constant)

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function
