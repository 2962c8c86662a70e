"""Parameters chosen from data, and quantisation with them in one pass, against NumPy."""

import math
import zlib

import dynamic_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import assert_same_bits

import jaxquant
import jaxquant.testing
from jaxquant import PerAxis, PerBlock, PerGroup, PerTensor, PerToken
from jaxquant.affine import choose

EMULATED = jaxquant.testing.emulation_available()
IMPLEMENTATIONS = ("ffi", "xla", *(("cuda_emulation",) if EMULATED else ()))
DTYPES = ("float32", "bfloat16", "float16", "float64")

# Shape, granularity: every way that blocks lie in memory.
LAYOUTS = {
    "per_tensor": ((5, 77), PerTensor()),
    "per_token": ((6, 5, 19), PerToken()),
    "short_tokens": ((37, 3), PerToken()),
    "aligned_tokens": ((5, 256), PerToken()),
    "long_tokens": ((3, 1056), PerToken()),
    "first_axis": ((7, 45), PerAxis(0)),
    "last_axis": ((45, 7), PerAxis(-1)),
    "many_columns": ((9, 300), PerAxis(1)),
    "middle_axis": ((4, 3, 5, 6), PerAxis(1)),
    "two_axes": ((4, 3, 9), PerAxis((0, 2))),
    "groups": ((6, 96), PerGroup(32)),
    "odd_groups": ((5, 15), PerGroup(3)),
    "groups_down": ((12, 10), PerGroup(4, axis=0)),
    "blocks": ((6, 35), PerBlock((3, 7))),
    "blocks_3d": ((4, 6, 10), PerBlock((2, -1, 5))),
    "per_element": ((5, 13), PerBlock((1, 1))),
    "line": ((67,), PerTensor()),
    "zero_d": ((), PerTensor()),
    "one": ((1, 1), PerToken()),
}


def block_of(layout):
    shape, granularity = LAYOUTS[layout]
    return granularity.block_shape(shape)


def data(layout, dtype="float32", *, edges=True):
    """Values of many magnitudes; with edges, some that are not finite, and a block of zeros."""
    shape, _ = LAYOUTS[layout]
    rng = np.random.default_rng(zlib.crc32(f"{layout} {dtype}".encode()))
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-3, 4, shape)
    if rng.random() < 0.3:
        x = np.abs(x) + 0.5
    if edges and x.size > 20:
        flat = x.reshape(-1)
        places = rng.permutation(x.size)[:8]
        flat[places] = [np.nan, np.inf, -np.inf, np.nan, 0.0, -0.0, 30000.0, -1e-5]
        for i, (_, elements) in enumerate(dynamic_oracle.blocks(shape, block_of(layout))):
            if i == 1:
                x[elements] = 0
    return x.astype(oracle.DTYPES[dtype])


def check(x, layout, implementation, **keywords):
    _, granularity = LAYOUTS[layout]
    block = block_of(layout)
    qtype = keywords.get("qtype", "int8")
    codes, scale, zero_point = dynamic_oracle.quantize(x, block, **keywords)
    keywords = {**keywords, "qtype": jnp.dtype(qtype), "implementation": implementation}
    params, q, fake = jax.jit(
        lambda x: (
            jaxquant.choose_qparams(x, granularity, **keywords),
            jaxquant.dynamic_quantize(x, granularity, **keywords),
            jaxquant.dynamic_fake_quantize(x, granularity, **keywords),
        )
    )(x)
    for result in (params, q):
        assert_same_bits(result.scale, scale)
        if keywords.get("symmetric", True):
            assert result.zero_point is None
        else:
            assert_same_bits(result.zero_point, zero_point)
    assert (q.qmin, q.qmax) == (params.qmin, params.qmax)
    assert q.shape == x.shape
    assert_same_bits(q.qvalue, codes)
    if qtype in oracle.BITS and x.ndim:
        assert_same_bits(q.data, oracle.pack(codes, qtype))
    expected = dynamic_oracle.fake_quantize(
        x, block, **{k: v for k, v in keywords.items() if k in KEYS} | {"qtype": qtype}
    )
    assert_same_bits(fake, expected)
    return q


