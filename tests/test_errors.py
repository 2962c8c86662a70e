"""Every wrong call is refused while it is traced, with a message that says what to do about it.

All messages have one form, and each case says what must stand in its parts:

    <operation>: <operand>: expected <expected>, got <got>; <remedy>.
"""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant

FORM = re.compile(
    r"(?P<operation>\w+): (?P<operand>[\w, ]+): expected (?P<expected>.+), got (?P<got>.+); (?P<remedy>.+)\."
)

X = np.zeros((8, 4), np.float32)
S3, S4 = np.ones(3, np.float32), np.ones(4, np.float32)
quantize, fake_quantize, dequantize = jaxquant.quantize, jaxquant.fake_quantize, jaxquant.dequantize
quantize_backward, pack, unpack = jaxquant.quantize_backward, jaxquant.pack, jaxquant.unpack


def ones(*shape):
    return np.ones(shape, np.float32)


def case(name, error, call, operation, operand, expected, got, remedy=r"\w+ \w+"):
    """``call(x)`` must raise ``error``; operand, expected, got and remedy are patterns found in those parts."""
    parts = {"operation": f"^{operation}$", "operand": operand, "expected": expected, "got": got, "remedy": remedy}
    return pytest.param(error, call, parts, id=name)


# fmt: off
SHAPES = [
    case("per-channel scale of the wrong length", ValueError, lambda x: fake_quantize(x, S3, axis=1),
         "fake_quantize", "scale", r"\(4,\).*axis 1.*\(8, 4\)", r"\(3,\)", "one scale per channel"),
    case("negative axis", ValueError, lambda x: quantize(x, S3, axis=-2),
         "quantize", "scale", r"\(8,\).*\(8, 4\)", r"\(3,\)", "one scale per channel"),
    case("one scale is not one per channel", ValueError, lambda x: quantize(x, ones(1), axis=1),
         "quantize", "scale", r"\(4,\)", r"\(1,\)"),
    case("1-D scale without axis", ValueError, lambda x: quantize(x, S4),
         "quantize", "scale", r"\(8, 4\)", r"\(4,\)", "axis"),
    case("scale of another rank", ValueError, lambda x: fake_quantize(x, ones(8, 4, 1)),
         "fake_quantize", "scale", r"rank.*\(8, 4\)", r"\(8, 4, 1\)"),
    case("scale with a scalar x", ValueError, lambda x: quantize(x[0, 0], ones(1)),
         "quantize", "scale", r"\(\)", r"\(1,\)"),
    case("a shape that divides is no block without block_shape", ValueError, lambda x: fake_quantize(x, ones(4, 4)),
         "fake_quantize", "scale", r"1 or 8 on axis 0.*\(8, 4\)", r"\(4, 4\)", "block_shape"),
    case("axis with a scalar scale", ValueError, lambda x: fake_quantize(x, 1.0, axis=1),
         "fake_quantize", "axis", "None.*per tensor", "axis=1.*scalar", "drop axis|1-D scale"),
    case("axis with a scale of x's rank", ValueError, lambda x: fake_quantize(x, ones(1, 4), axis=1),
         "fake_quantize", "axis", "None.*rank", r"axis=1.*\(1, 4\)", "drop axis"),
    case("axis with a scale of another rank", ValueError, lambda x: fake_quantize(x, ones(8, 4, 1), axis=1),
         "fake_quantize", "scale", "1-D", r"\(8, 4, 1\)", "per channel"),
    case("axis above range", ValueError, lambda x: quantize(x, S4, axis=2),
         "quantize", "axis", r"\(8, 4\).*-2 to 1", "2"),
    case("axis below range", ValueError, lambda x: quantize(x, S4, axis=-3),
         "quantize", "axis", r"\(8, 4\).*-2 to 1", "-3"),
    case("fractional axis", TypeError, lambda x: quantize(x, S4, axis=1.0), "quantize", "axis", "integer", r"1\.0"),
    case("two axes", TypeError, lambda x: quantize(x, S4, axis=(0, 1)), "quantize", "axis", "integer", r"\(0, 1\)"),
    case("zero point that does not broadcast", ValueError,
         lambda x: fake_quantize(x, S4, np.zeros(3, np.int32), axis=1),
         "fake_quantize", "zero_point", r"broadcasts.*\(4,\)", r"\(3,\)", "one zero point per scale|scalar"),
    case("zero point larger than the scale", ValueError, lambda x: fake_quantize(x, 1.0, np.zeros((8, 1), np.int32)),
         "fake_quantize", "zero_point", r"broadcasts.*\(\)", r"\(8, 1\)"),
    case("zero point that would enlarge the scale", ValueError,
         lambda x: fake_quantize(x, ones(8, 1), np.zeros((1, 4), np.int32)),
         "fake_quantize", "zero_point", r"\(8, 1\)", r"\(1, 4\)"),
    case("dequantize: scale of the wrong length", ValueError,
         lambda x: dequantize(jnp.zeros((8, 4), jnp.int8), S3, axis=0),
         "dequantize", "scale", r"\(8,\).*axis 0 of q", r"\(3,\)"),
    case("dequantize: scale without axis", ValueError, lambda x: dequantize(jnp.zeros((8, 4), jnp.int8), S4),
         "dequantize", "scale", r"q of shape \(8, 4\)", r"\(4,\)", "axis"),
    case("dy of another shape", ValueError, lambda x: quantize_backward(ones(8, 3), x, 1.0),
         "quantize_backward", "dy", r"\(8, 4\)", r"\(8, 3\)"),
    case("scale of quantize_backward", ValueError, lambda x: quantize_backward(x, x, S3, axis=1),
         "quantize_backward", "scale", r"\(4,\)", r"\(3,\)"),
    case("quantize_per_channel names itself", ValueError,
         lambda x: jaxquant.quantize_per_channel(x, S3, None, 1),
         "quantize_per_channel", "scale", r"\(4,\)", r"\(3,\)"),
    case("quantize_per_channel_backward names itself", ValueError,
         lambda x: jaxquant.quantize_per_channel_backward(x, x, S3, None, 1),
         "quantize_per_channel_backward", "scale", r"\(4,\)", r"\(3,\)"),
]

