"""Operations on several devices: each shard calls its own kernel, and sums are taken where a result needs them.

by_role()  arrays of the full shape and blocks of it
by_name()  operations that name their axes
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxquant._core import places
from jaxquant._core.operation import Axes, Operation, Role


def as_automatic(function: Callable[..., Any], results: Sequence[Any]) -> Callable[..., Any]:
    """A function of jax.numpy whose results lie as their types say; of an explicit mesh, how its steps lie is XLA's to
    choose, as types cannot tell it of sums and reshapes."""
    shardings = [aval.sharding for aval in results]
    mesh = shardings[0].mesh
    explicit = tuple(
        name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    )
    if not explicit:
        return function

    def flat(*operands: Any) -> list[Any]:
        out = function(*operands)
        return list(out) if isinstance(out, (list, tuple)) else [out]

    return jax.sharding.auto_axes(flat, axes=explicit, out_sharding=shardings)


def by_role(
    operation: Operation,
    call: Callable[..., list[Any]],
    params: dict[str, Any],
    *operands: Any,
    across: Callable[..., Sequence[Any]] | None = None,
) -> Any:
    """`call` on each shard, with no communication but the sums that a result needs, or that of `across`."""
    results = operation.results(*operands, **params)
    full = operands[0].shape if operation.operands[0] == "full" else results[0].shape
    roles: tuple[Role, ...] = operation.operands
    count, index_sizes = len(operands), ()
    if operation.placed:
        indexed = range(len(full) - params["index_rank"], len(full))
        index_sizes = tuple(full[d] for d in indexed)
        operands = (*operands, *places.iotas(full, indexed))
        roles = (*roles, *("scale" for _ in indexed))

    def partition(mesh: Any, operand_shapes: Any, result_shapes: Any) -> Any:
        arrays: list[Any] = [*zip(roles, operand_shapes, strict=True)]
        arrays += [(r.role, shape) for r, shape in zip(results, result_shapes, strict=True)]
        # Large arrays stay where they are; the others follow.
        arrays.sort(key=lambda array: array[0] != "full")
        spec = _common_spec(mesh, full, arrays)

        def sharding(shape: tuple[int, ...]) -> NamedSharding:
            return NamedSharding(
                mesh, PartitionSpec(*[None if n == 1 else axes for n, axes in zip(shape, spec, strict=True)])
            )

        def local(shape: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(n if n == 1 else n // _parts(mesh, axes) for n, axes in zip(shape, spec, strict=True))

        def shard(*parts: Any) -> Any:
            placed = {"place": (places.origin(parts[count:], index_sizes), index_sizes)} if operation.placed else {}
            local_results = [r._replace(shape=local(r.shape)) for r in results]
            summed = [i for i, r in enumerate(results) if r.role == "scale"]
            axes = tuple(
                name
                for d, names in enumerate(spec)
                if names is not None and summed and results[summed[0]].shape[d] == 1 and full[d] != 1
                for name in ((names,) if isinstance(names, str) else names)
            )
            if axes and across is not None:
                avals = tuple(ShapedArray(r.shape, jnp.dtype(r.dtype)) for r in local_results)
                return tuple(_alone_p.bind(*parts, function=partial(across, axes=axes), results=avals))
            out = call(*parts[:count], results=local_results, **placed)
            if axes:
                for i, total in zip(summed, _all_reduce([out[i] for i in summed], axes), strict=True):
                    out[i] = total
            return tuple(out)

        return mesh, shard, tuple(sharding(r.shape) for r in results), tuple(sharding(o.shape) for o in operand_shapes)

    def rule(mesh: Any, operand_types: Any, result_types: Any) -> SdyShardingRule:
        del mesh
        return sharding_rule(full, [t.shape for t in operand_types], [t.shape for t in result_types])

    def infer(mesh: Any, operand_shapes: Any, result_shapes: Any) -> Any:
        return partition(mesh, operand_shapes, result_shapes)[2]

    op = custom_partitioning(lambda *args: tuple(call(*args[:count])))
    op.def_partition(partition=partition, sharding_rule=rule, infer_sharding_from_operands=infer)
    return op(*operands)


def by_name(operation: Operation, call: Callable[..., list[Any]], params: dict[str, Any], *operands: Any) -> Any:
    assert operation.axes is not None
    names = operation.axes(*operands, **params)
    arrays = [*names.operands, *names.results]

    def partition(mesh: Any, operand_shapes: Any, result_shapes: Any) -> Any:
        del result_shapes
        spec = spec_by_name(mesh, names, [getattr(o.sharding, "spec", ()) for o in operand_shapes])

        def sharding(own: tuple[str | None, ...]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*[None if name is None else spec.get(name) for name in own]))

        missing = {name for own in names.operands for name in own} - {name for own in names.results for name in own}
        summed = tuple(axis for name in spec if name in missing for axis in spec[name])

        def shard(*parts: Any) -> Any:
            if not summed:
                return tuple(call(*parts))
            of_shard = operation.partial
            if of_shard is not None:

                def function(*parts: Any) -> list[Any]:
                    return [of_shard(call, lambda x: jax.lax.psum(x, summed), operands, *parts, **params)]

                avals = tuple(ShapedArray(r.shape, jnp.dtype(r.dtype)) for r in operation.results(*parts, **params))
                return tuple(_alone_p.bind(*parts, function=function, results=avals))
            # Partial sums travel in float32.
            dtype = parts[0].dtype
            (out,) = call(parts[0].astype(jnp.float32), *parts[1:])
            (total,) = _all_reduce([out], summed)
            return (total.astype(dtype),)

        return mesh, shard, tuple(map(sharding, names.results)), tuple(map(sharding, names.operands))

    def rule(mesh: Any, operand_types: Any, result_types: Any) -> SdyShardingRule:
        del mesh, operand_types, result_types
        alone = itertools.count()
        mappings = [tuple(name or f"one{next(alone)}" for name in own) for own in arrays]
        inputs, outputs = mappings[: len(operands)], mappings[len(operands) :]
        return SdyShardingRule(tuple(inputs), tuple(outputs))  # pyright: ignore[reportArgumentType]

    def infer(mesh: Any, operand_shapes: Any, result_shapes: Any) -> Any:
        return partition(mesh, operand_shapes, result_shapes)[2]

    op = custom_partitioning(lambda *args: tuple(call(*args)))
    op.def_partition(partition=partition, sharding_rule=rule, infer_sharding_from_operands=infer)
    return op(*operands)


def spec_by_name(mesh: Any, names: Axes, specs: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each name, from the operands' own, last operand first: weights stay where they are, and values
    follow. No mesh axis twice, no unit cut."""
    found: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for own, entries in reversed(list(zip(names.operands, specs, strict=True))):
        for name, entry in zip(own, entries, strict=False):
            axes = (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, tuple) else ()
            while axes and not _divides(names.units.get(name or "", 1), _parts(mesh, axes)):
                axes = axes[:-1]
            if name is not None and axes and name not in found and not used & set(axes):
                found[name] = axes
                used |= set(axes)
    return found


