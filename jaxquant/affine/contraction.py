"""Contractions as batched products of matrices: x [b or 1, m, k] by w [b, k, n].

Whatever axes a contraction names, its operands are brought to this form, in which the kernels take them. Scales follow
exactly: where merged axes have no blocks of one size, a scale is repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxquant._core.errors import refuse
from jaxquant.affine.qarray import QArray

Axes = tuple[int, ...]


class Contraction(NamedTuple):
    """Axes of both operands: contracted and batched in pairs, and the rest in order."""

    x_contract: Axes
    w_contract: Axes
    x_batch: Axes
    w_batch: Axes
    x_free: Axes
    w_free: Axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Matrices:
    """Quantised w [b, k, n]: its data as they lie in memory; scale and zero point [b, groups, n or 1], the latter None
    where there is none."""

    data: Any
    scale: Any
    zero_point: Any
    bits: int = field(metadata={"static": True})
    signed: bool = field(metadata={"static": True})
    prepared: bool = field(metadata={"static": True})
    k: Any = field(metadata={"static": True})
    n: Any = field(metadata={"static": True})


def resolve(name: str, x: Any, w: Any, dimension_numbers: Any) -> Contraction:
    """The axes of a ``dimension_numbers`` as of `jax.lax.dot_general`, checked against the shapes of x and w."""
    try:
        (x_contract, w_contract), (x_batch, w_batch) = (
            (tuple(int(d) for d in a), tuple(int(d) for d in b)) for a, b in dimension_numbers
        )
    except (TypeError, ValueError):
        expected = "((x contract, w contract), (x batch, w batch)), tuples of axes"
        raise refuse(name, "dimension_numbers", expected, f"{dimension_numbers!r}", "see jax.lax.dot_general") from None
    axes = []
    for operand, array, contract, batch in (("x", x, x_contract, x_batch), ("w", w, w_contract, w_batch)):
        used = [d + array.ndim if d < 0 else d for d in (*contract, *batch)]
        if len(set(used)) != len(used) or any(not 0 <= d < array.ndim for d in used):
            expected = f"different axes of {operand} with shape {array.shape}"
            raise refuse(name, "dimension_numbers", expected, f"{(*contract, *batch)}", "see jax.lax.dot_general")
        free = tuple(d for d in range(array.ndim) if d not in used)
        axes.append((tuple(used[: len(contract)]), tuple(used[len(contract) :]), free))
    (x_contract, x_batch, x_free), (w_contract, w_batch, w_free) = axes
    for what, a, b in (("contracted", x_contract, w_contract), ("batch", x_batch, w_batch)):
        sizes = tuple(x.shape[d] for d in a), tuple(w.shape[d] for d in b)
        if sizes[0] != sizes[1]:
            expected = f"{what} axes of w's sizes {sizes[1]}"
            raise refuse(name, "x", expected, f"{sizes[0]}, of x with shape {x.shape}", f"w has shape {w.shape}")
    return Contraction(x_contract, w_contract, x_batch, w_batch, x_free, w_free)


def rows(x: jax.Array, c: Contraction) -> jax.Array:
    """x as [b, m, k]."""
    x = _transpose(x, (*c.x_batch, *c.x_free, *c.x_contract))
    b, f = len(c.x_batch), len(c.x_batch) + len(c.x_free)
    return x.reshape(math.prod(x.shape[:b]), math.prod(x.shape[b:f]), math.prod(x.shape[f:]))


def quantised_rows(name: str, x: QArray, c: Contraction) -> tuple[Any, Any, Any]:
    """Codes, scale and zero point of x as [b, m, k] and twice [b, m or 1, 1]."""
    if any(x.scale.shape[d] != 1 for d in c.x_contract):
        remedy = "quantise per token or per tensor, or dequantise x"
        raise refuse(name, "x", "one scale along the contracted axes", f"scale of shape {x.scale.shape}", remedy)
    codes = x.qvalue
    if codes.dtype.name not in ("int8", "uint8"):
        raise refuse(name, "x", "codes of at most 8 bits", codes.dtype.name, "dequantise x", TypeError)

    def of_rows(parameter: Any) -> Any:
        parameter = _transpose(parameter.astype(jnp.float32), (*c.x_batch, *c.x_free, *c.x_contract))
        full = tuple(codes.shape[d] for d in (*c.x_batch, *c.x_free))
        batch = _spread(parameter, full[: len(c.x_batch)], 0, math.prod(full[: len(c.x_batch)]))
        merged = _merge_free(batch, full[len(c.x_batch) :], 1)
        return merged.reshape(*merged.shape[:2], 1)

    zero_point = None if x.zero_point is None else of_rows(jnp.broadcast_to(x.zero_point, x.scale.shape))
    return rows(codes, c), of_rows(x.scale), zero_point


def matrices(name: str, w: QArray, c: Contraction) -> Matrices:
    """w as [b, k, n], without a copy where its axes lie like that already."""
    code = jnp.dtype(w.qtype).name
    bits = int(code.lstrip("uint"))
    order = (*c.w_batch, *c.w_contract, *c.w_free)
    in_place = order == tuple(range(w.ndim)) and len(c.w_free) == 1
    b, f = len(c.w_batch), len(c.w_batch) + len(c.w_contract)
    shape = tuple(w.shape[d] for d in order)
    batch, k, n = math.prod(shape[:b]), math.prod(shape[b:f]), math.prod(shape[f:])
    prepared = w.layout == "prepared"
    if prepared and not (in_place and len(c.w_contract) == 1):
        expected = "axes [..., k, n] of a prepared array: k contracted, n alone behind it, batch axes in front in order"
        raise refuse(name, "w", expected, f"axes {order} of {w.shape}", "use the plain array it came from")
    if prepared:
        data = w.data.reshape(batch, *w.data.shape[-3:])
    elif in_place:
        data = w.data.reshape(batch, k, w.data.shape[-1])
    else:
        data, bits = _transpose(w.qvalue, order).reshape(batch, k, n), max(bits, 8)

    def of_columns(parameter: Any) -> Any:
        parameter = _transpose(parameter.astype(jnp.float32), order)
        parameter = _spread(parameter, shape[:b], 0, batch)
        parameter = _merge_groups(parameter, shape[b:f], 1)
        return _merge_free(parameter, shape[f:], 2)

    # The scale is a constant of the product: gradients flow to x alone.
    scale = of_columns(jax.lax.stop_gradient(w.scale))
    zero_point = None if w.zero_point is None else of_columns(jnp.broadcast_to(w.zero_point, w.scale.shape))
    return Matrices(data, scale, zero_point, bits, not code.startswith("u"), prepared, k, n)


def result_shape(x: Any, w: Any, c: Contraction) -> tuple[Any, ...]:
    return (
        *(x.shape[d] for d in c.x_batch),
        *(x.shape[d] for d in c.x_free),
        *(w.shape[d] for d in c.w_free),
    )


# -------------------------------------------------------------------------------------------- parameters of merged axes


def _spread(parameter: Any, sizes: tuple[Any, ...], axis: int, merged: Any) -> Any:
    """Axes ``axis ...`` of a parameter, each 1 or whole blocks of an array's ``sizes``, at full size and merged."""
    for i, n in enumerate(sizes):
        if parameter.shape[axis + i] != n:
            parameter = jnp.repeat(parameter, n // parameter.shape[axis + i], axis + i)
    return parameter.reshape(*parameter.shape[:axis], merged, *parameter.shape[axis + len(sizes) :])


def _merge_free(parameter: Any, sizes: tuple[Any, ...], axis: int) -> Any:
    """The same, but 1 where every axis has one scale."""
    if all(m == 1 for m in parameter.shape[axis : axis + len(sizes)]):
        return parameter.reshape(*parameter.shape[:axis], 1, *parameter.shape[axis + len(sizes) :])
    return _spread(parameter, sizes, axis, math.prod(sizes))


def _merge_groups(parameter: Any, sizes: tuple[Any, ...], axis: int) -> Any:
    """The same, with as few groups of equal size as there are: axes in front of the last divided one count in full."""
    counts = parameter.shape[axis : axis + len(sizes)]
    divided = [i for i, m in enumerate(counts) if m != 1]
    last = divided[-1] if divided else 0
    parameter = _spread(parameter, sizes[:last], axis, math.prod(sizes[:last]))
    rest = parameter.shape[axis + 1 : axis + 1 + len(sizes) - last]
    groups = parameter.shape[axis] * math.prod(rest)
    return parameter.reshape(*parameter.shape[:axis], groups, *parameter.shape[axis + 1 + len(rest) :])


def _transpose(x: Any, order: Axes) -> Any:
    return x if order == tuple(range(x.ndim)) else jnp.transpose(x, order)


def lead_by(x: Any, lead: tuple[Any, ...], own: int) -> Any:
    """x, array or QArray, with its ``own`` leading axes broadcast to ``lead``; axes of 1 may go."""

    def one(leaf: Any, sizes: tuple[Any, ...]) -> Any:
        tail = leaf.shape[own:]
        if math.prod(sizes) == 1:
            leaf = leaf.reshape(*(1,) * len(lead), *tail)
        return jnp.broadcast_to(leaf, (*lead, *tail))

    if not isinstance(x, QArray):
        return one(x, x.shape[:own])

    def parameter(leaf: Any) -> Any:
        for d in range(own):
            if leaf.shape[d] not in (1, x.shape[d]):
                leaf = jnp.repeat(leaf, x.shape[d] // leaf.shape[d], d)
        return one(leaf, leaf.shape[:own])

    zero_point = None if x.zero_point is None else jnp.broadcast_to(x.zero_point, x.scale.shape)
    leaves = (one(x.data, x.shape[:own]), parameter(x.scale), None if zero_point is None else parameter(zero_point))
    return jax.tree.unflatten(jax.tree.structure(x), [leaf for leaf in leaves if leaf is not None])
