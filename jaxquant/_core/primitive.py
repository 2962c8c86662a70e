"""How an operation becomes a JAX primitive: evaluation, batching, partitioning and lowering for every platform.

An operation is described once (`Operation`): the roles of its operands, the shapes of its results, its reference in
jax.numpy and its FFI attributes. Everything here follows from shapes alone. An array either has the full shape or, axis
by axis, 1, the full size or a number of equal blocks of it (scales, zero points, packed codes): that is all that
batching and sharding need to know, so per-tensor, per-channel, per-token and blocks are one rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import PartitionSpec

from jaxquant._core import compat, ffi, partitioning
from jaxquant._core.operation import Axes, Operation, Result, Role

__all__ = ["OPERATIONS", "Axes", "Operation", "Result", "Role", "bind", "build", "constant", "use_kernels"]

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


def constant(*primitives: Primitive) -> None:
    """Derivatives end at these: their results are integers, or constants of their operands."""

    def jvp(primitive: Primitive, primals: Any, tangents: Any, **params: Any) -> Any:
        del tangents
        out = bind(primitive, *primals, **params)
        return out, jax.tree.map(lambda o: ad.Zero(jax.typeof(o).to_tangent_aval()), out)

    for primitive in primitives:
        ad.primitive_jvps[primitive] = partial(jvp, primitive)


# ---------------------------------------------------------------------------------------------------------- evaluation


def _abstract(operation: Operation, multiple_results: bool, *operands: Any, **params: Any) -> Any:
    if operation.axes is not None:
        named = _abstract_by_name(operation, *operands, **_public(params))
        return named if multiple_results else named[0]
    avals = []
    for result in operation.results(*operands, **_public(params)):
        # Shaped like the operand of the same role: it carries the explicit sharding and the varying axes.
        like = operands[operation.operands.index(result.role)] if result.role in operation.operands else operands[0]
        sharding = (
            like.sharding if result.shape == like.shape else partitioning.legal_sharding(result.shape, like.sharding)
        )
        avals.append(like.update(shape=result.shape, dtype=jnp.dtype(result.dtype), weak_type=False, sharding=sharding))
    return avals if multiple_results else avals[0]


def _abstract_by_name(operation: Operation, *operands: Any, **params: Any) -> list[Any]:
    assert operation.axes is not None
    names, results = operation.axes(*operands, **params), operation.results(*operands, **params)
    sharding = operands[0].sharding
    spec = partitioning.spec_by_name(sharding.mesh, names, [x.sharding.spec for x in operands])
    return [
        operands[0].update(
            shape=result.shape,
            dtype=jnp.dtype(result.dtype),
            weak_type=False,
            sharding=sharding.update(spec=PartitionSpec(*[None if name is None else spec.get(name) for name in own])),
        )
        for result, own in zip(results, names.results, strict=True)
    ]


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
        lowered = partitioning.as_automatic(partial(operation.reference, **params), ctx.avals_out)
    else:
        call = partial(_call, operation, target, params)
        devices = _devices(ctx)
        if devices == "one":
            lowered = call
        elif devices == "partly manual":
            # A kernel would have to be partitioned over the axes left automatic; there jax.numpy is partitioned by XLA,
            # or the operands are gathered over those axes.
            reference = partitioning.as_automatic(partial(operation.reference, **params), ctx.avals_out)
            lowered = call if operation.host else reference
        elif ctx.module_context.lowering_parameters.for_export:
            raise NotImplementedError(
                f"{operation.name}: jax.export cannot serialise a kernel that is partitioned over {devices} devices; "
                'export with implementation="xla", for one device, or with the call inside shard_map.'
            )
        else:
            if operation.across is not None:
                across = partial(operation.across, implementation=implementation, **params)
                lowered = partial(partitioning.by_role, operation, call, params, across=across)
            else:
                rule = partitioning.by_role if operation.axes is None else partitioning.by_name
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
