"""The block formats over several devices: one device's bits, the operands' shardings, and no collective but the sum
over shards of the contracted axis."""

import functools
import itertools

import ggml_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh_of, padded, put

from jaxquant import ggml

K, ROWS, TOKENS, EXPERTS = 256, 32, 12, 5
FORMATS = ["Q8_0", "F16", "Q5_1"]  # blocks of 32, of 1, and with minimums: eight whole blocks a row or more
MESH = (2, 2)
ONE = {"all-reduce": 1}


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.cache
def weights(name, *shape, prepared=False):
    w = ggml.quantize(normal(*shape, seed=2), name)
    return w.prepare() if prepared else w


def place(mesh, spec, operand):
    """An array, or a QTensor by its data."""
    return jax.tree.map(lambda leaf: put(mesh, spec, leaf), operand)


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


def linear(lhs):
    return functools.partial(ggml.linear, lhs_qtype=lhs)


def gradient(lhs):
    return lambda x, w, dy: jax.vjp(lambda x: ggml.linear(x, w, lhs_qtype=lhs), x)[1](dy)[0]


def check(function, operands, specs, mesh, expected_collectives, result_spec, exact=None):
    """Placed as specs say: the values and the collectives of the compiled program, and where its result lies."""
    placed = [place(mesh, s, a) for s, a in zip(specs, operands, strict=True)]
    compiled = jax.jit(function)
    assert collectives(compiled, *placed) == expected_collectives
    actual, expected = compiled(*placed), jax.jit(function)(*operands)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if exact is None:
            assert_same_bits(a, e)
        else:
            assert oracle.nmse(a, np.asarray(e, np.float64)) <= exact
        assert a.sharding.is_equivalent_to(NamedSharding(mesh, result_spec), a.ndim), a.sharding
    return actual


# What is sharded: specs of x, of w's data and of dy; collectives of the product and of its gradient; their specs.
LINEAR = {
    "rows": (P(), P("a"), P(None, "a"), {}, ONE, P(None, "a"), P()),
    "columns": (P(None, "a"), P(None, "a"), P(), ONE, {}, P(), P(None, "a")),
    "tokens": (P("a"), P(), P("a"), {}, {}, P("a"), P("a")),
    "rows and tokens": (P("b"), P("a"), P("b", "a"), {}, ONE, P("b", "a"), P("b")),
    "columns and tokens": (P("b", "a"), P(None, "a"), P("b"), ONE, {}, P("b"), P("b", "a")),
    "rows and columns": (P(None, "b"), P("a", "b"), P(None, "a"), ONE, ONE, P(None, "a"), P(None, "b")),
    "rows by all": (P(), P(("a", "b")), P(None, ("a", "b")), {}, ONE, P(None, ("a", "b")), P()),
}


@pytest.mark.parametrize(("name", "prepared"), [*((name, False) for name in FORMATS), ("Q8_0", True), ("Q5_1", True)])
@pytest.mark.parametrize("layout", LINEAR)
def test_linear(layout, name, prepared):
    """A prepared matrix is cut like a plain one: its rows in eights, its columns in whole blocks."""
    xs, ws, ys, product, transposed, result, dx = LINEAR[layout]
    mesh = mesh_of(MESH)
    x, w, dy = normal(TOKENS, K), weights(name, ROWS, K, prepared=prepared), normal(TOKENS, ROWS, seed=3)
    for lhs in (jnp.int8, None):
        check(linear(lhs), (x, w), (xs, ws), mesh, product, result, 1e-12 if product else None)
    check(gradient(jnp.int8), (x, w, dy), (xs, ws, ys), mesh, transposed, dx, 1e-12 if transposed else None)


@pytest.mark.smoke
def test_linear_through_xla():
    mesh = mesh_of(MESH)
    x, plain = normal(TOKENS, K), weights("Q8_0", ROWS, K)
    call = functools.partial(ggml.linear, implementation="xla")
    operands = itertools.product((plain, plain.prepare()), ((P(), P("a")), (P(None, "a"), P(None, "a")), (P("b"), P())))
    for w, (xs, ws) in operands:
        y = jax.jit(call)(place(mesh, xs, x), place(mesh, ws, w))
        assert oracle.nmse(y, np.asarray(ggml.linear(x, w, lhs_qtype=None), np.float64)) <= 1e-10


