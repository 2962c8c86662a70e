"""The prepared layout of weights [.., k, n]: the order of bytes that integer products read.

    prepare(), plain()  ->  prepare_p, plain_p  ->  ffi/matmul/layout.h

Columns lie in panels of 16, codes along k in words of four bytes: data is uint8 [.., ceil(n / 16), ceil(k / K), 64]
with K = 4 codes of 8 bits, 8 of 4 or 16 of 2. Byte [p, i, 4 c + j] holds, for column 16 p + c, code k = K i + j + 4 t
in its bits [t * bits, (t + 1) * bits). Beyond k and n lie zeros.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant._core import ffi
from jaxquant._core.primitive import Axes, Operation, Result, bind, build, constant

PANEL = 16  # columns


def codes_per_word(bits: int) -> int:
    """Codes of one column in a word of four bytes."""
    return 32 // bits


def prepared_shape(k: Any, n: Any, bits: int) -> tuple[Any, Any, int]:
    """Of a matrix [k, n] of codes."""
    each = codes_per_word(bits)
    return (n + PANEL - 1) // PANEL, (k + each - 1) // each, 4 * PANEL


def columns_of(w: Any, bits: int, prepared: bool, n: int) -> int:
    """n, or that of a shard of w: whole panels or bytes."""
    return min(n, w.shape[-3] * PANEL if prepared else w.shape[-1] * (8 // bits))


def weight_axes(w: Any, bits: int, prepared: bool, k: Any, n: Any) -> tuple[tuple[str | None, ...], Any, Any]:
    """Names of the axes of w [b, ...], and into how many parts k and n may be cut."""
    if prepared:
        whole_k, whole_n = k % codes_per_word(bits) == 0, n % PANEL == 0
        return ("b", "n", "k", None), w.shape[2] if whole_k else 1, w.shape[1] if whole_n else 1
    return ("b", "k", "n"), k, w.shape[2] if n % (8 // bits) == 0 else 1


def prepare(data: Any, *, bits: int, n: int, implementation: str | None = None) -> jax.Array:
    """Plain codes to the prepared layout.

    Args:
      data: int8 or uint8 codes ``[.., k, n]``, or uint8 ``[.., k, ceil(n * bits / 8)]``, packed along n.
      bits: 8, 4 or 2.
      n: columns.
      implementation: None, "ffi" or "xla".
    """
    lead = data.shape[:-2]
    out = bind(
        prepare_p, data.reshape(math.prod(lead), *data.shape[-2:]), bits=bits, n=n,
        implementation=ffi.check_implementation("prepare", implementation),
    )  # fmt: skip
    return out.reshape(*lead, *out.shape[1:])


def plain(
    data: Any, *, bits: int, k: int, n: int, dtype: Any = jnp.uint8, implementation: str | None = None
) -> jax.Array:
    """The inverse of `prepare`; dtype: int8 or uint8 for codes of 8 bits."""
    lead = data.shape[:-3]
    out = bind(
        plain_p, data.reshape(math.prod(lead), *data.shape[-3:]), bits=bits, k=k, n=n, dtype=jnp.dtype(dtype),
        implementation=ffi.check_implementation("plain", implementation),
    )  # fmt: skip
    return out.reshape(*lead, *out.shape[1:])


def codes_of(w: Any, *, bits: int, signed: bool, k: int, n: int, prepared: bool) -> Any:
    """The codes of w one to an element, [.., k, n] int8 or uint8, in jax.numpy."""
    parts = 8 // bits
    if bits == 8 and not prepared:
        return w
    fields = jnp.stack([w >> jnp.uint8(bits * t) for t in range(parts)], axis=-2 if prepared else -1)
    if prepared:
        # [.., panels, words, t, 16 * 4] -> [.., panels, 16, words, t, 4]
        fields = fields.reshape(*fields.shape[:-1], PANEL, 4)
        fields = jnp.moveaxis(fields, -2, -4)
        codes = fields.reshape(*w.shape[:-3], w.shape[-3] * PANEL, w.shape[-2] * 4 * parts)
        codes = jnp.swapaxes(codes, -1, -2)
    else:
        codes = fields.reshape(*w.shape[:-1], w.shape[-1] * parts)
    codes = codes[..., :k, :n]
    mask = jnp.uint8((1 << bits) - 1)
    codes = (codes & mask).astype(jnp.uint8)
    if not signed:
        return codes
    sign = jnp.uint8(1 << (bits - 1))
    return jax.lax.bitcast_convert_type((codes ^ sign) - sign, jnp.int8)


def _as_bytes(x: Any) -> Any:
    return x if x.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(x, jnp.uint8)


def _prepare_reference(w: Any, *, bits: int, n: int) -> Any:
    n = columns_of(w, bits, False, n)
    codes = codes_of(_as_bytes(w), bits=bits, signed=False, k=w.shape[-2], n=n, prepared=False)
    b, k, _ = codes.shape
    panels, words, _ = prepared_shape(k, n, bits)
    parts = 8 // bits
    codes = jnp.pad(codes, ((0, 0), (0, words * 4 * parts - k), (0, panels * PANEL - n)))
    fields = codes.reshape(b, words, parts, 4, panels, PANEL).transpose(0, 4, 1, 5, 3, 2)
    out = fields[..., 0]
    for t in range(1, parts):
        out = out | (fields[..., t] << jnp.uint8(bits * t))
    return out.reshape(b, panels, words, 4 * PANEL)


def _plain_reference(w: Any, *, bits: int, k: int, n: int, dtype: Any) -> Any:
    k, n = _plain_sizes(w, bits, k, n)
    codes = codes_of(w, bits=bits, signed=False, k=k, n=n, prepared=True)
    if bits == 8:
        return codes if dtype == jnp.uint8 else jax.lax.bitcast_convert_type(codes, dtype)
    parts = 8 // bits
    size = (n + parts - 1) // parts
    fields = jnp.pad(codes, ((0, 0), (0, 0), (0, size * parts - n))).reshape(w.shape[0], k, size, parts)
    out = fields[..., 0]
    for t in range(1, parts):
        out = out | (fields[..., t] << jnp.uint8(bits * t))
    return out


def _plain_sizes(w: Any, bits: int, k: int, n: int) -> tuple[int, int]:
    """k and n, or those of a shard of w."""
    return min(k, w.shape[-2] * codes_per_word(bits)), columns_of(w, bits, True, n)


def _plain_shape(w: Any, bits: int, k: int, n: int) -> tuple[Any, ...]:
    k, n = _plain_sizes(w, bits, k, n)
    return (w.shape[0], k, (n * bits + 7) // 8)


def _prepare_axes(w: Any, *, bits: int, n: int) -> Axes:
    b, k, _ = w.shape
    plain_names, _, whole_bytes = weight_axes(w, bits, False, k, n)
    out = jax.ShapeDtypeStruct((b, *prepared_shape(k, n, bits)), jnp.uint8)
    names, whole_k, whole_n = weight_axes(out, bits, True, k, n)
    del whole_bytes  # whole panels are whole bytes
    return Axes([plain_names], [names], {"b": b, "k": whole_k, "n": whole_n})


def _plain_axes(w: Any, *, bits: int, k: int, n: int, dtype: Any) -> Axes:
    del dtype
    names, whole_k, whole_n = weight_axes(w, bits, True, k, n)
    return Axes([names], [("b", "k", "n")], {"b": w.shape[0], "k": whole_k, "n": whole_n})


def _batch(primitive: Any) -> Any:
    def batch(operands: Any, dims: Any, **params: Any) -> Any:
        w = jnp.moveaxis(operands[0], dims[0], 0)
        size, b = w.shape[:2]
        out = bind(primitive(), w.reshape(size * b, *w.shape[2:]), **params)
        return out.reshape(size, b, *out.shape[1:])

    return batch


prepare_p = build(
    Operation(
        name="prepare",
        operands=("packed",),
        results=lambda w, *, bits, n: [
            Result(
                "packed",
                (w.shape[0], *prepared_shape(w.shape[1], columns_of(w, bits, False, n), bits)),
                jnp.uint8,
            )
        ],
        reference=_prepare_reference,
        attributes=lambda *, bits, n: {"bits": bits, "n": n},
        dtypes=("int8", "uint8"),
        axes=_prepare_axes,
        batch=_batch(lambda: prepare_p),
    )
)
plain_p = build(
    Operation(
        name="plain",
        operands=("packed",),
        results=lambda w, *, bits, k, n, dtype: [Result("packed", _plain_shape(w, bits, k, n), dtype)],
        reference=_plain_reference,
        attributes=lambda *, bits, k, n, dtype: {"bits": bits, "n": n},
        dtypes=("uint8",),
        axes=_plain_axes,
        batch=_batch(lambda: plain_p),
    )
)


constant(prepare_p, plain_p)
