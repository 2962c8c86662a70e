"""to_onnx: what ONNX Runtime computes from quantised products is what the function computes; its codes are the same."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.export import symbolic_shape
from onnx_models import RANDOM, B, W, X, agrees, close, normal, onnx, operators, run, weight_codes

import jaxquant
from jaxquant import PerAxis, PerBlock, PerGroup, PerTensor, QArray, choose_qparams, dynamic_quantize
from jaxquant.export import to_onnx

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
