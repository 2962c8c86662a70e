"""The scales of layers, learned, observed or chosen at each call, and operands quantised by them.

`Scales` is what a layer holds; quantised() gives codes, for inference and the value of training; rounded() gives what
these stand for, straight through, for gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxquant._core.errors import refuse
from jaxquant.affine import choose, qtypes
from jaxquant.affine import granularity as granularities
from jaxquant.affine.dynamic import dynamic_fake_quantize, dynamic_quantize
from jaxquant.affine.fake_quantize import fake_quantize
from jaxquant.affine.learned_step import lsq_gradient_scale
from jaxquant.affine.qarray import QArray
from jaxquant.affine.qparams import QParams
from jaxquant.affine.quantize import quantize
from jaxquant.nn.rules import Spec


class Scales(NamedTuple):
    """Scales that a layer holds. None: chosen at each call.

    Learned ones are exponents (`scale_of`). That of the input may be constant instead: a `QParams`, or the state of
    ``spec.x_observer``, which stands for one.
    """

    kernel: Any = None
    input: Any = None


class How(NamedTuple):
    """How one operand is quantised."""

    qtype: Any
    granularity: Any
    symmetric: bool = True


# -------------------------------------------------------------------------------------------------------------- learned


def scale_of(exponent: Any) -> jax.Array:
    """The scale of an exponent: 2 to its power where it is whole, and linear between.

    Steps of an optimiser change such a scale by a proportion, and it stays positive. In place of an exponential, since
    this has the same bits wherever it is computed: in training, and when scales are made constants.
    """
    exponent = jnp.clip(jnp.asarray(exponent, jnp.float32), -60, 60)
    whole = jnp.floor(exponent)
    power = jax.lax.bitcast_convert_type((whole.astype(jnp.int32) + 127) << 23, jnp.float32)
    return power * (1 + (exponent - jax.lax.stop_gradient(whole)))


def exponent_of(scale: Any) -> jax.Array:
    """The inverse of `scale_of`."""
    mantissa, power = jnp.frexp(jnp.asarray(scale, jnp.float32))
    return 2 * mantissa - 2 + power


# Compiled as one where models are calibrated outside jit, once for each shape.
@functools.partial(jax.jit, static_argnames="how")
def initial_scale(a: Any, how: How) -> jax.Array:
    """The parameter to begin with: of the scale with the least squared error."""
    signed = qtypes.lookup("initial_scale", how.qtype).qmin < 0
    # Of an unsigned type the range of values that are not negative: its zero point is then 0.
    values = a if signed else jnp.maximum(a, 0)
    q = choose.choose_qparams(
        values, how.granularity, qtype=how.qtype, symmetric=signed, narrow_range=False, method="mse"
    )
    return exponent_of(q.scale)


# ------------------------------------------------------------------------------------------------------------- observed


def observed(observer: Any, state: Any, x: Any) -> Any:
    """The state of an observer with one scale, whose arrays are scalars, after inputs x of any rank. None: before."""
    state = observer.init(()) if state is None else state
    if x is None:
        return state
    shaped = {name: value.reshape(*(1,) * x.ndim, *value.shape) for name, value in state.items()}
    return {name: value.reshape(state[name].shape) for name, value in observer.update(shaped, x).items()}


def settled(spec: Spec, scales: Scales) -> Scales:
    """The scales, with the parameters that an observer's state stands for in its place."""
    if isinstance(scales.input, dict):
        return scales._replace(input=spec.x_observer.qparams(scales.input))
    return scales


# ------------------------------------------------------------------------------------------------------------- operands


def parameters(a: Any, how: How, given: Any) -> QParams:
    """Those of an operand: a learned scale's exponent, or constants."""
    if isinstance(given, QParams):
        return _constants(a, given)
    scale = scale_of(given)
    shared = max(math.prod(a.shape) // max(scale.size, 1), 1)
    block = choose.whole_axes(granularities.resolve("nn", how.granularity, a.shape), a.shape)
    scale = lsq_gradient_scale(scale.reshape(choose.scale_shape(a.shape, block)), shared, jnp.iinfo(how.qtype).max)
    return QParams(scale, None, how.qtype, block_shape=block)


def _constants(a: Any, given: QParams) -> QParams:
    def of_rank(value: Any) -> Any:
        value = jax.lax.stop_gradient(jnp.asarray(value))
        if value.size != 1:
            remedy = "observe with PerTensor()"
            raise refuse("nn", "input_scale", "one scale for all inputs of a layer", f"shape {value.shape}", remedy)
        return value.reshape((1,) * a.ndim)

    zero_point = None if given.zero_point is None else of_rank(given.zero_point)
    return dataclasses.replace(given, scale=of_rank(given.scale), zero_point=zero_point, block_shape=None)


def quantised(a: Any, how: How, given: Any = None) -> QArray:
    """The codes of an operand: those of training and of inference."""
    if given is None:
        return dynamic_quantize(a, how.granularity, qtype=how.qtype, symmetric=how.symmetric)
    q = jax.lax.stop_gradient(parameters(a, how, given))
    codes = quantize(jax.lax.stop_gradient(a), q)
    return QArray.from_codes(codes, q.scale, q.zero_point, qtype=q.qtype, qmin=q.qmin, qmax=q.qmax)


def rounded(a: Any, how: How, given: Any = None) -> jax.Array:
    """The values of those codes, straight through."""
    if given is None:
        return dynamic_fake_quantize(a, how.granularity, qtype=how.qtype, symmetric=how.symmetric)
    return fake_quantize(a, parameters(a, how, given))
