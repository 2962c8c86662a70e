"""Histograms, percentiles and range searches beside the jax.numpy a user would write.

python benchmarks/observers.py [--only WORDS] [--quick]
"""

from __future__ import annotations

import argparse
from typing import Any

import harness
import jax
import jax.numpy as jnp

import jaxquant
from jaxquant import PerAxis, PerTensor, observers
from jaxquant.affine import search

SIDE = 4096  # 16M elements, 64 MiB of float32


def jnp_mse_range(x: Any) -> Any:
    """The clipping range of int8 of least squared error, of 32, on the values themselves."""
    largest = jnp.abs(x).max()

    def error(fraction: Any) -> Any:
        scale = largest * fraction / 127
        return ((jnp.clip(jnp.round(x / scale), -127, 127) * scale - x) ** 2).mean()

    fractions = 2.0 ** (-jnp.arange(32) / 16)
    return largest * fractions[jax.lax.map(error, fractions).argmin()]


def cases(quick: bool = False, only: str = "") -> list[harness.Case]:
    side = SIDE // 4 if quick else SIDE
    x = jax.random.normal(jax.random.key(0), (side, side))
    half = x.astype(jnp.bfloat16)
    absolute = jnp.abs(x)
    size = "1M" if quick else "16M"
    few = {"least_runs": 5}  # a peer takes seconds

    def histogram(x: Any, granularity: Any = PerTensor(), low: float = -5.0) -> Any:  # noqa: B008
        return observers.histogram(x, low, 5.0, granularity, magnitude=low == 0)

    def percentile(x: Any, granularity: Any = PerTensor()) -> Any:  # noqa: B008
        return observers.percentile(x, 99.9, granularity, magnitude=True)

    observer = observers.Histogram()
    state = observer.init(x.shape)
    absmax = observers.AbsMax()
    rows = [
        harness.Case(
            f"histogram of 2048 bins, {size} f32",
            {
                "ours": jax.jit(histogram),
                "jnp.histogram": jax.jit(lambda x: jnp.histogram(x, 2048, (-5.0, 5.0))[0]),
            },
            (x,),
            targets={"jnp.histogram": 0.02},
            **few,
        ),
        harness.Case(
            f"histogram of 2048 bins, {size} bf16",
            {
                "ours": jax.jit(histogram),
                "jnp.histogram": jax.jit(lambda x: jnp.histogram(x.astype(jnp.float32), 2048, (-5.0, 5.0))[0]),
            },
            (half,),
            targets={"jnp.histogram": 0.02},
            **few,
        ),
        harness.Case(
            f"percentile 99.9 of |x|, {size} f32",
            {
                "ours": jax.jit(percentile),
                "jnp.percentile": jax.jit(lambda x: jnp.percentile(jnp.abs(x), 99.9)),
            },
            (x,),
            targets={"jnp.percentile": 0.01},
            least_runs=3,
        ),
        harness.Case(
            f"percentile 99.9 of |x|, {size} bf16",
            {
                "ours": jax.jit(percentile),
                "jnp.percentile": jax.jit(lambda x: jnp.percentile(jnp.abs(x), 99.9)),
            },
            (half,),
            targets={"jnp.percentile": 0.01},
            least_runs=3,
        ),
        harness.Case(
            f"percentile 99.9 of |x| per row, {size} f32",
            {
                "ours": jax.jit(lambda x: percentile(x, PerAxis(0))),
                "jnp.percentile": jax.jit(lambda x: jnp.percentile(jnp.abs(x), 99.9, axis=1)),
            },
            (x,),
            least_runs=3,
        ),
        harness.Case(
            f"percentile 99.9 of |x| per column, {size} f32",
            {
                "ours": jax.jit(lambda x: percentile(x, PerAxis(1))),
                "jnp.percentile": jax.jit(lambda x: jnp.percentile(jnp.abs(x), 99.9, axis=0)),
            },
            (x,),
            least_runs=3,
        ),
        harness.Case(
            f"histogram per column, {size} f32", {"ours": jax.jit(lambda x: histogram(x, PerAxis(1), 0.0))}, (x,)
        ),
        harness.Case(
            f"least squared error range, {size} f32",
            {
                "ours": jax.jit(lambda x: search.mse_range(x, x.shape, -127, 127, True)),
                "jnp, 32 ranges": jax.jit(jnp_mse_range),
            },
            (x,),
            **few,
        ),
        harness.Case(
            f"least squared error range, asymmetric, {size} f32",
            {"ours": jax.jit(lambda x: search.mse_range(x, x.shape, 0, 255, False))},
            (x,),
        ),
        harness.Case(
            f"least squared error range per column, {size} f32",
            {"ours": jax.jit(lambda x: search.mse_range(x, (x.shape[0], 1), -127, 127, True))},
            (x,),
            **few,
        ),
        harness.Case(
            f"observers.Histogram().update, {size} f32",
            {"ours": jax.jit(observer.update), "jnp.abs(x).max()": jax.jit(lambda state, x: jnp.abs(x).max())},
            (state, x),
        ),
        harness.Case(
            f"observers.AbsMax().update, {size} f32", {"ours": jax.jit(absmax.update)}, (absmax.init(x.shape), x)
        ),
        harness.Case("observers.Histogram().qparams", {"ours": jax.jit(observer.qparams)}, (state,)),
        harness.Case(
            'observers.Histogram(search="kl").qparams',
            {"ours": jax.jit(observers.Histogram(search="kl").qparams)},
            (observer.update(state, absolute),),
        ),
    ]
    return [case for case in rows if all(word in case.name for word in only.split())]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="words that a row's name must hold")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the elements")
    arguments = parser.parse_args()
    assert jaxquant.info()
    harness.main(__file__, "observers", lambda: cases(arguments.quick, arguments.only))
