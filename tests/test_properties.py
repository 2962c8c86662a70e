"""Equalities that hold bit for bit, searched for counterexamples by hypothesis.

Shapes, granularities, dtypes and code ranges come from a fixed list, so that each is compiled once; the values are
drawn freely, special ones included.
"""

import functools

import calls
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from granularities import Granularity, Operands
from hypothesis.extra import numpy as hnp
from oracle import assert_same_bits

import jaxquant

# No example database and no clock: the same examples at every run.
thorough = hypothesis.settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
# For properties that cost several calls an example.
brisk = hypothesis.settings(thorough, max_examples=40)

CONFIGURATIONS = [
    (Granularity("per_tensor", (3, 7), ()), "float32", "int8", None, None),
    (Granularity("zero_d", (), ()), "float32", "uint8", None, None),
    (Granularity("line", (19,), ()), "bfloat16", "int8", -127, 127),
    (Granularity("per_channel_0", (4, 9), (4,), axis=0), "float32", "uint8", None, None),
    (Granularity("per_channel_1", (9, 4), (4,), axis=1), "float16", "int8", None, None),
    (Granularity("per_channel_middle", (2, 3, 5), (3,), axis=-2), "float32", "int16", None, None),
    (Granularity("per_token", (2, 3, 5), (2, 3, 1)), "bfloat16", "uint4", None, None),
    (Granularity("per_group", (3, 32), (3, 4), block_shape=(1, 8)), "float32", "int4", None, None),
    (Granularity("blocks", (4, 9), (2, 3), block_shape=(2, 3)), "float16", "int4", -7, 7),
    (Granularity("per_element", (2, 5), (2, 5)), "float32", "int2", None, None),
    (Granularity("wide", (3, 7), (3,), axis=0), "float64", "int8", None, None),
    (Granularity("wide_16", (3, 7), ()), "float64", "uint16", 100, 60000),
    (Granularity("empty", (0, 3), (3,), axis=1), "float32", "uint2", None, None),
]
configurations = st.sampled_from(CONFIGURATIONS)
FLOAT32 = [c for c in CONFIGURATIONS if c[1] == "float32"]


def keywords_of(configuration):
    granularity, _, qtype, qmin, qmax = configuration
    return {"qtype": qtype, "qmin": qmin, "qmax": qmax, **granularity.keywords}


def scales(dtype, low=-20, high=20):
    """Positive and of moderate size: subnormal quotients and products have no promised bits."""
    mantissa = st.floats(1, 2, width=32, exclude_max=True)
    return st.builds(lambda m, e: dtype.type(m * 2.0**e), mantissa, st.integers(low, high))


SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30, 65504.0, 1.0, -1.0, 0.5, -2.5]


@st.composite
def operands(draw, configuration):
    """Values that spread over the code range and past it, with ties and special values among them."""
    granularity, name, qtype, qmin, qmax = configuration
    dtype, real = oracle.DTYPES[name], oracle.arithmetic_type(oracle.DTYPES[name])
    low, high = oracle.code_range(qtype, qmin, qmax)
    narrow = (-6, 3) if name == "float16" else (-20, 20)
    scale = draw(hnp.arrays(real, granularity.scale_shape, elements=scales(real, *narrow)))
    zero_point = draw(hnp.arrays(np.int32, granularity.scale_shape, elements=st.integers(low, high)))
    reach = high - low + 3
    steps = st.one_of(
        st.floats(-reach, reach, width=32, allow_subnormal=False),
        st.integers(-2 * reach, 2 * reach).map(lambda n: n / 2),
        st.integers(-2 * reach, 2 * reach).map(lambda n: np.nextafter(np.float32(n / 2), np.float32(0))),
    )
    t = draw(hnp.arrays(np.float64, granularity.x_shape, elements=steps))
    spread_scale = oracle.spread(oracle.to_grid(scale, scale.shape, t.shape, granularity.axis), t.shape)
    with np.errstate(over="ignore"):
        x = (t * spread_scale).astype(dtype)
    special = draw(hnp.arrays(np.int8, t.shape, elements=st.integers(-30, len(SPECIAL) - 1)))
    with np.errstate(over="ignore"):
        x = np.where(special >= 0, np.array(SPECIAL).astype(dtype)[np.maximum(special, 0)], x)
    dy = draw(hnp.arrays(np.float32, t.shape, elements=st.integers(-8, 8).map(lambda n: n / 4))).astype(dtype)
    return Operands(oracle.flush(x), scale, zero_point, dy)


@functools.cache
def compiled(index, implementation):
    """All outputs of one configuration, compiled once."""
    configuration = CONFIGURATIONS[index]
    return jax.jit(calls.results(keywords_of(configuration), oracle.DTYPES[configuration[1]], implementation))


