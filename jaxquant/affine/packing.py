"""Packed codes: 4- and 2-bit codes several to a byte, low bits first, in uint8 arrays.

    pack(), unpack()  ->  pack_p, unpack_p  ->  ffi/affine/packing/{cpu.cc,cuda.cu}  ->  math.h

JAX's own int4 arrays take a byte per element on most platforms; these take what they say.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxquant._core import ffi
from jaxquant._core.errors import refuse
from jaxquant._core.primitive import Operation, Result, bind, build, constant
from jaxquant.affine import qtypes


def pack(q: Any, qtype: Any, *, implementation: str | None = None) -> jax.Array:
    """Packs codes along the last axis: ``ceil(n * bits / 8)`` bytes for n codes, the first in the lowest bits.

    Args:
      q: int8 or uint8 codes (or a JAX int4/uint4/int2/uint2 array) with at least one axis. Only the low bits of each
        are kept.
      qtype: int4, uint4, int2 or uint2.
      implementation: None, "ffi" or "xla".

    Returns:
      A uint8 array. An odd tail is padded with zero bits. Integers: no gradient.

    >>> pack(jnp.array([1, 2, -1], jnp.int8), jnp.int4)
    Array([33, 15], dtype=uint8)
    """
    code = qtypes.lookup("pack", qtype)
    bits = check_bits("pack", code)
    q = jnp.asarray(q)
    if q.dtype.name in ("int4", "uint4", "int2", "uint2"):
        q = q.astype("int8" if q.dtype.name.startswith("int") else "uint8")
    if q.dtype not in (jnp.int8, jnp.uint8):
        raise refuse(
            "pack", "q", "int8 or uint8 codes", q.dtype.name, "quantise with dtype=None, or convert them", TypeError
        )
    if q.ndim == 0:
        raise refuse("pack", "q", "at least one axis", "a scalar", "reshape it to (1,)")
    return bind(pack_p, q, bits=bits, implementation=ffi.check_implementation("pack", implementation))


def unpack(packed: Any, qtype: Any, size: int, *, implementation: str | None = None) -> jax.Array:
    """The codes of a packed array: the inverse of `pack`.

    Args:
      packed: uint8 array with at least one axis.
      qtype: the type it was packed from: int4, uint4, int2 or uint2.
      size: the length of the unpacked last axis (an odd one is not to be seen from the packed length).
      implementation: None, "ffi" or "xla".

    Returns:
      int8 codes, or uint8 for unsigned types. Integers: no gradient.

    >>> unpack(jnp.array([33, 15], jnp.uint8), jnp.int4, 3)
    Array([ 1,  2, -1], dtype=int8)
    """
    code = qtypes.lookup("unpack", qtype)
    bits = check_bits("unpack", code)
    packed = jnp.asarray(packed)
    if packed.dtype != jnp.uint8:
        raise refuse("unpack", "packed", "uint8 bytes", packed.dtype.name, "pass what pack returned", TypeError)
    if packed.ndim == 0:
        raise refuse("unpack", "packed", "at least one axis", "a scalar", "reshape it to (1,)")
    remedy = "pass the unpacked length of the last axis"
    if isinstance(size, (bool, float)):
        raise refuse("unpack", "size", "an integer", f"{size!r}", remedy, TypeError)
    if isinstance(size, int) and size < 0:
        raise refuse("unpack", "size", "an integer that is not negative", str(size), remedy)
    if packed.shape[-1] != -(-size * bits // 8):
        expected = f"a last axis of {-(-size * bits // 8)} bytes for {size} codes of {bits} bits"
        raise refuse("unpack", "packed", expected, f"shape {packed.shape}", "correct size or qtype")
    signed = not code.name.startswith("u")
    implementation = ffi.check_implementation("unpack", implementation)
    return bind(unpack_p, packed, bits=bits, signed=signed, size=size, implementation=implementation)


def check_bits(operation: str, qtype: qtypes.QType) -> int:
    """4 or 2; the other code types have nothing to pack."""
    if qtype.bits not in (4, 2):
        raise refuse(
            operation,
            "qtype",
            "int4, uint4, int2 or uint2 for packed codes",
            qtype.name,
            "codes of 8 bits and more need no packing",
            TypeError,
        )
    return qtype.bits


def packed_shape(shape: tuple[Any, ...], bits: int) -> tuple[Any, ...]:
    per_byte = 8 // bits
    return (*shape[:-1], (shape[-1] + per_byte - 1) // per_byte)


def pack_reference(q: Any, bits: int) -> Any:
    per_byte = 8 // bits
    size = packed_shape(q.shape, bits)[-1]
    q = (q.astype(jnp.uint8) & jnp.uint8((1 << bits) - 1)).astype(jnp.uint8)
    q = jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, size * per_byte - q.shape[-1])])
    parts = q.reshape(*q.shape[:-1], size, per_byte)
    byte = parts[..., 0]
    for i in range(1, per_byte):
        byte = byte | (parts[..., i] << jnp.uint8(i * bits))
    return byte


def _unpack_reference(packed: Any, *, bits: int, signed: bool, size: int) -> Any:
    per_byte = 8 // bits
    mask = jnp.uint8((1 << bits) - 1)
    parts = jnp.stack([(packed >> jnp.uint8(i * bits)) & mask for i in range(per_byte)], axis=-1)
    codes = parts.reshape(*packed.shape[:-1], packed.shape[-1] * per_byte)[..., :size]
    if not signed:
        return codes
    sign = jnp.uint8(1 << (bits - 1))
    return jax.lax.bitcast_convert_type((codes ^ sign) - sign, jnp.int8)


pack_p = build(
    Operation(
        name="pack",
        operands=("full",),
        results=lambda q, *, bits: [Result("packed", packed_shape(q.shape, bits), jnp.uint8)],
        reference=lambda q, *, bits: pack_reference(q, bits),
        attributes=lambda *, bits: {"bits": bits},
        dtypes=("int8", "uint8"),
    )
)
unpack_p = build(
    Operation(
        name="unpack",
        operands=("packed",),
        results=lambda packed, *, bits, signed, size: [
            Result("full", (*packed.shape[:-1], size), jnp.int8 if signed else jnp.uint8)
        ],
        reference=_unpack_reference,
        attributes=lambda *, bits, signed, size: {"bits": bits},
        dtypes=("uint8",),
    )
)


constant(pack_p, unpack_p)
