"""Integer products under JAX's transformations and on several devices."""

import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import matmul_oracle as oracle
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh_of, put
from oracle import assert_same_bits
from test_int_matmul import Problem, codes

import jaxquant
from jaxquant.affine.int_matmul import scaled_matmul

SIZE = 3
both = pytest.mark.parametrize("implementation", ["ffi", "xla"])


# ------------------------------------------------------------------------------------------------------------ batching


@pytest.mark.slow
@both
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("batched", [False, True], ids=["matrices", "stacks"])
def test_vmap_of_int_matmul(axes, batched, implementation):
    rng = np.random.default_rng(0)
    shapes = ((2, 4, 7), (2, 7, 5)) if batched else ((4, 7), (7, 5))
    examples = [[codes(rng, t, *s) for _ in range(SIZE)] for t, s in zip((np.int8, np.uint8), shapes, strict=True)]
    operands = [e[0] if d is None else np.stack(e, d) for e, d in zip(examples, axes, strict=True)]
    f = functools.partial(jaxquant.int_matmul, implementation=implementation)
    actual = jax.jit(jax.vmap(f, axes))(*operands)
    for i in range(SIZE):
        a, b = (e[0] if d is None else e[i] for e, d in zip(examples, axes, strict=True))
        np.testing.assert_array_equal(actual[i], oracle.int_matmul(a, b))


SUBSETS = [(i,) for i in range(7)] + [(0, 1, 2), (3, 4, 5), (0, 6), (1, 4), tuple(range(7))]


@both
@pytest.mark.parametrize(("b", "one_a", "per_token"), [(1, False, True), (2, False, False), (2, True, True)])
def test_vmap_of_scaled_matmul(b, one_a, per_token, implementation):
    """Each operand alone and some together: the bits of a loop."""
    problems = [
        Problem("int8", b, 4, 24, 18, 3, zero_a=True, zero_w=True, bias=True, one_a=one_a, per_token=per_token, seed=s)
        for s in range(SIZE)
    ]
    for subset in SUBSETS if implementation == "ffi" else SUBSETS[-1:]:
        operands = [
            np.stack([p.logical[i] for p in problems]) if i in subset else problems[0].logical[i] for i in range(7)
        ]
        axes = [0 if i in subset else None for i in range(7)]
        f = functools.partial(problems[0].call, implementation=implementation, dtype="bfloat16")
        actual = jax.jit(jax.vmap(f, axes))(*operands)
        for j in range(SIZE):
            chosen = [problems[j if i in subset else 0].logical[i] for i in range(7)]
            assert_same_bits(actual[j], oracle.scaled_matmul(*chosen, dtype="bfloat16"))


def test_rows_do_not_depend_on_the_batch():
    """One row at a time, a few, all: the kernels of each number of rows give the same bits."""
    p = Problem("int8", m=21, k=96, n=70, groups=3, zero_a=True, zero_w=True, bias=True)
    expected = p.expected()
    for prepared, rows in itertools.product((False, True), (1, 2, 3, 4, 5, 7, 8, 9, 15, 16)):
        o = list(p.operands(prepared))
        for i in range(3):
            o[i] = np.asarray(o[i])[:, :rows]
        assert_same_bits(p.call(*o, prepared=prepared), expected[:, :rows])


# ----------------------------------------------------------------------------------------------- other transformations


@pytest.mark.smoke
@both
def test_scan_remat_and_gradients(implementation):
    rng = np.random.default_rng(1)
    a, b = codes(rng, np.int8, 6, 4, 8), codes(rng, np.int8, 8, 5)
    f = functools.partial(jaxquant.int_matmul, implementation=implementation)
    _, scanned = jax.lax.scan(lambda c, x: (c, jax.checkpoint(f)(x, b)), 0, a)
    np.testing.assert_array_equal(scanned, oracle.int_matmul(a, b))
    out, tangent = jax.jvp(lambda a: f(a, b), (a,), (np.zeros(a.shape, jax.dtypes.float0),))
    np.testing.assert_array_equal(out, oracle.int_matmul(a, b))
    assert tangent.dtype == jax.dtypes.float0
    # Scales of a loss around it are differentiable.
    gradient = jax.grad(lambda s: (f(a[0], b).astype(jnp.float32) * s).sum())(jnp.float32(2))
    assert gradient == oracle.int_matmul(a[0], b).sum()


