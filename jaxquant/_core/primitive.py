"""How an operation becomes a JAX primitive: evaluation, batching, partitioning and lowering for every platform.

An operation is described once (`Operation`): the roles of its operands, the shapes of its results, its reference in
jax.numpy and its FFI attributes. Everything here follows from shapes alone. An array either has the full shape or, axis
by axis, 1, the full size or a number of equal blocks of it (scales, zero points, packed codes): that is all that
batching and sharding need to know, so per-tensor, per-channel, per-token and blocks are one rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant._core import compat, ffi, places

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


# Every primitive of the package by name: info(), register_kernels() and the tests read it.
OPERATIONS: dict[str, tuple[Operation, Primitive]] = {}


def build(operation: Operation, *, multiple_results: bool = False) -> Primitive:
    """The primitive of an operation, with every rule but differentiation, which belongs beside the mathematics."""
    primitive = Primitive(f"jaxquant_{operation.name}")
    primitive.multiple_results = multiple_results
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(partial(_abstract, operation, multiple_results))
    compat.needs_devices(primitive)
    batching.primitive_batchers[primitive] = partial(_batch, operation, primitive)
    mlir.register_lowering(primitive, partial(_lower, operation, multiple_results, None))
    OPERATIONS[operation.name] = (operation, primitive)
    for platform in ffi.platforms_with(operation.name):
        use_kernels(operation.name, platform)
    return primitive


def use_kernels(name: str, platform: str) -> None:
    """Lowers primitive `name` to its FFI target on `platform`."""
    operation, primitive = OPERATIONS[name]
    rule = partial(_lower, operation, primitive.multiple_results, platform)
    mlir.register_lowering(primitive, rule, platform=platform)


def bind(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Binds with operands that vary over the same manual axes, as shard_map requires."""
    return primitive.bind(*compat.match_varying_axes(*operands), **params)


# ---------------------------------------------------------------------------------------------------------- evaluation


def _abstract(operation: Operation, multiple_results: bool, *operands: Any, **params: Any) -> Any:
    if operation.axes is not None:
        named = _abstract_by_name(operation, *operands, **_public(params))
        return named if multiple_results else named[0]
    avals = []
    for result in operation.results(*operands, **_public(params)):
        # Shaped like the operand of the same role: it carries the explicit sharding and the varying axes.
        like = operands[operation.operands.index(result.role)] if result.role in operation.operands else operands[0]
        sharding = like.sharding if result.shape == like.shape else _legal_sharding(result.shape, like.sharding)
        avals.append(like.update(shape=result.shape, dtype=jnp.dtype(result.dtype), weak_type=False, sharding=sharding))
    return avals if multiple_results else avals[0]


def _abstract_by_name(operation: Operation, *operands: Any, **params: Any) -> list[Any]:
    assert operation.axes is not None
    names, results = operation.axes(*operands, **params), operation.results(*operands, **params)
    sharding = operands[0].sharding
    spec = _spec_by_name(sharding.mesh, names, [x.sharding.spec for x in operands])
    return [
        operands[0].update(
            shape=result.shape,
            dtype=jnp.dtype(result.dtype),
            weak_type=False,
            sharding=sharding.update(spec=PartitionSpec(*[None if name is None else spec.get(name) for name in own])),
        )
        for result, own in zip(results, names.results, strict=True)
    ]


def _legal_sharding(shape: tuple[Any, ...], sharding: Any) -> Any:
    """`sharding` without the axes that no longer divide `shape`."""
    spec = [
        axes if _divides(size, _parts(sharding.mesh, axes)) else None
        for size, axes in zip(shape, sharding.spec, strict=True)
    ]
    return sharding.update(spec=PartitionSpec(*spec))


def _public(params: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key != "implementation"}


# ------------------------------------------------------------------------------------------------------------ batching


def _batch(
    operation: Operation, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Any], **params: Any
) -> Any:
    if operation.batch is not None:
        out = operation.batch(operands, dims, **params)
        return out, (0,) * len(out) if primitive.multiple_results else 0
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    # A scale that nobody maps stays one: a leading axis of 1 shares it without a copy. Where a result is a sum for
    # each scale, every example needs its own.
    summed = any(r.role == "scale" for r in operation.results(*operands, **_public(params)))
    scales_mapped = [d is not None for role, d in zip(operation.operands, dims, strict=True) if role == "scale"]
    spread_scales = summed or any(scales_mapped)
    moved = []
    for role, x, d in zip(operation.operands, operands, dims, strict=True):
        if d is not None:
            moved.append(jnp.moveaxis(x, d, 0))
        elif role != "scale" or spread_scales:
            moved.append(jnp.broadcast_to(x[None], (size, *x.shape)))
        else:
            moved.append(x[None])
    out = bind(primitive, *moved, **params)
    return out, (0,) * len(out) if primitive.multiple_results else 0


# ------------------------------------------------------------------------------------------------------------ lowering


