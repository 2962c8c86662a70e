"""The dense layer trained on integers: forward in bits beside NumPy and beside inference, gradients beside NumPy in
float64 and beside fake_quantize."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh_of, put
from oracle import assert_same_bits

import jaxquant
from jaxquant import PerAxis, PerToken, QArray, QParams, matmul, qat_dense

M, K, N, GROUPS = 6, 32, 12, 4
X_SCALES = {"rows": None, "given": np.float32(0.013)}
W_SCALES = {
    "columns": None,
    "tensor": np.float32(0.011),
    "given": np.linspace(0.005, 0.02, N, dtype=np.float32),
    "groups": np.linspace(0.005, 0.02, GROUPS * N, dtype=np.float32).reshape(GROUPS, N),
    "rows of groups": np.linspace(0.005, 0.02, GROUPS, dtype=np.float32).reshape(GROUPS, 1),
}
LARGEST = {"int8": 127, "int4": 7, "int2": 1}
# Sums of a few dozen products in f32, in another order than NumPy's in f64.
F32 = 2e-6


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(actual, expected, tolerance=F32):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(initial=0), 1e-30))


def codes_of(a, scale, axis, qtype):
    """NumPy: codes in int64, scale of two axes, and which elements were in range."""
    if scale is None:
        largest = np.abs(a.astype(np.float32)).max(axis, keepdims=True)
        scale = np.where(largest > 0, largest / np.float32(LARGEST[qtype]), 1).astype(np.float32)
    scale = np.asarray(scale, np.float32)
    scale = scale.reshape(1, -1) if scale.ndim < 2 else scale
    full = np.repeat(scale, a.shape[0] // scale.shape[0], 0)
    rounded = np.rint(a.astype(np.float32) / full)
    low, high = oracle.RANGES[qtype]
    inside = (rounded >= low) & (rounded <= high)
    return np.clip(rounded, low, high).astype(np.int64), scale, np.broadcast_to(full, a.shape), inside


def forward(x, w, bias=None, x_scale=None, w_scale=None, w_qtype="int8"):
    """An operation at a time, in the documented order."""
    qx, sx, _, _ = codes_of(x, x_scale, 1, "int8")
    qw, sw, _, _ = codes_of(w, w_scale, 0, w_qtype)
    size, t = K // sw.shape[0], None
    for g in range(sw.shape[0]):
        part = slice(g * size, (g + 1) * size)
        term = (qx[:, part] @ qw[part]).astype(np.float32) * sw[g]
        t = term if t is None else t + term
    y = t * sx
    return y if bias is None else y + bias


def gradients(dy, x, w, x_scale=None, w_scale=None, w_qtype="int8"):
    """dx, dw, dbias and the scales' by the table, in float64."""
    dy = np.asarray(dy, np.float64)
    results, values = {}, {}
    for name, a, scale, axis, qtype in (("x", x, x_scale, 1, "int8"), ("w", w, w_scale, 0, w_qtype)):
        values[name] = codes_of(a, scale, axis, qtype)
    exact = {name: q * full.astype(np.float64) for name, (q, _, full, _) in values.items()}
    upstream = {"x": dy @ exact["w"].T, "w": exact["x"].T @ dy}
    for name, a in (("x", x), ("w", w)):
        q, scale, full, inside = values[name]
        t = a.astype(np.float32) / full
        terms = upstream[name] * np.where(inside, np.rint(t) - t.astype(np.float64), q)
        rows = scale.shape[0]
        if scale.shape[1] == 1:
            terms = terms.sum(1, keepdims=True)
        results[name] = np.where(inside, upstream[name], 0)
        results[f"{name}_scale"] = terms.reshape(rows, -1, terms.shape[1]).sum(1)
    return results | {"bias": dy.sum(0)}


def operands(seed=1):
    """Some of x and w lie outside the ranges of the given scales."""
    return normal(M, K, seed=seed), normal(K, N, seed=seed + 10), normal(N, seed=seed + 20)


