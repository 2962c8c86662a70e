"""jaxquant's own primitives as QuantizeLinear, DequantizeLinear and products of what these give."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant._core.errors import refuse
from jaxquant._core.primitive import bind
from jaxquant.affine import layout as layouts
from jaxquant.affine import qtypes
from jaxquant.affine.packing import unpack
from jaxquant.affine.quantize import quantize_p
from jaxquant.export.graph import NAME, Constant, Graph, Quantised, Tensor, Value, scalar, smallest_type
from jaxquant.export.lax_rules import binary, convolution, product, rule, unary, unsupported
from jaxquant.nn.products import CONVOLUTIONS

STATIC = "give a static scale, such as a QParams from choose_qparams or an observer"


def _parameters(*values: Value) -> list[np.ndarray]:
    for value in values:
        if not isinstance(value, Constant):
            raise refuse(NAME, "scale", "scales and zero points that do not depend on the inputs", "such as do", STATIC)
    _is_float64(*values)
    return [np.asarray(value.value, np.float32) for value in values if isinstance(value, Constant)]


def _with_zero_point(scale: Value, zero_point: Value | None) -> list[np.ndarray]:
    """None, and no elements, are zero."""
    scales, *zeros = _parameters(scale, *[] if zero_point is None else [zero_point])
    return [scales, zeros[0] if zeros and zeros[0].size else np.zeros((1,) * scales.ndim, np.float32)]


def _is_float64(*values: Any) -> None:
    if any(np.dtype(v.dtype) == np.float64 for v in values):
        raise refuse(NAME, "x", "float32, float16 or bfloat16", "float64", "convert it", TypeError)


@rule("jaxquant_quantize")
def _quantize(g: Graph, eqn: Any, x: Value, scale: Value, zero_point: Value) -> Value:
    p, out = eqn.params, eqn.outvars[0].aval
    _is_float64(x)
    scales, zeros = _parameters(scale, zero_point)
    if isinstance(x, Constant):  # folded, but for its code type
        value = bind(eqn.primitive, jnp.asarray(x.value), jnp.asarray(scales), jnp.asarray(zeros), **p)
        return Constant(np.asarray(value), smallest_type(p["qmin"], p["qmax"]))
    if p["packed_bits"]:
        raise unsupported("packed codes of activations", "quantise them with packed=False")
    return g.cast(g.quantised(x, scales, zeros, p["qmin"], p["qmax"]), out.dtype)


@rule("jaxquant_fake_quantize")
def _fake_quantize(g: Graph, eqn: Any, x: Value, scale: Value, zero_point: Value) -> Value:
    low, high = eqn.params["qmin"], eqn.params["qmax"]
    _is_float64(x)
    scales, zeros = _parameters(scale, zero_point)
    qtype = smallest_type(low, high)
    if isinstance(x, Constant):
        codes = bind(
            quantize_p, jnp.asarray(x.value), jnp.asarray(scales), jnp.asarray(zeros), packed_bits=0, qmin=low,
            qmax=high, out_dtype=qtypes.QTYPES[qtype].container, implementation=eqn.params["implementation"],
        )  # fmt: skip
        return g.cast(Quantised(np.asarray(codes), scales, zeros, qtype), x.dtype)
    return g.cast(g.dequantised(g.quantised(x, scales, zeros, low, high), scales, zeros), x.dtype)


@rule("jaxquant_dequantize")
def _dequantize(g: Graph, eqn: Any, q: Value, scale: Value, zero_point: Value) -> Value:
    scales, zeros = _parameters(scale, zero_point)
    dtype = np.dtype(eqn.params["dtype"])
    name = np.dtype(q.dtype).name
    _is_float64(eqn.outvars[0].aval)
    if name not in ("int8", "uint8", "int16", "uint16"):
        raise unsupported(f"codes kept in {name}", "quantise with dtype=None: integers of the code's own width")
    if isinstance(q, Constant):
        return g.cast(Quantised(q.value, scales, zeros, q.qtype or name), dtype)
    return g.cast(g.dequantised(g.tensor(q), scales, zeros), dtype)


@rule("jaxquant_unpack")
def _unpack(g: Graph, eqn: Any, packed: Value) -> Value:
    p = eqn.params
    if not isinstance(packed, Constant):
        raise unsupported("unpacking of codes that depend on the inputs", "quantise them with packed=False")
    qtype = f"{'' if p['signed'] else 'u'}int{p['bits']}"
    return Constant(np.asarray(unpack(packed.value, qtype, p["size"])), qtype)


# ------------------------------------------------------------------------------------------------------------- products


def _matrix(
    g: Graph, data: Value, scale: Value, zero_point: Value, bits: int, signed: bool, n: Any, k: Any, prepared: bool
) -> Quantised:
    """w [k, n], or [b, k, n], of the operands of a product."""
    if not isinstance(data, Constant):
        raise refuse(NAME, "w", "weights that do not depend on the inputs", "such as do", "close over them")
    qtype = f"{'' if signed else 'u'}int{bits}"
    codes = np.asarray(layouts.codes_of(jnp.asarray(data.value), bits=bits, signed=signed, k=k, n=n, prepared=prepared))
    if bits == 8 and data.qtype:
        qtype = data.qtype  # unpacked before the product
    scales, zeros = _with_zero_point(scale, zero_point)
    w = Quantised(codes, scales, zeros, qtype)
    one = w.reshape(codes.shape[1:]) if len(codes) == 1 else None
    return w if one is None else one


@rule("jaxquant_weight_only_matmul")
def _weight_only(g: Graph, eqn: Any, x: Value, data: Value, scale: Value, zero_point: Value) -> Value:
    w, out = eqn.params["weight"], eqn.outvars[0].aval
    matrix = _matrix(g, data, scale, zero_point, w.bits, w.signed, w.n, w.k, w.layout == "prepared")
    x = g.cast(g.full(x, eqn.invars[0].aval.shape), np.float32)
    return g.cast(product(g, x, matrix, out.shape, np.float32), out.dtype)


@rule("jaxquant_scaled_matmul")
def _scaled(
    g: Graph, eqn: Any, a: Value, a_scale: Value, a_zero: Value, data: Value, w_scale: Value, w_zero: Value, bias: Value
) -> Value:
    p, out = eqn.params, eqn.outvars[0].aval
    k = eqn.invars[0].aval.shape[-1]
    w = _matrix(g, data, w_scale, w_zero, p["bits"], p["signed"], p["n"], k, p["prepared"])
    if isinstance(a_scale, Tensor):
        y = _of_rows(g, a, a_scale, w, out)
    else:
        scales, zeros = _with_zero_point(a_scale, a_zero)
        x = g.dequantised(g.tensor(a), scales, zeros)
        y = product(g, x, w, out.shape, np.float32)
    if eqn.invars[-1].aval.size:
        y = binary(g, "Add", y, g.reshape(bias, (1, 1, bias.shape[0])))
    return g.cast(y, out.dtype)


def convolved(g: Graph, eqn: Any, operands: list[Value]) -> Value | None:
    """A layer's convolution of codes as Conv of their values; None: under scales that depend on the inputs, or mapped
    over more than examples."""
    op, tree = CONVOLUTIONS[eqn.params["name"]]
    out, (x, w, bias) = eqn.outvars[0].aval, jax.tree.unflatten(tree, operands)
    d, one = len(op.strides), (1,) * (w.ndim - 1)
    examples = x.data.shape[: x.ndim - d - 1]
    known = all(v is None or isinstance(v, Constant) for v in (x.scale, x.zero_point, *jax.tree.leaves(w), bias))
    # vmap puts an axis before that of examples, which is 1 then.
    fits = out.shape[: len(examples)] == examples and (len(examples) == 1 or examples[1:] == (1,))
    whole = qtypes.QTYPES[x.qtype.name].bits == 8 and w.layout == "plain"
    if not (known and fits and whole and x.scale.value.size == 1):
        return None
    scale, zero_point = _with_zero_point(x.scale, x.zero_point)
    values = g.dequantised(g.tensor(x.data), scale.reshape((1,) * x.ndim), zero_point.reshape((1,) * x.ndim))
    code = qtypes.QTYPES[w.qtype.name]
    codes = w.data.value if code.bits == 8 else np.asarray(unpack(w.data.value, code.name, w.shape[-1]))
    scale, zero_point = _with_zero_point(w.scale, w.zero_point)
    kernel = Quantised(codes, scale, zero_point, code.name)
    merged = jax.ShapeDtypeStruct((examples[0], *out.shape[len(examples) :]), np.float32)
    y = convolution(
        g, g.reshape(values, (examples[0], *x.shape[len(examples) :])), kernel, op.numbers, merged, op.strides,
        op.dilation, op.groups, ((0, 0),) * d,
    )  # fmt: skip
    if bias is not None:
        y = binary(g, "Add", y, g.reshape(g.cast(bias, np.float32), (*one, bias.shape[0])))
    return g.cast(g.reshape(y, out.shape), out.dtype)


@rule("jaxquant_int_matmul")
def _int_matmul(g: Graph, eqn: Any, a: Value, b: Value) -> Value:
    shape = eqn.invars[1].aval.shape
    b = g.reshape(b, shape[1:]) if shape[0] == 1 else b
    return product(g, g.full(a, eqn.invars[0].aval.shape), b, eqn.outvars[0].aval.shape, np.int32)


def _of_rows(g: Graph, a: Value, a_scale: Tensor, w: Quantised, out: Any) -> Tensor:
    """The kernel's own arithmetic, for rows with scales of their own: exact sums of integers, then the scales."""
    if len(w.shape) != 2 or w.zero_point.any() or w.scale.shape[0] != 1:
        raise unsupported(
            "activations quantised on the way (lhs_qtype) by weights in groups, in a batch, or with zero points", STATIC
        )
    codes = Constant(w.codes)
    sums = g.cast(product(g, a, codes, out.shape, np.int32), np.float32)
    return binary(g, "Mul", binary(g, "Mul", sums, Constant(w.scale[None])), a_scale)


