"""Products with block-quantised matrices against float64 products with the reference library's weights.

What is promised in bits (a batch, a layout, an expert) is compared with calls on single rows.
"""

import functools

import ggml_oracle as oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxquant import ggml

ROWS, TOKENS = 9, 11  # one group of eight rows and one left over; no multiple of any tile
INT8, SPIKES, FLOAT, HALF = 1e-4, 2e-4, 1e-10, 1e-5  # normalised mean squared errors
LHS = {"int8": jnp.int8, "float": None}
# One of each way to multiply: codes with and without offsets, groups of 32 and of 16, lattices, ternary, FP4, floats.
FEW = ["F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ2_S", "IQ4_XS", "TQ1_0", "NVFP4"]


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.cache
def weights(name, *shape, seed=2):
    values = normal(*shape, seed=seed)
    imatrix = (values.reshape(-1, shape[-1]) ** 2).mean(0) + 1e-3 if ggml.formats[name].requires_imatrix else None
    return ggml.quantize(values, name, imatrix=imatrix)


def sizes(name):
    """One block, three blocks, and many."""
    block = ggml.formats[name].block_size
    return (block, 3 * block, 1024)


def bound(name, lhs, otherwise=INT8):
    return otherwise if lhs == "int8" and not ggml.formats[name].is_float else FLOAT


def linear64(x, w):
    return oracle.linear(x, np.asarray(w.data), w.format.name)


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("name", ggml.formats)
def test_every_format(name):
    """Values, batches, both layouts, experts and the gradient, in both modes, for rows of one block to many."""
    ids = np.array([[0, 0], [1, -1], [1, 0]], np.int32)

    def everything(x, w, experts, dy):
        results = {}
        for label, lhs in LHS.items():
            call = functools.partial(ggml.linear, lhs_qtype=lhs)
            results[label] = {
                "batch": call(x, w),
                "rows": jnp.stack([call(x[i], w) for i in (0, 3, TOKENS - 1)]),
                "some rows": call(x[2:7], w),
                "prepared": call(x, w.prepare()),
                "prepared row": call(x[3], w.prepare()),
                "moe": ggml.moe_linear(x[:3, None], experts, ids, lhs_qtype=lhs),
                "moe prepared": ggml.moe_linear(x[:3, None], experts.prepare(), ids, lhs_qtype=lhs),
                "dx": jax.vjp(lambda x: call(x, w), x)[1](dy)[0],  # noqa: B023
            }
        results["dx"] = {
            "prepared": jax.vjp(lambda x: ggml.linear(x, w.prepare()), x)[1](dy)[0],
            "moe": jax.vjp(lambda x: ggml.moe_linear(x, experts, ids), x[:3, None])[1](dy[:6].reshape(3, 2, ROWS))[0],
        }
        return results

    cases = []
    for k in sizes(name):
        w, x, dy = weights(name, ROWS, k), normal(TOKENS, k), normal(TOKENS, ROWS, seed=3)
        experts = ggml.QTensor(jnp.stack([w.data, weights(name, ROWS, k, seed=4).data]), name)
        cases.append((x, w, experts, dy))
    for (x, w, experts, dy), results in zip(
        cases, jax.jit(lambda cs: [everything(*c) for c in cs])(cases), strict=True
    ):
        expected, dx = linear64(x, w), oracle.linear_dx(dy, np.asarray(w.data), name)
        stacked = np.asarray(experts.data)
        for label in LHS:
            r = results[label]
            assert oracle.nmse(r["batch"], expected) <= bound(name, label)
            assert_same_bits(r["rows"], r["batch"][np.array([0, 3, TOKENS - 1])])
            assert_same_bits(r["some rows"], r["batch"][2:7])
            assert_same_bits(r["prepared"], r["batch"])
            assert_same_bits(r["prepared row"], r["batch"][3])
            assert_same_bits(r["moe"][0], np.stack([r["batch"][0]] * 2))
            assert_same_bits(r["moe"][2, 1], r["batch"][2])
            assert not np.asarray(r["moe"][1, 1]).any()
            assert oracle.nmse(r["moe"], oracle.moe_linear(x[:3, None], stacked, ids, name)) <= bound(name, label)
            assert_same_bits(r["moe prepared"], r["moe"])
            assert oracle.nmse(r["dx"], dx) <= FLOAT
            assert_same_bits(r["dx"], results["int8"]["dx"])
        assert_same_bits(results["dx"]["prepared"], results["int8"]["dx"])
        moe_dx = oracle.moe_linear(dy[:6].reshape(3, 2, ROWS), stacked, ids, name, transpose=True).sum(1, keepdims=True)
        assert oracle.nmse(results["dx"]["moe"], moe_dx) <= FLOAT


