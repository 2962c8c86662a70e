"""Sharded operations: the single device's bits, the input's sharding, and no collective that the sums do not need."""

import functools

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracle
import pytest
from granularities import Granularity
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh_of, put
from oracle import assert_same_bits, assert_same_sum

import jaxquant

SHAPE = (8, 4, 16)
GRANULARITIES = [
    Granularity("per_tensor", SHAPE, (1, 1, 1)),
    Granularity("per_channel", SHAPE, (1, 4, 1)),
    Granularity("per_token", SHAPE, (8, 4, 1)),
    Granularity("last_axis", SHAPE, (1, 1, 16)),
    Granularity("groups", SHAPE, (8, 4, 4), block_shape=(1, 1, 4)),
    Granularity("blocks", SHAPE, (2, 1, 8), block_shape=(4, -1, 2)),
]
NAMED = {g.name: g for g in GRANULARITIES}
EIGHT, FOUR = (2, 4), (2, 2)
SPECS = [P("a"), P(None, "b"), P("a", None, "b"), P(("a", "b")), P(None, None, ("a", "b")), P("b", "a")]
QTYPE = {"qtype": jnp.int4}
LAYOUTS = [(EIGHT, spec) for spec in SPECS] + [(FOUR, P("a", None, "b")), (FOUR, P(None, "b", "a"))]
layouts = pytest.mark.parametrize(("shape", "spec"), LAYOUTS, ids=lambda v: str(v).replace("PartitionSpec", "P"))
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)


class Problem:
    """Operands of one granularity, on one device and on a mesh."""

    def __init__(self, granularity, mesh, spec, *, sharded_scale=True, implementation="ffi"):
        self.granularity, self.mesh, self.spec = granularity, mesh, spec
        o = granularity.operands(qtype="int4", zero_point_dtype=np.float32)
        grid = granularity.scale_shape
        self.single = tuple(map(jnp.asarray, (o.x, o.scale, o.zero_point, o.dy)))
        self.scale_spec = meshes.grid_spec(mesh, spec, SHAPE, grid) if sharded_scale else P()
        specs = (spec, self.scale_spec, self.scale_spec, spec)
        self.sharded = tuple(put(mesh, s, a) for s, a in zip(specs, self.single, strict=True))
        self.cut = meshes.cuts_a_block(mesh, spec, SHAPE, grid)
        self.crossing = meshes.sums_across(mesh, spec, SHAPE, grid)
        self.keywords = {"block_shape": granularity.block_shape, "implementation": implementation}

    def values(self, x, scale, zero_point, dy):
        """Everything of x's shape: values, and gradients that sum nothing."""
        k = self.keywords
        fq, fake_backward = jax.vjp(lambda x: jaxquant.fake_quantize(x, scale, zero_point, **QTYPE, **k), x)
        codes, backward = jax.vjp(lambda x: jaxquant.quantize(x, scale, zero_point, dtype=x.dtype, **QTYPE, **k), x)
        back, dequantize_backward = jax.vjp(lambda q: jaxquant.dequantize(q, scale, zero_point, **k), codes)
        return {
            "fake_quantize": fq,
            "quantize": codes,
            "stored": jaxquant.quantize(x, scale, zero_point, **QTYPE, **k),
            "dequantize": back,
            "quantize_backward": jaxquant.quantize_backward(dy, x, scale, zero_point, **QTYPE, **k),
            "fake_quantize dx": fake_backward(dy)[0],
            "quantize dx": backward(dy)[0],
            "dequantize dq": dequantize_backward(dy)[0],
        }

    def gradient(self, name, arguments=(0, 1, 2)):
        function = {
            "fake_quantize": functools.partial(jaxquant.fake_quantize, **QTYPE, **self.keywords),
            "quantize": functools.partial(jaxquant.quantize, dtype=jnp.float32, **QTYPE, **self.keywords),
            "dequantize": functools.partial(jaxquant.dequantize, **self.keywords),
        }[name]
        return jax.grad(lambda x, scale, zero_point, dy: (function(x, scale, zero_point) * dy).sum(), arguments)

    def check_gradient(self, name, actual):
        """dx to the bit; sums to the bit unless they cross shards."""
        x, scale, zero_point, dy = map(np.asarray, self.single)
        rule = getattr(oracle, f"{name}_gradient")
        keywords = {} if name == "dequantize" else {"qtype": "int4"}
        expected = rule(dy, x, scale, zero_point, **keywords)
        exact = self.keywords["implementation"] == "ffi" and not self.crossing
        assert_same_bits(actual[0], expected.dx)
        assert_same_sum(actual[1], expected.dscale, np.float32, exact=exact)
        assert_same_sum(actual[2], expected.dzero_point, np.float32, exact=exact)


