"""examples/llm: a decoder on packed weights beside NumPy in float64 and llama.cpp, sharded, fine-tuned, as programs."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import gguf_files
import jax
import jax.numpy as jnp
import llama_oracle
import meshes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from llama_files import make

from jaxquant import ggml
from jaxquant.ggml import cli

EXAMPLES = Path(__file__).parent.parent / "examples" / "llm"
# Written by llama.cpp (as in llama-cpp-python 0.3.36, its own AVX-512 build) from the same file.
CASES = Path(__file__).parent / "cases" / "llama_cpp_smollm2.npz"

pytest.importorskip("tokenizers")
sys.path.insert(0, str(EXAMPLES))
import finetune_lora  # noqa: E402
import generate  # noqa: E402
import model as llm  # noqa: E402
from text import Text  # noqa: E402


def oracle(path):
    """The NumPy model of a file, read by the gguf package."""
    import gguf

    reader = gguf.GGUFReader(path)
    tensors = {t.name: (int(t.tensor_type), np.array(t.data).view(np.uint8), t.shape[::-1]) for t in reader.tensors}
    return llama_oracle.Model(tensors, {key: field.contents() for key, field in reader.fields.items()})


def nmse(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return ((got - expected) ** 2).sum() / (expected**2).sum()


TOKENS = np.random.default_rng(1).integers(0, 96, 24)


MODES = pytest.mark.parametrize("lhs_qtype, bound", [(None, 1e-10), (jnp.int8, 1e-3)], ids=["float", "int8"])


@pytest.mark.parametrize("formats", [("Q4_0",), ("Q8_0",), ("Q4_K", "Q6_K"), ("IQ4_XS",), ("MXFP4",)], ids=" ".join)
@MODES
def test_logits_are_those_of_dequantised_weights_in_float64(tmp_path, formats, lhs_qtype, bound):
    path = make(tmp_path / "m.gguf", layers=3, formats=formats)
    params, config = llm.load(path)
    got = jax.jit(lambda p, t: llm.forward(p, config, t, lhs_qtype=lhs_qtype))(params, jnp.asarray(TOKENS))
    assert nmse(got, oracle(path).logits(TOKENS)) < bound


@MODES
def test_logits_in_pieces(tmp_path, lhs_qtype, bound):
    """Through the cache, by plain weights, matrices apart."""
    path = make(tmp_path / "m.gguf", layers=3, formats=("Q4_K", "Q6_K"))
    expected = oracle(path).logits(TOKENS)
    params, config = llm.load(path, prepare=False, fuse=False)
    decode = jax.jit(partial(llm.decode, config=config, lhs_qtype=lhs_qtype), static_argnames="empty")
    cache, rows = llm.new_cache(config, 64), []
    for first, last in ((0, 9), (9, 23), (23, 24)):
        x, cache = decode(params, tokens=jnp.asarray(TOKENS[first:last]), first=first, cache=cache, empty=first == 0)
        rows.append(llm.logits(params, config, x, lhs_qtype=lhs_qtype))
    assert nmse(np.concatenate(rows), expected) < bound


def test_pieces_see_what_is_filled_of_the_cache(tmp_path):
    """Of a longer cache the smallest of a few sizes is read."""
    path = make(tmp_path / "m.gguf", layers=1, formats=("Q4_0",))
    tokens, ends = np.random.default_rng(3).integers(0, 96, 262), (130, 131, 261, 262)
    expected = oracle(path).logits(tokens)
    params, config = llm.load(path)
    decode = jax.jit(partial(llm.decode, config=config, lhs_qtype=None), static_argnames="empty")
    cache = llm.new_cache(config, 384)
    for first, last in zip((0, *ends), ends, strict=False):
        piece = jnp.asarray(tokens[first:last])
        x, cache = decode(params, tokens=piece, first=jnp.int32(first), cache=cache, empty=first == 0)
        got = llm.logits(params, config, x, lhs_qtype=None)
        assert nmse(got, expected[first:last]) < 1e-10, (first, last)


def test_experts(tmp_path):
    path = make(tmp_path / "m.gguf", experts=4, formats=("Q4_K",))
    expected = oracle(path).logits(TOKENS)
    params, config = llm.load(path)
    assert nmse(llm.forward(params, config, jnp.asarray(TOKENS)), expected) < 1e-10
    # A token whose experts are nearly tied takes another one where activations are rounded.
    assert nmse(llm.forward(params, config, jnp.asarray(TOKENS), lhs_qtype=jnp.int8), expected) < 1e-2


@pytest.fixture(scope="module")
def smollm2():
    return str(gguf_files.smollm2())


@pytest.fixture(scope="module")
def real(smollm2):
    return llm.load(smollm2)


def continuation(params, config, ids, count, lhs_qtype):
    step = jax.jit(
        partial(llm.decode, config=config, lhs_qtype=lhs_qtype), static_argnames="empty", donate_argnames="cache"
    )
    head = jax.jit(lambda p, x: llm.logits(p, config, x[-1], lhs_qtype=lhs_qtype).argmax())
    cache, new = llm.new_cache(config, 128), []
    x, cache = step(params, tokens=jnp.asarray(ids), first=jnp.int32(0), cache=cache, empty=True)
    for i in range(count):
        new.append(int(head(params, x)))
        x, cache = step(params, tokens=jnp.asarray(new[-1:]), first=jnp.int32(len(ids) + i), cache=cache)
    return new


def test_greedy_text_is_that_of_float64(smollm2, real):
    ids = Text(ggml.load_gguf(smollm2).metadata).encode("The capital of France is")
    new = continuation(*real, ids, 64, None)
    # Each new token is the likeliest one after those before it.
    logits = oracle(smollm2).logits([*ids, *new[:-1]])
    assert logits[len(ids) - 1 :].argmax(1).tolist() == new


@pytest.fixture(scope="module")
def logits_of(real):
    """Logits of tokens, by one program: what comes after a token does not change its logits."""
    run = jax.jit(lambda p, t: llm.forward(p, real[1], t, lhs_qtype=jnp.int8))
    return lambda ids: np.asarray(run(real[0], jnp.asarray([*ids, *[0] * (96 - len(ids))])))[: len(ids)]


def test_beside_llama_cpp(smollm2, logits_of):
    """llama.cpp quantises activations too, in another way: 32 at a time, with half-precision scales."""
    cases, text = np.load(CASES), Text(ggml.load_gguf(smollm2).metadata)
    agreed = []
    for i, prompt in enumerate(cases["prompts"]):
        ids = text.encode(str(prompt))
        assert ids == cases[f"ids{i}"].tolist()
        new = cases[f"greedy{i}"].tolist()
        got = logits_of([*ids, *new[:-1]])
        assert nmse(got[: len(ids), :: int(cases["step"])], cases[f"logits{i}"]) < 5e-3
        agreed += (got[len(ids) - 1 :].argmax(1) == new).tolist()
    assert np.mean(agreed) > 0.95


def test_beside_a_running_llama_cpp(smollm2, logits_of):
    """The same, at every new token, with the release of llama.cpp that a wheel holds (built for AVX2)."""
    pytest.importorskip("xllamacpp")
    text = Text(ggml.load_gguf(smollm2).metadata)
    prompts = ("The capital of France is", "def fibonacci(n):\n", "Water boils at a temperature of")
    ids = [text.encode(prompt) for prompt in prompts]
    command = [sys.executable, "-P", str(Path(__file__).parent / "llama_cpp_process.py"), smollm2]
    done = subprocess.run(command, input=json.dumps(ids), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    agreed, got, expected = [], [], []
    for prompt, steps in zip(ids, json.loads(done.stdout), strict=True):
        new = [step["id"] for step in steps]
        ours = np.asarray(jax.nn.log_softmax(logits_of([*prompt, *new[:-1]])[len(prompt) - 1 :]))
        agreed += (ours.argmax(1) == new).tolist()
        for row, step in zip(ours, steps, strict=True):
            got.append(row[[likely["id"] for likely in step["top_logprobs"]]])
            expected.append([likely["logprob"] for likely in step["top_logprobs"]])
    assert nmse(got, expected) < 2e-3
    assert np.mean(agreed) > 0.9


@pytest.fixture(scope="module")
def one_layer(smollm2, tmp_path_factory):
    """The first layer of the real model, over the first 512 tokens."""
    file = ggml.load_gguf(smollm2)
    names = [name for name in file if not name.startswith("blk.") or name.startswith("blk.0.")]
    embedding = file["token_embd.weight"].load()
    tensors = {name: embedding[:512] if name == "token_embd.weight" else file[name] for name in names}
    path = tmp_path_factory.mktemp("model") / "layer.gguf"
    metadata = {key: value for key, value in file.metadata.items() if not key.startswith("tokenizer.")}
    ggml.save_gguf(path, tensors, {**metadata, "llama.block_count": 1})
    return path


@pytest.mark.parametrize(
    "format, fallback",
    [
        ("Q4_K", "Q5_0"), ("MXFP4", "MXFP4"), pytest.param("Q6_K", "Q8_0", marks=pytest.mark.slow),
        pytest.param("IQ4_XS", "IQ4_NL", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_quantised_again_by_the_command(one_layer, tmp_path, format, fallback):
    """Rows of 576 values are no multiple of 256, those of 1536 are."""
    path = str(tmp_path / "again.gguf")
    cli.main(["quantize", str(one_layer), path, "--format", format, "--requantize"])
    file, tokens = ggml.load_gguf(path), np.random.default_rng(0).integers(0, 512, 24)
    assert (file["blk.0.ffn_down.weight"].type_name, file["blk.0.attn_q.weight"].type_name) == (format, fallback)
    params, config = llm.load(file)
    expected = oracle(path).logits(tokens)
    for lhs_qtype, bound in ((None, 1e-10), (jnp.int8, 1e-3)):
        got = jax.jit(lambda p, t, q=lhs_qtype: llm.forward(p, config, t, lhs_qtype=q))(params, jnp.asarray(tokens))
        assert nmse(got, expected) < bound


def test_choices():
    scores = jnp.log(jnp.array([0.1, 0.5, 0.15, 0.25]))
    keys = jax.random.split(jax.random.key(0), 400)

    def chosen(**settings):
        pick = lambda key: generate.choose(scores, key, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings})  # noqa: E731
        return np.bincount(np.asarray(jax.vmap(pick)(keys)), minlength=4) / 400

    assert np.abs(chosen(top_k=2) - [0, 2 / 3, 0, 1 / 3]).max() < 0.08
    assert np.abs(chosen(top_p=0.7) - [0, 2 / 3, 0, 1 / 3]).max() < 0.08
    assert chosen(top_p=0.4, temperature=0.5).tolist() == [0, 1, 0, 0]


def test_text_round_trip(smollm2):
    text = Text(ggml.load_gguf(smollm2).metadata)
    code, turn = "def f(x):\n    return x + 1  # ünïcode 你好 1234", "<|im_start|>user\nHi<|im_end|>"
    for sample, shown in ((code, code), (turn, "user\nHi"), ("", "")):
        ids = text.encode(sample)
        assert text.decode(ids) == shown
        show = text.stream()
        assert "".join(show(i) for i in ids) == text.decode(ids)
    assert text.encode("<|im_end|>") == [2] and text.chat("Hi").endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("mode", ["auto", "shard_map"])
def test_tensor_parallel(tmp_path, mode):
    path = make(tmp_path / "m.gguf", formats=("Q4_0",), layers=2)
    params, config = llm.load(path, prepare=False, fuse=False)
    tokens, cache = jnp.asarray(TOKENS), llm.new_cache(config, 32)
    expected = llm.logits(params, config, llm.decode(params, config, tokens, 0, cache, empty=True)[0])
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("model",), axis_types=(AxisType.Auto,))
    specs = llm.partition_specs(params, "model")
    heads = P(None, "model", None, None)
    put = lambda tree, specs: jax.device_put(tree, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))  # noqa: E731
    sharded, placed = put(params, specs), put(cache, {"k": heads, "v": heads})

    def run(params, tokens, cache, config, total=lambda x: x):
        x, cache = llm.decode(params, config, tokens, 0, cache, empty=True, total=total)
        return llm.logits(params, config, x), cache

    if mode == "auto":
        step = jax.jit(partial(run, config=config))
    else:
        body = partial(run, config=llm.local(config, 4), total=partial(jax.lax.psum, axis_name="model"))
        spec_of = {"k": heads, "v": heads}
        step = jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=(specs, P(), spec_of), out_specs=(P(), spec_of), check_vma=False)
        )
    got, _ = step(sharded, tokens, placed)
    assert np.array_equal(np.asarray(got).argmax(-1), np.asarray(expected).argmax(-1))
    assert nmse(got, expected) < 1e-9  # parts of a sum in another order; activations may round apart
    found = meshes.collectives(step, sharded, tokens, placed)
    # The scan's body is one layer: a sum for each of its halves.
    assert found == {"all-reduce": 2}
    # Weights, the only bytes there are, stay where they lie.
    text = step.lower(sharded, tokens, placed).compile().as_text()
    assert not re.search(r"= u8\[[^=]*(all-gather|all-to-all|collective-permute)", text)


def test_gradients_are_those_of_the_dequantised_model(tmp_path):
    path = make(tmp_path / "m.gguf", formats=("Q4_K",))
    params, config = llm.load(path)
    adapters = finetune_lora.new_adapters(params, config, 4, ("qkv", "o", "down"), jax.random.key(0))
    adapters = jax.tree.map(lambda a: a + 0.02, adapters)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 96, (2, 17)))
    loss = finetune_lora.make_loss(config, None)
    got = jax.jit(jax.grad(loss))(adapters, params, tokens)

    plain, _ = llm.load(path, prepare=False)
    floats = ggml.formats["F32"]

    def dequantised(w):
        values = np.asarray(w.dequantize())
        return ggml.QTensor(jnp.asarray(values.view(np.uint8)), floats)

    packed = lambda w: isinstance(w, ggml.QTensor)  # noqa: E731
    dense = jax.tree.map(lambda w: dequantised(w) if packed(w) else w, plain, is_leaf=packed)
    expected = jax.grad(loss)(adapters, dense, tokens)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert nmse(a, b) < 1e-9
    # Frozen weights stay packed: no float array of a whole matrix, forward or backward.
    text = jax.jit(jax.grad(loss)).lower(adapters, params, tokens).compile().as_text()
    n, k = params["segments"][0]["gate_up"][0].shape[1:]
    assert f"f32[{n},{k}]" not in text and f"f32[2,{n},{k}]" not in text


def test_errors(tmp_path):
    wrong = tmp_path / "wrong.gguf"
    ggml.save_gguf(wrong, {"w": np.ones((2, 32), np.float32)}, {"general.architecture": "bert"})
    with pytest.raises(ValueError, match="expected llama, got bert"):
        llm.load(str(wrong))
    ggml.save_gguf(wrong, {"w": np.ones((2, 32), np.float32)}, {"general.architecture": "llama"})
    with pytest.raises(ValueError, match=r"lacks llama\.embedding_length"):
        llm.load(str(wrong))
    plain = ggml.load_gguf(make(tmp_path / "m.gguf"))
    ggml.save_gguf(wrong, {**plain, "blk.0.attn_q.bias": np.ones(256, np.float32)}, plain.metadata)
    with pytest.raises(ValueError, match=r"not implemented here: blk\.0\.attn_q\.bias"):
        llm.load(str(wrong))
    with pytest.raises(ValueError, match=r"lacks tokenizer\.ggml\.tokens"):
        Text({"tokenizer.ggml.model": "gpt2"})
    generator = generate.Generator(plain)
    with pytest.raises(ValueError, match=r"500 tokens and 100 to write are more than the 512 .* at most 12"):
        next(generator([1] * 500, 100))
    with pytest.raises(ValueError, match="prompt is empty"):
        next(generator([], 100))


def program(name, *arguments):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-P", str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_generate_program(smollm2, tmp_path):
    done = program(
        "generate.py", "--model", smollm2, "--plain", "--tokens", 12, "--profile", "The capital of France is"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" Paris.") and "tokens/s" in done.stdout
    # What the model needs beside its file and its cache; a token is one program and four calls of a kernel a layer.
    rest = re.search(r"cache of keys and values, (\d+) of everything else", done.stdout)
    assert rest is None or int(rest[1]) <= 150, done.stdout
    calls = re.search(r"ms in (\d+) calls of jaxquant's kernels.* 0 programs compiled meanwhile", done.stdout)
    assert calls is not None and 100 <= int(calls[1]) <= 140, done.stdout
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(smollm2).read_bytes()[:1000])
    done = program("generate.py", "--model", broken)
    assert done.returncode != 0 and "generate.py:" in done.stderr and "Traceback" not in done.stderr
    done = program("generate.py", "--model", smollm2, "--tokens", 9000)
    assert done.returncode != 0 and "more than the 8192" in done.stderr and "Traceback" not in done.stderr


def test_finetune_program(smollm2, tmp_path):
    done = program(
        "finetune_lora.py", "--model", smollm2, "--steps", 3, "--batch", 1, "--length", 24, "--output", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "loss.png").stat().st_size > 5000
    file = tmp_path / "adapters.safetensors"
    done = program(
        "generate.py", "--model", smollm2, "--plain", "--tokens", 3, "--adapters", file, "The capital of France is"
    )
    assert done.returncode == 0 and done.stdout.startswith(" Paris"), done.stderr
    file.write_bytes(file.read_bytes()[:100])
    done = program("generate.py", "--model", smollm2, "--adapters", file)
    assert done.returncode != 0 and "adapters.safetensors" in done.stderr and "Traceback" not in done.stderr


def test_adapters_of_files(tmp_path):
    """A model with adapters writes as the one they were added to; those of another model are refused."""
    path, file = make(tmp_path / "m.gguf", layers=2, formats=("Q8_0",)), tmp_path / "adapters.safetensors"
    params, config = llm.load(path)
    adapters = finetune_lora.new_adapters(params, config, 4, ("qkv", "down"), jax.random.key(0))
    adapters = jax.tree.map(lambda a: a + 0.02, adapters)
    finetune_lora.save_adapters(file, adapters)
    read = llm.load_adapters(file, params, config)
    x, _ = llm.decode({**params, "adapters": read}, config, jnp.asarray(TOKENS), 0, llm.new_cache(config, 64),
                      empty=True, lhs_qtype=None)  # fmt: skip
    got = llm.logits(params, config, x, lhs_qtype=None)
    model = oracle(path)
    for name, pair in adapters.items():
        update = np.einsum("lkr,lrn->lnk", *(np.asarray(pair[part], np.float64) for part in "ab"))
        model.add(llm.PRODUCTS[name], update)
    assert nmse(got, model.logits(TOKENS)) < 1e-10
    other = make(tmp_path / "other.gguf", layers=3, formats=("Q8_0",))
    with pytest.raises(ValueError, match=r"adapters.safetensors: .*expected \[3, .*got \[2, .*of this model"):
        llm.load_adapters(file, *llm.load(other))
    finetune_lora.save_adapters(file, {"embedding": {"a": np.zeros(3)}})
    with pytest.raises(ValueError, match=r"embedding.a: this model has qkv.a"):
        llm.load_adapters(file, params, config)
    finetune_lora.save_adapters(file, {"o": {"a": np.asarray(read["qkv"]["a"])}})
    with pytest.raises(ValueError, match=r"expected o.a and o.b of one rank"):
        llm.load_adapters(file, params, config)