BLOCKS = [
    case("block_shape does not divide", ValueError, lambda x: fake_quantize(x, ones(8, 1), block_shape=(1, 3)),
         "fake_quantize", "block_shape", r"divisor of 4.*axis 1.*\(8, 4\)", r"\(1, 3\)", "pad|divides"),
    case("block_shape of another rank", ValueError, lambda x: fake_quantize(x, ones(8, 2), block_shape=(2,)),
         "fake_quantize", "block_shape", r"per axis.*\(8, 4\)", r"\(2,\)", "-1"),
    case("scale does not fit block_shape", ValueError, lambda x: fake_quantize(x, ones(8, 4), block_shape=(1, 2)),
         "fake_quantize", "scale", r"\(8, 2\).*\(8, 4\)", r"\(8, 4\)", "per block"),
    case("scale broadcasts over blocks", ValueError, lambda x: fake_quantize(x, ones(8, 1), block_shape=(1, 2)),
         "fake_quantize", "scale", r"\(8, 2\)", r"\(8, 1\)", "per block"),
    case("zero in block_shape", ValueError, lambda x: fake_quantize(x, ones(8, 4), block_shape=(1, 0)),
         "fake_quantize", "block_shape", r"axis 1", r"\(1, 0\)"),
    case("-2 in block_shape", ValueError, lambda x: fake_quantize(x, ones(8, 2), block_shape=(1, -2)),
         "fake_quantize", "block_shape", r"-1.*axis 1", r"\(1, -2\)"),
    case("fractional block_shape", TypeError, lambda x: fake_quantize(x, ones(8, 2), block_shape=(1, 2.0)),
         "fake_quantize", "block_shape", "integers", r"2\.0"),
    case("block_shape is one number", TypeError, lambda x: fake_quantize(x, ones(8, 2), block_shape=2),
         "fake_quantize", "block_shape", "tuple", "2"),
    case("block_shape and axis", ValueError, lambda x: fake_quantize(x, S4, axis=1, block_shape=(8, 1)),
         "fake_quantize", "axis", "None.*block_shape", "axis=1"),
    case("block_shape with a scalar scale", ValueError, lambda x: fake_quantize(x, 1.0, block_shape=(1, 2)),
         "fake_quantize", "scale", r"\(8, 2\)", r"\(\)"),
]

