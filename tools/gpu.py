"""What only a machine with a GPU can show, in one script for a few minutes: no network, most telling stages first.

    python tools/gpu.py test             import, one launch, bits, block formats, graph capture, compute-sanitizer
    python tools/gpu.py bench            bandwidth beside a copy, and beside jax.numpy
    python tools/gpu.py test --rehearse  the same stages on the CPU with the emulated kernels, to try the script

Each stage is a process of its own with a time limit; a failing one is reported and the next one runs. Writes what it
found to gpu-<command>.json beside the current directory or under --output.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GRANULARITIES = {  # name: (shape of x, keywords, shape of the scale)
    "per tensor": ((64, 100), {}, ()),
    "per channel, first axis": ((37, 130), {"axis": 0}, (37,)),
    "per channel, last axis": ((130, 37), {"axis": -1}, (37,)),
    "per channel, middle axis": ((9, 5, 33), {"axis": 1}, (5,)),
    "per token": ((65, 513), {}, (65, 1)),
    "blocks of 32": ((16, 96), {"block_shape": (1, 32)}, (16, 3)),
    "two-dimensional blocks": ((24, 40), {"block_shape": (6, 8)}, (4, 5)),
    "long rows": ((3, 70001), {"axis": 0}, (3,)),
    "odd size": ((1, 12345), {}, ()),
    "a scalar": ((), {}, ()),
    "nothing": ((0, 4), {"axis": 1}, (4,)),
}


def _operands(shape: Any, scale_shape: Any, dtype: str) -> tuple[Any, ...]:
    import ml_dtypes
    import numpy as np

    random = np.random.default_rng(abs(hash((shape, scale_shape))) % 2**32)
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = (random.standard_normal(shape) * 3).astype(numpy_dtype)
    dy = random.standard_normal(shape).astype(numpy_dtype)
    if x.ndim and x.size > 8:
        flat = x.reshape(-1)
        flat[:6] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e4]
    scale = (random.random(scale_shape) * 0.05 + 0.01).astype(np.float32)
    zero = (random.random(scale_shape) * 6 - 3).astype(np.float32)
    return x, dy, scale, zero


def _same(a: Any, b: Any) -> bool:
    import numpy as np

    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if np.issubdtype(a.dtype, np.integer):
        return bool((a == b).all())
    a, b = a.astype(np.float64), b.astype(np.float64)
    return bool(((a == b) & (np.signbit(a) == np.signbit(b)) | (np.isnan(a) & np.isnan(b))).all())


def _run(function: Any, operands: Any, rehearse: bool, gpu: bool) -> Any:
    import jax

    device = jax.devices("cpu" if rehearse or not gpu else "gpu")[0]
    placed = [jax.device_put(o, device) for o in operands]
    return jax.device_get(jax.jit(function)(*placed))


def stage_import(rehearse: bool) -> dict[str, Any]:
    import jaxquant

    facts = jaxquant.info()
    if not rehearse:
        assert facts["cuda"], "the CUDA module is not built; install with JAXQUANT_CUDA=ON"
        missing = [name for name, op in facts["operations"].items() if "cuda" not in op["kernels"]]
        assert not missing, f"no CUDA target for {missing}"
    return facts


def stage_launch(rehearse: bool) -> dict[str, Any]:
    import numpy as np

    import jaxquant

    implementation = "cuda_emulation" if rehearse else "ffi"
    x = np.array([45.5, 87.5, 101.5, -0.3, 1e30], np.float32)
    out = _run(lambda x: jaxquant.fake_quantize(x, 7.0, implementation=implementation), [x], rehearse, True)
    assert out.tolist() == [42.0, 84.0, 98.0, 0.0, 889.0], out
    from jaxquant import ggml

    w = ggml.quantize(np.ones((24, 256), np.float32), "Q4_K").prepare()
    for tokens in (1, 24):
        y = _run(lambda x: ggml.linear(x, w, implementation=implementation), [np.ones((tokens, 256), np.float32)],
                 rehearse, True)  # fmt: skip
        assert abs(y - 256).max() < 1, y
    return {"out": out.tolist()}


def stage_bits(rehearse: bool) -> dict[str, Any]:
    """Every operation, dtype and granularity: the GPU's bits are the CPU kernels' bits."""
    import jax
    import jax.numpy as jnp

    import jaxquant

    wrong, count = [], 0
    for name, (shape, keywords, scale_shape) in GRANULARITIES.items():
        for dtype in ("float32", "bfloat16", "float16"):
            x, dy, scale, zero = _operands(shape, scale_shape, dtype)
            for label, function, operands in _functions(jax, jnp, jaxquant, keywords, x, dy, scale, zero):
                gpu = "cuda_emulation" if rehearse else "ffi"
                got = _run(lambda *a, f=function, i=gpu: f(i, *a), operands, rehearse, True)
                want = _run(lambda *a, f=function: f("ffi", *a), operands, rehearse, False)
                count += 1
                if not all(map(_same, jax.tree.leaves(got), jax.tree.leaves(want))):
                    wrong.append(f"{label}, {name}, {dtype}")
    assert not wrong, f"{len(wrong)} of {count} differ: {wrong[:10]}"
    return {"compared": count}


def _functions(jax: Any, jnp: Any, jaxquant: Any, keywords: Any, x: Any, dy: Any, scale: Any, zero: Any) -> list[Any]:
    def value(operation: Any, **more: Any) -> Any:
        return lambda i, x, s, z: operation(x, s, z, **keywords, **more, implementation=i)

    def gradients(operation: Any, **more: Any) -> Any:
        def f(i: Any, x: Any, dy: Any, s: Any, z: Any) -> Any:
            return jax.vjp(lambda x, s, z: operation(x, s, z, **keywords, **more, implementation=i), x, s, z)[1](dy)

        return f

    carried = x.dtype

    def round_trip(i: Any, x: Any, s: Any, z: Any) -> Any:
        q = jaxquant.quantize(x, s, z, **keywords, implementation=i)
        return jaxquant.dequantize(q, s, z, **keywords, dtype=carried, implementation=i)

    codes = [
        (f"quantize {qtype}", value(jaxquant.quantize, qtype=qtype), (x, scale, zero))
        for qtype in ("int8", "uint8", "int4", "int16", "uint16")
    ]
    packed = [("packed int4", value(jaxquant.quantize, qtype="int4", packed=True), (x, scale, zero))] if x.ndim else []
    return [
        ("fake_quantize", value(jaxquant.fake_quantize), (x, scale, zero)),
        *codes,
        *packed,
        ("quantize_backward",
         lambda i, dy, x, s, z: jaxquant.quantize_backward(dy, x, s, z, **keywords, implementation=i),
         (dy, x, scale, zero)),
        ("dequantize", round_trip, (x, scale, zero)),
        ("fake_quantize gradients", gradients(jaxquant.fake_quantize), (x, dy, scale, zero)),
        ("quantize gradients", gradients(jaxquant.quantize, qtype="int4", dtype=carried), (x, dy, scale, zero)),
    ]  # fmt: skip


def stage_capture(rehearse: bool) -> dict[str, Any]:
    """The same results from a CUDA graph: many calls in one jit, run again and again with command buffers on."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxquant

    implementation = "cuda_emulation" if rehearse else "ffi"
    x, _, scale, zero = _operands((256, 512), (256, 1), "float32")

    def step(x: Any, scale: Any, zero: Any) -> Any:
        for i in range(4):
            x = jaxquant.fake_quantize(x * (1 + i), scale, zero, implementation=implementation)
        return x

    def loss(x: Any, scale: Any, zero: Any) -> Any:
        return (step(x, scale, zero) ** 2).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    first = jax.device_get(gradients(x, scale, zero))
    for _ in range(20):
        again = jax.device_get(gradients(jnp.asarray(x), scale, zero))
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, again, strict=True)), "runs differ"
    return {"runs": 21}