@functools.partial(jax.jit, static_argnames="lhs")
def product(x, w, lhs):
    return ggml.linear(x, w, lhs_qtype=LHS[lhs])


@pytest.mark.parametrize("lhs", LHS)
@pytest.mark.parametrize("name", ggml.formats)
def test_one_large_value_in_a_block(name, lhs):
    """A value of 100 sigma in 256: blocks of 32 keep the damage small."""
    x = normal(32, 1024).reshape(32, 4, 256)
    x[..., 77] = 100 * np.sign(x[..., 77])
    x, w = x.reshape(32, 1024), weights(name, ROWS, 1024)
    assert oracle.nmse(product(x, w, lhs), linear64(x, w)) <= bound(name, lhs, SPIKES)


@pytest.mark.parametrize("lhs", LHS)
@pytest.mark.parametrize("name", FEW)
def test_large_and_small_activations(name, lhs):
    """No sum of a block leaves its type."""
    w = weights(name, ROWS, 1024)
    x = np.concatenate([np.abs(normal(4, 1024)) * size for size in (1e4, 1e5, 1e6, 1e-6, 1e30)])
    y, expected = np.asarray(product(x, w, lhs)), linear64(x, w)
    assert np.isfinite(y).all()
    for i in range(0, len(x), 4):
        assert oracle.nmse(y[i : i + 4], expected[i : i + 4]) <= bound(name, lhs)


@pytest.mark.parametrize("lhs", LHS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", FEW)
def test_half_precision(name, dtype, lhs):
    w, x, dy = weights(name, ROWS, 1024), normal(TOKENS, 1024).astype(dtype), normal(TOKENS, ROWS).astype(dtype)

    def both(x, w, dy):
        y, backward = jax.vjp(lambda x: ggml.linear(x, w, lhs_qtype=LHS[lhs]), x)
        return y, backward(dy)[0], ggml.linear(x[4], w.prepare(), lhs_qtype=LHS[lhs])

    y, dx, row = jax.jit(both)(x, w, dy)
    assert y.dtype == dtype and dx.dtype == dtype
    assert oracle.nmse(y, linear64(x, w)) <= max(bound(name, lhs), HALF)
    assert oracle.nmse(dx, oracle.linear_dx(dy, np.asarray(w.data), name)) <= HALF
    assert_same_bits(row, y[4])


@pytest.mark.parametrize("lhs", LHS)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (5, 1), (0, 7), (3, 0), (2, 7), (33, 65)])
def test_sizes(name, tokens, rows, lhs):
    x, w = normal(tokens, 512), weights(name, rows, 512)
    y = product(x, w, lhs)
    assert y.shape == (tokens, rows)
    # The usual size of a product in place of its own: one may happen to be small.
    values = oracle.dequantize(np.asarray(w.data), name).astype(np.float64)
    usual = (x.astype(np.float64) ** 2).sum() * (values**2).sum() / 512
    assert ((y - linear64(x, w)) ** 2).sum() <= 10 * bound(name, lhs) * usual
    assert_same_bits(product(x, w.prepare(), lhs), y)
    for i in range(min(tokens, 3)):
        assert_same_bits(product(x[i], w, lhs), y[i])


@pytest.mark.parametrize("lhs", LHS)
def test_no_columns(lhs):
    for name in FEW:
        empty = ggml.QTensor.zeros((8, 0), name)
        for w in (empty, empty.prepare()):
            assert_same_bits(product(np.zeros((3, 0), np.float32), w, lhs), np.zeros((3, 8), np.float32))


@pytest.mark.parametrize("lhs", LHS)
@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q4_K"])
def test_more_tokens_than_16_bits_count(name, lhs):
    k = ggml.formats[name].block_size
    x, w = np.resize(normal(977, k), (65536 + 41, k)), weights(name, 3, k)
    y = np.asarray(product(x, w, lhs))
    assert oracle.nmse(y, linear64(x, w)) <= bound(name, lhs)
    assert_same_bits(y[-977:], product(x[-977:], w, lhs))
    ids = np.zeros((len(x), 1), np.int32)
    experts = ggml.QTensor(w.data[None], name)
    assert_same_bits(ggml.moe_linear(x[:, None], experts, ids, lhs_qtype=LHS[lhs])[:, 0], y)