DTYPES = [
    case("integer x", TypeError, lambda x: fake_quantize(x.astype(np.int32), 1.0),
         "fake_quantize", "x", "float32.*float64.*float16.*bfloat16", "int32", "convert"),
    case("Python integer x", TypeError, lambda x: fake_quantize(3, 1.0), "fake_quantize", "x", "float32", "int32"),
    case("boolean x", TypeError, lambda x: quantize(x > 0, 1.0), "quantize", "x", "float32", "bool"),
    case("complex x", TypeError, lambda x: quantize(x.astype(np.complex64), 1.0),
         "quantize", "x", "float32", "complex64"),
    case("float8 x", TypeError, lambda x: quantize(x.astype(ml_dtypes.float8_e4m3fn), 1.0),
         "quantize", "x", "float32", "float8_e4m3fn"),
    case("integer scale", TypeError, lambda x: fake_quantize(x, np.ones(4, np.int32), axis=1),
         "fake_quantize", "scale", "float", "int32", "float32"),
    case("Python integer scale", TypeError, lambda x: fake_quantize(x, 2), "fake_quantize", "scale", "float", "int"),
    case("complex zero point", TypeError, lambda x: fake_quantize(x, 1.0, np.complex64(1)),
         "fake_quantize", "zero_point", "integer.*float", "complex64"),
    case("boolean zero point", TypeError, lambda x: fake_quantize(x, 1.0, np.bool_(True)),
         "fake_quantize", "zero_point", "integer.*float", "bool"),
    case("float32 as code type", TypeError, lambda x: quantize(x, 1.0, qtype=jnp.float32),
         "quantize", "qtype", "int8.*uint8", "float32", "code type"),
    case("int32 as code type", TypeError, lambda x: quantize(x, 1.0, qtype=jnp.int32),
         "quantize", "qtype", "int8.*uint8", "int32", "code type"),
    case("unknown name as code type", TypeError, lambda x: quantize(x, 1.0, qtype="int3"),
         "quantize", "qtype", "int8.*uint8", "int3"),
    case("narrow integer dtype", TypeError, lambda x: quantize(x, 1.0, qtype=jnp.uint8, dtype=jnp.int8),
         "quantize", "dtype", r"\[0, 255\]", "int8", "wider"),
    case("complex dtype", TypeError, lambda x: quantize(x, 1.0, dtype=jnp.complex64),
         "quantize", "dtype", "float32", "complex64"),
    case("dequantize to integers", TypeError, lambda x: dequantize(jnp.zeros(3, jnp.int8), 1.0, dtype=jnp.int8),
         "dequantize", "dtype", "float32", "int8"),
    case("boolean codes", TypeError, lambda x: dequantize(jnp.zeros(3, bool), 1.0), "dequantize", "q", "int", "bool"),
    case("integer dy", TypeError, lambda x: quantize_backward(x.astype(np.int32), x, 1.0),
         "quantize_backward", "dy", "float32", "int32"),
    case("int16 in bfloat16", TypeError, lambda x: quantize(x, 1.0, qtype=jnp.int16, dtype=jnp.bfloat16),
         "quantize", "dtype", r"exactly.*\b256\b", r"bfloat16.*\[-32768, 32767\]", "float32|narrower"),
    case("257 in bfloat16", TypeError,
         lambda x: quantize(x, 1.0, qtype=jnp.int16, qmin=-257, qmax=0, dtype=jnp.bfloat16),
         "quantize", "dtype", r"exactly.*\b256\b", r"\[-257, 0\]", "float32|narrower"),
    case("2049 in float16", TypeError, lambda x: quantize(x, 1.0, qtype=jnp.uint16, qmax=2049, dtype=jnp.float16),
         "quantize", "dtype", r"exactly.*\b2048\b", r"float16.*\[0, 2049\]", "float32|narrower"),
]

