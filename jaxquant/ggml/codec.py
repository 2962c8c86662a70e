"""Between rows of values and rows of blocks.

quantize()               ->  ggml_quantize_p    ->  ffi/ggml/quantize/
QTensor.dequantize()     ->  ggml_dequantize_p  ->  ffi/ggml/decode.h
QTensor.take()           ->  ggml_take_p        ->  ffi/ggml/decode.h
QTensor.prepare()        ->  ggml_prepare_p     ->  ffi/ggml/linear/

Here are the primitives and their rules; the functions are in qtensor.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jaxquant._core import ffi
from jaxquant._core.primitive import Axes, Operation, Result, bind, build
from jaxquant.ggml import reference
from jaxquant.ggml.formats import BlockFormat, formats
from jaxquant.ggml.layout import PREPARED_ROWS, arrange

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


def _blocks(data: Any, format: str) -> int:
    return data.shape[-1] // formats[format].type_size


def _dequantize_axes(data: Any, *, format: str, dtype: Any) -> Axes:
    del dtype
    names = (*leading_names(data.ndim), "k")
    return Axes([names], [names], {**dict(zip(names, data.shape, strict=True)), "k": _blocks(data, format)})


def _dequantize_batch(operands: Any, dims: Any, **params: Any) -> Any:
    return bind(ggml_dequantize_p, jnp.moveaxis(operands[0], dims[0], 0), **params)


ggml_dequantize_p = build(
    Operation(
        name="ggml_dequantize",
        operands=("packed",),
        results=lambda data, *, format, dtype: [
            Result("full", (*data.shape[:-1], formats[format].row_size(data.shape[-1])), dtype)
        ],
        reference=lambda data, *, format, dtype: reference.dequantize(data, format, dtype),
        attributes=lambda *, format, dtype: {"format": formats[format].type_id},
        dtypes=("uint8",),
        axes=_dequantize_axes,
        batch=_dequantize_batch,
        same_bits="ggml's values, everywhere (without kernels but for subnormals)",
    )
)

# ---------------------------------------------------------------------------------------------------------------- take


def _take_axes(data: Any, ids: Any, *, format: str, dtype: Any) -> Axes:
    del dtype
    # Rows by number: every shard needs them all, but only its columns of them.
    return Axes([(None, "k"), ("t",)], [("t", "k")], {"k": _blocks(data, format), "t": ids.shape[0]})


def _take_batch(operands: Any, dims: Any, **params: Any) -> Any:
    data, ids = operands
    size = mapped_size(operands, dims)
    ids = batched_front(ids, dims[1], size)
    if dims[0] is not None:
        data = jnp.moveaxis(data, dims[0], 0)
        n = data.shape[1]
        ids = jnp.where((ids >= 0) & (ids < n), ids + n * jnp.arange(size, dtype=ids.dtype)[:, None], -1)
        data = data.reshape(size * n, data.shape[2])
    out = bind(ggml_take_p, data, ids.reshape(-1), **params)
    return out.reshape(*ids.shape, out.shape[-1])


ggml_take_p = build(
    Operation(
        name="ggml_take",
        operands=("packed", "scale"),
        results=lambda data, ids, *, format, dtype: [
            Result("full", (ids.shape[0], formats[format].row_size(data.shape[-1])), dtype)
        ],
        reference=lambda data, ids, *, format, dtype: reference.take(data, ids, format, dtype),
        attributes=lambda *, format, dtype: {"format": formats[format].type_id},
        dtypes=("uint8",),
        axes=_take_axes,
        batch=_take_batch,
        same_bits="ggml's values, everywhere (without kernels but for subnormals)",
    )
)

# ------------------------------------------------------------------------------------------------------------- prepare


def _prepare_axes(data: Any, *, format: str, prepare: bool) -> Axes:
    del format, prepare
    names = leading_names(data.ndim)
    units = {name: n // PREPARED_ROWS if name == names[-1] and n % PREPARED_ROWS == 0 else 1 if name == names[-1] else n
             for name, n in zip(names, data.shape, strict=False)}  # fmt: skip
    return Axes([(*names, None)], [(*names, None)], units)


def _prepare_batch(operands: Any, dims: Any, **params: Any) -> Any:
    return bind(ggml_prepare_p, jnp.moveaxis(operands[0], dims[0], 0), **params)


ggml_prepare_p = build(
    Operation(
        name="ggml_prepare",
        operands=("packed",),
        results=lambda data, *, format, prepare: [Result("packed", data.shape, jnp.uint8)],
        reference=arrange,
        attributes=lambda *, format, prepare: {"format": formats[format].type_id, "prepare": int(prepare)},
        dtypes=("uint8",),
        axes=_prepare_axes,
        batch=_prepare_batch,
        same_bits="yes",
    )
)


# ----------------------------------------------------------------------------------------------------- differentiation


def _constant(primitive: Any) -> None:
    """Bytes have no tangents: derivatives end here, as at any cast to integers."""

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        del tangents
        out = bind(primitive, *primals, **params)
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())

    ad.primitive_jvps[primitive] = jvp


for _primitive in (ggml_quantize_p, ggml_dequantize_p, ggml_take_p, ggml_prepare_p):
    _constant(_primitive)


def dequantize(data: Any, format: BlockFormat, dtype: Any, implementation: str | None) -> jax.Array:
    return bind(ggml_dequantize_p, data, format=format.name, dtype=jnp.dtype(dtype), implementation=implementation)


take = partial(bind, ggml_take_p)