@pytest.mark.parametrize("lhs", LHS)
@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q4_K", "IQ3_S"])
def test_leading_axes(name, lhs):
    w, x = weights(name, ROWS, 512), normal(2, 3, 4, 512)
    flat = product(x.reshape(24, 512), w, lhs)
    assert_same_bits(product(x, w, lhs), np.asarray(flat).reshape(2, 3, 4, ROWS))
    assert_same_bits(product(x[1, 2, 3], w, lhs), flat[23])
    assert product(x[:, :0], w, lhs).shape == (2, 0, 4, ROWS)


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("lhs", LHS)
@pytest.mark.parametrize("name", FEW)
def test_values_that_are_not_finite_stay_in_their_row(name, lhs, prepared):
    w = weights(name, ROWS, 512)
    w = w.prepare() if prepared else w
    clean = normal(20, 512)
    x = clean.copy()
    x[1, 500], x[2, 0], x[4, 300] = np.nan, np.inf, -np.inf
    y = np.asarray(product(x, w, lhs))
    others = [i for i in range(20) if i not in (1, 2, 4)]
    assert_same_bits(y[others], np.asarray(product(clean, w, lhs))[others])
    assert np.isnan(y[1]).all()
    if lhs == "int8" and not w.format.is_float:
        assert np.isnan(y[[2, 4]]).all()
    else:  # infinities times weights, as anybody multiplies them
        assert not np.isfinite(y[[2, 4]]).any()


@pytest.mark.parametrize("lhs", LHS)
@pytest.mark.parametrize("name", FEW)
def test_zeros(name, lhs):
    """Rows of zeros, and zeros among others, give zeros."""
    w, x = weights(name, ROWS, 512), normal(3, 512)
    x[1], x[2, 64:] = 0, 0
    y = np.asarray(product(x, w, lhs))
    assert not y[1].any()
    assert oracle.nmse(y[2], linear64(x[2], w)) <= 10 * bound(name, lhs)
    assert not np.asarray(product(x, ggml.QTensor.zeros((ROWS, 512), name), lhs)).any()


@pytest.mark.parametrize("lhs", LHS)
@pytest.mark.parametrize("name", FEW)
def test_values_that_flush_to_zero_would_lose(name, lhs):
    """Subnormal activations: kernels compute as IEEE 754 says, whatever XLA's threads do."""
    w = ggml.quantize(normal(ROWS, 512) * 1e3, name)
    tiny = normal(5, 512) * np.float32(1e-37) * np.float32(0.02)
    assert np.abs(tiny).max() < np.finfo(np.float32).tiny
    y = np.asarray(product(tiny, w, lhs), np.float64)
    assert oracle.nmse(y * 2.0**120, linear64(tiny, w) * 2.0**120) <= INT8
    dx = jax.jit(lambda x, w, dy: jax.vjp(lambda x: ggml.linear(x, w), x)[1](dy)[0])(tiny, w, tiny[:, :ROWS])
    expected = oracle.linear_dx(tiny[:, :ROWS], np.asarray(w.data), name)
    assert oracle.nmse(np.asarray(dx, np.float64) * 2.0**120, expected * 2.0**120) <= 1e-9


# -------------------------------------------------------------------------------------------------------------- experts

MOE = [(2, 2, 9), (40, 3, 5), (9, 1, 1), (65, 2, 3)]  # tokens, top_k, experts


def some_ids(tokens, top_k, experts):
    """Duplicates within a token, none at all, experts that nobody uses."""
    ids = np.random.default_rng(5).integers(-1, experts, (tokens, top_k)).astype(np.int32)
    ids[0], ids[-1, -1] = ids[0, 0] % experts, -1
    return np.where(ids == 2, 0, ids)


@functools.partial(jax.jit, static_argnames="lhs")
def moe(x, w, ids, lhs):
    return ggml.moe_linear(x, w, ids, lhs_qtype=LHS[lhs])


@pytest.mark.parametrize("size", MOE, ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "by slot"])
@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q6_K"])
def test_experts(name, shared, size):
    """Against float64, and in every bit against linear with the expert of each row."""
    tokens, top_k, experts = size
    x, ids = normal(tokens, 1 if shared else top_k, 256), some_ids(*size)
    w = weights(name, experts, 7, 256)
    each = [np.broadcast_to(x, (tokens, top_k, 256))[ids == e] for e in range(experts)]
    for lhs in LHS:
        y = np.asarray(moe(x, w, ids, lhs))
        assert oracle.nmse(y, oracle.moe_linear(x, np.asarray(w.data), ids, name)) <= bound(name, lhs)
        for e in range(experts):
            assert_same_bits(y[ids == e], product(each[e], w[e], lhs))
        assert_same_bits(y[ids == -1], np.zeros_like(y[ids == -1]))
    dy = normal(tokens, top_k, 7)
    dx = jax.jit(lambda x, w, dy: jax.vjp(lambda x: ggml.moe_linear(x, w, ids), x)[1](dy)[0])(x, w, dy)
    expected = oracle.moe_linear(dy, np.asarray(w.data), ids, name, transpose=True)
    assert oracle.nmse(dx, expected.sum(1, keepdims=True) if shared else expected) <= FLOAT


