"""What a primitive is made from: the roles of its operands and the shapes of its results (`Operation`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Role = Literal["full", "scale", "packed"]


class Result(NamedTuple):
    role: Role
    shape: tuple[Any, ...]
    dtype: Any


class Axes(NamedTuple):
    """Names of axes, None for those that no mesh axis may split; of a named axis, the parts that may not be cut."""

    operands: list[tuple[str | None, ...]]
    results: list[tuple[str | None, ...]]
    units: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Operation:
    """What is particular to one primitive.

    results(*operands, **params) gives the results from anything with shape and dtype; the full-sized array leads.
    scratch(*operands, **params) gives one more result that only the kernel sees.
    attributes(**params) gives the integers that the FFI handler reads.
    serves(platform, **params) tells whether the platform's kernel takes such parameters; the reference does where not.
    dtypes: what the leading operand may be.
    aliases: operand -> result that the kernel writes in its place, as a donated state asks for.
    host: whether the reference calls back to the host, as none can where a mesh is partly manual.
    across(*operands, axes, **params) gives the results of a shard where mesh axes cut what a result of role "scale"
    reduces over; without it, results of that role are summed over the axes.
    placed: whether an element's place in the whole array counts: the row-major index over the trailing axes, as many as
    the parameter `index_rank` says (those before belong to vmap). The kernel gets one more operand, the index of its
    first element (uint32, low and high word), and the sizes of these axes of the whole array, -1 where they are x's.

    Where roles do not tell the shapes apart (values and the bytes of their blocks):
    axes(*operands, **params) names the axes of operands and results. Axes of one name are split alike, whatever their
    sizes, into whole units; a result is summed over the shards of the names it lacks.
    batch(operands, dims, **params) is the batching rule: the results, batched along their first axes.
    partial(call, total, whole, *operands, **params) gives a shard's result where it is a sum over shards: whole are the
    operands of all shards, call(*operands, changed={...}) runs the kernel with changed params, total(x) sums over the
    shards. Left out: sums of float32.
    """

    name: str
    operands: tuple[Role, ...]
    results: Callable[..., list[Result]]
    reference: Callable[..., Any]
    attributes: Callable[..., dict[str, int]]
    dtypes: tuple[str, ...] = ("float32", "float64", "float16", "bfloat16")
    scratch: Callable[..., Result] | None = None
    serves: Callable[..., bool] | None = None
    aliases: dict[int, int] | None = None
    host: bool = False
    placed: bool = False
    pad_results: Callable[..., list[Result | None]] | None = None
    across: Callable[..., Sequence[Any]] | None = None
    axes: Callable[..., Axes] | None = None
    batch: Callable[..., Any] | None = None
    partial: Callable[..., Any] | None = None
    same_bits: str = "cpu (any instruction set and thread count), cuda, jax.numpy on cpu"