def test_sums_over_shards_are_in_float32():
    """Of 16-bit activations too: only the total is rounded."""
    mesh, x, w = mesh_of(MESH), normal(TOKENS, K).astype(jnp.bfloat16), weights("Q8_0", ROWS, K)
    spec = P(None, ("a", "b"))
    y = check(linear(None), (x, w), (spec, spec), mesh, ONE, P(), 1e-5)
    exact = np.asarray(x, np.float64) @ np.asarray(w.dequantize(), np.float64).T
    assert y.dtype == jnp.bfloat16 and oracle.nmse(y, exact) <= 3e-6


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1"])
def test_a_prepared_matrix_is_moved_where_it_lies(name):
    mesh = mesh_of(MESH)
    plain, w = weights(name, ROWS, K), weights(name, ROWS, K, prepared=True)
    ids = np.random.default_rng(6).integers(-1, ROWS + 1, (16,)).astype(np.int32)
    for spec in (P("a"), P(None, "a"), P("b", "a"), P(("a", "b"))):
        check(ggml.QTensor.prepare, (plain,), (spec,), mesh, {}, spec)
        check(ggml.QTensor.plain, (w,), (spec,), mesh, {}, spec)
        check(lambda w: w.dequantize(), (w,), (spec,), mesh, {}, spec)
    check(lambda w, ids: w.take(ids), (w, ids), (P(None, "a"), P("b")), mesh, {}, P("b", "a"))


@pytest.mark.parametrize("rows", [24, 31, 6])
def test_rows_that_a_mesh_cannot_share_out(rows):
    """Groups of eight that shards would cut, or an odd number of rows: gathered, never wrong."""
    mesh = mesh_of(MESH)
    x, w = normal(TOKENS, K), weights("Q8_0", rows, K)
    expected = jax.jit(ggml.linear)(x, w)
    spec = P() if rows == 31 else P("a")
    prepared = place(mesh, P("a") if rows == 31 else P(), w.prepare())  # four eights, one of them not full
    assert_same_bits(jax.jit(ggml.linear)(place(mesh, P(), x), prepared), expected)
    assert_same_bits(jax.jit(lambda w: w.prepare().data)(place(mesh, spec, w)), w.prepare().data)
    assert_same_bits(jax.jit(lambda w: w.dequantize())(prepared), w.dequantize())


def test_columns_that_a_mesh_cannot_share_out():
    """Three blocks over two shards; bytes that are sharded inside a block."""
    mesh = mesh_of(MESH)
    x, w = normal(TOKENS, 96), weights("Q8_0", ROWS, 96)
    for placed in (place(mesh, P(None, "a"), w), place(mesh, P(None, "a"), w.prepare())):
        y = jax.jit(ggml.linear)(place(mesh, P(None, "a"), x), placed)
        assert_same_bits(y, jax.jit(ggml.linear)(x, w))
        assert_same_bits(jax.jit(lambda w: w.dequantize())(placed), w.dequantize())


# -------------------------------------------------------------------------------------------------------------- experts

IDS = np.random.default_rng(5).integers(-1, EXPERTS, (TOKENS, 2)).astype(np.int32)
MOE = {
    "rows": (P(), P(None, "a"), P(), P(None, None, "a"), {}, ONE, P(None, None, "a"), P()),
    "columns": (P(None, None, "a"), P(None, None, "a"), P(), P(), ONE, {}, P(), P(None, None, "a")),
    "tokens": (P("a"), P(), P("a"), P("a"), {}, {}, P("a"), P("a")),
    "tokens and rows": (P("a"), P(None, "b"), P("a"), P("a", None, "b"), {}, ONE, P("a", None, "b"), P("a")),
}


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("layout", MOE)
def test_moe_linear(layout, prepared):
    xs, ws, ids, ys, product, transposed, result, dx = MOE[layout]
    mesh = mesh_of(MESH)
    x, w, dy = normal(TOKENS, 1, K), weights("Q5_1", EXPERTS, ROWS, K, prepared=prepared), normal(TOKENS, 2, ROWS)
    for lhs in (jnp.int8, None):
        call = functools.partial(ggml.moe_linear, lhs_qtype=lhs)
        check(call, (x, w, IDS), (xs, ws, ids), mesh, product, result, 1e-12 if product else None)

    def back(x, w, ids, dy):
        return jax.vjp(lambda x: ggml.moe_linear(x, w, ids), x)[1](dy)[0]

    tolerance = 1e-12 if transposed else None
    check(back, (x, w, IDS, dy), (xs, ws, ids, ys), mesh, transposed, dx, tolerance)


