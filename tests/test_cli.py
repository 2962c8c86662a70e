"""python -m jaxquant: what it prints, what it writes, and how it refuses."""

import subprocess
import sys

import ggml_library
import gguf_files
import ml_dtypes
import numpy as np
import pytest
from gguf_files import tensor

from jaxquant.ggml import cli, formats
from jaxquant.ggml.gguf import load_gguf, save_gguf

RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(6, 512)).astype(np.float32)
EXPERTS = RNG.normal(size=(3, 4, 256)).astype(np.float32)
TENSORS = {
    "token_embd.weight": RNG.normal(size=(10, 512)).astype(np.float16),
    "blk.0.attn_norm.weight": np.ones(512, np.float32),
    "blk.0.attn_q.weight": WEIGHT,
    "blk.0.attn_q.bias": np.ones((2, 512), np.float32),
    "blk.0.ffn_gate_inp.weight": RNG.normal(size=(3, 512)).astype(np.float32),
    "blk.0.ffn_up_exps.weight": EXPERTS,
    "blk.0.ffn_down.weight": RNG.normal(size=(4, 96)).astype(np.float32),
    "blk.0.odd.weight": RNG.normal(size=(4, 50)).astype(np.float32),
    "blk.0.row.weight": np.ones((1, 512), np.float16),
    "blk.0.ids.weight": np.arange(6, dtype=np.int32).reshape(2, 3),
}
METADATA = {"general.architecture": "llama", "llama.block_count": np.uint16(1), "general.file_type": 1}


@pytest.fixture
def model(tmp_path):
    save_gguf(tmp_path / "in.gguf", TENSORS, METADATA)
    return tmp_path / "in.gguf"


def run(*arguments) -> int:
    return cli.main([str(a) for a in arguments])


def refused(capsys, tmp_path, *arguments) -> str:
    """The line that a refusal prints; nothing was written."""
    before = sorted(tmp_path.iterdir())
    assert run(*arguments) == 2
    assert sorted(tmp_path.iterdir()) == before
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and output.err.startswith("jaxquant: "), output.err
    return output.err


def words(text: str) -> str:
    return " ".join(text.split())


# Showing


def test_shows_a_file(tmp_path, capsys):
    path = tmp_path / "f.gguf"
    path.write_bytes(gguf_files.small())
    assert run("gguf", path) == 0
    text = words(capsys.readouterr().out)
    for line in (
        "f.gguf: GGUF version 3, 6 tensors", "uint8 uint8 200", "text string Grüße, 世界 ▁",
        "flags bool[] True, False, True (3)",
        "floats 2 x 3 x 4 F32 96 32", "codes 2 x 64 Q4_0 72 4.5", "super 256 Q4_K 144 4.5", "ids 3 I32 12 32",
        "Q4_K 1 256 144 4.5", "all 6 420 348 6.629",
    ):  # fmt: skip
        assert line in text, line


def test_shows_types_that_do_not_load_and_names_that_harm_terminals(tmp_path, capsys):
    path = tmp_path / "f.gguf"
    tensors = [tensor("old", [32], 4, 0), tensor(b"[bold]\x1b[31m\xff", [8], 0, 32)]
    path.write_bytes(gguf_files.gguf([], tensors, bytes(64)))
    assert run("gguf", path) == 0
    text = capsys.readouterr().out
    assert "old 32 Q4_2 ? ?" in words(text) and r"[bold]\x1b[31m\udcff 8 F32 32 32" in words(text)
    assert "\x1b" not in text


def test_refuses_what_it_cannot_show(tmp_path, capsys):
    (tmp_path / "f.gguf").write_bytes(b"GGUF\x03\x00")
    assert "version: expected 4 bytes, got 2" in refused(capsys, tmp_path, "gguf", tmp_path / "f.gguf")
    assert "No such file" in refused(capsys, tmp_path, "gguf", tmp_path / "none.gguf")