# -------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("w_qtype, implementation", [*((w_qtype, None) for w_qtype in LARGEST), ("int4", "xla")])
@pytest.mark.parametrize("w_scale", W_SCALES)
@pytest.mark.parametrize("x_scale", X_SCALES)
def test_forward(x_scale, w_scale, w_qtype, implementation):
    """NumPy's bits, and those of inference with the very same parameters."""
    x, w, bias = operands()
    sx, sw = X_SCALES[x_scale], W_SCALES[w_scale]
    call = functools.partial(qat_dense, x_scale=sx, w_scale=sw, w_qtype=w_qtype, implementation=implementation)
    y = jax.jit(call)(x, w, bias)
    assert_same_bits(y, forward(x, w, bias, sx, sw, w_qtype))
    assert_same_bits(call(x, w), forward(x, w, None, sx, sw, w_qtype))
    if sw is None:
        wq = jaxquant.dynamic_quantize(w, PerAxis(1), qtype=w_qtype)
    else:
        scale = jnp.asarray(sw).reshape(sw.shape if sw.ndim == 2 else (1, -1))
        block = tuple(-1 if m == 1 else n // m for n, m in zip(w.shape, scale.shape, strict=True))
        codes = jaxquant.quantize(w, scale, block_shape=block, qtype=w_qtype)
        wq = QArray.from_codes(codes, scale, qtype=w_qtype)
    if sx is None:
        inference = [matmul(x, q, lhs_qtype=jnp.int8, bias=bias) for q in (wq, wq.prepare())]
    else:
        xq = QArray.from_codes(jaxquant.quantize(x, sx), sx)
        inference = [matmul(xq, q, bias=bias) for q in (wq, wq.prepare())]
    for other in inference:
        assert_same_bits(other, y)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    x, w, bias = (jnp.asarray(a, dtype) for a in operands())
    wide = [np.asarray(a, np.float32) for a in (x, w, bias)]
    y = qat_dense(x, w, bias)
    assert_same_bits(y, forward(*wide).astype(x.dtype))
    mixed = qat_dense(x, wide[1], wide[2])  # parameters in float32
    assert mixed.dtype == x.dtype
    dy = jnp.asarray(normal(M, N, seed=4), dtype)
    for args in ((x, w, bias), (x, wide[1], wide[2])):
        got = jax.vjp(qat_dense, *args)[1](dy)
        assert [g.dtype for g in got] == [a.dtype for a in args]
        expected = gradients(dy, *wide[:2])
        for g, name in zip(got, ("x", "w", "bias"), strict=True):
            close(g, expected[name], 4 * float(jnp.finfo(dtype).eps))


def test_parameters_as_one_value():
    x, w, _ = operands()
    params = jaxquant.choose_qparams(w, PerAxis(1), qtype=jnp.int4)
    codes = jaxquant.quantize(w, params, packed=True)
    wq = QArray(codes, params.scale, None, params.qtype, params.qmin, params.qmax, (N,))
    y = qat_dense(x, w, w_scale=params)
    assert_same_bits(y, matmul(x, wq, lhs_qtype=jnp.int8))
    assert_same_bits(y, qat_dense(x, w, w_qtype=jnp.int4))
    of_x = QParams(jnp.float32(0.02), qmin=-100, qmax=100)
    fake = jaxquant.fake_quantize(x, of_x).astype(np.float64) @ np.asarray(wq.dequantize(), np.float64)
    close(qat_dense(x, w, x_scale=of_x, w_scale=params), fake)


def test_shapes():
    x, w, bias = operands()
    for lead in ((), (1,), (2, 3), (0,), (2, 0)):
        rows = normal(*lead, K)
        y = qat_dense(rows, w, bias)
        assert y.shape == (*lead, N)
        if rows.size:
            assert_same_bits(y.reshape(-1, N), forward(rows.reshape(-1, K), w, bias))
        gradient = jax.grad(lambda *a: qat_dense(*a).sum(), (0, 1, 2))(rows, w, bias)
        assert [g.shape for g in gradient] == [rows.shape, w.shape, bias.shape]
        assert rows.size or not np.asarray(gradient[1]).any()
    assert_same_bits(qat_dense(np.zeros((M, 0), np.float32), np.zeros((0, N), np.float32), bias), np.stack([bias] * M))
    assert qat_dense(x, np.zeros((K, 0), np.float32)).shape == (M, 0)


def test_values_that_are_not_finite():
    """Saturate by sign, NaN as 0, in their own row alone; gradients stay finite where the upstream is."""
    x, w, _ = operands()
    x[1, 2], x[1, 3], x[1, 4] = np.inf, -np.inf, np.nan
    finite = x.copy()
    finite[1, 2:5] = 0
    scale = np.abs(finite[1]).max() / np.float32(127)
    finite[1, 2:5] = 127 * scale, -127 * scale, 0
    assert_same_bits(qat_dense(x, w), forward(finite, w))
    for dx, dw in (
        jax.grad(lambda *a: qat_dense(*a).sum(), (0, 1))(x, w),
        jax.grad(lambda *a: qat_dense(*a, x_scale=0.01).sum(), (0, 1))(x, w),
    ):
        assert np.isfinite(dx).all() and np.isfinite(dw).all()
    assert not np.asarray(dx)[1, 2:5].any()  # a given scale clips them
    zeros = np.zeros_like(x)
    assert not np.asarray(qat_dense(zeros, w)).any()


# ----------------------------------------------------------------------------------------------------------- gradients


def all_gradients(call, sx, sw):
    """As functions of (dy, x, w, bias, and the scales that are given)."""

    def function(dy, x, w, bias, sx, sw):
        given = {name: s for name, s in (("x_scale", sx), ("w_scale", sw)) if s is not None}

        def loss(x, w, bias, given):
            return call(x, w, bias, **given)

        dx, dw, dbias, of_scales = jax.vjp(loss, x, w, bias, given)[1](dy)
        return {"x": dx, "w": dw, "bias": dbias, **of_scales}

    return jax.jit(function)


@pytest.mark.parametrize("w_qtype", LARGEST)
@pytest.mark.parametrize("w_scale", W_SCALES)
@pytest.mark.parametrize("x_scale", X_SCALES)
def test_gradients(x_scale, w_scale, w_qtype):
    """By the table in float64, and those of fake_quantize with the same scales."""
    (x, w, bias), dy = operands(), normal(M, N, seed=4)
    sx, sw = X_SCALES[x_scale], W_SCALES[w_scale]
    arguments = (dy, x, w, bias, sx, sw)
    got = all_gradients(functools.partial(qat_dense, w_qtype=w_qtype), sx, sw)(*arguments)
    exact = gradients(dy, x, w, sx, sw, w_qtype)

    def composed(x, w, bias, x_scale=None, w_scale=None):
        if x_scale is None:
            x_scale = jaxquant.choose_qparams(x, PerToken()).scale
        if w_scale is None:
            w_scale = jaxquant.choose_qparams(w, PerAxis(1), qtype=w_qtype).scale
        w_scale = w_scale if jnp.ndim(w_scale) == 2 else jnp.reshape(w_scale, (1, -1))
        block = tuple(-1 if m == 1 else n // m for n, m in zip(w.shape, w_scale.shape, strict=True))
        return (
            jaxquant.fake_quantize(x, x_scale) @ jaxquant.fake_quantize(w, w_scale, block_shape=block, qtype=w_qtype)
            + bias
        )

    fake = all_gradients(composed, sx, sw)(*arguments)
    assert got.keys() == fake.keys()
    for name, value in got.items():
        close(value, fake[name])
        close(value, exact[name].reshape(value.shape), 5e-6)


def test_each_gradient_alone():
    """Whatever else is differentiated, and whether a scale is learned or constant."""
    (x, w, bias), dy = operands(), normal(M, N, seed=4)
    for sx, sw in ((None, None), (X_SCALES["given"], W_SCALES["given"]), (None, W_SCALES["groups"])):
        every = (x, w, bias, sx, sw)
        given = [i for i, a in enumerate(every) if a is not None]

        def some(indices, every=every):
            def call(*chosen):
                a = [chosen[indices.index(i)] if i in indices else every[i] for i in range(5)]
                return qat_dense(a[0], a[1], a[2], x_scale=a[3], w_scale=a[4])

            return jax.jit(lambda: jax.vjp(call, *(every[i] for i in indices))[1](dy))()

        together = dict(zip(given, some(given), strict=True))
        for size in range(1, len(given)):
            for indices in itertools.combinations(given, size):
                for i, g in zip(indices, some(indices), strict=True):
                    close(g, together[i], 1e-6)


def test_second_derivatives_are_refused():
    x, w, _ = operands()

    def loss(x):
        return (qat_dense(x, w) ** 2).sum()

    for call in (jax.hessian(loss), jax.jacrev(jax.grad(loss)), lambda x: jax.jvp(jax.grad(loss), (x,), (x,))):
        with pytest.raises(NotImplementedError, match=r"qat_dense: no second derivatives.*fake_quantize"):
            call(x)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (x,), (x,))


def held(function, *operands):
    """Bytes handed to the backward."""
    saved = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], *operands))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in saved)