def test_ragged_linear():
    mesh = mesh_of(MESH)
    x, w, sizes = normal(TOKENS, K), weights("Q8_0", EXPERTS, ROWS, K), np.array([2, 0, 5, 1, 1], np.int32)
    check(ggml.ragged_linear, (x, w, sizes), (P(), P(None, "a"), P()), mesh, {}, P(None, "a"))


# ------------------------------------------------------------------------------------------------- rows and their bytes


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_rows_and_bytes(name):
    """Leading axes shard freely, and values and bytes of whole blocks along the last one."""
    mesh = mesh_of(MESH)
    x, w = normal(4, 8, 512), weights(name, 4, 8, 512)
    ids = np.random.default_rng(6).integers(-1, 9, (16,)).astype(np.int32)
    for spec in (P("a"), P(None, "b"), P("a", "b"), P(("a", "b"))):
        check(lambda x: ggml.quantize(x, name), (x,), (spec,), mesh, {}, spec)
        check(lambda w: w.dequantize(), (w,), (spec,), mesh, {}, spec)
    check(lambda w: w.dequantize(jnp.bfloat16), (w,), (P("b", None, "a"),), mesh, {}, P("b", None, "a"))
    check(lambda w, ids: w.take(ids), (w[0], ids), (P(), P("a")), mesh, {}, P("a"))
    check(lambda w, ids: w.take(ids), (w[0], ids), (P(None, "a"), P("b")), mesh, {}, P("b", "a"))


def test_quantisation_with_an_imatrix():
    mesh = mesh_of(MESH)
    x, shared, each = normal(4, 8, 512), normal(512) ** 2, normal(4, 512) ** 2

    def call(x, imatrix):
        return ggml.quantize(x, "Q4_0", imatrix=imatrix)

    check(call, (x, shared), (P("a", "b"), P()), mesh, {}, P("a", "b"))
    check(call, (x, each), (P("a", "b"), P("a")), mesh, {}, P("a", "b"))
    check(call, (x, each), (P("a", "b"), P()), mesh, {}, P("a", "b"))


def test_rows_that_are_cut_are_gathered_for_quantisation():
    """A legacy format weighs a row as a whole."""
    mesh, x = mesh_of(MESH), normal(8, 512)
    placed = place(mesh, P("b", "a"), x)
    actual = jax.jit(lambda x: ggml.quantize(x, "Q4_0", imatrix=jnp.ones(512)).data)(placed)
    assert_same_bits(actual, ggml.quantize(x, "Q4_0", imatrix=np.ones(512, np.float32)).data)
    assert padded(actual.sharding.spec, 2)[0] == "b"


# ---------------------------------------------------------------------------------------------------------------- modes


@pytest.mark.smoke
def test_a_qtensor_is_placed_like_an_array():
    """device_put, shardings of jit and constraints take a sharding for the data, or a tree of them."""
    mesh = mesh_of(MESH)
    rows, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
    x, w = normal(TOKENS, K), weights("Q8_0", ROWS, K)
    placed = jax.device_put(w, rows)
    assert isinstance(placed, ggml.QTensor) and placed.data.sharding == rows
    tree = jax.tree.map(lambda _: rows, w)
    assert jax.device_put({"w": w}, {"w": tree})["w"].data.sharding == rows
    call = jax.jit(ggml.linear, in_shardings=(whole, rows), out_shardings=NamedSharding(mesh, P(None, "a")))
    assert_same_bits(call(x, w), ggml.linear(x, w))
    assert collectives(call, x, placed) == {}
    constrained = jax.jit(lambda x, w: ggml.linear(x, jax.lax.with_sharding_constraint(w, rows)))
    assert_same_bits(constrained(x, w), ggml.linear(x, w))
    assert_same_bits(placed.prepare().plain().data, w.data)
    assert placed[4:8].shape == (4, K) and placed.to_bytes() == w.to_bytes()


