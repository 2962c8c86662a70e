"""Observers and range searches beside NumPy: batches, shards, transforms, and data that breaks observers elsewhere."""

import itertools
import pickle

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxquant
from jaxquant import PerAxis, PerBlock, PerGroup, PerTensor, PerToken, observers
from jaxquant.affine import search

OBSERVERS = [
    observers.AbsMax(),
    observers.MinMax(qtype=jnp.uint8, symmetric=False),
    observers.MovingAverage(decay=0.9),
    observers.MovingAverage(qtype=jnp.int4, symmetric=False),
    observers.Percentile(percentile=99),
    observers.Percentile(qtype=jnp.uint8, symmetric=False, percentile=95),
    observers.Histogram(bins=256),
    observers.Histogram(bins=256, qtype=jnp.uint4, symmetric=False),
    observers.Histogram(bins=512, search="kl"),
    observers.Histogram(bins=256, search="percentile", qtype=jnp.int4),
    observers.Histogram(bins=256, search="percentile", qtype=jnp.uint8, symmetric=False),
]
PER_CHANNEL = [type(o)(**{**o.__dict__, "granularity": PerAxis(-1)}) for o in OBSERVERS]


def name(observer):
    return f"{type(observer).__name__}-{getattr(observer, 'search', '')}-{observer.qtype}-{observer.symmetric}"


def batches(count=3, shape=(8, 6), seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.standard_t(4, size=shape) * 2.0**i).astype(np.float32) for i in range(count)]


# Observers are hashable: compiled once for each.
update = jax.jit(lambda observer, state, x: observer.update(state, x), static_argnums=0)


def state_after(observer, xs):
    state = observer.init(xs[0])
    for x in xs:
        state = update(observer, state, x)
    return state


def range_of(qparams):
    """What a scale and a zero point reach."""
    scale = np.asarray(qparams.scale, np.float64)
    zero = 0 if qparams.zero_point is None else np.asarray(qparams.zero_point)
    return (qparams.qmin - zero) * scale, (qparams.qmax - zero) * scale


# ------------------------------------------------------------------------------------------------- what each observes


def test_absmax_and_minmax():
    xs = batches()
    together = np.concatenate(xs)
    largest = np.abs(together).max(axis=0, keepdims=True)
    qparams = observers.AbsMax(PerAxis(-1)).qparams(state_after(observers.AbsMax(PerAxis(-1)), xs))
    np.testing.assert_array_equal(qparams.scale, largest / np.float32(127))
    observer = observers.MinMax(PerAxis(-1), qtype=jnp.uint8, symmetric=False)
    state = state_after(observer, xs)
    np.testing.assert_array_equal(state["low"], np.minimum(together.min(axis=0, keepdims=True), 0))
    np.testing.assert_array_equal(state["high"], np.maximum(together.max(axis=0, keepdims=True), 0))
    wanted = jaxquant.choose_qparams(together, PerAxis(-1), qtype=jnp.uint8, symmetric=False)
    np.testing.assert_array_equal(observer.qparams(state).scale, wanted.scale)
    np.testing.assert_array_equal(observer.qparams(state).zero_point, wanted.zero_point)


def test_moving_average():
    xs = batches(5)
    average = weight = 0.0
    for x in xs:
        average = 0.9 * average + 0.1 * float(np.abs(x).max())
        weight = 0.9 * weight + 0.1
    observer = observers.MovingAverage(decay=0.9)
    scale = observer.qparams(state_after(observer, xs)).scale
    np.testing.assert_allclose(scale, [[average / weight / 127]], rtol=1e-5)
    # A batch without a finite value is no batch; the first one counts in full.
    state = observer.update(observer.init((2,)), np.array([np.nan, np.inf], np.float32))
    assert state["weight"] == 0 and observer.qparams(state).scale == 1
    state = observer.update(state, np.array([12.7, np.nan], np.float32))
    np.testing.assert_allclose(observer.qparams(state).scale, 0.1, rtol=1e-6)