def run(configuration, o, implementation):
    with calls.precision(o.x.dtype):
        arguments = map(jnp.asarray, (o.x, o.scale, o.zero_point, o.dy))
        return jax.device_get(compiled(CONFIGURATIONS.index(configuration), implementation)(*arguments))


@thorough
@hypothesis.given(data=st.data())
def test_every_output_is_the_oracles(implementation, data):
    configuration = data.draw(configurations)
    o = data.draw(operands(configuration))
    keywords = keywords_of(configuration)
    wanted = calls.expected(o.x, o.scale, o.zero_point, o.dy, keywords)
    calls.compare(run(configuration, o, implementation), wanted, o, keywords, implementation)


@brisk
@hypothesis.given(data=st.data())
def test_implementations_agree(data):
    """Values, and gradients of x; the sums have a bound of their own."""
    configuration = data.draw(configurations)
    o = data.draw(operands(configuration))
    ffi, xla = (run(configuration, o, implementation) for implementation in ("ffi", "xla"))
    for name, value in ffi.items():
        first, second = (value[0], xla[name][0]) if isinstance(value, tuple) else (value, xla[name])
        assert_same_bits(first, second, x=o.x)


@thorough
@hypothesis.given(data=st.data())
def test_fake_quantize_is_dequantize_of_quantize(implementation, data):
    configuration = data.draw(configurations)
    o = data.draw(operands(configuration))
    outputs = run(configuration, o, implementation)
    number = ~np.isnan(o.x)
    assert_same_bits(outputs["fake_quantize"][number], outputs["dequantize"][number])
    assert_same_bits(outputs["fake_quantize"][number], outputs["dequantize_carried"][number])
    assert np.isnan(outputs["fake_quantize"][~number]).all()
    # The code of NaN dequantises to 0.
    assert_same_bits(outputs["dequantize"][~number], np.zeros((~number).sum(), o.x.dtype))


@functools.cache
def round_trip(index, implementation):
    configuration = FLOAT32[index]
    keywords = keywords_of(configuration)
    where = {name: keywords[name] for name in ("axis", "block_shape")}

    @jax.jit
    def call(q, scale, zero_point):
        y = jaxquant.dequantize(q, scale, zero_point, **where, implementation=implementation)
        return jaxquant.quantize(
            y, scale, zero_point, **calls.library_keywords(keywords), implementation=implementation
        )

    return call


@thorough
@hypothesis.given(data=st.data())
def test_codes_survive_the_round_trip(implementation, data):
    index = data.draw(st.integers(0, len(FLOAT32) - 1))
    granularity, _, qtype, qmin, qmax = FLOAT32[index]
    o = data.draw(operands(FLOAT32[index]))
    low, high = oracle.code_range(qtype, qmin, qmax)
    codes = hnp.arrays(oracle.CONTAINERS[qtype], granularity.x_shape, elements=st.integers(low, high))
    q = data.draw(codes)
    assert_same_bits(round_trip(index, implementation)(q, o.scale, o.zero_point), q)


@functools.cache
def unclipped(index, implementation):
    """Codes in a range one wider at both ends, and what arrives at x of an upstream gradient of ones."""
    configuration = CONFIGURATIONS[index]
    _granularity, _, qtype, qmin, qmax = configuration
    low, high = oracle.code_range(qtype, qmin, qmax)
    grid = calls.library_keywords(keywords_of(configuration)) | {"implementation": implementation}
    wide = grid | {"qtype": jnp.int16, "qmin": low - 1, "qmax": high + 1}

    @jax.jit
    def call(x, scale, zero_point):
        fake = jax.vjp(lambda x: jaxquant.fake_quantize(x, scale, zero_point, **grid), x)[1](jnp.ones_like(x))[0]
        codes = jaxquant.quantize_backward(jnp.ones_like(x), x, scale, zero_point, **grid)
        return jaxquant.quantize(x, scale, zero_point, **wide), fake, codes

    return call


NARROW = [i for i, configuration in enumerate(CONFIGURATIONS) if not configuration[2].endswith("16")]


@thorough
@hypothesis.given(data=st.data())
def test_the_mask_is_where_the_forward_did_not_clip(implementation, data):
    index = data.draw(st.sampled_from(NARROW))
    _, _, qtype, qmin, qmax = CONFIGURATIONS[index]
    o = data.draw(operands(CONFIGURATIONS[index]))
    low, high = oracle.code_range(qtype, qmin, qmax)
    with calls.precision(o.x.dtype):
        arguments = map(jnp.asarray, (o.x, o.scale, o.zero_point))
        wide, fake, codes = jax.device_get(unclipped(index, implementation)(*arguments))
    inside = (wide >= low) & (wide <= high) & ~np.isnan(o.x)
    np.testing.assert_array_equal(fake == 1, inside)
    np.testing.assert_array_equal(fake == 0, ~inside)
    np.testing.assert_array_equal(codes != 0, inside)


