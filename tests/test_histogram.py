"""Counts and percentiles beside NumPy's, whatever the layout, the platform and the transformation."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxquant
from jaxquant import PerAxis, PerBlock, PerGroup, PerTensor, PerToken
from jaxquant._core import ffi
from jaxquant.affine.histogram import digit_histogram_p, histogram, histogram_p, percentile

IMPLEMENTATIONS = ["ffi", "xla", "cuda_emulation"]
LAYOUTS = [
    ((5, 77), PerTensor()),
    ((), PerTensor()),
    ((6, 5, 19), PerToken()),
    ((7, 45), PerAxis(0)),
    ((45, 37), PerAxis(-1)),
    ((4, 3, 5, 6), PerAxis(1)),
    ((4, 3, 5, 2), PerAxis((0, 2))),
    ((6, 96), PerGroup(32)),
    ((96, 18), PerGroup(32, axis=0)),
    ((6, 35), PerBlock((3, 7))),
    ((4, 6, 10), PerBlock((2, 2, 5))),
    ((5, 13), PerAxis((0, 1))),
    ((0, 4), PerAxis(1)),
    ((3, 0), PerAxis(1)),
]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    if request.param == "cuda_emulation" and ffi.module("cuda_emulation") is None:
        pytest.skip("built without the emulation")
    return request.param


def data(shape, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, size=shape).astype(np.float32)
    x = np.where(rng.random(shape) < 0.1, 0, x)
    return np.asarray(x, jnp.dtype(dtype))


def blocks(x, granularity):
    """(index of the block, its values) in the order of the blocks."""
    block = granularity.block_shape(x.shape)
    grid = tuple(1 if b == n else n // b for b, n in zip(block, x.shape, strict=True))
    for index in np.ndindex(*grid):
        yield index, x[tuple(slice(i * b, i * b + b) for i, b in zip(index, block, strict=True))].ravel()


def binned(values, low, high, bins):
    """The documented rule, one value at a time."""
    f = np.float32
    counts = np.zeros(bins, np.int64)
    largest = max(abs(low), abs(high))
    unit = f(2.0) ** -int(np.floor(np.log2(largest))) if np.isfinite(largest) and largest > 0 else f(1)
    with np.errstate(all="ignore"):
        width = f(f(high) * unit) - f(f(low) * unit)
        factor = f(bins) / width if width > 0 and np.isfinite(width) else f(0)
        for value in np.asarray(values, np.float32):
            if np.isfinite(value):
                t = f(f(f(value * unit) - f(f(low) * unit)) * factor) if factor else f(0)
                counts[int(np.clip(np.floor(t), 0, bins - 1))] += 1
    return counts


def exact_percentile(values, q):
    """NumPy's linear rule with exact ranks and float32 arithmetic."""
    values = np.sort(np.asarray(values, np.float32)[np.isfinite(np.asarray(values, np.float32))])
    if not values.size:
        return np.float32(np.nan)
    h = Fraction(q) / 100 * (values.size - 1)
    whole = int(h)
    t = np.float32(int((h - whole) * 2**24) / 2**24)
    a, b = values[whole], values[min(whole + 1, values.size - 1)]
    return a + (b - a) * t if t < 0.5 else b - (b - a) * (np.float32(1) - t)


# XLA takes a second to compile each; its reference has one form for all layouts.
CASES = [(*case, i) for i in IMPLEMENTATIONS for case in (LAYOUTS if i != "xla" else LAYOUTS[3:14:3])]


@pytest.mark.parametrize("shape, granularity, implementation", CASES, indirect=["implementation"], ids=str)
def test_counts(shape, granularity, implementation):
    x = data(shape)
    for magnitude, low in ((False, -2.5), (True, 0.0)):
        counts = np.asarray(
            histogram(x, low, 3.0, granularity, bins=37, magnitude=magnitude, implementation=implementation)
        )
        for index, values in blocks(x, granularity):
            values = np.abs(values) if magnitude else values
            np.testing.assert_array_equal(counts[index], binned(values, low, 3.0, 37))


