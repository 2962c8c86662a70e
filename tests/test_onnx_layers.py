"""Converted layers of every framework in ONNX: the nodes that runtimes look for, the codes of jaxquant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx_models import close, normal, onnx, operators, run

from jaxquant import observers
from jaxquant.export import to_onnx
from jaxquant.nn import Spec

linen, nnx, eqx = (pytest.importorskip(name) for name in ("flax.linen", "flax.nnx", "equinox"))
qlinen, qnnx, qeqx = (pytest.importorskip(f"jaxquant.nn.{name}") for name in ("linen", "nnx", "equinox"))

X = normal(4, 8, 9, 4)
SPECS = {
    "learned": Spec(learned=True),
    "learned W4": Spec(w_qtype=jnp.int4, learned=True),
    "observed A8 with a zero point": Spec(
        w_qtype=jnp.int4, x_observer=observers.MinMax(qtype=jnp.uint8, symmetric=False)
    ),
}


def in_linen(spec):
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = qlinen.QuantConv(8, (3, 2), spec=spec)(x)
            x = qlinen.QuantConv(6, (3, 3), (2, 1), kernel_dilation=(1, 2), feature_group_count=2, spec=spec)(
                linen.relu(x)
            )
            return qlinen.QuantDense(5, spec=spec)(x.reshape(len(x), -1))

    model = Model()
    variables = model.init(jax.random.key(0), X)
    if spec.x_observer is not None:
        variables = {**variables, **model.apply(variables, X, mutable=["observed"])[1]}
    served = qlinen.convert(model, variables, X)
    return lambda x: model.apply(served, x)


def in_nnx(spec):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Conv(4, 8, (3, 2), rngs=rngs)
            self.second = nnx.Conv(8, 6, (3, 3), (2, 1), kernel_dilation=(1, 2), feature_group_count=2, rngs=rngs)
            self.head = nnx.Linear(4 * 9 * 6, 5, rngs=rngs)

        def __call__(self, x):
            x = self.second(nnx.relu(self.first(x)))
            return self.head(x.reshape(len(x), -1))

    model = qnnx.quantize(Model(nnx.Rngs(0)), spec)
    if spec.x_observer is not None:
        qnnx.calibrate(model, X)
    return qnnx.convert(model)


def in_equinox(spec):
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [
        eqx.nn.Conv2d(4, 8, (3, 2), padding="SAME", key=keys[0]),
        eqx.nn.Conv2d(8, 6, 3, (2, 1), padding="SAME", dilation=(1, 2), groups=2, key=keys[1]),
        eqx.nn.Linear(4 * 9 * 6, 5, key=keys[2]),
    ]
    first, second, head = qeqx.quantize(layers, spec)
    images = jnp.moveaxis(X, -1, 1)
    if spec.x_observer is not None:
        first = first.observe(images)
        hidden = jax.nn.relu(jax.vmap(first)(images))
        second = second.observe(hidden)
        head = head.observe(jax.vmap(second)(hidden).reshape(len(X), -1))
    first, second, head = qeqx.convert([first, second, head])

    def one(x):
        return head(second(jax.nn.relu(first(jnp.moveaxis(x, -1, 0)))).reshape(-1))

    return jax.vmap(one)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("framework", [in_linen, in_nnx, in_equinox], ids=["linen", "nnx", "equinox"])
def test_convolutions_and_dense_layers(framework, spec):
    """Codes behind the first layer are equal where no sum rounds across a tie, and none does here."""
    function = framework(SPECS[spec])
    model = to_onnx(function, X)
    onnx.checker.check_model(model, full_check=True)
    nodes = operators(model)
    assert (nodes.count("Conv"), nodes.count("MatMul"), nodes.count("QuantizeLinear")) == (2, 1, 3)
    assert "Slice" not in nodes and "Concat" not in nodes and "MatMulInteger" not in nodes
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    makers = {node.output[0]: node.op_type for node in model.graph.node}
    assert all(makers[node.input[1]] == "DequantizeLinear" for node in convolutions)
    close(run(model, X)[0], function(X))


def test_codes_of_a_converted_convolution():
    """Integers of one scale all over: their products have no rounding, and nothing is left to tolerances."""
    spec = Spec(x_observer=observers.AbsMax())
    layer = qlinen.QuantConv(3, (3, 3), spec=spec, use_bias=False)
    x = jnp.asarray(np.random.default_rng(0).integers(-127, 128, (2, 6, 5, 4)), jnp.float32).at[0, 0, 0, 0].set(127)
    kernel = jnp.asarray(np.random.default_rng(1).integers(-127, 128, (3, 3, 4, 3)), jnp.float32)
    variables = {"params": {"kernel": kernel.at[0, 0, 0].set(127)}}
    variables |= layer.apply(variables, x, mutable=["observed"])[1]
    served = qlinen.convert(layer, variables, x)
    model = to_onnx(lambda x: layer.apply(served, x), x)
    assert operators(model).count("Conv") == 1
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)]), (3, 3), (1, 2))
    exact = np.einsum("nhwcij,ijco->nhwo", windows, np.asarray(variables["params"]["kernel"], np.float64))
    np.testing.assert_array_equal(run(model, x)[0], exact)
    np.testing.assert_array_equal(layer.apply(served, x), exact)
