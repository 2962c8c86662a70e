"""Meshes over the forced host devices, where scales go on them, and the collectives of a compiled program."""

import collections
import math
import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_COLLECTIVE = re.compile(
    r"= .*?\s(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
)


def mesh_of(shape, kind=AxisType.Auto):
    devices = np.array(jax.devices("cpu")[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, ("a", "b"), axis_types=(kind,) * 2)


def collectives(function, *arguments, mesh=None):
    """Kind -> how many, in the optimised HLO."""
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    text = jitted.lower(*arguments).compile().as_text()
    return dict(collections.Counter(_COLLECTIVE.findall(text)))


def names(entry):
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def parts(mesh, entry):
    return math.prod(mesh.shape[name] for name in names(entry))


def padded(spec, rank):
    return (*spec, *[None] * (rank - len(spec)))


def put(mesh, spec, a):
    return jax.device_put(a, NamedSharding(mesh, spec))


def grid_spec(mesh, spec, x_shape, grid):
    """x's spec for a scale of x's rank: sharded where each shard holds whole scales, else replicated."""
    entries = padded(spec, len(x_shape))
    return P(*[e if m != 1 and m % parts(mesh, e) == 0 else None for m, e in zip(grid, entries, strict=True)])


def cuts_a_block(mesh, spec, x_shape, grid):
    """Whether a shard's edge falls inside a block, which has to be gathered then."""
    entries = padded(spec, len(x_shape))
    return any(m not in (1, n) and m % parts(mesh, e) for n, m, e in zip(x_shape, grid, entries, strict=True))


def sums_across(mesh, spec, x_shape, grid):
    """Whether elements that share a scale lie on several shards."""
    entries = padded(spec, len(x_shape))
    return any(m == 1 and n > 1 and parts(mesh, e) > 1 for n, m, e in zip(x_shape, grid, entries, strict=True))
