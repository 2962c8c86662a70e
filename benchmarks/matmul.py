"""Integer products beside jax.numpy, and torch and ONNX Runtime where they are installed.

python benchmarks/matmul.py [--only WORDS] [--quick]

ONNX Runtime, which multiplies uint8 by int8 best, has two columns: its threads look for work between calls ("ort"),
which is its best for small products, or sleep ("ort, asleep"). In the first case its turns end when they sleep again,
so that they take no processor from the others.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import jaxquant
from jaxquant.affine.int_matmul import scaled_matmul

SIZES = ((1024, 1024, 1024), (32, 4096, 4096), (1, 4096, 4096), (8, 4096, 4096), (128, 4096, 4096))
# The best of others may be ours too: peers that are not there are left out.
TARGETS = {"jnp": 1.0, "torch": 1.0, "ort": 1.0, "ort, asleep": 1.0}
REPEAT = {1: 10, 8: 5, 32: 3}  # calls in one timing, by rows: several in a row, as a model makes them
# How the cost grows: an eighth and eight times the operations of 1024 x 1024 x 1024, and so on.
GROWTH = ((256, 256, 256), (512, 512, 512), (2048, 2048, 2048), (1, 1024, 1024), (1, 2048, 8192), (32, 1024, 1024))


def jnp_int_matmul(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, preferred_element_type=jnp.int32)


def jnp_scaled(a: Any, a_scale: Any, w: Any, w_scale: Any) -> Any:
    """One group or several, as a user would write it."""
    k, groups = a.shape[1], w_scale.shape[0]
    if groups == 1:
        return jnp_int_matmul(a, w).astype(jnp.float32) * w_scale * a_scale
    parts = jnp.einsum(
        "mgk,gkn->gmn", a.reshape(-1, groups, k // groups), w.reshape(groups, k // groups, -1),
        preferred_element_type=jnp.int32,
    )  # fmt: skip
    return (parts.astype(jnp.float32) * w_scale[:, None]).sum(0) * a_scale


def torch_int_mm(a: np.ndarray, b: np.ndarray, transposed: bool) -> Any:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if a.dtype != np.int8 or b.dtype != np.int8:
        return None
    x, y = torch.from_numpy(a), torch.from_numpy(b)
    y = y.T.contiguous().T if transposed else y
    # torch._int_mm refuses fewer than 17 rows on some builds.
    try:
        torch._int_mm(x, y)
    except RuntimeError:
        return None
    return lambda *_: (torch._int_mm(x, y), None)[1]


def ort_matmul(a: np.ndarray, b: np.ndarray, constant: bool, spinning: bool) -> Any:
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    kinds = {np.dtype(np.int8): TensorProto.INT8, np.dtype(np.uint8): TensorProto.UINT8}
    inputs = [helper.make_tensor_value_info("a", kinds[a.dtype], a.shape)]
    if not constant:
        inputs.append(helper.make_tensor_value_info("b", kinds[b.dtype], b.shape))
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "b"], ["y"])],
        "product",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.INT32, (a.shape[0], b.shape[1]))],
        [numpy_helper.from_array(b, "b")] if constant else [],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {"a": a} if constant else {"a": a, "b": b}
    return lambda *_: (session.run(None, feed), None)[1]


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Ends when this process sleeps."""
    yield
    used = 1.0
    while used > 0.001:  # they give up after a number of attempts, some 40 ms
        start = time.process_time()
        time.sleep(0.005)
        used = time.process_time() - start


