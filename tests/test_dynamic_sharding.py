"""Dynamic quantisation of sharded arrays: the unsharded bits, and an all-reduce only where shards cut a block."""

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh_of, put
from oracle import assert_same_bits

import jaxquant
from jaxquant import PerAxis, PerBlock, PerGroup, PerTensor, PerToken

SHAPE, EIGHT = (8, 4, 16), (2, 4)
GRANULARITIES = {
    "per_tensor": PerTensor(),
    "per_token": PerToken(),
    "per_axis": PerAxis(1),
    "last_axis": PerAxis(2),
    "groups": PerGroup(4),
    "blocks": PerBlock((4, -1, 2)),
}
SPECS = [P("a"), P(None, "b"), P("a", None, "b"), P(None, None, ("a", "b"))]


def functions(granularity, implementation):
    keywords = {"symmetric": False, "qtype": jnp.int4, "implementation": implementation}
    return {
        "dynamic_quantize": lambda x: jaxquant.dynamic_quantize(x, granularity, **keywords),
        "dynamic_fake_quantize": lambda x: jaxquant.dynamic_fake_quantize(x, granularity, **keywords),
        "choose_qparams": lambda x: jaxquant.choose_qparams(x, granularity, **keywords),
        "gradient": jax.grad(lambda x: (jaxquant.dynamic_fake_quantize(x, granularity, **keywords) ** 2).sum()),
    }


def values():
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    x[0, 0, :2] = np.nan, np.inf
    return jnp.asarray(x)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", GRANULARITIES)
def test_auto(name, spec):
    granularity, mesh, x = GRANULARITIES[name], mesh_of(EIGHT), values()
    grid = tuple(1 if b == n else n // b for n, b in zip(SHAPE, granularity.block_shape(SHAPE), strict=True))
    cut = meshes.cuts_a_block(mesh, spec, SHAPE, grid)
    crossing = meshes.sums_across(mesh, spec, SHAPE, grid)
    sharded = put(mesh, spec, x)
    for what, f in functions(granularity, "ffi").items():
        if what == "dynamic_fake_quantize":
            continue  # in the gradient
        compiled = jax.jit(f)
        actual, expected = compiled(sharded), jax.jit(f)(x)
        jax.tree.map(assert_same_bits, actual, expected)
        if not cut and what != "dynamic_quantize":
            assert collectives(compiled, sharded) == ({"all-reduce": 1} if crossing else {}), what
        if not cut and what == "gradient":
            assert actual.sharding.is_equivalent_to(sharded.sharding, 3)


@pytest.mark.parametrize("name", ["per_tensor", "per_token", "groups"])
def test_int8_codes_stay_where_they_are(name):
    mesh, granularity = mesh_of(EIGHT), GRANULARITIES[name]
    sharded = put(mesh, P("a", None, "b"), values())
    compiled = jax.jit(lambda x: jaxquant.dynamic_quantize(x, granularity))
    q = compiled(sharded)
    assert collectives(compiled, sharded) == ({} if name == "groups" else {"all-reduce": 1})
    assert q.data.sharding.is_equivalent_to(sharded.sharding, 3)
    eager = jaxquant.dynamic_quantize(sharded, granularity)
    assert_same_bits(eager.data, q.data)


def test_through_xla():
    sharded = put(mesh_of(EIGHT), P("a", None, "b"), values())
    for f in functions(PerToken(), "xla").values():
        jax.tree.map(assert_same_bits, jax.jit(f)(sharded), jax.jit(f)(values()))


@pytest.mark.parametrize("name", ["per_tensor", "per_token", "per_axis", "groups"])
def test_explicit(name):
    mesh = mesh_of(EIGHT, AxisType.Explicit)
    expected = {what: jax.device_get(jax.jit(f)(values())) for what, f in functions(GRANULARITIES[name], "ffi").items()}
    with jax.set_mesh(mesh):
        sharded = put(mesh, P("a", None, "b"), values())
        for what, f in functions(GRANULARITIES[name], "ffi").items():
            actual = jax.device_get(jax.jit(f)(sharded))
            jax.tree.map(assert_same_bits, actual, expected[what])


@pytest.mark.smoke
def test_shard_map_chooses_for_each_shard():
    mesh = mesh_of(EIGHT)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32))
    f = jax.jit(
        jax.shard_map(
            lambda x: jaxquant.dynamic_quantize(x, PerTensor(), implementation="ffi").scale,
            mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"),
        )
    )  # fmt: skip
    parts = np.abs(np.asarray(x)).reshape(2, 4, 4, 4).max((1, 3))
    assert_same_bits(f(x), parts / np.float32(127))
    assert collectives(f, x) == {}