def _lower(
    operation: Operation, multiple_results: bool, platform: str | None, ctx: Any, *operands: Any, **params: Any
) -> Any:
    implementation = params.pop("implementation")
    target = None
    if implementation != "xla":
        target = ffi.target(operation.name, platform, implementation)
        kernels = "cuda" if implementation == "cuda_emulation" else platform
        if target is not None and operation.serves is not None and not operation.serves(kernels, **params):
            target = None
            if implementation == "ffi":
                raise NotImplementedError(
                    f'{operation.name}: implementation="ffi" was asked for, but the kernel for {kernels} does not take '
                    f'{params}. Use implementation=None or "xla".'
                )
    lowered: Callable[..., Any]
    if target is None:
        lowered = partial(operation.reference, **params)
    else:
        call = partial(_call, operation, target, params)
        devices = _devices(ctx)
        if devices == "one":
            lowered = call
        elif devices == "partly manual":
            # A kernel would have to be partitioned over the axes left automatic; there jax.numpy is partitioned by XLA,
            # or the operands are gathered over those axes.
            lowered = call if operation.host else partial(operation.reference, **params)
        elif ctx.module_context.lowering_parameters.for_export:
            raise NotImplementedError(
                f"{operation.name}: jax.export cannot serialise a kernel that is partitioned over {devices} devices; "
                'export with implementation="xla", for one device, or with the call inside shard_map.'
            )
        else:
            if operation.across is not None:
                across = partial(operation.across, implementation=implementation, **params)
                lowered = partial(_partitioned, operation, call, params, across=across)
            else:
                rule = _partitioned if operation.axes is None else _partitioned_by_name
                lowered = partial(rule, operation, call, params)

    def flat(*args: Any) -> Any:
        out = lowered(*args)
        out = list(out) if isinstance(out, (list, tuple)) else [out]
        return out if multiple_results else out[0]

    return mlir.lower_fun(flat, multiple_results=multiple_results)(ctx, *operands)


def _devices(ctx: Any) -> str:
    """ "one" where a shard sees its own operands only, "partly manual", or the number of devices."""
    axis_context = ctx.module_context.axis_context
    manual = getattr(axis_context, "manual_axes", None)
    if manual is not None:
        mesh = axis_context.mesh
        automatic = [name for name in mesh.axis_names if name not in manual and mesh.shape[name] > 1]
        if not automatic:
            return "one"
        if manual:
            return "partly manual"
        return str(mesh.size)
    count = getattr(axis_context, "num_devices", 1)  # pmap's context has none: each replica is a program of its own
    return "one" if count in (None, 1) else str(count)


def _call(
    operation: Operation,
    target: str,
    params: dict[str, Any],
    *operands: Any,
    results: list[Result] | None = None,
    place: tuple[Any, Sequence[int]] | None = None,
    changed: dict[str, Any] | None = None,
) -> list[Any]:
    """The FFI call. Results that are not wanted are passed to the kernel as empty arrays.

    results: those of a shard, where they do not follow from its operands (an unpacked length is a parameter).
    place: of a shard, its origin and the sizes of the whole array, where the operation asks for them.
    """
    params = {**params, **(changed or {})}
    padded: Sequence[Result | None] = operation.results(*operands, **params) if results is None else results
    if operation.pad_results is not None:
        padded = operation.pad_results(*operands, **params)
    shapes = [
        jax.ShapeDtypeStruct((0,), operands[0].dtype) if r is None else jax.ShapeDtypeStruct(r.shape, r.dtype)
        for r in padded
    ]
    if operation.scratch is not None:
        scratch = operation.scratch(*operands, **params)
        shapes.append(jax.ShapeDtypeStruct(scratch.shape, scratch.dtype))
    attributes: dict[str, Any] = {key: np.int64(value) for key, value in operation.attributes(**params).items()}
    if operation.placed:
        rank = params["index_rank"]
        origin, sizes = (jnp.zeros(2, jnp.uint32), (-1,) * rank) if place is None else place
        operands = (*operands, origin)
        attributes["index_shape"] = np.array(sizes, np.int64)
    out = jax.ffi.ffi_call(target, shapes, input_output_aliases=operation.aliases)(*operands, **attributes)
    return [value for value, result in zip(out, padded, strict=False) if result is not None]


# -------------------------------------------------------------------------------------------------------- partitioning


def _partitioned(
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


def _partitioned_by_name(
    operation: Operation, call: Callable[..., list[Any]], params: dict[str, Any], *operands: Any
) -> Any:
    assert operation.axes is not None
    names = operation.axes(*operands, **params)
    arrays = [*names.operands, *names.results]

    def partition(mesh: Any, operand_shapes: Any, result_shapes: Any) -> Any:
        del result_shapes
        spec = _spec_by_name(mesh, names, [getattr(o.sharding, "spec", ()) for o in operand_shapes])

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


def _spec_by_name(mesh: Any, names: Axes, specs: Sequence[Any]) -> dict[str, tuple[str, ...]]:
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