@pytest.mark.smoke
@pytest.mark.parametrize("layout", ["rows", "columns", "tokens"])
def test_eager(layout):
    xs, ws, _, product, _, result, _ = LINEAR[layout]
    mesh = mesh_of(MESH)
    x, w = normal(TOKENS, K), weights("Q8_0", ROWS, K)
    y = ggml.linear(place(mesh, xs, x), place(mesh, ws, w))
    assert oracle.nmse(y, np.asarray(ggml.linear(x, w), np.float64)) <= (1e-12 if product else 0)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, result), 2)


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("layout", LINEAR)
def test_explicit(layout, prepared):
    """Types carry the sharding, forward and backward."""
    xs, ws, ys, product, transposed, result, dx = LINEAR[layout]
    mesh = mesh_of(MESH, AxisType.Explicit)
    operands = normal(TOKENS, K), weights("Q5_1", ROWS, K, prepared=prepared), normal(TOKENS, ROWS, seed=3)
    expected = jax.jit(linear(None))(*operands[:2]), jax.jit(gradient(None))(*operands)
    with jax.set_mesh(mesh):
        placed = [place(mesh, s, a) for s, a in zip((xs, ws, ys), operands, strict=True)]
        y, back = jax.jit(linear(None)), jax.jit(gradient(None))
        assert padded(jax.eval_shape(y, *placed[:2]).sharding.spec, 2) == padded(result, 2)
        assert padded(jax.eval_shape(back, *placed).sharding.spec, 2) == padded(dx, 2)
        actual = y(*placed[:2]), back(*placed)
        assert collectives(y, *placed[:2]) == product and collectives(back, *placed) == transposed
    for a, e, summed in zip(actual, expected, (product, transposed), strict=True):
        assert oracle.nmse(a, np.asarray(e, np.float64)) <= (1e-12 if summed else 0)


@pytest.mark.smoke
def test_explicit_of_everything_else():
    mesh = mesh_of(MESH, AxisType.Explicit)
    x, w, experts = normal(4, 8, 512), weights("Q8_0", 4, 8, 512), weights("Q8_0", EXPERTS, ROWS, K)
    tokens = normal(TOKENS, 1, K)
    expected, data = ggml.moe_linear(tokens, experts, IDS), ggml.quantize(x, "Q8_0").data
    with jax.set_mesh(mesh):
        placed = place(mesh, P("a"), x)
        assert_same_bits(jax.jit(lambda x: ggml.quantize(x, "Q8_0").data)(placed), data)
        values = jax.jit(lambda w: w.dequantize())(place(mesh, P("a", "b"), w))
        assert padded(values.sharding.spec, 3) == ("a", "b", None)
        assert_same_bits(values, w.dequantize())
        y = jax.jit(ggml.moe_linear)(
            place(mesh, P("a"), tokens), place(mesh, P(None, "b"), experts), place(mesh, P("a"), IDS)
        )
        assert padded(y.sharding.spec, 3) == ("a", None, "b")
        assert_same_bits(y, expected)
        mapped = jax.jit(jax.vmap(ggml.linear, (None, 0)))(
            place(mesh, P(), tokens[:, 0]), place(mesh, P("a"), experts[:4])
        )
        assert_same_bits(np.asarray(mapped)[2], ggml.linear(tokens[:, 0], experts[2]))


MANUAL = pytest.mark.parametrize("manual", [{"a", "b"}, {"a"}, {"b"}], ids=["full", "partly a", "partly b"])


