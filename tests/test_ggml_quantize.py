"""Quantisation against ggml itself: the same bytes for every format, on values of every kind."""

import functools

import ggml_library
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import ggml

ROWS, SIZE = 9, 768  # three super-blocks a row; no multiple of any vector's lanes
# With an importance matrix ggml reads these the same as without one.
IGNORES_IMATRIX = {
    "F32", "F16", "BF16", "Q1_0", "Q2_0", "Q8_0", "Q8_1", "Q8_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
}  # fmt: skip
SIMPLE = [name for name in ggml.formats if not name.startswith("IQ")]
# ggml takes seconds of preparation for some IQ formats: once, if one worker has them all.
EVERY = [
    pytest.param(name, marks=pytest.mark.xdist_group("iq") if name.startswith("IQ") else ()) for name in ggml.formats
]


@functools.cache
def values():
    """Rows by kind."""
    rng = np.random.default_rng(7)
    shape = (ROWS, SIZE)
    normal = rng.standard_normal(shape)
    sparse = np.where(rng.random(shape) < 0.7, 0.0, normal)
    blocks = np.repeat(rng.random((ROWS, SIZE // 16)), 16, axis=1)
    # Halves and the floats beside them, in blocks whose scale is 1.
    halves = np.nextafter(
        (rng.integers(-8, 8, shape) + 0.5).astype(np.float32), rng.choice([-100, 0, 100], shape).astype(np.float32)
    )
    halves = np.where(rng.random(shape) < 0.5, np.clip(halves, -0.50000006, 0.50000006), halves)
    one = np.clip(halves, -1, 1)
    halves[:, ::32], one[:, ::32] = 127, 1
    kinds = {
        "normal": normal,
        "heavy tails": rng.standard_t(2, shape),
        "very heavy tails": rng.standard_t(1, shape),
        "positive": rng.uniform(0, 1, shape),
        "negative": rng.uniform(-2, -1, shape),
        "constant blocks": np.repeat(rng.standard_normal((ROWS, SIZE // 32)), 32, axis=1),
        "zeros": np.zeros(shape),
        "negative zeros": np.full(shape, -0.0),
        "sparse": np.where(rng.random(shape) < 0.1, -0.0, sparse),
        "zero blocks": np.where(blocks < 0.5, 0.0, normal),
        "blocks of many sizes": normal * 10.0 ** (20 * blocks - 15),
        "values of many sizes": normal * 10.0 ** rng.uniform(-8, 4, shape),
        "integers": rng.integers(-3, 4, shape),
        "bytes": rng.integers(-127, 128, shape),
        "ternary": rng.integers(-1, 2, shape) * rng.standard_normal((ROWS, 1)),
        "halves below 127": halves,
        "halves below 1": one,
        "ramp": np.linspace(-1, 1, ROWS * SIZE).reshape(shape),
        "cosine": (0.1 + 2 * np.cos(np.arange(ROWS * SIZE))).reshape(shape),
        # Where log2f rounds up to the next integer (MXFP4's exponent).
        "below powers of two": np.repeat(
            2.0 ** rng.integers(-60, 12, (ROWS, SIZE // 32)) * (1 - 2.0**-24 * rng.integers(0, 60, (ROWS, SIZE // 32))),
            32, axis=1,
        ),
    }  # fmt: skip
    for size in (1e-6, 1e-15, 1e-30, 1e-38, 1e-42, 1e3):
        kinds[f"normal times {size:g}"] = normal * size
    return {kind: x.astype(np.float32) for kind, x in kinds.items()}


@functools.cache
def large_values():
    """More of them: scales beyond a half, sums beyond a float. ggml's IQ formats end the process on such."""
    rng = np.random.default_rng(8)
    normal = rng.standard_normal((ROWS, SIZE))
    kinds = {f"normal times {size:g}": np.clip(normal * size, -3e38, 3e38) for size in (65504, 4e6, 1e20, 1e30, 1e38)}
    signs = rng.choice([-1.0, 1.0], normal.shape)
    kinds["powers of two"] = signs * 2.0 ** rng.integers(-140, 126, normal.shape)
    return {kind: x.astype(np.float32) for kind, x in kinds.items()}


@functools.cache
def importances():
    rng = np.random.default_rng(9)
    usual = (rng.standard_normal((8, SIZE)) ** 2).sum(0)
    holes = np.where(rng.random(SIZE) < 0.4, 0.0, usual)
    holes[256:512] = 0.0
    return {"usual": usual.astype(np.float32), "holes": holes.astype(np.float32)}


@functools.partial(jax.jit, static_argnames="format")
def quantize(x, imatrix, format):
    return ggml.quantize(x, format, imatrix=imatrix)


def ours(x, format, imatrix=None):
    return np.asarray(quantize(x, imatrix, format).data)


def theirs(x, format, imatrix=None):
    """The library's bytes, but zeros for what it leaves unwritten: the sums of Q8_K's zero blocks."""
    kind = ggml.formats[format]
    out = ggml_library.quantize(kind.type_id, x.reshape(-1, x.shape[-1]), imatrix)
    if format == "Q8_K":
        blocks = out.reshape(-1, kind.type_size)
        blocks[(blocks[:, :4] == 0).all(axis=1), 260:] = 0
    return out.reshape(*x.shape[:-1], out.shape[-1])


def assert_same_blocks(kinds, format, imatrix=None):
    x = np.stack(list(kinds.values()))
    actual, expected = ours(x, format, imatrix), theirs(x, format, imatrix)
    assert actual.dtype == np.uint8
    assert actual.shape == expected.shape
    size = ggml.formats[format].type_size
    different = (actual != expected).reshape(len(kinds), -1, size).any(axis=2)
    found = {kind: f"{d.sum()} of {d.size}" for kind, d in zip(kinds, different, strict=True) if d.any()}
    assert not found, f"{format}: blocks that differ: {found}"


@pytest.mark.parametrize("imatrix", [None, "usual", "holes"])
@pytest.mark.parametrize("format", EVERY)
def test_bytes_are_those_of_ggml(format, imatrix):
    if imatrix is None and ggml.formats[format].requires_imatrix:
        pytest.skip("needs an importance matrix")
    if imatrix == "holes" and format in IGNORES_IMATRIX:
        pytest.skip("the importance matrix does not matter")
    assert_same_blocks(values(), format, None if imatrix is None else importances()[imatrix])


@pytest.mark.parametrize("imatrix", [None, "usual"])
@pytest.mark.parametrize("format", SIMPLE)
def test_large_values(format, imatrix):
    if imatrix is not None and format in IGNORES_IMATRIX:
        pytest.skip("the importance matrix does not matter")
    assert_same_blocks(large_values(), format, None if imatrix is None else importances()[imatrix])


@pytest.mark.parametrize("format", SIMPLE)
def test_many_rows(format):
    """What few blocks need: the fifth time around the codes, and its like."""
    rng = np.random.default_rng(5)
    kinds = {"uniform": rng.uniform(-1, 1, (300, 1024)), "very heavy tails": rng.standard_t(1, (300, 1024))}
    kinds = {kind: x.astype(np.float32) for kind, x in kinds.items()}
    assert_same_blocks(kinds, format)
    if format not in IGNORES_IMATRIX:
        assert_same_blocks(kinds, format, (rng.standard_normal(1024) ** 8).astype(np.float32))


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 33])
@pytest.mark.parametrize("format", ["Q4_1", "Q8_0", "Q4_K", "IQ4_XS"])
def test_any_number_of_rows(format, rows):
    """Rows share vectors with their neighbours, but no bits."""
    x = np.random.default_rng(rows).standard_normal((rows, 256)).astype(np.float32)
    imatrix = importances()["usual"][:256]
    np.testing.assert_array_equal(ours(x, format, imatrix), theirs(x, format, imatrix))


@pytest.mark.parametrize("format", [name for name in EVERY if name.values[0] in ("Q4_0", "Q6_K", "IQ2_S")])
def test_an_imatrix_per_expert(format):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((3, 5, 512)).astype(np.float32)
    imatrix = (rng.standard_normal((3, 512)) ** 2).astype(np.float32)
    expected = np.stack([theirs(x[e], format, imatrix[e]) for e in range(3)])
    np.testing.assert_array_equal(ours(x, format, imatrix), expected)
    assert (expected != theirs(x, format, imatrix[0])).any()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_converted_exactly(dtype):
    x = jnp.asarray(np.random.default_rng(4).standard_normal((4, 256)), dtype)
    np.testing.assert_array_equal(ours(x, "Q4_K"), theirs(np.asarray(x.astype(jnp.float32)), "Q4_K"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", ggml.formats)
def test_values_that_are_not_finite(format, value):
    """Floating point holds them; every other format refuses them, wherever they are."""
    imatrix = importances()["usual"][:256]
    for at in ((0, 0), (4, 131), (8, 255)):
        x = np.ones((9, 256), np.float32)
        x[at] = value
        if ggml.formats[format].is_float:
            np.testing.assert_array_equal(ours(x, format), theirs(x, format))
        else:
            with pytest.raises(Exception, match="finite"):
                ours(x, format, imatrix)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0, 0.0])
@pytest.mark.parametrize("format", [name for name in ggml.formats if name not in IGNORES_IMATRIX])
def test_importances_that_make_no_sense(format, wrong):
    """In a compiled function only the kernel can tell."""
    imatrix = np.zeros(256, np.float32) if wrong == 0.0 else importances()["usual"][:256].copy()
    imatrix[77] = wrong
    x = np.ones((2, 256), np.float32)
    with pytest.raises(Exception, match="imatrix"):
        ours(x, format, imatrix)
    with pytest.raises(ValueError, match="imatrix"):
        ggml.quantize(x, format, imatrix=imatrix)
