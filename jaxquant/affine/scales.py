"""The shape contract of scales and zero points: every spelling becomes arrays of x's rank.

    per tensor   scale ()                       -> (1, 1, ..., 1)
    per channel  scale (C,) with axis           -> (1, ..., C, ..., 1)
    mixed        scale of x's rank, 1 or x's    -> itself (per token: the last axis 1)
    blocks       scale of x's rank, x's / block -> itself, only with block_shape

Blocks are never guessed: without block_shape a scale that does not fit is an error.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant._core import compat
from jaxquant._core.errors import refuse
from jaxquant.affine import qtypes
from jaxquant.affine.qparams import QParams

FLOATS = ("float32", "float64", "float16", "bfloat16")


class Resolved(NamedTuple):
    """Operands as the primitives take them. scale and zero_point have x's rank and the arithmetic type."""

    x: jax.Array
    scale: jax.Array
    zero_point: jax.Array
    qtype: qtypes.QType
    qmin: int
    qmax: int


def arithmetic_dtype(dtype: Any) -> Any:
    """float64 for float64, else float32: 16-bit floats are never computed in."""
    return jnp.dtype(jnp.float64) if jnp.dtype(dtype) == jnp.float64 else jnp.dtype(jnp.float32)


def as_float_array(operation: str, name: str, x: Any) -> jax.Array:
    if isinstance(x, (bool, int, float, list, tuple)) or not hasattr(x, "dtype"):
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.integer):
            raise refuse(
                operation, name, f"a floating array ({', '.join(FLOATS)})", str(x.dtype), "convert it", TypeError
            )
    if jnp.dtype(x.dtype).name not in FLOATS:
        raise refuse(operation, name, f"a floating array ({', '.join(FLOATS)})", str(x.dtype), "convert it", TypeError)
    return jnp.asarray(x)


def resolve(
    operation: str,
    x: jax.Array,
    scale: Any,
    zero_point: Any,
    axis: Any,
    block_shape: Any,
    qtype: Any,
    qmin: Any,
    qmax: Any,
    *,
    arithmetic: Any = None,
    operand: str = "x",
) -> Resolved:
    """Checks everything that can be checked at trace time; raises ValueError or TypeError naming the operand.

    qtype None: the operation has no code range (dequantize).
    """
    if isinstance(scale, QParams):
        given = {"zero_point": zero_point, "block_shape": block_shape, "qmin": qmin, "qmax": qmax}
        extra = [name for name, value in given.items() if value is not None]
        if qtype is not None and qtypes.lookup(operation, qtype).name not in (
            "int8",
            qtypes.lookup(operation, scale.qtype).name,
        ):
            extra.append("qtype")
        if extra:
            raise refuse(
                operation,
                "scale",
                "a QParams alone: it holds the other parameters",
                f"a QParams and {', '.join(extra)}",
                "drop these keywords or set them in the QParams",
            )
        params = scale
        scale, zero_point, block_shape = params.scale, params.zero_point, params.block_shape
        qtype, qmin, qmax = params.qtype, params.qmin, params.qmax
    code = qtypes.QTYPES["int16"] if qtype is None else qtypes.lookup(operation, qtype)
    low, high = qtypes.code_range(operation, code, qmin, qmax)

    if isinstance(scale, (list, tuple)):
        scale = np.asarray(scale)
    dtype = arithmetic_dtype(x.dtype if arithmetic is None else arithmetic)
    if isinstance(scale, (bool, np.bool_)) or (
        not isinstance(scale, float) and not jnp.issubdtype(jnp.result_type(scale), jnp.floating)
    ):
        got = f"{jnp.result_type(scale)}"
        raise refuse(operation, "scale", "a floating scalar or array", got, "convert it to float32", TypeError)
    scale = jnp.asarray(scale).astype(dtype)
    shape = _scale_shape(operation, x.shape, scale.shape, axis, block_shape, operand)
    # The zero point is laid out by the scale's own shape, before the scale takes x's rank.
    zero = _zero_point(operation, zero_point, scale.shape, shape, dtype, None if qtype is None else (low, high))
    scale = scale.reshape(shape)
    x, scale, zero = compat.match_varying_axes(x, scale, zero)
    return Resolved(x, scale, zero, code, low, high)