@MANUAL
@pytest.mark.parametrize(
    ("layout", "prepared"), [("rows", False), ("tokens", False), ("rows and tokens", False), ("rows and tokens", True)]
)
def test_shard_map(layout, prepared, manual):
    """Each shard calls its own kernel; the gradient of replicated activations is summed over what varies."""
    xs, ws, ys, _, transposed, result, dx = LINEAR[layout]
    mesh = mesh_of(MESH)
    x, w, dy = normal(TOKENS, K), weights("Q5_1", ROWS, K, prepared=prepared), normal(TOKENS, ROWS, seed=3)

    def visible(spec):
        return P(*[e if e in manual else None for e in spec])

    specs = tuple(map(visible, (xs, ws, ys)))
    mapped = functools.partial(jax.shard_map, mesh=mesh, axis_names=manual)
    placed = [place(mesh, s, a) for s, a in zip((xs, ws, ys), (x, w, dy), strict=True)]
    y = jax.jit(mapped(linear(None), in_specs=specs[:2], out_specs=visible(result)))
    assert oracle.nmse(y(*placed[:2]), np.asarray(ggml.linear(x, w, lhs_qtype=None), np.float64)) <= 1e-12
    if manual == {"a", "b"}:
        assert_same_bits(y(*placed[:2]), ggml.linear(x, w, lhs_qtype=None))
        assert collectives(y, *placed[:2]) == {}
    back = jax.jit(mapped(gradient(None), in_specs=specs, out_specs=visible(dx)))
    expected = np.asarray(jax.jit(gradient(None))(x, w, dy), np.float64)
    assert oracle.nmse(back(*placed), expected) <= 1e-12
    if manual == {"a", "b"}:
        assert collectives(back, *placed) == transposed

    def outer(x, w, dy):
        return (mapped(linear(None), in_specs=specs[:2], out_specs=visible(result))(x, w) * dy).sum()

    assert oracle.nmse(jax.jit(jax.grad(outer))(*placed), expected) <= 1e-12


def test_shard_map_refuses_a_cut_that_leaves_the_last_eight_not_full():
    """A shard cannot tell whether the rows that fill up the eights are its own; a whole tensor can."""
    mesh = mesh_of(MESH)
    x, w = normal(TOKENS, K), weights("Q8_0", 8 * mesh.size - 3, K, prepared=True)

    def call(w_spec, out_spec):
        return jax.jit(jax.shard_map(ggml.linear, mesh=mesh, in_specs=(P(), w_spec), out_specs=out_spec))

    with pytest.raises(ValueError, match=rf"QTensor: data.*{mesh.size} eights of rows for {8 * mesh.size - 3} rows"):
        call(P(("a", "b")), P(None, ("a", "b")))(x, w)
    assert_same_bits(call(P(), P())(x, w), ggml.linear(x, w))


@MANUAL
@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
def test_shard_map_of_columns(prepared, manual):
    """The sum over shards is the caller's, as in any contraction."""
    mesh = mesh_of(MESH)
    x, w = normal(TOKENS, K), weights("Q8_0", ROWS, K, prepared=prepared)
    (axis,) = sorted(manual)[:1]
    spec = P(None, axis)
    call = jax.shard_map(
        lambda x, w: jax.lax.psum(ggml.linear(x, w), axis),
        mesh=mesh, in_specs=(spec, spec), out_specs=P(), axis_names=manual,
    )  # fmt: skip
    expected = np.asarray(ggml.linear(x, w), np.float64)
    if manual == {"a", "b"}:
        assert oracle.nmse(jax.jit(call)(x, w), expected) <= 1e-12
        assert collectives(jax.jit(call), place(mesh, spec, x), place(mesh, spec, w)) == ONE
        # A shard prepares what it has, and a prepared shard knows its rows and columns.
        moved = jax.shard_map(lambda w: w.plain().prepare(), mesh=mesh, in_specs=P("b", "a"), out_specs=P("b", "a"))
        back = jax.jit(moved)(weights("Q8_0", ROWS, K, prepared=True))
        assert back.shape == w.shape and back.to_bytes() == w.to_bytes()
    else:  # jax.numpy does the work there, in floating point
        assert oracle.nmse(jax.jit(call)(x, w), expected) <= 1e-4


