"""The GGML operations in jax.numpy: bits of dequantisation against the reference library, products against float64."""

import functools
import re

import ggml_oracle as oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxquant.ggml import reference
from jaxquant.ggml.formats import formats

FEW = ["F16", "Q4_K", "Q8_0", "IQ2_S", "MXFP4"]
SLOW = ("IQ1", "IQ2")  # the library takes seconds to prepare its quantisers; random bytes hold every point anyway
EXACT = 1e-10  # NMSE of float32 products


@functools.cache
def rows_of(name):
    """Rows of values, of random bytes with finite scales, and of any bytes at all."""
    rng = np.random.default_rng(1)
    size = 512
    values = rng.standard_t(3, (4, size)).astype(np.float32) * np.float32([[1], [1e-3], [30], [0]])
    blocks = size // formats[name].block_size
    wild = rng.integers(0, 256, (12, formats[name].row_bytes(size)), np.uint8)
    quantised = [] if name.startswith(SLOW) else [oracle.quantised(name, values)]
    return np.concatenate([*quantised, oracle.random_bytes(name, 16, blocks), wild])


def weights_of(name, *shape, seed=2):
    if name.startswith(SLOW):
        data = oracle.random_bytes(name, int(np.prod(shape[:-1])), shape[-1] // formats[name].block_size, seed)
        return data.reshape(*shape[:-1], data.shape[-1])
    return oracle.quantised(name, np.random.default_rng(seed).standard_normal(shape, np.float32))


def compiled(function, *operands, **static):
    """function(*operands, **static) under jit."""
    return jax.jit(functools.partial(function, **static))(*operands)


def pulled_back(function, x, dy):
    return jax.jit(lambda x, dy: jax.vjp(function, x)[1](dy)[0])(x, dy)


def normal(*shape, seed=3):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("name", oracle.NAMES)
def test_dequantize_is_bit_equal(name):
    data = rows_of(name)
    expected = oracle.dequantize(data, name)
    oracle.assert_same_bits(compiled(reference.dequantize, data, format=name), expected)
    halves = (np.float16, ml_dtypes.bfloat16)
    actual = jax.jit(lambda d: [reference.dequantize(d, name, dtype) for dtype in halves])(data)
    with np.errstate(over="ignore", invalid="ignore"):
        for dtype, values in zip(halves, actual, strict=True):
            oracle.assert_same_bits(values, expected.astype(dtype))


@pytest.mark.parametrize("name", ["F16", "Q5_1", "Q4_K", "Q8_K"])
def test_dequantize_is_bit_equal_eager(name):
    data = rows_of(name)
    oracle.assert_same_bits(reference.dequantize(data, name), oracle.dequantize(data, name))


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_every_scale_byte(name):
    format = formats[name]
    data = oracle.random_bytes(name, 1, 256).reshape(256, format.type_size)
    data[:, : 1 if name == "MXFP4" else 4] = np.arange(256)[:, None]
    actual = compiled(reference.dequantize, data, format=name)
    oracle.assert_same_bits(actual, oracle.dequantize(data, name))


def test_subnormal_scales_with_normal_results():
    """A subnormal float32 scale, in XLA's flush mode."""
    data = oracle.random_bytes("Q8_K", 64, 1)
    data[:, 2:4] &= np.array([0x7F, 0x80], np.uint8)
    expected = oracle.dequantize(data, "Q8_K")
    normal_results = np.abs(expected) >= np.finfo(np.float32).tiny
    assert normal_results.mean() > 0.3
    oracle.assert_same_bits(compiled(reference.dequantize, data, format="Q8_K"), expected)


def test_rounding_to_16_bits_is_kept_when_widened_again():
    data = rows_of("Q6_K")[:4]
    for dtype in (np.float16, ml_dtypes.bfloat16):
        actual = jax.jit(lambda d, t=dtype: reference.dequantize(d, "Q6_K", t).astype(jnp.float32))(data)
        oracle.assert_same_bits(actual, oracle.dequantize(data, "Q6_K").astype(dtype).astype(np.float32))


@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (0, 0), (2, 1, 256), (256,)], ids=str)
def test_dequantize_shapes(shape):
    data = np.zeros((*shape[:-1], formats["Q4_K"].row_bytes(shape[-1])), np.uint8)
    assert compiled(reference.dequantize, data, format="Q4_K").shape == shape