def cases(arguments: argparse.Namespace) -> list[harness.Case]:
    rng = np.random.default_rng(0)
    has_torch = importlib.util.find_spec("torch") is not None
    has_ort = all(importlib.util.find_spec(name) is not None for name in ("onnxruntime", "onnx"))
    out = []

    def wanted(name: str) -> bool:
        return arguments.only is None or all(word in name for word in arguments.only.split())

    def add(name: str, contenders: dict[str, Any], operands: tuple[Any, ...], m: int) -> None:
        kept = {key: value for key, value in contenders.items() if value is not None}
        out.append(
            harness.Case(
                name, kept, operands, targets=TARGETS, least_runs=7 if arguments.quick else 25,
                repeat=REPEAT.get(m, 1), warm=3, around={"ort": in_turn},
            )
        )  # fmt: skip

    def ort_peers(a: np.ndarray, b: np.ndarray, constant: bool) -> dict[str, Any]:
        if not has_ort or a.dtype != np.uint8:
            return {}
        return {name: ort_matmul(a, b, constant, name == "ort") for name in ("ort", "ort, asleep")}

    def codes(dtype: Any, *shape: int) -> np.ndarray:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max + 1, shape).astype(dtype)

    ours, theirs = jax.jit(jaxquant.int_matmul), jax.jit(jnp_int_matmul)
    for m, k, n in SIZES + GROWTH:
        size = f"{m}x{k}x{n}"
        b = codes(np.int8, k, n)
        prepared = jaxquant.QArray.from_codes(b, 1.0).prepare().data
        for dtype in (np.int8, np.uint8):
            a = codes(dtype, m, k)
            name = f"int_matmul {a.dtype.name} {size}, b row-major"
            if wanted(name):
                contenders: dict[str, Any] = {"ours": ours, "jnp": theirs if dtype == np.int8 else None}
                if has_torch:
                    contenders["torch"] = torch_int_mm(a, b, False)
                add(name, contenders | ort_peers(a, b, False), (jnp.asarray(a), jnp.asarray(b)), m)
            name = f"integers {a.dtype.name} {size}, w prepared"
            if wanted(name):
                integers = partial(
                    _prepared, bits=8, n=n, a_scale=jnp.ones((1, 1, 1)), w_scale=jnp.ones((1, 1, 1)), dtype=jnp.int32
                )
                contenders = {"ours": jax.jit(integers)}
                if has_torch:
                    contenders["torch"] = torch_int_mm(a, b, True)
                add(name, contenders | ort_peers(a, b, True), (jnp.asarray(a)[None], prepared[None]), m)
        if (m, k, n) in GROWTH:
            continue
        x, x_scale = jnp.asarray(codes(np.int8, m, k)), jnp.asarray(rng.random((m, 1), np.float32))
        for qtype, groups in ((jnp.int8, 1), (jnp.int8, k // 128), (jnp.int4, k // 128)):
            bits = 4 if qtype == jnp.int4 else 8
            name = f"scaled int8 x int{bits} {size}, {groups} group(s), w prepared"
            if not wanted(name):
                continue
            w_codes = jnp.asarray(b if bits == 8 else b >> 4)
            w_scale = jnp.asarray(rng.random((groups, n), np.float32))
            data = jaxquant.QArray.from_codes(w_codes, 1.0, qtype=qtype).prepare().data
            theirs_scaled = jax.jit(jnp_scaled)
            product = jax.jit(partial(_prepared, bits=bits, n=n, dtype=jnp.float32))
            f = lambda a, w, s, t, product=product: product(a, w, a_scale=s, w_scale=t)  # noqa: E731
            g = lambda a, w, s, t, x=x, xs=x_scale, wc=w_codes, ws=w_scale, g=theirs_scaled: g(x, xs, wc, ws)  # noqa: E731
            add(name, {"ours": f, "jnp": g}, (x[None], data[None], x_scale[None], w_scale[None]), m)
    return out


def _prepared(a: Any, w: Any, *, a_scale: Any, w_scale: Any, bits: int, n: int, dtype: Any) -> Any:
    return scaled_matmul(
        a, a_scale, None, w, w_scale, None, None, bits=bits, signed=True, n=n, prepared=True, dtype=dtype,
        implementation=None,
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="rows whose names have all of these words")
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    options = parser.parse_args()
    harness.main(__file__, "matmul", partial(cases, options))
