"""Bits of every value and gradient against the oracle: stored cases, dtypes, granularities, special values."""

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

CASES = oracle.cases()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_reference_cases(case, implementation, compiled):
    operands = Operands(case.x, case.scale, case.zero_point, case.dy)
    names = calls.affordable(implementation) if compiled else calls.CORE
    actual = calls.check(operands, case.keywords, implementation, compiled=compiled, names=names)
    # The stored answers once more, past the oracle.
    spec = case.spec
    assert_same_bits(actual["quantize"].astype(np.int32), spec["q"], x=case.x)
    assert_same_bits(actual["fake_quantize"], spec["fq"], x=case.x)
    assert_same_bits(actual["dequantize"], spec["dequant"], x=case.x)
    assert_same_bits(actual["quantize_backward"], spec["dx_quant"], x=case.x)
    assert_same_bits(actual["fake_quantize_gradient"][0], spec["dx_fake"], x=case.x)


@pytest.mark.parametrize("granularity", granularities.ALL, ids=repr)
def test_granularities(granularity, implementation):
    calls.check(granularity.operands(), {"qtype": "int8", **granularity.keywords}, implementation)


@pytest.mark.parametrize("granularity", granularities.FEW, ids=repr)
def test_granularities_eager(granularity, implementation):
    calls.check(
        granularity.operands(),
        {"qtype": "int8", **granularity.keywords},
        implementation,
        compiled=False,
        names=calls.CORE,
    )


@pytest.mark.parametrize("dtype", [name for name in oracle.DTYPES if name != "float32"])
@pytest.mark.parametrize(
    "granularity",
    [*granularities.FEW, granularities.PER_CHANNEL_MIDDLE, granularities.BLOCKS, granularities.ZERO_D],
    ids=repr,
)
def test_dtypes(granularity, dtype, implementation):
    calls.check(
        granularity.operands(dtype),
        {"qtype": "int8", **granularity.keywords},
        implementation,
        names=calls.affordable(implementation),
    )


CODE_TYPES = {
    "float32": oracle.RANGES,
    "float16": ("int4", "uint8", "int16"),
    "bfloat16": ("uint4", "int8", "uint16"),
    "float64": ("int2", "uint2", "uint16"),
}


@pytest.mark.parametrize("dtype, qtype", [(dtype, qtype) for dtype, qtypes in CODE_TYPES.items() for qtype in qtypes])
def test_code_types(dtype, qtype, implementation):
    granularity = granularities.PER_CHANNEL_FIRST
    calls.check(
        granularity.operands(dtype, qtype),
        {"qtype": qtype, **granularity.keywords},
        implementation,
        names=calls.affordable(implementation),
    )


@pytest.mark.parametrize(
    "qtype, qmin, qmax",
    [
        ("int8", -127, 127),
        ("int8", 0, 1),
        ("uint8", 3, 200),
        ("int4", -7, 7),
        ("uint2", 1, 2),
        ("int16", -2048, 2048),
        ("uint16", 0, 256),
        ("int8", None, 0),
    ],
)
def test_ranges(qtype, qmin, qmax, implementation):
    granularity = granularities.PER_CHANNEL_LAST
    operands = granularity.operands("float16", qtype, qmin=qmin, qmax=qmax)
    calls.check(
        operands,
        {"qtype": qtype, "qmin": qmin, "qmax": qmax, **granularity.keywords},
        implementation,
        names=calls.affordable(implementation),
    )


def special_values(dtype, rng):
    """NaN, infinities, zeros, huge and tiny numbers, and ties with their neighbours, shuffled into a ragged array."""
    info = np.finfo(oracle.arithmetic_type(dtype)) if dtype != np.float16 else np.finfo(dtype)
    tiny = float(info.tiny)
    halves = np.arange(-140, 140) + 0.5
    values = np.concatenate(
        [
            [np.nan, np.inf, -np.inf, 0.0, -0.0, tiny, -tiny, 2 * tiny],
            [127.5, 128.5, -128.5, -129.5, 2**24, -(2**24), 1e4, -1e4],
            halves,
            halves * (1 + 2 * np.finfo(np.float32).eps),
            halves * (1 - 2 * np.finfo(np.float32).eps),
            rng.normal(size=33) * 60,
        ]
    )
    with np.errstate(over="ignore"):
        huge = np.array([info.max, info.min, info.max / 3, info.min / 7], dtype)
        return rng.permutation(np.concatenate([values.astype(dtype), huge]))


