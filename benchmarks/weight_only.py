"""Products of float32 rows with int8 and int4 matrices, scales per group of 128, beside the float32 dot of the matrix
they stand for and the jax.numpy a user would write: dequantise inside jit, then a dot.

    python benchmarks/weight_only.py [--quick]

Weights rotate over more memory than the cache holds, as a model's layers do.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from typing import Any

import harness
import numpy as np

GROUP = 128
CACHE = 128 << 20  # bytes that weights rotate over
REPEAT = {1: 10, 8: 5, 64: 3, 512: 1}  # calls in one timing, by rows: several in a row, as a model makes them
TARGETS = {"int8": 0.3, "int4": 0.2}  # ours / float32 dot, one row


def rotating(function: Callable[..., Any], choices: list[Any]) -> Callable[..., Any]:
    turn = itertools.cycle(choices)
    return lambda *operands: function(*operands, next(turn))


def cases(rows: tuple[int, ...], k: int, n: int) -> list[harness.Case]:
    import jax
    import jax.numpy as jnp

    import jaxquant
    from jaxquant.affine.layout import prepare
    from jaxquant.affine.weight_only import Weight, no_zero_point, weight_only_gradient_p, weight_only_matmul_p

    rng = np.random.default_rng(0)

    def copies(arrays: Any, nbytes: int) -> list[Any]:
        return [jax.tree.map(lambda a: jnp.array(a, copy=True), arrays) for _ in range(-(-CACHE // nbytes))]

    def call(primitive: Any, weight: Weight, implementation: str | None = None) -> Callable[..., Any]:
        def product(x: Any, matrix: Any) -> Any:
            data, scale = (a[None] for a in matrix)
            return primitive.bind(x[None], data, scale, no_zero_point(), weight=weight, implementation=implementation)[
                0
            ]

        return jax.jit(product)

    dot = jax.jit(lambda x, w: x @ w)
    transposed = jax.jit(lambda x, w: x @ w.T)
    floats = copies(rng.standard_normal((k, n)).astype(np.float32), 4 * k * n)
    found = []
    for bits in (8, 4):
        name = f"int{bits}"
        codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (k, n))
        scale = rng.random((k // GROUP, n)).astype(np.float32)
        flat = codes.astype(np.int8)
        data = np.asarray(jaxquant.pack(flat, jnp.int4)) if bits == 4 else flat
        size = k * n * bits // 8
        plain = copies((jnp.asarray(data), jnp.asarray(scale)), size)
        panels = [(prepare(data, bits=bits, n=n), scale) for data, scale in plain]  # each in memory of its own
        shape = Weight(bits, True, n, k), Weight(bits, True, n, k, "prepared")
        for m in rows:
            x, dy = (jnp.asarray(rng.standard_normal((m, size)).astype(np.float32)) for size in (k, n))
            contenders = {
                "ours": rotating(call(weight_only_matmul_p, shape[1]), panels),
                "f32 dot": rotating(dot, floats),
                "ours, plain layout": rotating(call(weight_only_matmul_p, shape[0]), plain),
            }
            if m in (1, 64) and k == n == 4096:
                contenders["jnp"] = rotating(call(weight_only_matmul_p, shape[0], "xla"), plain)
            targets = {"f32 dot": TARGETS[name] if m == 1 else 1.0}
            found.append(
                harness.Case(
                    f"{name}, {m} x {k} x {n}", contenders, (x,), targets=targets, repeat=REPEAT.get(m, 1), warm=3
                )
            )
            backward = {
                "ours": rotating(call(weight_only_gradient_p, shape[1]), panels),
                "f32 dot": rotating(transposed, floats),
                "ours, plain layout": rotating(call(weight_only_gradient_p, shape[0]), plain),
            }
            if m >= 64:
                found.append(harness.Case(f"{name} gradient, {m} x {n} x {k}", backward, (dy,)))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one row and eight")
    quick = parser.parse_args().quick

    def every() -> list[harness.Case]:
        main = cases((1, 8) if quick else (1, 8, 64, 512), 4096, 4096)
        return main if quick else main + cases((1, 64), 1024, 1024) + cases((1,), 4096, 16384)

    harness.main(sys.argv[0], "weight_only", every)
