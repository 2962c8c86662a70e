"""to_onnx: other primitives than quantised ones, and the model as a whole."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.export import symbolic_shape
from onnx_models import B, W, X, agrees, close, normal, operators, run

import jaxquant
from jaxquant import PerAxis, PerGroup, dynamic_quantize
from jaxquant.export import to_onnx

# ----------------------------------------------------------------------------------------------------- other primitives

ELEMENTWISE = {
    "relu": jax.nn.relu, "gelu": jax.nn.gelu, "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "softmax": jax.nn.softmax, "softplus": lambda x: jnp.log1p(jnp.exp(x)), "tanh": jnp.tanh, "relu6": jax.nn.relu6,
    "leaky": jax.nn.leaky_relu,
    "layernorm": lambda x: (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),
    "where": lambda x: jnp.where(x > 0, x, 0.5), "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "square": lambda x: x**2 + x**3 - x**-2,
    "scalars": lambda x: 2 * x / 3 + 1, "rows": lambda x: x * jnp.arange(4.0) - jnp.arange(3.0)[:, None],
    "logic": lambda x: ((x > 0) & ~(x > 1)) | (x < -1), "round": jnp.round, "erfc": jax.lax.erfc,
    "sum": lambda x: jnp.sum(jnp.abs(x)),  # of one sign: the bound is relative to the result
    "max": lambda x: x.max(1), "swap": lambda x: x.T[:, None] + x.reshape(1, 3, 4).transpose(2, 0, 1),
    "argmax": lambda x: x.argmax(-1).astype(jnp.int32), "slice": lambda x: x[1:, ::2],
    "pad": lambda x: jnp.pad(x, ((1, 0), (2, 1))),
    "concatenate": lambda x: jnp.concatenate([x, x * 2, jnp.ones((1, 4))]), "stack": lambda x: jnp.stack([x, x + 1], 1),
    "broadcast": lambda x: jnp.broadcast_to(x[:, None], (3, 2, 4)),
    "expanded": lambda x: jnp.broadcast_to(x[:, :1], (3, 4)).reshape(12),
    "outer": lambda x: x[:, :, None] * x[:, None, :], "swapped sums": lambda x: x.T.sum(0) + x.T.max(0),
    "constant": lambda x: jnp.ones((2,)),
    "same": lambda x: (x, x), "cast": lambda x: (x * 3).astype(jnp.int32), "checkpoint": jax.checkpoint(jnp.sin),
    "vmap": jax.vmap(jax.nn.relu),
    "split": lambda x: jnp.split(x, [1, 3], axis=1),
    "elu": jax.nn.elu,
    "selu and glu": lambda x: jax.nn.glu(jax.nn.selu(x)),
    "exp2": jnp.exp2,
    "unequal": lambda x: x != jnp.round(x),
    "take": lambda x: jnp.take(x, jnp.array([[2, 0], [1, 1]]), axis=0, mode="clip"),
    "column": lambda x: jnp.take(x, (x[0] > 0).astype(int), axis=1),
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_and_shapes(name):
    agrees(ELEMENTWISE[name], normal(3, 4))


def test_pooling():
    linen = pytest.importorskip("flax.linen")
    x = normal(2, 8, 6, 3)
    agrees(lambda x: linen.max_pool(x, (2, 2), (2, 2)), x)
    agrees(lambda x: linen.max_pool(x, (3, 2), (2, 1), "SAME"), x)
    agrees(lambda x: linen.avg_pool(x, (2, 2), (2, 2)), x)
    agrees(lambda x: linen.avg_pool(x, (3, 3), (1, 2), "SAME", count_include_pad=True), x)
    agrees(lambda x: x.mean((1, 2)), x)


def test_flax_and_equinox_layers():
    linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    x = normal(2, 8, 8, 3)
    model = linen.Sequential(
        [linen.Conv(4, (3, 3)), linen.relu, linen.Conv(5, (3, 3), 2), lambda x: x.reshape(len(x), -1), linen.Dense(7)]
    )
    variables = model.init(jax.random.key(0), x)
    agrees(lambda x: model.apply(variables, x), x)
    layers = [nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0)), nnx.BatchNorm(4, use_running_average=True, rngs=nnx.Rngs(0))]
    agrees(nnx.Sequential(*layers), x)
    equinox = pytest.importorskip("equinox")
    module = equinox.nn.MLP(3, 2, 8, 2, key=jax.random.key(1))
    agrees(jax.vmap(module), normal(5, 3))


# ------------------------------------------------------------------------------------------------- the model as a whole


def test_what_no_result_needs_is_left_out():
    def f(x):
        jnp.sin(x[0]) + W[0, 0]
        return x + 1

    model = to_onnx(f, X)
    assert operators(model) == ["Add"] and len(model.graph.initializer) == 1


def test_names():
    model = to_onnx(lambda x, p: {"sum": x + p["a"][0], "product": x * p["b"]}, X, {"a": [X], "b": X})
    assert [i.name for i in model.graph.input] == ["x", "p.a.0", "p.b"]
    assert [o.name for o in model.graph.output] == ["output.product", "output.sum"]
    model = to_onnx(lambda x: x + 1, X, input_names=["images"], output_names=["logits"])
    assert (model.graph.input[0].name, model.graph.output[0].name) == ("images", "logits")
    with pytest.raises(ValueError, match="to_onnx: input_names: expected 1 different names"):
        to_onnx(lambda x: x, X, input_names=["a", "b"])
    with pytest.raises(ValueError, match="to_onnx: output_names: expected other names than the inputs'"):
        to_onnx(lambda output: output + 1, X)


def test_symbolic_sizes():
    batch, length = symbolic_shape("batch, length")
    w = dynamic_quantize(W, PerAxis(1))

    def f(x):
        y = jnp.tanh(jaxquant.matmul(jaxquant.fake_quantize(x, 0.05), w, bias=B) / 16)
        return y, jnp.broadcast_to(jax.lax.slice_in_dim(y, 0, 1, axis=2), y.shape), y.reshape(y.shape[0], -1)

    model = to_onnx(f, jax.ShapeDtypeStruct((batch, length, 64), jnp.float32))
    for sizes in ((1, 1), (2, 3), (4, 1)):
        x = normal(*sizes, 64)
        for got, want in zip(run(model, x), f(x), strict=True):
            close(got, want)


def test_opset():
    w8, w4, w2 = (dynamic_quantize(W, PerAxis(1), qtype=qtype) for qtype in ("int8", "int4", "int2"))
    groups = dynamic_quantize(W, PerGroup(16, axis=0))

    def version(w, **options):
        return agrees(lambda x: jaxquant.matmul(x, w), X, **options).opset_import[0].version

    assert [version(w) for w in (w8, w4, w2, groups)] == [20, 21, 21, 21]
    # 4-bit weights in 8 bits where the opset is given.
    assert version(w4, opset=20) == version(w2, opset=20) == 20
    assert version(w4, opset=25) == 25
    with pytest.raises(ValueError, match="to_onnx: opset: expected 21 or later for scales of blocks"):
        version(groups, opset=20)
    with pytest.raises(ValueError, match="to_onnx: opset: expected 21 or later for codes of 16 bits"):
        to_onnx(lambda x: jaxquant.fake_quantize(x, 0.1, qtype=jnp.int16), X, opset=20)


@pytest.mark.parametrize("opset", range(20, 26))
def test_int8_activations_of_every_opset(opset):
    """The runtime rewrites these; of some forms it then refuses its own result."""
    x, kernel = normal(2, 6, 6, 4), dynamic_quantize(normal(3, 3, 4, 8), PerAxis(3))
    w = dynamic_quantize(normal(8, 5), PerAxis(1))

    def f(x):
        layout = ("NHWC", "HWIO", "NHWC")
        x = jaxquant.fake_quantize(x, 0.02)
        x = jax.lax.conv_general_dilated(x, kernel.dequantize(), (1, 1), "SAME", dimension_numbers=layout)
        return jaxquant.fake_quantize(jax.nn.relu(x), 0.1) @ w.dequantize() + jnp.arange(5.0)

    agrees(f, x, opset=opset)


def test_refusals():
    with pytest.raises(NotImplementedError, match=r"to_onnx: no rule for the primitive 'sort' .*test_onnx"):
        to_onnx(lambda x: jnp.sort(x), X)
    with pytest.raises(ValueError, match=r"to_onnx: scale: expected scales .* that do not depend on the inputs"):
        to_onnx(lambda x: jaxquant.fake_quantize(x, jnp.abs(x).max()), X)
    with pytest.raises(ValueError, match="to_onnx: w: expected weights that do not depend on the inputs"):
        to_onnx(lambda x, w: jaxquant.matmul(x, dynamic_quantize(w, PerAxis(1))), X, W)
    with pytest.raises(NotImplementedError, match="to_onnx: packed codes of activations"):
        to_onnx(lambda x: jaxquant.quantize(x, 0.1, qtype=jnp.int4, packed=True), X)
    with pytest.raises(NotImplementedError, match="by weights in groups"):
        to_onnx(lambda x: jaxquant.matmul(x, dynamic_quantize(W, PerGroup(16, axis=0)), lhs_qtype=jnp.int8), X)
    with pytest.raises(ValueError, match="to_onnx: opset: expected None, or 20 to 25, got 13"):
        to_onnx(lambda x: x, X, opset=13)
    with pytest.raises(NotImplementedError, match="transposed convolution"):
        to_onnx(lambda x: jax.lax.conv_transpose(x, jnp.ones((3, 3, 1, 1)), (2, 2), "SAME"), normal(1, 4, 4, 1))
