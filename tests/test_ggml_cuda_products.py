"""The CUDA kernels of the block formats' products, run on the host.

Against float64 products with the reference library's weights; what is promised in bits (a batch, a layout, an expert)
is compared between calls that take different kernels. Needs the module `_cuda_emulation` (built with
JAXQUANT_EMULATION=ON).
"""

import functools

import ggml_oracle as oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_ggml_products import FLOAT, HALF, INT8, LHS, SPIKES, assert_same_bits, bound, linear64, normal, weights

from jaxquant import ggml
from jaxquant._core import ffi

pytestmark = pytest.mark.skipif(ffi.module("cuda_emulation") is None, reason="the emulated kernels are not compiled in")

linear = functools.partial(ggml.linear, implementation="cuda_emulation")
moe_linear = functools.partial(ggml.moe_linear, implementation="cuda_emulation")
ragged_linear = functools.partial(ggml.ragged_linear, implementation="cuda_emulation")

ROWS = 19  # a tile of 16 and a bit; two whole groups of eight and three rows left over
# Tiles of 4, 8, 16, 32 and 64 positions, full, with a position alone, and between; floats have those of 8 and 64.
TOKENS = 65
PARTS = {
    "int8": {"plain": (1, 4, 7, 17, 33), "prepared": (3, 8, 16, 65)},
    "float": {"plain": (1,), "prepared": (8, 65)},
}
# Of each decoder for fragments, and of what is left to shared memory.
FEW = ["F16", "Q4_0", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ3_XXS", "IQ4_XS", "MXFP4", "NVFP4"]


def spans(name):
    """Rows of less than a chunk of 256, of a chunk and a bit, and of several, where blocks allow."""
    block = ggml.formats[name].block_size
    return (33 if block == 1 else block, 9 * 32 if block <= 32 else 3 * block)


@pytest.mark.parametrize("name", ggml.formats)
def test_every_format(name):
    """Values, batches of every tile, both layouts, experts and gradients, in both modes."""
    ids = np.array([[0, 0], [1, -1], [1, 0], [7, 1]], np.int32)

    def everything(ids, x, w, experts, dy):
        results = {}
        for label, lhs in LHS.items():
            call, layouts = functools.partial(linear, lhs_qtype=lhs), {"plain": w, "prepared": w.prepare()}
            results[label] = {
                "batch": call(x, w),
                "parts": [call(x[:m], layouts[layout]) for layout, of in PARTS[label].items() for m in of],
                "moe": moe_linear(x[:4, None], experts, ids, lhs_qtype=lhs),
                "moe prepared": moe_linear(x[:4, None], experts.prepare(), ids, lhs_qtype=lhs),
            }
        results["dx"] = jax.vjp(lambda x: linear(x, w), x)[1](dy)[0]
        results["dx of three"] = jax.vjp(lambda x: linear(x, w.prepare()), x[:3])[1](dy[:3])[0]
        results["dx of experts"] = jax.vjp(lambda x: moe_linear(x, experts, ids), x[:8].reshape(4, 2, -1))[1](
            dy[:8].reshape(4, 2, ROWS)
        )[0]
        return results

    cases = []
    for k in spans(name):
        w = weights(name, ROWS, k)
        experts = ggml.QTensor(jnp.stack([w.data, weights(name, ROWS, k, seed=4).data]), name)
        cases.append((normal(TOKENS, k), w, experts, normal(TOKENS, ROWS, seed=3)))
    for (x, w, experts, dy), results in zip(
        cases, jax.jit(lambda ids, cs: [everything(ids, *c) for c in cs])(ids, cases), strict=True
    ):
        stacked = np.asarray(experts.data)
        for label in LHS:
            r = results[label]
            assert oracle.nmse(r["batch"], linear64(x, w)) <= bound(name, label)
            assert oracle.nmse(r["moe"], oracle.moe_linear(x[:4, None], stacked, ids, name)) <= bound(name, label)
            for i in ((1, 1), (3, 0)):
                assert_same_bits(r["moe"][i], np.zeros(ROWS, np.float32))
            for part in r["parts"]:
                if bound(name, label) == INT8:
                    assert_same_bits(part, r["batch"][: len(part)])
                else:
                    assert oracle.nmse(part, r["batch"][: len(part)]) <= FLOAT
            if bound(name, label) == INT8:
                assert_same_bits(r["moe"][0], np.stack([r["batch"][0]] * 2))
                assert_same_bits(r["moe"][2, 1], r["batch"][2])
                assert_same_bits(r["moe prepared"], r["moe"])
        data = np.asarray(w.data)
        assert oracle.nmse(results["dx"], oracle.linear_dx(dy, data, name)) <= FLOAT
        assert oracle.nmse(results["dx of three"], oracle.linear_dx(dy[:3], data, name)) <= FLOAT
        expected = oracle.moe_linear(dy[:8].reshape(4, 2, ROWS), stacked, ids, name, transpose=True)
        assert oracle.nmse(results["dx of experts"], expected) <= FLOAT


@pytest.mark.parametrize("name", ggml.formats)
def test_any_bytes(name):
    """Products with unit vectors in floating point: the weights, as exactly as the decoders have them."""
    blocks = max(1, 64 // ggml.formats[name].block_size)
    for prepared in (False, True):
        data = oracle.random_bytes(name, ROWS, blocks, seed=5)
        expected = oracle.dequantize(data, name)
        w = ggml.QTensor(jnp.asarray(data), name)
        w = w.prepare() if prepared else w
        values = np.asarray(linear(np.eye(expected.shape[1], dtype=np.float32), w, lhs_qtype=None)).T
        finite = np.isfinite(expected).all(1)
        assert finite.any()
        np.testing.assert_array_equal(values[finite], expected[finite])


# ---------------------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", FEW)
def test_half_precision(name, dtype):
    w, x, dy = weights(name, ROWS, 512), normal(20, 512).astype(dtype), normal(20, ROWS, seed=3).astype(dtype)
    few, many, plain, dx = jax.jit(
        lambda x, w, dy: (
            linear(x[:3], w),
            linear(x, w),
            linear(x, w, lhs_qtype=None),
            jax.vjp(lambda x: linear(x, w), x)[1](dy)[0],
        )
    )(x, w, dy)
    assert few.dtype == many.dtype == plain.dtype == dx.dtype == dtype
    if not w.format.is_float:
        assert_same_bits(few, many[:3])
    assert oracle.nmse(many, linear64(x, w)) <= INT8 + HALF
    assert oracle.nmse(plain, linear64(x, w)) <= HALF
    assert oracle.nmse(dx, oracle.linear_dx(dy, np.asarray(w.data), name)) <= HALF


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "IQ3_S"])
def test_large_values(name):
    """One of 100 sigma in 256; rows from 1e-6 to 1e30; a row with NaN is NaN, and no other."""
    w, x = weights(name, ROWS, 512), normal(18, 512)
    x[:, 77] *= 100
    for i, size in enumerate((1e-6, 1e4, 1e5, 1e6, 1e30)):
        x[1 + i] *= size
    x[17, 3], x[16, 400] = np.nan, np.inf
    for m in (4, 18):
        y, expected = np.asarray(linear(x[-m:], w)), linear64(x[-m:], w)
        assert np.isnan(y[-2:]).all()
        assert np.isfinite(y[:-2]).all()
        for row, right in zip(y[:-2], expected[:-2], strict=True):
            assert oracle.nmse(row, right) <= 5 * SPIKES


