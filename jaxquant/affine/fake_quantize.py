"""Fake quantisation: the value a quantised x would have, kept in floating point, with straight-through gradients.

fake_quantize()  ->  [stochastic_]fake_quantize  ->  ffi/affine/fake_quantize/{cpu.cc,cuda.cu}  ->  math.h
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxquant._core import ffi
from jaxquant._core.primitive import Operation, Result, bind, build
from jaxquant.affine import scales, stochastic
from jaxquant.affine.custom_rules import straight_through
from jaxquant.affine.exact import over, seal
from jaxquant.affine.straight_through import PARAMETERS, Family, Terms, build_gradient, value_jvp


def fake_quantize(
    x: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    axis: int | None = None,
    block_shape: tuple[int, ...] | None = None,
    qtype: Any = jnp.int8,
    qmin: int | None = None,
    qmax: int | None = None,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    key: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """Rounds ``x`` to the grid of ``scale`` and ``zero_point`` and returns it in x's dtype.

    ``y = (clamp(round(x / scale) + zero_point, qmin, qmax) - zero_point) * scale``, rounding half to even, in float32
    (float64 for float64 x). Equals ``dequantize(quantize(x))`` bit for bit, NaN excepted.

    Args:
      x: float32, float64, float16 or bfloat16 array of any shape.
      scale: positive float; a scalar (per tensor), ``[C]`` with ``axis`` (per channel), an array of x's rank whose axes
        are 1 or x's (per token, mixed), or one value per block with ``block_shape``. A `QParams` stands for scale and
        the parameters below. Any float dtype; converted once.
      zero_point: None (0), an integer or a float (learned, used rounded), broadcasting to the scale's shape.
      axis: the channel axis of a 1-D scale; negative counts from the end.
      block_shape: one block size per axis of x, -1 for the whole axis; each must divide.
      qtype: int8, uint8, int4, uint4, int2, uint2, int16 or uint16.
      qmin, qmax: the code range; by default the full range of ``qtype``.
      rounding: "nearest" (half to even) or "stochastic": up with the probability of the fraction, so that the result is
        x on average. It takes a key.
      key: a threefry2x32 key, typed or its two uint32 words; as everywhere in JAX, a new one for each call. The key and
        an element's row-major index in x alone decide its direction (`jaxquant.affine.stochastic` has the rule):
        eager, under jit, sharded and in the backward pass alike. Under vmap each example is an array of its own: with
        one key all of them draw the same, so map over split keys too. Inside shard_map x is the shard; fold
        ``jax.lax.axis_index`` into the key there, or shards draw the same.
      implementation: None chooses; "ffi" the kernels; "xla" jax.numpy, which XLA may fuse.

    Returns:
      An array of x's shape and dtype. NaN stays NaN; what lies outside the range saturates.

    Raises:
      ValueError, TypeError: at trace time, naming the operand, what was expected and what to do.

    Gradients (straight-through, recomputed from x, scale and zero_point): ``dy`` where the rounded value was in range,
    else 0. For the scale ``dy * (round(x / scale) - x / scale)`` in range, ``dy * (qmax - zero_point)`` above and
    ``dy * (qmin - zero_point)`` below, summed over the elements that share it (LSQ: Esser et al., 2020); for a float
    zero point ``-scale * dy`` outside the range (LSQ+: Bhalgat et al., 2020). Second and higher order hold mask and
    rounding residual constant. Under stochastic rounding ``round`` is what the key drew, drawn again. Reverse mode and
    forward over reverse work; for direct forward mode (``jax.jvp``) use `jaxquant.forward_mode.fake_quantize`.

    >>> fake_quantize(jnp.array([0.26, 9.0]), 0.1, qtype=jnp.int4)
    Array([0.3, 0.7], dtype=float32)
    >>> fake_quantize(jnp.full(5, 0.26), 0.1, rounding="stochastic", key=jax.random.key(0))
    Array([...], dtype=float32)
    """
    operands, params = _resolve(
        x, scale, zero_point, axis, block_shape, qtype, qmin, qmax, rounding, key, implementation
    )
    return FAKE_QUANTIZE[len(operands) > 3].straight_through(params, *operands)


def fake_quantize_forward_mode(
    x: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    axis: int | None = None,
    block_shape: tuple[int, ...] | None = None,
    qtype: Any = jnp.int8,
    qmin: int | None = None,
    qmax: int | None = None,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    key: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """`fake_quantize` without its custom_vjp: the same values, differentiable by ``jvp`` and ``linearize`` as well.

    Reverse mode works too and gives the same gradients; sums for the scale and the zero point are then XLA's.

    >>> jax.jvp(lambda x: fake_quantize(x, 0.5), (jnp.float32(1.2),), (jnp.float32(1.0),))
    (Array(1., dtype=float32), Array(1., dtype=float32))
    """
    operands, params = _resolve(
        x, scale, zero_point, axis, block_shape, qtype, qmin, qmax, rounding, key, implementation
    )
    return bind(FAKE_QUANTIZE[len(operands) > 3].value, *operands, **dict(params))


def _resolve(x, scale, zero_point, axis, block_shape, qtype, qmin, qmax, rounding, key, implementation):
    name = "fake_quantize"
    x = scales.as_float_array(name, "x", x)
    r = scales.resolve(name, x, scale, zero_point, axis, block_shape, qtype, qmin, qmax)
    implementation = ffi.check_implementation(name, implementation)
    operands, placed = stochastic.operands(name, rounding, key, r)
    return operands, (("qmin", r.qmin), ("qmax", r.qmax), *placed, ("implementation", implementation))


def _reference(x: Any, scale: Any, zero_point: Any, *key: Any, qmin: int, qmax: int, index_rank: int = 0) -> Any:
    """The rule in jax.numpy. The result is sealed, so that its product is not contracted into a later addition."""
    x_real = x.astype(scale.dtype)
    full_scale, full_zero = over(x_real, scale, zero_point)
    v = stochastic.rounding(x.shape, key, index_rank)(x_real / full_scale) + full_zero
    q = jnp.clip(v, qmin, qmax)
    return seal(((q - full_zero) * full_scale).astype(x.dtype))


def _first(dy: Any, x: Any, scale: Any, zero_point: Any, qmin: int, qmax: int, rounding: Any) -> Any:
    t = x / scale
    rounded = rounding(t)
    v = rounded + zero_point
    above, below, inside = v > qmax, v < qmin, (v >= qmin) & (v <= qmax)
    edge = jnp.where(above, qmax, qmin).astype(x.dtype) - zero_point
    dscale = jnp.where(inside, dy * (rounded - t), jnp.where(above | below, dy * edge, 0))
    return jnp.where(inside, dy, 0), dscale, jnp.where(above | below, -(scale * dy), 0)


def _smooth(dy: Any, x: Any, scale: Any, zero_point: Any, inside: Any, outside: Any) -> Any:
    del x
    # Selected, as in the terms themselves: a NaN upstream that they drop must not come back in their derivatives.
    kept = jnp.where(outside > 0, dy, 0)
    return jnp.where(inside > 0, dy, 0), -kept * zero_point, -kept * scale


def _to_gradient(**params: Any) -> dict[str, Any]:
    return params


def _build(name: str, keyed: bool) -> Family:
    value = build(
        Operation(
            name=name,
            operands=("full", *PARAMETERS[keyed]),
            results=lambda x, *_, **__: [Result("full", x.shape, x.dtype)],
            reference=_reference,
            attributes=lambda *, qmin, qmax, **_: {"qmin": qmin, "qmax": qmax, "packed_bits": 0},
            placed=keyed,
        )
    )
    slope = build_gradient(name, Terms(_first, _smooth), keyed=keyed)
    ad.primitive_jvps[value] = partial(value_jvp, value, slope, _to_gradient)
    return Family(value, slope, straight_through(value, slope, _to_gradient))


# By whether it takes a key.
FAKE_QUANTIZE = {False: _build("fake_quantize", False), True: _build("stochastic_fake_quantize", True)}
fake_quantize_p, fake_quantize_gradient_p, _ = FAKE_QUANTIZE[False]
stochastic_fake_quantize_p, stochastic_fake_quantize_gradient_p, _ = FAKE_QUANTIZE[True]
