"""Products with quantised right operands: values beside NumPy's in float64, bit for bit where they are of integers."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_same_bits
from product_cases import GROUPS, K, M, N, close, normal, weight

from jaxquant import PerGroup, PerTensor, QArray, dot_general, dynamic_quantize, einsum, ggml, matmul, ragged_dot

QTYPES = ("int8", "uint8", "int4", "uint4", "int2")
GRIDS = {"tensor": (1, 1), "columns": (1, N), "groups": (GROUPS, N), "groups alone": (GROUPS, 1), "boxes": (2, 3)}


def integers(x, w, bias=None):
    """What lhs_qtype=int8 gives for x [m, k] in float32, an operation at a time; w has scales of columns or groups."""
    scale_x = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    codes = np.rint(x / scale_x).astype(np.int64)
    q, scale = np.asarray(w.qvalue).astype(np.int64), np.asarray(w.scale)
    zero = np.zeros(scale.shape, np.int64) if w.zero_point is None else np.asarray(w.zero_point).astype(np.int64)
    size = K // scale.shape[0]
    t = None
    for g in range(scale.shape[0]):
        part = slice(g * size, (g + 1) * size)
        term = (codes[:, part] @ (q[part] - zero[g])).astype(np.float32) * scale[g]
        t = term if t is None else t + term
    y = t * scale_x
    return y if bias is None else y + bias


# -------------------------------------------------------------------------------------------------------------- values


# jax.numpy compiles for long, and is the same code for every code type.
MATMULS = [
    (qtype, grid, zero_point, implementation)
    for qtype, grid, zero_point, implementation in itertools.product(QTYPES, GRIDS, (False, True), (None, "xla"))
    if implementation is None or (qtype == QTYPES[0] and zero_point)
]


@pytest.mark.parametrize("qtype, grid, zero_point, implementation", MATMULS)
def test_matmul(qtype, grid, zero_point, implementation):
    w, exact = weight(K, N, grid=GRIDS[grid], qtype=qtype, zero_point=zero_point)
    x, bias = normal(M, K), normal(N, seed=3)
    call = functools.partial(matmul, implementation=implementation)
    close(jax.jit(call)(x, w), x.astype(np.float64) @ exact)
    close(call(x, w, bias=bias), x.astype(np.float64) @ exact + bias)
    y, with_bias = jax.jit(lambda x, w: [call(x, w, lhs_qtype=jnp.int8, bias=b) for b in (None, bias)])(x, w)
    if grid == "boxes":
        w = QArray.from_codes(
            w.qvalue, *(np.repeat(a, 4, 1) for a in (w.scale, w.zero_point) if a is not None), qtype=qtype
        )
    assert_same_bits(y, integers(x, w))
    assert_same_bits(with_bias, integers(x, w, bias))
    close(y, x.astype(np.float64) @ exact, 0.03)


@pytest.mark.parametrize("lhs", [None, jnp.int8])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes(dtype, lhs):
    w, exact = weight(K, N)
    x = jnp.asarray(normal(M, K), dtype)
    wide = np.asarray(x, np.float64) @ exact
    y = matmul(x, w, lhs_qtype=lhs)
    assert y.dtype == x.dtype
    close(y, wide, 4 * float(jnp.finfo(dtype).eps) + (0.03 if lhs else 0))
    y32 = matmul(x, w, lhs_qtype=lhs, preferred_element_type=jnp.float32)
    assert y32.dtype == jnp.float32
    if lhs is None:
        close(y32, wide)
    else:
        assert_same_bits(y32, integers(np.asarray(x, np.float32), w))
        assert_same_bits(y, np.asarray(y32).astype(x.dtype))
    narrow = matmul(x.astype(jnp.float32), w, lhs_qtype=lhs, preferred_element_type=dtype)
    assert narrow.dtype == jnp.dtype(dtype)


def test_double_and_wide_codes(x64):
    """By the dequantised matrix, in x's own type."""
    w, exact = weight(K, N, grid=(GROUPS, N))
    x = normal(M, K).astype(np.float64)
    close(matmul(x, w), x @ exact, 1e-15)
    wide, exact = weight(K, N, qtype="int16")
    close(matmul(x, wide, bias=np.ones(N)), x @ exact + 1, 1e-14)
    close(matmul(x.astype(np.float32), wide), x.astype(np.float32).astype(np.float64) @ exact)