def test_memory():
    """What the documentation says, for bfloat16 4096 x 1024 @ 1024 x 1024."""
    m, k, n = 4096, 1024, 1024
    x, w = jax.ShapeDtypeStruct((m, k), jnp.bfloat16), jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
    one, each = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.float32)
    codes, scales = m * k + k * n, 4 * (m + n)
    assert held(qat_dense, x, w) == codes + scales
    assert held(functools.partial(qat_dense, w_qtype=jnp.int4), x, w) == m * k + k * n // 2 + scales
    constant = functools.partial(qat_dense, x_scale=np.float32(0.1), w_scale=np.float32(0.1))
    assert held(constant, x, w) <= codes + codes // 8 + 64 < 6 * 2**20
    learned = held(lambda x, w, sx, sw: qat_dense(x, w, x_scale=sx, w_scale=sw), x, w, one, each)
    assert learned <= 2 * codes + scales
    assert held(lambda x: qat_dense(x, jnp.zeros(w.shape, w.dtype)), x) == k * n + 4 * n  # w is frozen
    assert held(lambda x, w: x @ w, x, w) == 2 * codes


# ----------------------------------------------------------------------------------------------------- transformations

CALLS = {
    "dynamic": lambda x, w, b, sx, sw: qat_dense(x, w, b),
    "learned": lambda x, w, b, sx, sw: qat_dense(x, w, b, x_scale=sx, w_scale=sw, w_qtype=jnp.int4),
    "constant": lambda x, w, b, sx, sw: qat_dense(x, w, b, x_scale=0.01, w_scale=W_SCALES["groups"]),
}
every_call = pytest.mark.parametrize("name", CALLS)


