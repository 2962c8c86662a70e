"""The block formats' CUDA kernels, run on the host, have ggml's bits.

Needs the module `_cuda_emulation` (built with JAXQUANT_EMULATION=ON). Most tests call it without XLA, whose buffers are
always well aligned: blocks of 17 or 34 bytes are not, wherever a row begins.
"""

import functools

import ggml_library
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_ggml_quantize as quantising
from test_cuda_emulation import Output, placed

from jaxquant import ggml
from jaxquant._core import ffi
from jaxquant.ggml.layout import has_prepared_form

kernels = ffi.module("cuda_emulation")
pytestmark = pytest.mark.skipif(kernels is None, reason="the emulated CUDA kernels are not compiled in")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ON_HOST = {"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"}
ON_DEVICE = [name for name in ggml.formats if name not in ON_HOST]


def assert_same_floats(actual, expected):
    """The same bits, but any NaN for a NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bits = np.dtype(f"u{actual.dtype.itemsize}")
    same = (actual.view(bits) == expected.view(bits)) | (np.isnan(actual) & np.isnan(expected))
    where = np.argwhere(~same)
    assert same.all(), f"{len(where)} differ, the first at {where[0]}: {actual[~same][0]!r}, {expected[~same][0]!r}"


def random_blocks(format, rows, blocks, seed=0):
    """Any bytes, so any scale: subnormal, infinite and NaN ones too."""
    kind = ggml.formats[format]
    data = np.random.default_rng(seed).integers(0, 256, (rows, blocks * kind.type_size), np.uint8)
    data[:, : kind.type_size] = np.arange(rows, dtype=np.uint8)[:, None]  # MXFP4: the smallest exponents
    return data


@functools.cache
def values_of(format, rows, blocks):
    """The random blocks and ggml's float32 values of them."""
    data, kind = random_blocks(format, rows, blocks), ggml.formats[format]
    if format != "Q8_1":  # which ggml itself only multiplies with
        return data, ggml_library.dequantize(kind.type_id, data)
    raw = data.reshape(-1, kind.type_size)
    scales = np.ascontiguousarray(raw[:, :2]).view(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return data, (scales * raw[:, 4:].view(np.int8)).reshape(rows, -1)


def rounded(values, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(DTYPES[dtype])


def dequantize(format, data, dtype, ids=None, offset=0):
    """data begins where it begins, the result `offset` elements after a boundary."""
    kind = ggml.formats[format]
    rows = len(data) if ids is None else len(ids)
    out = Output((rows, data.shape[1] // kind.type_size * kind.block_size), DTYPES[dtype], offset)
    kernels.ggml_dequantize(kind.type_id, data, ids, out.array)
    return out.checked()


# ---------------------------------------------------------------------------------------------------------- dequantise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ggml.formats)
def test_values_are_those_of_ggml(format, dtype):
    """A tile and a half, from and to places of every alignment."""
    blocks = 1536 // ggml.formats[format].block_size
    data, expected = values_of(format, 3, blocks)
    expected = rounded(expected, dtype)
    for data_offset, offset in ((0, 0), (16, 0), (1, 0), (2, 3), (8, 1), (0, 2)):
        assert_same_floats(dequantize(format, placed(data, data_offset), dtype, offset=offset), expected)


@pytest.mark.parametrize("format", ["Q4_0", "BF16", "IQ1_M", "Q6_K"])
def test_more_tiles_than_warps(format):
    data, expected = values_of(format, 3, 196608 // ggml.formats[format].block_size // 3 + 1)
    assert_same_floats(dequantize(format, data, "float32"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ggml.formats)
def test_rows_by_number(format, dtype):
    """Rows of one block (17 bytes, 18, ...), and zeros for numbers that no row has."""
    ids = np.array([2, -1, 0, 2, 5, 4, np.iinfo(np.int32).max, np.iinfo(np.int32).min], np.int32)
    for blocks in (1, 5, 1100 // ggml.formats[format].block_size):
        data, values = values_of(format, 5, blocks)
        known = (ids >= 0) & (ids < 5)
        expected = rounded(np.where(known[:, None], values[np.where(known, ids, 0)], np.float32(0)), dtype)
        for data_offset, offset in ((0, 0), (3, 1)):
            assert_same_floats(dequantize(format, placed(data, data_offset), dtype, placed(ids), offset), expected)


def test_no_rows_of_data():
    out = dequantize("Q4_0", np.zeros((0, 18), np.uint8), "float32", np.zeros(3, np.int32))
    np.testing.assert_array_equal(out, np.zeros((3, 32)))


# ------------------------------------------------------------------------------------------------------------ quantise


def quantize(format, x, imatrix=None, offset=0):
    kind = ggml.formats[format]
    rows = x.reshape(-1, x.shape[-1])
    out = Output((len(rows), kind.row_bytes(rows.shape[1])), np.uint8, offset)
    kernels.ggml_quantize(kind.type_id, placed(rows, offset), None if imatrix is None else imatrix[None], out.array)
    return out.checked().reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("imatrix", [None, "usual", "holes"])
@pytest.mark.parametrize("format", ON_DEVICE)
def test_bytes_are_those_of_ggml(format, imatrix):
    if imatrix is not None and format in quantising.IGNORES_IMATRIX:
        pytest.skip("the importance matrix does not matter")
    weights = None if imatrix is None else quantising.importances()[imatrix]
    kinds = quantising.values()
    if not format.startswith("IQ"):  # on which ggml ends the process
        kinds = kinds | quantising.large_values()
    x = np.stack([rows[:3] for rows in kinds.values()])
    actual, expected = quantize(format, x, weights), quantising.theirs(x, format, weights)
    different = (actual != expected).reshape(len(kinds), -1).any(axis=1)
    assert not different.any(), [kind for kind, wrong in zip(kinds, different, strict=True) if wrong]


@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("format", ["Q8_0", "MXFP4", "Q4_K", "F16", "BF16", "F32"])
def test_quantised_bytes_begin_anywhere(format, offset):
    x = np.random.default_rng(2).standard_normal((5, 256)).astype(np.float32)
    np.testing.assert_array_equal(quantize(format, x, offset=offset), quantising.theirs(x, format))


def test_more_blocks_than_threads():
    x = np.random.default_rng(3).standard_normal((5, 32 * 2048)).astype(np.float32)
    np.testing.assert_array_equal(quantize("Q4_0", x), quantising.theirs(x, "Q4_0"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", ON_DEVICE)
def test_values_that_are_not_finite(format, value):
    """Only their own blocks suffer, or rows where those are weighed as a whole, and validate() finds them."""
    kind = ggml.formats[format]
    x = np.random.default_rng(4).standard_normal((3, 512)).astype(np.float32)
    imatrix = None if format in quantising.IGNORES_IMATRIX else np.ones(512, np.float32)
    sound = quantize(format, x, imatrix)
    x[1, 300] = value
    actual = quantize(format, x, imatrix)
    wrong = np.zeros((3, 512 // kind.block_size), bool)
    wrong[1, 300 // kind.block_size] = True
    if imatrix is not None and kind.block_size == 32 and format != "IQ4_NL":
        wrong[1] = True
    found = ggml.validate(ggml.QTensor.from_bytes(actual, format, x.shape))
    expected = (wrong.sum(), tuple(np.argwhere(wrong)[0]))
    assert (found[0].count, found[0].first) == expected, list(map(str, found))
    np.testing.assert_array_equal((actual == sound).reshape(*wrong.shape, -1).all(axis=2), ~wrong)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0, 0.0])
@pytest.mark.parametrize("format", [name for name in ON_DEVICE if name not in quantising.IGNORES_IMATRIX])
def test_importances_that_make_no_sense(format, wrong):
    imatrix = np.full(512, 0.0 if wrong == 0.0 else 1.0, np.float32)
    imatrix[77] = wrong
    actual = quantize(format, np.ones((2, 512), np.float32), imatrix)
    found = ggml.validate(ggml.QTensor.from_bytes(actual, format, (2, 512)))
    assert found[0].count == 2 * 512 // ggml.formats[format].block_size


# ------------------------------------------------------------------------------------------------------------- prepare


@pytest.mark.parametrize("format", [name for name in ggml.formats if has_prepared_form(name)])
def test_prepared_layout(format):
    """Two matrices of 19 rows, the last eight of each filled up; rows and values of them, and back."""
    kind = ggml.formats[format]
    data, values = (a.reshape(2, 19, -1) for a in values_of(format, 38, 3))
    w = ggml.QTensor(jnp.asarray(data), kind).prepare()
    for offset in (0, 1, 2):
        there, back = Output(w.data.shape, np.uint8, offset), Output(data.shape, np.uint8, 3 * offset)
        kernels.ggml_arrange(kind.type_id, placed(data, offset), True, there.array)
        np.testing.assert_array_equal(there.checked(), w.data)
        kernels.ggml_arrange(kind.type_id, there.array, False, back.array)
        np.testing.assert_array_equal(back.checked(), data)
    use, ids = {"implementation": "cuda_emulation"}, np.array([18, -1, 0, 19, 9])
    assert_same_floats(w.dequantize(**use), values)
    known = ((ids >= 0) & (ids < 19))[:, None]
    assert_same_floats(w[1].take(ids, **use), np.where(known, values[1][np.clip(ids, 0, 18)], np.float32(0)))


# --------------------------------------------------------------------------------------------------------- under jit


def test_under_jit():
    """The same targets as on a GPU, with operands that XLA allocates and threads that flush subnormals."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((2, 3, 256)).astype(np.float32) * np.float32(1e-38)
    imatrix = rng.uniform(0, 1, (2, 1, 256)).astype(np.float32)

    @jax.jit
    def both(x, imatrix):
        quantised = ggml.quantize(x, "Q4_1", imatrix=imatrix[:, 0], implementation="cuda_emulation")
        ids = jnp.array([[2, -1], [0, 0]])
        taken = [
            ggml.QTensor(quantised.data[i], quantised.format, quantised.layout).take(
                ids[i], jnp.float16, implementation="cuda_emulation"
            )
            for i in range(2)
        ]
        return quantised.data, quantised.dequantize(implementation="cuda_emulation"), jnp.stack(taken)

    data, values, taken = map(np.asarray, both(x, imatrix))
    for e in range(2):
        expected = quantising.theirs(x[e], "Q4_1", imatrix[e, 0])
        np.testing.assert_array_equal(data[e], expected)
        assert_same_floats(values[e], ggml_library.dequantize(3, expected))
    assert_same_floats(taken[0], np.stack([values[0, 2], 0 * values[0, 0]]).astype(np.float16))
    assert_same_floats(taken[1], np.stack([values[1, 0]] * 2).astype(np.float16))


def test_formats_for_the_host():
    """What no CUDA kernel quantises the host does, from within a compiled function; the bare kernel refuses."""
    x = np.random.default_rng(7).standard_normal((2, 256)).astype(np.float32)
    imatrix = np.ones(256, np.float32)
    quantise = jax.jit(functools.partial(ggml.quantize, format="IQ2_XS", implementation="cuda_emulation"))
    np.testing.assert_array_equal(quantise(x, imatrix=imatrix).data, quantising.theirs(x, "IQ2_XS", imatrix))
    for format in ON_HOST:
        with pytest.raises(RuntimeError, match=r"no CUDA kernel for GGML type .* quantised on the host"):
            quantize(format, x, imatrix)
