"""Bits where a compiler could change them: in larger expressions, on views, on arrays large enough for threads."""

from functools import partial

import calls
import granularities
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from granularities import Operands
from oracle import assert_same_bits

import jaxquant


@pytest.mark.parametrize("shape", [(), (4, 1), (1, 3), (4, 3)], ids=str)
def test_division_is_not_multiplication_by_a_reciprocal(shape, implementation):
    """6.5, 12.5 and 14.5 are ties; multiplied by the rounded 1 / 7 they fall on the other side."""
    x = np.tile(np.float32([45.5, 87.5, 101.5]), (4, 1))
    scale = np.full(shape, 7, np.float32)

    def run(x, s):
        return (
            jaxquant.quantize(x, s, implementation=implementation),
            jaxquant.quantize(x, s, dtype=x.dtype, implementation=implementation),
            jaxquant.fake_quantize(x, s, implementation=implementation),
        )

    constant = jax.jit(lambda x: run(x, scale if shape else 7.0))
    everywhere = jax.jit(lambda x: run(x, jnp.broadcast_to(jnp.float32(7), shape)))
    for codes, carried, value in (run(x, scale), jax.jit(run)(x, scale), constant(x), everywhere(x)):
        assert_same_bits(codes, np.tile(np.int8([6, 12, 14]), (4, 1)))
        assert_same_bits(carried, np.tile(np.float32([6, 12, 14]), (4, 1)))
        assert_same_bits(value, np.tile(np.float32([42, 84, 98]), (4, 1)))


@pytest.fixture(scope="module")
def crowd():
    """Enough elements for a contraction to show: fused into an addition, about a quarter of results change."""
    rng = np.random.default_rng(11)
    x = rng.normal(size=(33, 129)).astype(np.float32) * 3
    scale = rng.uniform(0.01, 0.1, (33, 1)).astype(np.float32)
    return x, scale, rng.normal(size=x.shape).astype(np.float32)


