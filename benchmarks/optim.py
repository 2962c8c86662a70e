"""A training step's optimiser with moments of 8 bits, beside optax.adam: same parameters, same gradient, state donated.

The gradient is a product computed in the step, so that it exists in memory as a network's does; "neither" is the same
step with the gradient added to the parameters and no moments at all.

python benchmarks/optim.py [--quick]
"""

from __future__ import annotations

import argparse
from typing import Any

import harness
import jax
import jax.numpy as jnp
import optax

from jaxquant import optim

WIDTH = 4096


def training(tx: Any, rows: int, dtype: Any) -> Any:
    """A function of nothing that takes one step; parameters and state stay with it."""
    params = jnp.full((rows, WIDTH), 0.5, dtype)
    held = [params, tx.init(params)]
    a, b = jnp.full((rows, 8), 1e-2, dtype), jnp.ones((8, WIDTH), dtype)

    def step(params: Any, state: Any, a: Any, b: Any) -> Any:
        updates, state = tx.update(a @ b, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1))

    def call() -> Any:
        held[:] = compiled(*held, a, b)
        return held

    return call


def cases() -> list[harness.Case]:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--quick", action="store_true")
    quick = arguments.parse_args().quick
    rows = []
    sizes = [(1, "float32")] if quick else [(1, "float32"), (16, "float32"), (16, "bfloat16"), (100, "float32")]
    for millions, dtype in sizes:
        count = millions * 1_000_000 // WIDTH
        contenders = {"ours": optim.adam8bit(1e-3), "optax.adam": optax.adam(1e-3), "neither": optax.sgd(1e-3)}
        steps = {name: training(tx, count, dtype) for name, tx in contenders.items()}
        name = f"Adam step, {millions}M parameters, {dtype}"
        rows.append(harness.Case(name, steps, targets={"optax.adam": 1.0}, least_runs=9 if millions == 100 else 15))
    return rows


if __name__ == "__main__":
    harness.main(__file__, "optim", cases)