def stage_sanitizer(rehearse: bool) -> dict[str, Any]:
    """compute-sanitizer over one launch of everything small."""
    del rehearse
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        return {"skipped": "compute-sanitizer is not installed"}
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__, "--stage", "launch"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {"summary": [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]}


def stage_bench(rehearse: bool) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    import jaxquant

    side = 256 if rehearse else 8192
    implementation = "cuda_emulation" if rehearse else "ffi"
    x = jax.random.normal(jax.random.key(0), (side, side))
    dy = jax.random.normal(jax.random.key(1), x.shape)
    scale = jnp.full((side, 1), 0.02)
    columns = jnp.full((1, side), 0.02)
    zero = jnp.zeros((side, 1))

    def median(function: Any, *operands: Any) -> float:
        compiled = jax.jit(function)
        for _ in range(3):
            jax.block_until_ready(compiled(*operands))
        times = []
        for _ in range(5 if rehearse else 30):
            start = time.perf_counter()
            out = None
            for _ in range(1 if rehearse else 10):
                out = compiled(*operands)
            jax.block_until_ready(out)
            times.append((time.perf_counter() - start) / (1 if rehearse else 10))
        return statistics.median(times)

    def jnp_fake(x: Any, s: Any) -> Any:
        return (jnp.clip(jnp.round(x.astype(jnp.float32) / s), -128, 127) * s).astype(x.dtype)

    def ours(x: Any, s: Any) -> Any:
        return jaxquant.fake_quantize(x, s, implementation=implementation)

    def learned(x: Any, dy: Any, s: Any, z: Any) -> Any:
        return jax.vjp(lambda x, s, z: jaxquant.fake_quantize(x, s, z, implementation=implementation), x, s, z)[1](dy)

    half = x.astype(jnp.bfloat16)
    rows: dict[str, tuple[float, float | None, int]] = {}  # ours s, jnp s, bytes
    copy = median(lambda x: -x, x)
    bandwidth = 2 * x.nbytes / copy
    rows["fake_quantize f32, rows"] = median(ours, x, scale), median(jnp_fake, x, scale), 2 * x.nbytes
    rows["fake_quantize f32, columns"] = median(ours, x, columns), median(jnp_fake, x, columns), 2 * x.nbytes
    rows["fake_quantize bf16, rows"] = median(ours, half, scale), median(jnp_fake, half, scale), 2 * half.nbytes
    to_int8 = lambda x, s: jaxquant.quantize(x, s, implementation=implementation)  # noqa: E731
    jnp_int8 = lambda x, s: jnp.clip(jnp.round(x.astype(jnp.float32) / s), -128, 127).astype(jnp.int8)  # noqa: E731
    rows["quantize bf16 to int8"] = median(to_int8, half, scale), median(jnp_int8, half, scale), 3 * half.size
    to_int4 = lambda x, s: jaxquant.quantize(x, s, qtype="int4", packed=True, implementation=implementation)  # noqa: E731
    rows["quantize f32 to packed int4"] = median(to_int4, x, scale), None, x.nbytes + x.size // 2
    backward = lambda dy, x, s: jax.vjp(lambda x: ours(x, s), x)[1](dy)  # noqa: E731
    rows["backward (dx) f32"] = median(backward, dy, x, scale), None, 3 * x.nbytes
    rows["learned backward f32, rows"] = median(learned, x, dy, scale, zero), None, 3 * x.nbytes
    rows["learned backward f32, columns"] = median(learned, x, dy, columns, columns * 0), None, 3 * x.nbytes
    print(f"copy: {bandwidth / 1e9:.0f} GB/s")
    print(f"{'work':<34}{'ms':>9}{'GB/s':>8}{'of copy':>9}{'jnp ms':>9}")
    for name, (seconds, peer, size) in rows.items():
        speed = size / seconds
        other = "" if peer is None else f"{peer * 1e3:.3f}"
        print(f"{name:<34}{seconds * 1e3:>9.3f}{speed / 1e9:>8.0f}{speed / bandwidth:>9.0%}{other:>9}")
    return {"copy_bytes_per_s": bandwidth, "rows": rows, "device": str(jax.devices()[0])}