RANGES = [
    case("qmin is qmax", ValueError, lambda x: quantize(x, 1.0, qmin=3, qmax=3),
         "quantize", "qmin, qmax", "-128 <= qmin < qmax <= 127", r"\[3, 3\]"),
    case("qmin above qmax", ValueError, lambda x: fake_quantize(x, 1.0, qmin=5, qmax=-5),
         "fake_quantize", "qmin, qmax", "qmin < qmax", r"\[5, -5\]"),
    case("wider than the code type", ValueError, lambda x: quantize(x, 1.0, qtype=jnp.int4, qmax=8),
         "quantize", "qmax", "-8 <= .* <= 7 for int4", r"\[-8, 8\]", "narrow|wider"),
    case("negative and unsigned", ValueError, lambda x: quantize(x, 1.0, qtype=jnp.uint8, qmin=-1),
         "quantize", "qmin", "0 <= .* 255 for uint8", r"\[-1, 255\]"),
    case("fractional qmin", TypeError, lambda x: quantize(x, 1.0, qmin=-1.5), "quantize", "qmin", "integer", r"-1\.5"),
    case("array qmax", TypeError, lambda x: quantize(x, 1.0, qmax=jnp.int32(3)),
         "quantize", "qmax", "Python integer", "3"),
    case("zero point above", ValueError, lambda x: fake_quantize(x, 1.0, 128),
         "fake_quantize", "zero_point", r"within \[-128, 127\]", "128", "qmin"),
    case("zero point below", ValueError, lambda x: quantize(x, 1.0, -1, qtype=jnp.uint8),
         "quantize", "zero_point", r"within \[0, 255\]", "-1"),
    case("NumPy zero points", ValueError, lambda x: quantize(x, S4, np.array([0, 3, 9, 1]), axis=1, qtype=jnp.int4),
         "quantize", "zero_point", r"within \[-8, 7\]", r"\b9\b"),
    case("a list of zero points", ValueError, lambda x: quantize(x, S4, [0, 3, 9, 1], axis=1, qtype=jnp.int4),
         "quantize", "zero_point", r"within \[-8, 7\]", r"\b9\b"),
    case("zero point outside a narrowed range", ValueError, lambda x: quantize(x, 1.0, 5, qmin=0, qmax=4),
         "quantize", "zero_point", r"within \[0, 4\]", "5"),
    case("NumPy scalar zero point", ValueError, lambda x: quantize(x, 1.0, np.int64(300)),
         "quantize", "zero_point", r"\[-128, 127\]", "300"),
    case("zero point in QParams", ValueError, lambda x: quantize(x, jaxquant.QParams(1.0, 9, qtype=jnp.int4)),
         "quantize", "zero_point", r"within \[-8, 7\]", "9"),
]

QPARAMS = jaxquant.QParams(np.float32(0.5))
EITHER = (TypeError, ValueError)

COMBINATIONS = [
    case("QParams and qtype", EITHER, lambda x: quantize(x, QPARAMS, qtype=jnp.int4),
         "quantize", "scale", "QParams alone", "QParams and qtype", "drop|QParams"),
    case("QParams and zero_point", EITHER, lambda x: fake_quantize(x, QPARAMS, 3),
         "fake_quantize", "scale", "QParams alone", "QParams and zero_point", "drop|QParams"),
    case("QParams and qmin", EITHER, lambda x: fake_quantize(x, QPARAMS, qmin=-3),
         "fake_quantize", "scale", "QParams alone", "QParams and qmin", "drop|QParams"),
    case("QParams and block_shape", EITHER, lambda x: quantize_backward(x, x, QPARAMS, block_shape=(1, 1)),
         "quantize_backward", "scale", "QParams alone", "QParams and block_shape", "drop|QParams"),
    case("QParams and zero_point: dequantize", EITHER, lambda x: dequantize(jnp.zeros(3, jnp.int8), QPARAMS, 3),
         "dequantize", "scale", "QParams alone", "QParams and zero_point", "drop|QParams"),
    case("packed 8-bit codes", EITHER, lambda x: quantize(x, 1.0, packed=True),
         "quantize", "qtype", "int4.*packed", "int8"),
    case("packed floating codes", EITHER, lambda x: quantize(x, 1.0, qtype=jnp.int4, packed=True, dtype=x.dtype),
         "quantize", "dtype", "None.*packed", "float32", "uint8"),
    case("packed scalar", ValueError, lambda x: quantize(x[0, 0], 1.0, qtype=jnp.int4, packed=True),
         "quantize", "x", "axis", "scalar", "reshape"),
    case("unknown implementation", ValueError, lambda x: fake_quantize(x, 1.0, implementation="cuda"),
         "fake_quantize", "implementation", "None.*ffi.*xla", "'cuda'"),
]