def test_the_activations_are_those_of_the_cpu():
    """In a row of one chunk and a scale of one, the sums are exact: equal codes and scales give equal bits."""
    data = np.zeros((32, 34), np.uint8)
    data[:, :2] = np.float16(1).reshape(1).view(np.uint8)
    data[np.arange(32), 2 + np.arange(32)] = 1  # Q8_0: row i picks value i
    w = ggml.QTensor(jnp.asarray(data), "Q8_0")
    x = np.concatenate([normal(9, 32) * size for size in (1, 1e-40, 1e-44, 1e30)])
    x[3] = 0
    x[4, :16] = np.float32(0.5) * np.arange(16) * x[4, 16]
    assert_same_bits(linear(x, w), ggml.linear(x, w))


# -------------------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("name", FEW)
def test_routing(name):
    """Duplicates, none, out of range; few and many rows to an expert; an x for each slot, or one."""
    k = max(64, ggml.formats[name].block_size)
    experts = weights(name, 5, ROWS, k)
    rng = np.random.default_rng(6)
    cases = []
    for tokens, slots, shared in ((1, 8, True), (6, 3, False), (90, 2, True)):
        ids = rng.integers(-2, 8, (tokens, slots)).astype(np.int32)
        ids[::2] = np.where(ids[::2] > 2, 3, ids[::2])  # most to one
        cases.append((normal(tokens, 1 if shared else slots, k), ids))

    @jax.jit
    def route(cases, w):
        results = []
        for x, ids in cases:
            dy = jnp.ones((*ids.shape, ROWS), jnp.float32).at[..., ::2].set(-2)
            alone = linear(x[-1, -1], ggml.QTensor(w.data[3], name))
            # In x of a slot each: the sum over slots that share one is not the kernel's.
            own = jnp.broadcast_to(x, (*ids.shape, k))
            dx = jax.vjp(lambda x: moe_linear(x, w, ids), own)[1](dy)[0]  # noqa: B023
            results.append((moe_linear(x, w, ids), moe_linear(x, w.prepare(), ids, lhs_qtype=None), dx, alone, dy))
        return results

    for (x, ids), (y, plain, dx, alone, dy) in zip(cases, route(cases, experts), strict=True):
        data = np.asarray(experts.data)
        expected = oracle.moe_linear(x, data, ids, name)
        assert oracle.nmse(y, expected) <= bound(name, "int8")
        assert oracle.nmse(plain, expected) <= FLOAT
        assert oracle.nmse(dx, oracle.moe_linear(dy, data, ids, name, transpose=True)) <= FLOAT
        nobody = (ids < 0) | (ids >= 5)
        for zeros in (y, plain, dx):
            assert not np.asarray(zeros)[nobody].view(np.uint32).any()
        if ids[-1, -1] == 3 and not experts.format.is_float:
            assert_same_bits(y[-1, -1], alone)


