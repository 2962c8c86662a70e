"""Operands and results of different dtypes: each is converted once, and nothing is rounded on the way."""

import calls
import granularities
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import assert_same_bits, assert_same_sum

import jaxquant

FLOATS = ("float32", "float64", "float16", "bfloat16")
PAIRS = [(a, b) for a in FLOATS for b in FLOATS if a != b]


@pytest.mark.parametrize("dtype, carrier", PAIRS)
def test_codes_in_another_floating_dtype(dtype, carrier, implementation):
    """Values and all gradients; dy has the carrier's dtype, dx has x's."""
    operands = granularities.PER_CHANNEL_FIRST.operands(dtype)
    carried_in = oracle.DTYPES[carrier]
    dy = operands.dy.astype(carried_in)
    zero_point = operands.zero_point.astype(np.float32)
    with calls.precision(dtype, carried_in):
        value, backward = jax.vjp(
            lambda *a: jaxquant.quantize(*a, axis=0, dtype=carried_in, implementation=implementation),
            *map(jnp.asarray, (operands.x, operands.scale, zero_point)),
        )
        value, gradients = jax.device_get((value, backward(jnp.asarray(dy))))
    wanted = oracle.quantize(operands.x, operands.scale, zero_point, axis=0, dtype=carried_in)
    assert_same_bits(value, wanted, x=operands.x)
    wanted = oracle.quantize_gradient(dy, operands.x, operands.scale, zero_point, axis=0)
    assert_same_bits(gradients[0], wanted.dx, x=operands.x, dy=dy)
    exact = implementation != "xla"
    assert_same_sum(gradients[1], wanted.dscale, operands.scale.dtype, exact=exact)
    assert_same_sum(gradients[2], wanted.dzero_point, np.float32, exact=exact)


@pytest.mark.parametrize("q_dtype, dtype", PAIRS)
def test_dequantize_to_another_dtype(q_dtype, dtype, implementation):
    operands = granularities.PER_CHANNEL_FIRST.operands(dtype)
    scale, zero_point = operands.scale.astype(np.float32) * np.float32(1.37), operands.zero_point.astype(np.float32)
    q = oracle.quantize(operands.x, operands.scale, zero_point, axis=0, dtype=oracle.DTYPES[q_dtype])
    target = oracle.DTYPES[dtype]
    with calls.precision(q.dtype, target):
        value, backward = jax.vjp(
            lambda *a: jaxquant.dequantize(*a, axis=0, dtype=target, implementation=implementation),
            *map(jnp.asarray, (q, scale, zero_point)),
        )
        value, gradients = jax.device_get((value, backward(jnp.asarray(operands.dy))))
    assert_same_bits(value, oracle.dequantize(q, scale, zero_point, axis=0, dtype=target), q=q)
    wanted = oracle.dequantize_gradient(operands.dy, q, scale, zero_point, axis=0)
    assert_same_bits(gradients[0], wanted.dx, q=q, dy=operands.dy)
    exact = implementation != "xla"
    assert_same_sum(gradients[1], wanted.dscale, np.float32, exact=exact)
    assert_same_sum(gradients[2], wanted.dzero_point, np.float32, exact=exact)


@pytest.mark.parametrize("dtype, dy_dtype", PAIRS)
def test_upstream_gradient_of_another_dtype(dtype, dy_dtype, implementation):
    """quantize_backward takes any float gradient, and rounds only its result."""
    operands = granularities.PER_CHANNEL_FIRST.operands(dtype)
    dy = (operands.dy.astype(np.float64) * 1.0001).astype(oracle.DTYPES[dy_dtype])
    with calls.precision(dtype, dy.dtype):
        arguments = map(jnp.asarray, (dy, operands.x, operands.scale, operands.zero_point))
        actual = np.asarray(jaxquant.quantize_backward(*arguments, axis=0, implementation=implementation))
    wanted = oracle.quantize_backward(dy, operands.x, operands.scale, operands.zero_point, axis=0)
    assert_same_bits(actual, wanted, x=operands.x, dy=dy)


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scale_of_another_dtype(dtype, scale_dtype, implementation):
    """x is not rounded to the scale's dtype, and the scale not to x's; its gradient comes back in its own."""
    operands = granularities.PER_CHANNEL_FIRST.operands(dtype)
    scale = (operands.scale * np.float32(1.37)).astype(oracle.DTYPES[scale_dtype])
    with calls.precision(scale_dtype):
        call = calls.results({"axis": 0, "qtype": "int8"}, operands.x.dtype, implementation)
        arguments = operands.x, jnp.asarray(scale), operands.zero_point, operands.dy
        actual = jax.device_get(jax.jit(call)(*arguments))
    converted = granularities.Operands(operands.x, scale, operands.zero_point, operands.dy)
    keywords = {"axis": 0, "qtype": "int8"}
    wanted = calls.expected(operands.x, scale, operands.zero_point, operands.dy, keywords)
    calls.compare(actual, wanted, converted, keywords, implementation)


