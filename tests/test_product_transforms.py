"""Products with quantised right operands: derivatives, transformations, sharding."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh_of, put
from oracle import assert_same_bits
from product_cases import GROUPS, K, M, N, close, normal, weight

from jaxquant import QArray, einsum, matmul, ragged_dot

MESH = (2, 2)
ONE = {"all-reduce": 1}


# --------------------------------------------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("lhs", [None, jnp.int8])
def test_gradients(lhs, prepared):
    w, exact = weight(K, N, grid=(GROUPS, N), qtype="int4")
    w = w.prepare() if prepared else w
    x, bias, dy, dot = normal(M, K), normal(N, seed=3), normal(M, N, seed=4), normal(M, K, seed=5)

    def call(x, bias):
        return matmul(x, w, lhs_qtype=lhs, bias=bias)

    dx, dbias = jax.jit(lambda x, b: jax.vjp(call, x, b)[1](dy))(x, bias)
    close(dx, dy.astype(np.float64) @ exact.T)
    close(dbias, dy.astype(np.float64).sum(0))
    y, tangent = jax.jvp(call, (x, bias), (dot, np.ones(N, np.float32)))
    assert_same_bits(y, call(x, bias))
    close(tangent, dot.astype(np.float64) @ exact + 1)
    (alone,) = jax.vjp(lambda b: call(x, b), bias)[1](dy)
    close(alone, np.asarray(dbias, np.float64))
    squared = jax.grad(lambda x: (call(x, bias) ** 2).sum() / 2)
    hessian = jax.jacobian(squared)(x)  # forward over reverse, and reverse over reverse
    for second in (hessian, jax.jacrev(squared)(x)):
        close(second[1, :, 1], exact @ exact.T)
        assert not np.asarray(second[1, :, 2]).any()
    scale = jax.grad(lambda w: matmul(x, w, lhs_qtype=lhs).sum(), allow_int=True)(w).scale
    assert not np.asarray(scale).any()  # a constant, as documented


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_half_precision(dtype):
    w, exact = weight(K, N)
    x, dy = jnp.asarray(normal(M, K), dtype), jnp.asarray(normal(M, N, seed=4), dtype)
    for lhs in (None, jnp.int8):
        (dx,) = jax.vjp(lambda x, lhs=lhs: matmul(x, w, lhs_qtype=lhs), x)[1](dy)
        assert dx.dtype == x.dtype
        close(dx, np.asarray(dy, np.float64) @ exact.T, 4 * float(jnp.finfo(dtype).eps))


# ----------------------------------------------------------------------------------------------------- transformations

CALLS = {
    "float": (lambda x, w, b: matmul(x, w, bias=b), (M, K), (K, N)),
    "int8": (lambda x, w, b: matmul(x, w, lhs_qtype=jnp.int8, bias=b), (M, K), (K, N)),
    "transposed": (lambda x, w, b: einsum("mk,nk->nm", x, w, bias=b), (M, K), (N, K)),
    "batch": (lambda x, w, b: matmul(x, w, lhs_qtype=jnp.int8, bias=b), (3, M, K), (3, K, N)),
    "ragged": (lambda x, w, b: ragged_dot(x, w, np.array([2, 3, 0])) + b, (M, K), (3, K, N)),
}
every_call = pytest.mark.parametrize("name", CALLS)


def examples(name, size):
    call, x_shape, w_shape = CALLS[name]
    seeds = range(size)
    return call, [
        (normal(*x_shape, seed=s), weight(*w_shape, qtype="int4", seed=s)[0], normal(N, seed=s + 50)) for s in seeds
    ]


def stack(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


@every_call
def test_vmap(name):
    """Every non-empty subset of operands has the bits of a loop; the gradients of single ones and of all do too."""
    call, each = examples(name, 3)
    plain, gradient = jax.jit(call), jax.jit(jax.grad(lambda *a: (call(*a) ** 2).sum(), (0, 2)))
    subsets = list(itertools.chain(*[itertools.combinations(range(3), r) for r in (1, 2, 3)]))
    problems = []
    for subset in subsets:
        axes = [0 if i in subset else None for i in range(3)]
        mixed = [tuple(e[i] if i in subset else each[0][i] for i in range(3)) for e in each]
        batch = [stack([m[i] for m in mixed]) if i in subset else each[0][i] for i in range(3)]
        problems += [(function, axes, batch, mixed) for function in (plain, gradient)[: 1 + (len(subset) != 2)]]
    every = jax.jit(lambda batches: [jax.vmap(f, a)(*b) for (f, a, _, _), b in zip(problems, batches, strict=True)])
    for results, (function, _, _, mixed) in zip(every([p[2] for p in problems]), problems, strict=True):
        expected = stack([function(*m) for m in mixed])
        for a, e in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            if function is plain:
                assert_same_bits(a, e)
            else:  # the loss's own sums are XLA's
                close(a, np.asarray(e, np.float64))


@pytest.mark.smoke
@every_call
def test_control_flow_and_remat(name):
    call, each = examples(name, 3)
    expected = stack([jax.jit(call)(*e) for e in each])
    assert_same_bits(jax.jit(lambda s: jax.lax.scan(lambda c, e: (c, call(*e)), 0, s)[1])(stack(each)), expected)
    with jax.disable_jit():
        close(call(*each[0]), expected[0].astype(np.float64))

    def loss(x, w, b):
        return (call(x, w, b) ** 2).sum()

    gradient = jax.jit(jax.grad(loss, (0, 2)))(*each[0])
    for policy in (None, jax.checkpoint_policies.everything_saveable):
        again = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 2)))(*each[0])
        jax.tree.map(lambda a, e: close(a, np.asarray(e, np.float64)), again, gradient)


def test_residuals_are_codes():
    """Nothing of the weights' size is kept in floating point."""
    w, _ = weight(3, K, N)
    x = normal(M, K)
    for call in (lambda x: matmul(x, w[0], lhs_qtype=jnp.int8), lambda x: matmul(x, w[0])):
        saved = jax.tree.leaves(jax.vjp(call, x)[1])
        assert all(leaf.dtype == np.int8 for leaf in saved if np.size(leaf) >= K * N), saved
    saved = jax.tree.leaves(jax.vjp(lambda x: ragged_dot(x, w, np.array([2, 3, 1])), x)[1])
    assert sum(np.size(leaf) for leaf in saved) < 2 * w.size


