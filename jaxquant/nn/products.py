"""Quantised products: the value is that of the integers in training and in inference, to the bit.

as_dot_general()  ->  dot()      qat_dense where it applies, else as below
                  ->  product()  quantised(), integer products; derivatives of the float product of rounded() operands
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxquant._core import compat
from jaxquant._core.errors import refuse
from jaxquant.affine import choose, contraction, einsums, products
from jaxquant.affine.granularity import PerAxis, PerTensor, PerToken
from jaxquant.affine.qarray import QArray
from jaxquant.affine.qat_dense import qat_dense
from jaxquant.affine.qparams import QParams
from jaxquant.nn.rules import Spec
from jaxquant.nn.scales import How, Scales, parameters, quantised, rounded

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
        y = dot(lhs, rhs, dimension_numbers, spec, dtype=preferred_element_type)
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
        y = dot(x, w, numbers, spec, dtype=preferred_element_type).transpose(order)
        return y if out_sharding is None else jax.lax.with_sharding_constraint(y, out_sharding)

    return einsum


def _check_chosen(name: str, spec: Spec) -> None:
    if not isinstance(spec, Spec):
        raise refuse(name, "spec", "a Spec", repr(spec), "see jaxquant.nn.Spec", TypeError)
    if spec.learned or spec.x_observer is not None:
        remedy = "use a layer of jaxquant.nn, which has a place for them"
        raise refuse(name, "spec", "scales that are chosen", "learned or observed ones", remedy)


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

    @property
    def numbers(self) -> jax.lax.ConvDimensionNumbers:
        d = len(self.strides)
        outside = (0, d + 1, *range(1, d + 1))
        return jax.lax.ConvDimensionNumbers(outside, (d + 1, d, *range(d)), outside)

    def hows(self, x: Any, w: Any, spec: Spec) -> tuple[How | None, How]:
        of_x = PerTensor() if spec.learned else spec.x_granularity or PerAxis(0)
        return spec.x_qtype and How(spec.x_qtype, of_x, spec.symmetric), How(
            spec.w_qtype, spec.w_granularity or PerAxis(w.ndim - 1)
        )

    def floats(self, x: Any, w: Any) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, self.strides, "VALID", None, self.dilation, self.numbers, feature_group_count=self.groups
        )

    def integers(self, x: Any, w: QArray, bias: Any, dtype: Any) -> jax.Array:
        if not isinstance(x, QArray):
            y = self.floats(x, w.dequantize(x.dtype))
            return (y if bias is None else y + bias).astype(dtype)
        leaves, tree = jax.tree.flatten((x, w, bias))
        return _call_of_its_own(self, tree, dtype)(*leaves)

    def of_codes(self, x: QArray, w: QArray, bias: Any, dtype: Any) -> jax.Array:
        if any(m != 1 for m in x.scale.shape[1:]):
            got, remedy = f"scales of shape {x.scale.shape}", "leave it out, or take PerTensor() or PerAxis(0)"
            raise refuse("Conv", "x_granularity", "one scale, or one for each example", got, remedy)
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


# By name, the convolution that a call is, and the tree of its operands: what the export to ONNX writes as one node.
CONVOLUTIONS: dict[str, tuple[Conv, Any]] = {}


@cache
def _call_of_its_own(op: Conv, tree: Any, dtype: Any) -> Callable[..., jax.Array]:
    def convolution(*leaves: Any) -> jax.Array:
        x, w, bias = jax.tree.unflatten(tree, leaves)
        return op.of_codes(x, w, bias, dtype)

    # Of the same name in every process: compilation caches know programs by their text.
    digest = hashlib.sha256(repr((op, tree, dtype)).encode()).hexdigest()[:8]
    convolution.__name__ = f"jaxquant_convolution_{digest}"
    CONVOLUTIONS[convolution.__name__] = op, tree
    return jax.jit(convolution)


def product(op: Dot | Conv, x: Any, w: Any, spec: Spec, scales: Scales, bias: Any, dtype: Any) -> jax.Array:
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


def dot(
    x: Any, w: Any, numbers: Any, spec: Spec, scales: Scales = Scales(), bias: Any = None, dtype: Any = None  # noqa: B008
) -> jax.Array:  # fmt: skip
    x = jnp.asarray(x)
    w = w if isinstance(w, QArray) else jnp.asarray(w)
    numbers = tuple(tuple(tuple(int(d) for d in axes) for axes in pair) for pair in numbers)
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    op = Dot(numbers)
    c = op.axes(x, w)
    if not isinstance(w, QArray) and _fits_qat_dense(x, w, c, spec, scales) and dtype == x.dtype:
        of_x, of_w = op.hows(x, w, spec)
        w_scale = x_scale = None  # which qat_dense chooses by column and by row
        if scales.kernel is not None:
            w_scale = parameters(w, of_w, scales.kernel)
        elif spec.w_granularity is not None:
            w_scale = choose.choose_qparams(w, spec.w_granularity, qtype=spec.w_qtype)
        if scales.input is not None and of_x is not None:
            q = parameters(x, of_x, scales.input)
            x_scale = QParams(q.scale.reshape(()), None, q.qtype, q.qmin, q.qmax)
        return qat_dense(x, w, bias, w_scale=w_scale, x_scale=x_scale, w_qtype=spec.w_qtype, x_qtype=spec.x_qtype)
    return product(op, x, w, spec, scales, bias, dtype)


def _fits_qat_dense(x: Any, w: Any, c: contraction.Contraction, spec: Spec, scales: Scales) -> bool:
    """Whether `qat_dense` computes it: the same value, with less kept for the backward."""
    given = scales.input
    if isinstance(given, QParams) and (given.zero_point is not None or jnp.dtype(given.qtype) != jnp.int8):
        return False
    plain = c.x_contract == (x.ndim - 1,) and c.w_contract == (0,) and w.ndim == 2 and not c.x_batch
    return plain and spec.x_granularity in (None, PerToken()) and spec.symmetric and spec.x_qtype == "int8"
