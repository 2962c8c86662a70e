"""Quantised products for layers: the value is that of the integers in training and in inference, to the bit.

dense()           ->  qat_dense where it applies, else as below
as_dot_general()  ->  quantised(), integer products; derivatives of the float product of the rounded operands
convolve()        ->  the same, with integer products of patches
embed()           ->  fake_quantize of the rows
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxquant._core import compat
from jaxquant._core.errors import refuse
from jaxquant.affine import choose, contraction, einsums, products, qtypes
from jaxquant.affine import granularity as granularities
from jaxquant.affine.dynamic import dynamic_fake_quantize, dynamic_quantize
from jaxquant.affine.fake_quantize import fake_quantize
from jaxquant.affine.granularity import PerAxis, PerTensor, PerToken
from jaxquant.affine.learned_step import lsq_gradient_scale
from jaxquant.affine.qarray import QArray
from jaxquant.affine.qat_dense import qat_dense
from jaxquant.affine.qparams import QParams
from jaxquant.affine.quantize import quantize
from jaxquant.nn.rules import Spec

Axes = tuple[int, ...]


def as_dot_general(spec: Spec = Spec()) -> Callable[..., jax.Array]:  # noqa: B008
    """A function with the signature of `jax.lax.dot_general` that quantises both operands, for layers that take one.

    Its value is the product of integers (of floats by integers where ``spec.x_qtype`` is None), its gradient that of
    the product of the dequantised operands, straight through the rounding. Forward and reverse mode. `qat_dense`
    computes the product of a plain dense layer, and keeps integers only for the backward.

    Args:
      spec: how; scales are chosen at each call. The left operand counts as activations, the right one as weights, which
        may be a `QArray` already.

    Returns:
      A function ``(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, *, out_sharding=None)``;
      precision is ignored, since integers are summed exactly.

    >>> dot_general = as_dot_general(Spec(w_qtype=jnp.int4))
    >>> dot_general(jnp.array([[1.0, -1.0]]), jnp.array([[7.0], [3.2]]), (((1,), (0,)), ((), ()))).round(3)
    Array([[4.]], dtype=float32)
    """
    _check_chosen("as_dot_general", spec)

    def dot_general(
        lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any = None, preferred_element_type: Any = None, *,
        out_sharding: Any = None,
    ) -> jax.Array:  # fmt: skip
        del precision
        y = _dot(lhs, rhs, dimension_numbers, spec, dtype=preferred_element_type)
        return y if out_sharding is None else jax.lax.with_sharding_constraint(y, out_sharding)

    return dot_general


def as_einsum(spec: Spec = Spec()) -> Callable[..., jax.Array]:  # noqa: B008
    """`as_dot_general` as a function ``(subscripts, x, w)`` in the place of `jax.numpy.einsum` with two operands.

    Args:
      spec: as for `as_dot_general`.

    >>> as_einsum()("...k,nk->...n", jnp.array([1.0, -2.0]), jnp.array([[1.0, 0.0], [0.0, 1.0]])).round(2)
    Array([ 1.01, -2.  ], dtype=float32)
    """
    _check_chosen("as_einsum", spec)

    def einsum(
        subscripts: str, x: Any, w: Any, *, precision: Any = None, preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:  # fmt: skip
        del precision
        numbers, order = einsums.parse(subscripts, jnp.shape(x), jnp.shape(w))
        y = _dot(x, w, numbers, spec, dtype=preferred_element_type).transpose(order)
        return y if out_sharding is None else jax.lax.with_sharding_constraint(y, out_sharding)

    return einsum


def _check_chosen(name: str, spec: Spec) -> None:
    if not isinstance(spec, Spec):
        raise refuse(name, "spec", "a Spec", repr(spec), "see jaxquant.nn.Spec", TypeError)
    if spec.learned:
        remedy = "use a layer of jaxquant.nn, which has a place for them"
        raise refuse(name, "spec", "scales that are chosen", "learned ones", remedy)


# -------------------------------------------------------------------------------------------------------------- scales


class Scales(NamedTuple):
    """Learned scales of a layer, as exponents (`scale_of`). None: chosen at each call."""

    kernel: Any = None
    input: Any = None


class How(NamedTuple):
    """How one operand is quantised."""

    qtype: Any
    granularity: Any
    symmetric: bool = True


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


def initial_scale(a: Any, how: How) -> jax.Array:
    """The parameter to begin with: of the scale with the least squared error."""
    signed = qtypes.lookup("initial_scale", how.qtype).qmin < 0
    # Of an unsigned type the range of values that are not negative: its zero point is then 0.
    values = a if signed else jnp.maximum(a, 0)
    q = choose.choose_qparams(
        values, how.granularity, qtype=how.qtype, symmetric=signed, narrow_range=False, method="mse"
    )
    return exponent_of(q.scale)


def parameters(a: Any, how: How, exponent: Any) -> QParams:
    """Those of a learned scale."""
    scale = scale_of(exponent)
    shared = max(math.prod(a.shape) // max(scale.size, 1), 1)
    block = choose.whole_axes(granularities.resolve("nn", how.granularity, a.shape), a.shape)
    scale = lsq_gradient_scale(scale.reshape(choose.scale_shape(a.shape, block)), shared, jnp.iinfo(how.qtype).max)
    return QParams(scale, None, how.qtype, block_shape=block)


def quantised(a: Any, how: How, exponent: Any = None) -> QArray:
    """The codes of an operand: those of training and of inference."""
    if exponent is None:
        return dynamic_quantize(a, how.granularity, qtype=how.qtype, symmetric=how.symmetric)
    q = parameters(a, how, exponent)
    return QArray.from_codes(quantize(jax.lax.stop_gradient(a), q), jax.lax.stop_gradient(q.scale), qtype=how.qtype)


def rounded(a: Any, how: How, exponent: Any = None) -> jax.Array:
    """The values of those codes, straight through."""
    if exponent is None:
        return dynamic_fake_quantize(a, how.granularity, qtype=how.qtype, symmetric=how.symmetric)
    return fake_quantize(a, parameters(a, how, exponent))


# ------------------------------------------------------------------------------------------------------------- products


@dataclass(frozen=True)
class Dot:
    """A contraction."""

    numbers: Any

    def axes(self, x: Any, w: Any) -> contraction.Contraction:
        return contraction.resolve("dot_general", x, w, self.numbers)

    def hows(self, x: Any, w: Any, spec: Spec) -> tuple[How | None, How]:
        c = self.axes(x, w)
        of_x = PerTensor() if spec.learned else spec.x_granularity or PerAxis((*c.x_batch, *c.x_free))
        of_w = spec.w_granularity or PerAxis((*c.w_batch, *c.w_free))
        return spec.x_qtype and How(spec.x_qtype, of_x, spec.symmetric), How(spec.w_qtype, of_w)

    def floats(self, x: Any, w: Any) -> jax.Array:
        return jax.lax.dot_general(x, w, self.numbers)

    def integers(self, x: Any, w: QArray, bias: Any, dtype: Any) -> jax.Array:
        return products.dot_general(x, w, self.numbers, None, dtype, bias=bias)


@dataclass(frozen=True)
class Conv:
    """A convolution [N, *space, c] by [*window, c / groups, n], without padding."""

    strides: Axes
    dilation: Axes
    groups: int

    def hows(self, x: Any, w: Any, spec: Spec) -> tuple[How | None, How]:
        of_x = PerTensor() if spec.learned else spec.x_granularity or PerAxis(0)
        return spec.x_qtype and How(spec.x_qtype, of_x, spec.symmetric), How(
            spec.w_qtype, spec.w_granularity or PerAxis(w.ndim - 1)
        )

    def floats(self, x: Any, w: Any) -> jax.Array:
        d = len(self.strides)
        outside = (0, d + 1, *range(1, d + 1))
        numbers = jax.lax.ConvDimensionNumbers(outside, (d + 1, d, *range(d)), outside)
        return jax.lax.conv_general_dilated(
            x, w, self.strides, "VALID", None, self.dilation, numbers, feature_group_count=self.groups
        )

    def integers(self, x: Any, w: QArray, bias: Any, dtype: Any) -> jax.Array:
        if not isinstance(x, QArray):
            y = self.floats(x, w.dequantize(x.dtype))
            return (y if bias is None else y + bias).astype(dtype)
        d, g = len(self.strides), self.groups
        codes = self.patches(x.qvalue, w.shape[:d])  # [N, *out, *window, c]
        scale = x.scale.reshape(x.scale.shape[0], *(1,) * (codes.ndim - 1))
        zero_point = None if x.zero_point is None else x.zero_point.reshape(scale.shape)
        window = tuple(range(d + 1, 2 * d + 1))
        if g == 1:
            q = QArray.from_codes(codes, scale, zero_point, qtype=x.qtype, qmin=x.qmin, qmax=x.qmax)
            numbers = (((*window, codes.ndim - 1), tuple(range(d + 1))), ((), ()))
            return products.dot_general(q, w, numbers, None, dtype, bias=bias)
        split = (*codes.shape[:-1], g, codes.shape[-1] // g)
        q = QArray.from_codes(
            codes.reshape(split), scale[..., None], None if zero_point is None else zero_point[..., None],
            qtype=x.qtype, qmin=x.qmin, qmax=x.qmax,
        )  # fmt: skip
        n = w.shape[-1]
        w_scale = jnp.broadcast_to(w.scale, (*w.scale.shape[:-1], n)).reshape(*w.scale.shape[:-1], g, n // g)
        kernels = QArray.from_codes(w.qvalue.reshape(*w.shape[:-1], g, n // g), w_scale, qtype=w.qtype)
        numbers = (((*window, 2 * d + 2), tuple(range(d + 1))), ((2 * d + 1,), (d + 1,)))
        # The bias is of a group's own columns, which one product for all groups has no place for.
        y = jnp.moveaxis(products.dot_general(q, kernels, numbers, None, jnp.float32), 0, -2)
        y = y.reshape(*y.shape[:-2], n)
        return (y if bias is None else y + bias).astype(dtype)

    def patches(self, x: Any, window: tuple[int, ...]) -> jax.Array:
        """The values under the window at each of its positions: [N, *out, *window, c]."""
        space = x.shape[1:-1]
        out = [
            (n - (k - 1) * r - 1) // s + 1
            for n, k, r, s in zip(space, window, self.dilation, self.strides, strict=True)
        ]
        parts = []
        for at in itertools.product(*map(range, window)):
            start = [i * r for i, r in zip(at, self.dilation, strict=True)]
            stop = [b + (m - 1) * s + 1 for b, m, s in zip(start, out, self.strides, strict=True)]
            strides = (1, *self.strides, 1)
            parts.append(jax.lax.slice(x, (0, *start, 0), (x.shape[0], *stop, x.shape[-1]), strides))
        return jnp.stack(parts, axis=-2).reshape(x.shape[0], *out, *window, x.shape[-1])


def _product(op: Dot | Conv, x: Any, w: Any, spec: Spec, scales: Scales, bias: Any, dtype: Any) -> jax.Array:
    of_x, of_w = op.hows(x, w, spec)
    if isinstance(w, QArray):
        x_q = x if of_x is None else quantised(x, of_x, scales.input)
        return _integers(op, jnp.dtype(dtype), None, None, x_q, w, bias)
    x_hat, x_q = (x, x) if of_x is None else (rounded(x, of_x, scales.input), quantised(x, of_x, scales.input))
    w_hat, w_q = rounded(w, of_w, scales.kernel), quantised(w, of_w, scales.kernel)
    leaves, tree = jax.tree.flatten((x_hat, w_hat, *jax.lax.stop_gradient((x_q, w_q)), bias))
    return _integers(op, jnp.dtype(dtype), *jax.tree.unflatten(tree, compat.match_varying_axes(*leaves)))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _integers(op: Dot | Conv, dtype: Any, x_hat: Any, w_hat: Any, x_q: Any, w_q: Any, bias: Any) -> Any:
    """The product of the codes, with the derivatives of that of their values."""
    del x_hat, w_hat
    return op.integers(x_q, w_q, bias, dtype)


@partial(_integers.defjvp, symbolic_zeros=True)
def _integers_jvp(op: Dot | Conv, dtype: Any, primals: Any, tangents: Any) -> Any:
    x_hat, w_hat, *_ = primals
    dx, dw, _, _, dbias = tangents
    y = _integers(op, dtype, *primals)
    dot = jnp.zeros_like(y)
    if not (dx is None or isinstance(dx, SymbolicZero)):
        dot = dot + op.floats(dx, w_hat).astype(dtype)
    if not (dw is None or isinstance(dw, SymbolicZero)):
        dot = dot + op.floats(x_hat, dw).astype(dtype)
    if not (dbias is None or isinstance(dbias, SymbolicZero)):
        dot = dot + dbias.astype(dtype)
    return y, dot


def _dot(
    x: Any, w: Any, numbers: Any, spec: Spec, scales: Scales = Scales(), bias: Any = None, dtype: Any = None  # noqa: B008
) -> jax.Array:  # fmt: skip
    x = jnp.asarray(x)
    w = w if isinstance(w, QArray) else jnp.asarray(w)
    numbers = tuple(tuple(tuple(int(d) for d in axes) for axes in pair) for pair in numbers)
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    op = Dot(numbers)
    c = op.axes(x, w)
    if not isinstance(w, QArray) and _fits_qat_dense(x, w, c, spec) and dtype == x.dtype:
        of_x, of_w = op.hows(x, w, spec)
        w_scale = x_scale = None  # which qat_dense chooses by column and by row
        if scales.kernel is not None:
            w_scale = parameters(w, of_w, scales.kernel)
        elif spec.w_granularity is not None:
            w_scale = choose.choose_qparams(w, spec.w_granularity, qtype=spec.w_qtype)
        if scales.input is not None and of_x is not None:
            x_scale = parameters(x, of_x, scales.input)
            x_scale = QParams(x_scale.scale.reshape(()), None, x_scale.qtype)
        return qat_dense(x, w, bias, w_scale=w_scale, x_scale=x_scale, w_qtype=spec.w_qtype, x_qtype=spec.x_qtype)
    return _product(op, x, w, spec, scales, bias, dtype)


def _fits_qat_dense(x: Any, w: Any, c: contraction.Contraction, spec: Spec) -> bool:
    """Whether `qat_dense` computes it: the same value, with less kept for the backward."""
    plain = c.x_contract == (x.ndim - 1,) and c.w_contract == (0,) and w.ndim == 2 and not c.x_batch
    return plain and spec.x_granularity in (None, PerToken()) and spec.symmetric and spec.x_qtype == "int8"


# --------------------------------------------------------------------------------------------------------------- layers


def dense_scales(kernel: Any, x: Any, spec: Spec) -> Scales:
    """Scales to begin with for a kernel [k, n] and typical inputs [..., k]."""
    return _initial(Dot((((x.ndim - 1,), (0,)), ((), ()))), x, kernel, spec)


def dense(x: Any, kernel: Any, bias: Any, spec: Spec, scales: Scales = Scales()) -> jax.Array:  # noqa: B008
    """``x @ kernel + bias``; x [..., k], kernel [k, n], an array or a QArray."""
    return _dot(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), spec, scales, bias)


def dense_kernel(kernel: Any, spec: Spec, scales: Scales = Scales()) -> QArray:  # noqa: B008
    """The kernel as `dense` quantises it."""
    return quantised(kernel, How(spec.w_qtype, spec.w_granularity or PerAxis(1)), scales.kernel)


def _convolution(x: Any, window: tuple[int, ...], strides: Any, padding: Any, dilation: Any, groups: int) -> Any:
    """x padded, and the convolution that is then left."""
    d = len(window)
    strides, dilation = (
        (1 if v is None else v,) * d if v is None or isinstance(v, int) else tuple(v) for v in (strides, dilation)
    )
    if isinstance(padding, str) and padding not in ("SAME", "SAME_LOWER", "VALID"):
        remedy = "pad the input with jnp.pad, and take VALID"
        raise refuse("Conv", "padding", '"SAME", "VALID" or numbers', repr(padding), remedy)
    if isinstance(padding, str):
        reach = [(k - 1) * r + 1 for k, r in zip(window, dilation, strict=True)]
        pads = jax.lax.padtype_to_pads(x.shape[1:-1], reach, strides, padding)
    else:
        pads = [padding] * d if isinstance(padding, int) else list(padding)
        pads = [(p, p) if isinstance(p, int) else tuple(p) for p in pads]
    # The quantised value of 0 is 0, and the range of a scale includes it: padding comes first.
    return jnp.pad(x, ((0, 0), *pads, (0, 0))), Conv(strides, dilation, groups)


def convolve(
    x: Any, kernel: Any, bias: Any, spec: Spec, scales: Scales = Scales(), *, strides: Any = 1,  # noqa: B008
    padding: Any = "SAME", dilation: Any = 1, groups: int = 1,
) -> jax.Array:  # fmt: skip
    """A convolution, channels last: x [..., *space, c], kernel [*window, c / groups, n], an array or a QArray."""
    d = kernel.ndim - 2
    lead = x.shape[: x.ndim - d - 1]
    x, op = _convolution(x.reshape(-1, *x.shape[len(lead) :]), kernel.shape[:d], strides, padding, dilation, groups)
    y = _product(op, x, kernel, spec, scales, bias, x.dtype)
    return y.reshape(*lead, *y.shape[1:])


def conv_scales(kernel: Any, x: Any, spec: Spec) -> Scales:
    """Scales to begin with for a kernel and typical inputs, as for `convolve`."""
    d = kernel.ndim - 2
    return _initial(Conv((1,) * d, (1,) * d, 1), x.reshape(-1, *x.shape[x.ndim - d - 1 :]), kernel, spec)


def conv_kernel(kernel: Any, spec: Spec, scales: Scales = Scales()) -> QArray:  # noqa: B008
    """The kernel as `convolve` quantises it."""
    return quantised(kernel, How(spec.w_qtype, spec.w_granularity or PerAxis(kernel.ndim - 1)), scales.kernel)


def _initial(op: Dot | Conv, x: Any, w: Any, spec: Spec) -> Scales:
    if not spec.learned:
        return Scales()
    of_x, of_w = op.hows(x, w, spec)
    return Scales(initial_scale(w, of_w), None if of_x is None else initial_scale(x, of_x).reshape(()))


def _table(spec: Spec) -> How:
    return How(spec.w_qtype, spec.w_granularity or PerAxis(0))


def embed_scales(table: Any, x: Any, spec: Spec) -> Scales:
    """A scale to begin with for each row, whatever the inputs."""
    del x
    return Scales(initial_scale(table, _table(spec))) if spec.learned else Scales()


def embed_kernel(table: Any, spec: Spec, scales: Scales = Scales()) -> QArray:  # noqa: B008
    """The table as `embed` quantises it."""
    return quantised(table, _table(spec), scales.kernel)


def embed(ids: Any, table: Any, spec: Spec, scales: Scales = Scales(), dtype: Any = None) -> jax.Array:  # noqa: B008
    """Rows of a table [n, features], an array or a QArray; activations have no part in it."""
    if not isinstance(table, QArray):
        if spec.w_granularity is None and not spec.learned:  # rows are quantised by themselves
            return rounded(jnp.take(table, ids, axis=0), How(spec.w_qtype, PerToken()))
        return jnp.take(rounded(table, _table(spec), scales.kernel), ids, axis=0)
    dtype = table.scale.dtype if dtype is None else dtype
    if table.scale.shape != (table.shape[0], 1):
        return jnp.take(table.dequantize(dtype), ids, axis=0)
    ids = jnp.asarray(ids)
    flat = ids.reshape(-1)
    static = jax.tree.structure(table)
    rows = jax.tree.unflatten(static, [jnp.take(leaf, flat, axis=0) for leaf in jax.tree.leaves(table)])
    return rows.dequantize(dtype).reshape(*ids.shape, table.shape[1])


def attend(query: Any, table: Any, spec: Spec, scales: Scales = Scales()) -> jax.Array:  # noqa: B008
    """``query @ table.T``, with the codes that `embed` takes rows of."""
    numbers = (((query.ndim - 1,), (1,)), ((), ()))
    if spec.learned:  # the layer has no input scale: it quantises no inputs elsewhere
        spec = Spec(spec.w_qtype, None, spec.w_granularity, learned=True)
    return _dot(query, table, numbers, spec, scales)
