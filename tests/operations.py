"""The operations, and the gradient of each, as functions of arrays alone: what the battery transforms."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxquant

QTYPE = {"qtype": jnp.int4}


def fake_quantize(x, scale, zero_point, *, functions=jaxquant, **keywords):
    return functions.fake_quantize(x, scale, zero_point, **QTYPE, **keywords)


def quantize(x, scale, zero_point, *, functions=jaxquant, **keywords):
    return functions.quantize(x, scale, zero_point, **QTYPE, dtype=x.dtype, **keywords)


def integer_quantize(x, scale, zero_point, **keywords):
    return jaxquant.quantize(x, scale, zero_point, **QTYPE, **keywords)


def packed_quantize(x, scale, zero_point, **keywords):
    return jaxquant.quantize(x, scale, zero_point, **QTYPE, packed=True, **keywords)


def dequantize(q, scale, zero_point, *, functions=jaxquant, **keywords):
    dtype = q.dtype if jnp.issubdtype(q.dtype, jnp.floating) else scale.dtype
    return functions.dequantize(q, scale, zero_point, dtype=dtype, **keywords)


def quantize_backward(dy, x, scale, zero_point, **keywords):
    return jaxquant.quantize_backward(dy, x, scale, zero_point, **QTYPE, **keywords)


def _granularity(axis, block_shape):
    return jaxquant.PerBlock(block_shape) if axis is None else jaxquant.PerAxis(axis)


def dynamic_fake_quantize(x, *, axis, block_shape, **keywords):
    return jaxquant.dynamic_fake_quantize(x, _granularity(axis, block_shape), **QTYPE, symmetric=False, **keywords)


def dynamic_quantize(x, *, axis, block_shape, **keywords):
    """The codes, and the values, which tell the scales."""
    q = jaxquant.dynamic_quantize(x, _granularity(axis, block_shape), qtype=jnp.uint8, symmetric=False, **keywords)
    return q.data, q.dequantize()


def gradient_of(function):
    """(dy, x, scale, zero_point) -> all three gradients: one equation of the operation's gradient primitive."""

    def call(dy, *primals, **keywords):
        return jax.vjp(lambda *a: function(*a, **keywords), *primals)[1](dy)

    return call


def pack(codes, *, axis, block_shape, **keywords):
    del axis, block_shape
    return jaxquant.pack(codes, **QTYPE, **keywords)


def unpack(packed, *, axis, block_shape, **keywords):
    del axis, block_shape
    return jaxquant.unpack(packed, **QTYPE, size=packed.shape[-1] * 2 - 1, **keywords)


@dataclasses.dataclass(frozen=True)
class Operation:
    """call(*operands, axis=, block_shape=, implementation=); sums: which of several results are sums."""

    name: str
    call: Callable
    operands: tuple
    differentiable: tuple = ()
    sums: tuple = (False,)
    model: str | None = None
    forward_mode: bool = False

    def __repr__(self):
        return self.name


_VALUE = ("x", "scale", "zero_point")
_GRADIENT = {"sums": (False, True, True)}
_TRAINED = {"differentiable": (0, 1, 2), "forward_mode": True}
OPERATIONS = [
    Operation("fake_quantize", fake_quantize, _VALUE, **_TRAINED, model="fake_quantize"),
    Operation("quantize", quantize, _VALUE, **_TRAINED, model="quantize"),
    Operation("dequantize", dequantize, ("carried", "scale", "zero_point"), **_TRAINED, model="dequantize"),
    Operation("quantize_backward", quantize_backward, ("dy", *_VALUE), (0, 1, 2, 3), model="quantize_backward"),
    Operation("fake_quantize_gradient", gradient_of(fake_quantize), ("dy", *_VALUE), (0, 1, 2, 3), **_GRADIENT),
    Operation("quantize_gradient", gradient_of(quantize), ("dy", *_VALUE), (0, 1, 2, 3), **_GRADIENT),
    Operation(
        "dequantize_gradient", gradient_of(dequantize), ("dy", "carried", *_VALUE[1:]), (0, 1, 2, 3), **_GRADIENT
    ),
    Operation("dequantize_stored", dequantize, ("codes", "scale", "zero_point"), (1, 2), model="dequantize"),
    Operation("quantize_integer", integer_quantize, _VALUE),
    Operation("quantize_packed", packed_quantize, _VALUE),
    Operation("dynamic_fake_quantize", dynamic_fake_quantize, ("x",), (0,)),
    Operation("dynamic_quantize", dynamic_quantize, ("x",), sums=(False, False)),
    Operation("pack", pack, ("codes",)),
    Operation("unpack", unpack, ("packed",)),
]
NAMED = {operation.name: operation for operation in OPERATIONS}