# ---------------------------------------------------------------------------------------------------------------- auto


@layouts
@every_granularity
def test_auto_values(granularity, shape, spec):
    p = Problem(granularity, mesh_of(shape), spec)
    expected = jax.jit(p.values)(*p.single)
    compiled = jax.jit(p.values)
    actual = compiled(*p.sharded)
    jax.tree.map(assert_same_bits, actual, expected)
    if not p.cut:
        assert collectives(compiled, *p.sharded) == {}
        for name, a in actual.items():
            assert a.sharding.is_equivalent_to(p.sharded[0].sharding, 3), (name, a.sharding)


@layouts
@every_granularity
def test_auto_gradients(granularity, shape, spec):
    """The sums for scale and zero point cross shards in one all-reduce together, or not at all."""
    p = Problem(granularity, mesh_of(shape), spec)
    compiled = jax.jit(p.gradient("fake_quantize"))
    p.check_gradient("fake_quantize", compiled(*p.sharded))
    if not p.cut:
        assert collectives(compiled, *p.sharded) == ({"all-reduce": 1} if p.crossing else {})
        dx, dscale, _ = compiled(*p.sharded)
        assert dx.sharding.is_equivalent_to(p.sharded[0].sharding, 3)
        assert dscale.sharding.is_equivalent_to(p.sharded[1].sharding, 3)


@pytest.mark.parametrize("arguments", [(1,), (2,)], ids=["scale", "zero point"])
@pytest.mark.parametrize("name", ["fake_quantize", "quantize", "dequantize"])
@pytest.mark.parametrize("granularity", [NAMED["per_channel"], NAMED["blocks"]], ids=repr)
def test_auto_gradient_of_one_parameter(granularity, name, arguments):
    p = Problem(granularity, mesh_of(EIGHT), P("a", None, "b"))
    compiled = jax.jit(p.gradient(name, arguments))
    (actual,) = compiled(*p.sharded)
    expected = jax.jit(p.gradient(name))(*p.single)
    p.check_gradient(name, [actual if i in arguments else e for i, e in enumerate(expected)])
    assert collectives(compiled, *p.sharded) == ({"all-reduce": 1} if p.crossing else {})


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["fake_quantize", "quantize", "dequantize"])
def test_auto_with_a_replicated_scale(name):
    """The usual case: data parallel activations, one copy of the scales."""
    p = Problem(NAMED["per_channel"], mesh_of(EIGHT), P("a", "b"), sharded_scale=False)
    compiled = jax.jit(p.values)
    jax.tree.map(assert_same_bits, compiled(*p.sharded), jax.jit(p.values)(*p.single))
    assert collectives(compiled, *p.sharded) == {}
    gradient = jax.jit(p.gradient(name))
    p.check_gradient(name, gradient(*p.sharded))
    assert collectives(gradient, *p.sharded) == {"all-reduce": 1}


@pytest.mark.parametrize("name", ["quantize", "dequantize"])
@pytest.mark.parametrize("granularity", [NAMED["per_token"], NAMED["groups"]], ids=repr)
def test_auto_gradients_of_other_operations(granularity, name):
    p = Problem(granularity, mesh_of(EIGHT), P("a", None, "b"))
    compiled = jax.jit(p.gradient(name))
    p.check_gradient(name, compiled(*p.sharded))
    assert collectives(compiled, *p.sharded) == ({"all-reduce": 1} if p.crossing else {})


def test_auto_through_xla():
    p = Problem(NAMED["blocks"], mesh_of(EIGHT), P("a", None, "b"), implementation="xla")
    compiled = jax.jit(p.values)
    jax.tree.map(assert_same_bits, compiled(*p.sharded), jax.jit(p.values)(*p.single))
    assert collectives(compiled, *p.sharded) == {}
    p.check_gradient("fake_quantize", jax.jit(p.gradient("fake_quantize"))(*p.sharded))