def test_bad_rows():
    with pytest.raises(ValueError, match="expected whole blocks of 144 bytes along the last axis, got 145"):
        reference.dequantize(jnp.zeros((2, 145), jnp.uint8), "Q4_K")
    with pytest.raises(ValueError, match="take: format: expected one of"):
        reference.take(jnp.zeros((2, 144), jnp.uint8), jnp.zeros(1, jnp.int32), "Q4_L")


class TestLinear:
    @pytest.mark.parametrize("name", [*FEW, "F32", "BF16", "Q2_K", "TQ2_0", "IQ1_S"])
    def test_values(self, name):
        data, x = weights_of(name, 5, 512), normal(3, 512)
        y = compiled(reference.linear, x, data, format=name)
        assert y.dtype == jnp.float32 and oracle.nmse(y, oracle.linear(x, data, name)) <= EXACT

    @pytest.mark.parametrize("name", FEW)
    def test_gradient(self, name):
        data, dy = weights_of(name, 5, 512), normal(3, 5)
        dx = compiled(reference.linear_dx, dy, data, format=name)
        assert oracle.nmse(dx, oracle.linear_dx(dy, data, name)) <= EXACT
        dx = pulled_back(lambda x: reference.linear(x, data, name), normal(3, 512), dy)
        assert oracle.nmse(dx, oracle.linear_dx(dy, data, name)) <= EXACT

    @pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
    def test_16_bit_activations(self, dtype):
        data, x = weights_of("Q5_K", 5, 512), jnp.asarray(normal(3, 512), dtype)
        y = compiled(reference.linear, x, data, format="Q5_K")
        assert y.dtype == dtype and oracle.nmse(y, oracle.linear(x, data, "Q5_K")) <= 1e-5
        y = compiled(reference.linear, x, data, format="Q5_K", dtype=jnp.float32)
        assert y.dtype == jnp.float32 and oracle.nmse(y, oracle.linear(x, data, "Q5_K")) <= EXACT

    def test_huge_activations(self):
        data, x = weights_of("Q4_K", 5, 512), normal(3, 512) * 1e6
        assert oracle.nmse(compiled(reference.linear, x, data, format="Q4_K"), oracle.linear(x, data, "Q4_K")) <= EXACT

    @pytest.mark.parametrize("leading", [((), (2,)), ((2,), ()), ((2, 3), (2, 3)), ((2, 3), (3,))], ids=str)
    def test_leading_axes(self, leading):
        x, data = normal(*leading[0], 2, 64), weights_of("Q4_0", *leading[1], 5, 64)
        expected = oracle.linear(x, data, "Q4_0")
        y = compiled(reference.linear, x, data, format="Q4_0")
        assert y.shape == expected.shape and oracle.nmse(y, expected) <= EXACT

    @pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
    def test_vmap(self, axes):
        x = normal(*((3,) if axes[0] == 0 else ()), 2, 512)
        data = weights_of("Q3_K", *((3,) if axes[1] == 0 else ()), 5, 512)
        y = jax.jit(jax.vmap(lambda x, d: reference.linear(x, d, "Q3_K"), axes))(x, data)
        assert oracle.nmse(y, oracle.linear(x, data, "Q3_K")) <= EXACT

    @pytest.mark.parametrize("m, n", [(0, 5), (3, 0), (1, 1)])
    def test_empty(self, m, n):
        data = np.zeros((n, formats["Q8_0"].row_bytes(64)), np.uint8)
        y = compiled(reference.linear, normal(m, 64), data, format="Q8_0")
        assert y.shape == (m, n)


