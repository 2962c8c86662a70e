"""JAX's own primitives as ONNX nodes: a rule takes the graph, the equation and its operands, and gives the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from jaxquant.export.graph import NAME, Constant, Graph, Quantised, Tensor, Value, is_static, scalar

Rule = Callable[..., Any]  # a value, or a list of them
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def unsupported(what: str, remedy: str) -> Exception:
    return NotImplementedError(f"{NAME}: {what}; {remedy}.")


# --------------------------------------------------------------------------------------------------- element by element

UNARY = {
    "abs": "Abs", "acos": "Acos", "asin": "Asin", "atan": "Atan", "ceil": "Ceil", "cos": "Cos", "cosh": "Cosh",
    "erf": "Erf", "exp": "Exp", "floor": "Floor", "is_nan": "IsNaN", "log": "Log", "logistic": "Sigmoid", "neg": "Neg",
    "sign": "Sign", "sin": "Sin", "sinh": "Sinh", "sqrt": "Sqrt", "tan": "Tan", "tanh": "Tanh",
}  # fmt: skip
BINARY = {
    "add": "Add", "add_any": "Add", "div": "Div", "eq": "Equal", "ge": "GreaterOrEqual", "gt": "Greater",
    "le": "LessOrEqual", "lt": "Less", "max": "Max", "min": "Min", "mul": "Mul", "pow": "Pow", "sub": "Sub",
}  # fmt: skip
LOGICAL = {"and": "And", "or": "Or", "xor": "Xor", "not": "Not"}


def unary(g: Graph, op: str, x: Value, dtype: Any = None) -> Tensor:
    t = g.tensor(x)
    return t.like(g.node(op, t.name), dtype=dtype)


def binary(g: Graph, op: str, x: Value, y: Value, dtype: Any = None) -> Tensor:
    """Both may be 1 along axes where the other is not. What lags stays behind where the other operand can follow."""
    if isinstance(x, Tensor) and isinstance(y, Constant):
        t, constant = _behind(g, x, y)
        names, other = (t.name, g.initializer(constant)), constant.shape
    elif isinstance(x, Constant) and isinstance(y, Tensor):
        t, constant = _behind(g, y, x)
        names, other = (g.initializer(constant), t.name), constant.shape
    else:
        t, u = g.tensor(x), g.tensor(y)
        if (t.base, t.permutation, t.shape) != (u.base, u.permutation, u.shape):
            t, u = g.caught_up(t), g.caught_up(u)
        names, other = (t.name, u.name), u.base
    out = g.node(op, *names)
    return t.like(out, t.base if t.reshaped else _broadcast(t.base, other), dtype)


def _behind(g: Graph, t: Tensor, constant: Constant) -> tuple[Tensor, np.ndarray]:
    value = constant.value
    if value.size == 1:
        return t, value.reshape(())
    if not t.reshaped:
        return t, value if t.permutation is None else value.transpose(np.argsort(t.permutation))
    last = t.permutation is None and value.size == value.shape[-1] and t.base[-1:] == t.shape[-1:] == value.shape[-1:]
    return (t, value.reshape(-1)) if last else (g.caught_up(t), value)


def _broadcast(a: Any, b: Any) -> tuple[Any, ...]:
    a, b = ((1,) * (max(len(a), len(b)) - len(s)) + tuple(s) for s in (a, b))
    return tuple(m if isinstance(n, int) and n == 1 else n for n, m in zip(a, b, strict=True))


for _name, _op in UNARY.items():
    RULES[_name] = lambda g, eqn, x, op=_op: unary(g, op, x, eqn.outvars[0].aval.dtype)
for _name, _op in BINARY.items():
    RULES[_name] = lambda g, eqn, x, y, op=_op: binary(g, op, x, y, eqn.outvars[0].aval.dtype)


@rule(*LOGICAL)
def _logical(g: Graph, eqn: Any, *operands: Value) -> Value:
    if eqn.outvars[0].aval.dtype != bool:
        raise unsupported(f"{eqn.primitive.name} of integers", "only booleans have it")
    op = LOGICAL[eqn.primitive.name]
    return unary(g, op, *operands) if len(operands) == 1 else binary(g, op, *operands)


@rule("max")
def _max(g: Graph, eqn: Any, x: Value, y: Value) -> Value:
    for one, other in ((x, y), (y, x)):
        if not isinstance(one, Tensor) or not isinstance(other, Constant) or other.value.size != 1:
            continue
        if other.dtype.name in ("float32", "float16") and not other.value.any():
            return unary(g, "Relu", one)
    return binary(g, "Max", x, y)


@rule("square")
def _square(g: Graph, eqn: Any, x: Value) -> Value:
    return binary(g, "Mul", x, x)


@rule("integer_pow")
def _integer_pow(g: Graph, eqn: Any, x: Value) -> Value:
    exponent = eqn.params["y"]
    if exponent == 2:
        return binary(g, "Mul", x, x)
    if exponent == 3:
        return binary(g, "Mul", binary(g, "Mul", x, x), x)
    return binary(g, "Pow", x, scalar(exponent, x.dtype))


@rule("rsqrt")
def _rsqrt(g: Graph, eqn: Any, x: Value) -> Value:
    return unary(g, "Reciprocal", unary(g, "Sqrt", x))


@rule("erfc")
def _erfc(g: Graph, eqn: Any, x: Value) -> Value:
    return binary(g, "Sub", scalar(1, x.dtype), unary(g, "Erf", x))


@rule("log1p")
def _log1p(g: Graph, eqn: Any, x: Value) -> Value:
    return unary(g, "Log", binary(g, "Add", x, scalar(1, x.dtype)))


@rule("expm1")
def _expm1(g: Graph, eqn: Any, x: Value) -> Value:
    return binary(g, "Sub", unary(g, "Exp", x), scalar(1, x.dtype))


@rule("exp2")
def _exp2(g: Graph, eqn: Any, x: Value) -> Value:
    return binary(g, "Pow", scalar(2, x.dtype), x)


@rule("ne")
def _ne(g: Graph, eqn: Any, x: Value, y: Value) -> Value:
    return unary(g, "Not", binary(g, "Equal", x, y, bool))


@rule("round")
def _round(g: Graph, eqn: Any, x: Value) -> Value:
    if int(eqn.params["rounding_method"]) != 1:
        raise unsupported("lax.round away from zero", "round half to even, as jnp.round does")
    return unary(g, "Round", x)


@rule("clamp")
def _clamp(g: Graph, eqn: Any, low: Value, x: Value, high: Value) -> Value:
    return binary(g, "Min", binary(g, "Max", x, low), high)


@rule("select_n")
def _select(g: Graph, eqn: Any, which: Value, *cases: Value) -> Value:
    if len(cases) != 2 or eqn.invars[0].aval.dtype != bool:
        raise unsupported("select_n of more than two cases", "use jnp.where")
    out = eqn.outvars[0].aval
    which = g.reshape(which, (1,) * out.ndim) if not which.shape else which
    names = [g.name(each) for each in (which, cases[1], cases[0])]
    shape = _broadcast(_broadcast(which.shape, cases[0].shape), cases[1].shape)
    return g.result("Where", *names, shape=shape, dtype=out.dtype)


@rule("convert_element_type")
def _convert(g: Graph, eqn: Any, x: Value) -> Value:
    return g.cast(x, eqn.params["new_dtype"])


@rule("stop_gradient", "copy", "copy_p", "optimization_barrier", "name", "pvary", "pcast", "sharding_constraint")
def _identity(g: Graph, eqn: Any, *operands: Value) -> list[Value]:
    return list(operands)


# --------------------------------------------------------------------------------------------------------------- shapes


@rule("reshape", "squeeze", "expand_dims")
def _reshape(g: Graph, eqn: Any, x: Value) -> Value:
    return g.reshape(g.full(x, eqn.invars[0].aval.shape), eqn.outvars[0].aval.shape)


@rule("transpose")
def _transpose(g: Graph, eqn: Any, x: Value) -> Value:
    return g.transpose(x, eqn.params["permutation"])


@rule("broadcast_in_dim")
def _broadcast_in_dim(g: Graph, eqn: Any, x: Value) -> Value:
    shape = [1] * eqn.outvars[0].aval.ndim
    for d, n in zip(eqn.params["broadcast_dimensions"], x.shape, strict=True):
        shape[d] = n
    return g.reshape(x, tuple(shape))


@rule("concatenate")
def _concatenate(g: Graph, eqn: Any, *parts: Value) -> Value:
    names = [g.name(g.full(p, v.aval.shape)) for p, v in zip(parts, eqn.invars, strict=True)]
    out = eqn.outvars[0].aval
    return g.result("Concat", *names, shape=out.shape, dtype=out.dtype, axis=eqn.params["dimension"])


@rule("stack")
def _stack(g: Graph, eqn: Any, *parts: Value) -> Value:
    out, axis = eqn.outvars[0].aval, eqn.params["axis"]
    one = (*out.shape[:axis], 1, *out.shape[axis + 1 :])
    names = [g.name(g.reshape(g.full(p, v.aval.shape), one)) for p, v in zip(parts, eqn.invars, strict=True)]
    return g.result("Concat", *names, shape=out.shape, dtype=out.dtype, axis=axis)


@rule("split")
def _split(g: Graph, eqn: Any, x: Value) -> list[Value]:
    axis, shape = eqn.params["axis"], eqn.invars[0].aval.shape
    name, parts, start = g.name(g.full(x, shape)), [], 0
    ends = np.cumsum(eqn.params["sizes"])
    for var, end in zip(eqn.outvars, ends, strict=True):
        inputs = [g.initializer(np.array([value], np.int64), "limits") for value in (start, end, axis)]
        parts.append(g.result("Slice", name, *inputs, shape=var.aval.shape, dtype=var.aval.dtype))
        start = end
    return parts


@rule("gather")
def _gather(g: Graph, eqn: Any, table: Value, indices: Value) -> Value:
    """Whole slices along one axis, as of `jnp.take` and embeddings."""
    p, out, aval = eqn.params, eqn.outvars[0].aval, eqn.invars[0].aval
    numbers, ids = p["dimension_numbers"], eqn.invars[1].aval.shape[:-1]
    axes = numbers.start_index_map
    whole = [n for d, n in enumerate(aval.shape) if d not in axes]
    offsets = tuple(d for d in range(out.ndim) if len(axes) == 1 and not axes[0] <= d < axes[0] + len(ids))
    taken = len(axes) == 1 and tuple(numbers.collapsed_slice_dims) == tuple(axes) and not numbers.operand_batching_dims
    if (
        not taken
        or [n for d, n in enumerate(p["slice_sizes"]) if d not in axes] != whole
        or numbers.offset_dims != offsets
    ):
        raise unsupported("indexing other than of whole slices along one axis", "use jnp.take, or lax.slice")
    rows = g.reshape(g.full(indices, eqn.invars[1].aval.shape), ids)
    names = g.name(g.full(table, aval.shape)), g.name(rows)
    return g.result("Gather", *names, shape=out.shape, dtype=out.dtype, axis=axes[0])


@rule("slice")
def _slice(g: Graph, eqn: Any, x: Value) -> Value:
    aval, out, p = eqn.invars[0].aval, eqn.outvars[0].aval, eqn.params
    strides = p["strides"] or (1,) * aval.ndim
    cut = [d for d, (n, m) in enumerate(zip(aval.shape, out.shape, strict=True)) if n != m or strides[d] != 1]
    ranges = [[values[d] for d in cut] for values in (p["start_indices"], p["limit_indices"])]
    if not is_static((*ranges[0], *ranges[1])):
        raise unsupported(f"slice with symbolic limits {p['limit_indices']}", "give this size as an integer")
    ranges += [cut, [strides[d] for d in cut]]
    inputs = [g.initializer(np.array(values, np.int64), "limits") for values in ranges]
    name = g.name(g.full(x, aval.shape))
    return g.result("Slice", name, *inputs, shape=out.shape, dtype=out.dtype)


@rule("pad")
def _pad(g: Graph, eqn: Any, x: Value, value: Value) -> Value:
    config, out = eqn.params["padding_config"], eqn.outvars[0].aval
    if any(inner for _, _, inner in config):
        raise unsupported("pad between elements", "pad at the edges")
    t = g.tensor(g.full(x, eqn.invars[0].aval.shape))
    t = g.caught_up(t) if t.reshaped else t
    own = np.argsort(t.permutation or range(len(t.base)))  # where the axes of what is padded are in the value
    edges = np.array([config[d][side] for side in (0, 1) for d in own], np.int64)
    return t.like(g.node("Pad", t.name, g.initializer(edges, "edges"), g.name(value)), tuple(out.shape[d] for d in own))


# ----------------------------------------------------------------------------------------------- reductions and windows


def _reduce(op: str, g: Graph, eqn: Any, x: Value) -> Value:
    out, axes = eqn.outvars[0].aval, eqn.params["axes"]
    t = g.tensor(g.full(x, eqn.invars[0].aval.shape))
    if not axes:
        return t
    if t.reshaped:
        t = g.caught_up(t)
    order = t.permutation or tuple(range(len(t.base)))
    own = np.array(sorted(order[d] for d in axes), np.int64)
    name = g.node(op, t.name, g.initializer(own, "axes"), keepdims=0)
    kept = [d for d in range(len(t.base)) if d not in own]
    base = tuple(t.base[d] for d in kept)
    permutation = tuple(kept.index(order[d]) for d in range(len(t.base)) if d not in axes)
    plain = Tensor(name, base, None, base, np.dtype(out.dtype))
    return g.transpose(plain, permutation)


for _name, _op in (("sum", "Sum"), ("max", "Max"), ("min", "Min"), ("prod", "Prod")):
    RULES[f"reduce_{_name}"] = partial(_reduce, f"Reduce{_op}")


@rule("argmax", "argmin")
def _arg(g: Graph, eqn: Any, x: Value) -> Value:
    out, (axis,) = eqn.outvars[0].aval, eqn.params["axes"]
    op = "ArgMax" if eqn.primitive.name == "argmax" else "ArgMin"
    name = g.name(g.full(x, eqn.invars[0].aval.shape))
    found = g.result(op, name, shape=out.shape, dtype=np.int64, axis=axis, keepdims=0)
    return g.cast(found, eqn.params["index_dtype"])


def _windows(g: Graph, eqn: Any, x: Value) -> tuple[Tensor, tuple[int, ...], dict[str, Any]]:
    """x with the axes that windows cover last, how to put them back, and the node's attributes."""
    p, aval = eqn.params, eqn.invars[0].aval
    window, strides, padding = p["window_dimensions"], p["window_strides"], p["padding"]
    dilation, base = p["window_dilation"], p["base_dilation"]
    if any(d != 1 for d in base):
        raise unsupported(f"{eqn.primitive.name} with base_dilation {base}", "ONNX has no such windows")
    covered = [d for d in range(aval.ndim) if (window[d], strides[d], *padding[d]) != (1, 1, 0, 0)]
    rest = [d for d in range(aval.ndim) if d not in covered]
    while len(rest) > 2 and len(covered) < 3:
        covered.append(rest.pop(1 if len(rest) > 2 else 0))
    if len(rest) != 2 or any(low < 0 or high < 0 for low, high in padding):
        raise unsupported(f"{eqn.primitive.name} over {len(covered)} of {aval.ndim} axes", "pool [N, ..., C] arrays")
    covered.sort()
    order = (*rest, *covered)
    t = g.tensor(g.transpose(g.full(x, aval.shape), order))
    attributes = {
        "kernel_shape": [window[d] for d in covered], "strides": [strides[d] for d in covered],
        "pads": [padding[d][side] for side in (0, 1) for d in covered], "dilations": [dilation[d] for d in covered],
    }  # fmt: skip
    return t, order, attributes


