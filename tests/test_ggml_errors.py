"""Wrong calls of the block formats are refused, where they can be seen while tracing and by the kernel otherwise.

All messages of Python have one form, and each case says what must stand in its parts:

    <operation>: <operand>: expected <expected>, got <got>; <remedy>.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import ggml
from jaxquant._core.primitive import OPERATIONS

FORM = re.compile(
    r"(?P<operation>[\w.]+): (?P<operand>[\w, ]+): expected (?P<expected>.+), got (?P<got>.+); (?P<remedy>.+)[.?]", re.S
)

X = np.zeros((3, 64), np.float32)
W = ggml.QTensor(np.zeros((5, 68), np.uint8), "Q8_0")
EXPERTS = ggml.QTensor(np.zeros((2, 5, 68), np.uint8), "Q8_0")
ONES = np.ones(64, np.float32)
IDS = np.zeros((3, 2), np.int32)
linear, moe, ragged, quantize, QTensor = ggml.linear, ggml.moe_linear, ggml.ragged_linear, ggml.quantize, ggml.QTensor


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def with_value(value):
    imatrix = ONES.copy()
    imatrix[7] = value
    return imatrix


def case(name, error, call, operation, operand, expected, got, remedy=r"\w+ \w+"):
    """``call(x)`` must raise ``error``; operand, expected, got and remedy are patterns found in those parts."""
    parts = {"operation": f"^{operation}$", "operand": operand, "expected": expected, "got": got, "remedy": remedy}
    return pytest.param(error, call, parts, id=name)


# fmt: off
FORMATS = [
    case("unknown name", ValueError, lambda x: quantize(x, "Q9_K"), "quantize", "format", "Q1_0.*Q4_K.*NVFP4", "'Q9_K'",
         "formats"),
    case("a number", ValueError, lambda x: quantize(x, 12), "quantize", "format", "Q4_K", "12"),
    case("no format", ValueError, lambda x: quantize(x, None), "quantize", "format", "Q4_K", "None"),
    case("removed name", ValueError, lambda x: quantize(x, "Q4_0_4_4"), "quantize", "format", "Q4_0", "'Q4_0_4_4'"),
    case("format of zeros", ValueError, lambda x: QTensor.zeros((2, 64), "Q4_X"), "QTensor.zeros", "format", "Q4_K",
         "Q4_X"),
    case("format of bytes", ValueError, lambda x: QTensor.from_bytes(b"", "Q4_X", (0, 64)), "QTensor.from_bytes",
         "format", "Q4_K", "Q4_X"),
    case("format of a tensor", ValueError, lambda x: QTensor(zeros(2, 34, dtype=np.uint8), "Q4_X"), "QTensor", "format",
         "Q4_K", "Q4_X"),
    case("unknown layout", ValueError, lambda x: QTensor(W.data, "Q8_0", "tiled"), "QTensor", "layout",
         "plain.*prepared", "'tiled'", "prepare"),
    case("prepared floats", ValueError, lambda x: QTensor(zeros(1, 1024, dtype=np.uint8), "F16", "prepared"), "QTensor",
         "layout", "'plain'", "'prepared'", "F16 has no other"),
    case("more rows than data", ValueError, lambda x: QTensor(zeros(1, 272, dtype=np.uint8), "Q8_0", "prepared", 9),
         "QTensor", "data", "2 eights of rows for 9 rows", "1", "shard the plain tensor"),
    case("eights missing", ValueError, lambda x: QTensor(zeros(1, 272, dtype=np.uint8), "Q8_0", "prepared", 16),
         "QTensor", "rows", "8 as in data", "16"),
    case("negative rows", ValueError, lambda x: QTensor(zeros(0, 272, dtype=np.uint8), "Q8_0", "prepared", -3),
         "QTensor", "rows", "a prepared matrix's row count", "-3"),
    case("rows of a line", ValueError, lambda x: QTensor(zeros(272, dtype=np.uint8), "Q8_0", "prepared", 8),
         "QTensor", "rows", "a prepared matrix's row count", "8"),
    case("rows of the plain layout", ValueError, lambda x: QTensor(W.data, "Q8_0", "plain", 1), "QTensor", "rows",
         "None in the plain layout", "1"),
]

QUANTIZE = [
    case("no multiple of a block", ValueError, lambda x: quantize(x, "Q4_K"), "quantize", "x",
         "multiple of Q4_K's block of 256 along axis 1", r"\(3, 64\)", 'pad.*"Q5_0"'),
    case("no multiple of 32 either", ValueError, lambda x: quantize(x[:, :40], "Q6_K"), "quantize", "x",
         "block of 256 along axis 1", r"\(3, 40\)", 'pad.*"F16"'),
    case("no multiple of 32", ValueError, lambda x: quantize(x[None, :, :40], "Q8_0"), "quantize", "x",
         "block of 32 along axis 2", r"\(1, 3, 40\)", 'pad.*"F16"'),
    case("integers", TypeError, lambda x: quantize(x.astype(np.int32), "Q8_0"), "quantize", "x", "float32.*bfloat16",
         "int32", "convert"),
    case("complex", TypeError, lambda x: quantize(x.astype(np.complex64), "Q8_0"), "quantize", "x", "float32",
         "complex64"),
    case("scalar", ValueError, lambda x: quantize(x[0, 0], "F16"), "quantize", "x", "axis", "scalar", "rows"),
    case("imatrix needed", ValueError, lambda x: quantize(zeros(3, 256), "IQ2_XXS"), "quantize", "imatrix",
         "importances.*IQ2_XXS", "None", "load_imatrix"),
    case("imatrix of another size", ValueError, lambda x: quantize(x, "Q4_0", imatrix=ONES[:32]), "quantize", "imatrix",
         r"shape \(64,\)", r"\(32,\)", "each column"),
    case("imatrix for each row", ValueError, lambda x: quantize(x, "Q4_0", imatrix=zeros(3, 64)), "quantize", "imatrix",
         r"shape \(64,\)", r"\(3, 64\)"),
    case("imatrix of other experts", ValueError, lambda x: quantize(x[None].repeat(2, 0), "Q4_0", imatrix=zeros(3, 64)),
         "quantize", "imatrix", r"\(64,\) or \(2, 64\)", r"\(3, 64\)"),
    case("integer imatrix", TypeError, lambda x: quantize(x, "Q4_0", imatrix=ONES.astype(np.int32)), "quantize",
         "imatrix", "floating", "int32"),
    case("negative importance", ValueError, lambda x: quantize(x, "Q4_0", imatrix=with_value(-1)), "quantize",
         "imatrix", "finite.*none negative", "negative", "ones"),
    case("infinite importance", ValueError, lambda x: quantize(x, "Q4_0", imatrix=with_value(np.inf)), "quantize",
         "imatrix", "finite", "non-finite"),
    case("NaN importance", ValueError, lambda x: quantize(x, "Q4_0", imatrix=with_value(np.nan)), "quantize",
         "imatrix", "finite", "non-finite"),
    case("no importance at all", ValueError, lambda x: quantize(x, "Q4_0", imatrix=0 * ONES), "quantize", "imatrix",
         "not all zero", "zeros only", "ones"),
    case("an expert without importances", ValueError,
         lambda x: quantize(x[None].repeat(2, 0), "Q4_0", imatrix=np.stack([ONES, 0 * ONES])), "quantize", "imatrix",
         "not all zero", "zeros only"),
    case("bad importances of a format that ignores them", ValueError,
         lambda x: quantize(x, "Q8_0", imatrix=with_value(np.nan)), "quantize", "imatrix", "finite", "non-finite"),
    case("implementation", ValueError, lambda x: quantize(x, "Q4_0", implementation="cuda"), "quantize",
         "implementation", "ffi.*xla", "'cuda'"),
]

TENSORS = [
    case("too few bytes", ValueError, lambda x: QTensor.from_bytes(bytes(33), "Q8_0", (1, 32)), "QTensor.from_bytes",
         "data", r"34 bytes for Q8_0 of shape \(1, 32\)", "33"),
    case("too many bytes", ValueError, lambda x: QTensor.from_bytes(zeros(2, 34, dtype=np.uint8), "Q8_0", (1, 32)),
         "QTensor.from_bytes", "data", "34 bytes", "68"),
    case("floats for bytes", TypeError, lambda x: QTensor.from_bytes(zeros(34), "Q8_0", (1, 32)), "QTensor.from_bytes",
         "data", "uint8", "float32", "view"),
    case("a list for bytes", TypeError, lambda x: QTensor.from_bytes([0] * 34, "Q8_0", (1, 32)), "QTensor.from_bytes",
         "data", "uint8", "list"),
    case("bytes of no shape", ValueError, lambda x: QTensor.from_bytes(b"", "F32", ()), "QTensor.from_bytes", "shape",
         "axis", r"\(\)"),
    case("bytes of half a block", ValueError, lambda x: QTensor.from_bytes(bytes(17), "Q8_0", (1, 16)), "Q8_0", "row",
         "multiple of the block of 32", "16", "pad"),
    case("fallback", ValueError, lambda x: QTensor.zeros((2, 64), "Q4_K"), "Q4_K", "row", "block of 256", "64", "Q5_0"),
    case("zeros of no shape", ValueError, lambda x: QTensor.zeros((), "F32"), "QTensor.zeros", "shape", "axis",
         r"\(\)"),
    case("floats in a tensor", TypeError, lambda x: QTensor(x, "F32"), "QTensor", "data", "uint8", "float32",
         "quantize"),
    case("half a block in a tensor", ValueError, lambda x: QTensor(zeros(2, 33, dtype=np.uint8), "Q8_0").shape, "Q8_0",
         "data", "blocks of 34 bytes", "33"),
    case("an index into rows", ValueError, lambda x: W[0, 3], "QTensor", "index", r"at most 1 axes of \(5, 64\)", "2",
         "dequantise"),
    case("an ellipsis", ValueError, lambda x: W[..., 0], "QTensor", "index", "leading", r"\.\.\."),
    case("dequantised to integers", TypeError, lambda x: W.dequantize(jnp.int8), "dequantize", "dtype",
         "float32.*bfloat16", "int8", "convert"),
    case("dequantised to float64", TypeError, lambda x: W.dequantize(np.float64), "dequantize", "dtype", "float32",
         "float64"),
    case("float ids of rows", TypeError, lambda x: W.take(x[0]), "take", "ids", "integers", "float32"),
    case("rows of several matrices", ValueError, lambda x: EXPERTS.take(IDS), "take", "tensor", r"\[n, k\]",
         r"\(2, 5, 64\)", "vmap"),
    case("taken as integers", TypeError, lambda x: W.take(IDS, jnp.int8), "take", "dtype", "float32", "int8"),
    case("one row prepared", ValueError, lambda x: W[0].prepare(), "prepare", "tensor", "matrix", r"\(64,\)"),
]

PRODUCTS = [
    case("other columns", ValueError, lambda x: linear(x[:, :32], W), "linear", "x", "64 values along the last axis",
         r"\(3, 32\)", "Q8_0"),
    case("integers times weights", TypeError, lambda x: linear(x.astype(np.int8), W), "linear", "x",
         "float32.*bfloat16", "int8", "convert"),
    case("a scalar times weights", ValueError, lambda x: linear(x[0, 0], W), "linear", "x", "axis", "scalar"),
    case("an array for weights", TypeError, lambda x: linear(x, x), "linear", "w", "QTensor", r"\w+", "quantize"),
    case("stacked matrices", ValueError, lambda x: linear(x, EXPERTS), "linear", "w", r"\[n, k\]", r"\(2, 5, 64\)",
         "vmap"),
    case("one row of weights", ValueError, lambda x: linear(x, W[0]), "linear", "w", r"\[n, k\]", r"\(64,\)"),
    case("int4 activations", TypeError, lambda x: linear(x, W, lhs_qtype=jnp.int4), "linear", "lhs_qtype",
         "int8 or None", "int4"),
    case("implementation of a product", ValueError, lambda x: linear(x, W, implementation="gpu"), "linear",
         "implementation", "ffi.*xla", "'gpu'"),
    case("moe: one matrix", ValueError, lambda x: moe(x[:, None], W, IDS), "moe_linear", "w", r"\[experts, n, k\]",
         r"\(5, 64\)"),
    case("moe: x without slots", ValueError, lambda x: moe(x, EXPERTS, IDS), "moe_linear", "x", r"\(3, 1 or 2, k\)",
         r"\(3, 64\)", "tokens"),
    case("moe: other tokens", ValueError, lambda x: moe(x[:2, None], EXPERTS, IDS), "moe_linear", "x",
         r"\(3, 1 or 2, k\)", r"\(2, 1, 64\)"),
    case("moe: other slots", ValueError, lambda x: moe(zeros(3, 3, 64), EXPERTS, IDS), "moe_linear", "x",
         r"\(3, 1 or 2, k\)", r"\(3, 3, 64\)"),
    case("moe: other columns", ValueError, lambda x: moe(zeros(3, 1, 32), EXPERTS, IDS), "moe_linear", "x", "64 values",
         r"\(3, 1, 32\)"),
    case("moe: ids of one axis", ValueError, lambda x: moe(x[:, None], EXPERTS, IDS[:, 0]), "moe_linear", "ids",
         r"\[tokens, top_k\]", r"\(3,\)", "axis"),
    case("moe: float ids", TypeError, lambda x: moe(x[:, None], EXPERTS, IDS.astype(np.float32)), "moe_linear", "ids",
         "integers", "float32"),
    case("moe: id too large", ValueError, lambda x: moe(x[:, None], EXPERTS, IDS + 2), "moe_linear", "ids",
         "-1 for none, or 0 to 1", "2", "-1"),
    case("moe: id below -1", ValueError, lambda x: moe(x[:, None], EXPERTS, IDS - 2), "moe_linear", "ids", "0 to 1",
         "-2"),
    case("moe: a list of ids", ValueError, lambda x: moe(x[:, None], EXPERTS, [[0, 2]] * 3), "moe_linear", "ids",
         "0 to 1", "2"),
    case("moe: huge ids", ValueError, lambda x: moe(x[:, None], EXPERTS, np.full((3, 2), 2**40)), "moe_linear", "ids",
         "0 to 1", str(2**40)),
    case("ragged: other experts", ValueError, lambda x: ragged(x, EXPERTS, np.array([1, 1, 1])), "ragged_linear",
         "group_sizes", "2 integers", r"\(3,\)"),
    case("ragged: float sizes", ValueError, lambda x: ragged(x, EXPERTS, np.ones(2, np.float32)), "ragged_linear",
         "group_sizes", "2 integers", "float32"),
    case("ragged: negative sizes", ValueError, lambda x: ragged(x, EXPERTS, np.array([2, -1])), "ragged_linear",
         "group_sizes", "none negative", "-1"),
    case("ragged: more axes", ValueError, lambda x: ragged(x[:, None], EXPERTS, np.array([2, 1])), "ragged_linear", "x",
         r"\[tokens, k\]", r"\(3, 1, 64\)", "flatten"),
    case("ragged: one matrix", ValueError, lambda x: ragged(x, W, np.array([2, 1])), "ragged_linear", "w",
         r"\[experts, n, k\]", r"\(5, 64\)"),
    case("validate an array", TypeError, ggml.validate, "validate", "tensor", "QTensor", r"\w+"),
]
# fmt: on


@pytest.mark.smoke
@pytest.mark.parametrize("traced", [False, True], ids=["called", "traced"])
@pytest.mark.parametrize("error, call, parts", [*FORMATS, *QUANTIZE, *TENSORS, *PRODUCTS])
def test_message(error, call, parts, traced):
    """``eval_shape`` runs no kernel: what it raises needed none."""
    with pytest.raises(error) as raised:
        jax.eval_shape(call, X) if traced else call(X)
    message = FORM.fullmatch(str(raised.value))
    assert message, str(raised.value)
    missing = {name: pattern for name, pattern in parts.items() if not re.search(pattern, message[name], re.S)}
    assert not missing, f"{missing} not in: {message[0]}"


@pytest.mark.parametrize(
    "shape", [(2**32, 2**32, 32), (2**62, 256), (2**31, 2**31, 256), (2**63, 32), (-1, -32)], ids=str
)
def test_sizes_are_counted_without_overflow(shape):
    for data in (b"", bytes(34)):
        with pytest.raises(ValueError, match=r"QTensor.from_bytes: data: expected \d+ bytes"):
            QTensor.from_bytes(data, "Q8_0", shape)


# ---------------------------------------------------------------------------------------------- what the kernel refuses


@pytest.mark.smoke
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(wrong):
    """Called and compiled, in one row or among many, with and without an imatrix."""
    for rows, at in ((1, 0), (700, 699)):
        x = np.ones((rows, 64), np.float32)
        x[at, 63] = wrong
        for imatrix in (None, ONES):
            for call in (quantize, jax.jit(quantize, static_argnums=1)):
                with pytest.raises(Exception, match=r"ggml_quantize.*finite"):
                    jax.block_until_ready(call(x, "Q4_0", imatrix=imatrix).data)


@pytest.mark.smoke
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0, 0.0])
def test_importances_are_refused_under_jit(wrong):
    """By the kernel, for one imatrix and for one of several experts."""
    imatrix = 0 * ONES if wrong == 0 else with_value(wrong)
    call = jax.jit(lambda x, imatrix: quantize(x, "Q4_0", imatrix=imatrix).data)
    for x, weights in ((X, imatrix), (np.stack([X, X]), np.stack([ONES, imatrix]))):
        with pytest.raises(Exception, match=r"ggml_quantize.*imatrix"):
            jax.block_until_ready(call(x, weights))
    jax.block_until_ready(call(X, ONES))


@pytest.mark.smoke
def test_ids_that_are_not_known_give_zeros():
    """Under jit there is no error to raise: rows of zeros, for ids of any type."""
    x = np.ones((3, 1, 64), np.float32)
    w = quantize(np.ones((2, 5, 64), np.float32), "Q8_0")
    for ids in (
        np.array([[0, 2], [1, -7], [2**31 - 1, -(2**31)]], np.int32),
        np.array([[0, 2], [1, 200], [255, 9]], np.uint8),
    ):
        with pytest.raises(ValueError, match="ids"):
            moe(x, w, ids)
        with pytest.raises(ValueError, match="ids"):
            moe(x, w, jnp.asarray(ids))
        y = np.asarray(jax.jit(moe)(x, w, ids))
        assert (y.any(axis=2) == (ids == 0) | (ids == 1)).all()


# ---------------------------------------------------------------------------------------- targets, called by themselves

U8, F32, F16, S32 = np.uint8, np.float32, np.float16, np.int32


def valid(name, prepared=False):
    """Operands, results and attributes of a call that works: Q8_0, in two rows of blocks or more."""
    codec = {"format": 8, "prepared": int(prepared)}

    def rows(*shape):
        *lead, n, size = shape
        return ((*lead, -(-n // 8), 8 * size) if prepared else shape), U8

    return {
        "ggml_quantize": ([((3, 64), F32), ((1, 64), F32)], [((3, 68), U8)], {"format": 8}),
        "ggml_dequantize": ([rows(3, 68)], [((3, 64), F32)], codec),
        "ggml_take": ([rows(3, 68), ((4,), S32)], [((4, 64), F32)], codec),
        "ggml_prepare": ([((9, 68), U8)], [((2, 544), U8)], {"format": 8, "prepare": 1}),
        "ggml_linear": ([((1, 3, 64), F32), rows(2, 9, 68)], [((2, 3, 9), F32)], {**codec, "int8": 1}),
        "ggml_linear_gradient": ([((2, 3, 9), F32), rows(2, 9, 68)], [((2, 3, 64), F32)], codec),
        "ggml_moe_linear": (
            [((4, 1, 64), F32), rows(3, 9, 68), ((4, 2), S32)], [((4, 2, 9), F32)], {**codec, "int8": 1},
        ),
        "ggml_moe_linear_gradient": (
            [((4, 2, 9), F32), rows(3, 9, 68), ((4, 2), S32)], [((4, 2, 64), F32)], codec,
        ),
    }[name]  # fmt: skip


TARGETS = ["ggml_quantize", "ggml_dequantize", "ggml_take", "ggml_prepare", "ggml_linear", "ggml_linear_gradient",
           "ggml_moe_linear", "ggml_moe_linear_gradient"]  # fmt: skip
# Which also take prepared data.
BOTH = [(name, False) for name in TARGETS] + [(name, True) for name in TARGETS if "prepared" in valid(name)[2]]


def call_target(name, operands, results, attributes):
    """Runs the kernel on zeros (an imatrix: ones), whatever the shapes."""
    arrays = [np.zeros(shape, dtype) for shape, dtype in operands]
    if name == "ggml_quantize":
        arrays[1:] = [np.ones_like(a) for a in arrays[1:]]
    wanted = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    scratch = OPERATIONS[name][0].scratch
    if scratch is not None:
        keywords = {"int8": bool(attributes["int8"])} if "int8" in attributes else {}
        try:
            found = scratch(*arrays, **keywords)
        except (IndexError, TypeError):  # of operands that make no sense
            found = jax.ShapeDtypeStruct((0,), U8)
        wanted.append(jax.ShapeDtypeStruct(found.shape, found.dtype))
    call = jax.ffi.ffi_call(f"jaxquant_{name}", wanted)
    attributes = {key: np.int64(value) for key, value in attributes.items()}
    return jax.block_until_ready(jax.jit(lambda *a: call(*a, **attributes))(*arrays))


def mutations(name, prepared):
    """One thing wrong at a time: an axis longer, shorter, gone or added, another type, another attribute."""
    operands, results, attributes = valid(name, prepared)
    arrays = [*operands, *results]

    def with_array(i, shape, dtype):
        changed = [*arrays]
        changed[i] = (shape, dtype)
        return changed[: len(operands)], changed[len(operands) :], attributes

    for i, (shape, dtype) in enumerate(arrays):
        for d, n in enumerate(shape):
            for size in (n + 1, n - 1, 0, 2 * n):
                yield with_array(i, (*shape[:d], size, *shape[d + 1 :]), dtype)
        yield with_array(i, shape[1:], dtype)
        yield with_array(i, (*shape, 1), dtype)
        yield with_array(i, (), dtype)
        for other in {U8, F32, F16, S32} - {dtype}:
            yield with_array(i, shape, other)
    for key in attributes:
        yield operands, results, {k: v for k, v in attributes.items() if k != key}
    for wrong in (4, 38, 43, -1, 2**31, 2**40 + 8, -(2**63), 12, *([16] if prepared else [])):
        yield operands, results, {**attributes, "format": wrong}


def of_eight(shape, n):
    """The plain shape of prepared rows, if there can be n of them."""
    *lead, eights, size = shape
    return (*lead, n, size // 8) if eights == -(-n // 8) and size % 8 == 0 else (*lead, -1, -1)


def consistent(name, operands, results, attributes):
    """Whether the shapes of a changed call fit together after all (more tokens, an unused axis of one)."""
    if set(attributes) != set(valid(name)[2]) or attributes["format"] != 8:
        return False
    shapes, dtypes = [s for s, _ in [*operands, *results]], [t for _, t in [*operands, *results]]
    if [len(s) for s in shapes] != [len(s) for s, _ in [*valid(name)[0], *valid(name)[1]]]:
        return name in ("ggml_quantize",) and 0 in shapes[1] and shapes[0] == (3, 64) and dtypes == [F32, F32, U8]
    if name == "ggml_quantize":
        (rows, k), imatrix, (out, row_bytes) = shapes
        fits = 0 in imatrix or (imatrix[0] in (1, rows) and imatrix[1] == k)
        return rows == out and k % 32 == 0 and row_bytes == k // 32 * 34 and fits and dtypes == [F32, F32, U8]
    n = {"ggml_dequantize": shapes[-1][0], "ggml_prepare": shapes[0][0], "ggml_take": 8 * shapes[0][0]}.get(name)
    if name == "ggml_prepare":
        return of_eight(shapes[1], n) == shapes[0] and shapes[0][1] % 34 == 0 and dtypes == [U8, U8]
    if attributes["prepared"]:
        at = int("linear" in name)
        n = n if n is not None else shapes[0 if "gradient" in name else -1][2]
        shapes[at] = of_eight(shapes[at], n)
    if name == "ggml_dequantize":
        return (
            shapes[0][0] == shapes[1][0] and fits_row(shapes[0][1], shapes[1][1]) and dtypes in ([U8, F32], [U8, F16])
        )
    if name == "ggml_take":
        fits = shapes[1][0] == shapes[2][0] and fits_row(shapes[0][1], shapes[2][1])
        return fits and dtypes in ([U8, S32, F32], [U8, S32, F16])
    x, (b, n, row_bytes), *ids, out = shapes
    if dtypes[0] not in (F32, F16) or dtypes[-1] != dtypes[0] or dtypes[1] != U8 or dtypes[2:-1] not in ([], [S32]):
        return False
    inner, outer = (x[2], out[2]) if "gradient" not in name else (out[2], x[2])
    if not fits_row(row_bytes, inner) or outer != n:
        return False
    if ids:
        (tokens, slots) = ids[0]
        shared = (1, slots) if "gradient" not in name else (slots,)
        return x[0] == tokens and x[1] in shared and out[:2] == (tokens, slots)
    shared = (1, b) if "gradient" not in name else (b,)
    return x[0] in shared and out[:2] == (b, x[1])


def fits_row(row_bytes, values):
    return values % 32 == 0 and row_bytes == values // 32 * 34


@pytest.mark.parametrize(("name", "prepared"), BOTH)
def test_targets_check_everything_again(name, prepared):
    """Handlers that are called with what Python would never send: an error of theirs, no crash and no wrong reads."""
    call_target(name, *valid(name, prepared))
    refused = 0
    for operands, results, attributes in mutations(name, prepared):
        if 0 in results[0][0]:
            continue  # XLA calls nobody for nothing
        if consistent(name, operands, results, attributes):
            call_target(name, operands, results, attributes)
        else:
            try:
                call_target(name, operands, results, attributes)
            except Exception as refusal:
                assert re.search(r"ggml_|[Aa]ttribute|INVALID_ARGUMENT", str(refusal)), refusal
                refused += 1
            else:
                pytest.fail(f"accepted: {operands} -> {results}, {attributes}")
    assert refused > 20


@pytest.mark.parametrize("name", TARGETS)
def test_targets_count_their_operands(name):
    operands, results, attributes = valid(name)
    for changed in (operands[:-1], [*operands, operands[-1]]):
        call = jax.ffi.ffi_call(f"jaxquant_{name}", [jax.ShapeDtypeStruct(*r) for r in results])
        with pytest.raises(Exception, match=r"[Ww]rong number of arg"):
            jax.block_until_ready(
                jax.jit(functools.partial(call, **{k: np.int64(v) for k, v in attributes.items()}))(
                    *(np.zeros(*a) for a in changed)
                )
            )


def test_a_wrong_scratch_is_refused():
    operands, results, attributes = valid("ggml_linear")
    if OPERATIONS["ggml_linear"][0].scratch is None:
        pytest.skip("the kernels need none")
    attributes = {key: np.int64(value) for key, value in attributes.items()}
    for size, dtype in ((0, U8), (1, U8), (64, F32)):
        wanted = [*(jax.ShapeDtypeStruct(*r) for r in results), jax.ShapeDtypeStruct((size,), dtype)]
        call = jax.ffi.ffi_call("jaxquant_ggml_linear", wanted)
        with pytest.raises(Exception, match="ggml_linear: scratch"):
            jax.block_until_ready(call(*(np.zeros(*a) for a in operands), **attributes))


def test_more_axes_than_the_kernel_counts():
    x = np.ones((1,) * 15 + (32,), np.float32)
    assert quantize(x, "Q4_0", imatrix=np.ones(32, np.float32)).shape == x.shape
    with pytest.raises(Exception, match="at most 16 axes"):
        quantize(x[None], "Q4_0", imatrix=np.ones(32, np.float32))
    assert quantize(x[None], "Q4_0").shape == (1, *x.shape)