@pytest.mark.smoke
@pytest.mark.parametrize("granularity", [NAMED["per_channel"], NAMED["groups"]], ids=repr)
def test_eager_keeps_the_sharding(granularity):
    p = Problem(granularity, mesh_of(EIGHT), P("a", None, "b"))
    actual, expected = p.values(*p.sharded), p.values(*p.single)
    for name, a in actual.items():
        assert_same_bits(a, expected[name])
        assert a.sharding.is_equivalent_to(p.sharded[0].sharding, 3), (name, a.sharding)
    p.check_gradient("fake_quantize", p.gradient("fake_quantize")(*p.sharded))


def test_vmap_over_a_sharded_axis():
    """A mapped axis shards like any other: per-example gradients without, summed ones with their one all-reduce."""
    mesh = mesh_of(EIGHT)
    o = Granularity("mapped", (8, 6, 16), (6,), axis=1).operands(qtype="int4", zero_point_dtype=np.float32)

    def f(x, scale):
        return jaxquant.fake_quantize(x, scale, axis=0, implementation="ffi", **QTYPE)

    def loss(x, scale, dy):
        return (f(x, scale) * dy).sum()

    single = o.x, o.scale, o.dy
    sharded = put(mesh, P("b"), o.x), put(mesh, P(), o.scale), put(mesh, P("b"), o.dy)
    mapped = jax.jit(jax.vmap(f, (0, None)))
    assert_same_bits(mapped(*sharded[:2]), mapped(*single[:2]))
    assert collectives(mapped, *sharded[:2]) == {}
    each = jax.jit(jax.vmap(jax.grad(loss, 1), (0, None, 0)))
    assert_same_bits(each(*sharded), each(*single))
    assert collectives(each, *sharded) == {}
    total = jax.jit(jax.grad(lambda *a: jax.vmap(loss, (0, None, 0))(*a).sum(), 1))
    np.testing.assert_allclose(total(*sharded), total(*single), rtol=1e-5)
    assert collectives(total, *sharded) == {"all-reduce": 1}


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("size", [32, 24, 23])
def test_packed_codes_sharded_on_the_last_axis(size, implementation):
    """Four shards of whole bytes move nothing; three codes in a shard, or an odd length, cut a byte."""
    mesh = mesh_of(EIGHT)
    g = Granularity(f"packed_{size}", (4, size), (4, 1))
    o = g.operands(qtype="int4")
    whole_bytes = size % 8 == 0
    spec = P("a", "b") if size % 4 == 0 else P("a")
    x, scale = put(mesh, spec, o.x), put(mesh, P("a"), o.scale)
    expected = oracle.pack(oracle.quantize(o.x, o.scale, qtype="int4"), "int4")
    fused = jax.jit(lambda x, s: jaxquant.quantize(x, s, packed=True, implementation=implementation, **QTYPE))
    separate = jax.jit(
        lambda x, s: jaxquant.pack(jaxquant.quantize(x, s, **QTYPE), **QTYPE, implementation=implementation)
    )
    unpacked = jax.jit(lambda p: jaxquant.unpack(p, **QTYPE, size=size, implementation=implementation))
    for packing in (fused, separate):
        packed = packing(x, scale)
        assert_same_bits(packed, expected)
        assert_same_bits(unpacked(packed), oracle.unpack(expected, "int4", size))
        if whole_bytes and implementation == "ffi":
            assert collectives(packing, x, scale) == {}
            assert packed.sharding.is_equivalent_to(x.sharding, 2)
            assert collectives(unpacked, packed) == {}
            assert unpacked(packed).sharding.is_equivalent_to(x.sharding, 2)


# ------------------------------------------------------------------------------------------------------------ explicit


EXPLICIT = [P("a"), P("a", None, "b"), P(None, None, ("a", "b"))]


