"""Quantised layers in Flax Linen: conversion, rules, transformations, checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh_of, put

import jaxquant
from jaxquant import observers
from jaxquant.nn import Rules, Spec, UnmatchedRules, as_dot_general

nn = pytest.importorskip("flax.linen")
linen = pytest.importorskip("jaxquant.nn.linen")

SPECS = [Spec(), Spec(w_qtype=jnp.int2, x_qtype=None), Spec(w_qtype=jnp.int4, x_qtype=jnp.uint8, learned=True)]
IMAGES = jax.random.uniform(jax.random.key(0), (4, 8, 8, 6))


def network(spec):
    return nn.Sequential([
        linen.QuantConv(8, (3, 3), spec=spec, strides=(2, 3)),
        lambda x: nn.relu(x).reshape(len(x), -1),
        linen.QuantDense(5, spec=spec),
    ])  # fmt: skip


def assert_same_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_a_converted_model_has_the_codes_and_bits_of_training(spec):
    model = network(spec)
    variables = jax.jit(model.init)(jax.random.key(1), IMAGES)
    served = linen.convert(model, variables, IMAGES)
    for name in ("layers_0", "layers_2"):
        kernel, trained = served["params"][name]["kernel"], variables["params"][name]["kernel"]
        assert kernel.qtype == jnp.dtype(spec.w_qtype) and kernel.shape == trained.shape
        scale = np.abs(trained).max(tuple(range(trained.ndim - 1)), keepdims=True) / np.float32(kernel.qmax)
        if not spec.learned:
            np.testing.assert_array_equal(kernel.scale, scale)
        codes = np.clip(np.round(np.asarray(trained) / np.asarray(kernel.scale)), kernel.qmin, kernel.qmax)
        np.testing.assert_array_equal(kernel.qvalue, codes)
    assert isinstance(variables["params"]["layers_0"]["kernel"], jax.Array)  # the given ones are left alone
    apply = jax.jit(model.apply)
    assert_same_bits(apply(variables, IMAGES), apply(served, IMAGES))
    assert_same_bits(apply(variables, IMAGES), jax.jit(lambda x: model.apply(served, x))(IMAGES))
    each = jax.jit(jax.vmap(lambda x: model.apply(served, x[None])[0]))(IMAGES)
    np.testing.assert_array_equal(each, apply(served, IMAGES)) if not spec.learned else None


def test_training_moves_learned_scales_and_lowers_the_loss():
    model, labels = network(SPECS[-1]), jnp.arange(4)
    variables = jax.jit(model.init)(jax.random.key(1), IMAGES)
    start = variables

    @jax.jit
    def step(variables):
        def loss(variables):
            return -jnp.take_along_axis(jax.nn.log_softmax(model.apply(variables, IMAGES)), labels[:, None], 1).mean()

        value, slope = jax.value_and_grad(loss)(variables)
        return jax.tree.map(lambda v, g: v - 0.1 * g, variables, slope), value

    losses = []
    for _ in range(20):
        variables, value = step(variables)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]
    for name in ("kernel_scale", "input_scale"):
        assert np.any(variables["params"]["layers_2"][name] != start["params"]["layers_2"][name])


def test_observers_gather_what_arrives_at_layers():
    spec = Spec(w_qtype=jnp.int4, x_observer=observers.MinMax(qtype=jnp.uint8, symmetric=False))
    model = network(spec)
    variables, gather = (
        jax.jit(model.init)(jax.random.key(1), 2 * IMAGES),
        jax.jit(model.apply, static_argnames="mutable"),
    )
    for batch in (IMAGES[:2], IMAGES[2:]):
        variables = {**variables, **gather(variables, batch, mutable="observed")[1]}
    first = variables["observed"]["layers_0"]["input_scale"]
    assert (first["low"], first["high"]) == (0, IMAGES.max())
    apply, served = jax.jit(model.apply), linen.convert(model, variables, IMAGES)
    constant = served["observed"]["layers_0"]["input_scale"]
    np.testing.assert_array_equal(constant.scale, np.float32(IMAGES.max()) / np.float32(255))
    assert_same_bits(apply(variables, IMAGES), apply(served, IMAGES))
    own = {"params": served["params"], "observed": jax.tree.map(jnp.array, served["observed"])}
    own["observed"]["layers_2"] = {"input_scale": jaxquant.QParams(jnp.float32(1e-3), jnp.int32(7), jnp.uint8)}
    assert np.any(apply(own, IMAGES) != apply(served, IMAGES))


class Plain(nn.Module):
    """Ordinary layers, of which two share an embedding."""

    dtype: object = None

    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(11, 16, name="table", dtype=self.dtype)
        x = nn.relu(nn.Dense(16, name="hidden", dtype=self.dtype)(table(ids)))
        return table.attend(nn.Dense(16, name="out", dtype=self.dtype)(x))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("learned", [False, True])
def test_rules_quantise_ordinary_layers_where_they_are_called(dtype, learned):
    model, ids = Plain(dtype), jnp.arange(6).reshape(2, 3)
    spec = Spec(w_qtype=jnp.int4, learned=learned)
    rules = Rules([("out/*", None), ("*", spec)], unmatched="raise")

    @jax.jit
    def apply(variables, ids):
        with linen.quantized(rules):
            return model.apply(variables, ids)

    @jax.jit
    def init(key):
        with linen.quantized(rules):
            return model.init(key, ids)

    variables = init(jax.random.key(0))
    assert ("kernel_scale" in variables["params"]["hidden"]) == learned
    assert "kernel_scale" not in variables["params"]["out"]
    served = linen.convert(model, variables, ids, rules=rules)
    assert isinstance(served["params"]["hidden"]["kernel"], jaxquant.QArray)
    assert isinstance(served["params"]["table"]["embedding"], jaxquant.QArray)
    assert isinstance(served["params"]["out"]["kernel"], jax.Array)
    assert_same_bits(apply(variables, ids), apply(served, ids))
    assert np.any(apply(variables, ids) != jax.jit(model.apply)(variables, ids))


def test_rules_that_match_nothing_are_reported():
    model, ids = Plain(), jnp.arange(3)
    variables = model.init(jax.random.key(0), ids)
    reported = pytest.warns(UnmatchedRules, match=r"head/\*; the parameters are: .*hidden/kernel")
    with reported, linen.quantized([("head/*", Spec()), ("*", Spec())]):
        model.apply(variables, ids)


def test_layers_take_dot_general():
    x = jax.random.normal(jax.random.key(0), (3, 16))
    function = as_dot_general(Spec(w_qtype=jnp.int4))
    variables = nn.Dense(8).init(jax.random.key(1), x)
    plain = nn.Dense(8, dot_general=function).apply(variables, x)
    as_class = nn.Dense(8, dot_general_cls=lambda: function).apply(variables, x)
    own = linen.QuantDense(8, spec=Spec(w_qtype=jnp.int4)).apply(variables, x)
    np.testing.assert_array_equal(plain, own)  # the bias is zero: it is added in float32 by either
    np.testing.assert_array_equal(as_class, own)


def test_stacked_layers_in_scan():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(linen.QuantDense(16, spec=Spec(w_qtype=jnp.int4), name="dense")(x)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return scan(name="stack")(x, None)[0]

    x = jax.random.normal(jax.random.key(0), (5, 16))
    variables = jax.jit(Stack().init)(jax.random.key(1), x)
    served = linen.convert(Stack(), variables, x)
    assert served["params"]["stack"]["dense"]["kernel"].shape == (3, 16, 16)
    assert_same_bits(jax.jit(Stack().apply)(variables, x), jax.jit(Stack().apply)(served, x))
    slope = jax.jit(jax.grad(lambda v: Stack().apply(v, x).sum()))(variables)
    assert np.abs(slope["params"]["stack"]["dense"]["kernel"]).max() > 0


# All-reduces of the forward and of the converted model: the sum of integers, and before it, in one, the largest
# magnitudes of what is quantised at each call and lies in parts: inputs, and kernels in training.
SHARDED = [
    (Spec(w_qtype=jnp.int4), 2, 2),
    (Spec(w_qtype=jnp.int4, x_observer=observers.AbsMax()), 2, 1),
]


@pytest.mark.parametrize("spec, forward, served", SHARDED, ids=repr)
def test_data_and_model_in_parallel(spec, forward, served):
    """The bits of one device, forward and converted; every array stays where it lies."""
    x, target = (jax.random.normal(jax.random.key(i), (8, n)) for i, n in enumerate((16, 8)))
    model = nn.Sequential([linen.QuantDense(32, spec=spec), nn.relu, linen.QuantDense(8, spec=spec)])
    variables = jax.jit(model.init)(jax.random.key(2), x)
    if spec.x_observer is not None:
        variables |= model.apply(variables, x, mutable="observed")[1]
    mesh, apply = mesh_of((2, 2)), jax.jit(model.apply)
    columns = {"kernel": P(None, "b"), "kernel_scale": P(None, "b"), "bias": P("b")}
    places = {"layers_0": columns, "layers_2": {"kernel": P("b")}}

    def place(path, leaf):
        return put(mesh, places[path[1].key].get(path[2].key, P()), leaf)

    placed = jax.tree_util.tree_map_with_path(place, variables)
    given = placed, put(mesh, P("a"), x)
    expected = apply(variables, x)
    assert_same_bits(apply(*given), expected)
    assert collectives(apply, *given) == {"all-reduce": forward}

    @jax.jit
    def step(variables, x, target):
        def loss(params):
            return ((model.apply({**variables, "params": params}, x) - target) ** 2).mean()

        params = variables["params"]
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    target_parts = put(mesh, P("a"), target)
    after = step(*given, target_parts)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=1e-6), after, step(variables, x, target))
    assert set(collectives(step, *given, target_parts)) == {"all-reduce"}
    assert all(jax.tree.leaves(jax.tree.map(lambda a, p: a.sharding == p.sharding, after, placed["params"])))

    integers = linen.convert(model, placed, x)
    jax.tree.map(np.testing.assert_array_equal, integers, linen.convert(model, variables, x))
    assert integers["params"]["layers_0"]["kernel"].data.sharding.spec == P(None, "b")
    assert_same_bits(apply(integers, given[1]), expected)
    assert collectives(apply, integers, given[1]) == {"all-reduce": served}


def test_converted_variables_in_a_checkpoint(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    model = network(SPECS[1])
    served = linen.convert(model, jax.jit(model.init)(jax.random.key(1), IMAGES), IMAGES)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "served", served)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "served", jax.tree.map(jnp.zeros_like, served))
    assert isinstance(restored["params"]["layers_2"]["kernel"], jaxquant.QArray)
    assert_same_bits(jax.jit(model.apply)(restored, IMAGES), jax.jit(model.apply)(served, IMAGES))


def test_what_a_convolution_does_not_take():
    for layer in (linen.QuantConv(8, (3,), padding="CIRCULAR"), linen.QuantConv(8, (3,), input_dilation=2)):
        with pytest.raises(ValueError, match="Conv"):
            layer.init(jax.random.key(0), jnp.ones((1, 8, 2)))