@rule("reduce_window_max")
def _max_pool(g: Graph, eqn: Any, x: Value) -> Value:
    t, order, attributes = _windows(g, eqn, x)
    out = eqn.outvars[0].aval
    shape = tuple(out.shape[d] for d in order)
    return g.transpose(g.result("MaxPool", g.name(t), shape=shape, dtype=out.dtype, **attributes), np.argsort(order))


@rule("reduce_window_sum")
def _sum_pool(g: Graph, eqn: Any, x: Value) -> Value:
    if isinstance(x, Constant):
        raise unsupported("windows over a constant of symbolic size", "average with VALID padding or count the padding")
    t, order, attributes = _windows(g, eqn, x)
    out = eqn.outvars[0].aval
    shape = tuple(out.shape[d] for d in order)
    mean = g.result("AveragePool", g.name(t), shape=shape, dtype=out.dtype, count_include_pad=1, **attributes)
    count = scalar(math.prod(attributes["kernel_shape"]), out.dtype)
    return g.transpose(binary(g, "Mul", mean, count), np.argsort(order))


# ------------------------------------------------------------------------------------------------------------- products


def product(g: Graph, x: Value, w: Value, shape: Any, dtype: Any) -> Tensor:
    """x [.., m, k] by w [.., k, n], or [k, n] for all."""
    integers = np.dtype(dtype).kind in "iu"
    op = "MatMulInteger" if integers else "MatMul"
    t = g.tensor(x)
    # A matrix for all rows asks nothing of the axes before them: a reshape in front can wait until after.
    if len(w.shape) == 2 and t.permutation is None and t.base and t.base[-1:] == t.shape[-1:]:
        n = w.shape[-1]
        out = g.node(op, t.name, g.name(w))
        return Tensor(out, (*t.base[:-1], n), None, tuple(shape), np.dtype(dtype))
    return g.result(op, g.name(t), g.name(w), shape=shape, dtype=dtype)


