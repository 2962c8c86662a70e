"""QTensor: values of every format against the reference library, bytes, indices, life as a pytree, damaged bytes."""

import itertools

import ggml_oracle as oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxquant import ggml

HALVES = [np.float16, ml_dtypes.bfloat16]
# Formats with a prepared layout -> the bytes of a block before its words of four.
PREPARED = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), 2), "MXFP4": 1,
    **dict.fromkeys(("Q4_1", "Q5_1", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ4_XS", "TQ2_0"), 0),
    "NVFP4": 0,
}  # fmt: skip


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantised(name, *shape):
    x = normal(*shape)
    imatrix = np.ones(shape[-1], np.float32) if ggml.formats[name].requires_imatrix else None
    return ggml.quantize(x, name, imatrix=imatrix)


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    same = actual.view(f"u{actual.dtype.itemsize}") == expected.view(f"u{expected.dtype.itemsize}")
    assert (same | (np.isnan(actual) & np.isnan(expected))).all()


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("name", ggml.formats)
def test_values(name):
    """Of quantised rows, of random bytes with finite scales, and of any bytes at all, subnormals included."""
    blocks = 768 // ggml.formats[name].block_size
    rng = np.random.default_rng(1)
    wild = rng.integers(0, 256, (12, ggml.formats[name].row_bytes(768)), np.uint8)
    data = np.concatenate([quantised(name, 5, 768).data, oracle.random_bytes(name, 16, blocks), wild])
    expected = oracle.dequantize(data, name)
    w = ggml.QTensor(data, name)

    def every(w):
        return [w.dequantize(t) for t in (np.float32, *HALVES)], [w.prepare().dequantize(), w.take(jnp.arange(33))]

    (values, *halves), same = jax.jit(every)(w)
    assert_same_bits(values, expected)
    for a in same:
        assert_same_bits(a, expected)
    with np.errstate(over="ignore", invalid="ignore"):
        for a, dtype in zip(halves, HALVES, strict=True):
            assert_same_bits(a, expected.astype(dtype))


@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q6_K", "IQ1_M", "NVFP4"])
@pytest.mark.parametrize("dtype", [np.float32, *HALVES])
def test_take(name, dtype):
    w = quantised(name, 7, 512)
    ids = np.array([[3, -1, 0], [7, 6, 3], [-(2**31), 2**31 - 1, 2]], np.int32)
    rows = oracle.dequantize(np.asarray(w.data), name).astype(dtype)
    expected = np.where(((ids >= 0) & (ids < 7))[..., None], rows[np.clip(ids, 0, 6)], np.zeros((), dtype))
    assert_same_bits(w.take(ids, dtype), expected)
    assert_same_bits(w.prepare().take(ids, dtype), expected)
    assert_same_bits(w.take(6, dtype), rows[6])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
def test_types_of_ids(dtype, x64):
    w = quantised("Q8_0", 300, 32)
    ids = np.array([3, 100, np.iinfo(dtype).max, *([2**32 + 3, -(2**32)] if dtype == np.int64 else [])], dtype)
    known = ids.astype(np.float64) < 300
    known &= ids.astype(np.float64) >= 0
    rows = oracle.dequantize(np.asarray(w.data), "Q8_0")[np.where(known, ids, 0).astype(int)]
    assert_same_bits(w.take(ids), np.where(known[:, None], rows, np.float32(0)))


def test_where_float64_exists(x64):
    """Values are rounded to float32 on the way in; results do not change with the mode."""
    x = np.random.default_rng(4).standard_normal((5, 512))
    w = ggml.quantize(x, "Q4_K")
    with jax.enable_x64(False):
        expected = ggml.quantize(x.astype(np.float32), "Q4_K")
        rows = expected.take(np.array([1, -1]))
    np.testing.assert_array_equal(w.data, expected.data)
    assert_same_bits(w.take(np.array([1, -1])), rows)
    assert w.dequantize().dtype == np.float32
    with pytest.raises(TypeError, match=r"linear: x: expected one of float32.*got float64"):
        ggml.linear(x, w)


# ------------------------------------------------------------------------------------------------------ shape and bytes


@pytest.mark.smoke
@pytest.mark.parametrize("name", ggml.formats)
def test_shapes_and_bytes(name):
    kind = ggml.formats[name]
    w = ggml.QTensor.zeros((2, 9, 512), name)
    row = 512 // kind.block_size * kind.type_size
    assert (w.shape, w.ndim, w.size, len(w)) == ((2, 9, 512), 3, 9216, 2)
    assert (w.data.shape, w.data.dtype) == ((2, 9, row), jnp.uint8)
    assert w.nbytes == 18 * row == len(w.to_bytes()) == round(9216 * kind.bits_per_weight / 8)
    assert (w.block_size, w.format, w.layout) == (kind.block_size, kind, "plain")
    assert repr(w) == f"QTensor({name}, (2, 9, 512))"
    assert not np.asarray(w.dequantize()).any()
    prepared = w.prepare()
    assert prepared.shape == w.shape and prepared.prepare() is prepared and w.plain() is w
    if name in PREPARED:
        assert repr(prepared) == f"QTensor({name}, (2, 9, 512), prepared)"
        assert (prepared.data.shape, prepared.padding, prepared.nbytes) == ((2, 2, 8 * row), 7, 32 * row)
    else:
        assert prepared is w


def interleaved(data, name):
    """The prepared layout, byte by byte: rows in eights, of blocks a lead, words of four bytes and what is left."""
    size, lead = ggml.formats[name].type_size, PREPARED[name]
    units = [lead] * (lead > 0) + [4] * ((size - lead) // 4) + [(size - lead) % 4] * ((size - lead) % 4 > 0)
    ends = np.cumsum(units)
    data = np.concatenate([data, np.zeros((-len(data) % 8, data.shape[1]), np.uint8)])
    rows = data.reshape(-1, 8, data.shape[1] // size, size)
    pieces = [rows[..., end - unit : end].swapaxes(1, 2) for unit, end in zip(units, ends, strict=True)]
    flat = np.concatenate([p.reshape(*p.shape[:2], -1) for p in pieces], axis=-1)
    return flat.reshape(len(flat), -1)


@pytest.mark.smoke
@pytest.mark.parametrize("n", [1, 8, 9, 24, 31])
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "MXFP4"])
def test_prepare_there_and_back(name, n):
    """The bytes that layout.h describes, and back; without kernels as well."""
    kind = ggml.formats[name]
    data = np.random.default_rng(n).integers(0, 256, (3, n, kind.row_bytes(512)), np.uint8)
    w = ggml.QTensor(data, kind)
    prepared = w.prepare()
    assert prepared.padding == -n % 8
    np.testing.assert_array_equal(prepared.data, [interleaved(matrix, name) for matrix in data])
    np.testing.assert_array_equal(prepared.plain().data, data)
    assert prepared.to_bytes() == w.to_bytes() == data.tobytes()
    from jaxquant.ggml import layout

    np.testing.assert_array_equal(layout.prepare(jnp.asarray(data), name), prepared.data)
    np.testing.assert_array_equal(layout.plain(prepared.data, name, layout.prepared_layout(n)), data)


@pytest.mark.smoke
def test_rows_of_a_prepared_tensor_need_no_others():
    """A table that is never put back in order: neither rows nor values ask for a plain copy."""
    w = quantised("Q6_K", 21, 512).prepare()
    for call in (lambda w: w.take(jnp.array([3, 20])), lambda w: w.dequantize()):
        assert "ggml_prepare" not in str(jax.make_jaxpr(call)(w))
    rows = w.take(np.array([3, 20, 21, 23, -1]), implementation="xla")
    expected = np.concatenate([np.asarray(w.plain().dequantize())[[3, 20]], np.zeros((3, 512), np.float32)])
    assert_same_bits(rows, expected)


@pytest.mark.smoke
def test_from_bytes():
    shape, rng = (2, 3, 64), np.random.default_rng(2)
    data = rng.integers(0, 256, (2, 3, 68), np.uint8)
    for given in (
        data.tobytes(),
        bytearray(data.tobytes()),
        memoryview(data.tobytes()),
        data,
        data.reshape(-1),
        jnp.asarray(data),
    ):
        w = ggml.QTensor.from_bytes(given, "q8_0", shape)
        assert w.shape == shape and w.to_bytes() == data.tobytes()
    assert ggml.QTensor.from_bytes(b"", "Q4_K", (0, 256)).shape == (0, 256)
    traced = jax.jit(lambda d: ggml.QTensor.from_bytes(d, "Q8_0", shape).dequantize())(data)
    assert_same_bits(traced, ggml.QTensor(data, "Q8_0").dequantize())


def test_bytes_go_to_the_library_and_back():
    """What to_bytes() gives is what ggml reads, whatever the layout."""
    w = quantised("Q5_K", 9, 512)
    data = np.frombuffer(w.prepare().to_bytes(), np.uint8).reshape(9, -1)
    assert_same_bits(oracle.dequantize(data, "Q5_K"), w.dequantize())


# -------------------------------------------------------------------------------------------------------------- indices


@pytest.mark.smoke
@pytest.mark.parametrize(
    "index",
    [0, -1, np.int64(1), slice(1, 3), slice(None, None, 2), (1, 2), (1, slice(0, 3)), (slice(None), 4), (None, 1),
     np.array([2, 0]), (np.array([2, 0]), np.array([1, 1])), np.array([True, False, True]), ()],
    ids=repr,
)  # fmt: skip
def test_indices(index):
    w = quantised("Q8_0", 3, 5, 64)
    part, values = w[index], np.asarray(w.dequantize())[index]
    assert part.shape == values.shape and (part.format, part.layout) == (w.format, w.layout)
    assert_same_bits(part.dequantize(), values)


@pytest.mark.smoke
def test_indices_of_prepared_tensors():
    w = quantised("Q8_0", 3, 9, 64)
    prepared = w.prepare()
    assert_same_bits(prepared[1].dequantize(), w[1].dequantize())
    assert prepared[1].layout == "prepared"
    with pytest.raises(ValueError, match=r"at most 1 axes.*use \.plain\(\)"):
        prepared[1, 2]


@pytest.mark.smoke
def test_iteration_ends():
    """An index out of range is an error, though arrays of JAX take the last element instead."""
    w = quantised("Q8_0", 3, 5, 64)
    rows = list(itertools.islice(w, 10))
    assert len(rows) == 3
    for i, row in enumerate(rows):
        assert_same_bits(row.dequantize(), w.dequantize()[i])
    for index in (3, -4, (0, 5), (slice(None), 5)):
        with pytest.raises(IndexError, match="out of range for axis"):
            w[index]


# --------------------------------------------------------------------------------------------------------------- pytree


@pytest.mark.smoke
def test_pytree():
    w = quantised("Q8_0", 3, 5, 64)
    (leaf,), tree = jax.tree.flatten(w)
    assert leaf is w.data
    other = jax.tree.unflatten(tree, [leaf])
    assert (other.format, other.layout) == (w.format, w.layout)
    assert (
        tree == jax.tree.structure(quantised("Q8_0", 4, 64)) != jax.tree.structure(quantised("Q8_0", 4, 64).prepare())
    )
    assert tree != jax.tree.structure(quantised("Q5_0", 3, 5, 64))
    assert hash(tree) == hash(jax.tree.structure(other))
    assert jax.tree.map(lambda _: "anything", w).data == "anything"
    assert repr(jax.tree.map(lambda _: None, w)) == "QTensor(Q8_0, None)"
    shapes = jax.eval_shape(lambda w: w, w)
    assert shapes.shape == w.shape and repr(shapes) == "QTensor(Q8_0, (3, 5, 64))"
    on_host = jax.device_get(w)
    assert isinstance(on_host.data, np.ndarray)
    assert_same_bits(on_host.dequantize(), w.dequantize())


def test_pickle_and_copy():
    import copy
    import pickle

    w = quantised("Q4_K", 3, 256).prepare()
    for other in (pickle.loads(pickle.dumps(w)), copy.copy(w), copy.deepcopy(w)):
        assert (other.format.name, other.layout, other.shape) == ("Q4_K", "prepared", w.shape)
        assert other.to_bytes() == w.to_bytes()
        assert jax.tree.structure(other) == jax.tree.structure(w)


def test_checkpoints_with_orbax(tmp_path):
    """Saved and restored like any pytree, onto one device or with a sharding."""
    ocp = pytest.importorskip("orbax.checkpoint")
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    tree = {
        "plain": quantised("Q4_K", 8, 256), "prepared": quantised("Q8_0", 9, 64).prepare(), "bias": jnp.arange(3.0),
        "sharded": jax.device_put(quantised("Q6_K", 8, 256), rows),
    }  # fmt: skip
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", jax.tree.map(ocp.utils.to_shape_dtype_struct, tree))
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    for name in ("plain", "prepared", "sharded"):
        assert restored[name].to_bytes() == tree[name].to_bytes()
    assert restored["sharded"].data.sharding.is_equivalent_to(rows, 2)


# --------------------------------------------------------------------------------------------------------------- damage

# Format -> the offsets in a block of its half-precision fields.
FIELDS = {
    **{name: {"d": 0} for name in ("Q1_0", "Q2_0", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS")},
    **{name: {"d": 0} for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")},
    "Q4_1": {"d": 0, "m": 2}, "Q5_1": {"d": 0, "m": 2}, "Q4_K": {"d": 0, "dmin": 2}, "Q5_K": {"d": 0, "dmin": 2},
    "Q2_K": {"d": 80, "dmin": 82}, "Q3_K": {"d": 108}, "Q6_K": {"d": 208}, "TQ1_0": {"d": 52}, "TQ2_0": {"d": 64},
    "Q8_1": {"d": 0, "s": 2}, "F16": {"value": 0},
}  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize("name", ggml.formats)
def test_sound_tensors(name):
    w = quantised(name, 2, 9, 512)
    assert ggml.validate(w) == [] == ggml.validate(w.prepare())
    assert ggml.validate(quantised(name, 512)) == []
    assert ggml.validate(ggml.QTensor.zeros((0, 512), name)) == [] == ggml.validate(ggml.QTensor.zeros((3, 0), name))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "field", "at"), [(n, f, at) for n, fields in FIELDS.items() for f, at in fields.items()]
)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_scales_that_are_not_finite(name, field, at, value):
    kind = ggml.formats[name]
    w = quantised(name, 2, 9, 512)
    blocks = np.array(w.data).reshape(2, 9, -1, kind.type_size)
    last = blocks.shape[2] - 1
    for place in ((0, 3, last), (1, 8, 0)):
        blocks[(*place, slice(at, at + 2))] = np.array(value, "<f2").reshape(1).view(np.uint8)
    damaged = ggml.QTensor(jnp.asarray(blocks.reshape(w.data.shape)), name)
    for layout in (damaged, damaged.prepare()):
        (finding,) = ggml.validate(layout)
        assert (finding.field, finding.problem, finding.count, finding.first) == (field, "non-finite", 2, (0, 3, last))
    assert str(finding) == f"{field}: non-finite in 2 blocks, the first at {(0, 3, last)}"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "at", "value", "field", "problem"),
    [
        ("MXFP4", 0, 255, "e", "not a number"), ("NVFP4", 3, 127, "d", "not a number"),
        ("NVFP4", 0, 255, "d", "not a number"), ("TQ2_0", 63, 0b00110000, "qs", "a code of 3"),
        ("TQ1_0", 47, 1, "qs", "no digits of base 3"), ("TQ1_0", 51, 2, "qs", "no digits of base 3"),
        ("Q8_K", 3, 127, "d", "non-finite"), ("F32", 3, 127, "value", "non-finite"),
        ("BF16", 1, 127, "value", "non-finite"), ("IQ1_M", 55, 0x70, "d", "non-finite"),
    ],
)  # fmt: skip
def test_impossible_fields(name, at, value, field, problem):
    kind = ggml.formats[name]
    w = ggml.QTensor.zeros((3, 512), name)
    blocks = np.array(w.data).reshape(3, -1, kind.type_size)
    if name in ("Q8_K", "F32"):
        blocks[1, 1, at - 1] = 128
    if name == "BF16":
        blocks[1, 1, 0] = 128
    if name == "IQ1_M":  # 15 of 15 bits of an exponent and the sign, of which this is the last word
        blocks[1, 1, 53] = 0xC0
    blocks[1, 1, at] = value
    (finding,) = ggml.validate(ggml.QTensor(blocks.reshape(w.data.shape), name))
    assert (finding.field, finding.count, finding.first) == (field, 1, (1, 1)) and problem in finding.problem


