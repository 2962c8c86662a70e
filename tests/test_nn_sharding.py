"""Quantised layers of NNX and Equinox over data and model in parallel, convolutions over data: one device's bits.

Linen's dense layers, and a training step: test_nn_linen.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh_of, put
from oracle import assert_same_bits

from jaxquant import observers
from jaxquant.nn import Spec

nnx, eqx, linen = (pytest.importorskip(name) for name in ("flax.nnx", "equinox", "flax.linen"))
qnnx, qeqx, qlinen = (pytest.importorskip(f"jaxquant.nn.{name}") for name in ("nnx", "equinox", "linen"))

X = jax.random.normal(jax.random.key(0), (8, 16))
IMAGES = jax.random.normal(jax.random.key(1), (8, 6, 5, 4))
# All-reduces of the forward and of the converted model: as in Linen.
SPECS = [(Spec(w_qtype=jnp.int4), 2, 2), (Spec(w_qtype=jnp.int4, x_observer=observers.AbsMax()), 2, 1)]


def nnx_dense(spec):
    """The arrays of a model and of the converted one, a function of these and x, where a kernel goes."""
    rngs = nnx.Rngs(0)
    model = qnnx.quantize(nnx.Sequential(nnx.Linear(16, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 8, rngs=rngs)), spec)
    qnnx.calibrate(model, X)

    def parts(model):
        graph, state = nnx.split(model)
        return state, lambda state, x: nnx.merge(graph, state)(x)

    def placed(mesh, model):
        for layer, kernel, bias in ((model.layers[0], P(None, "b"), P("b")), (model.layers[2], P("b"), P())):
            layer.kernel.set_value(put(mesh, kernel, layer.kernel.get_value()))
            layer.bias.set_value(put(mesh, bias, layer.bias.get_value()))
        return model

    return model, qnnx.convert, parts, placed, lambda model: model.layers[0].kernel.get_value().data


def equinox_dense(spec):
    keys = jax.random.split(jax.random.key(0))
    layers = [eqx.nn.Linear(16, 32, key=keys[0]), eqx.nn.Linear(32, 8, key=keys[1])]
    first, second = qeqx.quantize(layers, spec)
    if spec.x_observer is not None:
        first = first.observe(X)
        second = second.observe(jax.nn.relu(jax.vmap(first)(X)))
    model = [first, second]

    def parts(model):
        arrays, rest = eqx.partition(model, eqx.is_array)

        def call(arrays, x):
            first, second = eqx.combine(arrays, rest)
            return jax.vmap(lambda x: second(jax.nn.relu(first(x))))(x)

        return arrays, call

    def placed(mesh, model):
        def of(model):
            return [part for each in model for part in (each.layer.weight, each.layer.bias)]

        specs = (P("b", None), P("b"), P(None, "b"), P())
        return eqx.tree_at(of, model, [put(mesh, s, a) for s, a in zip(specs, of(model), strict=True)])

    return model, qeqx.convert, parts, placed, lambda model: model[0].layer.weight.data


@pytest.mark.parametrize("spec, forward, served", SPECS, ids=repr)
@pytest.mark.parametrize("framework", [nnx_dense, equinox_dense])
def test_data_and_model_in_parallel(framework, spec, forward, served):
    model, convert, parts, placed, codes_of = framework(spec)
    mesh = mesh_of((2, 2))
    x = put(mesh, P("a"), X)
    arrays, call = parts(model)
    expected = jax.jit(call)(arrays, X)
    assert_same_bits(jax.jit(parts(convert(model))[1])(parts(convert(model))[0], X), expected)

    model = placed(mesh, model)
    arrays, call = parts(model)
    call = jax.jit(call)
    assert_same_bits(call(arrays, x), expected)
    assert collectives(call, arrays, x) == {"all-reduce": forward}
    integers = convert(model)
    assert "b" in codes_of(integers).sharding.spec
    arrays, call = parts(integers)
    call = jax.jit(call)
    assert_same_bits(call(arrays, x), expected)
    assert collectives(call, arrays, x) == {"all-reduce": served}


def linen_convolution(spec):
    layer = qlinen.QuantConv(6, (3, 3), feature_group_count=2, spec=spec)
    variables = layer.init(jax.random.key(2), IMAGES)
    if spec.x_observer is not None:
        variables |= layer.apply(variables, IMAGES, mutable="observed")[1]
    served = qlinen.convert(layer, variables, IMAGES)
    return layer.apply, variables, served


def nnx_convolution(spec):
    layer = qnnx.quantize(nnx.Conv(4, 6, (3, 3), feature_group_count=2, rngs=nnx.Rngs(0)), spec)
    qnnx.calibrate(layer, IMAGES)
    (graph, state), (served_graph, served) = nnx.split(layer), nnx.split(qnnx.convert(layer))
    graphs = {jax.tree.structure(state): graph, jax.tree.structure(served): served_graph}
    return lambda s, x: nnx.merge(graphs[jax.tree.structure(s)], s)(x), state, served


def equinox_convolution(spec):
    layer = qeqx.quantize(eqx.nn.Conv2d(4, 6, 3, padding=1, groups=2, key=jax.random.key(0)), spec)
    if spec.x_observer is not None:
        layer = layer.observe(jnp.moveaxis(IMAGES, -1, 1))
    (trained, rest), (served, served_rest) = (
        eqx.partition(each, eqx.is_array) for each in (layer, qeqx.convert(layer))
    )
    others = {jax.tree.structure(trained): rest, jax.tree.structure(served): served_rest}

    def call(arrays, x):
        layer = eqx.combine(arrays, others[jax.tree.structure(arrays)])
        return jax.vmap(lambda x: layer(jnp.moveaxis(x, -1, 0)))(x)

    return call, trained, served


@pytest.mark.parametrize("spec", [s for s, *_ in SPECS], ids=repr)
@pytest.mark.parametrize("framework", [linen_convolution, nnx_convolution, equinox_convolution])
def test_convolutions_of_data_in_parallel(framework, spec):
    """Examples have scales of their own, or a constant one: nothing is sent."""
    call, trained, served = framework(spec)
    call = jax.jit(call)
    x = put(mesh_of((4, 1)), P("a"), IMAGES)
    expected = call(trained, IMAGES)
    for arrays in (trained, served):
        y = call(arrays, x)
        assert_same_bits(y, expected)
        assert y.sharding.spec[0] == "a"
        assert collectives(call, arrays, x) == {}
    assert np.abs(expected).max() > 0.1