def examples(size):
    return [(*operands(seed=i), np.float32(0.01 + i / 1e3), W_SCALES["given"] * np.float32(1 + i)) for i in range(size)]


def both(call):
    """Value and gradients."""

    def function(*a):
        y, vjp = jax.vjp(call, *a)
        return y, vjp(y)

    return function


def stack(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


@every_call
def test_vmap(name):
    """Every operand alone, pairs with x, and all: values of a loop in bits, gradients up to the order of XLA's sums."""
    each, call = examples(3), CALLS[name]
    one = jax.jit(both(call))
    for subset in ((0,), (1,), (2,), (3,), (4,), (0, 1), (0, 3), (0, 4), (0, 1, 2, 3, 4)):
        axes = [0 if i in subset else None for i in range(5)]
        mixed = [tuple(e[i] if i in subset else each[0][i] for i in range(5)) for e in each]
        batch = [stack([m[i] for m in mixed]) if i in subset else each[0][i] for i in range(5)]
        y, gradient = jax.jit(jax.vmap(both(call), axes))(*batch)
        expected, expected_gradient = stack([one(*m) for m in mixed])
        assert_same_bits(y, expected)
        jax.tree.map(lambda a, e: close(a, e, 5e-6), gradient, expected_gradient)


@pytest.mark.smoke
@every_call
def test_control_flow_and_remat(name):
    each, call = examples(3), CALLS[name]
    one = jax.jit(both(call))
    expected, expected_gradient = stack([one(*e) for e in each])
    y, gradient = jax.jit(lambda s: jax.lax.scan(lambda c, e: (c, both(call)(*e)), 0, s)[1])(stack(each))
    assert_same_bits(y, expected)
    jax.tree.map(lambda a, e: close(a, e, 5e-6), gradient, expected_gradient)

    def loss(*a):
        return (call(*a) ** 2).sum() / 2

    def through_scan(*a):
        return jax.lax.scan(lambda c, _: (c + loss(*a), None), jnp.float32(0), None, 1)[0]

    for changed in (jax.checkpoint(loss), through_scan, lambda *a: jax.lax.cond(a[0].sum() < 1e9, loss, loss, *a)):
        again = jax.jit(jax.grad(changed, range(5)))(*each[0])
        jax.tree.map(lambda a, e: close(a, e[0], 5e-6), again, expected_gradient)


def test_training_lowers_the_loss():
    x, target = normal(64, K), normal(64, N, seed=5) / 4
    p = {"w": normal(K, N, seed=2) / 8, "b": np.zeros(N, np.float32), "sx": np.float32(0.02), "sw": np.float32(0.05)}

    def loss(p):
        y = qat_dense(x, p["w"], p["b"], x_scale=p["sx"], w_scale=p["sw"], w_qtype=jnp.int4)
        return ((y - target) ** 2).mean()

    step = jax.jit(lambda p: jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(loss)(p)))
    first = float(loss(p))
    for _ in range(60):
        p = step(p)
    assert float(loss(p)) < 0.6 * first and float(p["sw"]) != 0.05


