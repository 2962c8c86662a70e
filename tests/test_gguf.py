"""Reading and writing GGUF files, against files made byte by byte, the gguf package and ggml itself."""

import ctypes
import os
import time
import tracemalloc
from pathlib import Path

import fuzz_gguf
import ggml_library
import gguf_files
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf_files import ARRAY, STRING, tensor

from jaxquant.ggml import formats
from jaxquant.ggml.gguf import load_gguf, save_gguf
from jaxquant.ggml.gguf_header import Metadata


@pytest.fixture
def write(tmp_path):
    def write(data: bytes) -> Path:
        path = tmp_path / "file.gguf"
        path.write_bytes(data)
        return path

    return write


# Reading


@pytest.mark.parametrize("version", [2, 3])
def test_reads_every_type(write, version):
    file = load_gguf(write(gguf_files.small(version)))
    assert file.version == version
    assert list(file.metadata) == [key for key, _, _ in gguf_files.EVERY_TYPE]
    for key, type_id, content in gguf_files.EVERY_TYPE:
        got = file.metadata[key]
        if type_id == ARRAY and content[0] != STRING:
            assert isinstance(got, np.ndarray)
            assert got.dtype == gguf_files.NUMBERS[content[0]]
            assert got.tolist() == content[1]
        else:
            expected = content[1] if type_id == ARRAY else content
            assert got == expected and type(got) is type(expected), key
    assert file.metadata.types["uint16"] == "uint16" and file.metadata.types["no texts"] == "string[]"
    shapes = {"floats": (2, 3, 4), "half": (8,), "codes": (2, 64), "ids": (3,), "one": (1,), "super": (256,)}
    assert {name: entry.shape for name, entry in file.items()} == shapes
    assert [entry.type_name for entry in file.values()] == ["F32", "F16", "Q4_0", "I32", "F64", "Q4_K"]
    assert file["codes"].format is formats["Q4_0"] and file["ids"].format is None
    data = gguf_files.SMALL_DATA
    assert file["codes"].raw.shape == (2, 36) and file["codes"].raw.tobytes() == data[128:200]
    assert file["super"].raw.tobytes() == data[288:432] and not file["super"].raw.flags.writeable
    np.testing.assert_array_equal(file["floats"].numpy(), np.frombuffer(data[:96], "<f4").reshape(2, 3, 4))


def test_reads_what_the_gguf_package_writes(tmp_path):
    import gguf

    path = tmp_path / "file.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    writer.add_context_length(4096)
    writer.add_token_list(["a", "b"])
    writer.add_float64("wide", 0.1)
    rows = np.random.default_rng(0).normal(size=(6, 256)).astype(np.float32)
    packed = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("rows", rows)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = load_gguf(path)
    assert file.metadata["llama.context_length"] == 4096 and file.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    np.testing.assert_array_equal(file["rows"].numpy(), rows)
    np.testing.assert_array_equal(file["packed"].raw, packed)
    assert file["packed"].shape == (6, 256)


@pytest.mark.parametrize("type_id", [0, 8])
def test_loads_into_memory_of_jax(write, type_id):
    """Data at a page's start, which JAX would take without a copy if it were asked to."""
    page, described = bytes(range(1, 137)) * 8, [tensor("x", [1024 if type_id else 272], type_id, 0)]
    data = gguf_files.gguf([("general.alignment", 4, 4096)], described, page, alignment=4096)
    path = write(data)
    file = load_gguf(path)
    loaded = file["x"].load()
    file.release()
    assert file["x"].raw.tobytes() == page  # read again
    with open(path, "r+b") as overwritten:  # the map sees this, the array must not
        overwritten.write(bytes(len(data)))
    del file
    assert isinstance(loaded, jax.Array) == (type_id == 0)
    assert np.asarray(loaded.data if type_id else loaded).tobytes() == page


def test_wide_types_need_x64(write):
    entry = load_gguf(write(gguf_files.small()))["one"]
    with pytest.raises(ValueError, match=r"tensor 'one': expected a type of 32 bits .*, got F64; set jax_enable_x64"):
        entry.load()
    with jax.enable_x64(True):
        assert entry.load().dtype == jnp.float64
    assert entry.numpy().dtype == np.float64


