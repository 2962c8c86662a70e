"""A dense layer trained on the integers it will serve with.

qat_dense()  ->  dynamic_quantize, quantize  ->  scaled_matmul        forward: the integer product of inference
             ->  dequantize, fake_quantize's gradient, XLA's products   backward: straight through

What the backward needs of x and w is kept as their codes, a byte or less to an element, and where a given scale may
clip as one bit more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType

from jaxquant._core import compat, ffi
from jaxquant._core.errors import refuse
from jaxquant.affine import contraction, products, qtypes
from jaxquant.affine.contraction import Contraction
from jaxquant.affine.dequantize import dequantize
from jaxquant.affine.dynamic import dynamic_quantize
from jaxquant.affine.exact import over
from jaxquant.affine.fake_quantize import fake_quantize_gradient_p
from jaxquant.affine.granularity import PerAxis, PerToken
from jaxquant.affine.qarray import QArray
from jaxquant.affine.qparams import QParams
from jaxquant.affine.quantize import quantize
from jaxquant.affine.straight_through import gradient


def qat_dense(
    x: Any, w: Any, bias: Any = None, *, w_scale: Any = None, x_scale: Any = None, w_qtype: Any = jnp.int8,
    x_qtype: Any = jnp.int8, implementation: str | None = None,
) -> jax.Array:  # fmt: skip
    """``x @ w + bias`` with x and w quantised: a product of integers in the forward, straight through in the backward.

    The value is that of `matmul` with the codes of w, bit for bit, so that training computes what inference will:

        wq = dynamic_quantize(w, PerAxis(1), qtype=w_qtype)    # with w_scale: QArray.from_codes(quantize(w, ...), ...)
        qat_dense(x, w, bias) == matmul(x, wq, lhs_qtype=jnp.int8, bias=bias)

    Args:
      x: float32, float16 or bfloat16 ``[..., k]``.
      w: float32, float16 or bfloat16 ``[k, n]``.
      bias: None or floating ``[n]``, added in float32.
      w_scale: None chooses a scale for each column from w's largest magnitude there, symmetrically (int8 codes -127 to
        127, int4 -7 to 7, int2 -1 to 1). Given: a scalar, ``[n]``, ``[1, n]``, or ``[k / g, n]`` for groups of g rows;
        the codes are then those of `fake_quantize`, from the full range of w_qtype. A `QParams` sets type and range
        too.
      x_scale: None chooses a scale for each row of x. Given: one for all of x, a scalar or a `QParams` with one.
      w_qtype: int8, int4 or int2.
      x_qtype: int8.
      implementation: None, "ffi" or "xla", as for `fake_quantize`.

    Returns:
      ``[..., n]`` in x's dtype.

    Gradients: with x^ and w^ the values that the codes stand for, in x's dtype, ``dx = dy @ w^.T`` and
    ``dw = x^.T @ dy``, each 0 where a given scale clipped; ``dbias = sum(dy)``. A scale that was chosen is constant
    and clips nothing finite; what is not finite counts as in range. A given scale is learned: its gradient is that of
    `fake_quantize` for the upstream gradients ``dy @ w^.T`` and ``x^.T @ dy`` (the LSQ rule). Reverse mode and first
    order; for second derivatives use `fake_quantize`.

    Memory: kept for the backward are the codes of x and w and their scales; where a scale is given but not
    differentiated, a bit for each element more; where it is learned, the operand itself instead of its codes. For
    bfloat16 x of 4096 x 1024 and w of 1024 x 1024 that is 5.0 MiB, 5.6 MiB and 10 MiB; a plain product keeps 10 MiB,
    `fake_quantize` before it 20 MiB.

    Raises:
      ValueError, TypeError: naming the operand, what was expected and what to do.
      NotImplementedError: second derivatives, or a `QParams` with a zero point.

    >>> x, w = jnp.array([[1.0, -2.0]]), jnp.array([[1.0, 0.5], [0.0, 1.0]])
    >>> qat_dense(x, w).round(1)
    Array([[ 1. , -1.5]], dtype=float32)
    >>> jax.grad(lambda w: qat_dense(x, w).sum())(w).round(1)
    Array([[ 1.,  1.],
           [-2., -2.]], dtype=float32)
    """
    name = "qat_dense"
    x, w = _check_floats(name, x, w)
    k, n = w.shape
    if bias is not None:
        bias = jnp.asarray(bias)
        if bias.shape != (n,) or not jnp.issubdtype(bias.dtype, jnp.floating):
            got = f"{bias.dtype.name} of shape {bias.shape}"
            raise refuse(name, "bias", f"floating, shape ({n},)", got, "give one value for each column of w")
        bias = bias.astype(jnp.float32)
    x_scale, of_x = _check_scale(name, "x", x_scale, x_qtype, ("int8",), None)
    w_scale, of_w = _check_scale(name, "w", w_scale, w_qtype, ("int8", "int4", "int2"), (k, n))
    lead = x.shape[:-1]
    operands, tree = jax.tree.flatten((x.reshape(math.prod(lead), k), w, bias, x_scale, w_scale))
    operands = jax.tree.unflatten(tree, compat.match_varying_axes(*operands))
    static = _Static(of_x, of_w, ffi.check_implementation(name, implementation))
    return _dense(*operands, static).reshape(*lead, n)


class _Grid(NamedTuple):
    """Codes of one operand."""

    qtype: qtypes.QType
    qmin: int
    qmax: int


class _Static(NamedTuple):
    x: _Grid
    w: _Grid
    implementation: str | None


# ---------------------------------------------------------------------------------------------------------- arguments


def _check_floats(name: str, x: Any, w: Any) -> tuple[jax.Array, jax.Array]:
    x, w = jnp.asarray(x), jnp.asarray(w)
    for operand, a in (("x", x), ("w", w)):
        if a.dtype.name not in products.FLOATS:
            expected = f"one of {', '.join(products.FLOATS)}"
            raise refuse(name, operand, expected, a.dtype.name, "convert it", TypeError)
    if w.ndim != 2:
        raise refuse(name, "w", "shape [k, n]", str(w.shape), "reshape it, or use jax.vmap over stacked layers")
    if x.ndim == 0 or x.shape[-1] != w.shape[0]:
        expected = f"{w.shape[0]} values along the last axis, for w of shape {w.shape}"
        raise refuse(name, "x", expected, f"shape {x.shape}", "x's last axis is contracted with w's first")
    return x, w


def _check_scale(
    name: str, operand: str, scale: Any, qtype: Any, allowed: tuple[str, ...], shape: tuple[Any, ...] | None
) -> tuple[Any, _Grid]:
    """None or a float32 matrix: [1, 1], and with w's shape [k / g, n] too. And the codes."""
    code, low, high = qtypes.lookup(name, qtype), None, None
    if isinstance(scale, QParams):
        own = qtypes.lookup(name, scale.qtype)
        if code.name not in ("int8", own.name):
            raise refuse(name, f"{operand}_qtype", f"that of the QParams, {own.name}", code.name, "leave it out")
        if scale.zero_point is not None:
            raise NotImplementedError(
                f"{name}: {operand}_scale: a QParams with a zero point; use symmetric parameters."
            )
        code, low, high, scale = own, scale.qmin, scale.qmax, scale.scale
    if code.name not in allowed:
        raise refuse(name, f"{operand}_qtype", f"one of {', '.join(allowed)}", code.name, "choose one", TypeError)
    grid = _Grid(code, *qtypes.code_range(name, code, low, high))
    if scale is None:
        # As dynamic_quantize has it: symmetric.
        return None, grid._replace(qmin=-code.qmax)
    scale = jnp.asarray(scale)
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise refuse(name, f"{operand}_scale", "floating", scale.dtype.name, "convert it to float32", TypeError)
    scale = scale.astype(jnp.float32)
    if scale.size == 1 and (shape is None or scale.ndim < 2):
        return scale.reshape(1, 1), grid
    if shape is None:
        raise refuse(name, "x_scale", "one scale", f"shape {scale.shape}", "leave it out for one of each row")
    k, n = shape
    if scale.shape == (n,):
        return scale.reshape(1, n), grid
    groups = scale.shape[0] if scale.ndim == 2 else 0
    if scale.ndim != 2 or scale.shape[1] not in (1, n) or groups < 1 or k % groups:
        expected = f"a scalar, ({n},), (1, {n}) or (k / g, {n}) for w of shape {shape}"
        raise refuse(name, "w_scale", expected, str(scale.shape), "give a scale for each column, or each group of rows")
    return scale, grid