def test_percentile():
    xs = batches()
    observer = observers.Percentile(percentile=90)
    wanted = np.mean([np.percentile(np.abs(x).astype(np.float64), 90) for x in xs])
    np.testing.assert_allclose(observer.qparams(state_after(observer, xs)).scale, [[wanted / 127]], rtol=1e-6)
    observer = observers.Percentile(qtype=jnp.uint8, symmetric=False, percentile=90)
    low, high = np.mean([np.percentile(x.astype(np.float64), [10, 90]) for x in xs], axis=0)
    np.testing.assert_allclose(observer.qparams(state_after(observer, xs)).scale, [[(high - low) / 255]], rtol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
def test_histogram_counts_are_exact_however_the_range_grows(symmetric):
    """Batches that grow by powers of two and more, in every order: the counts of one histogram of all values."""
    xs = [np.rint(x * 16) / 16 * np.float32(f) for x, f in zip(batches(4), (1, 64, 0.25, 4096), strict=True)]
    observer = observers.Histogram(bins=64, symmetric=symmetric)
    together = np.concatenate(xs).ravel().astype(np.float64)
    span = 2.0 ** np.ceil(np.log2(np.abs(together).max()))
    values = np.abs(together) if symmetric else together
    wanted = np.histogram(values, 64, (0 if symmetric else -span, span))[0]
    for order in itertools.permutations(range(4)):
        state = state_after(observer, [xs[i] for i in order])
        assert state["span"] == span
        np.testing.assert_array_equal(state["counts"].ravel(), wanted)


def test_histogram_percentile():
    xs = batches(4, (64, 64))
    observer = observers.Histogram(search="percentile", percentile=99)
    wanted = np.percentile(np.abs(np.concatenate(xs)), 99)
    high = range_of(observer.qparams(state_after(observer, xs)))[1]
    np.testing.assert_allclose(high, [[wanted]], rtol=0.01)


# ------------------------------------------------------------------------------------------------------------ searches


def squared_error(x, low, high, qmin, qmax, symmetric):
    x = x[np.isfinite(x)].astype(np.float64)
    scale = high / qmax if symmetric else (high - low) / (qmax - qmin)
    zero = 0 if symmetric else np.clip(qmin - np.round(low / scale), qmin, qmax)
    return np.mean(((np.clip(np.round(x / scale) + zero, qmin, qmax) - zero) * scale - x) ** 2)


@pytest.mark.parametrize("qmin, qmax", [(-127, 127), (-7, 7), (-1, 1)])
def test_least_squares_symmetric(qmin, qmax):
    """Within 1 % of the best of 400 ranges tried on the values themselves."""
    x = np.random.default_rng(2).standard_t(4, size=(64, 256)).astype(np.float32)
    x[0, :3] = np.nan, np.inf, -np.inf
    low, high = search.mse_range(x, x.shape, qmin, qmax, True)
    assert low.shape == (1, 1) and low == -high
    largest = np.abs(x[np.isfinite(x)]).max()
    best = min(squared_error(x, 0, largest * f, qmin, qmax, True) for f in np.linspace(0.01, 1, 400))
    assert squared_error(x, 0, float(high[0, 0]), qmin, qmax, True) <= 1.01 * best


@pytest.mark.parametrize("qmin, qmax", [(0, 255), (0, 15), (-8, 7)])
def test_least_squares_asymmetric(qmin, qmax):
    x = np.random.default_rng(3).standard_t(4, size=(64, 256)).astype(np.float32)
    x = np.where(x < 0, 0.05 * x, x)
    low, high = (float(v[0, 0]) for v in search.mse_range(x, x.shape, qmin, qmax, False))
    parts = 2.0 ** (-np.arange(40) / 6)
    ends = itertools.product(x.min() * parts, x.max() * parts)
    best = min(squared_error(x, a, b, qmin, qmax, False) for a, b in ends)
    assert squared_error(x, low, high, qmin, qmax, False) <= 1.03 * best


def test_each_block_has_its_own_range():
    x = np.random.default_rng(4).standard_t(4, size=(6, 64)).astype(np.float32)
    for granularity in (PerAxis(0), PerBlock((3, 16))):
        block = granularity.block_shape(x.shape)
        for symmetric in (True, False):
            qmin, qmax = (-7, 7) if symmetric else (0, 15)
            for function in (
                lambda x, b, s=symmetric, a=qmin, z=qmax: search.mse_range(x, b, a, z, s),
                lambda x, b, s=symmetric: search.percentile_range(x, b, 95.0, s),
            ):
                function = jax.jit(function, static_argnums=1)
                low, high = function(jnp.asarray(x), block)
                for i in np.ndindex(low.shape):
                    own = x[tuple(slice(j * n, j * n + n) for j, n in zip(i, block, strict=True))]
                    wanted = function(jnp.asarray(own), own.shape)
                    np.testing.assert_allclose([low[i], high[i]], np.ravel(wanted), rtol=1e-6)


def test_choose_qparams_searches():
    x = np.random.default_rng(5).standard_t(4, size=(8, 64)).astype(np.float32)
    for method in ("percentile", "mse"):
        qparams = jaxquant.choose_qparams(x, PerToken(), qtype=jnp.int4, method=method, percentile=90)
        reach = range_of(qparams)[1]
        assert (reach < np.abs(x).max(axis=1, keepdims=True)).all() and (reach > 0).all()


def test_searches_outside_jit_compile_once():
    x = jnp.asarray(np.random.default_rng(5).standard_t(4, size=(6, 96)).astype(np.float32))
    compiled = []

    def listen(event, duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 3)(x)
        assert compiled, "the event that is counted here has another name in this version of JAX"
        for symmetric, method in itertools.product((True, False), ("absmax", "minmax", "percentile", "mse")):
            for call in range(2):
                jaxquant.choose_qparams(x, PerToken(), qtype=jnp.int4, symmetric=symmetric, method=method)
                assert call == 0 or not compiled, (method, symmetric)
                compiled.clear()
        for observer in OBSERVERS:
            state = observer.init(x)
            for call in range(2):
                state = observer.update(state, x * (1 + call))
                observer.qparams(state)
                assert call == 0 or not compiled, observer
                compiled.clear()
    finally:
        jax.monitoring.clear_event_listeners()


def divergence(counts, i, levels):
    """Kullback-Leibler divergence of a threshold of i bins, after Migacz's slides, in plain loops."""
    kept = counts[:i].astype(np.float64)
    p = kept.copy()
    p[-1] += counts[i:].sum()
    q = np.zeros(i)
    level = np.arange(i) * levels // i
    for group in range(levels):
        inside = (level == group) & (kept > 0)
        if inside.any():
            q[inside] = kept[level == group].sum() / inside.sum()
    p, q = p / p.sum(), q / max(q.sum(), 1)
    q[(p > 0) & (q == 0)] = 1e-10
    return (p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum()


def test_least_divergence():
    rng = np.random.default_rng(6)
    counts = np.histogram(np.abs(rng.standard_t(3, size=100_000)), 512, (0, 64))[0].astype(np.float32)
    thresholds = np.arange(32, 513, (512 - 32) // 128)
    values = [divergence(counts, i, 32) for i in thresholds]
    found = float(search.least_divergence(jnp.asarray(counts), jnp.float32(64), 32))
    index = int(np.argmin(np.abs(thresholds * 64 / 512 - found)))
    assert thresholds[index] * 64 / 512 == found
    assert values[index] <= min(values) * 1.0001 + 1e-7
    assert found < 64


# -------------------------------------------------------------------------------------------- all observers, all ways


def assert_equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-9), a, b)


@pytest.mark.parametrize("observer", OBSERVERS, ids=name)
def test_data_that_breaks_observers(observer):
    """Nothing, zeros, one value, NaN and infinities, one sign, huge and tiny: a finite positive scale."""
    for x in (
        np.zeros((0, 4)), np.zeros((2, 4)), np.full((2, 4), 3.0), np.full((2, 4), np.nan), [[np.inf, -np.inf, 1.0]],
        np.full((2, 4), -2.0), np.full((2, 4), 3e38), [[-3e38, 3e38]], np.full((2, 4), 1e-37), [[1e-45, 0.0]],
    ):  # fmt: skip
        x = np.asarray(x, np.float32)
        state = observer.update(observer.init(x), x)
        assert all(np.isfinite(leaf).all() for leaf in state.values())
        qparams = observer.qparams(state)
        scale = np.asarray(qparams.scale)
        assert np.isfinite(scale).all() and (scale >= np.finfo(np.float32).tiny).all()
        known = x[np.isfinite(x) & (np.abs(x) > 1e-30)]
        if known.size and np.ptp(known) == 0 and not (isinstance(observer, observers.Histogram)):
            # One value is what the range ends at.
            y = jaxquant.fake_quantize(jnp.asarray(known)[None], qparams)[0]
            np.testing.assert_allclose(y, known, rtol=0.02)
    assert observer.qparams(observer.init((2, 4))).scale == 1


@pytest.mark.slow
@pytest.mark.parametrize("observer", [*OBSERVERS, *PER_CHANNEL], ids=name)
def test_jit_scan_vmap_and_pytrees(observer):
    xs = jnp.asarray(np.stack(batches()))
    wanted = state_after(observer, list(xs))
    assert all(leaf.dtype == jnp.float32 for leaf in wanted.values())
    assert_equal(jax.lax.scan(lambda s, x: (observer.update(s, x), None), observer.init(xs[0]), xs)[0], wanted)
    qparams = observer.qparams(wanted)
    assert_equal(jax.jit(observer.qparams)(pickle.loads(pickle.dumps(jax.device_get(wanted)))), qparams)
    # Independent models side by side.
    both = jnp.stack([xs, xs[::-1] * 3], axis=1)
    states = jax.vmap(lambda pair: observer.init(pair))(both[0])
    for pair in both:
        states = jax.vmap(observer.update)(states, pair)
    for i in range(2):
        own = state_after(observer, list(both[:, i]))
        assert_equal({k: v[i] for k, v in states.items()}, own)
    grads = jax.grad(lambda x: (observer.qparams(observer.update(wanted, x)).scale * x.sum()).sum())(xs[0])
    assert np.isfinite(grads).all()
    assert hash(observer) == hash(type(observer)(**observer.__dict__))


@pytest.mark.slow
@pytest.mark.parametrize("observer", [*OBSERVERS, PER_CHANNEL[0], PER_CHANNEL[6]], ids=name)
def test_merge(observer):
    """Four shards, two updates each, merged: the state of one device that saw it all."""
    mesh = meshes.mesh_of((4, 1))
    xs = batches(2, (16, 6))

    def shard(a, b):
        state = observer.update(observer.update(observer.init(a), a), b)
        return observer.merge(state, "a")

    merged = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("a"), out_specs=P()))(*xs)
    parts = [state_after(observer, [x[4 * i : 4 * i + 4] for x in xs]) for i in range(4)]
    if isinstance(observer, observers.MovingAverage):
        wanted = jax.tree.map(lambda *leaves: sum(leaves) / 4, *parts)
    elif isinstance(observer, observers.Percentile):
        wanted = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    else:
        wanted = state_after(observer, xs)
    assert_equal(merged, wanted)


