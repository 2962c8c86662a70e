"""A dense layer trained on integers: a transformer block's step beside float, one layer, and what the backward keeps.

python benchmarks/qat_dense.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import qat_step

import jaxquant

Dense = Callable[[Any, Any, Any, Any], Any]  # x, w, w's scale, x's scale


def floating(x: Any, w: Any, w_scale: Any, x_scale: Any) -> Any:
    del w_scale, x_scale
    return x @ w


def dynamic(x: Any, w: Any, w_scale: Any, x_scale: Any) -> Any:
    del w_scale, x_scale
    return jaxquant.qat_dense(x, w)


def dynamic_int4(x: Any, w: Any, w_scale: Any, x_scale: Any) -> Any:
    del w_scale, x_scale
    return jaxquant.qat_dense(x, w, w_qtype=jnp.int4)


def learned(x: Any, w: Any, w_scale: Any, x_scale: Any) -> Any:
    return jaxquant.qat_dense(x, w, w_scale=w_scale, x_scale=x_scale)


def fake(x: Any, w: Any, w_scale: Any, x_scale: Any) -> Any:
    return jaxquant.fake_quantize(x, x_scale) @ jaxquant.fake_quantize(w, w_scale, axis=1)


def numpy_dynamic(x: Any, w: Any, w_scale: Any, x_scale: Any) -> Any:
    """As a user writes it: scales from the largest magnitudes, and the difference to the float value held constant."""
    del w_scale, x_scale

    def quantised(a: Any, axis: int) -> Any:
        scale = jnp.maximum(jnp.abs(a).max(axis, keepdims=True), 1e-12) / 127
        return a + jax.lax.stop_gradient((jnp.round(a / scale) * scale).astype(a.dtype) - a)

    return quantised(x, -1) @ quantised(w, 0)


CONTENDERS: dict[str, Dense] = {
    "dynamic": dynamic, "float": floating, "jnp": numpy_dynamic, "int4": dynamic_int4, "learned": learned, "fake": fake
}  # fmt: skip


def block(dense: Dense, p: dict[str, Any], x: Any) -> Any:
    """qat_step's, with the product of a layer as one function."""

    def layer(x: Any, name: str) -> Any:
        return dense(x, p[name], p[f"{name}.scale"], p[f"{name}.input"])

    def norm(x: Any) -> Any:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    h = norm(x)
    q, k, v = (layer(h, n).reshape(*x.shape[:2], qat_step.HEADS, -1) for n in ("query", "key", "value"))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8.0)
    x = x + layer(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape), "out")
    return x + layer(jax.nn.gelu(layer(norm(x), "up")), "down")


def step(dense: Dense) -> Callable[..., Any]:
    @partial(jax.jit, donate_argnums=0)
    def update(p: dict[str, Any], x: Any) -> dict[str, Any]:
        gradients = jax.grad(lambda p: (block(dense, p, x).astype(jnp.float32) ** 2).mean())(p)
        return jax.tree.map(lambda a, g: (a - 1e-4 * g).astype(a.dtype), p, gradients)

    return update


def parameters(dtype: Any) -> tuple[dict[str, Any], Any]:
    p, x = qat_step.transformer()
    p = {name: a if "." in name else a.astype(dtype) for name, a in p.items()}
    return p, x.astype(dtype)


def one_layer(dense: Dense, backward: bool) -> Callable[..., Any]:
    def forward(x: Any, w: Any, scale: Any) -> Any:
        return dense(x, w, scale, jnp.float32(0.03))

    def both(x: Any, w: Any, scale: Any) -> Any:
        y, vjp = jax.vjp(lambda x, w: forward(x, w, scale), x, w)
        return vjp(y)

    return jax.jit(both if backward else forward)


def residuals() -> None:
    """MiB that the backward of one layer is handed, by contender."""
    x, w, scale = (jnp.zeros((4096, 1024), jnp.bfloat16), jnp.zeros((1024, 1024), jnp.bfloat16), jnp.ones(1024))

    def held(function: Callable[..., Any], *operands: Any) -> float:
        saved = jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], *operands)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved)) / 2**20

    print("\nresiduals of bfloat16 4096 x 1024 @ 1024 x 1024, MiB (target 6)")
    for name, dense in CONTENDERS.items():
        print(f"  {name:<28}{held(lambda x, w, dense=dense: dense(x, w, scale, jnp.float32(0.03)), x, w):6.2f}")
    print(f"  {'learned, both scales':<28}{held(learned, x, w, scale, jnp.float32(0.03)):6.2f}")


def cases() -> list[harness.Case]:
    rows = []
    for dtype in (jnp.float32, jnp.bfloat16):
        kind = jnp.dtype(dtype).name
        steps = {name: step(dense) for name, dense in CONTENDERS.items()}
        rows.append(
            harness.Case(
                f"training step, transformer block, {kind}", steps, parameters(dtype), donate=True,
                targets={"float": 0.85}, least_runs=15,
            )
        )  # fmt: skip
        operands = (
            jax.random.normal(jax.random.key(0), (1024, 1024), dtype),
            jax.random.normal(jax.random.key(1), (1024, 1024), dtype) / 32,
            jnp.full((1024,), 0.001),
        )
        for backward in (False, True):
            layers = {name: one_layer(dense, backward) for name, dense in CONTENDERS.items()}
            name = f"one layer, 1024^3 {kind}, {'forward and backward' if backward else 'forward'}"
            rows.append(harness.Case(name, layers, operands, least_runs=15))
    return rows


if __name__ == "__main__":
    harness.main(__file__, "qat_dense", cases)
    residuals()