def legal_sharding(shape: tuple[Any, ...], sharding: Any) -> Any:
    """`sharding` without the axes that no longer divide `shape`."""
    spec = [
        axes if _divides(size, _parts(sharding.mesh, axes)) else None
        for size, axes in zip(shape, sharding.spec, strict=True)
    ]
    return sharding.update(spec=PartitionSpec(*spec))


def _lower_alone(
    ctx: Any, *parts: Any, function: Callable[..., Sequence[Any]], results: tuple[ShapedArray, ...]
) -> Any:
    del results
    return places.lower_bare(ctx, lambda *args: list(function(*args)), *parts, multiple_results=True)


# A function of one shard's arrays, which may communicate.
_alone_p = Primitive("jaxquant_alone")
_alone_p.multiple_results = True
_alone_p.def_abstract_eval(lambda *parts, function, results: list(results))
mlir.register_lowering(_alone_p, _lower_alone)


def _all_reduce(sums: Sequence[Any], axes: tuple[str, ...]) -> list[Any]:
    """The sums of all shards: one all-reduce for all of them together."""
    avals = tuple(ShapedArray(s.shape, s.dtype) for s in sums)
    return _alone_p.bind(*sums, function=lambda *s: jax.lax.psum(jnp.stack(s), axes), results=avals)


def _common_spec(mesh: Any, full: tuple[int, ...], arrays: Sequence[tuple[Role, Any]]) -> list[Any]:
    """One sharding for all, from theirs in order: no mesh axis twice, and no shard that cuts a block or a byte.

    An array that is replicated over a mesh axis takes its part of it for nothing.
    """

    def whole(d: int, parts: int) -> bool:
        for role, array in arrays:
            n, m = full[d], array.shape[d]
            if m != 1 and (n % m or m % parts):
                return False
            # 6 codes of 2 bits fill a byte and a half: half of the codes are not half of the bytes.
            if role == "packed" and 8 % (n // m):
                return False
        return True

    common: list[Any] = [None] * len(full)
    used: set[str] = set()
    for _, array in arrays:
        for d, entry in enumerate(getattr(array.sharding, "spec", ())):
            names = (entry,) if isinstance(entry, str) else tuple(entry or ())
            while names and not whole(d, _parts(mesh, names)):
                names = names[:-1]
            if names and common[d] is None and not used & set(names):
                common[d] = names
                used |= set(names)
    return common


def _divides(size: Any, parts: int) -> bool:
    return parts == 1 or (isinstance(size, int) and size % parts == 0)


def _parts(mesh: Any, axes: Any) -> int:
    if axes is None or not isinstance(axes, (str, tuple)):
        return 1
    return math.prod(mesh.shape[name] for name in ((axes,) if isinstance(axes, str) else axes))


def sharding_rule(
    full: tuple[int, ...], operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> SdyShardingRule:
    """The Shardy rule that follows from shapes: an axis is one factor in every array, and an axis of 1 has none.

    JAX gives a factor the smallest of its sizes, so Shardy proposes only mesh axes that divide the number of blocks. A
    compound factor (blocks, block) would be the textbook rule, but where a shard cuts a block it makes Shardy split a
    mesh axis, for which JAX has no name: compilation fails.
    """
    ones = itertools.count()

    def mapping(shape: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(f"a{d}" if m != 1 or full[d] == 1 else f"one{next(ones)}" for d, m in enumerate(shape))

    mappings: Any = (tuple(map(mapping, operands)), tuple(map(mapping, results)))
    return SdyShardingRule(*mappings)