@pytest.mark.smoke
def test_sharded_updates_are_global():
    mesh = meshes.mesh_of((4, 1))
    x = batches(1, (16, 6))[0]
    sharded = meshes.put(mesh, P("a"), x)
    for observer in (observers.AbsMax(), observers.Histogram(bins=64), observers.Percentile(PerAxis(-1))):
        state = observer.init(x)
        assert_equal(jax.jit(observer.update)(state, sharded), observer.update(state, x))


@pytest.mark.parametrize("granularity", [PerToken(), PerGroup(3), PerBlock((4, -1)), PerBlock((2, 3))], ids=str)
def test_qparams_fit_the_operations(granularity):
    x = batches(1)[0]
    for observer in (observers.AbsMax(granularity), observers.Histogram(granularity, bins=64, search="percentile")):
        y = jaxquant.fake_quantize(x, observer.qparams(observer.update(observer.init(x), x)))
        assert y.shape == x.shape
        np.testing.assert_allclose(y, x, atol=np.abs(x).max() / 16)


def test_errors():
    for call, message in (
        (lambda: observers.AbsMax(qtype=jnp.uint8), "signed"),
        (lambda: observers.MovingAverage(decay=1.0), "decay: expected a number from 0 to below 1, got 1.0"),
        (lambda: observers.Percentile(percentile=10), "percentile: expected a number from 50 to 100, got 10"),
        (lambda: observers.Histogram(bins=100), "bins: expected a power of two from 64 to 65536, got 100"),
        (lambda: observers.Histogram(search="best"), 'search: expected "mse", "kl" or "percentile"'),
        (lambda: observers.Histogram(search="kl", qtype=jnp.uint8, symmetric=False), "symmetric"),
        (
            lambda: observers.AbsMax(PerToken()).update(observers.AbsMax(PerToken()).init((2, 3)), jnp.ones((4, 3))),
            r"blocks of the state's shape \(2, 1\), got \(4, 1\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="a float array, got int32"):
        observers.AbsMax().update(observers.AbsMax().init((3,)), jnp.ones(3, jnp.int32))
    # Batches may differ where a scale is shared.
    observer = observers.AbsMax(PerAxis(-1))
    observer.update(observer.init((2, 3)), jnp.ones((7, 3)))
    assert observers.AbsMax(PerTensor()) == observers.AbsMax(qtype="int8")