@pytest.mark.parametrize("shape, granularity, implementation", CASES, indirect=["implementation"], ids=str)
def test_percentiles(shape, granularity, implementation):
    x, qs = data(shape), (0, 12.5, 50, 99.9, 100)
    find = functools.partial(percentile, q=qs, granularity=granularity, implementation=implementation)
    found = jax.jit(lambda x: [find(x, magnitude=magnitude) for magnitude in (False, True)])(x)
    for magnitude, results in zip((False, True), map(np.asarray, found), strict=True):
        for index, values in blocks(x, granularity):
            values = np.abs(values) if magnitude else values
            wanted = [exact_percentile(values, q) for q in qs]
            np.testing.assert_array_equal(results[(slice(None), *index)], np.asarray(wanted, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_types(dtype, implementation):
    with jax.enable_x64(dtype == "float64"):
        x = data((9, 31), dtype)
        counts = histogram(x, -2.0, 2.0, PerAxis(0), bins=64, implementation=implementation)
        q = percentile(x, [3, 99.9], PerAxis(1), implementation=implementation)
        for i in range(9):
            np.testing.assert_array_equal(counts[i, 0], binned(x[i], -2.0, 2.0, 64))
        for j in range(31):
            np.testing.assert_array_equal(q[:, 0, j], [exact_percentile(x[:, j], 3), exact_percentile(x[:, j], 99.9)])


def test_as_numpy_counts(implementation):
    """Edges that float32 holds: numpy.histogram's own counts, its last edge included."""
    x = np.random.default_rng(1).integers(-64, 65, 5000).astype(np.float32) / 16
    counts = histogram(x, -4.0, 4.0, bins=64, implementation=implementation)[0]
    np.testing.assert_array_equal(counts, np.histogram(x, 64, (-4, 4))[0])


def test_as_numpy_ranks(implementation):
    x = data((4001,), seed=3)
    for q in (0, 0.1, 25, 50, 99.9, 99.99, 100):
        wanted = np.percentile(x.astype(np.float64), q)
        np.testing.assert_allclose(percentile(x, q, implementation=implementation)[0], wanted, rtol=2e-7, atol=1e-7)


def test_values_that_are_not_counted(implementation):
    x = np.array([np.nan, np.inf, -np.inf, -9.0, 0.5, 9.0, -0.0], np.float32)
    count = functools.partial(histogram, bins=4, implementation=implementation)
    np.testing.assert_array_equal(count(x, 0.0, 1.0)[0], [2, 0, 1, 1])
    np.testing.assert_array_equal(count(x, 0.0, 1.0, magnitude=True)[0], [1, 0, 1, 2])
    # No range at all.
    for low, high in ((1.0, 1.0), (2.0, 1.0), (0.0, np.inf), (np.nan, 1.0), (0.0, 0.0)):
        np.testing.assert_array_equal(count(x, low, high)[0], [4, 0, 0, 0])
    assert np.isnan(percentile(x[:3], 50, implementation=implementation)[0])
    assert percentile(x, 100, implementation=implementation)[0] == 9
    assert percentile(x[:2], 50, implementation=implementation).shape == (1,)


@pytest.mark.parametrize("scale", [1e-35, 1e-30, 1.0, 1e38])
def test_ranges_near_the_ends_of_float32(scale, implementation):
    x = (np.linspace(-3.4, 3.4, 1000) * scale).astype(np.float32)
    low, high = np.float32(-3.4 * scale), np.float32(3.4 * scale)
    counts = histogram(x, low, high, bins=10, implementation=implementation)[0]
    np.testing.assert_array_equal(counts, binned(x, low, high, 10))
    assert counts.max() - counts.min() <= 2
    np.testing.assert_allclose(percentile(x, 50, implementation=implementation)[0], 0, atol=2e-3 * scale)
    np.testing.assert_array_equal(percentile(x, [0, 100], implementation=implementation)[:, 0], [low, high])


def test_far_apart_neighbours(implementation):
    """Their difference overflows; the value between them does not."""
    x = np.array([-3e38, 3e38], np.float32)
    assert abs(percentile(x, 50, implementation=implementation)[0]) < 1e31


def test_ranks_beyond_24_bits():
    """With 17M values a float32 rank would be off."""
    n = (1 << 24) + 4
    x = np.zeros(n, np.float32)
    x[:3] = 1.0, 2.0, 3.0
    q = 100 * (n - 3) / (n - 1)  # the 3rd largest, just about
    h = Fraction(q) / 100 * (n - 1)
    wanted = [0.0, 1.0, 2.0, 3.0][int(h) - (n - 4)] + float(h - int(h))
    assert abs(float(percentile(x, q)[0]) - wanted) < 1e-6


@pytest.mark.parametrize("bins", [1, 2, 3, 100, 8192, 65536])
def test_any_number_of_bins(bins, implementation):
    x = data((997,), seed=bins)
    counts = histogram(x, -3.0, 3.0, bins=bins, implementation=implementation)[0]
    np.testing.assert_array_equal(counts, binned(x, -3.0, 3.0, bins))


def test_many_values(implementation):
    """Several slices, each with tables of its own; long runs of one value among them."""
    n = 3_000_001 if implementation == "ffi" else 40_001
    x = data((n,), seed=5)
    x[1000 : n // 3] = 0.25
    counts = np.asarray(histogram(x, -4.0, 4.0, bins=64, implementation=implementation)[0])
    wanted = np.bincount(np.clip(np.floor((x + np.float32(4)) * np.float32(8)), 0, 63).astype(int), minlength=64)
    np.testing.assert_array_equal(counts, wanted)
    assert percentile(x, 99.9, implementation=implementation)[0] == exact_percentile(x, 99.9)
    columns = x[: n // 40 * 40].reshape(-1, 40)
    counts = np.asarray(histogram(columns, -4.0, 4.0, PerAxis(1), bins=64, implementation=implementation))
    assert counts.sum() == columns.size
    wanted = np.clip(np.floor((columns[:, 17] + np.float32(4)) * np.float32(8)), 0, 63).astype(int)
    np.testing.assert_array_equal(counts[0, 17], np.bincount(wanted, minlength=64))


# -------------------------------------------------------------------------------------------------------- transforms


def both(x, implementation=None):
    counts = histogram(x, -2.0, 2.0, PerAxis(0), bins=16, implementation=implementation)
    return counts, percentile(x, [1, 99], PerAxis(-1), magnitude=True, implementation=implementation)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_jit_scan_remat_and_empty(implementation):
    x = jnp.asarray(data((3, 7, 11)))
    call = functools.partial(both, implementation=implementation)
    compiled = jax.jit(call)
    wanted = [compiled(row) for row in x]
    wanted = jax.tree.map(lambda *rows: np.stack(rows), *wanted)
    assert_equal(call(x[0]), compiled(x[0]))
    assert_equal(jax.lax.scan(lambda c, row: (c, jax.checkpoint(call)(row)), 0, x)[1], wanted)
    assert_equal(jax.vmap(call)(x), wanted)
    assert_equal(jax.vmap(call, in_axes=2)(x.transpose(1, 2, 0)), wanted)


def test_vmap_of_each_operand(implementation):
    x, low = jnp.asarray(data((3, 7, 11))), jnp.array([-1.0, -2.0, -3.0])
    count = functools.partial(histogram, bins=8, implementation=implementation)
    high = jnp.array([1.0, 2.0, 3.0])
    for axes in ((0, None, None), (None, 0, None), (0, 0, 0), (None, 0, 0)):
        operands = [value if axis == 0 else value[0] for value, axis in zip((x, low, high), axes, strict=True)]
        out = jax.vmap(count, in_axes=axes)(*operands)
        for i in range(3):
            own = [value[i] if axis == 0 else value for value, axis in zip(operands, axes, strict=True)]
            np.testing.assert_array_equal(out[i], count(*own))


def test_gradients_are_zero(implementation):
    x = jnp.asarray(data((7, 11)))

    def loss(x):
        counts, q = both(x, implementation)
        return x.sum() + q.sum() + counts.sum()

    np.testing.assert_array_equal(jax.grad(loss)(x), np.ones_like(x))
    np.testing.assert_array_equal(jax.jvp(loss, (x,), (x,))[1], x.sum())


@functools.cache
def counted(granularity):
    return jax.jit(lambda x: (histogram(x, -2.0, 2.0, granularity, bins=16), percentile(x, [1, 99], granularity)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec, kind",
    [
        (P("a"), "Auto"),
        (P(None, "b"), "Auto"),
        (P("a", "b"), "Auto"),
        (P("a", "b"), "Explicit"),
        (P(("a", "b")), "Auto"),
    ],
    ids=str,
)
def test_sharded(spec, kind):
    mesh = meshes.mesh_of((2, 2), getattr(jax.sharding.AxisType, kind))
    x = jnp.asarray(data((8, 12)))
    for granularity in (PerTensor(), PerAxis(1), PerGroup(3)):
        wanted = counted(granularity)(x)
        with jax.set_mesh(mesh):
            found = counted(granularity)(meshes.put(mesh, spec, x))
        assert_equal(found, wanted)


def test_collectives():
    """One all-reduce for a histogram whose blocks lie on several shards, three for a percentile, none otherwise."""
    mesh = meshes.mesh_of((4, 1))
    x = meshes.put(mesh, P("a"), data((8, 12)))

    def count(g):
        return meshes.collectives(lambda x: histogram(x, -2.0, 2.0, g, bins=16), x)

    def rank(g):
        return meshes.collectives(lambda x: percentile(x, 99, g), x)

    assert count(PerTensor()) == count(PerAxis(1)) == {"all-reduce": 1}
    assert rank(PerTensor()) == {"all-reduce": 3}
    assert set(count(PerAxis(0))) <= {"all-gather"} and not count(PerAxis(0)).get("all-reduce")


@pytest.mark.smoke
def test_shard_map():
    mesh = meshes.mesh_of((4, 1))
    x = data((8, 12))

    def summed(x):
        return jax.lax.psum(histogram(x, -2.0, 2.0, bins=16), "a")

    out = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=P("a"), out_specs=P()))(x)
    np.testing.assert_array_equal(out, histogram(x, -2.0, 2.0, bins=16))


def test_export():
    x = data((8, 12))
    exported = jax.export.export(
        jax.jit(both), disabled_checks=jaxquant.export_checks() if hasattr(jaxquant, "export_checks") else ()
    )(x)
    assert_equal(jax.export.deserialize(exported.serialize()).call(x), both(x))


# ------------------------------------------------------------------------------------------------------------- errors


def test_errors():
    x = jnp.ones((4, 6))
    for call, message in (
        (lambda: histogram(x, 0, 1, bins=0), "bins: expected an integer from 1 to 65536, got 0"),
        (lambda: histogram(x, 0, 1, bins=True), "bins"),
        (lambda: histogram(x, jnp.zeros(3), 1), r"low: expected a shape that broadcasts to \(1, 1\), got \(3,\)"),
        (lambda: percentile(x, 101), "q: expected numbers from 0 to 100, got 101"),
        (lambda: percentile(x, [50, -1]), "q: expected numbers"),
        (lambda: histogram(x, 0, 1, PerGroup(4)), "divisor of 6"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="x: expected a float array, got int32"):
        histogram(jnp.ones(3, jnp.int32), 0, 1)


def test_handlers_check_again():
    """Operands that no Python function makes, straight into the primitives' kernels."""
    x, bound = jnp.ones((4, 6, 1)), jnp.zeros((1, 1, 1))
    common = {"implementation": "ffi", "magnitude": False}

    def call(target, shape, *operands, **attributes):
        attributes = {k: np.int64(v) for k, v in attributes.items()}
        out = jax.ShapeDtypeStruct(shape, jnp.int32)
        return jax.block_until_ready(jax.ffi.ffi_call(f"jaxquant_{target}", out)(*operands, **attributes))

    assert histogram_p.bind(x, bound, bound + 2, bins=2, **common).tolist() == [[[0, 24]]]
    assert digit_histogram_p.bind(x, jnp.zeros((1, 1, 0), jnp.uint32), shift=21, width=11, **common).shape == (1, 1, 0)
    bad = [
        lambda: call("histogram", (1, 1, 4), x, bound, bound, bins=0, magnitude=0),
        lambda: call("histogram", (1, 1, 3), x, bound, bound, bins=4, magnitude=0),
        lambda: call("histogram", (1, 1, 4), x, bound, bound[0], bins=4, magnitude=0),
        lambda: call("histogram", (1, 5, 4), x, jnp.zeros((1, 5, 1)), jnp.zeros((1, 5, 1)), bins=4, magnitude=0),
        lambda: call("histogram", (1, 1, 4), x[..., 0], bound[..., 0], bound[..., 0], bins=4, magnitude=0),
        lambda: call("histogram", (1, 1, 4), x, bound.astype(jnp.int32), bound, bins=4, magnitude=0),
        lambda: call("digit_histogram", (1, 1, 4), x, bound.astype(jnp.uint32), shift=31, width=2, magnitude=0),
        lambda: call("digit_histogram", (1, 1, 4), x, bound.astype(jnp.uint32), shift=0, width=17, magnitude=0),
        lambda: call("digit_histogram", (1, 1, 4), x, bound, shift=0, width=2, magnitude=0),
        lambda: call("digit_histogram", (1, 1, 4), x.astype(jnp.int8), bound, shift=0, width=2, magnitude=0),
    ]
    for wrong in bad:
        with pytest.raises(Exception, match=r"histogram: .*expected"):
            wrong()
