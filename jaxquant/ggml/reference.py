"""The GGML operations in jax.numpy: the lowering for platforms without kernels, and implementation="xla".

    dequantize, take                               bits of libggml, subnormal results apart where XLA flushes them
    linear, linear_dx                              x @ w.T, dy @ w
    moe_linear, moe_linear_dx, ragged_linear       the same with one of several matrices for each row

What the bytes mean is in decode.py.

The products are in float32 with weights exactly as dequantised: the activations are never quantised here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxquant._core import compat
from jaxquant.affine.exact import seal
from jaxquant.ggml.decode import values
from jaxquant.ggml.formats import BlockFormat, find

_STORED = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}


def dequantize(data: Any, format: str | BlockFormat, dtype: Any = jnp.float32) -> Any:
    """Values [..., k] of rows [..., row_bytes], rounded once from float32 to `dtype`."""
    format = find("dequantize", format)
    if format.is_float and dtype == _STORED[format.name]:
        size = format.row_size(data.shape[-1])
        return lax.bitcast_convert_type(data.reshape(*data.shape[:-1], size, format.type_size), dtype)
    return _round(values(data, format), dtype)


def _round(values: Any, dtype: Any) -> Any:
    """In `dtype`; 16 bits sealed, for XLA would take the rounding back where the result is widened again."""
    return values if dtype == jnp.float32 else seal(values.astype(dtype))


def take(data: Any, ids: Any, format: str | BlockFormat, dtype: Any = jnp.float32) -> Any:
    """Rows of data [..., n, row_bytes] as [..., *ids.shape, k]. An id out of range, a negative one too: zeros."""
    format = find("take", format)
    *lead, count, row_bytes = data.shape
    ids = _in_range(ids, count)
    if not count:
        return jnp.zeros((*lead, *ids.shape, format.row_size(row_bytes)), dtype)
    rows = jnp.take(data, ids, axis=-2, mode="clip")
    return jnp.where((ids < count)[..., None], dequantize(rows, format, dtype), jnp.zeros((), dtype))


def _in_range(ids: Any, count: int) -> Any:
    """ids in int32, those out of range as `count`. They are compared in a type that holds both."""
    ids = jnp.asarray(ids)
    if ids.dtype.itemsize < 4:
        ids = ids.astype(jnp.int32)
    return jnp.where((ids >= 0) & (ids < count), ids, count).astype(jnp.int32)


# ---- Products


def _contract(equation: str, a: Any, b: Any) -> Any:
    return jnp.einsum(
        equation, a.astype(jnp.float32), b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def linear(x: Any, data: Any, format: str | BlockFormat, dtype: Any = None) -> Any:
    """x [..., m, k] times the rows of data [..., n, row_bytes]: [..., m, n] in `dtype`, or x's.

    The leading axes broadcast.
    """
    y = _contract("...mk,...nk->...mn", x, values(data, find("linear", format)))
    return y.astype(dtype or x.dtype)


def linear_dx(dy: Any, data: Any, format: str | BlockFormat, dtype: Any = None) -> Any:
    """The gradient of `linear` in x: dy [..., m, n] to [..., m, k], in `dtype`, or dy's."""
    dx = _contract("...mn,...nk->...mk", dy, values(data, find("linear", format)))
    return dx.astype(dtype or dy.dtype)


def moe_linear(x: Any, data: Any, ids: Any, format: str | BlockFormat, dtype: Any = None) -> Any:
    """x [tokens, 1 | top_k, k] times the matrices ids [tokens, top_k] of data [experts, n, row_bytes].

    Returns [tokens, top_k, n] in `dtype`, or x's. An id out of range, a negative one too: a row of zeros.
    """
    return _grouped("mk,nk->mn", x, data, ids, find("moe_linear", format), dtype)


def moe_linear_dx(dy: Any, data: Any, ids: Any, format: str | BlockFormat, dtype: Any = None) -> Any:
    """dy [tokens, top_k, n] times the same matrices the other way: [tokens, top_k, k].

    Where all slots of a token share one x, its gradient is the sum over top_k.
    """
    return _grouped("mn,nk->mk", dy, data, ids, find("moe_linear", format), dtype)


