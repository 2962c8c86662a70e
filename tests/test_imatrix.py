"""Importance matrices in both forms of file, against files made byte by byte."""

import struct

import gguf_files
import numpy as np
import pytest

from jaxquant.ggml.imatrix import for_tensor, load_imatrix


@pytest.fixture
def write(tmp_path):
    def write(data: bytes):
        path = tmp_path / "imatrix"
        path.write_bytes(data)
        return path

    return write


def test_gguf(write):
    entries = {
        "dense": ([[8.0, 2.0, 0.0]], [4.0]),
        "experts": ([[1.0, 2.0], [30.0, 60.0], [7.0, 7.0]], [1.0, 10.0, 0.0]),
        "never": ([[5.0, 5.0]], [0.0]),
        "zeros": ([[0.0, 0.0]], [9.0]),
    }
    loaded = load_imatrix(write(gguf_files.imatrix_gguf(entries)))
    assert list(loaded) == list(entries) and all(w.dtype == np.float32 for w in loaded.values())
    np.testing.assert_array_equal(loaded["dense"], [2, 0.5, 0])
    np.testing.assert_array_equal(loaded["experts"], [[1, 2], [3, 6], [1, 1]])
    np.testing.assert_array_equal(loaded["never"], [1, 1])
    np.testing.assert_array_equal(loaded["zeros"], [1, 1])


@pytest.mark.parametrize("tail", [b"", struct.pack("<i", 10), struct.pack("<ii4s", 10, 4, b"text")])
def test_legacy(write, tail):
    entries = {"dense": (4, [8.0, 2.0, 0.0]), "never": (0, [5.0, 5.0]), "experts": (2, [2.0, 4.0, 0.0, 0.0])}
    loaded = load_imatrix(write(gguf_files.imatrix_legacy(entries, tail)))
    assert list(loaded) == list(entries) and all(w.dtype == np.float32 for w in loaded.values())
    np.testing.assert_array_equal(loaded["dense"], [2, 0.5, 0])
    np.testing.assert_array_equal(loaded["never"], [1, 1])
    np.testing.assert_array_equal(for_tensor("experts", loaded["experts"], (2, 5, 2)), [[1, 2], [1, 1]])


def test_both_forms_give_the_same_weights(write):
    sums = np.random.default_rng(0).gamma(1.0, size=64).astype(np.float32)
    new = load_imatrix(write(gguf_files.imatrix_gguf({"x": ([sums], [7.0])})))["x"]
    old = load_imatrix(write(gguf_files.imatrix_legacy({"x": (7, sums)})))["x"]
    np.testing.assert_array_equal(new, old)
    np.testing.assert_array_equal(new, sums / np.float32(7))


def test_weights_for_a_tensor():
    flat = np.arange(1, 7, dtype=np.float32)
    np.testing.assert_array_equal(for_tensor("x", flat, (3, 4, 2)), flat.reshape(3, 2))
    np.testing.assert_array_equal(for_tensor("x", flat, (5, 6)), flat)
    np.testing.assert_array_equal(for_tensor("x", flat[None], (5, 6)), flat)
    np.testing.assert_array_equal(for_tensor("x", flat[:2], (3, 4, 2)), flat[:2])  # one row for all experts
    np.testing.assert_array_equal(for_tensor("x", flat.reshape(3, 2), (3, 4, 2)), flat.reshape(3, 2))
    for shape in ((4, 5), (2, 4, 2), (3, 4, 3)):
        with pytest.raises(ValueError, match=r"quantize: imatrix of 'x': expected . x . weights .*, got 6; use"):
            for_tensor("x", flat, shape)


def _without_counts():
    data = gguf_files.imatrix_gguf({"x": ([[1.0]], [1.0])})
    return data.replace(b"x.counts", b"x.others")


