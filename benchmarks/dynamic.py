"""Dynamic quantisation beside the jax.numpy a user would write, and beside a copy of as many bytes.

python benchmarks/dynamic.py [--only WORDS] [--quick]
"""

from __future__ import annotations

import argparse
import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import jaxquant
from jaxquant import PerAxis, PerGroup, PerTensor, PerToken

SIDE = 4096


def jnp_quantize(x: Any, axis: Any = -1, qmax: int = 127) -> Any:
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    scale = jnp.where(largest > 0, largest / qmax, 1)
    return jnp.clip(jnp.round(x / scale), -qmax, qmax).astype(jnp.int8), scale


def jnp_packed(x: Any) -> Any:
    q, scale = jnp_quantize(x, qmax=7)
    low, high = q[..., ::2] & 15, q[..., 1::2] << 4
    return (low | high).astype(jnp.uint8), scale


def jnp_groups(x: Any, size: int) -> Any:
    q, scale = jnp_quantize(x.reshape(x.shape[0], -1, size))
    return q.reshape(x.shape), scale[..., 0]


def jnp_asymmetric(x: Any) -> Any:
    x = x.astype(jnp.float32)
    low, high = jnp.minimum(x.min(-1, keepdims=True), 0), jnp.maximum(x.max(-1, keepdims=True), 0)
    scale = jnp.where(high > low, (high - low) / 255, 1)
    zero = jnp.clip(jnp.round(-low / scale), 0, 255)
    return jnp.clip(jnp.round(x / scale) + zero, 0, 255).astype(jnp.uint8), scale, zero


def jnp_fake(x: Any) -> Any:
    q, scale = jnp_quantize(x)
    return (q.astype(jnp.float32) * scale).astype(x.dtype)


def moved(size: int) -> Any:
    """Reads and writes `size` bytes in all, on every thread, between buffers that exist."""
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    threads = len(os.sched_getaffinity(0))
    pool, part = ThreadPoolExecutor(threads), size // 2 // threads
    source, target = np.ones((threads, part), np.uint8), np.ones((threads, part), np.uint8)

    def one(i: int) -> None:
        copy(target[i].ctypes.data, source[i].ctypes.data, part)

    return lambda *_: list(pool.map(one, range(threads))) and None


def cases(quick: bool = False, only: str = "") -> list[harness.Case]:
    side = SIDE // 4 if quick else SIDE
    x = jax.random.normal(jax.random.key(0), (side, side))
    narrow, half = x.astype(jnp.bfloat16), x.astype(jnp.float16)
    n, millions = x.size, f"{x.size >> 20}M"
    ours = jaxquant.dynamic_quantize

    def row(name: str, f: Any, g: Any, x: Any, size: int, target: float | None = None) -> harness.Case:
        contenders = {"ours": jax.jit(f), "jnp": jax.jit(g), "bytes": moved(size)}
        targets = {"bytes": 1.3} | ({} if target is None else {"jnp": target})
        return harness.Case(f"{name}, {millions}", contenders, (x,), targets=targets)

    rows = [
        row("per token to int8, f32", ours, jnp_quantize, x, 5 * n, 0.7),
        row("per token to int8, bf16", ours, jnp_quantize, narrow, 3 * n, 0.6),
        row("per token to int8, f16", ours, jnp_quantize, half, 3 * n),
        row("per token to packed int4, f32", partial(ours, qtype=jnp.int4), jnp_packed, x, 9 * n // 2),
        row("per token to uint8, f32", partial(ours, qtype=jnp.uint8, symmetric=False), jnp_asymmetric, x, 5 * n),
        row("groups of 128 to int8, f32", partial(ours, granularity=PerGroup(128)),
            partial(jnp_groups, size=128), x, 5 * n),
        row("per tensor to int8, f32", partial(ours, granularity=PerTensor()),
            partial(jnp_quantize, axis=(0, 1)), x, 9 * n),
        row("per last axis to int8, f32", partial(ours, granularity=PerAxis(1)),
            partial(jnp_quantize, axis=0), x, 9 * n),
        row("fake, per token, f32", jaxquant.dynamic_fake_quantize, jnp_fake, x, 8 * n),
        row("fake, per token, bf16", jaxquant.dynamic_fake_quantize, jnp_fake, narrow, 4 * n),
        row("choose per token, f32", lambda x: jaxquant.choose_qparams(x, PerToken()).scale,
            lambda x: jnp.max(jnp.abs(x), -1) / 127, x, 4 * n),
    ]  # fmt: skip
    for tokens in (1, 16, 256, 1024):
        for few in (x[:tokens], narrow[:tokens]):
            contenders = {"ours": jax.jit(ours), "jnp": jax.jit(jnp_quantize)}
            name = f"per token to int8, {'f32' if few.dtype == x.dtype else 'bf16'}"
            rows.append(harness.Case(f"{name}, {tokens} x {side}", contenders, (few,), repeat=max(1, 320 // tokens)))
    return [r for r in rows if all(word in r.name for word in only.split())]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the data")
    parser.add_argument("--only", default="", help="rows whose name holds all these words")
    arguments = parser.parse_args()
    harness.main(__file__, "dynamic", partial(cases, arguments.quick, arguments.only))