class TestTake:
    IDS = np.array([[3, -1, 0], [7, 6, 3], [-(2**31), 2**31 - 1, 2]], np.int32)

    @pytest.mark.parametrize("name", FEW)
    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
    def test_values(self, name, dtype):
        data = weights_of(name, 7, 512)
        known = (self.IDS >= 0) & (self.IDS < 7)
        rows = oracle.dequantize(data, name).astype(dtype)[np.where(known, self.IDS, 0)]
        expected = np.where(known[..., None], rows, np.zeros((), dtype))
        oracle.assert_same_bits(compiled(reference.take, data, self.IDS, format=name, dtype=dtype), expected)

    @pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.int64])
    def test_types_of_ids(self, dtype, x64):
        data = weights_of("Q8_0", 300, 32)
        ids = np.array([3, 100, np.iinfo(dtype).max], dtype)
        ids = ids if dtype != np.int64 else np.append(ids, [2**32 + 3, -(2**32)])
        known = (ids >= 0) & (ids < 300)
        rows = oracle.dequantize(data, "Q8_0")[np.where(known, ids, 0).astype(int)]
        expected = np.where(known[:, None], rows, np.float32(0))
        oracle.assert_same_bits(compiled(reference.take, data, jnp.asarray(ids), format="Q8_0"), expected)

    def test_shapes(self):
        data = weights_of("Q8_0", 2, 7, 32)
        oracle.assert_same_bits(compiled(reference.take, data, 6, format="Q8_0"), oracle.dequantize(data[:, 6], "Q8_0"))
        assert compiled(reference.take, data, np.zeros((0,), np.int32), format="Q8_0").shape == (2, 0, 32)
        assert not compiled(reference.take, data[:, :0], np.zeros((4, 1), np.int32), format="Q8_0").any()
        y = jax.jit(jax.vmap(lambda d, i: reference.take(d, i, "Q8_0")))(data, jnp.array([[1, 2], [-1, 6]]))
        rows = oracle.dequantize(data, "Q8_0")
        expected = np.stack([rows[0, [1, 2]], [np.zeros(32, np.float32), rows[1, 6]]])
        oracle.assert_same_bits(y, expected)


