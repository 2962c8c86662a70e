"""What layers of every framework compute: the value is that of the integers in training and in inference, to the bit.

dense()     ->  products.dot()
convolve()  ->  products.product(), with integer products of patches
embed()     ->  fake_quantize of the rows

The adapters (linen.py, nnx.py, equinox.py) keep kernels and `Scales` as their frameworks do, and call these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxquant._core.errors import refuse
from jaxquant.affine.granularity import PerAxis, PerToken
from jaxquant.affine.qarray import QArray
from jaxquant.nn.products import Conv, Dot, dot, product
from jaxquant.nn.rules import Spec
from jaxquant.nn.scales import How, Scales, initial_scale, observed, quantised, rounded, settled


def dense_scales(kernel: Any, x: Any, spec: Spec) -> Scales:
    """Scales to begin with for a kernel [k, n] and typical inputs [..., k]."""
    return _initial(Dot((((x.ndim - 1,), (0,)), ((), ()))), x, kernel, spec)


def dense(x: Any, kernel: Any, bias: Any, spec: Spec, scales: Scales = Scales()) -> jax.Array:  # noqa: B008
    """``x @ kernel + bias``; x [..., k], kernel [k, n], an array or a QArray."""
    return dot(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), spec, settled(spec, scales), bias)


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
    y = product(op, x, kernel, spec, settled(spec, scales), bias, x.dtype)
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
    if spec.learned or spec.x_observer is not None:  # the layer has no input scale: it quantises no inputs elsewhere
        spec = Spec(spec.w_qtype, None, spec.w_granularity, learned=spec.learned)
    return dot(query, table, numbers, spec, scales)


# ------------------------------------------------------------------------------------------------- what adapters share


class Kind(NamedTuple):
    """A layer: the scales it begins with, of a kernel and inputs; its kernel as integers; how to name it in Flax."""

    scales: Callable[[Any, Any, Spec], Scales]
    codes: Callable[[Any, Spec, Scales], QArray]
    parameter: str = "kernel"


DENSE, CONV = Kind(dense_scales, dense_kernel), Kind(conv_scales, conv_kernel)
EMBED = Kind(embed_scales, embed_kernel, "embedding")


def begin(kind: Kind, spec: Spec, kernel: Any, x: Any, features: int) -> Scales:
    """What a layer holds: scales for typical inputs x (None: like a standard normal variable) of so many features."""
    if spec.x_observer is not None and kind is not EMBED:
        return Scales(None, observed(spec.x_observer, None, x))
    if not spec.learned:
        return Scales()
    if x is None and kind is not EMBED:
        x = jax.random.normal(jax.random.key(0), (1024, *(1,) * (kernel.ndim - 2), features))
    return kind.scales(kernel, x, spec)


def converted(kind: Kind, spec: Spec, kernel: Any, scales: Scales, rank: int, arrange: Any = None) -> Any:
    """A layer's kernel as integers, and the scales that are left: the input's, constant where it was observed.

    Axes in front of the kernel's own rank, as of layers stacked for a scan, are mapped. arrange(kernel): as products
    read it.
    """

    def one(kernel: Any, scales: Scales) -> Any:
        codes = kind.codes(kernel if arrange is None else arrange(kernel), spec, scales)
        return codes, settled(spec, scales)._replace(kernel=None)

    for _ in range(kernel.ndim - rank):
        one = jax.vmap(one)
    return jax.jit(one)(kernel, scales)


def flax_operands(layer: Any, promote: Callable[..., Any], x: Any, kernel: Any, bias: Any) -> tuple[Any, Any, Any]:
    """Inputs, kernel and bias of a Flax layer in one dtype, by its own rule while the kernel floats."""
    if not isinstance(kernel, QArray):
        return promote(x, kernel, bias)
    dtype = layer.dtype or jnp.promote_types(x.dtype, layer.param_dtype)
    return x.astype(dtype), kernel, None if bias is None else bias.astype(dtype)


def flax_convolve(layer: Any, x: Any, kernel: Any, bias: Any, spec: Spec, scales: Scales) -> jax.Array:
    """`convolve` with the attributes of a Flax layer."""
    if layer.mask is not None or layer.input_dilation not in (None, 1):
        raise refuse("QuantConv", "mask, input_dilation", "neither", "one of them", "use the Conv of Flax there")
    return convolve(
        x, kernel, bias, spec, scales, strides=layer.strides, padding=layer.padding,
        dilation=layer.kernel_dilation, groups=layer.feature_group_count,
    )  # fmt: skip
