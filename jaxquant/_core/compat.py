"""The one place that knows JAX's private or moving names, each with the versions it covers and the reason."""

from __future__ import annotations

from typing import Any

from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax.interpreters import ad

# A primitive whose lowering holds custom_partitioning must see the devices; there is no public name for saying so
# (jax 0.6 to 0.12). Without it, lowering for several devices dies with an internal assertion.
needs_devices = _dispatch.prim_requires_devices_during_lowering.add

# Gives every operand the union of their varying manual axes, so that inside shard_map the cotangent of a replicated
# operand is summed over the axes the others vary on. `auto_insert_reshard` from jax 0.10.1, the other name before.
match_varying_axes = getattr(_core, "auto_insert_reshard", None) or getattr(_core, "standard_insert_pvary")  # noqa: B009


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual axes a value varies over: `.vma` until jax 0.10.1, `.manual_axis_type.varying` from 0.10.2."""
    if (axes := getattr(aval, "vma", None)) is not None:
        return axes
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def is_zero(tangent: Any) -> bool:
    """Whether a tangent or cotangent is symbolically zero, in a JVP or transpose rule."""
    return isinstance(tangent, ad.Zero)
