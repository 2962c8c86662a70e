"""Between rows of values and rows of blocks.

quantize()               ->  ggml_quantize_p    ->  ffi/ggml/quantize/
QTensor.dequantize()     ->  ggml_dequantize_p  ->  ffi/ggml/decode.h
QTensor.take()           ->  ggml_take_p        ->  ffi/ggml/decode.h
QTensor.prepare()        ->  ggml_prepare_p     ->  ffi/ggml/linear/layout.h

Here are the primitives and their rules; the functions are in qtensor.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant._core import ffi
from jaxquant._core.primitive import Axes, Operation, Result, bind, build, constant
from jaxquant.ggml import layout as layouts
from jaxquant.ggml import reference
from jaxquant.ggml.formats import formats
from jaxquant.ggml.layout import Layout

FLOATS = ("float32", "float16", "bfloat16")


def leading_names(rank: int) -> tuple[str, ...]:
    return tuple(f"a{d}" for d in range(rank - 1))


def batched_front(x: Any, dim: int | None, size: int) -> Any:
    """x with its mapped axis in front; one that is not mapped is repeated."""
    return jnp.broadcast_to(x[None], (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


def mapped_size(operands: Sequence[Any], dims: Sequence[int | None]) -> int:
    return next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)


# ------------------------------------------------------------------------------------------------------------ quantise


def _quantize_axes(x: Any, imatrix: Any, *, format: str) -> Axes:
    names = leading_names(x.ndim)
    weights: tuple[str | None, ...] = (None,) * imatrix.ndim
    if imatrix.ndim == x.ndim and imatrix.size:
        weights = (*(None if n == 1 else name for name, n in zip(names, imatrix.shape, strict=False)), None)
    # A row of legacy formats is weighted as a whole, so rows stay whole.
    return Axes([(*names, None), weights], [(*names, None)], dict(zip(names, x.shape, strict=False)))


def _quantize_batch(operands: Any, dims: Any, **params: Any) -> Any:
    x, imatrix = operands
    size = mapped_size(operands, dims)
    x = batched_front(x, dims[0], size)
    if dims[1] is not None:
        imatrix = jnp.moveaxis(imatrix, dims[1], 0)
    elif imatrix.size:
        imatrix = imatrix[None]
    return bind(ggml_quantize_p, x, imatrix, **params)


def quantize_on_host(x: Any, imatrix: Any, *, format: str) -> Any:
    """Where there is no kernel for the platform, the host's does the work."""
    kind = formats[format]
    shape = jax.ShapeDtypeStruct((*x.shape[:-1], kind.row_bytes(x.shape[-1])), jnp.uint8)

    def quantize(x: Any, imatrix: Any) -> np.ndarray:
        x, imatrix = np.ascontiguousarray(x, np.float32), np.asarray(imatrix, np.float32)
        out = np.zeros(shape.shape, np.uint8)
        weights = None
        if imatrix.size:
            weights = np.ascontiguousarray(np.broadcast_to(imatrix, x.shape)).reshape(-1, x.shape[-1])
        module = ffi.module("cpu")
        assert module is not None
        module.ggml_quantize(kind.type_id, x.reshape(-1), x.shape[-1], weights, out.reshape(-1))
        return out

    return jax.pure_callback(quantize, shape, x, imatrix, vmap_method="sequential")