# ------------------------------------------------------------------------------------------------------------ sharding

# Specs of x and w; of y; all-reduces forward (of products, and of the largest magnitudes of rows and columns together).
PLACES = {
    "rows": (P("a"), P(), P("a"), 0),
    "columns": (P(), P(None, "a"), P(None, "a"), 0),
    "rows and columns": (P("b"), P(None, "a"), P("b", "a"), 0),
    "contracted": (P(None, "a"), P("a"), P(), 2),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("place", PLACES)
def test_sharding(place, kind):
    """One device's bits: sums over shards are of integers."""
    xs, ws, ys, sums = PLACES[place]
    mesh = mesh_of((2, 2), kind)
    x, w, bias = normal(8, K), normal(K, N, seed=2), normal(N, seed=3)
    with jax.set_mesh(mesh):
        placed = put(mesh, xs, x), put(mesh, ws, w), put(mesh, P(*ys[1:2]), bias)
        call = jax.jit(qat_dense)
        y = call(*placed)
        assert_same_bits(y, forward(x, w, bias))
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, ys), 2)
        assert collectives(call, *placed) == ({"all-reduce": sums} if sums else {})
        given = jax.jit(functools.partial(qat_dense, x_scale=np.float32(0.01), w_scale=np.float32(0.01)))
        assert_same_bits(given(*placed), forward(x, w, bias, np.float32(0.01), np.float32(0.01)))
        assert collectives(given, *placed) == ({"all-reduce": 1} if sums else {})
        back = jax.jit(lambda dy, *a: jax.vjp(qat_dense, *a)[1](dy))
        dy = normal(8, N, seed=4)
        exact = gradients(dy, x, w)
        for got, name, spec in zip(
            back(put(mesh, ys, dy), *placed), ("x", "w", "bias"), (xs, ws, ys[1:2]), strict=True
        ):
            close(got, exact[name])
            if kind == AxisType.Explicit:
                assert got.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), got.ndim)