def normalise_axis(operation: str, axis: Any, shape: tuple[int, ...], operand: str = "x") -> int:
    try:
        index = operator.index(axis)
    except TypeError:
        raise refuse(
            operation, "axis", "one integer", f"{axis!r}", "give x's rank to the scale for several axes", TypeError
        ) from None
    if not -len(shape) <= index < len(shape):
        expected = f"an axis of {operand} with shape {_text(shape)}, from {-len(shape)} to {len(shape) - 1}"
        raise refuse(operation, "axis", expected, str(index), f"choose one of {operand}'s axes")
    return index % len(shape)


def _scale_shape(operation: str, x: Any, scale: Any, axis: Any, block_shape: Any, operand: str) -> tuple[Any, ...]:
    """The scale's shape at x's rank."""
    if block_shape is not None:
        return _block_scale_shape(operation, x, scale, axis, block_shape, operand)
    if len(scale) == 0:
        if axis is not None:
            got = f"axis={axis!r} with a scalar scale"
            raise refuse(operation, "axis", "None for a scale per tensor", got, "drop axis, or give a 1-D scale")
        return (1,) * len(x)
    if axis is not None:
        d = normalise_axis(operation, axis, x, operand)
        if len(scale) != 1:
            if len(scale) == len(x):
                got = f"axis={axis!r} with a scale of shape {_text(scale)}"
                raise refuse(operation, "axis", "None for a scale of x's rank", got, "drop axis")
            raise refuse(
                operation, "scale", "a 1-D scale with axis", f"shape {_text(scale)}", "give one scale per channel"
            )
        if scale[0] != x[d]:
            raise refuse(
                operation,
                "scale",
                f"shape ({x[d]},), one for each index of axis {d} of {operand} with shape {_text(x)}",
                f"shape {_text(scale)}",
                f"give one scale per channel, a scalar, or an array of {operand}'s rank",
            )
        return tuple(scale[0] if i == d else 1 for i in range(len(x)))
    if len(scale) != len(x):
        remedy = f"pass axis= for a scale per channel, a scalar, or an array of {operand}'s rank"
        raise refuse(
            operation,
            "scale",
            f"a scalar or {operand}'s rank, for {operand} of shape {_text(x)}",
            f"shape {_text(scale)}",
            remedy,
        )
    for d, (n, m) in enumerate(zip(x, scale, strict=True)):
        if m != n and m != 1:
            remedy = f"give 1 or {n} there, or block_shape= if it counts blocks"
            expected = f"1 or {n} on axis {d}, for {operand} of shape {_text(x)}"
            raise refuse(operation, "scale", expected, f"shape {_text(scale)}", remedy)
    return tuple(scale)


