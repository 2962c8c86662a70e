"""The affine operations beside the jax.numpy a user would write, torch and ONNX Runtime where they are installed.

python benchmarks/affine.py [--only WORDS] [--quick]
"""

from __future__ import annotations

import argparse
import ctypes
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import jaxquant

SIDE = 4096  # 16M elements, 64 MiB of float32


def jnp_fake_quantize(x: Any, scale: Any, zero_point: Any = 0.0, qmin: int = -128, qmax: int = 127) -> Any:
    scale32 = scale.astype(jnp.float32)
    q = jnp.clip(jnp.round(x.astype(jnp.float32) / scale32) + zero_point, qmin, qmax)
    return ((q - zero_point) * scale32).astype(x.dtype)


def _jnp_mask(x: Any, scale: Any, zero_point: Any, qmin: int, qmax: int) -> tuple[Any, Any, Any]:
    t = x.astype(jnp.float32) / scale
    v = jnp.round(t) + zero_point
    return t, v, (v >= qmin) & (v <= qmax)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def jnp_learned(x: Any, scale: Any, zero_point: Any, qmin: int = -128, qmax: int = 127) -> Any:
    return jnp_fake_quantize(x, scale, jnp.round(zero_point), qmin, qmax)


def _jnp_backward(qmin: int, qmax: int, saved: Any, dy: Any) -> Any:
    x, scale, zero_point = saved
    zero = jnp.round(zero_point)
    t, v, inside = _jnp_mask(x, scale, zero, qmin, qmax)
    dy32 = dy.astype(jnp.float32)
    edge = jnp.where(v > qmax, qmax - zero, qmin - zero)
    dscale = (dy32 * jnp.where(inside, jnp.round(t) - t, edge)).sum(-1, keepdims=True)
    dzero = jnp.where(inside, 0.0, -scale * dy32).sum(-1, keepdims=True)
    return jnp.where(inside, dy, 0).astype(x.dtype), dscale, dzero


jnp_learned.defvjp(lambda x, s, z, qmin, qmax: (jnp_learned(x, s, z, qmin, qmax), (x, s, z)), _jnp_backward)


def _memcpy(size: int) -> Any:
    """A copy of `size` bytes between two buffers that exist, as fast as the C library does it."""
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    target.fill(1)
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return lambda *_: copy(target.ctypes.data, source.ctypes.data, size) and None


def _torch() -> Any:
    try:
        import os

        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        return torch
    except ImportError:
        return None