EXPRESSIONS = {
    "add": (lambda y, x, b: y + b),
    "subtract from": (lambda y, x, b: b - y),
    "multiply": (lambda y, x, b: x * y),
    "scaled": (lambda y, x, b: y * np.float32(3.7)),
    "chain": (lambda y, x, b: (y + b) + x),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("zero_point", [None, -7])
def test_fake_quantize_is_not_contracted_into_its_neighbours(name, zero_point, crowd, implementation):
    x, scale, b = crowd
    expression = EXPRESSIONS[name]
    call = jax.jit(
        lambda x, s, b: expression(jaxquant.fake_quantize(x, s, zero_point, implementation=implementation), x, b)
    )
    wanted = expression(oracle.fake_quantize(x, scale, zero_point), x, b)
    assert_same_bits(call(x, scale, b), wanted, x=x, scale=scale, b=b)


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_dequantize_is_not_contracted_into_its_neighbours(per, crowd, implementation):
    x, scale, b = crowd
    scale = scale if per == "row" else scale[0, 0]
    q = oracle.quantize(x, scale, 3)
    call = jax.jit(lambda q, s, b: jaxquant.dequantize(q, s, 3, implementation=implementation) + b)
    assert_same_bits(call(q, scale, b), oracle.dequantize(q, scale, 3) + b, q=q, scale=scale, b=b)


def test_operands_computed_beside_the_call(crowd, implementation):
    """What feeds the quantiser is rounded before it divides."""
    x, scale, b = crowd
    call = jax.jit(lambda x, s, b: jaxquant.fake_quantize(x + b, s * jnp.float32(1.3), implementation=implementation))
    wanted = oracle.fake_quantize(x + b, scale * np.float32(1.3))
    assert_same_bits(call(x, scale, b), wanted, x=x, scale=scale, b=b)


def test_gradient_beside_other_arithmetic(crowd, implementation):
    x, scale, b = crowd

    def call(x, s, dy):
        value, backward = jax.vjp(partial(jaxquant.quantize, dtype=x.dtype, implementation=implementation), x, s)
        return value + dy, backward(dy)[0] + dy

    wanted = oracle.quantize(x, scale, dtype=x.dtype) + b, oracle.quantize_backward(b, x, scale) + b
    for got, want in zip(jax.jit(call)(x, scale, b), wanted, strict=True):
        assert_same_bits(got, want, x=x, scale=scale, dy=b)


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_narrow_results_are_rounded_before_they_are_widened(narrow, crowd, implementation):
    """A compiler may not keep the float32 that a 16-bit result was rounded from."""
    x, scale, b = crowd
    dtype = oracle.DTYPES[narrow]
    x, q = x.astype(dtype), oracle.quantize(x, scale)
    f = {"implementation": implementation}

    def call(x, q, s, b):
        fq, backward = jax.vjp(lambda x: jaxquant.fake_quantize(x, s, **f), x)
        return {
            "fake_quantize": fq.astype(np.float32) + b,
            "fake_quantize_gradient": backward(b.astype(dtype))[0].astype(np.float32) + b,
            "dequantize": jaxquant.dequantize(q, s, dtype=dtype, **f).astype(np.float32) + b,
            "quantize_backward": jaxquant.quantize_backward(b, x, s, **f).astype(np.float32) + b,
        }

    actual = jax.jit(call)(x, q, scale, b)
    dy = b.astype(dtype)
    wanted = {
        "fake_quantize": oracle.fake_quantize(x, scale),
        "fake_quantize_gradient": oracle.fake_quantize_gradient(dy, x, scale).dx,
        "dequantize": oracle.dequantize(q, scale, dtype=dtype),
        "quantize_backward": oracle.quantize_backward(b, x, scale),
    }
    for name, value in wanted.items():
        assert_same_bits(actual[name], value.astype(np.float32) + b, x=x, scale=scale, b=b)


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_narrow_operands_are_rounded_before_they_are_used(narrow, crowd, implementation):
    """A compiler may not skip the rounding to 16 bits that the operands went through beside the call."""
    x, scale, b = crowd
    dtype = oracle.DTYPES[narrow]
    f = {"implementation": implementation}

    def call(x, s, b):
        x, dy = x.astype(dtype), b.astype(dtype)
        fq, backward = jax.vjp(lambda x: jaxquant.fake_quantize(x, s, **f), x)
        return {
            "quantize": jaxquant.quantize(x, s, **f),
            "fake_quantize": fq,
            "fake_quantize_gradient": backward(dy)[0],
            "quantize_backward": jaxquant.quantize_backward(dy, x, s, **f),
        }

    actual = jax.jit(call)(x, scale, b)
    x, dy = x.astype(dtype), b.astype(dtype)
    wanted = {
        "quantize": oracle.quantize(x, scale),
        "fake_quantize": oracle.fake_quantize(x, scale),
        "fake_quantize_gradient": oracle.fake_quantize_gradient(dy, x, scale).dx,
        "quantize_backward": oracle.quantize_backward(dy, x, scale),
    }
    for name, value in wanted.items():
        assert_same_bits(actual[name], value, x=x, scale=scale, dy=dy)


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_narrow_scales_are_rounded_before_they_are_used(narrow, crowd, implementation):
    x, scale, _ = crowd
    dtype = oracle.DTYPES[narrow]
    call = jax.jit(lambda x, s: jaxquant.fake_quantize(x, s.astype(dtype), implementation=implementation))
    assert_same_bits(call(x, scale), oracle.fake_quantize(x, scale.astype(dtype)), x=x, scale=scale)


VIEWS = {
    "transposed": (lambda x: x.T),
    "permuted": (lambda x: x.reshape(3, 11, 129).swapaxes(0, 2).reshape(129, 33)),
    "reversed": (lambda x: x[::-1, ::-1].T),
    "strided": (lambda x: x[:, ::2]),
    "from the second element": (lambda x: x.reshape(-1)[1:]),
    "from the third row": (lambda x: x[3:]),
    "broadcast": (lambda x: (jnp if isinstance(x, jax.Array) else np).broadcast_to(x[:, :1], (33, 70))),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_views(view, dtype, crowd, implementation):
    """Buffers that are slices or need a copy; a slice may start at any element, so at any alignment."""
    x, _, b = (a.astype(oracle.DTYPES[dtype]) for a in crowd)
    seen, dy = VIEWS[view](x), VIEWS[view](b)
    scale = np.float32(0.05) if seen.ndim == 1 else np.linspace(0.01, 0.1, seen.shape[0], dtype=np.float32)[:, None]
    keywords = {"qtype": "int8"}
    call = calls.results(keywords, x.dtype, implementation, calls.affordable(implementation))
    zero_point = np.full(scale.shape, 3, np.int32)
    actual = jax.jit(lambda x, s, z, dy: call(VIEWS[view](x), s, z, VIEWS[view](dy)))(x, scale, zero_point, b)
    wanted = calls.expected(seen, scale, zero_point, dy, keywords)
    calls.compare(jax.device_get(actual), wanted, Operands(seen, scale, zero_point, dy), keywords, implementation)


LARGE = {
    "per_tensor": ((1031, 1033), (), {}),
    "per_row": ((1031, 1033), (1031,), {"axis": 0}),
    "per_column": ((1031, 1033), (1033,), {"axis": 1}),
    "per_group": ((1024, 1056), (1024, 33), {"block_shape": (1, 32)}),
    "long_line": ((1_200_003,), (), {}),
}


@pytest.mark.parametrize("layout", LARGE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_arrays(layout, dtype, implementation):
    """More than a million elements, so that the work is shared between threads."""
    x_shape, scale_shape, keywords = LARGE[layout]
    large = granularities.Granularity(layout, x_shape, scale_shape, **keywords)
    names = calls.affordable(implementation)
    calls.check(large.operands(dtype), {"qtype": "int8", **large.keywords}, implementation, names=names)


def test_the_same_bits_at_every_call(implementation):
    """Sums are deterministic: no run depends on how the threads were scheduled."""
    large = granularities.Granularity("repeat", (1031, 1033), ())
    operands = large.operands()

    @jax.jit
    def call(x, s, z, dy):
        return jax.vjp(lambda s, z: jaxquant.fake_quantize(x, s, z, implementation=implementation), s, z)[1](dy)

    arguments = operands.x, operands.scale, operands.zero_point.astype(np.float32), operands.dy
    first = jax.device_get(call(*arguments))
    for _ in range(5):
        for got, want in zip(jax.device_get(call(*arguments)), first, strict=True):
            assert_same_bits(got, want)