def stage_ggml(rehearse: bool) -> dict[str, Any]:
    """The block formats: values and bytes as on the host, products within their bounds, one row as in a batch."""
    import numpy as np

    from jaxquant import ggml, testing

    implementation = "cuda_emulation" if rehearse else "ffi"
    rng = np.random.default_rng(0)
    x = rng.standard_normal((70, 512)).astype(np.float32)
    for name in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "Q2_K"):
        w = ggml.quantize(rng.standard_normal((40, 512)).astype(np.float32), name).prepare()
        whole = np.asarray(ggml.linear(x, w, implementation=implementation))
        for rows in ((3, 4), (0, 5), (9, 40)):
            part = np.asarray(ggml.linear(x[slice(*rows)], w, implementation=implementation))
            assert np.array_equal(part, whole[slice(*rows)]), f"{name}: rows {rows} differ from those of the batch"
    return {"report": str(testing.conformance(implementation))}


def stage_ggml_bench(rehearse: bool) -> dict[str, Any]:
    """Products of block-quantised weights that rotate over more memory than the cache holds."""
    import jax
    import jax.numpy as jnp

    from jaxquant import ggml

    implementation = "cuda_emulation" if rehearse else "ffi"
    n = k = 256 if rehearse else 8192
    rows = {}
    print(f"{'work':<34}{'us':>9}{'GB/s':>8}{'Tops':>8}")
    for name in ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4"):
        w = ggml.quantize(jax.random.normal(jax.random.key(0), (n, k)), name).prepare()
        copies = [jax.tree.map(lambda a: jnp.array(a, copy=True), w) for _ in range(1 if rehearse else 4)]
        for m in (1, 8, 64, 512)[: 2 if rehearse else 4]:
            x = jax.random.normal(jax.random.key(1), (m, k)).astype(jnp.bfloat16)
            linear = jax.jit(lambda x, w: ggml.linear(x, w, implementation=implementation))
            for each in copies:
                jax.block_until_ready(linear(x, each))
            times = []
            for _ in range(2 if rehearse else 20):
                start = time.perf_counter()
                out = [linear(x, each) for each in copies]
                jax.block_until_ready(out)
                times.append((time.perf_counter() - start) / len(copies))
            seconds = statistics.median(times)
            rows[f"{name}, {m} tokens"] = seconds
            print(f"{name + f' {n} x {k}, {m} tokens':<34}{seconds * 1e6:>9.1f}{w.nbytes / seconds / 1e9:>8.0f}"
                  f"{2 * m * n * k / seconds / 1e12:>8.1f}", flush=True)  # fmt: skip
    return {"rows": rows, "device": str(jax.devices()[0])}