@rule("dot_general")
def _dot_general(g: Graph, eqn: Any, x: Value, w: Value) -> Value:
    (x_contract, w_contract), (x_batch, w_batch) = eqn.params["dimension_numbers"]
    x_aval, w_aval = (v.aval for v in eqn.invars)
    out = eqn.outvars[0].aval
    x, w = g.full(x, x_aval.shape), g.full(w, w_aval.shape)
    if np.dtype(out.dtype).kind in "iu":
        if not {np.dtype(x.dtype).name, np.dtype(w.dtype).name} <= {"int8", "uint8"} or out.dtype != np.int32:
            raise unsupported(
                f"a product of {x.dtype} and {w.dtype} in {out.dtype}", "use int8 or uint8 and int32 sums"
            )
    else:
        x, w = g.cast(x, out.dtype), g.cast(w, out.dtype)
    x_free = [d for d in range(x_aval.ndim) if d not in (*x_contract, *x_batch)]
    w_free = [d for d in range(w_aval.ndim) if d not in (*w_contract, *w_batch)]
    x = g.transpose(x, (*x_batch, *x_free, *x_contract))
    w = g.transpose(w, (*w_batch, *w_contract, *w_free))
    batch, m, n = ([a.shape[d] for d in axes] for a, axes in ((x_aval, x_batch), (x_aval, x_free), (w_aval, w_free)))
    k = math.prod(x_aval.shape[d] for d in x_contract)
    if not batch:
        rows = g.reshape(x, (*m, k)) if len(x_contract) != 1 else x
        rows = g.reshape(rows, (1, k)) if not m else rows
        columns = g.reshape(w, (k, math.prod(n))) if (len(w_contract), len(n)) != (1, 1) else w
        y = product(g, rows, columns, (*(m or [1]), math.prod(n)), out.dtype)
    else:
        x = g.reshape(x, (*batch, math.prod(m), k)) if (len(m), len(x_contract)) != (1, 1) else x
        w = g.reshape(w, (*batch, k, math.prod(n))) if (len(n), len(w_contract)) != (1, 1) else w
        y = product(g, x, w, (*batch, math.prod(m), math.prod(n)), out.dtype)
    return g.reshape(y, out.shape)