SHAPES = [
    ((K,), (K, N)), ((K,), (K,)), ((M, K), (K,)), ((3, M, K), (K, N)), ((2, 3, M, K), (K, N)), ((3, M, K), (3, K, N)),
    ((M, K), (3, K, N)), ((K,), (3, K, N)), ((1, M, K), (3, K, N)), ((2, 1, M, K), (3, K, N)), ((3, M, K), (1, K, N)),
    ((M, K), (1, 1, K, N)), ((2, 3, M, K), (3, K, N)), ((0, K), (K, N)), ((M, 0), (0, N)), ((M, K), (K, 0)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_matmul_has_the_shapes_of_numpy(shapes):
    x, (w, exact) = normal(*shapes[0]), weight(*shapes[1])
    expected = np.matmul(x.astype(np.float64), exact)
    close(matmul(x, w), expected)
    close(matmul(x, w, lhs_qtype=jnp.int8), expected, 0.04)
    if len(shapes[1]) > 1:
        assert_same_bits(matmul(x, w.prepare()), matmul(x, w))
        assert_same_bits(matmul(x, w.prepare(), lhs_qtype=jnp.int8), matmul(x, w, lhs_qtype=jnp.int8))


@pytest.mark.parametrize("grid", [(1, 1, N), (3, GROUPS, 1), (3, 1, 1)], ids=str)
def test_scales_of_leading_axes(grid):
    w, exact = weight(3, K, N, grid=grid, qtype="int4", zero_point=True)
    for x in (normal(M, K), normal(3, M, K), normal(2, 3, M, K)):
        close(matmul(x, w), np.matmul(x.astype(np.float64), exact))


def test_quantised_left_operand():
    w, exact = weight(K, N, grid=(GROUPS, N))
    for shape in ((M, K), (2, M, K)):
        x = normal(*shape)
        q = dynamic_quantize(x)
        assert_same_bits(matmul(q, w), matmul(x, w, lhs_qtype=jnp.int8))
        assert matmul(q, w, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16
    q = dynamic_quantize(normal(3, M, K), PerTensor(), qtype=jnp.uint8, symmetric=False)
    close(matmul(q, w), np.asarray(q.dequantize(), np.float64) @ exact)
    stack, exact = weight(3, K, N)
    q = dynamic_quantize(normal(3, M, K))
    close(matmul(q, stack), np.asarray(q.dequantize(), np.float64) @ exact)
    close(matmul(q[0], stack), np.asarray(q[0].dequantize(), np.float64) @ exact)


NUMBERS = [
    ((4, 5, 8), (8, 3), (((2,), (0,)), ((), ()))),
    ((8, 5), (3, 8), (((0,), (1,)), ((), ()))),
    ((4, 5, 8), (3, 5, 8), (((2, 1), (2, 1)), ((), ()))),
    ((2, 5, 8), (2, 8, 3), (((2,), (1,)), ((0,), (0,)))),
    ((5, 8, 2), (8, 3, 2), (((1,), (0,)), ((2,), (2,)))),
    ((5, 8), (8, 3, 4), (((1,), (0,)), ((), ()))),
    ((5, 4, 8), (4, 8, 6), (((1, 2), (0, 1)), ((), ()))),
    ((5,), (8, 3), (((), ()), ((), ()))),
    ((5, 8), (3, 8), (((-1,), (-1,)), ((), ()))),
]


@pytest.mark.slow
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_dot_general(numbers):
    """Every grid that divides w's axes: scales follow where axes are merged, moved or cut into blocks."""
    x_shape, w_shape, dimensions = numbers
    x, ranks = normal(*x_shape), (len(x_shape), len(w_shape))
    grids = itertools.product(*[sorted({1, n, n // 2 if n % 2 == 0 else n}) for n in w_shape])
    forward = jax.jit(lambda x, w: dot_general(x, w, dimensions))
    for i, grid in enumerate(grids):
        w, exact = weight(*w_shape, grid=grid, qtype=("int8", "int4")[i % 2], zero_point=i % 3 == 0)
        positive = tuple(tuple(tuple(d % n for d in a) for a, n in zip(p, ranks, strict=True)) for p in dimensions)
        with jax.enable_x64(True):
            expected = np.asarray(jax.lax.dot_general(x.astype(np.float64), exact, positive))
        close(forward(x, w), expected)
        if i % 5 == 0:
            close(dot_general(x, w, dimensions, lhs_qtype=jnp.int8), expected, 0.05)


SPECS = [
    ("mk,kn->mn", (M, K), (K, N)), ("...k,kn->...n", (2, M, K), (K, N)), ("...k,nk->...n", (2, M, K), (N, K)),
    ("bmk,bkn->bmn", (2, M, K), (2, K, N)), ("mk,kn->nm", (M, K), (K, N)), ("bsd,dhk->bshk", (2, 3, 8), (8, 4, 5)),
    ("bshk,hkd->bsd", (2, 3, 4, 8), (4, 8, 5)), ("mk,kn", (M, K), (K, N)), ("...mk,...kn", (2, 3, 4), (2, 4, 5)),
    (" b e m k , e k n -> b m e n ", (2, 3, 4, 8), (3, 8, 5)), ("k,k->", (K,), (K,)), ("k,kn->n", (K,), (K, N)),
    ("...mk,kn->m...n", (2, 3, M, K), (K, N)),
]  # fmt: skip


@pytest.mark.parametrize("case", SPECS, ids=lambda case: case[0])
def test_einsum(case):
    spec, x_shape, w_shape = case
    x, (w, exact) = normal(*x_shape), weight(*w_shape)
    expected = np.einsum(spec, x.astype(np.float64), exact)
    close(einsum(spec, x, w), expected)
    close(einsum(spec, x, w, lhs_qtype=jnp.int8), expected, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("lhs", [None, jnp.int8])
@pytest.mark.parametrize("sizes", [(2, 0, 9, 1), (0, 0, 0, 0), (0, 15, 0, 0), (3, 3, 3, 3), (20, 1, 1, 1)], ids=str)
def test_ragged_dot(sizes, lhs, monkeypatch):
    monkeypatch.setattr("jaxquant.affine.products.ROWS", 4)
    w, _ = weight(4, K, N, grid=(4, GROUPS, N), qtype="int4")
    x = normal(15, K)
    y = jax.jit(lambda *a: ragged_dot(*a, lhs_qtype=lhs))(x, w, np.array(sizes, np.int32))
    ends = np.minimum(np.cumsum(sizes), 15)
    for g, (start, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
        assert_same_bits(y[start:end], matmul(x[start:end], w[g], lhs_qtype=lhs))
    assert not np.asarray(y[ends[-1] :]).any()
    dy = normal(15, N, seed=4)
    (dx,) = jax.jit(lambda *a: jax.vjp(lambda x: ragged_dot(x, *a[1:], lhs_qtype=lhs), a[0])[1](dy))(
        x, w, np.array(sizes)
    )
    for g, (start, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
        close(dx[start:end], dy[start:end].astype(np.float64) @ np.asarray(w[g].dequantize(), np.float64).T)
    assert not np.asarray(dx[ends[-1] :]).any()


def test_ragged_dot_of_nothing():
    w, _ = weight(4, K, N)
    assert ragged_dot(np.zeros((0, K), np.float32), w, np.zeros(4, np.int32)).shape == (0, N)
    none = QArray.from_codes(np.zeros((0, K, N), np.int8), 0.5)
    assert not np.asarray(ragged_dot(normal(3, K), none, np.zeros(0, np.int32))).any()


def test_ordinary_right_operands():
    """Go where they went before."""
    x, w = normal(M, K), normal(K, N, seed=5)
    assert_same_bits(matmul(x, w), jnp.matmul(x, w))
    assert_same_bits(matmul(x, w, bias=np.ones(N)), jnp.matmul(x, w) + 1)
    numbers = (((1,), (0,)), ((), ()))
    for keywords in ({}, {"precision": "highest", "preferred_element_type": jnp.float32}):
        assert_same_bits(dot_general(x, w, numbers, **keywords), jax.lax.dot_general(x, w, numbers, **keywords))
    assert_same_bits(einsum("mk,kn->nm", x, w), jnp.einsum("mk,kn->nm", x, w))
    sizes = np.array([2, 4], np.int32)
    assert_same_bits(ragged_dot(x, w[None].repeat(2, 0), sizes), jax.lax.ragged_dot(x, w[None].repeat(2, 0), sizes))


@pytest.mark.parametrize("lhs", [None, jnp.int8])
def test_block_formats(lhs):
    """Along their last axis, as ggml.linear has it."""
    x, w = normal(2, M, 64), ggml.quantize(normal(3, N, 64, seed=6), "Q8_0")
    expected = ggml.linear(x, w[0], lhs_qtype=lhs)
    assert_same_bits(einsum("...k,nk->...n", x, w[0], lhs_qtype=lhs), expected)
    bias = normal(N, seed=7)
    numbers = (((2,), (1,)), ((), ()))
    assert_same_bits(dot_general(x, w[0], numbers, lhs_qtype=lhs, bias=bias), np.asarray(expected) + bias)
    y = dot_general(x, w[0], numbers, None, jnp.bfloat16, lhs_qtype=lhs)
    assert_same_bits(y, np.asarray(expected).astype(y.dtype))
    each = np.stack([ggml.linear(normal(M, 64), w[i], lhs_qtype=lhs) for i in range(3)])
    assert_same_bits(einsum("bmk,bnk->bmn", np.stack([normal(M, 64)] * 3), w, lhs_qtype=lhs), each)
    sizes = np.array([1, 3, 2], np.int32)
    assert_same_bits(ragged_dot(x[0], w, sizes, lhs_qtype=lhs), ggml.ragged_linear(x[0], w, sizes, lhs_qtype=lhs))


# -------------------------------------------------------------------------------------------------------------- errors

X, (W, _) = normal(M, K), weight(K, N)
STACK, Q8 = weight(3, K, N)[0], ggml.quantize(normal(N, 64), "Q8_0")
ERRORS = [
    ("integers", TypeError, lambda: matmul(np.ones((M, K), np.int32), W), "matmul: x: expected one of float32"),
    ("scalar", ValueError, lambda: matmul(np.float32(1), W), "matmul: x: expected at least one axis"),
    ("k", ValueError, lambda: matmul(X[:, :5], W), "matmul: x: expected 32 values along the last axis, got"),
    ("lead", ValueError, lambda: matmul(normal(2, M, K), STACK), r"w: expected leading axes .*\(2,\), got \(3,\)"),
    ("lhs", TypeError, lambda: matmul(X, W, lhs_qtype=jnp.int4), "matmul: lhs_qtype: expected jnp.int8 or None"),
    ("result", TypeError, lambda: matmul(X, W, preferred_element_type=jnp.int32), "_element_type: expected one"),
    ("bias", ValueError, lambda: matmul(X, W, bias=np.ones(3)), r"matmul: bias: expected shape \(12,\), got \(3,\)"),
    ("bias of integers", TypeError, lambda: matmul(X, W, bias=np.ones(N, int)), "bias: expected a floating array"),
    ("block formats", ValueError, lambda: matmul(X, Q8), "matmul: w: expected a matrix .*QTensor.*ggml.linear"),
    ("quantised x", TypeError, lambda: matmul(dynamic_quantize(X), X.T), "w: expected a QArray where x is"),
    ("int8 of floats", TypeError, lambda: matmul(X, X.T, lhs_qtype=jnp.int8), "w: expected a QArray where x is"),
    ("grouped x", ValueError, lambda: matmul(dynamic_quantize(X, PerGroup(8)), W), "x: expected one scale"),
    ("16 bits", NotImplementedError, lambda: matmul(X, weight(K, N, qtype="int16")[0], lhs_qtype=jnp.int8), "int16"),
    ("numbers", ValueError, lambda: dot_general(X, W, ((1,), (0,))), "dimension_numbers: expected"),
    ("axes", ValueError, lambda: dot_general(X, W, (((2,), (0,)), ((), ()))), "different axes of x"),
    ("twice", ValueError, lambda: dot_general(X, W, (((1, 1), (0, 1)), ((), ()))), "different axes of x"),
    ("sizes", ValueError, lambda: dot_general(X, W, (((0,), (0,)), ((), ()))), "x: expected contracted axes"),
    ("prepared", ValueError, lambda: einsum("mk,nk->mn", X[:, :N], W.prepare()), "w: expected axes .* prepared"),
    ("rows of blocks", ValueError, lambda: einsum("mk,kn->mn", normal(M, N), Q8), "einsum: w: expected a QTensor"),
    ("operands", NotImplementedError, lambda: einsum("mk->k", X, W), "'mk->k'.*two operands"),
    ("summed", NotImplementedError, lambda: einsum("mk,kn->m", X, W), "summed over w alone"),
    ("diagonal", NotImplementedError, lambda: einsum("mm,mn->n", X[:, :M], W), "twice in x"),
    ("broadcast", NotImplementedError, lambda: einsum("...mk,...kn", normal(1, M, K), STACK), "ellipsis broadcasts"),
    ("rank", ValueError, lambda: einsum("mk,kn->mn", X[0], W), "spec: expected 1 indices"),
    ("new index", ValueError, lambda: einsum("mk,kn->mz", X, W), "spec: expected indices of the operands"),
    ("spec", TypeError, lambda: einsum(X, W, W), "spec: expected a string"),
    ("letters", ValueError, lambda: einsum("m1,1n->mn", X, W), "spec: expected letters"),
    ("ragged", ValueError, lambda: ragged_dot(X, W, np.ones(3, int)), "x, w: expected"),
    ("group sizes", ValueError, lambda: ragged_dot(X, STACK, np.ones(2, int)), "group_sizes: expected 3 integers"),
    ("quantised rows", TypeError, lambda: ragged_dot(dynamic_quantize(X), STACK, np.ones(3, int)), "floating"),
    ("implementation", ValueError, lambda: matmul(X, W, implementation="gpu"), "implementation"),
]  # fmt: skip


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case[0])
def test_errors(case):
    _, kind, call, message = case
    with pytest.raises(kind, match=re.compile(message, re.S)):
        call()


def test_double_activations_are_not_quantised(x64):
    with pytest.raises(TypeError, match="float64"):
        matmul(normal(M, K).astype(np.float64), W, lhs_qtype=jnp.int8)
