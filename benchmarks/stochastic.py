"""Stochastic rounding beside the jax.numpy a user would write: jax.random.uniform, a floor and a clip.

python benchmarks/stochastic.py [--only WORDS] [--quick]
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp

import jaxquant

SIDE = 4096  # 16M elements, 64 MiB of float32


def _jnp_codes(x: Any, scale: Any, key: Any) -> Any:
    return jnp.clip(jnp.floor(x / scale + jax.random.uniform(key, x.shape)), -128, 127)


def jnp_quantize(x: Any, scale: Any, key: Any) -> Any:
    return _jnp_codes(x, scale, key).astype(jnp.int8)


@jax.custom_vjp
def jnp_fake_quantize(x: Any, scale: Any, key: Any) -> Any:
    return (_jnp_codes(x.astype(jnp.float32), scale, key) * scale).astype(x.dtype)


def _jnp_backward(saved: Any, dy: Any) -> Any:
    x, scale, key = saved
    v = jnp.floor(x / scale + jax.random.uniform(key, x.shape))
    return jnp.where((v >= -128) & (v <= 127), dy, 0), None, None


jnp_fake_quantize.defvjp(lambda x, s, k: (jnp_fake_quantize(x, s, k), (x, s, k)), _jnp_backward)


def cases(quick: bool = False, only: str = "") -> list[harness.Case]:
    side = SIDE // 4 if quick else SIDE
    key = jax.random.key(3)
    x = jax.random.normal(jax.random.key(0), (side, side))
    scale = jnp.full((side, 1), 0.03)
    drawn: Any = {"rounding": "stochastic"}
    pair = {"jax.numpy": 0.1}

    def forward_and_backward(f: Any) -> Any:
        def call(x: Any, scale: Any, key: Any, dy: Any) -> Any:
            y, backward = jax.vjp(lambda x: f(x, scale, key), x)
            return y, backward(dy)[0]

        return jax.jit(call)

    ours_fake = partial(jaxquant.fake_quantize, **drawn)

    def row(name: str, ours: Any, theirs: Any, operands: tuple[Any, ...], **more: Any) -> harness.Case:
        contenders = {"jaxquant": jax.jit(ours), "jax.numpy": jax.jit(theirs), **more}
        return harness.Case(name, contenders, operands, targets=pair, least_runs=15, warm=1)

    size = f"{side * side >> 20}M"
    nearest = jax.jit(lambda x, s, k: jaxquant.quantize(x, s))
    every = [
        row(
            f"stochastic rounding to int8, {size} f32",
            lambda x, s, k: jaxquant.quantize(x, s, key=k, **drawn),
            jnp_quantize,
            (x, scale, key),
            nearest=nearest,
        ),
        row(
            f"stochastic rounding to int8, {size} bf16",
            lambda x, s, k: jaxquant.quantize(x, s, key=k, **drawn),
            lambda x, s, k: jnp_quantize(x.astype(jnp.float32), s, k),
            (x.astype(jnp.bfloat16), scale, key),
        ),
        row(
            f"stochastic fake_quantize, {size} f32",
            lambda x, s, k: ours_fake(x, s, key=k),
            jnp_fake_quantize,
            (x, scale, key),
        ),
        row(
            f"the same, forward and backward, {size} f32",
            forward_and_backward(lambda x, s, k: ours_fake(x, s, key=k)),
            forward_and_backward(jnp_fake_quantize),
            (x, scale, key, x),
        ),
    ]
    return [case for case in every if only in case.name]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="rows whose name holds these words")
    parser.add_argument("--quick", action="store_true", help="1M elements")
    arguments = parser.parse_args()
    harness.main(__file__, "stochastic", lambda: cases(arguments.quick, arguments.only))