STAGES = {name[6:]: function for name, function in list(globals().items()) if name.startswith("stage_")}
COMMANDS = {
    "test": {"import": 60, "launch": 90, "bits": 160, "ggml": 150, "capture": 60, "sanitizer": 80},
    "bench": {"bench": 280, "ggml_bench": 280},
}
_CAPTURE = "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=COMMANDS)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with the emulated kernels")
    parser.add_argument("--output", type=Path, default=Path())
    parser.add_argument("--stage", choices=STAGES, help="run one stage in this process")
    arguments = parser.parse_args()
    if arguments.stage:
        print(json.dumps(STAGES[arguments.stage](arguments.rehearse), default=str))
        return 0
    if arguments.command is None:
        parser.error("say test or bench")
    report, failed = {}, []
    for stage, limit in COMMANDS[arguments.command].items():
        environment = dict(os.environ)
        if stage == "capture" and not arguments.rehearse:
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {_CAPTURE}".strip()
        command = [sys.executable, __file__, "--stage", stage, *(["--rehearse"] if arguments.rehearse else [])]
        start = time.perf_counter()
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
            passed, text = done.returncode == 0, done.stdout + (done.stderr if done.returncode else "")
        except subprocess.TimeoutExpired:
            passed, text = False, f"took longer than {limit} s"
        seconds = time.perf_counter() - start
        print(f"{'ok    ' if passed else 'FAILED'} {stage} ({seconds:.1f} s)", flush=True)
        print("  " + "\n  ".join(text.strip().splitlines()[-25:]), flush=True)
        report[stage] = {"passed": passed, "seconds": seconds, "output": text[-20000:]}
        failed += [] if passed else [stage]
    (arguments.output / f"gpu-{arguments.command}.json").write_text(json.dumps(report, indent=1))
    print(f"\n{len(report) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
