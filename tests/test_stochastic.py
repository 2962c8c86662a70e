"""Stochastic rounding: the bits of the rule, its statistics, and one draw for one element however it is computed."""

import functools
import itertools
import math

import calls
import granularities
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import threefry
from jax import export
from jax.extend.random import threefry_2x32
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh_of, put
from oracle import assert_same_bits, assert_same_sum

import jaxquant
from jaxquant._core import ffi, places
from jaxquant.affine import stochastic

IMPLEMENTATIONS = ["ffi", "xla", *(["cuda_emulation"] if ffi.module("cuda_emulation") is not None else [])]
WORDS = np.array([0x243F6A88, 0x85A308D3], np.uint32)
KEY = jax.random.wrap_key_data(jnp.asarray(WORDS), impl="threefry2x32")


def fake_quantize(x, scale, key=KEY, zero_point=None, **keywords):
    return jaxquant.fake_quantize(x, scale, zero_point, rounding="stochastic", key=key, **keywords)


def quantize(x, scale, key=KEY, zero_point=None, **keywords):
    return jaxquant.quantize(x, scale, zero_point, rounding="stochastic", key=key, **keywords)


def values(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype) * dtype(3)


# ------------------------------------------------------------------------------------------------------------ the words


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(key, counter, expected):
    """Of the authors' own test vectors."""
    assert tuple(map(int, threefry.threefry2x32(key, *counter))) == expected
    ours = stochastic.threefry2x32([jnp.uint32(k) for k in key], *(jnp.uint32(c) for c in counter))
    assert tuple(map(int, ours)) == expected


def test_words_are_those_of_jax_random():
    high = np.arange(1001, dtype=np.uint32) * np.uint32(0x9E3779B9)
    low = np.arange(1001, dtype=np.uint32)
    expected = threefry_2x32(WORDS, jnp.concatenate([high, low]))
    assert_same_bits(jnp.concatenate(stochastic.threefry2x32(WORDS, high, low)), expected)
    assert_same_bits(np.concatenate(threefry.threefry2x32(WORDS, high, low)), expected)


@pytest.mark.parametrize("sizes", [(3, 5), (7, 1 << 31, 3, 1000), (1 << 31, 1 << 31), (1, 1)])
def test_indices_in_two_words(sizes):
    rng = np.random.default_rng(0)
    for coordinates in [*rng.integers(0, sizes, (20, len(sizes))), [n - 1 for n in sizes], [0] * len(sizes)]:
        index = 0
        for c, n in zip(map(int, coordinates), sizes, strict=True):
            index = index * n + c
        high, low = places.index([jnp.uint32(c) for c in coordinates], sizes)
        assert (int(high) << 32) + int(low) == index


# ----------------------------------------------------------------------------------------------------------- the values

_KINDS = [
    (granularities.PER_TENSOR, "float32", "int8"),
    (granularities.PER_CHANNEL_LAST, "float32", "int4"),
    (granularities.PER_CHANNEL_FIRST, "bfloat16", "int8"),
    (granularities.PER_CHANNEL_MIDDLE, "float16", "uint8"),
    (granularities.PER_GROUP, "float32", "int8"),
    (granularities.BLOCKS, "float64", "int8"),
    (granularities.PER_TOKEN, "float64", "int16"),
    (granularities.ZERO_D, "float32", "int8"),
    (granularities.EMPTY, "float32", "int8"),
]