@pytest.mark.smoke
def test_derivatives_in_scales_and_bias():
    """Linear in each: the product with the tangent in its place."""
    p = Problem("int8", b=2, m=3, k=24, n=10, groups=2, zero_a=True, zero_w=True, bias=True)
    q = Problem("int8", b=2, m=3, k=24, n=10, groups=2, zero_a=True, zero_w=True, bias=True, seed=1)
    o, t = p.operands(False), q.operands(False)
    expected = 0
    for i, keep in ((1, 6), (4, 6)):
        changed = [t[j] if j == i else None if j == keep else x for j, x in enumerate(o)]
        expected = expected + oracle.scaled_matmul(*changed)
    expected = expected + t[6]

    def f(a_scale, w_scale, bias):
        return p.call(o[0], a_scale, o[2], o[3], w_scale, o[5], bias)

    y, dy = jax.jvp(f, (o[1], o[4], o[6]), (t[1], t[4], t[6]))
    assert_same_bits(y, p.expected())
    np.testing.assert_allclose(dy, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_export(implementation):
    rng = np.random.default_rng(2)
    a, b = codes(rng, np.uint8, 4, 8), codes(rng, np.int8, 8, 5)
    f = jax.jit(functools.partial(jaxquant.int_matmul, implementation=implementation))
    checks = jaxquant.export_checks() if implementation == "ffi" else ()
    exported = jax.export.export(f, disabled_checks=checks)(a, b)
    back = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(back.call(a, b), oracle.int_matmul(a, b))


# ------------------------------------------------------------------------------------------------------------ sharding

INTEGER_LAYOUTS = [  # a, b, result, collectives
    (P("a"), P(), P("a"), {}),
    (P(), P(None, "b"), P(None, "b"), {}),
    (P("a"), P(None, "b"), P("a", "b"), {}),
    (P(("a", "b")), P(), P(("a", "b")), {}),
    (P(None, "a"), P("a"), P(), {"all-reduce": 1}),
    (P("a", "b"), P("b"), P("a"), {"all-reduce": 1}),
]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("layout", INTEGER_LAYOUTS, ids=lambda layout: f"{layout[0]} {layout[1]}")
def test_sharded_int_matmul(layout, kind):
    mesh = mesh_of((2, 4), kind)
    rng = np.random.default_rng(3)
    a, b = codes(rng, np.int8, 16, 24), codes(rng, np.uint8, 24, 32)
    f = jax.jit(functools.partial(jaxquant.int_matmul, implementation="ffi"))
    with jax.set_mesh(mesh):
        x, y = put(mesh, layout[0], a), put(mesh, layout[1], b)
        out = f(x, y)
        assert collectives(f, x, y) == layout[3]
    assert out.sharding.spec == P(*layout[2]) or out.sharding.is_equivalent_to(put(mesh, layout[2], out).sharding, 2)
    np.testing.assert_array_equal(jax.device_get(out), oracle.int_matmul(a, b))


def scaled_case(groups, prepared, qtype="int8"):
    return Problem(qtype, m=16, k=128, n=64, groups=groups, zero_a=True, zero_w=True, bias=True), prepared


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["int8", "int4"])
@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("where", ["rows", "columns", "both", "k"])
def test_sharded_scaled_matmul(where, groups, prepared, qtype):
    mesh = mesh_of((2, 4))
    p, _ = scaled_case(groups, prepared, qtype)
    m = "a" if where in ("rows", "both") else None
    n = "b" if where in ("columns", "both") else None
    k = "b" if where == "k" else None
    of_groups = k if groups > 1 else None
    specs = (P(None, m, k), P(None, m), P(None, m), P(None, n, k) if prepared else P(None, k, n),
             P(None, of_groups, n), P(None, of_groups, n), P(n))  # fmt: skip
    operands = [put(mesh, s, o) for s, o in zip(specs, p.operands(prepared), strict=True)]
    f = jax.jit(functools.partial(p.call, prepared=prepared))
    out = f(*operands)
    assert collectives(f, *operands) == ({"all-reduce": 1} if where == "k" else {})
    assert out.sharding.is_equivalent_to(put(mesh, P(None, m, n), out).sharding, 3)
    if where == "k" and groups > 1:
        # Partial sums in floating point: another order.
        np.testing.assert_allclose(out, p.expected(), rtol=1e-5, atol=1e-5 * np.abs(p.expected()).max())
    else:
        assert_same_bits(out, p.expected())


def test_sharded_prepare():
    mesh = mesh_of((2, 4))
    rng = np.random.default_rng(4)
    c = codes(rng, np.int8, 64, 128)
    w = jaxquant.QArray.from_codes(c, 0.5)
    f = jax.jit(lambda w: w.prepare(implementation="ffi"))
    for spec, result in ((P("a"), P(None, "a")), (P(None, "b"), P("b")), (P("a", "b"), P("b", "a"))):
        sharded = jaxquant.QArray(put(mesh, spec, c), w.scale, None, "int8", -128, 127)
        out = f(sharded)
        assert collectives(f, sharded) == {}
        assert out.data.sharding.is_equivalent_to(put(mesh, result, out.data).sharding, 3)
        np.testing.assert_array_equal(out.data, oracle.prepare(c[None], 8)[0])
        back = jax.jit(lambda w: w.plain(implementation="ffi"))
        assert collectives(back, out) == {}
        np.testing.assert_array_equal(back(out).data, c)


@pytest.mark.smoke
def test_shard_map():
    mesh = mesh_of((2, 4))
    p, _ = scaled_case(4, True)
    specs = (P(None, "a"), P(None, "a"), P(None, "a"), P(None, "b"), P(None, None, "b"), P(None, None, "b"), P("b"))

    def f(*operands):
        return scaled_matmul(
            *operands, bits=8, signed=True, n=p.n // 4, prepared=True, dtype="float32", implementation="ffi"
        )

    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(None, "a", "b")))
    operands = [put(mesh, s, o) for s, o in zip(specs, p.operands(True), strict=True)]
    assert_same_bits(mapped(*operands), p.expected())
    assert collectives(mapped, *operands) == {}
