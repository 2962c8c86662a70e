"""What makes a reference in jax.numpy give IEEE results: XLA and LLVM otherwise rewrite it to something faster.

An optimization_barrier would not do: XLA's CPU compiler removes it before it generates code, and until then it makes
full-sized copies of what it guards. These are ordinary operations, which XLA fuses, and which no rewrite applies to.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.affine import scales


def over(x: Any, scale: Any, zero_point: Any) -> tuple[Any, Any]:
    """scale and rounded zero point at each element of x, which has the arithmetic type.

    Where x is NaN they are NaN too, which changes no result but makes them depend on x. A scale that is plainly a
    broadcast XLA divides by with its reciprocal, which rounds ties the wrong way; the addition of a zero point that is
    plainly 0 it drops, which leaves -0 where +0 is due.
    """
    number = x == x
    full_scale = jnp.where(number, scales.spread(scale, x.shape), x)
    return full_scale, jnp.where(number, scales.spread(round_zero_point(zero_point), x.shape), x)


def round_zero_point(zero_point: Any) -> Any:
    """Rounded, and never -0."""
    rounded = jnp.round(zero_point)
    return jnp.where(rounded == 0, 0, rounded)


def seal(value: Any) -> Any:
    """`value`, bit for bit, in a form that XLA and LLVM compute as it stands.

    A product would otherwise be contracted into a later addition (one rounding instead of two), and a conversion to 16
    bits undone by a later one back to 32. Selecting among bit patterns stops both; NaN becomes the canonical one.
    """
    width = value.dtype.itemsize * 8
    bits = jax.lax.bitcast_convert_type(value, f"uint{width}")
    info = jnp.finfo(value.dtype)
    infinity = bits.dtype.type(((1 << info.nexp) - 1) << info.nmant)
    magnitude = bits & bits.dtype.type((1 << (width - 1)) - 1)
    nan = infinity | bits.dtype.type(1 << (info.nmant - 1))
    return jax.lax.bitcast_convert_type(jnp.where(magnitude > infinity, nan, bits), value.dtype)
