"""to_onnx: what ONNX Runtime computes from the model is what the function computes, and its codes are the same."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.export import symbolic_shape

import jaxquant
from jaxquant import PerAxis, PerBlock, PerGroup, PerTensor, QArray, choose_qparams, dynamic_quantize
from jaxquant.export import to_onnx

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

RANDOM = np.random.default_rng(20)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RANDOM.normal(size=shape), dtype)


X, W, B = normal(5, 64), normal(64, 24), normal(24)


def session(model, every=()):
    """every: tensors to give as results too. Weight-only products in float32: by default the runtime quantises x."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in every)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(model, *inputs, every=()):
    s = session(model, every)
    return s.run(None, {i.name: np.asarray(x) for i, x in zip(s.get_inputs(), inputs, strict=True)})


def operators(model):
    return [node.op_type for node in model.graph.node]


def weight_codes(model):
    return next(t for t in model.graph.initializer if "codes" in t.name)


def close(got, want):
    """Within float32 accumulation: 2^-20 of the largest magnitude."""
    want = np.asarray(want, np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-20 * max(np.abs(want).max(initial=0), 1e-30))


def agrees(f, *inputs, **options):
    model = to_onnx(f, *inputs, **options)
    onnx.checker.check_model(model, full_check=True)
    for got, want in zip(run(model, *inputs), jax.tree.leaves(f(*inputs)), strict=True):
        assert got.dtype == want.dtype
        if np.issubdtype(got.dtype, np.floating):
            close(got, want)
        else:
            np.testing.assert_array_equal(got, want)
    return model


# ---------------------------------------------------------------------------------------------------------- activations

EDGES = np.float32([0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, -127.5, -128.5, 1e30, -1e30, 1e-4, 3, -3])


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.0123, 3e-5, 1e-30])
@pytest.mark.parametrize(
    "qtype,low,high,zero",
    [
        ("int8", -128, 127, 0), ("int8", -127, 127, 0), ("uint8", 0, 255, 128), ("uint8", 0, 255, 3),
        ("uint8", 0, 255, 0), ("int4", -8, 7, 0), ("int4", -7, 7, 0), ("uint4", 0, 15, 8), ("int16", -32768, 32767, 5),
        ("uint16", 0, 65535, 77), ("int2", -2, 1, 0), ("uint2", 0, 3, 1), ("int8", -100, 90, 11),
    ],
)  # fmt: skip
def test_codes_are_equal(qtype, low, high, zero, scale):
    code = {"qtype": qtype, "qmin": low, "qmax": high}
    x = np.concatenate(
        [EDGES * np.float32(scale), RANDOM.normal(size=4000).astype(np.float32) * np.float32(scale) * 90]
    )
    x = np.concatenate([x, (np.arange(-300, 300) + 0.5).astype(np.float32) * np.float32(scale)])

    def f(x):
        return jaxquant.quantize(x, scale, zero, **code), jaxquant.fake_quantize(x, scale, zero, **code)

    model = to_onnx(f, x)
    codes, values = run(model, x)
    expected = oracle.quantize(x, np.float32(scale), zero, **code)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(values, oracle.dequantize(expected, np.float32(scale), np.float32(zero)))
    assert codes.dtype == f(x)[0].dtype
    np.testing.assert_array_equal(codes, f(x)[0])
    whole = (np.iinfo(codes.dtype).min, np.iinfo(codes.dtype).max)
    assert ("Clip" in operators(model)) == ((low, high) != whole)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_activations_per_channel(axis):
    x = normal(4, 5, 6)
    p = choose_qparams(x, PerAxis(axis), qtype=jnp.uint8, symmetric=False)
    narrow = choose_qparams(x * 0.5, PerAxis(axis))
    agrees(lambda x: (jaxquant.quantize(x, p), jaxquant.fake_quantize(x, narrow)), x)


