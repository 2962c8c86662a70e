"""Derivatives of dynamic quantisation, and the program it becomes."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_same_bits

import jaxquant
from jaxquant import PerToken

KEYWORDS = {"qtype": jnp.uint4, "symmetric": False}


def values():
    x = np.random.default_rng(2).normal(size=(5, 40)).astype(np.float32)
    x[1, :3] = np.nan, np.inf, -np.inf
    return jnp.asarray(x)


@pytest.mark.smoke
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_gradient_is_that_of_fake_quantize_with_constant_parameters(implementation):
    x = values()
    dy = jnp.asarray(np.random.default_rng(3).normal(size=x.shape).astype(np.float32))
    p = jaxquant.choose_qparams(x, PerToken(), **KEYWORDS)

    def dynamic(x):
        return jaxquant.dynamic_fake_quantize(x, **KEYWORDS, implementation=implementation)

    def fixed(x):
        return jaxquant.fake_quantize(x, p)

    expected = jax.vjp(fixed, x)[1](dy)[0]
    actual = jax.jit(lambda x, dy: jax.vjp(dynamic, x)[1](dy)[0])(x, dy)
    assert_same_bits(actual, expected)
    assert (np.asarray(actual)[1, :3] == 0).all()
    assert_same_bits(jax.jvp(dynamic, (x,), (dy,))[1], expected)  # forward mode: the mask is symmetric
    finite = jnp.where(jnp.isfinite(x), x, 0)[:2, :6]
    p = jaxquant.choose_qparams(finite, PerToken(), **KEYWORDS)
    hessian = jax.hessian(lambda x: (dynamic(x) ** 3).sum())(finite)
    np.testing.assert_allclose(hessian, jax.hessian(lambda x: (fixed(x) ** 3).sum())(finite), rtol=1e-6)


def test_no_gradient_flows_through_the_choice():
    x = values()[2:]
    for f in (
        lambda x: jaxquant.choose_qparams(x, PerToken()).scale.sum(),
        lambda x: jaxquant.dynamic_quantize(x).scale.sum(),
        lambda x: jaxquant.dynamic_quantize(x).dequantize().sum(),
    ):
        assert not np.asarray(jax.grad(f)(x)).any()
        assert not np.asarray(jax.jvp(f, (x,), (x,))[1]).any()


def test_one_call_and_small_residuals():
    x = values()
    jaxpr = str(jax.make_jaxpr(lambda x: jaxquant.dynamic_quantize(x).data)(x))
    assert jaxpr.count("jaxquant_") == 1
    _, backward = jax.vjp(jaxquant.dynamic_fake_quantize, x)
    assert sum(leaf.size >= x.size for leaf in jax.tree.leaves(backward)) == 1


@pytest.mark.smoke
def test_export_and_symbolic_shapes():
    checks = jaxquant.export_checks()
    rows = jax.export.symbolic_shape("b, 16")
    f = jax.jit(lambda x: jaxquant.dynamic_quantize(x, qtype=jnp.int4))
    exported = jax.export.export(f, disabled_checks=checks)(jax.ShapeDtypeStruct(rows, jnp.float32))
    x = values()[:, :16]
    actual = jax.export.deserialize(exported.serialize()).call(x)
    jax.tree.map(assert_same_bits, actual, f(x))


@pytest.mark.smoke
def test_vmap_gives_each_example_its_own_scale():
    x = values().reshape(5, 4, 10)
    for granularity in (jaxquant.PerTensor(), jaxquant.PerAxis(1), jaxquant.PerGroup(5)):
        for axis in (0, 1, 2):

            def f(x, granularity=granularity):
                return jaxquant.dynamic_quantize(
                    x.reshape(-1, 10) if x.shape[-1] == 10 else x.reshape(-1, 5), granularity
                )

            mapped = jax.jit(jax.vmap(f, axis))(x)
            for i in range(x.shape[axis]):
                one = f(jnp.take(x, i, axis))
                assert_same_bits(mapped.data[i], one.data)
                assert_same_bits(mapped.scale[i], one.scale)
