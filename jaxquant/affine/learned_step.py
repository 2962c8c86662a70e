"""Learned step sizes (Esser et al., "Learned step size quantization", 2020): what a scale needs to be trained."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant._core.errors import refuse
from jaxquant.affine import granularity as granularities
from jaxquant.affine import qtypes

# A scale below it would turn quotients of ordinary values into infinities.
FLOOR = 2.0**-60


def lsq_gradient_scale(scale: Any, x_size: int, qmax: int) -> jax.Array:
    """`scale` itself, with its gradient multiplied by ``1 / sqrt(x_size * qmax)``.

    Without it the gradient of a step size is a sum over all the values it serves, and larger than that of a weight by
    orders of magnitude.

    Args:
      scale: float array.
      x_size: how many values share one step size.
      qmax: the largest code.

    >>> jax.value_and_grad(lambda s: lsq_gradient_scale(s, 100, 4).sum())(jnp.float32(0.1))
    (Array(0.1, dtype=float32), Array(0.05, dtype=float32))
    """
    scale = jnp.asarray(scale)
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise refuse("lsq_gradient_scale", "scale", "a float array", scale.dtype.name, "convert it", TypeError)
    for name, value in (("x_size", x_size), ("qmax", qmax)):
        if value < 1:
            raise refuse("lsq_gradient_scale", name, "a positive number", str(value), "both are counted, not learned")
    return _scaled_gradient(scale, 1 / math.sqrt(x_size * qmax))


@jax.custom_jvp
def _scaled_gradient(scale: Any, factor: Any) -> Any:
    del factor
    return scale


@_scaled_gradient.defjvp
def _scaled_gradient_jvp(primals: Any, tangents: Any) -> Any:
    (scale, factor), (tangent, _) = primals, tangents
    return scale, (tangent * jnp.asarray(factor, scale.dtype)).astype(scale.dtype)


def positive_scale(raw: Any) -> jax.Array:
    """A positive scale from a parameter that may take any value: ``max(softplus(raw), 2^-60)`` in float32.

    For large values softplus is the identity, so that a step of an optimiser moves the scale as far as the parameter;
    near zero it slows down in place of crossing it.

    >>> positive_scale(jnp.array([-1e9, 0.0, 20.0]))
    Array([8.6736174e-19, 6.9314718e-01, 2.0000000e+01], dtype=float32)
    """
    return jnp.maximum(jax.nn.softplus(jnp.asarray(raw, jnp.float32)), FLOOR)


def raw_scale(scale: Any) -> jax.Array:
    """The parameter whose `positive_scale` is ``scale``.

    >>> positive_scale(raw_scale(jnp.array([1e-6, 0.5]))).round(7)
    Array([1.e-06, 5.e-01], dtype=float32)
    """
    scale = jnp.maximum(jnp.asarray(scale, jnp.float32), FLOOR)
    # log(exp(s) - 1), which overflows, and loses small scales, as it stands.
    return scale + jnp.log(-jnp.expm1(-scale))


def lsq_init(
    x: Any,
    granularity: Any = granularities.PerTensor(),  # noqa: B008
    qtype: Any = jnp.int8,
) -> jax.Array:
    """The step size to begin with: ``2 * mean(|x|) / sqrt(qmax)``, over the finite values of each block.

    Args:
      x: float array.
      granularity: which elements share a step size.
      qtype: the code type; its largest code is qmax.

    Returns:
      float32 of the scale's shape, at least 2^-60; 1 for a block of zeros or without finite values.

    >>> lsq_init(jnp.array([1.0, -3.0]), qtype=jnp.int4).round(4)
    Array([1.5119], dtype=float32)
    """
    x, code = jnp.asarray(x), qtypes.lookup("lsq_init", qtype)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise refuse("lsq_init", "x", "a float array", x.dtype.name, "convert it", TypeError)
    grid = granularities.scale_shape(x.shape, granularities.resolve("lsq_init", granularity, x.shape))
    split = [size for n, m in zip(x.shape, grid, strict=True) for size in (m, n // m if m else 1)]
    absolute = jnp.abs(x.astype(jnp.float32)).reshape(split)
    finite, axes = absolute < jnp.inf, tuple(range(1, len(split), 2))
    # Shares of the mean: a sum may be beyond float32 where the mean is not.
    share = 1 / jnp.maximum(finite.sum(axis=axes, keepdims=True), 1).astype(jnp.float32)
    mean = (jnp.where(finite, absolute, 0) * share).sum(axis=axes)
    scale = mean * np.float32(2 / math.sqrt(code.qmax))
    return jnp.where(scale > 0, jnp.clip(scale, FLOOR, 2.0**126), 1)