@pytest.mark.parametrize(
    ("granularity", "dtype", "qtype", "implementation"),
    [
        (*kind, implementation)
        for kind, implementation in itertools.product(_KINDS, IMPLEMENTATIONS)
        if implementation != "xla" or kind in _KINDS[:7:2]  # compiles for long
    ],
)
def test_values_and_gradients(granularity, dtype, qtype, implementation):
    o = granularity.operands(dtype, qtype, zero_point_dtype=np.float32)
    x = o.x.copy()
    if x.size:
        x.flat[::23] = np.nan
        x.flat[1::29] = np.inf
        x.flat[2::31] = -np.inf
        x.flat[3::7] = 0.0
        x.flat[4::37] = -0.0
    keywords = {"qtype": qtype, **granularity.keywords}
    drawn = threefry.uniform(WORDS, x.shape)
    library = calls.library_keywords(keywords) | {"implementation": implementation}
    with calls.precision(x.dtype):
        zero = o.zero_point.astype(o.scale.dtype)

        @jax.jit
        def everything(x, scale, zero_point, dy):
            fake = functools.partial(fake_quantize, key=KEY, **library)
            y, backward = jax.vjp(lambda x, s, z: fake(x, s, zero_point=z), x, scale, zero_point)
            wide = calls.carrier(x.dtype, qtype)
            code, code_backward = jax.vjp(
                lambda x, s, z: quantize(x, s, zero_point=z, dtype=wide, **library), x, scale, zero_point
            )
            integer = quantize(x, scale, zero_point=zero_point, **library)
            return y, backward(dy), code, code_backward(dy.astype(wide)), integer

        y, gradient, code, code_gradient, integer = jax.device_get(everything(x, o.scale, zero, o.dy))
    arguments = (x, o.scale, zero)
    keywords["drawn"] = drawn
    assert_same_bits(y, oracle.fake_quantize(*arguments, **keywords))
    assert_same_bits(integer, oracle.quantize(*arguments, **keywords))
    assert_same_bits(code, oracle.quantize(*arguments, dtype=code.dtype, **keywords))
    for actual, expected in (
        (gradient, oracle.fake_quantize_gradient(o.dy, *arguments, **keywords)),
        (code_gradient, oracle.quantize_gradient(o.dy.astype(code.dtype), *arguments, **keywords)),
    ):
        assert_same_bits(actual[0], expected.dx)
        for a, b in zip(actual[1:], (expected.dscale, expected.dzero_point), strict=True):
            assert_same_sum(a, b, o.scale.dtype, exact=implementation != "xla")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("step", [0, 1, 700, 5000])
@pytest.mark.parametrize("per_row", [True, False])
def test_gradients_by_x_with_and_without_a_draw(per_row, step, dtype):
    """Next to the ends of the range alone the draw matters to them; the kernel leaves it out elsewhere."""
    with calls.precision(jnp.dtype(dtype)):
        x = np.random.default_rng(7).uniform(-120, 120, size=(41, 1500))
        x[:, ::7] *= 4
        x[(np.abs(x) > 125) & (np.abs(x) < 130)] = 140
        x[3, :4] = np.nan, np.inf, -np.inf, -0.0
        if step:
            x.ravel()[::step] = np.where(np.arange(0, x.size, step) % 2, 127.3, -128.6)
        x, dy = (a.astype(jnp.dtype(dtype)) for a in (x, values(x.shape, 8)))
        dy[5, 5] = np.nan
        scale = np.ones((41, 1) if per_row else (1, 1500), "float64" if dtype == "float64" else "float32")
        zero = np.zeros_like(scale)

        @jax.jit
        def both(x, scale, dy):
            _, fake = jax.vjp(lambda x: fake_quantize(x, scale, implementation="ffi"), x)
            _, code = jax.vjp(lambda x: quantize(x, scale, dtype=x.dtype, implementation="ffi"), x)
            return fake(dy)[0], code(dy)[0]

        fake, code = jax.device_get(both(x, scale, dy))
        drawn = {"qtype": jnp.int8, "drawn": threefry.uniform(WORDS, x.shape)}
        assert_same_bits(fake, oracle.fake_quantize_gradient(dy, x, scale, zero, **drawn).dx)
        assert_same_bits(code, oracle.quantize_gradient(dy, x, scale, zero, **drawn).dx)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_codes(implementation):
    x = values((5, 21))
    expected = oracle.pack(oracle.quantize(x, 0.7, qtype="int4", drawn=threefry.uniform(WORDS, x.shape)), "int4")
    assert_same_bits(quantize(x, 0.7, qtype=jnp.int4, packed=True, implementation=implementation), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_lies_on_the_grid_stays(implementation):
    """floor(t + u) in float32 would move some of these: 127 + (1 - 2^-24) rounds to 128."""
    codes = np.tile(np.arange(-128, 128, dtype=np.int8), 1000 if implementation != "cuda_emulation" else 10)
    assert_same_bits(quantize(codes * np.float32(0.5), 0.5, implementation=implementation), codes)


def test_more_than_four_billion_elements():
    """A shard far inside a large array: the counter's low word wraps within it."""
    x = values(2000)
    for first in ((1 << 33) - 999, (1 << 32) - 7, 12345678901):
        index = np.uint64(first) + np.arange(x.size, dtype=np.uint64)
        u = (threefry.words(WORDS, index) >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
        operands = (x, *(np.full(1, a, np.float32) for a in (0.3, 0)), WORDS[:1], WORDS[1:])
        origin = np.array([first & 0xFFFFFFFF, first >> 32], np.uint32)
        shape = np.array([1 << 40], np.int64)
        for target in ("jaxquant_", "jaxquant_emulated_")[: len(IMPLEMENTATIONS) - 1]:
            call = jax.ffi.ffi_call(f"{target}stochastic_quantize", jax.ShapeDtypeStruct(x.shape, jnp.int8))
            attributes = {"qmin": np.int64(-128), "qmax": np.int64(127), "packed_bits": np.int64(0)}
            codes = call(*operands, origin, **attributes, index_shape=shape)
            assert_same_bits(codes, oracle.quantize(x, 0.3, drawn=u))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key0": np.zeros((2, 1), np.uint32), "key1": np.zeros((2, 1), np.uint32)}, "key: expected 1, or"),
        ({"key0": np.zeros(1, np.uint32), "key1": np.zeros(1, np.uint32)}, "key: expected x's rank"),
        ({"key0": np.zeros((1, 1), np.int32)}, "key: expected"),
        ({"origin": np.zeros(1, np.uint32)}, "origin: expected"),
        ({"index_shape": np.array([4, 4], np.int64)}, "index_shape: expected"),
        ({"index_shape": np.array([1 << 40, 1 << 40], np.int64)}, "index_shape: expected"),
        ({"index_shape": np.array([1, 1, 1], np.int64)}, "key: expected x's rank"),
    ],
)
def test_the_handler_refuses(change, message):
    one = np.ones((1, 1), np.float32)
    word = np.zeros((1, 1), np.uint32)
    given = {"x": np.ones((4, 5), np.float32), "scale": one, "zero_point": one, "key0": word, "key1": word}
    given |= {"origin": np.zeros(2, np.uint32), "index_shape": np.array([4, 5], np.int64)} | change
    shape = given.pop("index_shape")
    call = jax.ffi.ffi_call("jaxquant_stochastic_fake_quantize", jax.ShapeDtypeStruct((4, 5), jnp.float32))
    with pytest.raises(Exception, match=f"stochastic_fake_quantize: {message}"):
        call(*given.values(), qmin=np.int64(0), qmax=np.int64(9), packed_bits=np.int64(0), index_shape=shape)