@pytest.mark.smoke
def test_export():
    w, _ = weight(K, N, qtype="int4")
    x = normal(M, K)
    for lhs in (None, jnp.int8):
        call = jax.jit(functools.partial(matmul, lhs_qtype=lhs, implementation="xla"))
        stored = jax.export.deserialize(jax.export.export(call)(x, w).serialize())
        assert_same_bits(stored.call(x, w), call(x, w))


# ------------------------------------------------------------------------------------------------------------ sharding

# Specs of x and w; collectives of both products, of their gradients; specs of y and of dx.
PLACES = {
    "rows": (P("a"), P(), {}, {}, {}, P("a")),
    "columns": (P(), P(None, "a"), {}, {}, ONE, P(None, "a")),
    "rows and columns": (P("b"), P(None, "a"), {}, {}, ONE, P("b", "a")),
    "contracted": (P(None, "a"), P("a"), ONE, {"all-reduce": 2}, {}, P()),
}


KINDS = [(AxisType.Auto, None), (AxisType.Explicit, None), (AxisType.Explicit, "xla")]


@pytest.mark.parametrize("kind, implementation", KINDS, ids=["auto", "explicit", "explicit xla"])
@pytest.mark.parametrize("place", PLACES)
def test_sharding(place, kind, implementation):
    """One device's bits, but in sums over shards of floats; no collective but these sums and the largest magnitudes."""
    xs, ws, of_floats, of_integers, of_gradient, ys = PLACES[place]
    mesh, product = mesh_of(MESH, kind), functools.partial(matmul, implementation=implementation)
    x, (w, _), dy = normal(8, K), weight(K, N), normal(8, N, seed=4)
    scale_spec = P(*[e if m != 1 else None for e, m in zip((*ws, None, None), w.scale.shape, strict=False)])
    placed = QArray(put(mesh, ws, w.data), put(mesh, scale_spec, w.scale), None, w.qtype, w.qmin, w.qmax)
    with jax.set_mesh(mesh):
        for lhs, expected in ((None, of_floats), (jnp.int8, of_integers)):
            call = jax.jit(functools.partial(product, lhs_qtype=lhs))
            y = call(put(mesh, xs, x), placed)
            assert collectives(call, put(mesh, xs, x), placed) == expected
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, ys), 2)
            if lhs is None and (implementation or place == "contracted"):
                close(y, np.asarray(matmul(x, w), np.float64))
            else:
                assert_same_bits(y, matmul(x, w, lhs_qtype=lhs))
            back = jax.jit(lambda x, w, dy, lhs=lhs: jax.vjp(lambda x: product(x, w, lhs_qtype=lhs), x)[1](dy)[0])
            operands = put(mesh, xs, x), placed, put(mesh, ys, dy)
            close(back(*operands), np.asarray(dy, np.float64) @ np.asarray(w.dequantize(), np.float64).T)
            assert collectives(back, *operands) == of_gradient


@pytest.mark.smoke
@pytest.mark.parametrize("manual", [{"a", "b"}, {"a"}], ids=["full", "partly"])
def test_shard_map(manual):
    mesh = mesh_of(MESH)
    x, (w, exact), dy = normal(8, K), weight(K, N), normal(8, N, seed=4)
    for lhs in (None, jnp.int8):

        def back(x, w, dy, lhs=lhs):
            y, vjp = jax.vjp(lambda x: matmul(x, w, lhs_qtype=lhs), x)
            return y, vjp(dy)[0]

        mapped = jax.shard_map(
            back, mesh=mesh, in_specs=(P("a"), P(), P("a")), out_specs=(P("a"), P("a")), axis_names=manual
        )
        y, dx = jax.jit(mapped)(x, w, dy)
        close(y, np.asarray(matmul(x, w, lhs_qtype=lhs), np.float64))
        close(dx, dy.astype(np.float64) @ exact.T)