def ragged_linear(x: Any, data: Any, group_sizes: Any, format: str | BlockFormat, dtype: Any = None) -> Any:
    """x [tokens, k], sorted by matrix: the first group_sizes[0] rows times matrix 0, and so on: [tokens, n].

    Rows past the last group are zeros.
    """
    ends = jnp.cumsum(jnp.asarray(group_sizes).astype(jnp.int32), dtype=jnp.int32)
    ids = _intervals(ends, jnp.arange(x.shape[0], dtype=jnp.int32))
    return moe_linear(x[:, None], data, ids[:, None], format, dtype)[:, 0]


def _grouped(equation: str, x: Any, data: Any, ids: Any, format: BlockFormat, dtype: Any) -> Any:
    """Rows sorted by expert and cut into tiles of one expert each.

    A tile dequantises its expert and multiplies its rows: no weights per row exist, and the work is that of the rows
    and of the experts in use, within a factor of three, however the rows are spread.
    """
    dtype = dtype or x.dtype
    experts, n, row_bytes = data.shape
    tokens, slots = ids.shape
    rows = tokens * slots
    width = n if equation.endswith("n") else format.row_size(row_bytes)
    if not rows or not experts:
        return jnp.zeros((tokens, slots, width), dtype)

    expert = _in_range(ids, experts).reshape(rows)
    height = -(-2 * rows // experts) if rows > experts else 1
    height = min(-(-height // 8) * 8 if height > 8 else height, rows)
    tiles = (rows + min(rows, experts) * (height - 1)) // height

    _, order = lax.sort((expert, jnp.arange(rows, dtype=jnp.int32)), num_keys=1, is_stable=True)
    counts = jnp.zeros(experts + 1, jnp.int32).at[expert].add(1)[:experts]
    first_row = _starts(counts)
    tile_counts = (counts + height - 1) // height
    first_tile = _starts(tile_counts)

    used = tile_counts.sum(dtype=jnp.int32)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    tile_expert = jnp.minimum(_intervals(first_tile + tile_counts, tile), experts - 1)
    tile_row = first_row[tile_expert] + (tile - first_tile[tile_expert]) * height

    # What a tile reads past its expert's rows is computed and never looked at.
    places = jnp.minimum(tile_row[:, None] + jnp.arange(height, dtype=jnp.int32), rows - 1)
    sources = jnp.take(order, places, mode="clip")
    sources = sources if x.shape[1] == slots else sources // slots
    flat = x.reshape(x.shape[0] * x.shape[1], x.shape[2])

    # The weights are not kept for a backward pass, but dequantised again.
    @jax.checkpoint
    def product(expert, source):
        weights = values(lax.dynamic_index_in_dim(data, expert, keepdims=False), format)
        return _contract(equation, jnp.take(flat, source, axis=0, mode="clip"), weights).astype(dtype)

    # Both branches vary over the same axes in shard_map.
    empty, *_ = compat.match_varying_axes(jnp.zeros((height, width), dtype), x, data, ids)

    def step(_, inputs):
        index, expert, source = inputs
        return None, lax.cond(index < used, lambda: product(expert, source), lambda: empty)

    _, results = lax.scan(step, None, (tile, tile_expert, sources))

    sorted_expert = jnp.minimum(expert[order], experts - 1)
    within = jnp.arange(rows, dtype=jnp.int32) - first_row[sorted_expert]
    position = first_tile[sorted_expert] * height + within
    position = jnp.zeros(rows, jnp.int32).at[order].set(position)
    y = jnp.take(results.reshape(tiles * height, width), position, axis=0, mode="clip")
    return jnp.where((expert < experts)[:, None], y, 0).astype(dtype).reshape(tokens, slots, width)


def _intervals(ends: Any, points: Any) -> Any:
    """The interval each point lies in. jnp.searchsorted fails where some axes of a mesh are manual (jax 0.12)."""
    return (points[:, None] >= ends).sum(axis=1, dtype=jnp.int32)


def _starts(counts: Any) -> Any:
    return jnp.cumsum(counts, dtype=jnp.int32) - counts