def test_values_of_quantised_tensors_are_not_guessed(write):
    with pytest.raises(ValueError, match=r"tensor 'codes': expected F32.* got Q4_0; load\(\) gives a QTensor"):
        load_gguf(write(gguf_files.small()))["codes"].numpy()


def test_a_bad_type_spoils_only_its_tensor(write):
    tensors = [tensor("old", [32], 4, 0), tensor("new", [32], 99, 32), tensor("good", [8], 0, 64)]
    file = load_gguf(write(gguf_files.gguf([], tensors, bytes(96))))
    assert file["good"].load().shape == (8,)
    assert [entry.type_name for entry in file.values()] == ["Q4_2", "type 99", "F32"]
    for name, message in (("old", r"tensor 'old': expected .*, got Q4_2 \(id 4\), which ggml"), ("new", "got id 99")):
        for use in (lambda e: e.load(), lambda e: e.raw, lambda e: e.nbytes, lambda e: e.numpy()):
            with pytest.raises(ValueError, match=message):
                use(file[name])
    with pytest.raises(ValueError, match="Q4_2"):
        save_gguf(file.path + ".new", file)


def test_bytes_that_are_no_text_survive(write, tmp_path):
    data = gguf_files.gguf([("key", STRING, b"\xff\xfe")], [tensor(b"\xe9", [8], 0, 0)], bytes(32))
    file = load_gguf(write(data))
    save_gguf(tmp_path / "again.gguf", file, file.metadata)
    assert (tmp_path / "again.gguf").read_bytes() == data


# Bad files


def header(*tensors, data=bytes(4096), **options):
    return gguf_files.gguf(options.pop("keys", []), tensors, data, **options)


def aligned(alignment, type_id=4):
    return header(tensor("x", [8], 0, 0), keys=[("general.alignment", type_id, alignment)])