# ----------------------------------------------------------------------------------------------- chosen from the values


@rule("jaxquant_dynamic_quantize", "jaxquant_dynamic_fake_quantize")
def _dynamic(g: Graph, eqn: Any, x: Value) -> Any:
    """The rule in elementary nodes: DynamicQuantizeLinear has another one."""
    p, aval = eqn.params, eqn.invars[0].aval
    _is_float64(x)
    block = p["block"]
    whole = [d for d in range(len(block)) if block[d] == -1]
    if not p["symmetric"] or any(b not in (-1, 1) for b in block) or p.get("packed_bits"):
        raise unsupported("dynamic quantisation other than symmetric int8 of whole axes", STATIC)
    t = g.caught_up(g.cast(g.full(x, aval.shape), np.float32))
    shape = tuple(1 if d in whole else n for d, n in enumerate(aval.shape))
    largest = g.result(
        "ReduceMax", g.node("Abs", t.name), g.initializer(np.array(whole, np.int64), "axes"), shape=shape,
        dtype=np.float32, keepdims=1,
    )  # fmt: skip
    tiny, one = (g.initializer(np.float32(v), "limit") for v in (np.finfo(np.float32).tiny, 1))
    quotient = binary(g, "Div", largest, scalar(p["qmax"]))
    quotient = binary(g, "Max", quotient, scalar(np.finfo(np.float32).tiny))
    name = g.node("Where", g.node("Less", largest.name, tiny), one, quotient.name, hint="scale")
    scale = Tensor(name, shape, None, shape, np.dtype(np.float32))
    steps = unary(g, "Round", binary(g, "Div", t, scale))
    clipped = binary(g, "Min", binary(g, "Max", steps, scalar(p["qmin"])), scalar(p["qmax"]))
    zero = Constant(np.zeros((1,) * len(shape), np.float32))
    if "out_dtype" in p:
        return [g.cast(clipped, p["out_dtype"]), scale, zero]
    return [g.cast(binary(g, "Mul", clipped, scale), aval.dtype), scale, zero]