# ----------------------------------------------------------------------------------------------------------- statistics

DRAWS = 200_000


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.9, 0.999])
def test_unbiased(fraction, implementation):
    for base in (0, -3, 100):
        x = jnp.full(DRAWS, np.float32(base + fraction))
        q = np.asarray(quantize(x, 1.0, jax.random.key(base + 3), implementation=implementation), np.float64)
        assert set(np.unique(q)) <= {base, base + 1}
        error = math.sqrt(fraction * (1 - fraction) / DRAWS)
        assert abs(q.mean() - float(x[0])) <= 4 * error


def test_uniform_and_uncorrelated():
    key = [jnp.asarray(word).reshape(1) for word in WORDS]
    u = np.asarray(stochastic.uniform((DRAWS,), key, 1), np.float64)
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, 100, (0, 1))[0]
    chi_squared = ((counts - DRAWS / 100) ** 2 / (DRAWS / 100)).sum()
    assert abs(chi_squared - 99) <= 4 * math.sqrt(2 * 99)
    for lag in (1, 2, 3, 512):
        correlation = np.corrcoef(u[:-lag], u[lag:])[0, 1]
        assert abs(correlation) <= 4 / math.sqrt(DRAWS)


def test_neighbours_are_uncorrelated():
    up = np.asarray(quantize(jnp.full(DRAWS, 0.5, jnp.float32), 1.0), np.float64)
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(up[:-lag], up[lag:])[0, 1]) <= 4 / math.sqrt(DRAWS)


def test_keys_draw_apart():
    x = jnp.full(DRAWS, 0.5, jnp.float32)
    a, b = (np.asarray(quantize(x, 1.0, key), np.float64) for key in jax.random.split(KEY))
    assert abs(np.corrcoef(a, b)[0, 1]) <= 4 / math.sqrt(DRAWS)


# ----------------------------------------------------------------------------------------------------------- transforms


def results(x, scale, key, implementation="ffi"):
    """The value, its gradients and integer codes."""
    y, backward = jax.vjp(
        lambda x, s: fake_quantize(x, s, key, qtype=jnp.int4, implementation=implementation), x, scale
    )
    return y, *backward(jnp.cos(y)), quantize(x, scale, key, qtype=jnp.int4, implementation=implementation)


def same(actual, expected, exact=True):
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if i == 2 and not exact:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        else:
            assert_same_bits(a, b)


@pytest.mark.smoke
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_jit_is_eager_and_keys_may_be_words(implementation):
    x, scale = values((5, 7)), jnp.float32(0.4)
    compiled = jax.jit(results, static_argnums=3)
    expected = compiled(x, scale, KEY, implementation)
    same(results(x, scale, KEY, implementation), expected, implementation == "ffi")
    same(compiled(x, scale, jnp.asarray(WORDS), implementation), expected)
    same(compiled(x, scale, WORDS, implementation), expected)


