"""Quantised layers in Flax NNX: replacement by rules, calibration, conversion, transformations, checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant import observers
from jaxquant.nn import Rules, Spec, UnmatchedRules, as_dot_general, as_einsum

nnx = pytest.importorskip("flax.nnx")
qnn = pytest.importorskip("jaxquant.nn.nnx")

SPECS = [Spec(), Spec(w_qtype=jnp.int4, x_qtype=None), Spec(w_qtype=jnp.int4, x_qtype=jnp.uint8, learned=True)]
IMAGES = jax.random.uniform(jax.random.key(0), (4, 8, 8, 4))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Conv(4, 8, (3, 3), strides=2, feature_group_count=2, rngs=rngs)])
        self.head = nnx.Linear(128, 16, rngs=rngs)
        self.table = nnx.Embed(11, 16, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.table.attend(self.head(x.reshape(len(x), -1)) + self.table(jnp.arange(len(x))))


@nnx.jit
def call(model, x):
    return model(x)


def assert_same_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_a_converted_model_has_the_codes_and_bits_of_training(spec):
    plain = Model(nnx.Rngs(0))
    model = qnn.quantize(plain, spec)
    assert type(plain.head) is nnx.Linear and type(model.head) is qnn.QuantLinear
    qnn.calibrate(model, IMAGES)
    served = qnn.convert(model)
    assert isinstance(model.head.kernel.get_value(), jax.Array)
    for layer, trained in ((served.layers[0], model.layers[0]), (served.head, model.head)):
        kernel, weights = layer.kernel.get_value(), np.asarray(trained.kernel[...])
        assert kernel.qtype == jnp.dtype(spec.w_qtype)
        codes = np.clip(np.round(weights / np.asarray(kernel.scale)), kernel.qmin, kernel.qmax)
        np.testing.assert_array_equal(kernel.qvalue, codes)
    assert_same_bits(call(model, IMAGES), call(served, IMAGES))
    graph, state = nnx.split(served)
    assert_same_bits(call(model, IMAGES), jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, IMAGES))


def test_training_a_quantised_model():
    optax = pytest.importorskip("optax")
    model = qnn.quantize(Model(nnx.Rngs(0)), SPECS[-1])
    qnn.calibrate(model, IMAGES)
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    before = float(model.head.input_scale[...])

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(IMAGES), jnp.arange(4)).mean()

        value, slope = nnx.value_and_grad(loss)(model)
        optimizer.update(model, slope)
        return value

    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
    assert float(model.head.input_scale[...]) != before
    assert_same_bits(call(model, IMAGES), call(qnn.convert(model), IMAGES))


def test_rules():
    model = Model(nnx.Rngs(0))
    rules = Rules([("table/*", None), ("layers/*", Spec(w_qtype=jnp.int4)), ("head/kernel", Spec())])
    quantised = qnn.quantize(model, rules)
    assert type(quantised.table) is nnx.Embed
    assert (quantised.layers[0].spec.w_qtype, quantised.head.spec.w_qtype) == ("int4", "int8")
    with pytest.warns(UnmatchedRules, match=r"tail/\*"):
        qnn.quantize(model, [("tail/*", Spec()), ("*", Spec())])


def test_calibration_is_of_the_inputs_that_arrive():
    layer = qnn.QuantLinear(16, 4, spec=SPECS[-1], rngs=nnx.Rngs(0))
    unsuited = float(layer.input_scale[...])
    qnn.calibrate(layer, 1000 * jax.random.uniform(jax.random.key(0), (32, 16)))
    assert 8 < float(layer.input_scale[...]) - unsuited < 11  # exponents of 2
    served = qnn.convert(layer)
    qnn.calibrate(served, jnp.ones((32, 16)))
    np.testing.assert_array_equal(served.input_scale[...], layer.input_scale[...])


def test_observers_gather_what_arrives_at_layers():
    model = qnn.quantize(Model(nnx.Rngs(0)), Spec(x_observer=observers.MinMax(qtype=jnp.uint8, symmetric=False)))
    for batch in (IMAGES[:2], IMAGES[2:]):
        qnn.calibrate(model, batch)
    first = model.layers[0].input_scale.get_value()
    assert (first["low"], first["high"]) == (0, IMAGES.max())
    assert not hasattr(model.table, "input_scale")
    served = qnn.convert(model)
    constant = served.layers[0].input_scale.get_value()
    np.testing.assert_array_equal(constant.scale, np.float32(IMAGES.max()) / np.float32(255))
    assert_same_bits(call(model, IMAGES), call(served, IMAGES))
    qnn.calibrate(served, 2 * IMAGES)
    np.testing.assert_array_equal(served.layers[0].input_scale.get_value().scale, constant.scale)


def test_layers_take_dot_general_and_einsum():
    x, spec = jax.random.normal(jax.random.key(0), (3, 16)), Spec(w_qtype=jnp.int4)
    plain = nnx.Linear(16, 8, dot_general=as_dot_general(spec), rngs=nnx.Rngs(0))
    einsum = nnx.Einsum("ab,bc->ac", (16, 8), (8,), einsum_op=as_einsum(spec), rngs=nnx.Rngs(0))
    own = qnn.QuantLinear(16, 8, spec=spec, rngs=nnx.Rngs(0))
    einsum.kernel[...] = plain.kernel[...]
    np.testing.assert_array_equal(plain(x), own(x))
    np.testing.assert_array_equal(einsum(x), own(x))


def test_vmap_over_stacked_layers():
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(key):
        return qnn.QuantLinear(16, 16, rngs=nnx.Rngs(key))

    layers, x = create(jax.random.split(jax.random.key(0), 3)), jax.random.normal(jax.random.key(1), (5, 16))
    y = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(layers, x)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return layer(x)

    assert forward(x, layers).shape == (5, 16)
    expected = jaxquant.qat_dense(x, layers.kernel[...][1], layers.bias[...][1])
    np.testing.assert_array_equal(y[1], expected)


def test_a_converted_state_in_a_checkpoint(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    served = qnn.convert(qnn.quantize(Model(nnx.Rngs(0)), SPECS[0]))
    state = nnx.to_pure_dict(nnx.state(served))
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "served", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "served", jax.tree.map(jnp.zeros_like, state))
    assert isinstance(restored["head"]["kernel"], jaxquant.QArray)
    np.testing.assert_array_equal(restored["head"]["kernel"].qvalue, state["head"]["kernel"].qvalue)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