@pytest.mark.smoke
@pytest.mark.parametrize("manual", [{"a", "b"}, {"a"}], ids=["full", "partly"])
def test_shard_map(manual):
    """Each shard its rows; gradients of what is replicated are summed."""
    mesh = mesh_of((2, 2))
    x, w, bias = normal(8, K), normal(K, N, seed=2), normal(N, seed=3)
    sx, sw = np.float32(0.01), W_SCALES["given"]

    def loss(w, bias, sx, sw, x, learned):
        mapped = jax.shard_map(
            lambda x, w, b, sx, sw: qat_dense(x, w, b, **({"x_scale": sx, "w_scale": sw} if learned else {})),
            mesh=mesh, in_specs=(P("a"), P(), P(), P(), P()), out_specs=P("a"), axis_names=manual,
        )  # fmt: skip
        y = mapped(x, w, bias, sx, sw)
        return (y**2).sum() / 2, y

    for learned in (False, True):
        keywords = {"x_scale": sx, "w_scale": sw} if learned else {}
        (_, y), got = jax.jit(jax.value_and_grad(loss, range(4), has_aux=True), static_argnums=5)(
            w, bias, sx, sw, x, learned
        )
        expected = forward(x, w, bias, **keywords)
        close(y, expected)
        exact = gradients(expected, x, w, **keywords)
        for g, name in zip(got[: 4 if learned else 2], ("w", "bias", "x_scale", "w_scale"), strict=False):
            close(g, exact[name].reshape(g.shape), 5e-6)


# -------------------------------------------------------------------------------------------------------------- errors

X, W, BIAS = operands()
SCALE = jnp.float32(0.1)
ERRORS = [
    ("x", TypeError, lambda: qat_dense(X.astype(int), W), "x: expected one of float32"),
    ("w", TypeError, lambda: qat_dense(X, W.astype(np.int8)), "w: expected one of float32"),
    ("w's rank", ValueError, lambda: qat_dense(X, W[0]), "w: expected shape .k, n."),
    ("k", ValueError, lambda: qat_dense(X[:, 1:], W), r"x: expected 32 values .* got shape \(6, 31\)"),
    ("scalar", ValueError, lambda: qat_dense(X[0, 0], W), "x: expected 32 values"),
    ("bias", ValueError, lambda: qat_dense(X, W, BIAS[1:]), r"bias: expected floating, shape \(12,\)"),
    ("integer bias", ValueError, lambda: qat_dense(X, W, BIAS.astype(int)), "bias: expected floating"),
    ("x_qtype", TypeError, lambda: qat_dense(X, W, x_qtype=jnp.int4), "x_qtype: expected one of int8"),
    ("w_qtype", TypeError, lambda: qat_dense(X, W, w_qtype=jnp.uint8), "w_qtype: expected one of int8, int4, int2"),
    ("x_scale", ValueError, lambda: qat_dense(X, W, x_scale=jnp.ones(M)), "x_scale: expected one scale"),
    ("integer scale", TypeError, lambda: qat_dense(X, W, w_scale=jnp.ones(N, int)), "w_scale: expected floating"),
    ("w_scale", ValueError, lambda: qat_dense(X, W, w_scale=jnp.ones(5)), r"w_scale: expected a scalar, .* got \(5,\)"),
    ("groups", ValueError, lambda: qat_dense(X, W, w_scale=jnp.ones((5, N))), r"w_scale: expected .* got \(5, 12\)"),
    ("zero point", NotImplementedError, lambda: qat_dense(X, W, x_scale=QParams(SCALE, 3)), "x_scale.*zero point"),
    ("two types", ValueError, lambda: qat_dense(X, W, w_scale=QParams(SCALE), w_qtype=jnp.int4), "expected that of"),
    ("implementation", ValueError, lambda: qat_dense(X, W, implementation="gpu"), "implementation"),
]  # fmt: skip


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case[0])
def test_errors(case):
    _, kind, call, message = case
    with pytest.raises(kind, match=re.compile(f"qat_dense: .*{message}", re.S)):
        call()