@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_special_values(dtype, implementation):
    rng = np.random.default_rng(7)
    dtype = oracle.DTYPES[dtype]
    x = np.stack([special_values(dtype, rng) for _ in range(8)])
    scale = np.tile(np.array([1, 0.5, 7, 0.1], oracle.arithmetic_type(dtype)), 2)
    zero_point = np.array([0, 0, 0, 0, 3, -128, 127, -7], np.int32)
    # Small numbers: whatever the order, the sums are far from overflow.
    dy = rng.choice([-2, -0.25, 0, 1, 3], x.shape).astype(dtype)
    calls.check(Operands(x, scale, zero_point, dy), {"axis": 0, "qtype": "int8"}, implementation)


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_special_scales(implementation, wide):
    """Whatever IEEE division gives, the same everywhere."""
    real = np.dtype(np.float64 if wide else np.float32)
    tiny = np.finfo(real).tiny
    scale = np.array(
        [0, -0.0, -1, -0.3, np.inf, -np.inf, np.nan, tiny, 3 * tiny, np.finfo(real).max, 1e30, 1e-30], real
    )
    values = [
        np.nan,
        np.inf,
        -np.inf,
        0.0,
        -0.0,
        1,
        -1,
        2.5,
        -2.5,
        63.5,
        1e30,
        -1e30,
        1e-30,
        1e4,
        tiny,
        -tiny,
        0.3,
        40.5,
    ]
    scale, zero_point = np.tile(scale, 2), np.repeat(np.int32([0, 5]), len(scale))
    x = np.tile(np.array(values, real), (len(scale), 1))
    calls.check(Operands(x, scale, zero_point, np.ones_like(x)), {"axis": 0, "qtype": "int8"}, implementation)


@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_upstream_nan_and_infinity_stay_where_the_value_was_in_range(dtype, implementation):
    dtype = oracle.DTYPES[dtype]
    upstream = np.array([np.nan, np.inf, -np.inf, 2.0, -0.0], dtype)
    x = np.repeat(np.array([0.3, 300, -300, np.nan, np.inf], dtype), len(upstream))
    dy = np.tile(upstream, 5)
    with calls.precision(dtype):
        fake = jax.vjp(lambda x: jaxquant.fake_quantize(x, 0.5, implementation=implementation), jnp.asarray(x))[1](dy)[
            0
        ]
        codes = jaxquant.quantize_backward(dy, x, 0.5, implementation=implementation)
        fake, codes = jax.device_get((fake, codes))
    assert_same_bits(fake, oracle.fake_quantize_gradient(dy, x, 0.5).dx, x=x, dy=dy)
    assert_same_bits(codes, oracle.quantize_backward(dy, x, 0.5), x=x, dy=dy)
    assert_same_bits(fake[5:], np.zeros(20, dtype))


def test_constant_zero_point_keeps_codes_positive(implementation):
    """round(-0.3) is -0; the zero point is added even where it is the constant 0, so no code is -0."""
    x = np.array([-0.3, -0.0, 0.0, -0.5], np.float32)
    for zero_point in (None, 0, np.int32(0), 0.0, -0.3):
        for call in (lambda f: f, jax.jit):
            carried = call(
                lambda x, z=zero_point: jaxquant.quantize(x, 1.0, z, dtype=x.dtype, implementation=implementation)
            )
            value = call(lambda x, z=zero_point: jaxquant.fake_quantize(x, 1.0, z, implementation=implementation))
            assert_same_bits(carried(x), np.zeros(4, np.float32), x=x)
            assert_same_bits(value(x), np.zeros(4, np.float32), x=x)


def test_fractional_zero_points_round_half_to_even(implementation):
    x = np.linspace(-20, 20, 41, dtype=np.float32)
    for zero_point in (0.5, 1.5, 2.5, -0.5, 2.4999, -7.7):
        actual = jax.jit(lambda x, z: jaxquant.fake_quantize(x, 0.3, z, implementation=implementation))(x, zero_point)
        assert_same_bits(actual, oracle.fake_quantize(x, np.float32(0.3), np.float32(zero_point)), x=x)
        codes = jaxquant.quantize(x, 0.3, np.float32(zero_point), implementation=implementation)
        assert_same_bits(codes, oracle.quantize(x, np.float32(0.3), np.float32(np.rint(zero_point))), x=x)


def test_default_implementation_has_the_same_bits():
    for granularity in granularities.FEW:
        operands = granularity.operands()
        actual = jax.jit(
            lambda x, s, z, g=granularity: (
                jaxquant.quantize(x, s, z, **g.keywords),
                jaxquant.fake_quantize(x, s, z, **g.keywords),
            )
        )(operands.x, operands.scale, operands.zero_point)
        for value, name in zip(actual, ("quantize", "fake_quantize"), strict=True):
            wanted = getattr(oracle, name)(operands.x, operands.scale, operands.zero_point, **granularity.keywords)
            assert_same_bits(value, wanted, x=operands.x)


def test_implementation_is_what_runs():
    """Guards the comparisons above: each implementation compiles to what its name says."""
    for implementation, has_kernel in (("ffi", True), ("xla", False)):
        call = jax.jit(
            lambda x, implementation=implementation: jaxquant.fake_quantize(x, 0.5, implementation=implementation)
        )
        text = call.lower(np.ones(8, np.float32)).compile().as_text()
        assert ("jaxquant_fake_quantize" in text and "custom-call" in text) == has_kernel


@pytest.mark.parametrize("zero_point", [200, -300, 127.6, -128.4])
def test_zero_points_outside_the_range(zero_point, implementation):
    """Used as they are where they are not known while tracing; the code of NaN is the zero point clamped."""
    x = np.array([np.nan, 0.0, 1.0, -1.0, 80.0, -80.0, 200.5, -200.5, np.inf, -np.inf], np.float32)
    dtype = np.int32 if isinstance(zero_point, int) else np.float32
    operands = Operands(x, np.float32(0.5), np.array(zero_point, dtype), np.ones_like(x))
    calls.check(operands, {"qtype": "int8"}, implementation)