ONE = {"x": ([[1.0, 2.0]], [1.0])}
BAD = {
    "empty": (b"", "entry count: expected 4 bytes, got 0"),
    "a model": (gguf_files.imatrix_gguf(ONE, kind="model"), "general.type: expected 'imatrix', got 'model'"),
    "no type": (gguf_files.small(), "general.type: expected 'imatrix', got None"),
    "no counts": (_without_counts(), "'x': expected a tensor 'x.counts', got none"),
    "too few counts": (gguf_files.imatrix_gguf({"x": ([[1.0], [2.0]], [1.0])}), "'x': expected F32 sums .*a count per"),
    "negative": (gguf_files.imatrix_gguf({"x": ([[1.0, -2.0]], [1.0])}), "'x': expected finite .*, got -2.0"),
    "nan": (gguf_files.imatrix_gguf({"x": ([[1.0, np.nan]], [1.0])}), "'x': expected finite .*, got nan"),
    "inf": (gguf_files.imatrix_gguf({"x": ([[1.0, np.inf]], [1.0])}), "'x': expected finite .*, got inf"),
    "nan count": (gguf_files.imatrix_gguf({"x": ([[1.0]], [np.nan])}), "'x': expected finite .*, got nan"),
    "negative count": (gguf_files.imatrix_gguf({"x": ([[1.0]], [-1.0])}), "'x': expected finite .*, got -1.0"),
    "overflow": (gguf_files.imatrix_gguf({"x": ([[3e38]], [1e-30])}), "'x': expected finite .*, got inf"),
    "legacy negative": (gguf_files.imatrix_legacy({"x": (1, [-1.0])}), "'x': expected finite .*, got -1.0"),
    "legacy nan": (gguf_files.imatrix_legacy({"x": (1, [np.nan])}), "'x': expected finite .*, got nan"),
    "legacy negative calls": (
        gguf_files.imatrix_legacy({"x": (-1, [1.0])}),
        "'x': expected one entry .*, got -1",
    ),
    "legacy no values": (
        gguf_files.imatrix_legacy({"x": (1, [])}),
        "'x': expected one entry .* 1 calls, 0",
    ),
    "legacy negative size": (struct.pack("<ii1sii", 1, 1, b"x", 1, -1), "'x': expected one entry .* -1 values"),
    "legacy many values": (struct.pack("<ii1sii", 1, 1, b"x", 1, 2**31 - 1), "'x': expected 8589934588 bytes, got 0"),
    "legacy twice": (
        struct.pack("<i", 2) + struct.pack("<i1siif", 1, b"x", 1, 1, 1.0) * 2,
        "'x': .*got two",
    ),
    "legacy many entries": (struct.pack("<i", 2**31 - 1) + bytes(100), "header: expected .*, got 2147483647 entries"),
    "legacy no entries": (bytes(100), "header: expected .*, got 0 entries"),
    "legacy negative entries": (struct.pack("<i", -1) + bytes(100), "header: expected .*, got -1 entries"),
    "legacy long name": (struct.pack("<ii", 1, -1) + bytes(100), "entry name: expected 4294967295 bytes"),
    "something else": (b"%PDF-1.7" + bytes(100), "header: expected a GGUF file or a table of entries"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(write, name):
    data, message = BAD[name]
    path = write(data)
    with pytest.raises(ValueError, match=message) as caught:
        load_imatrix(path)
    assert str(caught.value).startswith(f"load_imatrix: {path}: ")


@pytest.mark.parametrize(
    "data",
    [gguf_files.imatrix_gguf(ONE), gguf_files.imatrix_legacy({"x": (1, [1.0, 2.0])}, b"")],
    ids=["gguf", "legacy"],
)
def test_every_truncation_is_refused(write, data):
    end = len(data) - (28 if data.startswith(b"GGUF") else 0)  # the padding after the last count
    for size in range(end):
        with pytest.raises(ValueError, match="load_imatrix"):
            load_imatrix(write(data[:size]))
    assert load_imatrix(write(data[:end]))
