"""Code types and their ranges."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxquant._core.errors import refuse


class QType(NamedTuple):
    """A code type: its bits, its full range and the array type its codes live in (sub-byte codes in a whole byte)."""

    name: str
    bits: int
    qmin: int
    qmax: int
    container: Any


QTYPES = {
    f"{prefix}int{bits}": QType(
        f"{prefix}int{bits}",
        bits,
        -(2 ** (bits - 1)) if not prefix else 0,
        2 ** (bits - 1) - 1 if not prefix else 2**bits - 1,
        jnp.dtype(f"{prefix}int{max(bits, 8)}"),
    )
    for bits in (2, 4, 8, 16)
    for prefix in ("", "u")
}


def lookup(operation: str, qtype: Any) -> QType:
    """The code type of a dtype, a scalar type or a name."""
    name = qtype if isinstance(qtype, str) else None
    if name is None:
        try:
            name = jnp.dtype(qtype).name
        except TypeError:
            name = repr(qtype)
    if name in QTYPES:
        return QTYPES[name]
    if name.startswith(("float8", "float4")):
        raise NotImplementedError(
            f"{operation}: qtype: {name} is reserved for a later version; use one of {', '.join(QTYPES)}."
        )
    raise refuse(operation, "qtype", f"one of {', '.join(QTYPES)}", name, "choose a supported code type", TypeError)


def code_range(operation: str, qtype: QType, qmin: Any, qmax: Any) -> tuple[int, int]:
    """[qmin, qmax] with the code type's limits as defaults."""
    limits = []
    for name, value, default in (("qmin", qmin, qtype.qmin), ("qmax", qmax, qtype.qmax)):
        if value is None:
            value = default
        elif isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise refuse(
                operation,
                name,
                "a Python integer (the range is static)",
                f"{value!r}",
                "pass an int or None",
                TypeError,
            )
        limits.append(int(value))
    low, high = limits
    if not qtype.qmin <= low < high <= qtype.qmax:
        raise refuse(
            operation,
            "qmin, qmax",
            f"{qtype.qmin} <= qmin < qmax <= {qtype.qmax} for {qtype.name}",
            f"[{low}, {high}]",
            "narrow the range or use a wider qtype",
        )
    return low, high


# Integers up to this magnitude are exact in each floating carrier.
_EXACT = {"bfloat16": 2**8, "float16": 2**11, "float32": 2**24, "float64": 2**53}


def is_exact(dtype: Any, qmin: int, qmax: int) -> bool:
    """Whether a floating dtype holds every code of [qmin, qmax]."""
    return max(abs(qmin), abs(qmax)) <= _EXACT[jnp.dtype(dtype).name]


def check_carrier(operation: str, dtype: Any, qmin: int, qmax: int) -> Any:
    """The dtype codes are returned in: it must hold [qmin, qmax] exactly."""
    dtype = jnp.dtype(dtype)
    got = f"{dtype.name} for [{qmin}, {qmax}]"
    if jnp.issubdtype(dtype, jnp.floating) and dtype.name in _EXACT:
        if not is_exact(dtype, qmin, qmax):
            expected = f"a carrier that holds the codes exactly ({dtype.name} holds integers to {_EXACT[dtype.name]})"
            raise refuse(operation, "dtype", expected, got, "use float32 or a narrower range", TypeError)
        return dtype
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        if limits.min <= qmin and qmax <= limits.max:
            return dtype
        raise refuse(operation, "dtype", f"a type that holds [{qmin}, {qmax}]", got, "use a wider integer", TypeError)
    raise refuse(
        operation, "dtype", "float32, float64, float16, bfloat16 or an integer type", got, "use one of these", TypeError
    )