@pytest.mark.parametrize(
    "mapped, implementation",
    [
        (mapped, implementation)
        for mapped in itertools.product((0, None), repeat=3)
        for implementation in IMPLEMENTATIONS
        if any(axis == 0 for axis in mapped) and (implementation != "xla" or mapped in ((0, 0, 0), (0, None, None)))
    ],
)
def test_vmap_is_a_loop(mapped, implementation):
    xs, scales, keys = values((3, 5, 7)), np.array([0.4, 0.5, 0.7], np.float32), jax.random.split(KEY, 3)
    every = (xs, scales, keys)
    operands = [a if m == 0 else a[0] for a, m in zip(every, mapped, strict=True)]
    call = functools.partial(results, implementation=implementation)
    actual = jax.jit(jax.vmap(call, mapped))(*operands)
    compiled = jax.jit(call)
    for i in range(3):
        one = compiled(*(a[i] if m == 0 else a for a, m in zip(operands, mapped, strict=True)))
        same([a[i] for a in actual], one, implementation != "xla")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nested_vmap(implementation):
    xs, keys = values((3, 2, 5)), jax.random.split(KEY, 2)
    call = functools.partial(fake_quantize, implementation=implementation)
    actual = jax.vmap(lambda row: jax.vmap(lambda x, k: call(x, 0.4, k))(row, keys))(xs)
    turned = jax.vmap(lambda x, k: jax.vmap(lambda x: call(x, 0.4, k))(x), (1, 0), 1)(xs, keys)
    for i, j in np.ndindex(3, 2):
        expected = call(xs[i, j], 0.4, keys[j])
        assert_same_bits(actual[i, j], expected)
        assert_same_bits(turned[i, j], expected)
    scalars = jax.vmap(lambda x, k: call(x, 0.4, k))(xs[0, :, 0], keys)
    assert_same_bits(scalars, [call(xs[0, i, 0], 0.4, keys[i]) for i in range(2)])


@pytest.mark.smoke
def test_scan_and_remat():
    x, keys = values((4, 6)), jax.random.split(KEY, 4)

    def loss(scale, wrap):
        step = wrap(lambda key: fake_quantize(x, scale, key).sum())
        return jax.lax.scan(lambda total, key: (total + step(key), step(key)), 0.0, keys)

    (total, each), slope = jax.value_and_grad(lambda s: loss(s, lambda f: f)[0])(jnp.float32(0.3)), None
    del each, slope
    again, steps = loss(jnp.float32(0.3), jax.checkpoint)
    assert_same_bits(total, again)
    assert_same_bits(steps, [fake_quantize(x, jnp.float32(0.3), key).sum() for key in keys])
    plain, saved = (jax.grad(lambda s, w=w: loss(s, w)[0])(jnp.float32(0.3)) for w in (lambda f: f, jax.checkpoint))
    assert_same_bits(plain, saved)


def test_the_backward_keeps_the_key_and_no_noise():
    x = jnp.asarray(values((64, 64)))
    _, backward = jax.vjp(lambda x: fake_quantize(x, 0.3), x)
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(backward) if hasattr(leaf, "size"))
    assert sum(sizes) <= x.size + 8


@pytest.mark.smoke
def test_second_order_and_forward_mode():
    x = jnp.asarray(values(5))
    y = fake_quantize(x, 0.4, qtype=jnp.int4)
    mask = jax.grad(lambda x: fake_quantize(x, 0.4, qtype=jnp.int4).sum())(x)
    hessian = jax.hessian(lambda x: (fake_quantize(x, 0.4, qtype=jnp.int4) ** 3).sum())(x)
    np.testing.assert_allclose(hessian, np.diag(6 * y * mask), rtol=1e-5)
    forward = functools.partial(jaxquant.forward_mode.fake_quantize, qtype=jnp.int4, rounding="stochastic", key=KEY)
    value, tangent = jax.jvp(lambda x, s: forward(x, s), (x, jnp.float32(0.4)), (jnp.ones(5), jnp.float32(1)))
    _, backward = jax.vjp(lambda x, s: fake_quantize(x, s, qtype=jnp.int4), x, jnp.float32(0.4))
    dx, ds = backward(jnp.ones(5))
    assert_same_bits(value, y)
    np.testing.assert_allclose(tangent.sum(), dx.sum() + ds, rtol=1e-5)