def test_activations_in_blocks():
    x = normal(4, 6)
    for granularity in (PerGroup(3), PerBlock((2, 3)), PerAxis((0, 1))):
        p = choose_qparams(x, granularity)
        agrees(lambda x, p=p: (jaxquant.quantize(x, p), jaxquant.fake_quantize(x, p)), x)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision(dtype):
    x, p = normal(3, 8, dtype=dtype), choose_qparams(normal(3, 8))

    def f(x):
        return jaxquant.quantize(x, p), jaxquant.fake_quantize(x, p).astype(jnp.float32)

    # The runtime's interface to NumPy has no bfloat16.
    codes, values = run(to_onnx(lambda x: f(x.astype(dtype)), x.astype(jnp.float32)), x.astype(jnp.float32))
    np.testing.assert_array_equal(codes, f(x)[0])
    np.testing.assert_array_equal(values, f(x)[1])


# -------------------------------------------------------------------------------------------------------------- weights

WEIGHTS = {
    "tensor": PerTensor(), "channel": PerAxis(1), "rows": PerAxis(0), "groups": PerGroup(16, axis=0),
    "boxes": PerBlock((16, 8)), "elements": PerAxis((0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["plain", "prepared"])
@pytest.mark.parametrize("granularity", WEIGHTS)
@pytest.mark.parametrize(
    "qtype,symmetric", [("int8", True), ("uint8", False), ("int4", True), ("uint4", False), ("int2", True)]
)
def test_weights(qtype, symmetric, granularity, layout):
    w = dynamic_quantize(W, WEIGHTS[granularity], qtype=qtype, symmetric=symmetric)
    w = w.prepare() if layout == "prepared" else w
    model = agrees(lambda x: jaxquant.matmul(x, w, bias=B), X)
    assert operators(model) == ["DequantizeLinear", "MatMul", "Add"]
    stored = {"int2": "INT4"}.get(qtype, qtype.upper())
    codes = weight_codes(model)
    assert codes.data_type == getattr(onnx.TensorProto, stored)
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(codes).astype(int), w.qvalue)
    assert len(codes.raw_data) == (w.size if "8" in stored else w.size // 2)


def test_odd_codes_are_packed_in_a_row():
    w = dynamic_quantize(normal(3, 5), PerAxis(1), qtype=jnp.int4)
    model = agrees(lambda x: x @ w.dequantize(), normal(2, 3))
    codes = weight_codes(model)
    assert len(codes.raw_data) == 8  # of 15 codes


def test_two_bits_of_opset_25():
    """ONNX's own evaluator: the runtime's fused product of 2-bit codes gives wrong results."""
    from onnx.reference import ReferenceEvaluator

    w = dynamic_quantize(W, PerAxis(1), qtype=jnp.int2)
    model = to_onnx(lambda x: jaxquant.matmul(x, w), X, opset=25)
    codes = weight_codes(model)
    assert codes.data_type == onnx.TensorProto.INT2 and len(codes.raw_data) == w.size // 4
    close(ReferenceEvaluator(model).run(None, {"x": np.asarray(X)})[0], jaxquant.matmul(X, w))


def test_fake_quantised_parameters_are_stored_as_codes():
    scale = np.abs(np.asarray(W)).max(0) / np.float32(7)

    def f(x):
        return jaxquant.fake_quantize(x, 0.05) @ jaxquant.fake_quantize(W, scale, axis=1, qtype=jnp.int4)

    model = agrees(f, X)
    codes = weight_codes(model)
    assert codes.data_type == onnx.TensorProto.INT4
    np.testing.assert_array_equal(
        onnx.numpy_helper.to_array(codes).astype(int), oracle.quantize(W, scale, axis=1, qtype="int4")
    )


def test_zero_points_outside_the_type():
    w = QArray.from_codes(jnp.ones((4, 2), jnp.int8), 0.5, 1000)
    with pytest.raises(
        ValueError, match=r"to_onnx: zero_point: expected integers within \[-128, 127\] for int8, got .*1000"
    ):
        to_onnx(lambda x: jaxquant.matmul(x, w), jnp.ones((3, 4)))


# ------------------------------------------------------------------------------------------------------------- products

X_PARAMS = {
    "int8": choose_qparams(X), "uint8": choose_qparams(X, qtype=jnp.uint8, symmetric=False),
    "full": jaxquant.QParams(jnp.float32(0.03)),
}  # fmt: skip


@pytest.mark.parametrize("of_x", X_PARAMS)
@pytest.mark.parametrize("of_w", ["channel", "groups", "tensor"])
def test_products_of_integers(of_x, of_w):
    p, w = X_PARAMS[of_x], dynamic_quantize(W, WEIGHTS[of_w])

    def f(x):
        codes = QArray.from_codes(jaxquant.quantize(x, p), p.scale, p.zero_point)
        return codes.qvalue, jaxquant.matmul(codes, w, bias=B)

    agrees(f, X)


@pytest.mark.parametrize("w_qtype", ["int8", "int4", "int2"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_qat_dense(rank, w_qtype):
    x = X.reshape((5, 1, 64)[-rank:] if rank == 3 else X.shape) if rank > 1 else X[0]
    model = agrees(lambda x: jaxquant.qat_dense(x, W, B, x_scale=X_PARAMS["int8"], w_qtype=w_qtype), x)
    nodes = ["Clip", "QuantizeLinear", "DequantizeLinear", "DequantizeLinear", "MatMul", "Add"]
    assert [op for op in operators(model) if op != "Reshape"] == nodes
    assert "Reshape" not in operators(model) or rank == 1


@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (64,)])
def test_dynamic_activations_have_the_same_bits(shape):
    x = normal(*shape).at[..., :3].set(0)
    x = x.at[0].set(0) if len(shape) > 1 else x
    w = dynamic_quantize(W, PerAxis(1))
    model = to_onnx(lambda x: jaxquant.matmul(x, w, bias=B, lhs_qtype=jnp.int8), x)
    (got,) = run(model, x)
    np.testing.assert_array_equal(got, jaxquant.matmul(x, w, bias=B, lhs_qtype=jnp.int8))
    assert "MatMulInteger" in operators(model)


def test_rows_in_front_of_a_product_wait():
    """A reshape that only merges or splits rows is written once, after the product and what follows it."""
    w = dynamic_quantize(W, PerAxis(1))
    scale = jaxquant.QParams(jnp.float32(0.02))

    def f(x):
        y = jaxquant.matmul(x.reshape(1, 2, 3, 64), w, bias=B) * 2 + jnp.ones((1, 1, 1, 1))
        return jaxquant.quantize(y, scale), y * y, y + jnp.arange(3.0)[:, None]

    agrees(f, normal(6, 64))


@pytest.mark.parametrize("dtypes", [("int8", "int8"), ("uint8", "int8"), ("uint8", "uint8"), ("int8", "uint8")])
def test_products_of_codes(dtypes):
    a, b = (jnp.asarray(RANDOM.integers(*(0, 256) if d == "uint8" else (-128, 128), (3, 6, 6)), d) for d in dtypes)
    agrees(lambda a: jaxquant.int_matmul(a, b), a)
    agrees(jaxquant.int_matmul, a[0], b[0])
    agrees(lambda a: jaxquant.int_matmul(a, b[0]), a)


def test_dynamic_codes():
    agrees(lambda x: (dynamic_quantize(x).data, dynamic_quantize(x).scale), X)
    agrees(lambda x: jaxquant.dynamic_fake_quantize(x, PerTensor()), X)


@pytest.mark.parametrize(
    "spec",
    [
        "bk,kn->bn",
        "bk,nk->bn",
        "bsk,kn->bsn",
        "bsk,kd->bsd",
        "bhqd,bhkd->bhqk",
        "bij,bjk->bik",
        "bsk,khd->bshd",
        "ij,ij->",
        "bkh,khn->bn",
    ],
)
def test_einsums(spec):
    sizes = dict(zip("bskndhqij", (3, 4, 8, 6, 5, 2, 7, 3, 4), strict=True))
    x, y = (normal(*(sizes[c] for c in part)) for part in spec.split("->")[0].split(","))
    agrees(partial(jnp.einsum, spec), x, y)
    agrees(lambda x: jnp.einsum(spec, x, y), x)


def test_batched_weights():
    w = dynamic_quantize(normal(3, 8, 6), PerAxis((0, 2)))
    agrees(lambda x: jaxquant.matmul(x, w), normal(3, 5, 8))
    agrees(lambda x: jaxquant.matmul(x, w), normal(1, 5, 8))


# --------------------------------------------------------------------------------------------------------- convolutions


@pytest.mark.parametrize("layout", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NHWC", "OIHW", "NCHW")])
@pytest.mark.parametrize("qtype", ["int8", "int4"])
@pytest.mark.parametrize(
    "strides,padding,dilation,groups",
    [
        ((1, 1), "SAME", (1, 1), 1),
        ((2, 2), "SAME", (1, 1), 1),
        ((1, 2), "VALID", (2, 1), 1),
        ((1, 1), ((0, 2), (1, 0)), (1, 1), 2),
    ],
)
def test_convolutions(layout, qtype, strides, padding, dilation, groups):
    of = {"N": 2, "C": 4, "H": 9, "W": 8, "O": 6, "I": 4 // groups}
    x = normal(*(of[c] for c in layout[0]))
    w = dynamic_quantize(
        normal(*({**of, "H": 3, "W": 2}[c] for c in layout[1])), PerAxis(layout[1].index("O")), qtype=qtype
    )
    p = choose_qparams(x, qtype=jnp.uint8, symmetric=False)

    def f(x):
        return jax.lax.conv_general_dilated(
            jaxquant.fake_quantize(x, p), w.dequantize(), strides, padding, rhs_dilation=dilation,
            dimension_numbers=layout, feature_group_count=groups,
        )  # fmt: skip

    model = agrees(f, x)
    assert operators(model).count("Transpose") == sum("C" not in each[:2] for each in (layout[0], layout[2]))


def network(codes):
    """examples/qat_digits.py's: convolutions and a dense layer, the inputs of each quantised per tensor."""
    shapes = [((3, 3, 1, 8), 1), ((3, 3, 8, 16), 2), ((3, 3, 16, 32), 2), ((2 * 2 * 32, 10), 1)]
    layers = [
        (normal(*shape) / np.sqrt(np.prod(shape[:-1])), normal(shape[-1]) * 0.1, stride) for shape, stride in shapes
    ]
    kernels = [
        dynamic_quantize(k, PerAxis(k.ndim - 1), qtype=qtype) for (k, _, _), qtype in zip(layers, codes, strict=True)
    ]

    def forward(x):
        inputs = []
        for (_, bias, stride), kernel in zip(layers, kernels, strict=True):
            p = jaxquant.QParams(jnp.float32(0.02), qtype=jnp.uint8)
            inputs.append(jaxquant.quantize(x, p))
            x = jaxquant.dequantize(inputs[-1], p)
            if kernel.ndim == 2:
                return x.reshape(x.shape[0], -1) @ kernel.dequantize() + bias, inputs
            layout = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, kernel.dequantize(), (stride, stride), "SAME", dimension_numbers=layout)
            x = jax.nn.relu(x + bias)
        return x, inputs

    return forward


@pytest.mark.parametrize("codes", [["int8"] * 4, ["int8", "int4", "int4", "int2"]])
def test_a_network(codes):
    forward = network(codes)
    shape = symbolic_shape("batch, 8, 8, 1", constraints=["batch >= 1"])
    model = to_onnx(lambda images: forward(images)[0], jax.ShapeDtypeStruct(shape, jnp.float32))
    x = jnp.abs(normal(16, 8, 8, 1))
    logits, inputs = forward(x)
    assert [d.dim_param for d in model.graph.input[0].type.tensor_type.shape.dim] == ["batch", "", "", ""]
    nodes = operators(model)
    # In front of the first convolution and of the flattening; none between convolutions.
    assert nodes.count("Transpose") == 2 and nodes.count("Conv") == 3 and nodes.count("Relu") == 3
    names = [node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    (got, *got_codes) = run(model, x, every=names)
    for found, expected in zip(got_codes, inputs, strict=True):
        expected = np.asarray(expected)
        if found.shape != (16, 8, 8, 1):  # in ONNX's order of axes, until they are flattened
            expected = expected.reshape(16, *found.shape[2:], found.shape[1]).transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(found, expected)
    close(got, logits)


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
    "logic": lambda x: ((x > 0) & ~(x > 1)) | (x < -1), "round": jnp.round, "erfc": jax.lax.erfc, "sum": jnp.sum,
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
