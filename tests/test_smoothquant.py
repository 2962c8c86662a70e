"""SmoothQuant factors and the helpers of learned step sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant import PerAxis, PerGroup, PerTensor
from jaxquant.affine.smoothquant import smooth, smoothquant_factors


def test_factors():
    rng = np.random.default_rng(0)
    a, w = rng.uniform(0.1, 100, 64).astype(np.float32), rng.uniform(0.01, 1, 64).astype(np.float32)
    for alpha in (0, 0.3, 0.5, 1):
        wanted = a.astype(np.float64) ** alpha / w.astype(np.float64) ** (1 - alpha)
        np.testing.assert_allclose(smoothquant_factors(a, w, alpha), wanted, rtol=1e-5)
    # Both sides meet in the middle: after smoothing the maxima are equal.
    s = smoothquant_factors(a, w)
    np.testing.assert_allclose(a / s, w * s, rtol=1e-5)


def test_factors_of_strange_channels():
    strange = [0.0, np.nan, np.inf, -1.0, 1e-45]
    a = np.array([*strange, *[2.0] * 5, 3e38, 1e-37], np.float32)
    w = np.array([*[2.0] * 5, *strange, 1e-37, 3e38], np.float32)
    s = np.asarray(smoothquant_factors(a, w))
    np.testing.assert_array_equal(s[[0, 1, 2, 3, 5, 6, 7, 8]], 1)
    assert np.isfinite(s).all() and (s > 0).all() and np.isfinite(1 / s).all()
    assert smoothquant_factors(np.zeros(0), np.zeros(0)).shape == (0,)


def test_smoothing_keeps_the_product_and_helps_quantisation():
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(32, 64)).astype(np.float32), rng.normal(size=(64, 16)).astype(np.float32)
    x[:, 5] *= 100  # an outlier channel
    xs, ws = jax.jit(smooth)(x, w, smoothquant_factors(np.abs(x).max(axis=0), np.abs(w).max(axis=1)))
    exact = x.astype(np.float64) @ w
    np.testing.assert_allclose(np.asarray(xs, np.float64) @ np.asarray(ws), exact, rtol=1e-4, atol=1e-3)

    def quantised(x, w):
        qx = jaxquant.fake_quantize(x, jaxquant.choose_qparams(x))
        return np.asarray(qx, np.float64) @ jaxquant.fake_quantize(w, jaxquant.choose_qparams(w, PerAxis(1)))

    plain, smoothed = (np.square(quantised(*pair) - exact).mean() for pair in ((x, w), (xs, ws)))
    assert smoothed < 0.2 * plain


def test_smooth_dtypes_and_errors():
    x, w, s = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.ones((5, 4, 6), jnp.float16), jnp.array([1.0, 2, 4, 8])
    xs, ws = smooth(x, w, s)
    assert xs.dtype == x.dtype and ws.dtype == w.dtype
    np.testing.assert_array_equal(ws[0, :, 0], s)
    dx = jax.grad(lambda x: smooth(x, w, s)[0].astype(jnp.float32).sum())(x)
    np.testing.assert_array_equal(dx[0, 0].astype(jnp.float32), 1 / s)
    with pytest.raises(ValueError, match=r"smooth: x, w, factors: expected shapes"):
        smooth(x, w, s[:3])
    with pytest.raises(ValueError, match="alpha"):
        smoothquant_factors(s, s, 2)
    with pytest.raises(ValueError, match=r"weight_absmax: expected shape \(4,\), got \(3,\)"):
        smoothquant_factors(s, s[:3])


def test_gradient_scale():
    s = jnp.array([0.1, 0.2])
    value, grad = jax.value_and_grad(lambda s: (jaxquant.lsq_gradient_scale(s, 1000, 7) ** 2).sum())(s)
    np.testing.assert_array_equal(value, (s**2).sum())
    np.testing.assert_allclose(grad, 2 * s / np.sqrt(7000), rtol=1e-6)
    tangent = jax.jvp(lambda s: jaxquant.lsq_gradient_scale(s, 1000, 7), (s,), (jnp.ones(2),))[1]
    np.testing.assert_allclose(tangent, 1 / np.sqrt(7000), rtol=1e-6)
    assert (
        jax.vmap(lambda s: jax.jit(jaxquant.lsq_gradient_scale, static_argnums=(1, 2))(s, 4, 4))(s).tolist()
        == s.tolist()
    )
    assert (
        jax.grad(lambda s: jaxquant.lsq_gradient_scale(s, 4, 4).astype(jnp.float32))(jnp.bfloat16(1)).dtype
        == "bfloat16"
    )
    with pytest.raises(ValueError, match="x_size"):
        jaxquant.lsq_gradient_scale(s, 0, 7)
    with pytest.raises(TypeError, match="scale"):
        jaxquant.lsq_gradient_scale(jnp.arange(2), 1, 7)


def test_positive_scale():
    raw = jnp.array([-np.inf, -1e30, -100.0, -1.0, 0.0, 1.0, 1e30])
    scale = np.asarray(jaxquant.positive_scale(raw))
    assert (scale >= 2.0**-60).all() and (np.diff(scale) >= 0).all()
    np.testing.assert_allclose(scale[3:6], np.log1p(np.exp([-1.0, 0, 1])), rtol=1e-6)
    wanted = np.array([2.0**-50, 1e-6, 0.01, 1.0, 50.0], np.float32)
    np.testing.assert_allclose(jaxquant.positive_scale(jaxquant.raw_scale(wanted)), wanted, rtol=2e-5)
    assert np.isfinite(jax.vmap(jax.grad(jaxquant.positive_scale))(raw[1:])).all()


def test_init():
    x = np.random.default_rng(2).normal(size=(6, 64)).astype(np.float32)
    wanted = 2 * np.abs(x.astype(np.float64)).mean(axis=1, keepdims=True) / np.sqrt(127)
    np.testing.assert_allclose(jaxquant.lsq_init(x, PerAxis(0)), wanted, rtol=1e-6)
    np.testing.assert_allclose(
        jaxquant.lsq_init(x, PerTensor(), jnp.int4), [[2 * np.abs(x).mean() / 7**0.5]], rtol=1e-5
    )
    assert jaxquant.lsq_init(x, PerGroup(16)).shape == (6, 4)
    x[0], x[1, :2], x[2] = 0, [np.nan, np.inf], np.nan
    x[3] = 3e38
    scale = np.asarray(jaxquant.lsq_init(x, PerAxis(0)))
    assert scale[0] == scale[2] == 1 and np.isfinite(scale).all()
    np.testing.assert_allclose(scale[1], 2 * np.abs(x[1, 2:]).mean() / np.sqrt(127), rtol=1e-5)
    np.testing.assert_allclose(scale[3], 2 * 3e38 / np.sqrt(127), rtol=1e-5)


def test_a_step_size_learns():
    """An int4 step size from 10 times too much, with everything here, to nearly the best."""
    x = np.random.default_rng(3).normal(size=(4096,)).astype(np.float32)

    def loss(raw):
        scale = jaxquant.lsq_gradient_scale(jaxquant.positive_scale(raw), 1, 1)
        return jnp.square(jaxquant.fake_quantize(x, scale, qtype=jnp.int4) - x).mean()

    raw = jaxquant.raw_scale(10 * jaxquant.lsq_init(x, qtype=jnp.int4)[0])
    step = jax.jit(lambda raw: raw - 0.5 * jax.grad(loss)(raw))
    for _ in range(300):
        raw = step(raw)
    best = min(float(loss(jaxquant.raw_scale(s))) for s in np.linspace(0.2, 0.6, 50))
    assert loss(raw) < 1.05 * best
