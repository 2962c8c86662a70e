"""Quantised layers in Equinox: replacement by rules, conversion, transformations, checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import QArray, observers
from jaxquant.nn import Rules, Spec, UnmatchedRules

eqx = pytest.importorskip("equinox")
qnn = pytest.importorskip("jaxquant.nn.equinox")

SPECS = [Spec(), Spec(w_qtype=jnp.int4, x_qtype=None), Spec(w_qtype=jnp.int4, learned=True)]
IMAGES = jax.random.normal(jax.random.key(0), (4, 4, 8, 8))


class Model(eqx.Module):
    layers: list
    head: eqx.Module
    table: eqx.Module

    def __init__(self):
        keys = jax.random.split(jax.random.key(1), 4)
        self.layers = [eqx.nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2, key=keys[0])]
        self.head = eqx.nn.Linear(128, 16, key=keys[2])
        self.table = eqx.nn.Embedding(11, 16, key=keys[3])

    def __call__(self, x):
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return self.head(x.reshape(-1)) + self.table(3)


@eqx.filter_jit
def call(model, x):
    return jax.vmap(model)(x)


def assert_same_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_a_converted_model_has_the_codes_and_bits_of_training(spec):
    model = qnn.quantize(Model(), spec)
    slope = eqx.filter_jit(eqx.filter_grad(lambda model: (call(model, IMAGES) ** 2).mean()))(model)
    model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.05 * g, slope))
    served = qnn.convert(model)
    for layer, trained in ((served.head, model.head), (served.layers[0], model.layers[0])):
        kernel, weights = layer.layer.weight, np.asarray(trained.layer.weight)
        weights = np.moveaxis(weights, (0, 1), (-1, -2))
        assert kernel.qtype == jnp.dtype(spec.w_qtype)
        codes = np.clip(np.round(weights / np.asarray(kernel.scale)), kernel.qmin, kernel.qmax)
        np.testing.assert_array_equal(kernel.qvalue, codes)
    assert_same_bits(call(model, IMAGES), call(served, IMAGES))
    np.testing.assert_allclose(call(model, IMAGES), call(Model(), IMAGES), atol=0.7)
    assert qnn.convert(served).head.layer.weight is served.head.layer.weight


def test_learned_scales_are_trained():
    model = qnn.quantize(Model(), SPECS[-1])
    slope = eqx.filter_jit(eqx.filter_grad(lambda model: (call(model, IMAGES) ** 2).mean()))(model)
    for layer in (slope.head, slope.layers[0]):
        assert np.all([np.abs(scale).max() > 0 for scale in layer.scales])


def test_typical_inputs_choose_the_scale():
    layer = eqx.nn.Linear(16, 4, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (32, 16))
    own, wide = (qnn.QuantLinear(layer, SPECS[-1], each) for each in (x, 1024 * x))
    np.testing.assert_allclose(wide.scales.input - own.scales.input, 10, atol=1e-4)  # exponents of 2


def test_observers_gather_what_arrives_at_layers():
    spec = Spec(x_observer=observers.AbsMax())
    conv = qnn.QuantConv(Model().layers[0], spec)
    for batch in (IMAGES[:2], IMAGES[2:]):
        conv = conv.observe(batch)
    assert conv.scales.input["absmax"] == np.abs(IMAGES).max()
    served = qnn.convert(conv)
    np.testing.assert_array_equal(served.scales.input.scale, np.abs(IMAGES).max() / np.float32(127))
    assert_same_bits(call(conv, IMAGES), call(served, IMAGES))


def test_rules():
    rules = Rules([("table/*", None), ("layers/*", Spec(w_qtype=jnp.int4)), ("head/weight", Spec())])
    model = qnn.quantize(Model(), rules)
    assert type(model.table) is eqx.nn.Embedding
    assert (model.layers[0].spec.w_qtype, model.head.spec.w_qtype) == ("int4", "int8")
    with pytest.warns(UnmatchedRules, match=r"tail/\*"):
        qnn.quantize(Model(), [("tail/*", Spec()), ("*", Spec())])


def test_a_converted_model_in_a_file(tmp_path):
    served = qnn.convert(qnn.quantize(Model(), SPECS[-1]))
    eqx.tree_serialise_leaves(tmp_path / "served.eqx", served)
    empty = jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if eqx.is_array(leaf) else leaf, served)
    restored = eqx.tree_deserialise_leaves(tmp_path / "served.eqx", empty)
    assert isinstance(restored.head.layer.weight, QArray)
    assert_same_bits(call(restored, IMAGES), call(served, IMAGES))


def test_stacked_layers_in_scan():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = eqx.filter_vmap(lambda key: qnn.QuantLinear(eqx.nn.Linear(16, 16, key=key)))(keys)
    x = jax.random.normal(jax.random.key(1), (16,))
    arrays, static = eqx.partition(layers, eqx.is_array)
    y, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(eqx.combine(layer, static)(x)), None), x, arrays)
    for i in range(3):
        x = jnp.tanh(jax.tree.map(lambda leaf: leaf[i], layers)(x))  # noqa: B023
    np.testing.assert_allclose(x, y, rtol=1e-6)


def test_scalars_and_padding_modes():
    layer = qnn.QuantLinear(eqx.nn.Linear("scalar", "scalar", key=jax.random.key(0)))
    assert layer(jnp.float32(0.5)).shape == ()
    circular = eqx.nn.Conv1d(2, 2, 3, padding=1, padding_mode="CIRCULAR", key=jax.random.key(0))
    with pytest.raises(ValueError, match="padding_mode"):
        qnn.QuantConv(circular)(jnp.ones((2, 8)))