@pytest.mark.parametrize("zero_point_dtype", ["int8", "uint8", "int16", "float16", "bfloat16"])
def test_zero_point_dtypes(zero_point_dtype, implementation):
    operands = granularities.PER_CHANNEL_FIRST.operands("float32", "uint8")
    narrow = operands.zero_point // 3
    stored = narrow.astype(oracle.DTYPES.get(zero_point_dtype, zero_point_dtype))
    keywords = {"axis": 0, "qtype": jnp.uint8, "implementation": implementation}
    actual = jaxquant.quantize(operands.x, operands.scale, stored, **keywords)
    assert_same_bits(actual, oracle.quantize(operands.x, operands.scale, narrow, axis=0, qtype="uint8"))


@pytest.mark.parametrize("q_dtype", ["int8", "uint8", "int16", "uint16", "int32", *oracle.BITS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dequantize_integer_codes(q_dtype, dtype, implementation):
    """JAX's own 4- and 2-bit arrays too."""
    low, high = oracle.RANGES.get(q_dtype, (-70000, 70000))
    q = np.random.default_rng(1).integers(low, high, (7, 33), endpoint=True)
    scale, zero_point = np.float32([0.01, 0.02, 0.3, 0.004, 0.5, 0.007, 0.09]), np.arange(7, dtype=np.int32)
    call = jax.jit(
        lambda *a: jaxquant.dequantize(*a, axis=0, dtype=oracle.DTYPES[dtype], implementation=implementation)
    )
    actual = call(jnp.asarray(q, q_dtype), scale, zero_point)
    assert_same_bits(actual, oracle.dequantize(q, scale, zero_point, axis=0, dtype=oracle.DTYPES[dtype]), q=q)


def test_float16_subnormals_are_numbers(implementation):
    """They are normal in float32, where the arithmetic happens: nothing is flushed."""
    x = np.arange(-2047, 2048, dtype=np.float32).astype(np.float16) * np.float16(2.0**-24)
    scale = np.float32(3 * 2.0**-24)
    keywords = {"qtype": jnp.int16, "implementation": implementation}
    codes = jaxquant.quantize(x, scale, **keywords)
    assert_same_bits(codes, oracle.quantize(x, scale, qtype="int16"), x=x)
    value, backward = jax.vjp(lambda x: jaxquant.fake_quantize(x, scale, **keywords), x)
    assert_same_bits(value, oracle.fake_quantize(x, scale, qtype="int16"), flush=False, x=x)
    assert np.count_nonzero(value) > 2000
    assert_same_bits(backward(x)[0], x, flush=False)
    back = jaxquant.dequantize(codes, scale, dtype=jnp.float16, implementation=implementation)
    assert_same_bits(back, oracle.dequantize(codes, scale, dtype=np.float16), flush=False, x=x)


def test_python_numbers_and_lists(implementation):
    """They are what jax.numpy makes of them: float32."""
    value = jaxquant.fake_quantize([0.26, 9.0], 0.1, qtype=jnp.int4, implementation=implementation)
    assert_same_bits(value, oracle.fake_quantize(np.float32([0.26, 9.0]), np.float32(0.1), qtype="int4"))
    scalar = jaxquant.quantize(2.5, 1.0, implementation=implementation)
    assert_same_bits(scalar, np.int8(2))
    per_channel = jaxquant.quantize([[1.0, 2.0]], [0.5, 0.25], [1, 2], axis=1, implementation=implementation)
    assert_same_bits(per_channel, np.int8([[3, 10]]))


def test_qparams_stand_for_the_other_parameters(implementation):
    """In every function that takes a scale, with axis and with blocks, inside and outside of jit."""
    for granularity in (granularities.PER_CHANNEL_FIRST, granularities.PER_GROUP, granularities.PER_TENSOR):
        operands = granularity.operands("float32", "int4")
        keywords = {"qtype": "int4", "qmin": -7, "qmax": 6}
        axis = {"axis": granularity.axis, "implementation": implementation}
        where = {**granularity.keywords, **keywords}
        params = jaxquant.QParams(
            operands.scale,
            operands.zero_point.clip(-7, 6),
            **calls.library_keywords(keywords),
            block_shape=granularity.block_shape,
        )
        arguments = operands.scale, params.zero_point

        def call(x, dy, params, axis=axis):
            codes = jaxquant.quantize(x, params, **axis)
            return (
                codes,
                jaxquant.fake_quantize(x, params, **axis),
                jaxquant.dequantize(codes, params, **axis),
                jaxquant.quantize_backward(dy, x, params, **axis),
            )

        codes = oracle.quantize(operands.x, *arguments, **where)
        wanted = (
            codes,
            oracle.fake_quantize(operands.x, *arguments, **where),
            oracle.dequantize(codes, *arguments, axis=granularity.axis),
            oracle.quantize_backward(operands.dy, operands.x, *arguments, **where),
        )
        for outputs in (call(operands.x, operands.dy, params), jax.jit(call)(operands.x, operands.dy, params)):
            for got, want in zip(outputs, wanted, strict=True):
                assert_same_bits(got, want)
