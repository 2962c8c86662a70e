"""save_safetensors and load_safetensors: the same leaves, files for any reader, and nothing read from damaged ones."""

import json
import os
import random
import struct
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

from jaxquant import PerAxis, PerBlock, PerGroup, PerToken, QArray, QParams, choose_qparams, dynamic_quantize, ggml
from jaxquant.export import load_safetensors, safetensors_metadata, save_safetensors

RANDOM = np.random.default_rng(21)
W = jnp.asarray(RANDOM.normal(size=(6, 32, 21)), jnp.float32)


def same(got, want):
    """Leaves, static parts and structure, bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if isinstance(b, (np.ndarray, jax.Array)):
            assert a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        else:
            assert type(a) is type(b) and a == b


QARRAYS = {
    "int8": dynamic_quantize(W), "uint8": dynamic_quantize(W, qtype=jnp.uint8, symmetric=False),
    "int4": dynamic_quantize(W, PerAxis((0, 2)), qtype=jnp.int4),
    "int2": dynamic_quantize(W, PerToken(), qtype=jnp.int2),
    "uint4": dynamic_quantize(W, PerGroup(8, axis=1), qtype=jnp.uint4, symmetric=False),
    "blocks": dynamic_quantize(W, PerBlock((2, 16, -1))), "int16": dynamic_quantize(W, qtype=jnp.int16),
    "prepared": dynamic_quantize(W, PerAxis((0, 2))).prepare(), "scalar": QArray.from_codes(jnp.int8(3), 0.5, 2),
    "prepared4": dynamic_quantize(W, PerAxis((0, 2)), qtype=jnp.int4).prepare(),
    "half": QArray.from_codes(jnp.ones((2, 3), jnp.int8), jnp.float16(0.5)),
    "prepared2": dynamic_quantize(W[0], PerAxis(1), qtype=jnp.int2).prepare(),
    "empty": dynamic_quantize(jnp.ones((0, 3)), qtype=jnp.int4),
    "scalar4": QArray.from_codes(jnp.int8(3), 0.5, qtype=jnp.int4),
    "range": QArray.from_codes(jnp.ones((2,), jnp.int8), 0.5, qmin=-3, qmax=9),
}  # fmt: skip


@pytest.mark.parametrize("name", QARRAYS)
def test_quantised_arrays_come_back(name, tmp_path):
    save_safetensors(tmp_path / "a", {"w": QARRAYS[name]})
    got = load_safetensors(tmp_path / "a")
    same(got, {"w": QARRAYS[name]})
    np.testing.assert_array_equal(got["w"].dequantize(), QARRAYS[name].dequantize())
    same(load_safetensors(tmp_path / "a", like={"w": QARRAYS[name]}), {"w": QARRAYS[name]})


def test_other_leaves_come_back(tmp_path):
    dtypes = ["bool", "uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "complex64"]
    tree = {d: np.arange(5).astype(d) for d in dtypes}
    tree |= {"wide": np.arange(3.0), "long": np.array([2**60]), "unsigned": np.array([2**63], np.uint64)}
    tree |= {d: jnp.arange(5).astype(d) for d in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}
    tree |= {"nan": np.array([0x7FC00001, 0xFFC01234], np.uint32).view(np.float32), "empty": jnp.ones((0, 4))}
    tree |= {"scalar": jnp.float32(2), "one": 1, "half": 0.1, "text": "ä", "yes": True, "transposed": np.ones((2, 3)).T}
    tree |= {"params": choose_qparams(W, PerGroup(8, axis=1)), "float": QParams(jnp.float32(0.1), jnp.float32(2.5))}
    tree |= {f: ggml.quantize(jnp.ones((16, 256)), f) for f in ("Q4_K", "Q8_0")}
    tree["ready"] = tree["Q4_K"].prepare()
    tree["ragged"] = ggml.quantize(jnp.ones((9, 256)), "Q8_0").prepare()
    save_safetensors(tmp_path / "a", tree)
    got = load_safetensors(tmp_path / "a")
    same(
        {k: np.asarray(v) if isinstance(v, jax.Array) else v for k, v in got.items()},
        {k: np.asarray(v) if isinstance(v, jax.Array) else v for k, v in tree.items()},
    )
    assert isinstance(got["float32"], jax.Array) and isinstance(got["wide"], np.ndarray)


Pair = namedtuple("Pair", "a b")


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    kernel: Any
    bias: Any


def test_structures(tmp_path):
    w = QARRAYS["int4"]
    tree = {
        "layers": [Layer(w, jnp.ones(2)), (jnp.zeros(1), {})],
        "n": {7: Pair(jnp.ones(3), None)},
        "7b": [[jnp.ones(1)] * 11],
    }
    save_safetensors(tmp_path / "a", tree)
    got = load_safetensors(tmp_path / "a")
    plain = {
        "layers": [{"kernel": w, "bias": jnp.ones(2)}, [jnp.zeros(1)]],
        "n": {7: {"a": jnp.ones(3)}},
        "7b": [[jnp.ones(1)] * 11],
    }
    for key in plain:
        same(got[key], plain[key])
    same(load_safetensors(tmp_path / "a", like=tree), tree)
    shapes = jax.eval_shape(lambda: tree)
    same(load_safetensors(tmp_path / "a", like=shapes), tree)
    for root in (jnp.arange(3), w, [jnp.arange(2), w]):
        save_safetensors(tmp_path / "a", root)
        same(load_safetensors(tmp_path / "a"), root)
    save_safetensors(tmp_path / "a", {})
    assert load_safetensors(tmp_path / "a") == {}


def test_flax_and_equinox_models(tmp_path):
    nnx, equinox = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox")
    state = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    for tree in (state, equinox.filter(equinox.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)), equinox.is_array)):
        save_safetensors(tmp_path / "a", tree)
        same(load_safetensors(tmp_path / "a", like=tree), tree)


def test_like_must_agree(tmp_path):
    save_safetensors(tmp_path / "a", {"w": QARRAYS["int8"], "b": jnp.ones(3)})
    good = {"w": QARRAYS["int8"], "b": jnp.ones(3)}
    for change, message in [
        ({"b": jnp.ones(4)}, r"'b': expected .*\(4,\).* got .*\(3,\)"), ({"b": jnp.ones(3, jnp.int32)}, "int32"),
        ({"w": QARRAYS["int4"]}, "'w'"), ({"c": jnp.ones(1)}, "like: expected paths that are in .*, got c"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            load_safetensors(tmp_path / "a", like={**good, **change})
    with pytest.raises(ValueError, match=r"like: expected all that is in .*, got no 'b'"):
        load_safetensors(tmp_path / "a", like={"w": QARRAYS["int8"]})


def test_the_safetensors_package_reads_them(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    numpy = pytest.importorskip("safetensors.numpy")
    w4, w8 = QARRAYS["uint4"], QARRAYS["uint8"]
    tree = {"a": {"b": w4, "c": [w8]}, "bias": jnp.arange(3, dtype=jnp.bfloat16), "flag": np.array([True])}
    save_safetensors(tmp_path / "a", tree, {"licence": "Apache-2.0", "ä": "ö"})
    got = numpy.load_file(tmp_path / "a")
    assert sorted(got) == [
        "a.b.data",
        "a.b.scale",
        "a.b.zero_point",
        "a.c.0.data",
        "a.c.0.scale",
        "a.c.0.zero_point",
        "bias",
        "flag",
    ]
    assert got["a.b.data"].dtype == np.uint8
    x = np.asarray(W)
    np.testing.assert_array_equal(got["a.b.data"], oracle.pack(np.asarray(w4.qvalue), "uint4"))
    scale, zero = (np.repeat(got[f"a.b.{part}"], 8, 1) for part in ("scale", "zero_point"))
    np.testing.assert_array_equal(
        oracle.pack(oracle.quantize(x, scale, zero.astype(np.float32), qtype="uint4"), "uint4"), got["a.b.data"]
    )
    np.testing.assert_array_equal(got["a.c.0.scale"], w8.scale)
    with safetensors.safe_open(tmp_path / "a", "numpy") as file:
        metadata = file.metadata()
    described = json.loads(metadata.pop("jaxquant"))
    assert metadata == {"licence": "Apache-2.0", "ä": "ö"} == safetensors_metadata(tmp_path / "a")
    assert described["leaves"][0] | {"parts": 0} == {
        "path": ["a", "b"], "kind": "QArray", "qtype": "uint4", "qmin": 0, "qmax": 15, "tail": [21], "layout": "plain",
        "parts": 0,
    }  # fmt: skip


def test_files_of_the_safetensors_package(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    arrays = {
        "x.y": np.arange(6, dtype=np.float32).reshape(2, 3),
        "z": np.array([1, 2], np.int8),
        "h": np.ones(3, ml_dtypes.bfloat16),
    }
    numpy.save_file(arrays, tmp_path / "a", {"by": "other"})
    got = load_safetensors(tmp_path / "a")
    same({k: np.asarray(v) for k, v in got.items()}, arrays)
    assert safetensors_metadata(tmp_path / "a") == {"by": "other"}
    same(load_safetensors(tmp_path / "a", like=jax.tree.map(jnp.asarray, arrays)), jax.tree.map(jnp.asarray, arrays))


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_saved(tmp_path):
    for tree, error, message in [
        ({"a.b": jnp.ones(1), "a": {"b": jnp.ones(2)}}, ValueError, "'a.b' twice"),
        ({"w": QARRAYS["int8"], "w.scale": jnp.ones(1)}, ValueError, "'w.scale' twice"),
        ({"w": jnp.ones(3, jnp.int4)}, TypeError, r"'w': expected an array .*, got dtype int4; convert it \(pack\(\)"),
        ({"k": jax.random.key(0)}, TypeError, "'k': expected an array"),
        ({"k": object()}, TypeError, "'k': expected an array .*, got object"),
    ]:
        with pytest.raises(error, match=message):
            save_safetensors(tmp_path / "a", tree)
    for metadata in ({"a": 1}, {"jaxquant": "x"}):
        with pytest.raises(ValueError, match="save_safetensors: metadata: expected strings by name"):
            save_safetensors(tmp_path / "a", {}, metadata)
    assert not list(tmp_path.iterdir())


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    save_safetensors(tmp_path / "a", jnp.ones(2))
    before = (tmp_path / "a").read_bytes()

    def full(descriptor):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            save_safetensors(tmp_path / "a", jnp.ones(200))
    assert (tmp_path / "a").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_not_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_safetensors(tmp_path / "none")
    with pytest.raises(ValueError, match="expected a file, got something else"):
        load_safetensors(tmp_path)


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header,data,message",
    [
        (b"", b"", "JSON"), (b"{", b"", "JSON"), (b"[1]", b"", "maps names, got list"), (b"\xff", b"", "JSON"),
        (b'{"a":1,"a":2}', b"", "JSON"), (b"[" * 100_000, b"", "JSON"),
        ({"a": 3}, b"", "dtype, shape and data_offsets"),
        ({"a": ENTRY}, bytes(7), "expected 8 bytes"), ({"a": ENTRY}, bytes(9), "expected 8 bytes of arrays, got 9"),
        ({"a": ENTRY, "b": ENTRY}, bytes(8), "begins at byte 8"), ({"a": {**ENTRY, "shape": [-2]}}, bytes(8), "shape"),
        ({"a": {**ENTRY, "shape": [2**62, 2**62]}}, bytes(8), "expected"),
        ({"a": {**ENTRY, "shape": [True, 2]}}, bytes(8), "shape"),
        ({"a": {**ENTRY, "dtype": "F4"}}, bytes(8), "'a': expected one of BOOL"),
        ({"a": {**ENTRY, "dtype": []}}, bytes(8), "'a'"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8), "expected"),
        ({"a": {**ENTRY, "shape": [1] * 70}}, bytes(8), "expected"),
        ({"__metadata__": {"a": 3}}, b"", "__metadata__ of strings"), ({"__metadata__": []}, b"", "__metadata__"),
        ({"a": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12), "begins at byte 0"),
    ],
)  # fmt: skip
def test_damaged_files(header, data, message, tmp_path):
    write(tmp_path / "a", header, data)
    with pytest.raises(ValueError, match=message):
        load_safetensors(tmp_path / "a")


def test_damaged_lengths(tmp_path):
    for content in (b"", bytes(7), struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 10**12), b"GGUF" + bytes(100)):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(ValueError, match=r"load_safetensors: .*the file is damaged or of another kind"):
            load_safetensors(tmp_path / "a")


def rewrite(path, change):
    """A file with something changed in the header, whose metadata are decoded."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    described = json.loads(header["__metadata__"]["jaxquant"])
    change(header, described)
    header["__metadata__"]["jaxquant"] = json.dumps(described)
    write(path, header, raw[8 + length :])