BAD = {
    "empty": (b"", "magic: expected 4 bytes, got 0"),
    "other magic": (b"PK\x03\x04" + bytes(100), "magic: expected b'GGUF', got b'PK"),
    "version 1": (gguf_files.gguf(version=1), "version: expected 2 or 3, got 1; convert"),
    "version 4": (gguf_files.gguf(version=4), "version: expected 2 or 3, got 4"),
    "big-endian": (gguf_files.gguf(version=3 << 24), "byte order: expected little-endian, got big-endian; convert"),
    "only the magic": (b"GGUF", "version: expected 4 bytes, got 0 before the end"),
    "many tensors": (gguf_files.gguf(tensor_count=2**40), f"tensor count: expected at most 0, .*, got {2**40}"),
    "many keys": (gguf_files.gguf(key_count=2**63), f"metadata count: expected at most 0, .*, got {2**63}"),
    "long key": (gguf_files.gguf([("k", 4, 1)])[:24] + b"\xff" * 8 + bytes(13), f"metadata key: expected {2**64 - 1}"),
    "long string": (gguf_files.gguf([("k", STRING, "abcdefgh")])[:-4], "metadata 'k': expected 8 bytes, got 4"),
    "value type": (gguf_files.gguf([("k", 4, 1)]).replace(b"k\x04", b"k\x0d"), "metadata 'k': expected a value type"),
    "long array": (
        gguf_files.gguf([("k", ARRAY, (10, [1]))]).replace(b"\x0a\0\0\0\x01", b"\x0a\0\0\0\xff"),
        "metadata 'k': expected at most 1, all that fits, got 255",
    ),
    "array of arrays": (gguf_files.gguf([("k", ARRAY, (9, [(4, [1])]))]), "'k': expected an array.*got one of arrays"),
    "two keys": (gguf_files.gguf([("k", 4, 1), ("k", 5, 1)]), "metadata key 'k': expected one value, got two"),
    "alignment 0": (aligned(0), "'general.alignment': expected a power of two .*, got 0"),
    "alignment 48": (aligned(48), "'general.alignment': expected a power of two .*, got 48"),
    "alignment 2**31": (aligned(2**31), "'general.alignment': expected a power of two .*, got"),
    "alignment -32": (aligned(-32, 5), "'general.alignment': expected a power of two .*, got -32"),
    "alignment 32.0": (aligned(32.0, 6), "'general.alignment': expected a power of two .*, got 32.0"),
    "alignment true": (aligned(True, 7), "'general.alignment': expected a power of two .*, got True"),
    "two tensors": (header(tensor("x", [8], 0, 0), tensor("x", [8], 0, 32)), "tensor 'x': expected one description"),
    "five dimensions": (header(tensor("x", [1] * 5, 0, 0)), "tensor 'x': expected at most 4 dimensions, got 5"),
    "2**32 - 1 dimensions": (header(gguf_files.string("x") + b"\xff" * 20), f"at most 4 dimensions, got {2**32 - 1}"),
    "zero": (header(tensor("x", [32, 0, 2], 8, 0)), r"tensor 'x': expected between 1 .* got shape \(2, 0, 32\)"),
    "product of 2**64": (header(tensor("x", [2**16] * 4, 8, 0)), "tensor 'x': expected between 1 and 2"),
    "product of 2**64, unknown type": (header(tensor("x", [2**32, 2**32], 77, 0)), "tensor 'x': expected between"),
    "2**40 values": (header(tensor("x", [2**40], 0, 0)), rf"'x': expected {2**42} bytes at byte \d+, got a file of"),
    "half a block": (header(tensor("x", [2, 16], 2, 0)), "'x': Q4_0: row: expected a multiple of the block of 32"),
    "offset": (header(tensor("x", [8], 0, 4)), "tensor 'x': expected an offset that 32 divides, got 4"),
    "offset of another alignment": (
        header(tensor("x", [8], 0, 32), keys=[("general.alignment", 4, 64)]), "an offset that 64 divides, got 32",
    ),
    "offset past the end": (header(tensor("x", [8], 0, 2**63)), "tensor 'x': expected 32 bytes at byte .*download"),
    "offset that wraps": (header(tensor("x", [8], 0, 2**64 - 32)), "tensor 'x': expected 32 bytes at byte"),
    "overlap": (
        header(tensor("b", [64], 0, 128), tensor("a", [64], 0, 0)), "'b': expected to begin after tensor 'a', got an",
    ),
    "unknown type past the end": (header(tensor("x", [8], 77, 2**40)), "tensor 'x': expected 0 bytes at byte"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(write, name):
    data, message = BAD[name]
    path = write(data)
    with pytest.raises(ValueError, match=message) as caught:
        load_gguf(path)
    assert str(caught.value).startswith(f"load_gguf: {path}: ")


def test_every_truncation_is_refused(write):
    data = gguf_files.small()
    for size in range(len(data) - 16):  # the last tensor's padding may be missing
        with pytest.raises(ValueError, match="load_gguf"):
            load_gguf(write(data[:size]))


def test_a_small_file_with_large_claims_is_refused_at_once(write):
    claim = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    path = write(claim + gguf_files.string("k") + (9).to_bytes(4, "little") + bytes(4) + (2**40).to_bytes(8, "little"))
    tracemalloc.start()
    begin = time.perf_counter()
    with pytest.raises(ValueError, match=f"got {2**40}"):
        load_gguf(path)
    assert time.perf_counter() - begin < 1 and tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_what_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="expected a file, got something else"):
        load_gguf(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_gguf(tmp_path / "none.gguf")


def test_mutated_files_load_or_are_refused(tmp_path):
    outcomes = fuzz_gguf.fuzz(2000, 1, tmp_path)
    assert min(outcomes.values()) > 100, outcomes  # both ways were tried


# Writing


def test_round_trip(write, tmp_path):
    data = gguf_files.small()
    file = load_gguf(write(data))
    again = tmp_path / "again.gguf"
    save_gguf(again, file, file.metadata)
    assert again.read_bytes() == data
    assert load_gguf(again).metadata == file.metadata


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_alignment_is_honoured(tmp_path, alignment):
    tensors = {"a": np.arange(3, dtype=np.int8), "b": np.arange(5, dtype=np.float32)}
    save_gguf(tmp_path / "f.gguf", tensors, {"general.alignment": alignment})
    file = load_gguf(tmp_path / "f.gguf")
    assert file.metadata.types["general.alignment"] == "uint32"
    for name, expected in tensors.items():
        np.testing.assert_array_equal(file[name].numpy(), expected)
        np.testing.assert_array_equal(file[name].load(), expected)
    assert (tmp_path / "f.gguf").stat().st_size % alignment == 0


def test_ggml_reads_what_is_written(write, tmp_path):
    class Parameters(ctypes.Structure):
        _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]

    file = load_gguf(write(gguf_files.small()))
    path = tmp_path / "again.gguf"
    save_gguf(path, file, file.metadata | {"general.alignment": 64})
    library = ggml_library.library()
    library.gguf_init_from_file.restype = ctypes.c_void_p
    library.gguf_init_from_file.argtypes = [ctypes.c_char_p, Parameters]
    context = ctypes.c_void_p(library.gguf_init_from_file(os.fsencode(path), Parameters(True, None)))
    assert context, "ggml refuses the file"
    for function, type in (("tensor_name", ctypes.c_char_p), ("tensor_offset", ctypes.c_size_t),
                           ("data_offset", ctypes.c_size_t), ("n_tensors", ctypes.c_int64), ("n_kv", ctypes.c_int64),
                           ("tensor_type", ctypes.c_int), ("tensor_size", ctypes.c_size_t)):  # fmt: skip
        getattr(library, f"gguf_get_{function}").restype = type
    assert library.gguf_get_n_tensors(context) == len(file)
    assert library.gguf_get_n_kv(context) == len(file.metadata) + 1
    content = path.read_bytes()
    for i, entry in enumerate(file.values()):
        index = ctypes.c_int64(i)
        assert library.gguf_get_tensor_name(context, index).decode() == entry.name
        assert library.gguf_get_tensor_type(context, index) == entry.type_id
        assert library.gguf_get_tensor_size(context, index) == entry.nbytes
        start = library.gguf_get_data_offset(context) + library.gguf_get_tensor_offset(context, index)
        assert content[start : start + entry.nbytes] == entry.raw.tobytes()
    library.gguf_free(context)


def test_the_gguf_package_reads_what_is_written(tmp_path):
    import gguf

    rows = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    arrays = {
        "f32": rows, "jax": jnp.asarray(rows), "f16": rows.astype(np.float16), "bf16": rows.astype(ml_dtypes.bfloat16),
        "i64": np.arange(6).reshape(2, 3), "f64": rows.astype(np.float64), "transposed": rows.T,
    }  # fmt: skip
    save_gguf(tmp_path / "f.gguf", arrays, {"general.architecture": "llama", "list": [1, 2], "scale": 0.5})
    reader = gguf.GGUFReader(tmp_path / "f.gguf")
    assert [t.name for t in reader.tensors] == list(arrays)
    for got, (name, expected) in zip(reader.tensors, arrays.items(), strict=True):
        assert got.tensor_type.name == {"jax": "F32", "transposed": "F32"}.get(name, name.upper())
        assert got.shape.tolist() == list(expected.shape)[::-1]
        assert got.data.tobytes() == np.ascontiguousarray(expected).tobytes()
    assert reader.fields["list"].contents() == [1, 2] and reader.fields["scale"].contents() == 0.5


@pytest.mark.parametrize(
    ("content", "type_name"),
    [
        (5, "uint32"), (-5, "int32"), (2**32, "int64"), (2**63, "uint64"), (-(2**40), "int64"), (0.5, "float32"),
        (True, "bool"), ("text", "string"), (["a"], "string[]"), ([1, 2], "int32[]"), ([2**40], "int64[]"),
        ([0.5], "float32[]"), ((True, False), "bool[]"), (np.uint8(3), "uint8"), (np.float64(0.1), "float64"),
        (np.arange(3, dtype=np.uint16), "uint16[]"), (np.array(["a", "b"]), "string[]"),
        (np.zeros(0, np.int8), "int8[]"), (np.bool_(True), "bool"),
    ],
)  # fmt: skip
def test_types_of_plain_values(tmp_path, content, type_name):
    save_gguf(tmp_path / "f.gguf", {}, {"key": content})
    metadata = load_gguf(tmp_path / "f.gguf").metadata
    assert metadata.types["key"] == type_name
    assert np.array_equal(metadata["key"], content)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"key": None}, "metadata 'key': expected a bool, int, float or string"),
        ({"key": []}, "metadata 'key': expected .*; NumPy arrays may be empty"),
        ({"key": {"a": 1}}, "metadata 'key': expected a bool"),
        ({"key": 2**64}, "metadata 'key': expected a bool"),
        ({"key": b"bytes"}, "metadata 'key': expected a bool"),
        ({"key": [[1, 2], [3]]}, "metadata 'key': expected a bool"),
        ({"key": ["a", 1]}, "metadata 'key': expected"),
        ({"key": np.zeros((2, 2))}, "metadata 'key': expected"),
        ({"key": np.float16(1)}, "metadata 'key': expected"),
        ({"key": 1e300}, "metadata 'key': expected float32, got 1e\\+300"),
        ({"general.alignment": 33}, "'general.alignment': expected a power of two"),
        (Metadata({"key": -1}, {"key": "uint32"}), "metadata 'key': expected uint32, got -1; .*metadata.types"),
        (Metadata({"key": 300}, {"key": "uint8[]"}), "metadata 'key': expected uint8\\[\\], got 300"),
        (Metadata({"key": 0.5}, {"key": "int32"}), "metadata 'key': expected int32, got 0.5"),
        (Metadata({"key": "x"}, {"key": "bool"}), "metadata 'key': expected bool, got 'x'"),
        (Metadata({"key": 1}, {"key": "string"}), "metadata 'key': expected string, got 1"),
        (Metadata({"key": 1}, {"key": "int128"}), "metadata 'key': .* got 'int128'"),
    ],
)
def test_metadata_that_no_file_holds(tmp_path, metadata, message):
    with pytest.raises(ValueError, match=message):
        save_gguf(tmp_path / "f.gguf", {}, metadata)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            np.zeros(3, np.uint8),
            "tensor 'x': expected a QTensor, an entry, or an array of .*, got dtype uint8",
        ),
        (np.zeros(3, np.complex64), "got dtype complex64"),
        ([1.0, 2.0], "tensor 'x': .*, got list"),
        (np.zeros((2, 0), np.float32), r"tensor 'x': expected between 1 .*, got shape \(2, 0\)"),
        (np.zeros((1,) * 5, np.float32), "tensor 'x': expected at most 4 dimensions, got 5"),
    ],
)
def test_tensors_that_no_file_holds(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        save_gguf(tmp_path / "f.gguf", {"x": content})
    assert not list(tmp_path.iterdir())


def test_metadata_keeps_its_types(write):
    metadata = load_gguf(write(gguf_files.small())).metadata
    changed = metadata | {"uint8": 1, "extra": 2}
    assert changed.types["int8"] == "int8" and "uint8" not in changed.types
    assert metadata.copy() == metadata and changed != metadata
    assert metadata.copy() != Metadata(metadata, metadata.types | {"uint8": "uint16"})
    nan = Metadata({"x": float("nan"), "y": np.array([np.nan])})
    assert nan == Metadata(dict(nan))


def test_a_failed_save_changes_nothing(tmp_path):
    class Failing:
        type_id, shape, nbytes = 0, (2,), 8

        @property
        def raw(self):
            raise RuntimeError("in the middle")

    path = tmp_path / "f.gguf"
    save_gguf(path, {"a": np.ones(2, np.float32)})
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="in the middle"):
        save_gguf(path, {"a": np.zeros(2, np.float32), "b": Failing()})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_saves_over_the_file_it_reads(write):
    path = write(gguf_files.small())
    file = load_gguf(path)
    expected = {name: entry.raw.tobytes() for name, entry in file.items()}
    save_gguf(path, file, file.metadata)
    assert {name: entry.raw.tobytes() for name, entry in file.items()} == expected
    assert {name: entry.raw.tobytes() for name, entry in load_gguf(path).items()} == expected


def test_links_are_followed(tmp_path):
    (tmp_path / "link.gguf").symlink_to(tmp_path / "real.gguf")
    save_gguf(tmp_path / "link.gguf", {"a": np.ones(2, np.float32)})
    assert (tmp_path / "link.gguf").is_symlink() and "a" in load_gguf(tmp_path / "real.gguf")
