"""SmoothQuant (Xiao et al., "SmoothQuant: accurate and efficient post-training quantization for large language models",
2022): outliers of activations move into the weights, channel by channel, where they do less harm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxquant._core.errors import refuse


def smoothquant_factors(activation_absmax: Any, weight_absmax: Any, alpha: float = 0.5) -> jax.Array:
    """``activation_absmax**alpha / weight_absmax**(1 - alpha)``: divisors of activations, multipliers of weights.

    Args:
      activation_absmax: ``[k]``, the largest magnitude of each input channel over calibration data; see
        ``jaxquant.observers.AbsMax(PerAxis(-1))``.
      weight_absmax: ``[k]``, the largest magnitude in each row of w ``[k, n]``.
      alpha: how much moves into the weights, from 0 (weights become even) to 1 (activations do).

    Returns:
      float32 ``[k]``, positive and finite, within [2^-60, 2^60]; 1 for a channel of which nothing is known: where
      either maximum is 0, not finite or negative. Differentiable nowhere in particular: calibration is not trained.

    >>> smoothquant_factors(jnp.array([16.0, 1.0, 0.0]), jnp.array([1.0, 4.0, 1.0]))
    Array([4. , 0.5, 1. ], dtype=float32)
    """
    if not 0 <= alpha <= 1:
        raise refuse("smoothquant_factors", "alpha", "a number from 0 to 1", repr(alpha), "0.5 suits most models")
    a, w = jnp.asarray(activation_absmax, jnp.float32), jnp.asarray(weight_absmax, jnp.float32)
    if a.shape != w.shape:
        remedy = "both have a value for each input channel"
        raise refuse("smoothquant_factors", "weight_absmax", f"shape {a.shape}", str(w.shape), remedy)
    known = (a > 0) & (a < jnp.inf) & (w > 0) & (w < jnp.inf)
    a, w = jnp.where(known, a, 1), jnp.where(known, w, 1)
    # Two powers, not one exponential of logarithms: round numbers stay round.
    return jnp.clip(jnp.power(a, alpha) / jnp.power(w, 1 - alpha), 2.0**-60, 2.0**60)


def smooth(x: Any, w: Any, factors: Any) -> tuple[jax.Array, jax.Array]:
    """``(x / factors, w * factors[:, None])``: the same product, easier to quantise.

    Args:
      x: activations ``[..., k]``, float. In a model the division goes into the layer in front (a norm's weights).
      w: weights ``[..., k, n]``, float.
      factors: ``[k]`` of `smoothquant_factors`.

    Returns:
      Both in their own dtypes. Gradients: of the two operations.

    >>> smooth(jnp.array([[8.0, 1.0]]), jnp.array([[1.0], [2.0]]), jnp.array([4.0, 0.5]))
    (Array([[2., 2.]], dtype=float32), Array([[4.],
           [1.]], dtype=float32))
    """
    x, w, factors = jnp.asarray(x), jnp.asarray(w), jnp.asarray(factors)
    k = factors.shape[-1] if factors.ndim == 1 else -1
    if x.ndim < 1 or w.ndim < 2 or x.shape[-1] != k or w.shape[-2] != k:
        got = f"x {x.shape}, w {w.shape}, factors {factors.shape}"
        raise refuse("smooth", "x, w, factors", "shapes [..., k], [..., k, n] and [k]", got, "one factor per channel")
    real_x, real_w = jnp.promote_types(x.dtype, jnp.float32), jnp.promote_types(w.dtype, jnp.float32)
    return (x.astype(real_x) / factors).astype(x.dtype), (w.astype(real_w) * factors[:, None]).astype(w.dtype)