def test_export_and_donation():
    x = values((6, 5))
    expected = fake_quantize(x, 0.4)
    exported = export.export(jax.jit(lambda x, k: fake_quantize(x, 0.4, k)), disabled_checks=jaxquant.export_checks())
    loaded = export.deserialize(exported(x, jnp.asarray(WORDS)).serialize())
    assert_same_bits(loaded.call(x, jnp.asarray(WORDS)), expected)
    (n,) = export.symbolic_shape("n")
    for implementation in ("ffi", "xla"):
        call = jax.jit(lambda x, k, i=implementation: fake_quantize(x, 0.4, k, implementation=i))
        any_size = export.export(call, disabled_checks=jaxquant.export_checks())(
            jax.ShapeDtypeStruct((n, 5), jnp.float32), jnp.asarray(WORDS)
        )
        assert_same_bits(any_size.call(x, jnp.asarray(WORDS)), expected)
    donated = jax.jit(lambda x: fake_quantize(x, 0.4), donate_argnums=0)(jnp.array(x))
    assert_same_bits(donated, expected)


# ------------------------------------------------------------------------------------------------------------- sharding

SPECS = [P("a", "b"), P(("a", "b"), None), P(None, "b"), P("b", "a"), P(None, ("a", "b"))]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", SPECS)
def test_shards_draw_what_the_whole_draws(spec, kind):
    """Shards of 12 / 4 = 3 columns begin at odd indices, and their rows are far apart."""
    x, scale = values((8, 12)), np.float32(0.4)
    expected = jax.jit(results)(x, scale, KEY)
    mesh = mesh_of((2, 2), kind)
    with jax.set_mesh(mesh):
        operands = (put(mesh, spec, x), put(mesh, P(), scale), put(mesh, P(), jnp.asarray(WORDS)))
        actual = jax.jit(results)(*operands)
        assert actual[0].sharding.is_equivalent_to(operands[0].sharding, 2)
        same(actual, expected, exact=False)
        value = jax.jit(lambda x, s, k: quantize(x, s, k, qtype=jnp.int4))
        assert collectives(value, *operands) == {}
        assert collectives(results, *operands) == {"all-reduce": 1}


def test_sharded_examples_with_keys_of_their_own():
    xs, keys = values((4, 6, 5)), jax.random.split(KEY, 4)
    call = jax.vmap(lambda x, k: fake_quantize(x, 0.4, k))
    mesh = mesh_of((2, 2))
    for spec in (P("a", "b"), P(("a", "b")), P(None, "b")):
        words = put(mesh, P(), jax.random.key_data(keys))
        assert_same_bits(jax.jit(call)(put(mesh, spec, xs), words), call(xs, keys))


@pytest.mark.smoke
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_inside_shard_map_a_shard_is_an_array(implementation):
    x = values((8, 12))
    mesh = mesh_of((2, 2))
    call = functools.partial(fake_quantize, implementation=implementation)

    def local(x, key):
        return call(x, 0.4, key)

    def folded(x, key):
        return call(x, 0.4, jax.random.fold_in(key, jax.lax.axis_index("a")))

    for function, own in ((local, lambda i: KEY), (folded, lambda i: jax.random.fold_in(KEY, i))):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
        expected = np.concatenate([call(x[4 * i : 4 * i + 4], 0.4, own(i)) for i in range(2)])
        assert_same_bits(jax.jit(mapped)(x, KEY), expected)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("keywords", "kind", "message"),
    [
        ({"rounding": "stochastic"}, ValueError, 'key: expected a key with rounding="stochastic", got None'),
        ({"key": KEY}, ValueError, 'key: expected None with rounding="nearest"'),
        ({"rounding": "up"}, ValueError, 'rounding: expected "nearest" or "stochastic", got \'up\''),
        ({"rounding": "stochastic", "key": 3}, TypeError, "key: expected a typed key or its two uint32 words, got int"),
        ({"rounding": "stochastic", "key": jnp.zeros(2)}, TypeError, "got float32"),
        (
            {"rounding": "stochastic", "key": jnp.zeros(3, jnp.uint32)},
            ValueError,
            r"one key, got shape \(3,\) of words",
        ),
        ({"rounding": "stochastic", "key": jax.random.split(KEY)}, ValueError, "map over keys with jax.vmap"),
        (
            {"rounding": "stochastic", "key": jax.random.key(0, impl="rbg")},
            TypeError,
            "a threefry2x32 key, got one of rbg",
        ),
    ],
)
def test_errors(keywords, kind, message):
    for function in (jaxquant.fake_quantize, jaxquant.quantize):
        with pytest.raises(kind, match=f"{function.__name__}: {message}" if "key:" in message else message):
            function(jnp.ones(3), 0.1, **keywords)
