"""Products with matrices of integer codes against float64 products in NumPy.

What is promised in bits (a row alone, a layout) is compared with calls on single rows and on the other layout.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh_of, put
from oracle import assert_same_bits
from weight_only_cases import TYPES, gradient, matmul, matrix, nmse, normal

import jaxquant
from jaxquant.affine.weight_only import no_zero_point, weight_only_gradient_p, weight_only_matmul_p

FLOAT, HALF = 1e-12, 1e-5  # normalised mean squared errors
LAYOUTS = ("plain", "prepared")
# k, n, groups: whole words and panels, odd everything, groups that end within words, one row, one column, many spans.
SHAPES = [(256, 64, 2), (390, 67, 3), (30, 7, 3), (8, 5, 8), (1, 33, 1), (1024, 1, 8), (1000, 150, 1)]


@pytest.mark.parametrize("zero_point", [False, True], ids=["symmetric", "zero point"])
@pytest.mark.parametrize("qtype", TYPES)
def test_values(qtype, zero_point):
    """Both layouts, a row alone, and the gradient, for few rows and for many."""
    for k, n, groups in SHAPES:
        w = matrix(qtype, k, n, groups, zero_point)
        x, dy = normal(70, k), normal(70, n, seed=2)
        parts = (slice(0, 70), slice(3, 4), slice(65, 68), slice(10, 19))

        def everything(x, dy, w=w, parts=parts):
            return [(matmul(x[p], w, layout), gradient(dy[p], w, layout)) for layout in LAYOUTS for p in parts]

        results = jax.jit(everything)(x, dy)
        y, dx = results[0]
        assert nmse(y, x.astype(np.float64) @ w.values) <= FLOAT, (k, n)
        assert nmse(dx, dy.astype(np.float64) @ w.values.T) <= FLOAT, (k, n)
        for part, result in zip(2 * parts, results, strict=True):
            assert_same_bits(result[0], y[part])
            assert_same_bits(result[1], dx[part])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("qtype", TYPES)
def test_scale_of_the_tensor(qtype, layout):
    w = matrix(qtype, 96, 40, 1, True, per_tensor=True)
    groups = matrix(qtype, 96, 40, 3, True, per_tensor=True)
    x, dy = normal(5, 96), normal(5, 40)
    for each in (w, groups):
        assert nmse(matmul(x, each, layout), x.astype(np.float64) @ each.values) <= FLOAT
        assert nmse(gradient(dy, each, layout), dy.astype(np.float64) @ each.values.T) <= FLOAT


@pytest.mark.parametrize("implementation", ["xla", "cuda_emulation"])
@pytest.mark.parametrize("qtype", TYPES)
def test_other_implementations(qtype, implementation):
    if implementation == "cuda_emulation":
        pytest.importorskip("jaxquant._core._cuda_emulation")
    for k, n, groups in ((64, 40, 1), (96, 33, 3), (30, 7, 3)):
        w = matrix(qtype, k, n, groups, True)
        x, dy = normal(9, k), normal(9, n)

        def everything(x, dy, w=w):
            return [
                (matmul(x[:rows], w, layout, implementation), gradient(dy[:rows], w, layout, implementation))
                for layout in LAYOUTS
                for rows in (1, 3, 9)
            ]

        for y, dx in jax.jit(everything)(x, dy):
            assert nmse(y, x[: len(y)].astype(np.float64) @ w.values) <= FLOAT
            assert nmse(dx, dy[: len(y)].astype(np.float64) @ w.values.T) <= FLOAT


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision(layout, dtype, implementation):
    w = matrix("int4", 256, 48, 2, True)
    x, dy = normal(9, 256).astype(dtype), normal(9, 48).astype(dtype)
    y, dx = matmul(x, w, layout, implementation), gradient(dy, w, layout, implementation)
    assert y.dtype == dtype and dx.dtype == dtype
    assert nmse(y, x.astype(np.float64) @ w.values) <= HALF
    assert nmse(dx, dy.astype(np.float64) @ w.values.T) <= HALF
    assert_same_bits(matmul(x.astype(np.float32), w, layout, implementation).astype(dtype), y)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("qtype", TYPES)
def test_activations_that_are_integers_give_exact_sums(qtype, layout):
    """Rows of the identity take out the dequantised weights themselves."""
    w = matrix(qtype, 130, 20, 2)
    eye = np.eye(130, dtype=np.float32)
    assert_same_bits(matmul(eye, w, layout), (w.codes * np.repeat(w.scale, 65, 0)).astype(np.float32))
    ones = matrix(qtype, 130, 20, 1, per_tensor=True)
    x = np.random.default_rng(0).integers(-50, 50, (4, 130)).astype(np.float32)
    assert_same_bits(matmul(x, ones, layout), ((x @ ones.codes).astype(np.float32) * ones.scale).astype(np.float32))


def test_large_and_small_activations():
    w = matrix("int8", 512, 33, 4, True)
    for size in (1e-30, 1e-20, 1e4, 1e20, 1e30):
        x = normal(3, 512) * np.float32(size)
        assert nmse(np.asarray(matmul(x, w), np.float64) / size, x.astype(np.float64) / size @ w.values) <= FLOAT
    x = normal(8, 512)
    x[:, ::64] *= 1000  # one large value in each span
    assert nmse(matmul(x, w), x.astype(np.float64) @ w.values) <= FLOAT
    # The largest magnitudes of a binade, where another digit would be due.
    x = np.nextafter(np.float32(2.0), np.float32(0)) * np.sign(normal(4, 512))
    assert nmse(matmul(x, w), x.astype(np.float64) @ w.values) <= FLOAT


def test_values_that_are_not_finite_stay_in_their_row():
    w, clean = matrix("int4", 256, 40, 2, True), normal(6, 256)
    x = clean.copy()
    x[1, 200], x[2, 0], x[4, 100] = np.nan, np.inf, -np.inf
    for layout in LAYOUTS:
        y = np.asarray(matmul(x, w, layout))
        assert np.isnan(y[[1, 2, 4]]).all()
        assert_same_bits(y[[0, 3, 5]], np.asarray(matmul(clean, w, layout))[[0, 3, 5]])


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_empty(implementation):
    for k, n, rows in ((0, 5, 3), (64, 0, 3), (64, 5, 0)):
        w = matrix("int4", k, n)
        for layout in LAYOUTS:
            assert_same_bits(matmul(normal(rows, k), w, layout, implementation), np.zeros((rows, n), np.float32))
            assert_same_bits(gradient(normal(rows, n), w, layout, implementation), np.zeros((rows, k), np.float32))


# ----------------------------------------------------------------------------------------------------------- transforms

K, N, GROUPS = 64, 24, 2


def product(x, data, scale, zero_point, *, weight, implementation=None):
    """x [m, k] with the operands of one matrix."""
    zero_point = zero_point[None] if zero_point.size else no_zero_point()
    operands = (x[None], data[None], scale[None], zero_point)
    return weight_only_matmul_p.bind(*operands, weight=weight, implementation=implementation)[0]


def stacked(size, layout, zero_point=True):
    """The operands of several matrices, and what product needs of them."""
    each = [matrix("int4", K, N, GROUPS, zero_point, seed=i) for i in range(size)]
    rows = [[a[0] if a.size else a for a in w.operands(layout)] for w in each]
    return [jnp.stack(a) for a in zip(*rows, strict=True)], each[0].weight(layout)


@pytest.mark.smoke
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap(layout):
    """Over each of rows and matrices and both, against a loop; the gradient as well."""
    operands, weight = stacked(3, layout)
    x, dy = jnp.asarray(normal(3, 5, K)), jnp.asarray(normal(3, 5, N))
    call = functools.partial(product, weight=weight)

    def back(dy, *operands):
        return jax.vjp(lambda x: call(x, *operands), jnp.zeros((5, K)))[1](dy)[0]

    for function, rows in ((call, x), (back, dy)):
        for over_x, over_w in ((True, False), (False, True), (True, True)):
            axes = (0 if over_x else None, *[0 if over_w else None] * 3)
            given = (rows if over_x else rows[0], *[a if over_w else a[0] for a in operands])
            out = jax.jit(jax.vmap(function, axes))(*given)
            for i in range(3):
                one = [a[i] if axis == 0 else a for a, axis in zip(given, axes, strict=True)]
                assert_same_bits(out[i], function(*one))
    scales = jax.vmap(call, (None, None, 0, None))(x[0], operands[0][0], operands[1], operands[2][0])
    assert_same_bits(scales[2], call(x[0], operands[0][0], operands[1][2], operands[2][0]))
    twice = jax.vmap(jax.vmap(call, (0, None, None, None)), (None, 0, 0, 0))(x, *operands)
    assert_same_bits(twice[1, 2], call(x[2], *[a[1] for a in operands]))
    last = jax.vmap(call, (2, None, None, None), 2)(jnp.moveaxis(x, 0, 2), *[a[0] for a in operands])
    assert_same_bits(last[:, :, 1], call(x[1], *[a[0] for a in operands]))


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_derivatives(layout, implementation):
    """In x, in the scale and in the zero point; forwards, backwards and twice: those of a dot in float64."""
    w = matrix("int4", K, N, GROUPS, True)
    data, scale, zero_point = (a[0] for a in w.operands(layout))
    x, dx = normal(5, K), normal(5, K, seed=3)
    ds, dz = normal(GROUPS, N, seed=4), normal(GROUPS, N, seed=5)
    call = functools.partial(product, weight=w.weight(layout), implementation=implementation)

    def smooth(x, scale, zero_point):
        spread = functools.partial(jnp.repeat, repeats=K // GROUPS, axis=0)
        return jnp.matmul(x, (w.codes - spread(zero_point)) * spread(scale), precision="highest")

    def ours(x, scale, zero_point):
        return call(x, data, scale, zero_point)

    primals, tangents = (x, scale, zero_point), (dx, ds, dz)
    for at in range(3):
        only = tuple(t if i == at else jnp.zeros_like(t) for i, t in enumerate(tangents))
        assert nmse(jax.jvp(ours, primals, only)[1], jax.jvp(smooth, primals, only)[1]) <= 1e-10
    loss = lambda f: lambda *operands: (f(*operands) ** 2).sum()  # noqa: E731
    for actual, expected in zip(
        jax.jit(jax.grad(loss(ours), (0, 1, 2)))(*primals), jax.grad(loss(smooth), (0, 1, 2))(*primals), strict=True
    ):
        assert nmse(actual, expected) <= 1e-10
    twice = [
        jax.jvp(jax.grad(loss(f), (0, 1, 2)), primals, tangents)[1] for f in (ours, smooth)
    ]  # the gradient kernel's own rules
    for actual, expected in zip(*twice, strict=True):
        assert nmse(actual, expected) <= 1e-9
    rematerialised = jax.grad(loss(jax.checkpoint(ours)))(*primals)
    assert_same_bits(rematerialised, jax.grad(loss(ours))(*primals))


@pytest.mark.smoke
def test_scan_over_layers():
    operands, weight = stacked(4, "prepared")
    x = jnp.asarray(normal(3, K))

    def layer(x, operands):
        return jnp.tanh(jnp.pad(product(x, *operands, weight=weight), ((0, 0), (0, K - N)))), None

    out = jax.jit(lambda x, operands: jax.lax.scan(layer, x, operands)[0])(x, operands)
    expected = x
    for i in range(4):
        expected = layer(expected, [a[i] for a in operands])[0]
    assert nmse(out, expected) <= 1e-12
    back = jax.jit(jax.grad(lambda x: jax.lax.scan(layer, x, operands)[0].sum()))(x)
    assert np.isfinite(np.asarray(back)).all() and np.asarray(back).any()


def test_one_x_for_all_matrices():
    """x with a batch of one, and its gradient, which is summed."""
    operands, weight = stacked(3, "plain")
    x = jnp.asarray(normal(1, 5, K))
    call = functools.partial(weight_only_matmul_p.bind, weight=weight, implementation=None)
    y, back = jax.vjp(lambda x: call(x, *operands), x)
    dy = jnp.asarray(normal(3, 5, N))
    each = [product(x[0], *[a[i] for a in operands], weight=weight) for i in range(3)]
    assert_same_bits(y, jnp.stack(each))
    expected = weight_only_gradient_p.bind(dy, *operands, weight=weight, implementation=None).sum(0, keepdims=True)
    assert_same_bits(back(dy)[0], expected)


@pytest.mark.smoke
def test_export():
    w = matrix("int4", K, N, GROUPS, True)
    x = jnp.asarray(normal(5, K))
    call = jax.jit(lambda x: matmul(x, w, "prepared"))
    module = jax.export.export(call, disabled_checks=jaxquant.export_checks())(x)
    assert_same_bits(jax.export.deserialize(module.serialize()).call(x), call(x))


# ------------------------------------------------------------------------------------------------------------- handlers


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"data": (1, 8, 4)}, "data: expected 1 matrices of 64 by 24 codes of 4 bits"),
        ({"scale": (1, 3, 24)}, "scale: expected"),
        ({"scale": (1, 2, 7)}, "scale: expected"),
        ({"zero_point": (1, 1, 24)}, "zero_point: expected shape"),
        ({"x": (2, 5, 64)}, "x: expected 1 or 1 along the first axis"),
        ({"bits": 3}, "bits: expected 8, 4 or 2"),
        ({"dtype": np.int32}, "x: expected float32, float16 or bfloat16"),
    ],
    ids=str,
)
def test_handlers_refuse_what_does_not_fit(changed, match):
    shapes = {"x": (1, 5, 64), "data": (1, 64, 12), "scale": (1, 2, 24), "zero_point": (1, 2, 24), **changed}
    dtypes = {"x": changed.get("dtype", np.float32), "data": np.uint8}
    operands = [jnp.zeros(shapes[name], dtypes.get(name, np.float32)) for name in ("x", "data", "scale", "zero_point")]
    call = jax.ffi.ffi_call("jaxquant_weight_only_matmul", jax.ShapeDtypeStruct((1, 5, 24), operands[0].dtype))
    attributes = {"bits": changed.get("bits", 4), "is_signed": 1, "prepared": 0}
    with pytest.raises(Exception, match=match):
        call(*operands, **{name: np.int64(value) for name, value in attributes.items()})


# ------------------------------------------------------------------------------------------------------------- sharding

ONE = {"all-reduce": 1}
# What is sharded: specs of x, of k and n of the matrix, of dy; collectives of product and gradient.
SHARDED = {
    "columns": (P(), (None, "a"), P(None, "a"), {}, ONE),
    "rows of w": (P(None, "a"), ("a", None), P(), ONE, {}),
    "rows": (P("a"), (None, None), P("a"), {}, {}),
    "rows and columns": (P("b"), (None, "a"), P("b", "a"), {}, ONE),
    "both of w": (P(None, "b"), ("b", "a"), P(None, "a"), ONE, ONE),
}
BIG = (256, 128, 8)


def placed_operands(mesh, w, layout, k_axis, n_axis):
    data, scale, zero_point = w.operands(layout)
    data_spec = P(None, n_axis, k_axis) if layout == "prepared" else P(None, k_axis, n_axis)
    scale_spec = P(None, k_axis, n_axis)
    return put(mesh, data_spec, data), put(mesh, scale_spec, scale), put(mesh, scale_spec, zero_point)


@pytest.mark.parametrize(
    "kind, implementation",
    [(AxisType.Auto, None), (AxisType.Explicit, None), (AxisType.Explicit, "xla")],
    ids=["auto", "explicit", "explicit xla"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sharded", SHARDED)
def test_sharding(sharded, layout, kind, implementation):
    xs, (k_axis, n_axis), ys, forward, backward = SHARDED[sharded]
    w, x, dy = matrix("int4", *BIG, True), normal(8, BIG[0]), normal(8, BIG[1])
    for primitive, rows, spec, expected in (
        (weight_only_matmul_p, x, xs, forward),
        (weight_only_gradient_p, dy, ys, backward),
    ):
        call = jax.jit(functools.partial(primitive.bind, weight=w.weight(layout), implementation=implementation))
        alone = call(jnp.asarray(rows)[None], *w.operands(layout))
        mesh = mesh_of((2, 2), kind)
        with jax.set_mesh(mesh):
            given = put(mesh, P(None, *spec), rows[None]), *placed_operands(mesh, w, layout, k_axis, n_axis)
            assert collectives(call, *given) == expected
            out = call(*given)
        if expected:
            assert nmse(out, alone) <= 1e-12
        else:
            assert_same_bits(out, alone)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_never_cut_what_belongs_together(layout):
    """Odd columns of packed codes, groups that a shard would cut: gathered or left whole, and right."""
    mesh = mesh_of((2, 2))
    for k, n, groups in ((64, 31, 1), (60, 24, 3), (64, 6, 1)):
        w, x = matrix("int4", k, n, groups), normal(4, k)
        call = jax.jit(functools.partial(weight_only_matmul_p.bind, weight=w.weight(layout), implementation=None))
        data, scale, zero_point = w.operands(layout)
        axes = [i for i in (1, 2) if data.shape[i] % 2 == 0]
        for axis in axes:
            placed = put(mesh, P(*[None] * axis, "a"), data)
            assert nmse(call(jnp.asarray(x)[None], placed, scale, zero_point), (x @ w.values)[None]) <= FLOAT


@pytest.mark.smoke
def test_shard_map():
    mesh = mesh_of((2, 2))
    w, x = matrix("int4", *BIG, True), normal(8, BIG[0])
    data, scale, zero_point = w.operands("prepared")
    columns = P(None, "a")

    def shard(x, data, scale, zero_point):
        weight = w.weight("prepared")._replace(n=BIG[1] // 2)
        return weight_only_matmul_p.bind(x, data, scale, zero_point, weight=weight, implementation=None)

    specs = (P(None, "b"), columns, P(None, None, "a"), P(None, None, "a"))
    call = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P(None, "b", "a")))
    operands = (jnp.asarray(x)[None], data, scale, zero_point)
    assert_same_bits(call(*operands)[0], matmul(x, w, "prepared"))
    assert collectives(call, *operands) == {}
