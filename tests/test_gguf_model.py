"""A real model: every tensor of it loads lazily, exactly and one at a time."""

import os
import subprocess
import sys
from pathlib import Path

import gguf_files
import numpy as np
import pytest

from jaxquant.ggml.gguf import load_gguf, save_gguf


@pytest.fixture(scope="module")
def model():
    return load_gguf(gguf_files.smollm2())


def test_real_tensors_are_those_of_the_gguf_package(model):
    import gguf

    reader = gguf.GGUFReader(model.path)
    assert [t.name for t in reader.tensors] == list(model) and len(model) == 272
    for expected in reader.tensors:
        entry = model[expected.name]
        assert list(entry.shape) == expected.shape.tolist()[::-1] and entry.type_id == expected.tensor_type
        assert entry.raw.tobytes() == expected.data.tobytes(), entry
    for key, found in reader.fields.items():
        if not key.startswith("GGUF."):
            assert np.array_equal(model.metadata[key], found.contents()), key


def test_real_tensors_dequantise_like_the_gguf_package(model):
    import gguf

    for name, entry in model.items():
        expected = gguf.quants.dequantize(entry.raw, gguf.GGMLQuantizationType(entry.type_id))
        loaded = entry.load()
        got = np.asarray(loaded if entry.type_name == "F32" else loaded.dequantize())
        np.testing.assert_array_equal(got.view(np.uint32), expected.reshape(entry.shape).view(np.uint32), name)


def test_real_file_round_trips(model, tmp_path):
    save_gguf(tmp_path / "again.gguf", model, model.metadata)
    assert (tmp_path / "again.gguf").read_bytes() == Path(model.path).read_bytes()


def test_real_file_saves_from_memory(model, tmp_path):
    names = ["token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight"]
    save_gguf(tmp_path / "again.gguf", {name: model[name].load() for name in names}, model.metadata)
    again = load_gguf(tmp_path / "again.gguf")
    assert again.metadata == model.metadata
    for name in names:
        assert again[name].shape == model[name].shape and again[name].type_id == model[name].type_id
        np.testing.assert_array_equal(again[name].raw, model[name].raw)


_MEMORY = """
import sys
from jaxquant.ggml.gguf import load_gguf
import jax.numpy as jnp

def anonymous():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) * 1024

small = load_gguf(sys.argv[1])["blk.0.attn_norm.weight"].load().block_until_ready()
small = load_gguf(sys.argv[1])["blk.0.attn_q.weight"].load()
before = anonymous()
file = load_gguf(sys.argv[1])
header, highest = anonymous() - before, 0
for name, entry in file.items():
    tensor = entry.load()
    highest = max(highest, anonymous() - before - header)
    del tensor
print(header, highest, max(entry.nbytes for entry in file.values()))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux tells a process its anonymous memory")
def test_loading_takes_the_memory_of_one_tensor(model):
    result = subprocess.run(
        [sys.executable, "-P", "-c", _MEMORY, model.path], capture_output=True, text=True, check=True
    )
    header, highest, largest = map(int, result.stdout.split())
    assert header < 24e6, header  # the vocabulary: a hundred thousand strings
    assert highest < 1.25 * largest, (highest, largest)
