"""Products with block-quantised matrices.

linear()        ->  ggml_linear_p      ->  ffi/ggml/linear/
moe_linear()    ->  ggml_moe_linear_p  ->  ffi/ggml/linear/
gradients       ->  ggml_linear_gradient_p, ggml_moe_linear_gradient_p

They are linear in x: the derivative of a product is the same product with float activations, and its transpose is the
gradient kernel, which multiplies by the dequantised weights in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.interpreters import ad

from jaxquant._core import compat, ffi
from jaxquant._core.errors import refuse
from jaxquant._core.primitive import Axes, Operation, Result, bind, build
from jaxquant.ggml import reference
from jaxquant.ggml.codec import FLOATS, batched_front, mapped_size
from jaxquant.ggml.formats import formats
from jaxquant.ggml.layout import Layout, plain
from jaxquant.ggml.qtensor import QTensor


def linear(
    x: Any, w: QTensor, *, index: Any = None, lhs_qtype: Any = jnp.int8, implementation: str | None = None
) -> jax.Array:
    """``x @ w.T`` with a block-quantised matrix.

    Args:
      x: activations ``[..., k]``, float32, float16 or bfloat16.
      w: a `QTensor` of shape ``[n, k]``, plain or prepared; with ``index``, ``[layers, n, k]``.
      index: an integer, traced or not: the matrix of a stack. In a loop over layers the stack stays where it is, while
        ``w[index]``, or the slices that ``lax.scan`` takes, would copy every matrix before it is multiplied. Under jit
        an index out of range gives zeros.
      lhs_qtype: ``jnp.int8``: activations are quantised on the way, 32 values to a float32 scale, and the product is
        of integers; a normalised mean squared error below 1e-4 against exact products of Gaussian activations. None:
        float activations, the weights exactly as dequantised, sums in float32. F32, F16 and BF16 weights are always
        multiplied in floating point, and so is everything where there is no kernel.
      implementation: None, "ffi" or "xla", as for `jaxquant.fake_quantize`.

    Returns:
      ``[..., n]`` in x's dtype. On CPU the bits of a row do not depend on the rest of the batch, on the number of
      threads or on w's layout. A row with a non-finite value is NaN where activations are quantised.

    Gradients: ``dx = dy @ w`` with dequantised weights, in float32; w has none. Forward and reverse mode, any order.

    Raises:
      ValueError: another number of columns, or a w that is no matrix (use ``jax.vmap`` for stacked matrices).
      TypeError: another dtype of x, or lhs_qtype.

    >>> w = ggml.quantize(jnp.eye(4, 32), "Q8_0")
    >>> ggml.linear(jnp.arange(32.0), w, lhs_qtype=None).round(2)
    Array([0., 1., 2., 3.], dtype=float32)
    """
    name = "linear"
    x = _check_x(name, x)
    data = _check_weight(name, w, 2 if index is None else 3, "[n, k]" if index is None else "[layers, n, k] with index")
    _check_columns(name, x, w)
    if index is not None:
        if _is_known(index) and np.asarray(index).size and np.asarray(index).min() < 0:
            raise refuse(name, "index", f"0 to {w.shape[0] - 1}", str(index), "count from the front")
        index = _check_ids(name, index, w.shape[0], "index")
        if index.ndim != 0:
            raise refuse(name, "index", "one integer", f"shape {index.shape}", "see moe_linear for several")
        rows = x.reshape(-1, 1, x.shape[-1])
        ids = jnp.broadcast_to(index, (rows.shape[0], 1))
        out = bind(ggml_moe_linear_p, rows, data, ids, **_params(name, w, lhs_qtype, implementation))
        return out.reshape(*x.shape[:-1], w.shape[1])
    out = bind(
        ggml_linear_p,
        x.reshape(1, -1, x.shape[-1]) if x.ndim != 2 else x[None],
        data[None],
        **_params(name, w, lhs_qtype, implementation),
    )
    return out.reshape(*x.shape[:-1], w.shape[0])


def moe_linear(
    x: Any, w: QTensor, ids: Any, *, lhs_qtype: Any = jnp.int8, implementation: str | None = None
) -> jax.Array:
    """Each token times the matrices of its experts.

    Args:
      x: activations ``[tokens, top_k, k]``, or ``[tokens, 1, k]`` where the experts of a token see the same.
      w: a `QTensor` of shape ``[experts, n, k]``.
      ids: ``[tokens, top_k]`` integers, the experts; one may come twice. -1 stands for none: a row of zeros. Under jit
        so does any other id out of range; an array whose values are known is refused.
      lhs_qtype, implementation: as for `linear`.

    Returns:
      ``[tokens, top_k, n]`` in x's dtype, each row with the bits that `linear` gives. Tokens are grouped by expert: a
      matrix is read once for all the tokens it serves.

    Gradients: in x, as for `linear`.

    >>> w = ggml.quantize(jnp.stack([jnp.eye(2, 32), 2 * jnp.eye(2, 32)]), "Q8_0")
    >>> ggml.moe_linear(jnp.ones((1, 1, 32)), w, jnp.array([[1, 0]]), lhs_qtype=None).round(2)
    Array([[[2., 2.],
            [1., 1.]]], dtype=float32)
    """
    name = "moe_linear"
    x = _check_x(name, x)
    data = _check_weight(name, w, 3, "[experts, n, k]")
    _check_columns(name, x, w)
    ids = _check_ids(name, ids, w.shape[0])
    if ids.ndim != 2:
        raise refuse(name, "ids", "shape [tokens, top_k]", str(ids.shape), "add an axis")
    if x.ndim != 3 or x.shape[0] != ids.shape[0] or x.shape[1] not in (1, ids.shape[1]):
        expected = f"shape ({ids.shape[0]}, 1 or {ids.shape[1]}, k) for ids of shape {ids.shape}"
        raise refuse(name, "x", expected, str(x.shape), "x and ids have the tokens in front")
    return bind(ggml_moe_linear_p, x, data, ids, **_params(name, w, lhs_qtype, implementation))


def ragged_linear(
    x: Any, w: QTensor, group_sizes: Any, *, lhs_qtype: Any = jnp.int8, implementation: str | None = None
) -> jax.Array:
    """`moe_linear` of tokens sorted by expert, as ``jax.lax.ragged_dot`` takes them.

    Args:
      x: activations ``[tokens, k]``: the first ``group_sizes[0]`` rows go to matrix 0, the next to matrix 1, ...
      w: a `QTensor` of shape ``[experts, n, k]``.
      group_sizes: ``[experts]`` integers. Rows beyond their sum give zeros.
      lhs_qtype, implementation: as for `linear`.

    Returns:
      ``[tokens, n]`` in x's dtype.

    >>> w = ggml.quantize(jnp.stack([jnp.eye(2, 32), 2 * jnp.eye(2, 32)]), "Q8_0")
    >>> ggml.ragged_linear(jnp.ones((3, 32)), w, jnp.array([1, 2]), lhs_qtype=None).round(2)
    Array([[1., 1.],
           [2., 2.],
           [2., 2.]], dtype=float32)
    """
    name = "ragged_linear"
    x, known = _check_x(name, x), np.asarray(group_sizes) if _is_known(group_sizes) else None
    group_sizes = jnp.asarray(group_sizes)
    _check_weight(name, w, 3, "[experts, n, k]")
    _check_columns(name, x, w)
    if x.ndim != 2:
        raise refuse(name, "x", "shape [tokens, k]", str(x.shape), "flatten the leading axes")
    if group_sizes.shape != (w.shape[0],) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        got = f"{group_sizes.dtype.name} of shape {group_sizes.shape}"
        raise refuse(name, "group_sizes", f"{w.shape[0]} integers, one for each expert", got, "count the tokens")
    if known is not None and (known < 0).any():
        remedy = "count the tokens of each expert"
        raise refuse(name, "group_sizes", "integers, none negative", str(known.min()), remedy)
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    # The expert of row i: how many groups end at or before it; past the last group that is no expert. Compared one by
    # one: jnp.searchsorted fails where only some axes of a mesh are manual (jax 0.12).
    ids = (jnp.arange(x.shape[0], dtype=jnp.int32)[:, None] >= ends).sum(axis=1, dtype=jnp.int32)
    params = _params(name, w, lhs_qtype, implementation)
    return bind(ggml_moe_linear_p, x[:, None], w.data, ids[:, None], **params)[:, 0]


# ---------------------------------------------------------------------------------------------------------- arguments


def _check_x(name: str, x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if x.dtype.name not in FLOATS:
        raise refuse(name, "x", f"one of {', '.join(FLOATS)}", x.dtype.name, "convert it", TypeError)
    if x.ndim == 0:
        raise refuse(name, "x", "at least one axis", "a scalar", "give rows of k values")
    return x


def _check_weight(name: str, w: Any, ndim: int, shape: str) -> jax.Array:
    if not isinstance(w, QTensor):
        raise refuse(name, "w", "a QTensor", type(w).__name__, "see jaxquant.ggml.quantize", TypeError)
    if w.ndim != ndim:
        advice = "use jax.vmap or lax.scan over stacked matrices, moe_linear over experts"
        raise refuse(name, "w", f"shape {shape}", str(w.shape), advice)
    return w.data


def _check_columns(name: str, x: Any, w: QTensor) -> None:
    if x.shape[-1] != w.shape[-1]:
        remedy = f"w's last axis ({w.format.name} rows) is contracted with x's"
        raise refuse(name, "x", f"{w.shape[-1]} values along the last axis", str(x.shape), remedy)


def _check_ids(name: str, ids: Any, experts: int, operand: str = "ids") -> jax.Array:
    if _is_known(ids):
        known = np.asarray(ids)
        if known.size and np.issubdtype(known.dtype, np.integer) and (known.min() < -1 or known.max() >= experts):
            worst = known.min() if known.min() < -1 else known.max()
            raise refuse(name, operand, f"-1 for none, or 0 to {experts - 1}", str(worst), "mark padding with -1")
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise refuse(name, operand, "integers", ids.dtype.name, "convert them", TypeError)
    if ids.dtype == jnp.int32:
        return ids
    inside = (ids >= 0) & (ids <= np.iinfo(np.int32).max if ids.dtype.itemsize >= 4 else True)
    return jnp.where(inside, ids, -1).astype(jnp.int32) if ids.dtype.itemsize >= 4 else ids.astype(jnp.int32)


def _is_known(x: Any) -> bool:
    """Whether the host can look at an argument without waiting for a device."""
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        return x.is_fully_addressable and all(d.platform == "cpu" for d in x.devices())
    return isinstance(x, (list, tuple, int, np.ndarray, np.integer))


def _params(name: str, w: QTensor, lhs_qtype: Any, implementation: str | None) -> dict[str, Any]:
    if lhs_qtype is not None and jnp.dtype(lhs_qtype) != jnp.int8:
        raise refuse(name, "lhs_qtype", "jnp.int8 or None", str(lhs_qtype), "None multiplies floats", TypeError)
    return {
        "format": w.format.name,
        "layout": w._layout,
        "int8": lhs_qtype is not None and not w.format.is_float,
        "implementation": ffi.check_implementation(name, implementation),
    }


def _attributes(*, format: str, layout: Layout, int8: bool | None = None) -> dict[str, int]:
    integers = {"format": formats[format].type_id, "prepared": int(layout.prepared)}
    return integers if int8 is None else {**integers, "int8": int(int8)}


# ------------------------------------------------------------------------------------------------------------- linear
# x [b or 1, m, k], w [b, n, row_bytes] (or prepared) -> [b, m, n]; dy [b, m, n] -> dx [b, m, k]


def _linear_axes(x: Any, w: Any, *, format: str, layout: Layout, int8: bool) -> Axes:
    del int8
    units = {"b": w.shape[0], "m": x.shape[1], **layout.units(w, format)}
    batch = "b" if x.shape[0] == w.shape[0] != 1 else None
    return Axes([(batch, "m", "k"), ("b", "n", "k")], [("b", "m", "n")], units)


def _linear_gradient_axes(dy: Any, w: Any, *, format: str, layout: Layout) -> Axes:
    units = {"b": w.shape[0], "m": dy.shape[1], **layout.units(w, format)}
    return Axes([("b", "m", "n"), ("b", "n", "k")], [("b", "m", "k")], units)


def _linear_batch(primitive: Callable[[], Any], shared: bool) -> Callable[..., Any]:
    def batch(operands: Any, dims: Any, **params: Any) -> Any:
        x, w = operands
        size = mapped_size(operands, dims)
        if dims[1] is None:  # more tokens
            x = jnp.moveaxis(x, dims[0], 1)
            b, _, m, columns = x.shape
            out = bind(primitive(), x.reshape(b, size * m, columns), w, **params)
            return jnp.moveaxis(out.reshape(out.shape[0], size, m, out.shape[2]), 1, 0)
        w = jnp.moveaxis(w, dims[1], 0)
        b = w.shape[1]
        # One x for all matrices stays one in the product; the gradient has a dy for each.
        if dims[0] is not None or x.shape[0] != 1 or not shared:
            x = batched_front(x, dims[0], size)
            x = jnp.broadcast_to(x, (size, b, *x.shape[2:])).reshape(size * b, *x.shape[2:])
        out = bind(primitive(), x, w.reshape(size * b, *w.shape[2:]), **params)
        return out.reshape(size, b, *out.shape[1:])

    return batch


def _linear_reference(x: Any, w: Any, *, format: str, layout: Layout, int8: bool) -> Any:
    del int8
    return reference.linear(x, plain(w, format, layout), format)


def _linear_gradient_reference(dy: Any, w: Any, *, format: str, layout: Layout) -> Any:
    return reference.linear_dx(dy, plain(w, format, layout), format)


def _scratch(x: Any, w: Any, ids: Any = None, *, int8: bool = False, **_: Any) -> Result:
    """Memory for the kernels alone, as ProductScratchBytes of ffi/ggml/arguments.h counts it."""
    activations = x.shape[0] * x.shape[1] * (x.shape[-1] // 32) * 48 if int8 else 0
    lists = 0 if ids is None else 16 * (ids.shape[0] * ids.shape[1] + w.shape[0] + 1)
    return Result("full", (activations + lists,), jnp.uint8)


_SAME_BITS = "on each platform: any batch, thread count and layout"

ggml_linear_p = build(
    Operation(
        name="ggml_linear",
        operands=("full", "packed"),
        results=lambda x, w, *, layout, **_: [Result("full", (w.shape[0], x.shape[1], layout.rows(w)), x.dtype)],
        reference=_linear_reference,
        attributes=_attributes,
        scratch=_scratch,
        dtypes=FLOATS,
        axes=_linear_axes,
        batch=_linear_batch(lambda: ggml_linear_p, shared=True),
        same_bits=_SAME_BITS,
    )
)
ggml_linear_gradient_p = build(
    Operation(
        name="ggml_linear_gradient",
        operands=("full", "packed"),
        results=lambda dy, w, *, format, layout: [
            Result("full", (w.shape[0], dy.shape[1], layout.columns(w, format)), dy.dtype)
        ],
        reference=_linear_gradient_reference,
        attributes=_attributes,
        scratch=_scratch,
        dtypes=FLOATS,
        axes=_linear_gradient_axes,
        batch=_linear_batch(lambda: ggml_linear_gradient_p, shared=False),
        same_bits=_SAME_BITS,
    )
)

# ---------------------------------------------------------------------------------------------------------------- moe
# x [t, 1 or s, k], w [e, n, row_bytes], ids [t, s] -> [t, s, n]; dy [t, s, n] -> dx [t, s, k]


def _moe_axes(x: Any, w: Any, ids: Any, *, format: str, layout: Layout, int8: bool) -> Axes:
    del int8
    units = {"t": ids.shape[0], **layout.units(w, format)}
    return Axes([("t", None, "k"), (None, "n", "k"), ("t", None)], [("t", None, "n")], units)


def _moe_gradient_axes(dy: Any, w: Any, ids: Any, *, format: str, layout: Layout) -> Axes:
    units = {"t": ids.shape[0], **layout.units(w, format)}
    return Axes([("t", None, "n"), (None, "n", "k"), ("t", None)], [("t", None, "k")], units)


def _moe_batch(primitive: Callable[[], Any]) -> Callable[..., Any]:
    def batch(operands: Any, dims: Any, **params: Any) -> Any:
        x, w, ids = operands
        size = mapped_size(operands, dims)
        x, ids = batched_front(x, dims[0], size), batched_front(ids, dims[2], size)
        if dims[1] is not None:  # more experts
            w = jnp.moveaxis(w, dims[1], 0)
            experts = w.shape[1]
            base = experts * jnp.arange(size, dtype=ids.dtype)[:, None, None]
            ids = jnp.where((ids >= 0) & (ids < experts), ids + base, -1)
            w = w.reshape(size * experts, *w.shape[2:])
        tokens = ids.shape[1]
        out = bind(
            primitive(), x.reshape(size * tokens, *x.shape[2:]), w, ids.reshape(size * tokens, ids.shape[2]), **params
        )
        return out.reshape(size, tokens, *out.shape[1:])

    return batch


def _moe_reference(x: Any, w: Any, ids: Any, *, format: str, layout: Layout, int8: bool) -> Any:
    del int8
    return reference.moe_linear(x, plain(w, format, layout), ids, format)


def _moe_gradient_reference(dy: Any, w: Any, ids: Any, *, format: str, layout: Layout) -> Any:
    return reference.moe_linear_dx(dy, plain(w, format, layout), ids, format)


ggml_moe_linear_p = build(
    Operation(
        name="ggml_moe_linear",
        operands=("full", "packed", "scale"),
        results=lambda x, w, ids, *, layout, **_: [Result("full", (*ids.shape, layout.rows(w)), x.dtype)],
        reference=_moe_reference,
        attributes=_attributes,
        scratch=_scratch,
        dtypes=FLOATS,
        axes=_moe_axes,
        batch=_moe_batch(lambda: ggml_moe_linear_p),
        same_bits=_SAME_BITS,
    )
)
ggml_moe_linear_gradient_p = build(
    Operation(
        name="ggml_moe_linear_gradient",
        operands=("full", "packed", "scale"),
        results=lambda dy, w, ids, *, format, layout: [
            Result("full", (*ids.shape, layout.columns(w, format)), dy.dtype)
        ],
        reference=_moe_gradient_reference,
        attributes=_attributes,
        scratch=_scratch,
        dtypes=FLOATS,
        axes=_moe_gradient_axes,
        batch=_moe_batch(lambda: ggml_moe_linear_gradient_p),
        same_bits=_SAME_BITS,
    )
)

# ----------------------------------------------------------------------------------------------------- differentiation


def _make_linear_in_x(forward: Any, gradient: Any) -> None:
    """Rules of a pair of primitives that are each other's transpose in their first operand."""

    def forward_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = bind(forward, *primals, **params)
        if compat.is_zero(tangents[0]):
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        # Tangents are not quantised: the derivative of rounding is that of the identity.
        return out, bind(forward, tangents[0], *primals[1:], **{**params, "int8": False})

    def gradient_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = bind(gradient, *primals, **params)
        if compat.is_zero(tangents[0]):
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        return out, bind(gradient, tangents[0], *primals[1:], **params)

    def forward_transpose(cotangent: Any, x: Any, *rest: Any, int8: bool, **params: Any) -> Any:
        assert ad.is_undefined_primal(x) and not int8
        none = [None] * len(rest)
        if compat.is_zero(cotangent):
            return [ad.Zero(x.aval), *none]
        dx = bind(gradient, cotangent, *rest, **params)
        for axis, (have, want) in enumerate(zip(dx.shape, x.aval.shape, strict=True)):
            if want == 1 and have != 1:  # shared by matrices or slots
                dx = dx.sum(axis, keepdims=True)
        return [dx, *none]

    def gradient_transpose(cotangent: Any, dy: Any, *rest: Any, **params: Any) -> Any:
        assert ad.is_undefined_primal(dy)
        none = [None] * len(rest)
        if compat.is_zero(cotangent):
            return [ad.Zero(dy.aval), *none]
        return [bind(forward, cotangent, *rest, **params, int8=False), *none]

    ad.primitive_jvps[forward] = forward_jvp
    ad.primitive_jvps[gradient] = gradient_jvp
    ad.primitive_transposes[forward] = forward_transpose
    ad.primitive_transposes[gradient] = gradient_transpose


_make_linear_in_x(ggml_linear_p, ggml_linear_gradient_p)
_make_linear_in_x(ggml_moe_linear_p, ggml_moe_linear_gradient_p)
