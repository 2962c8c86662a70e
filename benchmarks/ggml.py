"""Block-quantised tensors beside ggml itself (the wheel libggml-python: AVX2, interleaved rows where it has them) and
the jax.numpy a user would write: dequantise inside jit, then a dot.

    python benchmarks/ggml.py [--quick]

Weights rotate over more memory than the cache holds, as a model's layers do.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import harness
import numpy as np

FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4")
# ours / ggml at most, by tokens, from the speed-ups to reach.
TARGETS = {
    1: {"Q4_0": 1.0, "Q4_K": 1.0, "MXFP4": 1.0, "Q8_0": 1 / 1.3, "Q6_K": 1 / 1.3, "IQ4_XS": 1 / 1.3, "Q5_K": 1 / 1.3},
    8: dict.fromkeys(FORMATS, 1 / 1.5),
    64: {"Q4_K": 1 / 1.5, "Q8_0": 1 / 1.5, "Q6_K": 1 / 2.5, "IQ4_XS": 1 / 2.5},
    512: {"Q4_K": 1 / 1.5, "Q8_0": 1 / 1.5, "Q6_K": 1 / 2.5, "IQ4_XS": 1 / 2.5},
}
CACHE = 128 << 20  # bytes that weights rotate over
# Calls in one timing, by tokens: several in a row, as a model makes them, not each in the wake of another contender.
REPEAT = {1: 10, 8: 5, 64: 3, 512: 1}


def rotating(function: Callable[..., Any], choices: list[Any]) -> Callable[..., Any]:
    turn = itertools.cycle(choices)
    return lambda *operands: function(*operands, next(turn))


def product_cases(formats: tuple[str, ...], n: int, k: int, tokens: tuple[int, ...]) -> list[harness.Case]:
    import ggml_peer
    import jax
    import jax.numpy as jnp

    from jaxquant import ggml

    rng = np.random.default_rng(0)
    threads = len(os.sched_getaffinity(0))
    values = rng.standard_normal((n, k)).astype(np.float32)
    cases = []
    for name in formats:
        w = ggml.quantize(values, name)
        copies = -(-CACHE // w.nbytes)
        plain = [jax.tree.map(lambda a: jnp.array(a, copy=True), w) for _ in range(copies)]
        prepared = [each.prepare() for each in plain]
        data = np.asarray(w.data)
        kind = w.format
        for m in tokens:
            x = rng.standard_normal((m, k)).astype(np.float32)
            peers = [
                ggml_peer.Product(kind.type_id, data, (n, k), x, threads, name in ggml_peer.REPACKED)
                for _ in range(min(copies, 16))
            ]
            linear = jax.jit(ggml.linear)
            float_linear = jax.jit(lambda x, w: ggml.linear(x, w, lhs_qtype=None))
            by_hand = jax.jit(lambda x, w: ggml.linear(x, w, implementation="xla"))
            contenders = {
                "ours": rotating(linear, prepared),
                "ggml": rotating(lambda _, peer: peer(), peers),
                "ours, plain layout": rotating(linear, plain),
                "ours, float activations": rotating(float_linear, prepared),
            }
            target = TARGETS[m].get(name)
            operations = 2 * m * n * k
            title = f"{name} {n} x {k}, {m} tokens ({w.nbytes / 1e6:.1f} MB, {operations / 1e9:.2f} GOP)"
            targets = {"ggml": target} if target else {}
            repeat = REPEAT.get(m, 1)
            around = {"ggml": functools.partial(ggml_peer.awake, peers[0])}
            cases.append(
                harness.Case(title, contenders, (jnp.asarray(x),), targets=targets, repeat=repeat, around=around)
            )
            if name in ("Q4_K", "Q8_0"):
                both = {"ours": contenders["ours"], "jnp": rotating(by_hand, plain)}
                cases.append(harness.Case(f"{title}, by hand", both, (jnp.asarray(x),)))
    return cases


def moe_cases(experts: int, slots: int, n: int, k: int, tokens: tuple[int, ...]) -> list[harness.Case]:
    import ggml_peer
    import jax
    import jax.numpy as jnp

    from jaxquant import ggml

    rng = np.random.default_rng(0)
    threads = len(os.sched_getaffinity(0))
    w = ggml.quantize(rng.standard_normal((experts, n, k)).astype(np.float32), "Q4_K")
    prepared = w.prepare()
    moe = jax.jit(ggml.moe_linear)
    cases = []
    for m in tokens:
        x = rng.standard_normal((m, k)).astype(np.float32)
        ids = np.stack([rng.permutation(experts)[:slots] for _ in range(m)]).astype(np.int32)
        peer = ggml_peer.Product(12, np.asarray(w.data), (experts, n, k), x, threads, True, ids)
        chosen = jnp.asarray(ids)
        contenders = {
            "ours": lambda x, chosen=chosen: moe(x, prepared, chosen),
            "ggml": lambda _, peer=peer: peer(),
        }
        title = f"Q4_K, {experts} experts of {n} x {k}, top {slots}, {m} tokens"
        targets = {"ggml": 0.5} if m >= 8 else {}
        around = {"ggml": functools.partial(ggml_peer.awake, peer)}
        operands = (jnp.asarray(x[:, None]),)
        case = harness.Case(title, contenders, operands, targets=targets, repeat=REPEAT[m], around=around)
        cases.append(case)
    return cases


def codec_cases(formats: tuple[str, ...], n: int, k: int, slow_rows: int) -> list[harness.Case]:
    import ggml_peer
    import jax
    import jax.numpy as jnp

    from jaxquant import ggml

    base = ggml_peer.load()[0]
    rng = np.random.default_rng(0)
    values = rng.standard_normal((n, k)).astype(np.float32)
    threads = len(os.sched_getaffinity(0))
    one_thread = threads == 1
    pool = ThreadPoolExecutor(threads)
    # By turns: ours writes a new result while the one before is still held.
    outs = itertools.cycle([np.ones((n, k), np.float32) for _ in range(2)])

    def share(work: Callable[[slice, np.ndarray], Any]) -> None:
        """Rows of a result on as many threads as ours; ctypes lets go of the interpreter's lock."""
        bounds, out = [n * i // threads for i in range(threads + 1)], next(outs)
        list(pool.map(lambda rows: work(rows, out[rows]), map(slice, bounds, bounds[1:])))

    cases = []
    for name in formats:
        w = ggml.quantize(values, name)
        data = np.asarray(w.data)
        to_float = ggml_peer.to_float(w.format.type_id)
        dequantize = jax.jit(lambda w: w.dequantize())

        def peer_rows(rows: slice, out: np.ndarray, data=data, to_float=to_float) -> None:
            to_float(data[rows].ctypes.data, out.ctypes.data, out.size)

        def fill_rows(_: slice, out: np.ndarray) -> None:
            ctypes.memset(out.ctypes.data, 1, out.nbytes)

        contenders: dict[str, Callable[..., Any]] = {
            "ours": lambda w=w, dequantize=dequantize: dequantize(w),
            "ggml, warm": lambda rows=peer_rows: share(rows),
            "memset, warm": lambda rows=fill_rows: share(rows),
        }
        # Theirs write memory that is there: compare where ours is reused too.
        least = 0.4 if name in ("Q6_K", "IQ4_XS", "MXFP4") else 1.0
        targets = {"ggml, warm": least, "memset, warm": 1 / 0.85} if os.environ.get("GLIBC_TUNABLES") else {}
        title = f"dequantise {name} {n} x {k} ({values.nbytes / 1e6:.0f} MB)"
        cases.append(harness.Case(title, contenders, (), targets=targets))

    rows = values[:slow_rows]
    importance = (rows**2).sum(0)
    for name, weights in [*((name, None) for name in formats), ("Q4_K", importance), ("IQ2_XXS", importance)]:
        kind = ggml.formats[name]
        packed = np.zeros((slow_rows, kind.row_bytes(k)), np.uint8)
        quantize = jax.jit(lambda x, im, name=name: ggml.quantize(x, name, imatrix=im).data)
        x = jnp.asarray(rows)
        im = None if weights is None else jnp.asarray(weights)

        def peer(kind=kind, out=packed, weights=weights):
            pointer = None if weights is None else weights.ctypes.data
            return base.ggml_quantize_chunk(
                kind.type_id, rows.ctypes.data, out.ctypes.data, 0, slow_rows, k, ctypes.c_void_p(pointer)
            )

        target = 0.25 if name.endswith("_K") else 1 / 1.5
        title = f"quantise {name}{'' if weights is None else ' with imatrix'}, {slow_rows * k / 1e6:.1f} M weights"
        cases.append(
            harness.Case(
                title, {"ours": lambda x=x, im=im, q=quantize: q(x, im), "ggml, one thread": lambda p=peer: p()}, (),
                targets={"ggml, one thread": target} if one_thread else {},
            )
        )  # fmt: skip
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two formats, small matrices: does it run")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 64, 512])
    parser.add_argument("--only", choices=("products", "moe", "codec"), help="a part of it")
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    options = parser.parse_args()

    def cases() -> list[harness.Case]:
        if options.quick:
            return [
                *product_cases(("Q4_K",), 256, 512, (1, 8)), *moe_cases(8, 2, 64, 256, (8,)),
                *codec_cases(("Q8_0",), 64, 1024, 16),
            ]  # fmt: skip
        tokens = tuple(options.tokens)
        parts = {
            "products": lambda: product_cases(options.formats, 4096, 4096, tokens),
            "moe": lambda: moe_cases(128, 8, 768, 2048, tokens),
            "codec": lambda: codec_cases(options.formats, 4096, 4096, 64),
        }
        # With reused memory only what has large results: page faults do not matter to the others.
        wanted = (options.only,) if options.only else ("codec",) if os.environ.get("GLIBC_TUNABLES") else tuple(parts)
        return [case for part in wanted for case in parts[part]()]

    harness.main(__file__, "ggml", cases, one_reused=True)


if __name__ == "__main__":
    sys.exit(main())
