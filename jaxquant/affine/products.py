"""Products with quantised matrices, as jax.numpy and jax.lax have them.

matmul(), dot_general(), einsum()  ->  weight_only.py (float activations), int_matmul.py (quantised ones)
ragged_dot()                       ->  the same, a tile of rows of one group at a time

As far as derivatives go, both kinds are linear in x: a product of quantised activations passes its gradient straight
through their rounding, and the derivative of either is the product of floats with the dequantised matrix.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxquant._core import compat, ffi
from jaxquant._core.errors import refuse
from jaxquant._core.primitive import bind
from jaxquant.affine import contraction, einsums
from jaxquant.affine.contraction import Contraction, Matrices
from jaxquant.affine.dynamic import dynamic_quantize
from jaxquant.affine.granularity import PerToken
from jaxquant.affine.int_matmul import scaled_matmul
from jaxquant.affine.qarray import QArray
from jaxquant.affine.weight_only import Weight, no_zero_point, weight_only_matmul_p
from jaxquant.ggml import products as ggml
from jaxquant.ggml.qtensor import QTensor

FLOATS = ("float32", "float16", "bfloat16")


def matmul(
    x: Any, w: Any, *, lhs_qtype: Any = None, preferred_element_type: Any = None, bias: Any = None,
    implementation: str | None = None,
) -> jax.Array:  # fmt: skip
    """``jnp.matmul(x, w)`` with a quantised right operand.

    Args:
      x: float32, float16 or bfloat16 ``[..., m, k]`` or ``[k]``; or a `QArray` with scales per token or tensor, whose
        codes are multiplied as they are.
      w: a `QArray` ``[..., k, n]`` or ``[k]``, plain or prepared, with scales of any shape: those along n and in groups
        along k serve as they are, others are repeated until they do. An ordinary array goes to ``jnp.matmul``. Leading
        axes broadcast.
      lhs_qtype: None: float activations by the weights as dequantised, sums in float32. ``jnp.int8``: x is quantised on
        the way, symmetrically with a scale for each row (`dynamic_quantize` per token), and integers are multiplied.
      preferred_element_type: of the result: float32, float16 or bfloat16. None is x's own, float32 for a `QArray`.
      bias: None or floating ``[n]``. A product of integers adds it in float32, before it is rounded to its type.
      implementation: None, "ffi" or "xla", as for `fake_quantize`.

    Returns:
      As ``jnp.matmul``. A product of integers has the same bits on every instruction set, in any batch and from either
      layout of w; `qat_dense` has these bits in training.

    Gradients: in x, ``dy @ w.T`` with the dequantised w and sums in float32, with ``jnp.int8`` straight through the
    rounding; in the bias. w has none: its scale is taken as constant (`qat_dense` learns scales). Forward and reverse
    mode, any order.

    Raises:
      ValueError: shapes that do not match; a `QTensor`, which is contracted along its last axis (`ggml.linear`).
      TypeError: another dtype, or lhs_qtype.
      NotImplementedError: ``jnp.int8``, or a `QArray` x, with a w of 16 bits.

    >>> w = QArray.from_codes(jnp.array([[2, 4], [-6, 8]], jnp.int8), jnp.array([[0.5, 0.25]]))
    >>> matmul(jnp.array([1.0, 2.0]), w)
    Array([-5.,  5.], dtype=float32)
    """
    name = "matmul"
    if not isinstance(w, (QArray, QTensor)):
        x = _check_plain(name, x, lhs_qtype)
        return _biased(jnp.matmul(x, w, preferred_element_type=preferred_element_type), bias)
    if isinstance(w, QTensor):
        remedy = "it is contracted along its last axis: use ggml.linear or einsum('...k,nk->...n', x, w)"
        raise refuse(name, "w", "a matrix [k, n]", f"a QTensor of shape {w.shape}", remedy)
    x = _check_x(name, x)
    for operand, array in (("x", x), ("w", w)):
        if array.ndim == 0:
            raise refuse(name, operand, "at least one axis", "a scalar", "multiply by it")
    k_axis = max(w.ndim - 2, 0)
    if x.shape[-1] != w.shape[k_axis]:
        remedy = f"x's last axis is contracted with axis {k_axis} of w with shape {w.shape}"
        raise refuse(name, "x", f"{w.shape[k_axis]} values along the last axis", str(x.shape), remedy)
    lead, w_lead = x.shape[:-2], w.shape[:-2]
    try:
        both = jnp.broadcast_shapes(lead, w_lead)
    except ValueError:
        remedy = "reshape one of them"
        raise refuse(name, "w", f"leading axes that broadcast with x's {lead}", str(w_lead), remedy) from None
    tail = (*x.shape[-2:-1], *w.shape[-1:][: w.ndim - 1])
    if math.prod(w_lead) == 1:  # every row of x meets the same matrix
        w, batch = contraction.lead_by(w, (), len(w_lead)), 0
    else:
        w, batch = contraction.lead_by(w, both, len(w_lead)), len(both)
        x = contraction.lead_by(x, (1,) * batch if math.prod(lead) == 1 else both, len(lead))
    axes = tuple(range(batch))
    c = Contraction(
        (x.ndim - 1,), (batch,), axes, axes, tuple(range(batch, x.ndim - 1)), tuple(range(batch + 1, w.ndim))
    )
    return _contract(name, x, w, c, lhs_qtype, preferred_element_type, bias, implementation).reshape(*both, *tail)


def dot_general(
    x: Any, w: Any, dimension_numbers: Any, precision: Any = None, preferred_element_type: Any = None, *,
    lhs_qtype: Any = None, bias: Any = None, implementation: str | None = None,
) -> jax.Array:  # fmt: skip
    """``jax.lax.dot_general(x, w, dimension_numbers)`` with a quantised right operand.

    Args:
      x: as for `matmul`, of any rank.
      w: a `QArray` of any rank; or a `ggml.QTensor` ``[n, k]``, contracted along its last axis alone, or ``[b, n, k]``
        with batch axis 0; an ordinary array goes to ``jax.lax.dot_general``. A `QArray` is read where it lies if its
        axes are batch, contracted and one more, in this order; else its codes are rearranged at every call.
      dimension_numbers: ``((x contracted, w contracted), (x batch, w batch))``.
      precision: of ordinary arrays; products of quantised ones sum in int32 or float32.
      preferred_element_type, lhs_qtype, implementation: as for `matmul`. A `QTensor` with ``jnp.int8`` quantises x in
        its own blocks, as `ggml.linear` does.
      bias: None or floating, of the shape of w's remaining axes.

    Returns, gradients, raises: as `matmul`. The result's axes are batch, x's remaining, w's remaining.

    >>> w = QArray.from_codes(jnp.array([[2, 4], [-6, 8]], jnp.int8), 0.5)
    >>> dot_general(jnp.array([1.0, 2.0]), w, (((0,), (1,)), ((), ())))
    Array([5., 5.], dtype=float32)
    """
    name = "dot_general"
    if not isinstance(w, (QArray, QTensor)):
        x = _check_plain(name, x, lhs_qtype)
        y = jax.lax.dot_general(x, jnp.asarray(w), dimension_numbers, precision, preferred_element_type)
        return _biased(y, bias)
    return _general(
        name, _check_x(name, x), w, dimension_numbers, lhs_qtype, preferred_element_type, bias, implementation
    )


def einsum(
    spec: str, x: Any, w: Any, *, lhs_qtype: Any = None, preferred_element_type: Any = None, bias: Any = None,
    implementation: str | None = None,
) -> jax.Array:  # fmt: skip
    """``jnp.einsum(spec, x, w)`` with a quantised second operand.

    Args:
      spec: two operands. Every index of one is in the other or in the result; none comes twice in one operand.
      x, w: as for `dot_general`.
      lhs_qtype, preferred_element_type, bias, implementation: as for `dot_general`.

    Returns, gradients: as `matmul`.

    Raises:
      NotImplementedError: a spec that is no batched product of matrices: sums over one operand alone, diagonals, an
        ellipsis that broadcasts an axis of 1.
      ValueError, TypeError: as `matmul`.

    >>> w = QArray.from_codes(jnp.array([[2, 4], [-6, 8]], jnp.int8), 0.5)
    >>> einsum("...k,nk->...n", jnp.array([1.0, 2.0]), w)
    Array([5., 5.], dtype=float32)
    """
    name = "einsum"
    if not isinstance(w, (QArray, QTensor)):
        x = _check_plain(name, x, lhs_qtype)
        return _biased(jnp.einsum(spec, x, w, preferred_element_type=preferred_element_type), bias)
    x = _check_x(name, x)
    numbers, order = einsums.parse(spec, x.shape, w.shape)
    y = _general(name, x, w, numbers, lhs_qtype, preferred_element_type, bias, implementation)
    return y if order == tuple(range(y.ndim)) else y.transpose(order)


ROWS = 64  # of a tile of `ragged_dot`


def ragged_dot(
    x: Any, w: Any, group_sizes: Any, *, lhs_qtype: Any = None, preferred_element_type: Any = None,
    implementation: str | None = None,
) -> jax.Array:  # fmt: skip
    """``jax.lax.ragged_dot(x, w, group_sizes)`` with quantised matrices: rows sorted by group, a matrix for each group.

    Args:
      x: float32, float16 or bfloat16 ``[m, k]``: the first ``group_sizes[0]`` rows go to matrix 0, the next to 1, ...
      w: a `QArray` ``[groups, k, n]``; or a `ggml.QTensor` ``[groups, n, k]``, for which this is `ggml.ragged_linear`;
        an ordinary array goes to ``jax.lax.ragged_dot``.
      group_sizes: ``[groups]`` integers. Rows beyond their sum give zeros.
      lhs_qtype, preferred_element_type, implementation: as for `matmul`.

    Returns:
      ``[m, n]``, each row with the bits that `matmul` with its group's matrix gives. The rows of a group are multiplied
      in tiles, one after the other.

    Gradients, raises: as `matmul`.

    >>> w = QArray.from_codes(jnp.array([[[2]], [[4]]], jnp.int8), 0.5)
    >>> ragged_dot(jnp.ones((3, 1)), w, jnp.array([1, 2]))
    Array([[1.],
           [2.],
           [2.]], dtype=float32)
    """
    name = "ragged_dot"
    if not isinstance(w, (QArray, QTensor)):
        x = _check_plain(name, x, lhs_qtype)
        return jax.lax.ragged_dot(x, jnp.asarray(w), group_sizes, preferred_element_type=preferred_element_type)
    x = _check_float(name, _check_x(name, x))
    if isinstance(w, QTensor):
        wide, dtype = _wide(name, x, preferred_element_type)
        y = ggml.ragged_linear(x.astype(wide), w, group_sizes, lhs_qtype=lhs_qtype, implementation=implementation)
        return y.astype(dtype)
    group_sizes = jnp.asarray(group_sizes)
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        got = f"shapes {x.shape} and {w.shape}"
        raise refuse(name, "x, w", "[m, k] and [groups, k, n]", got, "flatten the leading axes")
    if group_sizes.shape != w.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        got = f"{group_sizes.dtype.name} of shape {group_sizes.shape}"
        raise refuse(name, "group_sizes", f"{w.shape[0]} integers, one for each group", got, "count the rows")
    m, groups = x.shape[0], w.shape[0]
    c = Contraction((1,), (0,), (), (), (0,), (1,))
    call = partial(
        _contract,
        name,
        c=c,
        lhs_qtype=lhs_qtype,
        dtype=preferred_element_type,
        bias=None,
        implementation=implementation,
    )
    if m == 0 or groups == 0:
        _, dtype = _wide(name, x, preferred_element_type)
        return jnp.zeros((m, w.shape[2]), dtype)
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), m)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    rows = min(ROWS, m)
    last_tile = jnp.cumsum((ends - starts + rows - 1) // rows)
    first_tile = jnp.concatenate([jnp.zeros(1, jnp.int32), last_tile[:-1]])
    # A group begins a tile of its own, and no tile is empty.
    tiles = jnp.arange(min(m // rows + groups, m), dtype=jnp.int32)
    group = _place(tiles, last_tile)
    row = (starts[group] + (tiles - first_tile[group]) * rows)[:, None] + jnp.arange(rows, dtype=jnp.int32)
    of_tiles = x.at[row].get(mode="clip")
    w = contraction.lead_by(w, (groups,), 1)

    # Recomputed in the backward: a matrix for each tile would otherwise be kept.
    @partial(jax.checkpoint, prevent_cse=False)
    def product(of_tile: Any, g: Any) -> Any:
        return call(of_tile, jax.tree.map(lambda leaf: leaf[g], w))

    _, products = jax.lax.scan(lambda carry, tile: (carry, product(*tile)), None, (of_tiles, group))
    each = jnp.arange(m, dtype=jnp.int32)
    own = _place(each, ends)
    inside = each - starts[own]
    y = products[first_tile[own] + inside // rows, inside % rows]
    return jnp.where((each < ends[-1])[:, None], y, 0)


def _place(values: Any, ends: Any) -> Any:
    """How many of the ends lie at or below each value, at most the last's index: the group of a row."""
    found = (values[:, None] >= ends).sum(axis=1, dtype=jnp.int32)
    return jnp.minimum(found, ends.shape[0] - 1)