def _block_scale_shape(
    operation: str, x: Any, scale: Any, axis: Any, block_shape: Any, operand: str
) -> tuple[Any, ...]:
    if axis is not None:
        raise refuse(operation, "axis", "None with block_shape", f"axis={axis!r}", "drop one of them")
    try:
        blocks = tuple(operator.index(b) for b in block_shape)
    except TypeError:
        raise refuse(
            operation, "block_shape", "a tuple of integers", f"{block_shape!r}", "give one size per axis", TypeError
        ) from None
    if len(blocks) != len(x):
        expected = f"one size per axis of {operand} with shape {_text(x)}"
        raise refuse(
            operation, "block_shape", expected, f"{blocks}", "use -1 for a whole axis and 1 for single elements"
        )
    expected_shape = []
    for d, (n, b) in enumerate(zip(x, blocks, strict=True)):
        if b == -1:
            expected_shape.append(1)
            continue
        if b < 1 or n % b:
            expected = f"a divisor of {n} (or -1) on axis {d}, for {operand} of shape {_text(x)}"
            raise refuse(
                operation, "block_shape", expected, f"{blocks}", f"pad {operand} or choose a size that divides it"
            )
        expected_shape.append(n // b)
    if tuple(scale) != tuple(expected_shape):
        expected = f"shape {_text(expected_shape)} for {operand} of shape {_text(x)} in blocks of {blocks}"
        raise refuse(operation, "scale", expected, f"shape {_text(scale)}", "give one scale per block")
    return tuple(expected_shape)


def _zero_point(
    operation: str, zero_point: Any, given: Any, shape: Any, dtype: Any, limits: tuple[int, int] | None
) -> jax.Array:
    """At x's rank, with the scale's size or 1 on each axis. Integers carry no gradient."""
    if isinstance(zero_point, (list, tuple)):
        zero_point = np.asarray(zero_point)
    if zero_point is None:
        return jnp.zeros((1,) * len(shape), dtype)
    if isinstance(zero_point, (bool, np.bool_)) or jnp.result_type(zero_point) == jnp.bool_:
        raise refuse(operation, "zero_point", "None, an integer or a float", "bool", "convert it", TypeError)
    kind = jnp.result_type(zero_point)
    integer = jnp.issubdtype(kind, jnp.integer)
    if not integer and not jnp.issubdtype(kind, jnp.floating):
        raise refuse(operation, "zero_point", "None, an integer or a float", str(kind), "convert it", TypeError)
    if integer and limits is not None and isinstance(zero_point, (int, np.integer, np.ndarray)):
        values = np.asarray(zero_point)
        if values.size and (values.min() < limits[0] or values.max() > limits[1]):
            got = str(values) if values.ndim == 0 else f"values from {values.min()} to {values.max()}"
            remedy = "move it into the range, or widen qmin and qmax"
            raise refuse(operation, "zero_point", f"within [{limits[0]}, {limits[1]}]", got, remedy)
    value = jnp.asarray(zero_point)
    try:
        fits = jnp.broadcast_shapes(value.shape, given) == tuple(given)
    except ValueError:
        fits = False
    if not fits:
        remedy = "give one zero point per scale, or a scalar"
        raise refuse(
            operation,
            "zero_point",
            f"a shape that broadcasts to the scale's {_text(given)}",
            _text(value.shape),
            remedy,
        )
    value = value.astype(dtype)
    if integer:
        value = jax.lax.stop_gradient(value)
        if value.ndim == 0 or value.shape == (1,) * value.ndim:
            return value.reshape((1,) * len(shape))
    # A learned zero point has its gradient summed like the scale's, so it takes the scale's shape.
    return jnp.broadcast_to(value, given).reshape(shape)


def _text(shape: Any) -> str:
    inner = ", ".join(str(n) for n in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"


# ----------------------------------------------------------------------------------- used by references and derivatives


def spread(parameter: jax.Array, shape: tuple[Any, ...]) -> jax.Array:
    """A scale or zero point over an array's shape, blocks included."""
    for d, (n, m) in enumerate(zip(shape, parameter.shape, strict=True)):
        if m not in (1, n):
            before, after = parameter.shape[:d], parameter.shape[d + 1 :]
            blocks = jnp.broadcast_to(jnp.expand_dims(parameter, d + 1), (*before, m, n // m, *after))
            parameter = blocks.reshape(*before, n, *after)
    return jnp.broadcast_to(parameter, shape)


def sum_to(terms: jax.Array, shape: tuple[Any, ...]) -> jax.Array:
    """The transpose of `spread`: terms summed over the elements that share a scale."""
    for d, m in enumerate(shape):
        n = terms.shape[d]
        if m == n:
            continue
        if m == 1:
            terms = terms.sum(d, keepdims=True)
        else:
            terms = terms.reshape(*terms.shape[:d], m, n // m, *terms.shape[d + 1 :]).sum(d + 1)
    return terms