def cases(quick: bool = False, only: str = "") -> list[harness.Case]:
    side = SIDE // 4 if quick else SIDE
    x = jax.random.normal(jax.random.key(0), (side, side))
    scale = jnp.abs(jax.random.normal(jax.random.key(1), (side, 1))) * 0.01 + 0.01
    zero = jnp.zeros((side, 1))
    dy = jax.random.normal(jax.random.key(2), x.shape)
    torch = _torch()
    rows: list[harness.Case] = []
    millions = f"{x.size >> 20}M"

    def ours_forward(x: Any, scale: Any) -> Any:
        return jaxquant.fake_quantize(x, scale)

    def with_gradient(f: Any) -> Any:
        def both(x: Any, dy: Any, scale: Any) -> Any:
            y, vjp = jax.vjp(lambda x: f(x, scale), x)
            return y, vjp(dy)[0]

        return both

    def backward_only(f: Any) -> Any:
        return lambda dy, x, scale: jax.vjp(lambda x: f(x, scale), x)[1](dy)[0]

    jnp_plain = lambda x, scale: jnp_learned(x, jax.lax.stop_gradient(scale), jnp.zeros(scale.shape), -128, 127)  # noqa: E731
    xla_forward = lambda x, scale: jaxquant.fake_quantize(x, scale, implementation="xla")  # noqa: E731

    contenders: dict[str, Any] = {
        "ours": jax.jit(ours_forward),
        "jnp": jax.jit(jnp_fake_quantize),
        "xla": jax.jit(xla_forward),
    }
    targets = {"jnp": 0.45, "torch": 0.2}
    contenders["memcpy"] = _memcpy(x.nbytes)
    if torch is not None:
        tx, ts, tz = (torch.from_numpy(np.array(a)) for a in (x, scale[:, 0], np.zeros(side, np.int32)))
        contenders["torch"] = lambda *_: torch.fake_quantize_per_channel_affine(tx, ts, tz, 0, -128, 127) is None
    rows.append(harness.Case(f"fake_quantize, {millions} f32, fresh output", contenders, (x, scale), targets=targets))

    both = {
        name: jax.jit(with_gradient(f))
        for name, f in (("ours", ours_forward), ("jnp", jnp_plain), ("xla", xla_forward))
    }
    rows.append(
        harness.Case(
            f"forward and backward (y, dx), {millions} f32, fresh", both, (x, dy, scale), targets={"jnp": 0.45}
        )
    )

    donated = {
        name: jax.jit(f, donate_argnums=0)
        for name, f in (("ours", ours_forward), ("jnp", jnp_fake_quantize), ("xla", xla_forward))
    }
    rows.append(
        harness.Case(
            f"fake_quantize, {millions} f32, donated (reused memory)",
            donated,
            (x, scale),
            donate=True,
            targets={"jnp": 1.0},
        )
    )
    rows.append(
        harness.Case(
            f"quantize to int8, {millions} f32",
            {
                "ours": jax.jit(lambda x, s: jaxquant.quantize(x, s)),
                "jnp": jax.jit(lambda x, s: jnp.clip(jnp.round(x / s), -128, 127).astype(jnp.int8)),
                "xla": jax.jit(lambda x, s: jaxquant.quantize(x, s, implementation="xla")),
            },
            (x, scale),
            targets={"jnp": 1.0},
        )
    )
    codes = jaxquant.quantize(x, scale)
    rows.append(
        harness.Case(
            f"dequantize int8 to f32, {millions}, fresh output",
            {
                "ours": jax.jit(lambda q, s: jaxquant.dequantize(q, s)),
                "jnp": jax.jit(lambda q, s: q.astype(jnp.float32) * s),
                "xla": jax.jit(lambda q, s: jaxquant.dequantize(q, s, implementation="xla")),
            },
            (codes, scale),
            targets={"jnp": 0.45},
        )
    )
    for dtype in (jnp.bfloat16, jnp.float16):
        rows.append(
            harness.Case(
                f"fake_quantize, {millions} {dtype.__name__}, donated",
                donated,
                (x.astype(dtype), scale),
                donate=True,
                targets={"jnp": 1.0},
            )
        )

    def learned(f: Any) -> Any:
        def both(x: Any, dy: Any, scale: Any, zero: Any) -> Any:
            return jax.vjp(f, x, scale, zero)[1](dy)

        return both

    def ours_learned(x: Any, scale: Any, zero: Any) -> Any:
        return jaxquant.fake_quantize(x, scale, zero)

    def xla_learned(x: Any, scale: Any, zero: Any) -> Any:
        return jaxquant.fake_quantize(x, scale, zero, implementation="xla")

    plain = jax.jit(backward_only(ours_forward))
    for dtype, target in ((jnp.float32, 0.3), (jnp.bfloat16, 0.2)):
        rows.append(
            harness.Case(
                f"learned-scale backward (dx, ds, dz), {millions} {dtype.__name__}",
                {"ours": jax.jit(learned(ours_learned)),
                 "jnp": jax.jit(learned(lambda x, s, z: jnp_learned(x, s, z, -128, 127))),
                 "xla": jax.jit(learned(xla_learned)),
                 "plain backward": lambda x, dy, scale, zero: plain(dy, x, scale)},
                (x.astype(dtype), dy.astype(dtype), scale, zero),
                targets={"jnp": target, "plain backward": 1.3},
            )
        )  # fmt: skip
    rows.append(
        harness.Case(
            f"quantize to packed int4, {millions} f32",
            {"ours": jax.jit(lambda x, s: jaxquant.quantize(x, s, qtype=jnp.int4, packed=True)),
             "jnp": jax.jit(lambda x, s: jnp.clip(jnp.round(x / s), -8, 7).astype(jnp.int4))},
            (x, scale * 10), targets={"jnp": 0.2},
        )
    )  # fmt: skip
    for power in (14, 15, 16, 17, 18, 19, 20, 21, 22):
        n = 1 << power
        small = x.reshape(-1)[:n].reshape(-1, 128)
        rows.append(
            harness.Case(
                f"fake_quantize, 2^{power} f32, per channel",
                {"ours": jax.jit(ours_forward), "jnp": jax.jit(jnp_fake_quantize), "xla": jax.jit(xla_forward)},
                (small, jnp.full((small.shape[0], 1), 0.02)),
                targets={"jnp": 0.6 if power <= 18 else 1.0},
                least_runs=101, repeat=max(1, (1 << 18) >> power),
            )
        )  # fmt: skip
    rows.append(
        harness.Case(
            "a call of 64 elements",
            {"ours": jax.jit(ours_forward), "jnp": jax.jit(jnp_fake_quantize), "xla": jax.jit(xla_forward)},
            (x.reshape(-1)[:64].reshape(8, 8), jnp.full((8, 1), 0.02)),
            targets={"jnp": 1.1}, least_runs=101, repeat=200,
        )
    )  # fmt: skip
    return [row for row in rows if only in row.name]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the elements, to try the script")
    arguments = parser.parse_args()
    harness.main(__file__, "affine", lambda: cases(arguments.quick, arguments.only))