# ---------------------------------------------------------------------------------------------------------- arguments


def _check_plain(name: str, x: Any, lhs_qtype: Any) -> Any:
    """x for a w that is an ordinary array."""
    if lhs_qtype is not None or isinstance(x, (QArray, QTensor)):
        got = "an ordinary array"
        raise refuse(name, "w", "a QArray where x is quantised", got, "see jaxquant.dynamic_quantize", TypeError)
    return jnp.asarray(x)


def _check_x(name: str, x: Any) -> Any:
    return x if isinstance(x, QArray) else _check_float(name, x)


def _check_float(name: str, x: Any) -> jax.Array:
    if isinstance(x, (QArray, QTensor)):
        raise refuse(name, "x", "a floating array", type(x).__name__, "dequantise it", TypeError)
    x = jnp.asarray(x)
    if x.dtype.name not in (*FLOATS, "float64"):
        raise refuse(name, "x", f"one of {', '.join(FLOATS)}", x.dtype.name, "convert it", TypeError)
    return x


def _check_lhs(name: str, lhs_qtype: Any) -> bool:
    """Whether x is to be quantised."""
    if lhs_qtype is None:
        return False
    if jnp.dtype(lhs_qtype) != jnp.int8:
        raise refuse(name, "lhs_qtype", "jnp.int8 or None", str(lhs_qtype), "None multiplies floats", TypeError)
    return True