def test_runs_as_a_module(tmp_path):
    def module(*arguments):
        return subprocess.run(
            [sys.executable, "-P", "-m", "jaxquant", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )

    assert module().stdout.startswith("jaxquant ")
    assert "quantize" in module("--help").stdout
    bad = module("gguf", "none.gguf")
    assert bad.returncode == 2 and bad.stderr.startswith("jaxquant: ") and "Traceback" not in bad.stderr
    assert module("unheard-of").returncode == 2


# Quantising


def test_quantises_a_model(model, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    assert run("quantize", model, out, "--format", "q4_k") == 0
    file, source = load_gguf(out), load_gguf(model)
    assert list(file) == list(TENSORS) and all(file[n].shape == TENSORS[n].shape for n in TENSORS)
    assert {name: entry.type_name for name, entry in file.items()} == {
        "token_embd.weight": "Q4_K", "blk.0.attn_norm.weight": "F32", "blk.0.attn_q.weight": "Q4_K",
        "blk.0.attn_q.bias": "F32", "blk.0.ffn_gate_inp.weight": "F32", "blk.0.ffn_up_exps.weight": "Q4_K",
        "blk.0.ffn_down.weight": "Q5_0", "blk.0.odd.weight": "F16", "blk.0.row.weight": "F32",
        "blk.0.ids.weight": "I32",
    }  # fmt: skip
    for name, entry in file.items():
        expected = TENSORS[name]
        if entry.format is not None and not entry.format.is_float:
            expected = ggml_library.quantize(entry.type_id, expected.astype(np.float32).reshape(-1, expected.shape[-1]))
        elif entry.format is not None:
            expected = expected.astype({"F32": np.float32, "F16": np.float16}[entry.type_name])
        assert entry.raw.tobytes() == expected.tobytes(), name
    assert file.metadata["general.file_type"] == 14 and file.metadata["general.quantization_version"] == 2
    assert file.metadata.types["llama.block_count"] == source.metadata.types["llama.block_count"] == "uint16"

    output = capsys.readouterr()
    assert "blk.0.ffn_down.weight: Q5_0 instead of Q4_K: rows of 96 values are no multiple of 256" in words(output.err)
    assert "blk.0.odd.weight: F16 instead of Q4_K" in words(output.err)
    text = words(output.out)
    decoded = ggml_library.dequantize(12, file["blk.0.attn_q.weight"].raw)
    rmse = np.sqrt(np.mean((decoded.astype(np.float64) - WEIGHT) ** 2))
    relative = rmse / np.sqrt(np.mean(WEIGHT.astype(np.float64) ** 2))
    assert f"blk.0.attn_q.weight 6 x 512 F32 Q4_K {rmse:.4e} {relative:.4e}" in text
    errors = [float(line.split()[-1]) for line in output.out.splitlines() if line.startswith((" blk", " token"))]
    assert len(errors) == 5 and errors == sorted(errors, reverse=True) and errors[0] > 0
    assert "10 tensors, 5 quantised" in text


def test_quantises_safetensors(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "in.safetensors"
    tensors = {
        "model.layers.0.mlp.down_proj.weight": WEIGHT.astype(ml_dtypes.bfloat16),
        "model.layers.0.mlp.gate.weight": WEIGHT.astype(ml_dtypes.bfloat16),
        "model.layers.0.mlp.experts.gate_up_proj": EXPERTS,
        "model.layers.0.mlp.experts.gate_up_proj_bias": EXPERTS[0],
        "model.norm.weight": np.ones(512, ml_dtypes.bfloat16),
    }
    save_file(tensors, path)
    assert run("quantize", path, tmp_path / "out.gguf", "--format", "Q8_0") == 0
    file = load_gguf(tmp_path / "out.gguf")
    types = {name.rsplit(".", 2)[-2] + "." + name.rsplit(".", 1)[1]: entry.type_name for name, entry in file.items()}
    assert types == {
        "down_proj.weight": "Q8_0", "gate.weight": "BF16", "experts.gate_up_proj": "Q8_0",
        "experts.gate_up_proj_bias": "F32", "norm.weight": "F32",
    }  # fmt: skip
    rows = tensors["model.layers.0.mlp.down_proj.weight"].astype(np.float32)
    assert file["model.layers.0.mlp.down_proj.weight"].raw.tobytes() == ggml_library.quantize(8, rows).tobytes()


def imatrix_of(path, names=("token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight")):
    """Writes an importance matrix for these tensors, one row per expert."""
    experts = {name: len(TENSORS[name]) if TENSORS[name].ndim == 3 else 1 for name in names}
    rows = {name: RNG.gamma(1.0, size=(experts[name], TENSORS[name].shape[-1])) for name in names}
    path.write_bytes(gguf_files.imatrix_gguf({name: (r.tolist(), [1.0] * len(r)) for name, r in rows.items()}))
    return {name: r.astype(np.float32) for name, r in rows.items()}


def test_uses_an_imatrix(model, tmp_path):
    weights = imatrix_of(tmp_path / "imatrix")
    assert run("quantize", model, tmp_path / "out.gguf", "--format", "IQ2_XXS", "--imatrix", tmp_path / "imatrix") == 0
    file = load_gguf(tmp_path / "out.gguf")
    assert file["blk.0.attn_q.weight"].type_name == "IQ2_XXS"
    expected = ggml_library.quantize(16, WEIGHT, weights["blk.0.attn_q.weight"][0])
    assert file["blk.0.attn_q.weight"].raw.tobytes() == expected.tobytes()
    for expert in range(3):  # each with its own weights
        expected = ggml_library.quantize(16, EXPERTS[expert], weights["blk.0.ffn_up_exps.weight"][expert])
        assert file["blk.0.ffn_up_exps.weight"].raw[expert].tobytes() == expected.tobytes()


def test_formats_of_single_tensors(model, tmp_path):
    options = ["--tensor-format", r"^blk\..*=Q6_K", "--tensor-format", "attn_q=bf16"]
    assert run("quantize", model, tmp_path / "out.gguf", "--format", "Q8_0", *options) == 0
    types = {name: entry.type_name for name, entry in load_gguf(tmp_path / "out.gguf").items()}
    assert types["token_embd.weight"] == "Q8_0" and types["blk.0.ffn_up_exps.weight"] == "Q6_K"
    assert types["blk.0.attn_q.weight"] == "BF16" and types["blk.0.ffn_gate_inp.weight"] == "F32"


def test_quantises_again_only_when_told(model, tmp_path, capsys):
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    assert run("quantize", model, first, "--format", "Q8_0") == 0
    capsys.readouterr()
    message = refused(capsys, tmp_path, "quantize", first, second, "--format", "Q4_0")
    assert "'token_embd.weight': expected float weights, got Q8_0; start from" in message
    assert run("quantize", first, second, "--format", "Q4_0", "--requantize") == 0
    decoded = ggml_library.dequantize(8, load_gguf(first)["blk.0.attn_q.weight"].raw)
    expected = ggml_library.quantize(2, decoded)
    assert load_gguf(second)["blk.0.attn_q.weight"].raw.tobytes() == expected.tobytes()
    # The same format again, and floats, lose nothing.
    assert run("quantize", first, second, "--format", "Q8_0") == 0
    assert (
        load_gguf(second)["blk.0.attn_q.weight"].raw.tobytes() == load_gguf(first)["blk.0.attn_q.weight"].raw.tobytes()
    )
    assert run("quantize", first, second, "--format", "F32") == 0
    np.testing.assert_array_equal(load_gguf(second)["blk.0.attn_q.weight"].numpy(), decoded)


def test_replaces_its_input(model):
    assert run("quantize", model, model, "--format", "Q8_0") == 0
    assert load_gguf(model)["blk.0.attn_q.weight"].format is formats["Q8_0"]


def test_refuses_before_writing(model, tmp_path, capsys):
    out = tmp_path / "out.gguf"

    def message(*options, source=model):
        return refused(capsys, tmp_path, "quantize", source, out, *options)

    text = message("--format", "IQ1_S")
    assert "'token_embd.weight': expected an importance matrix" in text and "--imatrix" in text
    imatrix_of(tmp_path / "imatrix", ["blk.0.attn_q.weight"])
    text = message("--format", "IQ1_S", "--imatrix", tmp_path / "imatrix")
    assert "'token_embd.weight': expected an importance matrix" in text and "--tensor-format" in text
    (tmp_path / "other").write_bytes(gguf_files.imatrix_gguf({"x": ([[1.0]], [1.0])}))
    assert "expected importance of these tensors" in message("--format", "Q4_K", "--imatrix", tmp_path / "other")
    wrong = gguf_files.imatrix_gguf({"blk.0.attn_q.weight": ([[1.0, 2.0]], [1.0])})
    (tmp_path / "wrong").write_bytes(wrong)
    text = message("--format", "Q4_K", "--imatrix", tmp_path / "wrong")
    assert "imatrix of 'blk.0.attn_q.weight': expected 1 x 512 weights for shape (6, 512), got 2" in text
    assert "general.type: expected 'imatrix'" in message("--format", "Q4_K", "--imatrix", model)
    assert "format: expected one of F32," in message("--format", "Q4_K_M")
    assert "format: expected a format for weights, got Q8_1" in message("--format", "Q8_1")
    assert "expected one of F32," in message("--format", "Q4_K", "--tensor-format", "output")
    assert "expected REGEX=FORMAT, got '('" in message("--format", "Q4_K", "--tensor-format", "(=Q8_0")
    assert "a pattern that matches a weight, got 'norm'" in message("--format", "Q4_K", "--tensor-format", "norm=F16")
    (tmp_path / "text").write_text("nothing of the kind")
    assert "a GGUF or safetensors file" in message("--format", "Q4_K", source=tmp_path / "text")
    assert "No such file" in message("--format", "Q4_K", source=tmp_path / "none")
    assert run("quantize", model, tmp_path / "no" / "out", "--format", "Q8_0") == 2
    assert "No such file" in capsys.readouterr().err


def test_refuses_types_that_it_would_have_to_guess(tmp_path, capsys):
    from safetensors.numpy import save_file

    save_file({"w.weight": np.zeros((2, 32), np.uint8)}, tmp_path / "in.safetensors")
    text = refused(capsys, tmp_path, "quantize", tmp_path / "in.safetensors", tmp_path / "out", "--format", "Q8_0")
    assert "'w.weight': expected one of F32, F16, BF16, F64, I8" in text and "got U8" in text
    (tmp_path / "old").write_bytes(gguf_files.gguf([], [tensor("w.weight", [32, 2], 4, 0)], bytes(64)))
    assert "got Q4_2" in refused(capsys, tmp_path, "quantize", tmp_path / "old", tmp_path / "out", "--format", "Q8_0")


def test_a_failure_in_the_middle_leaves_nothing(model, tmp_path, capsys):
    bad = WEIGHT.copy()
    bad[3, 100] = np.nan
    save_gguf(model, {"a.weight": WEIGHT, "b.weight": bad})
    before = sorted(tmp_path.iterdir())
    assert run("quantize", model, tmp_path / "out.gguf", "--format", "Q4_K") == 2
    assert sorted(tmp_path.iterdir()) == before
    assert "b.weight" in capsys.readouterr().err