@rule("conv_general_dilated")
def _conv(g: Graph, eqn: Any, x: Value, w: Value) -> Value:
    p, out = eqn.params, eqn.outvars[0].aval
    numbers = p["dimension_numbers"]
    if any(d != 1 for d in p["lhs_dilation"]):
        raise unsupported("a transposed convolution (lhs_dilation)", "upsample, then convolve")
    if p["batch_group_count"] != 1 or any(low < 0 or high < 0 for low, high in p["padding"]):
        raise unsupported("a convolution with batch groups or negative padding", "ONNX has none")
    if np.dtype(out.dtype).kind in "iu":
        raise unsupported("a convolution of integers", "dequantise in front of it: runtimes fuse the two")
    x = g.full(g.cast(x, out.dtype), eqn.invars[0].aval.shape)
    w = g.full(g.cast(w, out.dtype) if not isinstance(w, Quantised) else w, eqn.invars[1].aval.shape)
    return convolution(
        g, x, w, numbers, out, p["window_strides"], p["rhs_dilation"], p["feature_group_count"], p["padding"]
    )


def convolution(
    g: Graph, x: Value, w: Value, numbers: Any, out: Any, strides: Any, dilations: Any, groups: int, padding: Any
) -> Value:
    """numbers: specifications of x, w and the result as in `jax.lax.ConvDimensionNumbers`."""
    x_spec, w_spec, out_spec = numbers
    x, w = g.transpose(x, x_spec), g.transpose(w, w_spec)
    y = g.result(
        "Conv", g.name(x), g.name(w), shape=tuple(out.shape[d] for d in out_spec), dtype=out.dtype,
        strides=list(strides), dilations=list(dilations), group=groups, kernel_shape=list(w.shape[2:]),
        pads=[pair[side] for side in (0, 1) for pair in padding],
    )  # fmt: skip
    return g.transpose(y, np.argsort(out_spec))
