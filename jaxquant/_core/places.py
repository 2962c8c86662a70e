"""Places of elements in a whole array, whatever part of it is at hand: row-major indices in two 32-bit words.

JAX has no 64-bit integers unless asked for them, and an array may have more than 2^32 elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir


def iotas(shape: tuple[Any, ...], axes: Sequence[int]) -> list[Any]:
    """The index along each of `axes`, of x's rank. A sharded one tells a shard where it begins."""
    rank = len(shape)
    return [
        jax.lax.broadcasted_iota(jnp.uint32, tuple(shape[d] if i == d else 1 for i in range(rank)), d) for d in axes
    ]


def index(coordinates: Sequence[Any], sizes: Sequence[Any]) -> tuple[Any, Any]:
    """(high, low) words of the row-major index of `coordinates` (uint32, broadcasting) in an array of `sizes`."""
    high = low = jnp.uint32(0)
    small = all(isinstance(n, int) for n in sizes) and math.prod(sizes) <= 1 << 32
    for coordinate, n in zip(coordinates, sizes, strict=True):
        n = jnp.asarray(n).astype(jnp.uint32) if not isinstance(n, int) else jnp.uint32(n)
        if not small:
            high = high * n + _high_product(low, n)
        low = low * n + coordinate
        if not small:
            high = high + (low < coordinate)
    return high, low


def _high_product(a: Any, b: Any) -> Any:
    """The upper word of the product of two words."""
    a_low, a_high, b_low, b_high = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = a_high * b_low + (a_low * b_low >> 16)
    other = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (other >> 16)


def origin(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """uint32[2], low and high: where a shard begins in an array of `sizes`, from its parts of `iotas`."""
    return _origin_p.bind(*parts, sizes=tuple(sizes))


def _lower_origin(ctx: Any, *parts: Any, sizes: tuple[int, ...]) -> Any:
    def function(*parts: Any) -> Any:
        begins = [part.reshape(-1)[0] if part.size else jnp.uint32(0) for part in parts]
        high, low = index(begins, sizes)
        return jnp.stack([jnp.asarray(low), jnp.asarray(high)])

    return lower_bare(ctx, function, *parts, multiple_results=False)


def lower_bare(ctx: Any, function: Any, *operands: Any, multiple_results: bool) -> Any:
    """Lowers `function` without the mesh that explicit mode has around us.

    Its types would annotate shardings, and inside a shard nobody takes such annotations out any more.
    """
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        ins, outs = ([ShapedArray(aval.shape, aval.dtype) for aval in avals] for avals in (ctx.avals_in, ctx.avals_out))
        bare = ctx.replace(avals_in=ins, avals_out=outs, jaxpr_eqn_ctx=None)
        return mlir.lower_fun(function, multiple_results=multiple_results)(bare, *operands)


_origin_p = Primitive("jaxquant_origin")
_origin_p.def_abstract_eval(lambda *parts, sizes: ShapedArray((2,), jnp.dtype(jnp.uint32)))
mlir.register_lowering(_origin_p, _lower_origin)