PACKING = [
    case("pack 8-bit codes", EITHER, lambda x: pack(jnp.zeros(4, jnp.int8), jnp.int8), "pack", "qtype", "int4", "int8"),
    case("pack floats", TypeError, lambda x: pack(x, jnp.int4), "pack", "q", "int8", "float32"),
    case("pack a scalar", ValueError, lambda x: pack(jnp.int8(1), jnp.int4), "pack", "q", "axis", "scalar", "reshape"),
    case("unpack int8", TypeError, lambda x: unpack(jnp.zeros(4, jnp.int8), jnp.int4, 8),
         "unpack", "packed", "uint8", "int8"),
    case("unpack a scalar", ValueError, lambda x: unpack(jnp.uint8(1), jnp.int4, 2),
         "unpack", "packed", "axis", "scalar"),
    case("unpack: size too large", ValueError, lambda x: unpack(jnp.zeros((2, 4), jnp.uint8), jnp.int4, 9),
         "unpack", "packed", r"\b5 bytes.*\b9 codes", r"\(2, 4\)", "size"),
    case("unpack: size too small", ValueError, lambda x: unpack(jnp.zeros((2, 4), jnp.uint8), jnp.int2, 12),
         "unpack", "packed", r"\b3 bytes.*\b12 codes", r"\(2, 4\)", "size"),
    case("unpack: fractional size", TypeError, lambda x: unpack(jnp.zeros(4, jnp.uint8), jnp.int4, 8.0),
         "unpack", "size", "integer", r"8\.0"),
    case("unpack: negative size", ValueError, lambda x: unpack(jnp.zeros(0, jnp.uint8), jnp.int4, -1),
         "unpack", "size", "integer", "-1"),
]
# fmt: on

ALL = [*SHAPES, *BLOCKS, *DTYPES, *RANGES, *COMBINATIONS, *PACKING]


@pytest.mark.parametrize("traced", [False, True], ids=["called", "traced"])
@pytest.mark.parametrize("error, call, parts", ALL)
def test_message(error, call, parts, traced):
    """``eval_shape`` runs no kernel: what it raises needed none."""
    with pytest.raises(error) as raised:
        jax.eval_shape(call, X) if traced else call(X)
    message = FORM.fullmatch(str(raised.value))
    assert message, str(raised.value)
    missing = {name: pattern for name, pattern in parts.items() if not re.search(pattern, message[name])}
    assert not missing, f"{missing} not in: {message[0]}"


@pytest.mark.parametrize("qtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, "float8_e4m3fn"], ids=str)
@pytest.mark.parametrize("function", [quantize, fake_quantize], ids=lambda f: f.__name__)
def test_float8_is_reserved(function, qtype):
    with pytest.raises(NotImplementedError, match=rf"^{function.__name__}: qtype: float8_\w+.*; use .*int8"):
        jax.eval_shape(lambda x: function(x, 1.0, qtype=qtype), X)


@pytest.mark.parametrize("name", ["quantize", "dequantize", "fake_quantize"])
def test_forward_mode_functions_check_alike(name):
    operand = jnp.zeros((8, 4), jnp.int8) if name == "dequantize" else X
    with pytest.raises(ValueError) as raised:
        getattr(jaxquant.forward_mode, name)(operand, S3, axis=1)
    with pytest.raises(ValueError) as same:
        getattr(jaxquant, name)(operand, S3, axis=1)
    assert str(raised.value) == str(same.value)


def test_zero_points_that_are_not_known_are_used_as_they_are():
    """A traced or device-side zero point is not looked at: no synchronisation, no error."""
    x = np.float32([1.0, -1.0, 300.0])
    with pytest.raises(ValueError, match="zero_point"):
        fake_quantize(x, 1.0, 200)
    traced = jax.jit(lambda z: fake_quantize(x, 1.0, z))(200)
    np.testing.assert_array_equal(traced, np.float32([127 - 200] * 3))
    np.testing.assert_array_equal(fake_quantize(x, 1.0, jnp.int32(200)), traced)
    np.testing.assert_array_equal(fake_quantize(x, 1.0, 200.0), traced)


def test_the_limits_themselves_are_accepted():
    x = jnp.ones(3, jnp.bfloat16)
    carried = quantize(x, 1.0, qtype=jnp.uint16, qmin=0, qmax=256, dtype=jnp.bfloat16)
    assert carried.dtype == jnp.bfloat16
    carried = quantize(x, 1.0, qtype=jnp.int16, qmin=-2048, qmax=2048, dtype=jnp.float16)
    assert carried.dtype == jnp.float16
    for zero_point in (127, -128, np.int8(127), np.array(-128)):
        assert quantize(x, 1.0, zero_point).dtype == jnp.int8
    assert quantize(x, 1.0, qtype=jnp.int4, qmin=-8, qmax=7).dtype == jnp.int8
    assert quantize(x, 1.0, dtype=jnp.int32).dtype == jnp.int32