LEAF = {
    "kind": ("Other", "parts of QArray"), "qtype": ("int3", "code type"), "qmin": (-1000, "qmin"),
    "tail": ([], "size of the last"),
    "layout": ("other", "a layout"), "path": (3, "leaves in JSON"), "parts": ({"scale": "w.scale"}, "parts of"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [*LEAF, "longer", "missing", "extra", "version", "scale", "zero", "unhashable", "path twice", "nothing"]
)
def test_damaged_descriptions(name, tmp_path):
    save_safetensors(tmp_path / "a", {"w": QARRAYS["uint4"]})

    def change(header, described):
        leaf = described["leaves"][0]
        if name in LEAF:
            leaf[name] = LEAF[name][0]
        elif name == "longer":
            leaf["tail"] = [300]
        elif name == "missing":
            leaf["parts"]["scale"] = "w.other"
        elif name == "extra":
            del leaf["parts"]["zero_point"]
        elif name == "version":
            described["version"] = 2
        elif name == "scale":
            header["w.scale"]["shape"] = [header["w.scale"]["shape"][0] * 2, header["w.scale"]["shape"][1] // 2, 21]
        elif name == "zero":
            header["w.zero_point"]["shape"] = header["w.zero_point"]["shape"][::-1]
        elif name == "unhashable":
            leaf["path"] = [[[1]]]
        elif name == "path twice":
            described["leaves"].append(leaf)
        elif name == "nothing":
            described.clear()

    rewrite(tmp_path / "a", change)
    messages = {
        **{key: message for key, (_, message) in LEAF.items()}, "longer": "data of shape",
        "missing": "'w.other' in the file, got none",
        "extra": "leaves for all arrays, got none for 'w.zero_point'", "version": "expected version 1, got 2",
        "scale": "scale that fits",
        "zero": "zero point that broadcasts", "unhashable": "leaves in JSON", "path twice": "paths of a tree",
        "nothing": "leaves in JSON",
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=f"load_safetensors: .*{messages[name]}"):
        load_safetensors(tmp_path / "a")


def test_random_damage_is_an_error_or_harmless(tmp_path):
    """Bytes of the header changed at random: a ValueError, or values and names that differ; nothing else."""
    save_safetensors(
        tmp_path / "a",
        {"w": QARRAYS["int4"], "p": choose_qparams(W), "t": ggml.QTensor.zeros((2, 32), "Q8_0"), "n": [1, 2.5]},
    )
    raw = (tmp_path / "a").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    dice = random.Random(5)
    refused = 0
    for _ in range(300):
        damaged = bytearray(raw)
        for _ in range(dice.choice([1, 1, 2, 8])):
            damaged[dice.randrange(8 + length)] = dice.choice(b'0123456789{}[]",:\\\x00\xffabz-')
        (tmp_path / "a").write_bytes(damaged[: dice.choice([len(raw), len(raw), dice.randrange(len(raw))])])
        try:
            load_safetensors(tmp_path / "a")
        except ValueError:
            refused += 1
    assert refused > 150