def _wide(name: str, x: Any, preferred: Any) -> tuple[Any, Any]:
    """The type that floats are multiplied in, and that of the result."""
    own = jnp.dtype(jnp.float32) if isinstance(x, QArray) else x.dtype
    dtype = own if preferred is None else jnp.dtype(preferred)
    if dtype.name not in (*FLOATS, "float64"):
        remedy = "leave it out, or convert the result"
        raise refuse(name, "preferred_element_type", f"one of {', '.join(FLOATS)}", dtype.name, remedy, TypeError)
    return jnp.promote_types(own, dtype), dtype


def _biased(y: jax.Array, bias: Any) -> jax.Array:
    return y if bias is None else y + jnp.asarray(bias).astype(y.dtype)


def _check_bias(name: str, bias: Any, shape: tuple[Any, ...]) -> Any:
    """None or [n] in float32."""
    if bias is None:
        return None
    bias = jnp.asarray(bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise refuse(name, "bias", "a floating array", bias.dtype.name, "convert it", TypeError)
    if bias.shape != shape:
        raise refuse(name, "bias", f"shape {shape}", str(bias.shape), "give one value for each column of w")
    return bias.astype(jnp.float32).reshape(math.prod(shape))


# ------------------------------------------------------------------------------------------------------------ products


def _general(
    name: str, x: Any, w: Any, numbers: Any, lhs_qtype: Any, dtype: Any, bias: Any, implementation: str | None
) -> jax.Array:
    c = contraction.resolve(name, x, w, numbers)
    if isinstance(w, QTensor):
        return _block_formats(name, x, w, c, lhs_qtype, dtype, bias, implementation)
    return _contract(name, x, w, c, lhs_qtype, dtype, bias, implementation)


def _block_formats(
    name: str, x: Any, w: QTensor, c: Contraction, lhs_qtype: Any, dtype: Any, bias: Any, implementation: str | None
) -> jax.Array:
    x = _check_float(name, x)
    if c.w_contract != (w.ndim - 1,) or len(c.w_free) != 1 or c.w_batch not in ((), (0,)):
        expected = "a QTensor [n, k] or [b, n, k] contracted along k alone, b its batch axis"
        got = f"shape {w.shape}, axes {c.w_contract} contracted, {c.w_batch} batch"
        raise refuse(name, "w", expected, got, "reshape or dequantise it")
    wide, dtype = _wide(name, x, dtype)
    order = (*c.x_batch, *c.x_free, *c.x_contract)
    call = partial(ggml.linear, lhs_qtype=lhs_qtype, implementation=implementation)
    y = (jax.vmap(call) if c.w_batch else call)(x.transpose(order).astype(wide), w)
    bias = _check_bias(name, bias, (y.shape[-1],))
    return (y if bias is None else y + bias).astype(dtype)


def _contract(
    name: str, x: Any, w: QArray, c: Contraction, lhs_qtype: Any, dtype: Any, bias: Any, implementation: str | None
) -> jax.Array:
    """Axes batch (w's), x's free, w's free."""
    quantise = _check_lhs(name, lhs_qtype)
    implementation = ffi.check_implementation(name, implementation)
    wide, dtype = _wide(name, x, dtype)
    columns = tuple(w.shape[d] for d in c.w_free)
    bias = _check_bias(name, bias, columns)
    shape = (*(w.shape[d] for d in c.w_batch), *(x.shape[d] for d in c.x_free), *columns)
    of_integers = quantise or isinstance(x, QArray)
    few_bits, double = jnp.iinfo(w.qtype).bits <= 8, jnp.float64 in (wide, dtype)
    if of_integers and not few_bits:
        remedy = "use lhs_qtype=None" if quantise else "dequantise x"
        raise NotImplementedError(f"{name}: no product of integers with w of {w.qtype}; {remedy}.")
    if of_integers and double:
        remedy = "convert x, or use lhs_qtype=None"
        raise refuse(name, "x", f"one of {', '.join(FLOATS)}, and such a result", "float64", remedy, TypeError)
    if not few_bits or double:
        assert not isinstance(x, QArray)
        return _dequantised(x.astype(wide), w, c, bias).astype(dtype)
    m = contraction.matrices(name, w, c)
    if isinstance(x, QArray):
        codes, scale, zero_point = contraction.quantised_rows(name, x, c)
        return integers(codes, scale, zero_point, m, bias, dtype, implementation).reshape(shape)
    rows = contraction.rows(x, c)
    if quantise:
        return _dynamic(*_match(rows, m, bias), (dtype, implementation)).reshape(shape)
    y = _floats(rows.astype(wide), m, implementation)
    return (y if bias is None else y + bias).astype(dtype).reshape(shape)


def _match(rows: Any, m: Matrices, bias: Any) -> tuple[Any, Any, Any]:
    """Operands that vary over the same manual axes, as custom rules require."""
    leaves, tree = jax.tree.flatten((rows, m, bias))
    return jax.tree.unflatten(tree, compat.match_varying_axes(*leaves))


def _dequantised(x: Any, w: QArray, c: Contraction, bias: Any) -> Any:
    values = jax.lax.stop_gradient(w.dequantize(x.dtype))
    numbers = ((c.x_contract, c.w_contract), (c.x_batch, c.w_batch))
    x = jnp.broadcast_to(x, (*(w.shape[d] for d in c.w_batch), *x.shape[len(c.x_batch) :])) if c.x_batch else x
    y = jax.lax.dot_general(x, values, numbers)
    return y if bias is None else y + bias.reshape([w.shape[d] for d in c.w_free]).astype(y.dtype)


def integers(
    codes: Any, scale: Any, zero_point: Any, m: Matrices, bias: Any, dtype: Any, implementation: str | None
) -> Any:
    return scaled_matmul(
        codes, scale, zero_point, m.data, m.scale, m.zero_point, bias,
        bits=m.bits, signed=m.signed, n=m.n, prepared=m.prepared, dtype=dtype, implementation=implementation,
    )  # fmt: skip


def _floats(rows: Any, m: Matrices, implementation: str | None) -> Any:
    zero_point = no_zero_point() if m.zero_point is None else m.zero_point
    weight = Weight(m.bits, m.signed, m.n, m.k, "prepared" if m.prepared else "plain")
    return bind(weight_only_matmul_p, rows, m.data, m.scale, zero_point, weight=weight, implementation=implementation)


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _dynamic(rows: Any, m: Matrices, bias: Any, static: tuple[Any, str | None]) -> Any:
    """The product of x quantised row by row."""
    dtype, implementation = static
    x = dynamic_quantize(rows, PerToken(), implementation=implementation)
    return integers(x.data, x.scale, None, m, bias, dtype, implementation)


@partial(_dynamic.defjvp, symbolic_zeros=True)
def _dynamic_jvp(static: Any, primals: Any, tangents: Any) -> Any:
    rows, m, bias = primals
    dtype, implementation = static
    y = _dynamic(rows, m, bias, static)
    dot = jnp.zeros_like(y)
    if not isinstance(tangents[0], SymbolicZero):
        # Tangents are not quantised: the derivative of rounding is that of the identity.
        wide = jnp.promote_types(rows.dtype, dtype)
        dot = _floats(tangents[0].astype(wide), m, implementation).astype(dtype)
    if bias is not None and not isinstance(tangents[2], SymbolicZero):
        dot = dot + tangents[2].astype(dtype)
    return y, dot