class TestExperts:
    # (tokens, top_k, experts): fewer rows than experts, as many, many more, one expert only.
    SIZES = ((2, 2, 9), (3, 2, 5), (40, 2, 5), (9, 1, 1), (33, 3, 2))

    @staticmethod
    def ids(tokens, top_k, experts, seed=5):
        """Duplicates within tokens, ids out of range on both sides, experts that nobody uses."""
        ids = np.random.default_rng(seed).integers(-2, experts + 2, (tokens, top_k)).astype(np.int32)
        ids[0] = ids[0, 0] % experts
        ids[-1, -1] = np.iinfo(np.int32).max
        return np.where(ids == 1, 0, ids)

    @staticmethod
    def check(name, x, data, ids, transpose=False):
        function = reference.moe_linear_dx if transpose else reference.moe_linear
        y = compiled(function, x, data, ids, format=name)
        expected = oracle.moe_linear(x, data, ids, name, transpose)
        assert y.shape == expected.shape and oracle.nmse(y, expected) <= EXACT
        assert not np.asarray(y)[(ids < 0) | (ids >= len(data))].any()

    @pytest.mark.parametrize("size", SIZES, ids=str)
    @pytest.mark.parametrize("shared", [True, False])
    def test_values(self, size, shared):
        tokens, top_k, experts = size
        x = normal(tokens, 1 if shared else top_k, 64)
        self.check("Q4_0", x, weights_of("Q4_0", experts, 5, 64), self.ids(*size))

    @pytest.mark.parametrize("size", SIZES[::2], ids=str)
    def test_gradient(self, size):
        tokens, top_k, experts = size
        data, ids, dy = weights_of("Q5_1", experts, 5, 64), self.ids(*size), normal(tokens, top_k, 5)
        self.check("Q5_1", dy, data, ids, transpose=True)
        x = normal(tokens, 1, 64)
        dx = pulled_back(lambda x: reference.moe_linear(x, data, ids, "Q5_1"), x, dy)
        expected = oracle.moe_linear(dy, data, ids, "Q5_1", transpose=True).sum(1, keepdims=True)
        assert oracle.nmse(dx, expected) <= EXACT

    @pytest.mark.parametrize("name", ["BF16", "Q6_K", "IQ3_S", "TQ1_0", "NVFP4"])
    def test_formats(self, name):
        self.check(name, normal(6, 2, 256), weights_of(name, 3, 5, 256), self.ids(6, 2, 3))

    def test_one_expert_takes_all(self):
        ids = np.full((24, 2), 3, np.int32)
        self.check("Q8_0", normal(24, 2, 64), weights_of("Q8_0", 4, 5, 64), ids)

    def test_rows_are_independent(self):
        data, ids = weights_of("Q8_0", 2, 5, 64), np.array([[0], [0], [1], [-1]], np.int32)
        x = normal(4, 1, 64)
        x[[0, 3]] = np.nan
        y = np.asarray(compiled(reference.moe_linear, x, data, ids, format="Q8_0"))
        assert np.isnan(y[0]).all() and not y[3].any()
        assert oracle.nmse(y[1:3], oracle.moe_linear(x[1:3], data, ids[1:3], "Q8_0")) <= EXACT

    @pytest.mark.parametrize("tokens, top_k, experts", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
    def test_empty(self, tokens, top_k, experts):
        data = np.zeros((experts, 5, formats["Q8_0"].row_bytes(64)), np.uint8)
        y = reference.moe_linear(normal(tokens, 1, 64), data, np.zeros((tokens, top_k), np.int32), "Q8_0")
        assert y.shape == (tokens, top_k, 5) and not y.any()

    def test_16_bit_activations(self):
        data, ids = weights_of("Q8_0", 3, 5, 64), self.ids(6, 2, 3)
        x = jnp.asarray(normal(6, 1, 64), jnp.bfloat16)
        y = compiled(reference.moe_linear, x, data, ids, format="Q8_0")
        assert y.dtype == jnp.bfloat16 and oracle.nmse(y, oracle.moe_linear(x, data, ids, "Q8_0")) <= 1e-5

    @pytest.mark.parametrize("axes", [(0, None, 0), (None, 0, None), (0, 0, 0)], ids=str)
    def test_vmap(self, axes):
        x, data = normal(3, 6, 1, 64), weights_of("Q8_0", 3, 4, 5, 64)
        ids = np.stack([self.ids(6, 2, 4, seed) for seed in range(3)])
        operands = [a if axis == 0 else a[0] for a, axis in zip((x, data, ids), axes, strict=True)]
        y = jax.jit(jax.vmap(lambda *a: reference.moe_linear(*a, "Q8_0"), axes))(*operands)
        for i in range(3):
            one = [a[i] if axis == 0 else a for a, axis in zip(operands, axes, strict=True)]
            assert oracle.nmse(y[i], oracle.moe_linear(*one, "Q8_0")) <= EXACT

    @pytest.mark.parametrize("manual", ["a", "ab"])
    def test_shard_map(self, manual):
        """Tokens over an axis, the weights replicated; another axis of the mesh is automatic, or idle."""
        mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        over, whole = jax.sharding.PartitionSpec("a"), jax.sharding.PartitionSpec()
        x, data, ids = normal(8, 1, 64), weights_of("Q8_0", 4, 5, 64), self.ids(8, 2, 4)
        f = functools.partial(reference.moe_linear, format="Q8_0")
        f = jax.shard_map(f, mesh=mesh, in_specs=(over, whole, over), out_specs=over, axis_names=set(manual))
        assert oracle.nmse(compiled(f, x, data, ids), oracle.moe_linear(x, data, ids, "Q8_0")) <= EXACT

    @pytest.mark.parametrize("sizes", [(3, 0, 5), (8, 0, 0), (2, 1, 1), (0, 0, 0)], ids=str)
    def test_ragged(self, sizes):
        data, x = weights_of("Q8_0", 3, 5, 64), normal(8, 64)
        ids = np.append(np.repeat(np.arange(3), sizes), np.full(8 - sum(sizes), -1))
        y = compiled(reference.ragged_linear, x, data, np.array(sizes, np.int32), format="Q8_0")
        assert y.shape == (8, 5)
        assert oracle.nmse(y, oracle.moe_linear(x[:, None], data, ids[:, None], "Q8_0")[:, 0]) <= EXACT


@pytest.mark.parametrize("name", oracle.NAMES)
def test_no_64_bit_arrays(name, x64):
    data = jax.ShapeDtypeStruct((2, 3, formats[name].row_bytes(512)), jnp.uint8)
    x, ids = jax.ShapeDtypeStruct((4, 512), jnp.float32), jax.ShapeDtypeStruct((4, 2), jnp.int32)
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)

    def everything(x, data, ids, sizes):
        if name in FEW:
            yield reference.take(data, ids, name, jnp.float16)
            yield reference.ragged_linear(x, data, sizes, name)
        yield reference.moe_linear(x[:, None], data, ids, name)

    text = str(jax.make_jaxpr(lambda *operands: list(everything(*operands)))(x, data, ids, sizes))
    assert not re.findall(r".*[iuf]64\[\d.*", text)