@pytest.mark.parametrize(
    ("granularity", "spec"),
    [
        (granularity, spec)
        for granularity in GRANULARITIES
        for spec in EXPLICIT
        if not meshes.cuts_a_block(mesh_of(EIGHT), spec, SHAPE, granularity.scale_shape)
    ],
    ids=str,
)
def test_explicit(granularity, spec):
    """Types carry the sharding, forward and backward, and nothing moves that the sums do not need."""
    mesh = mesh_of(EIGHT, AxisType.Explicit)
    with jax.set_mesh(mesh):
        p = Problem(granularity, mesh, spec)
        compiled = jax.jit(p.values)
        for name, aval in jax.eval_shape(p.values, *p.sharded).items():
            assert meshes.padded(aval.sharding.spec, 3) == meshes.padded(spec, 3), name
        actual = compiled(*p.sharded)
        assert collectives(compiled, *p.sharded) == {}
        gradient = jax.jit(p.gradient("fake_quantize"))
        gradients = gradient(*p.sharded)
        assert collectives(gradient, *p.sharded) == ({"all-reduce": 1} if p.crossing else {})
        for got, like in zip(gradients, p.sharded, strict=False):
            assert got.sharding.is_equivalent_to(like.sharding, 3)
    expected = jax.jit(p.values)(*p.single)
    jax.tree.map(assert_same_bits, jax.device_get(actual), jax.device_get(expected))
    p.check_gradient("fake_quantize", jax.device_get(gradients))


@pytest.mark.smoke
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_explicit_under_other_transforms(implementation):
    mesh = mesh_of(EIGHT, AxisType.Explicit)
    with jax.set_mesh(mesh):
        p = Problem(NAMED["groups"], mesh, P("a", None, "b"), implementation=implementation)
        gradient = p.gradient("fake_quantize")
        one = jax.jit(gradient)(*p.sharded)
        mapped = jax.jit(jax.vmap(gradient))(*(jnp.stack([a, a]) for a in p.sharded))
        hessian = jax.jit(jax.jvp, static_argnums=0)(
            lambda s: p.gradient("quantize", (1,))(p.sharded[0], s, *p.sharded[2:])[0], p.sharded[1:2], p.sharded[1:2]
        )
        eager = gradient(*p.sharded)
    for a, b, c in zip(one, mapped, eager, strict=True):
        if implementation == "ffi":
            assert_same_bits(b[1], a)
            assert_same_bits(c, a)
        else:
            np.testing.assert_allclose(b[1], a, rtol=1e-5, atol=1e-5)
    assert hessian[1].sharding.is_equivalent_to(p.sharded[1].sharding, 3)


# ----------------------------------------------------------------------------------------------------------- shard_map


@pytest.mark.parametrize("manual", [{"a", "b"}, {"a"}, {"b"}], ids=["full", "partly a", "partly b"])
@pytest.mark.parametrize("granularity", [NAMED[n] for n in ("per_tensor", "per_channel", "groups", "blocks")], ids=repr)
def test_shard_map(granularity, manual):
    """Each shard calls its own kernel; a replicated scale's gradient is summed over what the others vary on."""
    mesh, spec = mesh_of(EIGHT), P("a", None, "b")
    p = Problem(granularity, mesh, spec)

    def visible(s):
        return P(*[e if e in manual else None for e in s])

    specs = (visible(spec), visible(p.scale_spec), visible(p.scale_spec), visible(spec))
    mapped = functools.partial(jax.shard_map, mesh=mesh, axis_names=manual)

    values = jax.jit(mapped(p.values, in_specs=specs, out_specs=specs[0]))
    jax.tree.map(assert_same_bits, values(*p.sharded), jax.jit(p.values)(*p.single))
    assert collectives(values, *p.sharded) == {}

    # The reduced loss outside shard_map, and the gradient taken inside.
    def outer(x, scale, zero_point, dy):
        def f(*a):
            return jaxquant.fake_quantize(*a, **QTYPE, **p.keywords)

        return (mapped(f, in_specs=specs[:3], out_specs=specs[0])(x, scale, zero_point) * dy).sum()

    outside = jax.jit(jax.grad(outer, (0, 1, 2)))
    inside = jax.jit(mapped(p.gradient("fake_quantize"), in_specs=specs, out_specs=specs[:3]))
    exact = granularity.name in ("groups",) and manual == {"a", "b"}
    for compiled in (outside, inside):
        actual = compiled(*p.sharded)
        if exact:
            p.check_gradient("fake_quantize", actual)
        else:
            crossing, p.crossing = p.crossing, True
            p.check_gradient("fake_quantize", actual)
            p.crossing = crossing
        # Partly manual, the sum is made in two steps: over the automatic axes, then over the manual ones.
        counted = collectives(compiled, *p.sharded)
        assert counted == ({"all-reduce": 1 if manual == {"a", "b"} else 2} if p.crossing else {})