def test_ids_out_of_range_under_jit_give_zeros():
    x, w = normal(6, 1, 64), weights("Q8_0", 3, 5, 64)
    ids = np.array([[-1], [-2], [3], [2**31 - 1], [-(2**31)], [2]], np.int32)
    y = np.asarray(moe(x, w, ids, "int8"))
    assert not y[:5].any()
    assert_same_bits(y[5], product(x[5], w[2], "int8"))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
def test_types_of_ids(dtype, x64):
    x, w = normal(3, 1, 64), weights("Q8_0", 300, 1, 64)
    wild = 2**32 + 5 if dtype == np.int64 else np.iinfo(dtype).max
    ids = np.array([[5], [100], [wild]], dtype)
    y = np.asarray(moe(x, w, ids, "int8"))
    expected = moe(x, w, np.where(ids < 300, ids.astype(np.int64), -1).astype(np.int32), "int8")
    assert_same_bits(y, expected)


@pytest.mark.parametrize("name", ["BF16", "Q5_1", "Q3_K"])
@pytest.mark.parametrize("group_sizes", [(3, 0, 5), (8, 0, 0), (2, 1, 1), (0, 0, 0), (4, 4, 9)], ids=str)
def test_ragged(name, group_sizes):
    w, x = weights(name, 3, 5, 256), normal(8, 256)
    ids = np.append(np.repeat(np.arange(3), group_sizes), np.full(8, -1))[:8, None]
    for lhs in LHS:
        y = ggml.ragged_linear(x, w, np.array(group_sizes), lhs_qtype=LHS[lhs])
        expected = oracle.moe_linear(x[:, None], np.asarray(w.data), ids, name)[:, 0]
        assert y.shape == (8, 5) and oracle.nmse(y, expected) <= bound(name, lhs)
    assert_same_bits(ggml.ragged_linear(x, w.prepare(), np.array(group_sizes), lhs_qtype=LHS[lhs]), y)


# ----------------------------------------------------------------------------------------------------------- everywhere


@pytest.mark.smoke
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_against_weights_decoded_by_hand(implementation):
    """Q8_0 is a half-precision scale and 32 signed bytes."""
    k = 96
    w, x, dy = weights("Q8_0", ROWS, k), normal(TOKENS, k), normal(TOKENS, ROWS)
    blocks = np.asarray(w.data).reshape(ROWS, 3, 34)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
    values = (scales * np.ascontiguousarray(blocks[..., 2:]).view(np.int8)).reshape(ROWS, k)
    np.testing.assert_array_equal(w.dequantize(implementation=implementation), values.astype(np.float32))
    for lhs in LHS:
        for layout in (w, w.prepare()):
            y, backward = jax.vjp(
                lambda x: ggml.linear(x, layout, lhs_qtype=LHS[lhs], implementation=implementation),  # noqa: B023
                x,
            )
            assert oracle.nmse(y, x @ values.T) <= bound("Q8_0", lhs)
            assert oracle.nmse(backward(dy)[0], dy @ values) <= FLOAT
    experts, ids = ggml.QTensor(jnp.stack([w.data] * 2), "Q8_0"), np.array([[0, 1], [1, -1]])
    y = ggml.moe_linear(x[:2, None], experts, ids, implementation=implementation)
    assert oracle.nmse(y, np.where(ids[..., None] < 0, 0, (x[:2] @ values.T)[:, None])) <= INT8


def test_groups_of_few_and_of_many_rows():
    """Experts with more and with fewer rows than are multiplied together, and matrices too wide for one piece."""
    x, w = normal(15, 1, 32), weights("Q8_0", 2, 2176, 32)
    ids = np.repeat([0, 1], [8, 7]).astype(np.int32)[:, None]
    y = np.asarray(jax.jit(ggml.moe_linear)(x, w, jnp.asarray(ids)))[:, 0]
    for expert, rows in ((0, slice(0, 8)), (1, slice(8, 15))):
        assert oracle.nmse(y[rows], linear64(x[rows, 0], w[expert])) <= bound("Q8_0", "int8")