# Their quantisers search lattices by tables and sorting, which belong on the host.
_ON_HOST = frozenset(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"))

ggml_quantize_p = build(
    Operation(
        name="ggml_quantize",
        operands=("full", "scale"),
        results=lambda x, imatrix, *, format: [
            Result("full", (*x.shape[:-1], formats[format].row_bytes(x.shape[-1])), jnp.uint8)
        ],
        reference=quantize_on_host,
        attributes=lambda *, format: {"format": formats[format].type_id},
        host=True,
        serves=lambda platform, *, format: platform == "cpu" or format not in _ON_HOST,
        dtypes=("float32",),
        axes=_quantize_axes,
        batch=_quantize_batch,
        same_bits="ggml's bytes, on any instruction set and thread count",
    )
)

# ---------------------------------------------------------------------------------------------------------- dequantise


def _row_axes(data: Any, format: str, layout: Layout) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of the axes of rows, and the units of each."""
    lead, units = (
        leading_names(data.ndim),
        layout.units(data, format) if data.ndim > 1 else {"k": _blocks(data, format)},
    )
    sizes = dict(zip(lead, data.shape, strict=False))
    if lead:
        sizes[lead[-1]] = units["n"]
    return (*lead, "k"), {**sizes, "k": units["k"]}


def _blocks(data: Any, format: str) -> int:
    return data.shape[-1] // formats[format].type_size


def _dequantize_shape(data: Any, format: str, layout: Layout) -> tuple[Any, ...]:
    rows = (layout.rows(data),) if data.ndim > 1 else ()
    return (*data.shape[:-2], *rows, layout.columns(data, format))


def _dequantize_axes(data: Any, *, format: str, layout: Layout, dtype: Any) -> Axes:
    del dtype
    names, units = _row_axes(data, format, layout)
    return Axes([names], [names], units)


def _dequantize_batch(operands: Any, dims: Any, **params: Any) -> Any:
    return bind(ggml_dequantize_p, jnp.moveaxis(operands[0], dims[0], 0), **params)


def _dequantize_reference(data: Any, *, format: str, layout: Layout, dtype: Any) -> Any:
    return reference.dequantize(layouts.plain(data, format, layout), format, dtype)


def _layout_attributes(*, format: str, layout: Layout, **_: Any) -> dict[str, int]:
    return {"format": formats[format].type_id, "prepared": int(layout.prepared)}


ggml_dequantize_p = build(
    Operation(
        name="ggml_dequantize",
        operands=("packed",),
        results=lambda data, *, format, layout, dtype: [Result("full", _dequantize_shape(data, format, layout), dtype)],
        reference=_dequantize_reference,
        attributes=_layout_attributes,
        dtypes=("uint8",),
        axes=_dequantize_axes,
        batch=_dequantize_batch,
        same_bits="ggml's values, everywhere (without kernels but for subnormals)",
    )
)

# ---------------------------------------------------------------------------------------------------------------- take


def _take_axes(data: Any, ids: Any, *, format: str, layout: Layout, dtype: Any) -> Axes:
    del dtype
    # Rows by number: every shard needs them all, but only its columns of them.
    units = {"k": layout.units(data, format)["k"], "t": ids.shape[0]}
    return Axes([(None, "k"), ("t",)], [("t", "k")], units)


def _take_batch(operands: Any, dims: Any, **params: Any) -> Any:
    data, ids = operands
    size = mapped_size(operands, dims)
    ids = batched_front(ids, dims[1], size)
    if dims[0] is not None:
        data = jnp.moveaxis(data, dims[0], 0)
        n = data.shape[1] * params["layout"].together
        ids = jnp.where((ids >= 0) & (ids < n), ids + n * jnp.arange(size, dtype=ids.dtype)[:, None], -1)
        data = data.reshape(size * data.shape[1], data.shape[2])
        params["layout"] = Layout(params["layout"].prepared)
    out = bind(ggml_take_p, data, ids.reshape(-1), **params)
    return out.reshape(*ids.shape, out.shape[-1])


def _take_reference(data: Any, ids: Any, *, format: str, layout: Layout, dtype: Any) -> Any:
    if layout.prepared and data.shape[0]:
        count = data.shape[0] * layout.together
        known = (ids >= 0) & (ids < count)
        data = layouts.plain_rows(data, jnp.where(known, ids, 0), format)
        ids = jnp.where(known, jnp.arange(ids.shape[0], dtype=ids.dtype), -1)
    return reference.take(data, ids, format, dtype)


ggml_take_p = build(
    Operation(
        name="ggml_take",
        operands=("packed", "scale"),
        results=lambda data, ids, *, format, layout, dtype: [
            Result("full", (ids.shape[0], layout.columns(data, format)), dtype)
        ],
        reference=_take_reference,
        attributes=_layout_attributes,
        dtypes=("uint8",),
        axes=_take_axes,
        batch=_take_batch,
        same_bits="ggml's values, everywhere (without kernels but for subnormals)",
    )
)

# ------------------------------------------------------------------------------------------------------------- prepare


def _prepare_shape(data: Any, prepare: bool, layout: Layout) -> tuple[Any, ...]:
    *lead, rows, size = data.shape
    if prepare:
        return (*lead, -(-rows // layouts.EIGHT), size * layouts.EIGHT)
    return (*lead, layout.rows(data), size // layouts.EIGHT)


def _prepare_axes(data: Any, *, format: str, prepare: bool, layout: Layout) -> Axes:
    shape = _prepare_shape(data, prepare, layout) if prepare else data.shape
    names, units = _row_axes(jax.ShapeDtypeStruct(shape, jnp.uint8), format, layout)
    return Axes([names], [names], units)


def _prepare_batch(operands: Any, dims: Any, **params: Any) -> Any:
    return bind(ggml_prepare_p, jnp.moveaxis(operands[0], dims[0], 0), **params)


def _prepare_reference(data: Any, *, format: str, prepare: bool, layout: Layout) -> Any:
    return layouts.prepare(data, format) if prepare else layouts.plain(data, format, layout)


ggml_prepare_p = build(
    Operation(
        name="ggml_prepare",
        operands=("packed",),
        results=lambda data, *, format, prepare, layout: [
            Result("packed", _prepare_shape(data, prepare, layout), jnp.uint8)
        ],
        reference=_prepare_reference,
        attributes=lambda *, format, prepare, layout: {"format": formats[format].type_id, "prepare": int(prepare)},
        dtypes=("uint8",),
        axes=_prepare_axes,
        batch=_prepare_batch,
        same_bits="yes",
    )
)


def prepare(data: Any, format: str, implementation: str | None = None) -> jax.Array:
    """Plain data in the prepared layout, of a format that has it."""
    layout = layouts.prepared_layout(data.shape[-2])
    return bind(ggml_prepare_p, data, format=format, prepare=True, layout=layout, implementation=implementation)


def plain(data: Any, format: str, layout: Layout, implementation: str | None = None) -> Any:
    """Data of either layout in the plain one."""
    if not layout.prepared:
        return data
    return bind(ggml_prepare_p, data, format=format, prepare=False, layout=layout, implementation=implementation)


# ----------------------------------------------------------------------------------------------------- differentiation


# As at any cast to integers.
constant(ggml_quantize_p, ggml_dequantize_p, ggml_take_p, ggml_prepare_p)


dequantize = partial(bind, ggml_dequantize_p)
take = partial(bind, ggml_take_p)
