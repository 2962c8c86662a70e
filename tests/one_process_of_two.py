"""One of the two processes of test_distributed.py: sharded over both, equal to one process, with its one all-reduce.

python one_process_of_two.py <port> <process id>
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import oracle
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from llama_files import make
from meshes import collectives

import jaxquant
from jaxquant import ggml

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "llm"))
import model as llm


def main(port, process):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())

    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 8, 6)).astype(np.float32) * 3
    scale, zero_point = np.linspace(0.1, 0.4, 6, dtype=np.float32), np.float32([0, 1, -1, 2, 0, 1])

    def place(a, sharding):
        return jax.make_array_from_callback(a.shape, sharding, lambda index: a[index])

    arrays = place(x, rows), place(scale, whole), place(zero_point, whole), place(dy, rows)

    def f(x, s, z):
        return jaxquant.fake_quantize(x, s, z, axis=1, qtype="int4", implementation="ffi")

    gradient = jax.jit(jax.grad(lambda x, s, z, dy: (f(x, s, z) * dy).sum(), (0, 1, 2)))
    forward = jax.jit(f)
    y, (dx, dscale, dzero_point) = forward(*arrays[:3]), gradient(*arrays)
    assert collectives(forward, *arrays[:3]) == {}
    assert collectives(gradient, *arrays) == {"all-reduce": 1}

    keywords = {"axis": 1, "qtype": "int4"}
    expected = oracle.fake_quantize_gradient(dy, x, scale, zero_point, **keywords)
    for actual, wanted in ((y, oracle.fake_quantize(x, scale, zero_point, **keywords)), (dx, expected.dx)):
        assert actual.sharding.is_equivalent_to(rows, 2)
        for shard in actual.addressable_shards:
            oracle.assert_same_bits(shard.data, wanted[shard.index])
    for actual, wanted in ((dscale, expected.dscale), (dzero_point, expected.dzero_point)):
        assert actual.is_fully_replicated
        oracle.assert_same_sum(actual.addressable_data(0), wanted, np.float32, exact=False)
    check_products(mesh, place)
    check_language_model(mesh, place)
    print("done", jax.process_index())


def check_products(mesh, place):
    """A quantised matrix cut along its columns, in whole blocks: one all-reduce; its gradient needs none."""
    x, dy = (np.random.default_rng(1).normal(size=shape).astype(np.float32) for shape in ((6, 256), (6, 9)))
    w = ggml.quantize(np.random.default_rng(2).normal(size=(9, 256)).astype(np.float32), "Q8_0")
    values, data = np.asarray(w.dequantize()), np.asarray(w.data)
    columns, whole = NamedSharding(mesh, P(None, "a")), NamedSharding(mesh, P())
    operands = place(x, columns), ggml.QTensor(place(data, columns), "Q8_0"), place(dy, whole)

    @jax.jit
    def product(x, w):
        return ggml.linear(x, w, lhs_qtype=None)

    @jax.jit
    def gradient(x, w, dy):
        return jax.vjp(lambda x: ggml.linear(x, w), x)[1](dy)[0]

    y, dx = product(*operands[:2]), gradient(*operands)
    assert collectives(product, *operands[:2]) == {"all-reduce": 1}
    assert collectives(gradient, *operands) == {}
    np.testing.assert_allclose(y.addressable_data(0), x @ values.T, rtol=1e-4, atol=1e-4)
    for shard in dx.addressable_shards:
        np.testing.assert_allclose(shard.data, (dy @ values)[shard.index], rtol=1e-4, atol=1e-4)


def check_language_model(mesh, place):
    """Tensor parallelism over both processes: the same tokens, and two all-reduces a layer."""
    with tempfile.TemporaryDirectory() as folder:
        params, config = llm.load(make(f"{folder}/m.gguf", formats=("Q4_0",)), prepare=False, fuse=False)
    tokens = np.arange(12) * 7 % 96

    @jax.jit
    def run(params, tokens, cache):
        x, _ = llm.decode(params, config, tokens, 0, cache, empty=True)
        return llm.logits(params, config, x)

    cache = llm.new_cache(config, 16)
    expected = np.asarray(run(params, tokens, cache))
    specs = llm.partition_specs(params, "a")
    put = lambda leaf, spec: place(np.asarray(leaf), NamedSharding(mesh, spec))  # noqa: E731
    operands = jax.tree.map(put, params, specs), put(tokens, P()), jax.tree.map(lambda a: put(a, P(None, "a")), cache)
    got = run(*operands).addressable_data(0)
    assert collectives(run, *operands) == {"all-reduce": 2}
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
    assert np.array_equal(np.asarray(got).argmax(-1), expected.argmax(-1))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