KEYS = ("symmetric", "narrow_range")
SYMMETRIES = [("int8", True), ("uint8", False), ("int4", True), ("int4", False)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, implementation):
    for qtype, symmetric in SYMMETRIES[1:3] if implementation == "xla" else SYMMETRIES:
        check(data(layout), layout, implementation, qtype=qtype, symmetric=symmetric)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("layout", ["per_tensor", "aligned_tokens", "last_axis", "groups", "blocks"])
def test_every_dtype(layout, dtype, implementation, x64):
    for qtype, symmetric in SYMMETRIES[:3]:
        check(data(layout, dtype), layout, implementation, qtype=qtype, symmetric=symmetric)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_code_type(implementation):
    for qtype in oracle.RANGES:
        for symmetric in (True, False) if qtype[0] == "i" else (False,):
            for narrow in (None, True, False):
                if implementation == "xla" and (narrow is not None or qtype not in ("int2", "uint16")):
                    continue  # the rule is the same code for all, and each compiles
                check(data("groups"), "groups", implementation, qtype=qtype, symmetric=symmetric, narrow_range=narrow)


EDGES = {
    "zeros": [0.0, -0.0, 0.0],
    "nothing_finite": [np.nan, np.inf, -np.inf],
    "subnormal": [1e-40, -1e-41, 0.0],
    "tiny": [1.5e-38, -1e-37, 0.0],
    "huge": [3.4e38, -3.4e38, 1.0],
    "largest": [LARGEST := np.finfo(np.float32).max, 0.0, -1.0],
    "positive": [3.0, 4.0, 5.5],
    "negative": [-3.0, -4.0, -5.5],
    "negative_huge": [-3e38, -1.0, -LARGEST],
    "beside_infinity": [np.inf, 2.0, -1.0],
    "ties": [127.0, 0.5, 1.5],
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_edges(implementation):
    x = np.asarray([*EDGES.values()], np.float32)
    LAYOUTS["edges"] = (x.shape, PerToken())
    for qtype, symmetric in (*SYMMETRIES, ("uint16", False), ("int16", True)):
        q = check(x, "edges", implementation, qtype=qtype, symmetric=symmetric)
        scale = np.asarray(q.scale)
        assert (scale >= np.finfo(np.float32).tiny).all() and np.isfinite(scale).all()
        exact = np.asarray(q.dequantize())
        for name in ("zeros", "subnormal"):
            assert not exact[[*EDGES].index(name)].any(), name
        assert scale[0] == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_beyond_float32(implementation, x64):
    x = np.asarray([[1e300, 1.0, -2.0], [-1e300, np.inf, 1e-300], [1e-300, 0, 0]])
    LAYOUTS["beyond"] = (x.shape, PerToken())
    for symmetric in (True, False):
        check(x, "beyond", implementation, symmetric=symmetric)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_empty(shape, implementation):
    for granularity in (PerTensor(), PerToken(), PerAxis(0)):
        block = granularity.block_shape(shape)
        x = jnp.zeros(shape)
        q = jaxquant.dynamic_quantize(x, granularity, symmetric=False, qtype=jnp.int4, implementation=implementation)
        assert q.shape == shape and q.dequantize().shape == shape
        assert q.scale.shape == dynamic_oracle.grid(shape, block)
        assert (np.asarray(q.scale) == 1).all() and (np.asarray(q.zero_point) == -8).all()
        y = jaxquant.dynamic_fake_quantize(x, granularity, implementation=implementation)
        assert y.shape == shape


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ranges(implementation, x64):
    for layout in LAYOUTS:
        for dtype in DTYPES if layout in ("groups", "last_axis") else ("float32",):
            x = data(layout, dtype)
            block = block_of(layout)
            expected = np.zeros((2, *dynamic_oracle.grid(x.shape, block)), np.float32)
            for index, elements in dynamic_oracle.blocks(x.shape, block):
                expected[0, *index], expected[1, *index] = dynamic_oracle.range_of(x[elements])
            low, high = choose.block_range(x, block, absolute=False, implementation=implementation)
            assert_same_bits(low, expected[0])
            assert_same_bits(high, expected[1])
            (largest,) = choose.block_range(x, block, absolute=True, implementation=implementation)
            assert_same_bits(largest, np.maximum(np.maximum(-expected[0], expected[1]), 0))


def test_large():
    """More than one thread, slices too large for a cache, parts that are merged."""
    rng = np.random.default_rng(3)
    for shape, granularity in [
        ((3, 300_000), PerToken()), ((700, 1001), PerAxis(1)), ((700, 1001), PerTensor()), ((512, 1024), PerToken()),
        ((2, 3, 100_000), PerAxis(1)), ((4096, 257), PerToken()), ((4, 100_000), PerAxis(1)),
    ]:  # fmt: skip
        x = rng.normal(size=shape).astype(np.float32)
        axes = tuple(d for d, b in enumerate(granularity.block_shape(shape)) if b != 1)
        scale = np.abs(x).max(axes, keepdims=True) / np.float32(127)
        for qtype in ("int8", "int4"):
            scale = np.abs(x).max(axes, keepdims=True) / np.float32(dynamic_oracle.limits(qtype, True)[1])
            q = jaxquant.dynamic_quantize(x, granularity, qtype=jnp.dtype(qtype))
            assert_same_bits(q.scale, scale)
            assert_same_bits(q.qvalue, oracle.quantize(x, scale, qtype=qtype, qmin=q.qmin))


# ------------------------------------------------------------------------------------------------------- choose_qparams


def test_methods_and_symmetry():
    x = data("groups")
    block = block_of("groups")
    centred = dynamic_oracle.choose(x, block, "uint8", False, centred=True)
    p = jaxquant.choose_qparams(x, PerGroup(32), qtype=jnp.uint8, symmetric=False, method="absmax")
    assert_same_bits(p.scale, centred[0])
    assert_same_bits(p.zero_point, centred[1])
    for method in (None, "absmax", "minmax"):
        p = jaxquant.choose_qparams(x, PerGroup(32), method=method)
        assert_same_bits(p.scale, dynamic_oracle.choose(x, block)[0])
    p = jaxquant.choose_qparams(x, PerGroup(32), qtype=jnp.uint8, symmetric=False)
    assert_same_bits(p.scale, dynamic_oracle.choose(x, block, "uint8", False)[0])
    assert p.block_shape == (1, 32) and p.scale.shape == (6, 3)
    assert jaxquant.choose_qparams(x, PerToken()).block_shape is None


def test_qparams_serve_everywhere():
    x = data("groups", edges=False)
    for granularity in (PerTensor(), PerToken(), PerAxis(1), PerGroup(32), PerBlock((3, -1))):
        p = jaxquant.choose_qparams(x, granularity, qtype=jnp.int4, symmetric=False)
        q = jaxquant.dynamic_quantize(x, granularity, qtype=jnp.int4, symmetric=False)
        assert_same_bits(jaxquant.quantize(x, p), q.qvalue)
        assert_same_bits(
            jaxquant.fake_quantize(x, p),
            jaxquant.dynamic_fake_quantize(x, granularity, qtype=jnp.int4, symmetric=False),
        )
        assert_same_bits(jaxquant.dequantize(q.qvalue, p), q.dequantize())


def test_hypothetical_ranges_become_parameters_under_jit():
    """XLA must not turn the quotients into products."""
    rng = np.random.default_rng(0)
    low = -np.abs(rng.normal(size=5000)).astype(np.float32)
    high = np.abs(rng.normal(size=5000)).astype(np.float32)
    for symmetric in (True, False):
        for qmin, qmax in ((-127, 127), (-7, 7), (0, 255)):
            if symmetric and qmin == 0:
                continue
            expected = [dynamic_oracle.parameters(*pair, qmin, qmax, symmetric) for pair in zip(low, high, strict=True)]
            scale, zero = jax.jit(choose.parameters, static_argnums=(2, 3, 4))(low, high, qmin, qmax, symmetric)
            assert_same_bits(scale, np.asarray([e[0] for e in expected], np.float32))
            assert_same_bits(zero.astype(jnp.int32), np.asarray([e[1] for e in expected], np.int32))


ERRORS = {
    "unsigned": ({"qtype": jnp.uint8}, ValueError, "symmetric=True, got uint8"),
    "granularity": ({"granularity": "token"}, TypeError, "PerTensor"),
    "does_not_divide": ({"granularity": PerGroup(5)}, ValueError, "PerGroup: size: expected a divisor"),
    "qtype": ({"qtype": jnp.float32}, TypeError, "qtype"),
    "symmetric": ({"symmetric": 1}, TypeError, "symmetric: expected a bool"),
    "narrow_range": ({"narrow_range": "yes"}, TypeError, "narrow_range: expected a bool"),
    "implementation": ({"implementation": "gpu"}, ValueError, "implementation"),
}


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize("name", ["choose_qparams", "dynamic_quantize", "dynamic_fake_quantize"])
def test_errors(name, case):
    keywords, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        getattr(jaxquant, name)(jnp.ones((2, 8)), **keywords)


def test_errors_of_operands_and_methods():
    with pytest.raises(TypeError, match="x: expected a floating array"):
        jaxquant.dynamic_quantize(jnp.ones((2, 8), jnp.int8))
    with pytest.raises(ValueError, match="method: expected one of absmax, minmax"):
        jaxquant.choose_qparams(jnp.ones(3), method="max")
    with pytest.raises(ValueError, match="percentile: expected a number from 0 to 100"):
        jaxquant.choose_qparams(jnp.ones(3), method="percentile", percentile=101)


def _raw(name, x, *results, **attributes):
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    return jax.ffi.ffi_call(f"jaxquant_{name}", shapes)(x, **{k: np.int64(v) for k, v in attributes.items()})


F32, I8 = jnp.float32, jnp.int8
GRID = {"qmin": -127, "qmax": 127, "symmetric": 1, "packed_bits": 0}
WRONG = {
    "rank": ("range", ((0,), F32), ((4,), F32), {"absolute": 1}),
    "divisor": ("range", ((0,), F32), ((3, 1), F32), {"absolute": 1}),
    "type": ("range", ((0,), F32), ((4, 1), jnp.float64), {"absolute": 1}),
    "low": ("range", ((1, 1), F32), ((4, 1), F32), {"absolute": 0}),
    "codes": ("dynamic_quantize", ((4, 7), I8), ((4, 1), F32), ((4, 1), F32), GRID),
    "zero_point": ("dynamic_quantize", ((4, 8), I8), ((4, 1), F32), ((1, 1), F32), GRID),
    "scale": ("dynamic_quantize", ((4, 8), I8), ((4, 1), jnp.float16), ((4, 1), jnp.float16), GRID),
    "qmax": ("dynamic_quantize", ((4, 8), I8), ((4, 1), F32), ((4, 1), F32), {**GRID, "qmax": -127}),
    "positive": ("dynamic_quantize", ((4, 8), I8), ((4, 1), F32), ((4, 1), F32), {**GRID, "qmax": -1}),
    "bits": ("dynamic_quantize", ((4, 4), jnp.uint8), ((4, 1), F32), ((4, 1), F32), {**GRID, "packed_bits": 3}),
    "packed": ("dynamic_quantize", ((4, 3), jnp.uint8), ((4, 1), F32), ((4, 1), F32), {**GRID, "packed_bits": 4}),
    "value": ("dynamic_fake_quantize", ((4, 8), jnp.float16), ((4, 1), F32), ((4, 1), F32), GRID),
}


@pytest.mark.parametrize("case", WRONG)
def test_handlers_refuse(case, x64):
    name, *results, attributes = WRONG[case]
    with pytest.raises(Exception, match=f"{name}: .*expected .*got"):
        jax.block_until_ready(_raw(name, jnp.ones((4, 8), F32), *results, **attributes))


assert math.isfinite(float(LARGEST))