def values(keywords, implementation):
    """The outputs that involve no sum: bits whatever the granularity."""
    where = {name: keywords.get(name) for name in ("axis", "block_shape")}
    grid = {**where, "qtype": jnp.uint8, "implementation": implementation}

    def call(x, scale, zero_point, dy):
        codes = jaxquant.quantize(x, scale, zero_point, **grid)
        fq, backward = jax.vjp(lambda x: jaxquant.fake_quantize(x, scale, zero_point, **grid), x)
        return {
            "quantize": codes,
            "dequantize": jaxquant.dequantize(codes, scale, zero_point, **where, implementation=implementation),
            "fake_quantize": fq,
            "fake_quantize_gradient": backward(dy)[0],
            "quantize_backward": jaxquant.quantize_backward(dy, x, scale, zero_point, **grid),
        }

    return call


@functools.cache
def compiled_values(implementation, axis=None, block_shape=None):
    return jax.jit(values({"axis": axis, "block_shape": block_shape}, implementation))


def assert_all_same(actual, wanted):
    for name, value in wanted.items():
        assert_same_bits(actual[name], np.asarray(value))


BATCHED = (Granularity("batched", (4, 3, 7), (4, 3, 1)), "float32", "uint8", None, None)


@brisk
@hypothesis.given(data=st.data())
def test_coarser_is_finer_with_equal_scales(implementation, data):
    """Per channel with equal scales is per tensor; blocks of equal scales are per token."""
    o = data.draw(operands(BATCHED))
    scale, zero_point = o.scale[0, 0, 0], o.zero_point[0, 0, 0]
    wanted = compiled_values(implementation)(o.x, scale, zero_point, o.dy)
    for axis, size in enumerate(o.x.shape):
        equal = np.full(size, scale), np.full(size, zero_point)
        assert_all_same(compiled_values(implementation, axis)(o.x, *equal, o.dy), wanted)
    equal = np.full((4, 3, 1), scale), np.full((4, 3, 1), zero_point)
    assert_all_same(compiled_values(implementation)(o.x, *equal, o.dy), wanted)
    equal = np.full((2, 3, 7), scale), np.full((2, 3, 7), zero_point)
    assert_all_same(compiled_values(implementation, None, (2, 1, 1))(o.x, *equal, o.dy), wanted)


@thorough
@hypothesis.given(data=st.data())
def test_one_group_is_per_token(implementation, data):
    o = data.draw(operands(BATCHED))
    arguments = o.x, o.scale, o.zero_point, o.dy
    wanted = compiled_values(implementation)(*arguments)
    for block_shape in ((1, 1, 7), (1, 1, -1)):
        assert_all_same(compiled_values(implementation, None, block_shape)(*arguments), wanted)


@functools.cache
def vmapped(implementation):
    call = values({}, implementation)
    rows = jax.vmap(call)
    per_row_scale = jax.vmap(call, in_axes=(1, 1, 1, 1), out_axes=1)
    # One batch axis after the other, so that every scale is a scalar.
    nested = jax.vmap(jax.vmap(call, in_axes=(0, 0, 0, 0)))
    return {"axis 0": jax.jit(rows), "axis 1": jax.jit(per_row_scale), "nested": jax.jit(nested)}


@brisk
@hypothesis.given(data=st.data())
def test_transforms_change_nothing(implementation, data):
    """Eager, compiled, vmapped and looped over: the same bits."""
    o = data.draw(operands(BATCHED))
    arguments = o.x, o.scale, o.zero_point, o.dy
    wanted = compiled_values(implementation)(*arguments)
    transformed = vmapped(implementation)
    assert_all_same(transformed["axis 0"](*arguments), wanted)
    assert_all_same(transformed["axis 1"](*arguments), wanted)
    scalars = o.x, o.scale[..., 0], o.zero_point[..., 0], o.dy
    assert_all_same(transformed["nested"](*scalars), wanted)
    eager = values({}, implementation)
    assert_all_same(eager(*map(jnp.asarray, arguments)), wanted)
    rows = [eager(*(jnp.asarray(a[i]) for a in arguments)) for i in range(len(o.x))]
    assert_all_same({name: np.stack([row[name] for row in rows]) for name in wanted}, wanted)
