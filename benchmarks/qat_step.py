"""A whole training step with fake-quantised weights and activations, beside the same step in float.

Two networks: a transformer block, and a small convolutional classifier like that of examples/qat_digits.py.

    python benchmarks/qat_step.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp

import jaxquant

WIDTH, HEADS, LENGTH, BATCH = 512, 8, 128, 4
Quantiser = Callable[..., Any]


def no_quantiser(x: Any, scale: Any, axis: int | None = None) -> Any:
    del scale, axis
    return x


def ours(implementation: str | None) -> Quantiser:
    return lambda x, scale, axis=None: jaxquant.fake_quantize(x, scale, axis=axis, implementation=implementation)


@jax.custom_vjp
def _jnp_fake(x: Any, scale: Any) -> Any:
    return jnp.clip(jnp.round(x / scale), -128, 127) * scale


def _jnp_fake_backward(saved: Any, dy: Any) -> Any:
    x, scale = saved
    t = x / scale
    rounded = jnp.round(t)
    inside = (rounded >= -128) & (rounded <= 127)
    terms = dy * jnp.where(inside, rounded - t, jnp.clip(rounded, -128, 127))
    axes = tuple(d for d, m in enumerate(scale.shape) if m == 1)
    return jnp.where(inside, dy, 0), terms.sum(axes, keepdims=True)


_jnp_fake.defvjp(lambda x, s: (_jnp_fake(x, s), (x, s)), _jnp_fake_backward)


def jnp_quantiser(x: Any, scale: Any, axis: int | None = None) -> Any:
    shape = [1] * x.ndim
    if axis is not None:
        shape[axis] = -1
    return _jnp_fake(x, jnp.reshape(scale, shape))


def block(quantise: Quantiser, p: dict[str, Any], x: Any) -> Any:
    def dense(x: Any, name: str) -> Any:
        x = quantise(x, p[f"{name}.input"])
        return x @ quantise(p[name], p[f"{name}.scale"], axis=1)

    def norm(x: Any) -> Any:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    h = norm(x)
    q, k, v = (dense(h, n).reshape(*x.shape[:2], HEADS, -1) for n in ("query", "key", "value"))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8.0)
    x = x + dense(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape), "out")
    return x + dense(jax.nn.gelu(dense(norm(x), "up")), "down")


def transformer() -> tuple[dict[str, Any], Any]:
    shapes = dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    p: dict[str, Any] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        p[name] = jax.random.normal(jax.random.key(i), shape) / shape[0] ** 0.5
        p[f"{name}.scale"] = jnp.abs(p[name]).max(0) / 127
        p[f"{name}.input"] = jnp.float32(0.03)
    return p, jax.random.normal(jax.random.key(9), (BATCH, LENGTH, WIDTH))


def classifier(quantise: Quantiser, p: dict[str, Any], x: Any) -> Any:
    for name, stride in (("a", 1), ("b", 2), ("c", 2)):
        x = quantise(x, p[f"{name}.input"])
        kernel = quantise(p[name], p[f"{name}.scale"], axis=3)
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(
                x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
    x = quantise(x.reshape(x.shape[0], -1), p["d.input"])
    return x @ quantise(p["d"], p["d.scale"], axis=1)


def digits() -> tuple[dict[str, Any], Any]:
    shapes = {"a": (3, 3, 1, 16), "b": (3, 3, 16, 32), "c": (3, 3, 32, 32), "d": (128, 10)}
    p: dict[str, Any] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        p[name] = jax.random.normal(jax.random.key(i), shape) * 0.1
        p[f"{name}.scale"] = jnp.abs(p[name]).max(tuple(range(len(shape) - 1))) / 127
        p[f"{name}.input"] = jnp.float32(0.03)
    return p, jax.random.normal(jax.random.key(9), (64, 8, 8, 1))


def step(network: Callable[..., Any], quantise: Quantiser) -> Callable[..., Any]:
    @partial(jax.jit, donate_argnums=0)
    def update(p: dict[str, Any], x: Any) -> dict[str, Any]:
        gradients = jax.grad(lambda p: (network(quantise, p, x) ** 2).mean())(p)
        return jax.tree.map(lambda a, g: a - 1e-4 * g, p, gradients)

    return update


def cases() -> list[harness.Case]:
    rows = []
    for name, network, make, repeat in (
        ("transformer block", block, transformer, 1),
        ("digits network", classifier, digits, 20),
    ):
        p, x = make()
        quantisers = {"ours": ours(None), "float": no_quantiser, "jnp": jnp_quantiser, "xla": ours("xla")}
        steps = {contender: step(network, quantise) for contender, quantise in quantisers.items()}
        rows.append(
            harness.Case(
                f"training step, {name}, 8-bit, learned scales", steps, (p, x), donate=True,
                targets={"float": 1.05}, least_runs=25, repeat=repeat,
            )
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    harness.main(__file__, "qat_step", cases)