@pytest.mark.smoke
def test_shard_map_of_a_vmap_and_the_reverse():
    mesh = mesh_of(EIGHT)
    o = Granularity("mapped", (8, 6, 16), (6,), axis=1).operands(qtype="int4")

    def f(x, scale):
        return jaxquant.fake_quantize(x, scale, axis=0, implementation="ffi", **QTYPE)

    inside = jax.shard_map(jax.vmap(f, (0, None)), mesh=mesh, in_specs=(P("b"), P()), out_specs=P("b"))
    outside = jax.vmap(jax.shard_map(f, mesh=mesh, in_specs=(P(None, "b"), P()), out_specs=P(None, "b")), (0, None))
    expected = oracle.fake_quantize(o.x, o.scale, axis=1, qtype="int4")
    assert_same_bits(jax.jit(inside)(o.x, o.scale), expected)
    assert_same_bits(jax.jit(outside)(o.x, o.scale), expected)


@pytest.mark.parametrize("size", [6, 8, 9])
def test_two_bit_codes_whose_bytes_and_shards_disagree(size):
    """6 codes in 2 bytes over 2 devices: half of the codes are not half of the bytes."""
    mesh = jax.make_mesh((3 if size == 9 else 2,), ("a",), axis_types=(AxisType.Auto,))
    codes = np.arange(5 * size, dtype=np.uint8).reshape(5, size) % 4
    packed = oracle.pack(codes, "uint2")
    sharded = NamedSharding(mesh, P(None, "a"))
    pack = jax.jit(lambda q: jaxquant.pack(q, jnp.uint2, implementation="ffi"))
    unpack = jax.jit(lambda b: jaxquant.unpack(b, jnp.uint2, size, implementation="ffi"))
    assert_same_bits(pack(jax.device_put(codes, sharded)), packed)
    assert_same_bits(unpack(jax.device_put(packed, sharded)), codes)
    if size == 8:
        assert collectives(unpack, jax.device_put(packed, sharded)) == {}


def test_uneven_and_empty_shards():
    """Sizes that no mesh axis divides cannot be placed unevenly by hand, but a constraint inside jit may ask for it."""
    mesh = mesh_of(EIGHT)
    x = np.linspace(-2, 2, 7 * 5, dtype=np.float32).reshape(7, 5)

    @jax.jit
    def f(x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("b")))
        return jaxquant.fake_quantize(x, 0.25, implementation="ffi")

    assert_same_bits(f(x), oracle.fake_quantize(x, np.float32(0.25)))
    empty = put(mesh, P("a"), np.zeros((0, 4), np.float32))
    assert jax.jit(lambda x: jaxquant.fake_quantize(x, 0.25))(empty).shape == (0, 4)


def test_replicated_operands_are_sliced_not_gathered():
    """x, dy and the scale each sharded over other axes, or not at all: every array takes its part of the others'."""
    mesh = mesh_of(EIGHT)
    p = Problem(NAMED["per_channel"], mesh, P())
    x, scale, zero_point, dy = p.single
    parameters = put(mesh, P(None, "b"), scale), put(mesh, P(None, "b"), zero_point)
    values = jax.jit(p.values)
    replicated = put(mesh, P(), x), *parameters, put(mesh, P(), dy)
    assert collectives(values, *replicated) == {}
    jax.tree.map(assert_same_bits, values(*replicated), jax.jit(p.values)(*p.single))
    p.crossing = True
    gradient = jax.jit(p.gradient("fake_quantize"))
    for spec, others in ((P(), parameters), (P(None, None, "b"), (put(mesh, P(), scale), put(mesh, P(), zero_point)))):
        operands = put(mesh, spec, x), *others, put(mesh, P("a"), dy)
        p.check_gradient("fake_quantize", gradient(*operands))
        assert collectives(gradient, *operands) == {"all-reduce": 1}


def test_cut_blocks_gather_only_that_axis():
    """Two blocks over four shards: axis 0 is gathered, axis 2 stays where it is."""
    p = Problem(NAMED["blocks"], mesh_of(EIGHT), P("b", None, "a"))
    assert p.cut
    compiled = jax.jit(lambda x, s, z: jaxquant.fake_quantize(x, s, z, **QTYPE, **p.keywords))
    actual = compiled(*p.sharded[:3])
    assert_same_bits(actual, compiled(*p.single[:3]))
    assert meshes.padded(actual.sharding.spec, 3)[2] == "a"