@MANUAL
def test_shard_map_of_everything_else(manual):
    mesh = mesh_of(MESH)
    (axis,) = sorted(manual)[:1]
    over = P(axis)
    x, w, ids = normal(8, 1, K), weights("Q8_0", EXPERTS, ROWS, K), IDS[:8]
    mapped = functools.partial(jax.shard_map, mesh=mesh, axis_names=manual)
    y = jax.jit(mapped(functools.partial(ggml.moe_linear, lhs_qtype=None), in_specs=(over, P(), over), out_specs=over))
    assert oracle.nmse(y(x, w, ids), np.asarray(ggml.moe_linear(x, w, ids, lhs_qtype=None), np.float64)) <= 1e-12
    sizes = np.array([1, 0, 2, 0, 1], np.int32)
    y = jax.jit(
        mapped(functools.partial(ggml.ragged_linear, lhs_qtype=None), in_specs=(over, P(), P()), out_specs=over)
    )
    half = [ggml.ragged_linear(x[i : i + 4, 0], w, sizes, lhs_qtype=None) for i in (0, 4)]
    assert oracle.nmse(y(x[:, 0], w, sizes), np.concatenate(half).astype(np.float64)) <= 1e-12
    values = jax.jit(mapped(lambda w: w.dequantize(), in_specs=over, out_specs=over))(w[:4])
    assert_same_bits(values, w[:4].dequantize())
    rows = jax.jit(mapped(lambda w, ids: w.take(ids), in_specs=(P(), over), out_specs=over))(w[0], ids[:, 0])
    assert_same_bits(rows, w[0].take(ids[:, 0]))
    moved = jax.jit(mapped(lambda w: w.prepare(), in_specs=over, out_specs=over))(w[:4])
    assert moved.layout == "prepared"
    assert_same_bits(moved.data, w[:4].prepare().data)
    rows = jax.jit(mapped(lambda w, ids: w.take(ids), in_specs=(P(), over), out_specs=over))(moved[0], ids[:, 0])
    assert_same_bits(rows, w[0].take(ids[:, 0]))
    data = jax.jit(mapped(lambda x: ggml.quantize(x, "Q4_K").data, in_specs=over, out_specs=over))(x[:, 0])
    assert_same_bits(data, ggml.quantize(x[:, 0], "Q4_K").data)


def test_vmap_over_a_sharded_axis():
    mesh = mesh_of(MESH)
    x, w = normal(4, TOKENS, K), weights("Q8_0", 4, ROWS, K)
    mapped = jax.vmap(ggml.linear)
    check(mapped, (x, w), (P("a"), P("a")), mesh, {}, P("a"))
    check(mapped, (x, w), (P("a"), P("a", "b")), mesh, {}, P("a", None, "b"))
    each = jax.vmap(ggml.linear, (0, None))
    placed = place(mesh, P("a"), x), place(mesh, P(), w[0])
    assert_same_bits(jax.jit(each)(*placed), jax.jit(each)(x, w[0]))
    shared = jax.vmap(ggml.linear, (None, 0))
    check(shared, (x[0], w), (P(), P("a")), mesh, {}, P("a"))


@pytest.mark.smoke
def test_export_over_several_devices():
    from jax import export

    import jaxquant

    mesh = mesh_of(MESH)
    x, w = place(mesh, P(), normal(TOKENS, K)), place(mesh, P("a"), weights("Q8_0", ROWS, K))

    def call(x, data, implementation=None):
        return ggml.linear(x, ggml.QTensor(data, "Q8_0"), implementation=implementation)

    checks = jaxquant.export_checks()
    with pytest.raises(
        NotImplementedError, match=r'ggml_linear: jax.export cannot .* 4 devices; .*implementation="xla"'
    ):
        export.export(jax.jit(functools.partial(call, implementation="ffi")), disabled_checks=checks)(x, w.data)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=(P(), P("a")), out_specs=P(None, "a"))
    for function in (mapped, functools.partial(call, implementation="xla")):
        module = export.deserialize(export.export(jax.jit(function), disabled_checks=checks)(x, w.data).serialize())
        y = jax.jit(module.call)(x, w.data)
        assert oracle.nmse(y, np.asarray(ggml.linear(x, w, lhs_qtype=None), np.float64)) <= 1e-4