@pytest.mark.parametrize("name", sorted({*FIELDS, "F32", "BF16", "IQ1_M"} - {"Q8_1"}))
def test_validate_finds_what_the_library_cannot_read(name):
    """Random bytes: non-finite scales are found exactly where dequantised blocks hold values that are not finite.

    A scale of infinity times a code of zero is no number, so every such block has some."""
    kind = ggml.formats[name]
    data = np.random.default_rng(3).integers(0, 256, (300, kind.row_bytes(512)), np.uint8)
    values = oracle.dequantize(data, name).reshape(-1, kind.block_size)
    findings = [f for f in ggml.validate(ggml.QTensor(data, name)) if f.problem == "non-finite"]
    broken = ~np.isfinite(values).all(axis=1)
    if len(FIELDS.get(name, {0: 0})) == 1:
        assert sum(f.count for f in findings) == broken.sum()
    else:
        assert max(f.count for f in findings) <= broken.sum() <= sum(f.count for f in findings)
    first = np.unravel_index(broken.argmax(), (300, 512 // kind.block_size))
    assert min(f.first for f in findings) == tuple(map(int, first))


@pytest.mark.smoke
def test_scales_that_overflow_are_found():
    """Finite values whose scale is too large for half precision: ggml's bytes, and a finding."""
    x = normal(2, 256)
    x[1, 100] = 1e9
    for name in ("Q4_0", "Q8_0", "Q4_1", "Q2_K"):
        findings = ggml.validate(ggml.quantize(x, name))
        assert findings and findings[0].problem == "non-finite" and findings[0].first[0] == 1
    with pytest.raises(TypeError, match="validate: tensor: expected a QTensor, got ndarray"):
        ggml.validate(x)