# ------------------------------------------------------------------------------------------------------------- forward

_AXES = Contraction((1,), (0,), (), (), (0,), (1,))  # [m, k] by [k, n]


def _quantised(x: Any, scale: Any, chosen: Any, grid: _Grid, implementation: str | None) -> QArray:
    """x [., .] by a scale that is given, or else by those that a granularity chooses."""
    code = grid.qtype
    if scale is None:
        return dynamic_quantize(x, chosen, qtype=code.name, implementation=implementation)
    packed = code.bits < 8
    data = quantize(
        x, scale, block_shape=_blocks(x, scale), qtype=code.name, qmin=grid.qmin, qmax=grid.qmax, packed=packed,
        implementation=implementation,
    )  # fmt: skip
    return QArray(data, scale, None, code.name, grid.qmin, grid.qmax, x.shape[-1:] if packed else ())


def _blocks(x: Any, scale: Any) -> tuple[int, ...]:
    return tuple(-1 if m == 1 else n // m for n, m in zip(x.shape, scale.shape, strict=True))


def _product(x: Any, w: Any, bias: Any, x_scale: Any, w_scale: Any, static: _Static) -> tuple[Any, QArray, QArray]:
    x_q = _quantised(x, x_scale, PerToken(), static.x, static.implementation)
    w_q = _quantised(w, w_scale, PerAxis(1), static.w, static.implementation)
    codes, scale, _ = contraction.quantised_rows("qat_dense", x_q, _AXES)
    # A byte to a code: unpacked once here, not at every use in the product.
    whole = w_q if static.w.qtype.bits == 8 else QArray(w_q.qvalue, w_q.scale, None, jnp.int8, w_q.qmin, w_q.qmax)
    matrices = contraction.matrices("qat_dense", whole, _AXES)
    y = products.integers(codes, scale, None, matrices, bias, x.dtype, static.implementation)
    return y.reshape(x.shape[0], w.shape[1]), x_q, w_q


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _dense(x: Any, w: Any, bias: Any, x_scale: Any, w_scale: Any, static: _Static) -> Any:
    return _product(x, w, bias, x_scale, w_scale, static)[0]


@jax.custom_jvp
def _first_order(x: Any, w: Any) -> tuple[Any, Any]:
    return x, w


@_first_order.defjvp
def _no_second_order(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "qat_dense: no second derivatives: they need x and w, of which only integers are kept. "
        "Multiply the results of fake_quantize instead."
    )


# ------------------------------------------------------------------------------------------------------------ backward


@jax.tree_util.register_static
@dataclass(frozen=True)
class _About:
    """Of an operand: what is wanted of it and its scale, its dtype and, where a mesh is explicit, its sharding."""

    operand: bool
    scale: bool
    dtype: Any
    sharding: Any


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Flag:
    on: bool


def _explicit_sharding(x: Any) -> Any:
    """The sharding in x's type, which its gradient's must be; None where a mesh leaves that to XLA."""
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in getattr(sharding.mesh, "axis_types", ()) else None


class _Kept(NamedTuple):
    """Of an operand: itself and its scale where that is learned, else its codes and which of them were in range."""

    value: Any
    scale: Any
    codes: Any
    inside: Any


def _keep(x: Any, scale: Any, codes: QArray, about: _About, other: _About, grid: _Grid) -> _Kept:
    needed = other.operand or other.scale
    if about.scale:
        return _Kept(x, scale, None, None)
    inside = None
    if about.operand and scale is not None:
        inside = jnp.packbits(_inside(x, scale, grid), axis=-1, bitorder="little")
    return _Kept(None, None, codes if needed else None, inside)


def _inside(x: Any, scale: Any, grid: _Grid) -> Any:
    x = x.astype(jnp.float32)
    full_scale, zero = over(x, scale, jnp.zeros((1, 1), jnp.float32))
    v = jnp.round(x / full_scale) + zero
    return (v >= grid.qmin) & (v <= grid.qmax)


def _codes(kept: _Kept, grid: _Grid, implementation: str | None) -> QArray:
    return _quantised(kept.value, kept.scale, None, grid, implementation) if kept.codes is None else kept.codes


def _through(upstream: Any, kept: _Kept, about: _About, grid: _Grid, implementation: str | None) -> tuple[Any, Any]:
    """Gradients of an operand and of its scale from that of its quantised value."""
    if about.scale:
        dx, dscale, _ = gradient(
            fake_quantize_gradient_p, upstream, kept.value, kept.scale, jnp.zeros((1, 1), jnp.float32),
            want=(about.operand, True, False), qmin=grid.qmin, qmax=grid.qmax, implementation=implementation,
        )  # fmt: skip
        return dx, dscale
    if not about.operand:
        return None, None
    if kept.inside is not None:
        inside = jnp.unpackbits(kept.inside, axis=-1, count=upstream.shape[-1], bitorder="little")
        upstream = jnp.where(inside != 0, upstream, 0)
    return upstream, None


def _forward(x: Any, w: Any, bias: Any, x_scale: Any, w_scale: Any, static: _Static) -> Any:
    def about(operand: Any, scale: Any) -> _About:
        learned = scale is not None and scale.perturbed
        value = operand.value
        return _About(operand.perturbed, learned, value.dtype, _explicit_sharding(value))

    def value(operand: Any) -> Any:
        return None if operand is None else operand.value

    of_x, of_w = about(x, x_scale), about(w, w_scale)
    x_value, w_value = _first_order(x.value, w.value)
    y, x_q, w_q = _product(x_value, w_value, value(bias), value(x_scale), value(w_scale), static)
    kept_x = _keep(x_value, value(x_scale), x_q, of_x, of_w, static.x)
    kept_w = _keep(w_value, value(w_scale), w_q, of_w, of_x, static.w)
    return y, (kept_x, kept_w, of_x, of_w, _Flag(bias is not None))


def _backward(static: _Static, saved: Any, dy: Any) -> Any:
    kept_x, kept_w, of_x, of_w, of_bias = saved
    if isinstance(dy, SymbolicZero):
        return (None,) * 5
    dx = dw = dx_scale = dw_scale = None
    implementation = static.implementation
    if of_x.operand or of_x.scale:
        values = _codes(kept_w, static.w, implementation).dequantize(dy.dtype, implementation=implementation)
        upstream = _dot(dy, values, (1, 1), of_x)
        dx, dx_scale = _through(upstream, kept_x, of_x, static.x, implementation)
    if of_w.operand or of_w.scale:
        # Codes are transposed, not floats: XLA's product by a transposed left matrix takes twice as long in bfloat16.
        codes = _codes(kept_x, static.x, implementation)
        values = dequantize(codes.data.T, codes.scale.T, dtype=dy.dtype, implementation=implementation)
        upstream = _dot(values, dy, (1, 0), of_w)
        dw, dw_scale = _through(upstream, kept_w, of_w, static.w, implementation)
    dbias = dy.sum(0, dtype=jnp.float32) if of_bias.on else None
    return dx, dw, dbias, dx_scale, dw_scale


def _dot(a: Any, b: Any, axes: tuple[int, int], about: _About) -> Any:
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    keywords = {} if about.sharding is None else {"out_sharding": about.sharding}
    return jax.lax.dot_general(a, b, numbers, preferred_element_type=about.dtype, **keywords)


_dense.defvjp(_forward, _backward, symbolic_zeros=True)
