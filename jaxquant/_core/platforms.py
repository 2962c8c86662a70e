"""Kernels for other platforms: anybody's targets, registered without an edit here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxquant._core import ffi, primitive


def register_kernels(platform: str, targets: Mapping[str, Any]) -> None:
    """Makes ``targets`` the kernels of jaxquant's operations on ``platform``.

    Call it before the operations are first used there. `jaxquant.testing.conformance` checks the result.

    Args:
      platform: a JAX platform name, for example "rocm", "tpu" or the name of a plugin.
      targets: operation name (see `info`) -> XLA FFI handler, as a PyCapsule or a dictionary of stages. Operands,
        results and attributes of each handler are those of ffi/affine/handlers.h. Operations that are left out keep
        their jax.numpy lowering.

    Raises:
      ValueError: a name that is no operation, no targets at all, or an operation that has a kernel there already (XLA
        takes one handler for a target; a second one would break every later call).

    >>> register_kernels("my_accelerator", {"quantise": None})
    Traceback (most recent call last):
    ...
    ValueError: register_kernels: targets: expected names among ..., got 'quantise'; see jaxquant.info().
    """
    unknown = sorted(set(targets) - set(primitive.OPERATIONS))
    if unknown or not targets:
        got = ", ".join(map(repr, unknown)) or "none"
        raise ValueError(
            f"register_kernels: targets: expected names among {', '.join(primitive.OPERATIONS)}, got {got}; "
            "see jaxquant.info()."
        )
    taken = sorted(set(targets) & set(ffi.registered().get(platform.lower(), ())))
    if taken:
        raise ValueError(
            f"register_kernels: targets: expected operations without a kernel on {platform}, got {', '.join(taken)}; "
            "leave them out."
        )
    ffi.register(platform, targets)
    for name in targets:
        primitive.use_kernels(name, platform.lower())
