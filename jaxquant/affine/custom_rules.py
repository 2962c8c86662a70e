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
    """f(x, scale, zero_point, params) with gradients recomputed from exactly these three.

    The forward rule binds the primitive, not the custom_vjp function, so that forward-over-reverse (hessian,
    Hessian-vector products) finds the primitives' own rules. symbolic_zeros tells which gradients are wanted.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(3,))
    def function(x: Any, scale: Any, zero_point: Any, params: tuple[tuple[str, Any], ...]) -> Any:
        return bind(value, x, scale, zero_point, **dict(params))

    def forward(x: Any, scale: Any, zero_point: Any, params: Any) -> Any:
        operands = (x.value, scale.value, zero_point.value)
        wanted = _Wanted((x.perturbed, scale.perturbed, zero_point.perturbed))
        return bind(value, *operands, **dict(params)), (operands, wanted)

    def backward(params: Any, saved: Any, dy: Any) -> Any:
        operands, wanted = saved
        if isinstance(dy, jax.custom_derivatives.SymbolicZero):
            return None, None, None
        return gradient(gradient_primitive, dy, *operands, want=wanted.want, **to_gradient(**dict(params)))

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function