def test_sorted_rows():
    experts, x = weights("Q4_K", 3, ROWS, 256), normal(30, 256)
    sizes = np.array([4, 0, 21])
    y = np.asarray(ragged_linear(x, experts, sizes))
    ids = np.repeat([0, 2, -1], [4, 21, 5])[:, None].astype(np.int32)
    expected = oracle.moe_linear(x[:, None], np.asarray(experts.data), ids, "Q4_K")[:, 0]
    assert oracle.nmse(y, expected) <= INT8
    assert not y[25:].any()


def test_more_experts_than_threads_of_a_block():
    experts = weights("Q8_0", 300, 2, 32)
    ids = np.random.default_rng(7).permutation(300)[:40, None].astype(np.int32)
    x = normal(40, 1, 32)
    y = moe_linear(x, experts, ids)
    assert oracle.nmse(y, oracle.moe_linear(x, np.asarray(experts.data), ids, "Q8_0")) <= INT8


# --------------------------------------------------------------------------------------------------------------- shapes


def test_more_tokens_than_a_grid_is_high():
    w, x = weights("Q8_0", 1, 32), normal(66_000, 32)
    for lhs in LHS.values():
        assert oracle.nmse(linear(x, w, lhs_qtype=lhs), linear64(x, w)) <= INT8


@pytest.mark.parametrize("lhs", LHS)
def test_nothing_to_do(lhs):
    w, none = weights("Q4_K", ROWS, 256), ggml.QTensor.zeros((0, 4, 256), "Q4_K")
    assert linear(normal(0, 256), w, lhs_qtype=LHS[lhs]).shape == (0, ROWS)
    assert linear(normal(3, 256), ggml.QTensor.zeros((0, 256), "Q4_K"), lhs_qtype=LHS[lhs]).shape == (3, 0)
    ids = jnp.full((3, 2), -1, jnp.int32)
    y = moe_linear(normal(3, 1, 256), none, ids, lhs_qtype=LHS[lhs])
    assert y.shape == (3, 2, 4)
    assert not y.any()


def test_stacked_matrices():
    """vmap: a batch of matrices, with a batch of x or one for all."""
    w, x = weights("Q5_K", 3, ROWS, 256), normal(3, 2, 256)
    data = np.asarray(w.data)
    assert oracle.nmse(jax.vmap(linear)(x, w), oracle.linear(x, data, "Q5_K")) <= INT8
    assert oracle.nmse(jax.vmap(linear, (None, 0))(x[0], w), oracle.linear(x[:1], data, "Q5_K")) <= INT8
    dx = jax.vmap(lambda x, w: jax.vjp(lambda x: linear(x, w), x)[1](jnp.ones((2, ROWS), jnp.float32))[0])(x, w)
    assert oracle.nmse(dx, oracle.linear_dx(np.ones((3, 2, ROWS)), data, "Q5_K")) <= FLOAT
