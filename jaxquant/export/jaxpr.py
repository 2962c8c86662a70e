"""to_onnx(): a traced function, equation by equation, as an ONNX model.

to_onnx()  ->  jax.make_jaxpr  ->  lax_rules.py, quantised_rules.py  ->  graph.py
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util

from jaxquant._core.errors import refuse
from jaxquant.export import quantised_rules
from jaxquant.export.graph import NAME, Constant, Graph, NeedsOpset, Tensor, Value, is_static
from jaxquant.export.lax_rules import RULES, unsupported
from jaxquant.nn.products import CONVOLUTIONS

# Codes of weights stay codes.
KEPT = ("jaxquant_dequantize", "jaxquant_fake_quantize", "jaxquant_quantize", "jaxquant_unpack")
CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
)
OPSETS = range(20, 26)


def to_onnx(
    function: Callable[..., Any], *arguments: Any, opset: int | None = None, input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> Any:  # fmt: skip
    """An ONNX model of an inference function, its quantisation in QuantizeLinear and DequantizeLinear nodes (QDQ).

    The function is traced as by ``jax.jit``, so that the layers of any library are exported as they run. What it closes
    over becomes constants: close over the parameters, give the inputs as arguments. Then

    ====================================================  ============================================================
    `fake_quantize`, `quantize`, `dequantize` of an       QuantizeLinear, DequantizeLinear; a range narrower than the
    activation                                            code type's is a Clip in front
    a `QArray`, or `fake_quantize` of a parameter         its codes as an initializer, and DequantizeLinear
    `matmul`, `einsum`, `dot_general`, `qat_dense`,       MatMul or Conv of what DequantizeLinear gives, and Add
    converted dense and convolutional layers
    `dynamic_quantize`, ``lhs_qtype=jnp.int8``            the same arithmetic in elementary nodes and MatMulInteger
                                                          (DynamicQuantizeLinear has another rule)
    products, convolutions, pooling, sums, shapes and     their counterparts; convolutions in ONNX's order of axes,
    elementwise functions of JAX                          transposed only where something else needs the other
    ====================================================  ============================================================

    Scales are per tensor, along one axis, or of blocks along one axis; scales of other granularities are repeated until
    they are one of these, with the same values.

    Args:
      function: of arrays; pure, and without random numbers.
      arguments: arrays or ``jax.ShapeDtypeStruct``, or pytrees of these; only shapes and types matter. Sizes may be
        symbolic: ``jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, 8"), jnp.float32)``.
      opset: 20 to 25. None takes 20 where all codes have 8 bits and no blocks, else 21, which has 4-bit, 16-bit and
        block-wise ones. Weights of fewer bits than an opset has are stored in the next wider type, with the same
        values: those of 2 bits in 4 before opset 25. Activations are stored in whole bytes.
      input_names, output_names: by default the function's parameter names with the path into each, and "output".

    Returns:
      An ``onnx.ModelProto`` that ``onnx.checker`` has accepted (the package onnx must be installed); write it with
      ``onnx.save``.

    Numbers: codes are those of jaxquant, bit for bit, for the same finite values (of NaN and infinities runtimes
    differ). A runtime may multiply integers or floats, and sums in its own order: results differ by the rounding of
    float32 sums, and a later code where one lies that close to a tie. Of dynamic int8 activations by per-channel
    weights, results have the same bits where MatMulInteger is exact.

    ONNX Runtime (1.32): for weights without quantised activations its default is to round x to int8 in a product of its
    own; the session option ``session.qdq_matmulnbits_accuracy_level`` = "1" keeps float32. Its fused product of 2-bit
    codes (opset 25) gives wrong numbers; the default, which stores them in 4, does not meet it.

    Raises:
      NotImplementedError: a primitive without a rule, such as a loop; packed codes of activations; ``lhs_qtype`` with
        weights in groups or with zero points.
      ValueError: a scale that depends on an input; a zero point outside its code type; blocks along symbolic sizes; an
        opset that lacks what the model needs.
      TypeError: float64 where it is quantised.
      ImportError: no onnx.

    >>> w = dynamic_quantize(jnp.ones((4, 2)), PerAxis(1))
    >>> scale = QParams(jnp.float32(0.02))
    >>> model = jaxquant.export.to_onnx(lambda x: jax.nn.relu(matmul(fake_quantize(x, scale), w)), jnp.ones((3, 4)))
    >>> [node.op_type for node in model.graph.node]
    ['QuantizeLinear', 'DequantizeLinear', 'DequantizeLinear', 'MatMul', 'Relu']
    """
    try:
        import onnx
    except ImportError as error:
        raise ImportError(f"{NAME}: needs the package onnx: pip install 'jaxquant[onnx]'.") from error
    if opset is not None and operator.index(opset) not in OPSETS:
        raise refuse(NAME, "opset", f"None, or {OPSETS[0]} to {OPSETS[-1]}", str(opset), "None takes what is needed")
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    in_avals: Sequence[Any] = closed.in_avals
    out_avals: Sequence[Any] = closed.out_avals
    names = _names("input_names", input_names, _input_names(function, arguments), len(in_avals))
    out_names = _names("output_names", output_names, _paths("output", shapes), len(out_avals))
    if set(names) & set(out_names):
        raise refuse(NAME, "output_names", "other names than the inputs'", repr(out_names), "give output_names")
    try:
        g = _graph(closed, names, out_names, Graph(OPSETS[0] if opset is None else opset, narrowest=opset is None))
    except NeedsOpset as needs:
        if opset is not None:
            raise refuse(
                NAME, "opset", f"{needs.args[0]} or later for {needs.args[1]}", str(opset), "leave it out"
            ) from None
        g = _graph(closed, names, out_names, Graph(needs.args[0], narrowest=True))

    def described(names: Sequence[str], avals: Any) -> list[Any]:
        dims = [[int(n) if is_static((n,)) else str(n) for n in a.shape] for a in avals]
        types = [g.type_of(a.dtype) for a in avals]
        return [onnx.helper.make_tensor_value_info(*each) for each in zip(names, types, dims, strict=True)]

    title = getattr(function, "__name__", "function").strip("<>")
    graph = onnx.helper.make_graph(
        g.nodes, title, described(names, in_avals), described(out_names, out_avals), g.initializers
    )
    operators = [onnx.helper.make_opsetid("", g.opset)]
    version = onnx.helper.find_min_ir_version_for(operators)
    model = onnx.helper.make_model(graph, opset_imports=operators, ir_version=version, producer_name="jaxquant")
    onnx.checker.check_model(model)
    return model


def _graph(closed: Any, names: Sequence[str], out_names: Sequence[str], g: Graph) -> Graph:
    inputs = []
    for name in (*names, *out_names):
        g.fresh(name)
    for name, aval in zip(names, closed.in_avals, strict=True):
        inputs.append(Tensor(name, aval.shape, None, aval.shape, np.dtype(aval.dtype)))
        for d, n in enumerate(aval.shape):
            if not is_static((n,)):
                g.sizes.setdefault(str(n), (name, d))
    results = _evaluate(g, closed.jaxpr, [Constant(np.asarray(c)) for c in closed.consts], inputs)
    made = [g.name(g.full(result, aval.shape)) for result, aval in zip(results, closed.out_avals, strict=True)]
    g.give(made, list(out_names))
    return g


def _evaluate(g: Graph, jaxpr: Any, constants: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
    values: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True))

    def read(atom: Any) -> Value:
        return Constant(np.asarray(atom.val, atom.aval.dtype)) if hasattr(atom, "val") else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        results = _apply(g, eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(g: Graph, eqn: Any, operands: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    if name in CALLS:
        if eqn.params.get("name") in CONVOLUTIONS and (y := quantised_rules.convolved(g, eqn, operands)) is not None:
            return [y]
        inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
        constants = [Constant(np.asarray(c)) for c in getattr(inner, "consts", ())]
        g.callers.append(eqn)
        results = _evaluate(g, getattr(inner, "jaxpr", inner), constants, operands)
        g.callers.pop()
        return results
    if all(isinstance(v, Constant) for v in operands) and name not in KEPT and _known(eqn, operands):
        return _folded(eqn, operands)
    if name not in RULES:
        places = (source_info_util.summarize(each.source_info) for each in (eqn, *reversed(g.callers)))
        where = next(filter(None, places), "JAX's own code")
        remedy = "move it out of the exported function, or write it in terms of others"
        raise unsupported(f"no rule for the primitive {name!r} (in {where})", remedy)
    result = RULES[name](g, eqn, *operands)
    return result if isinstance(result, list) else [result]


def _known(eqn: Any, operands: list[Value]) -> bool:
    """Whether shapes are numbers, and no constant lies behind its shape."""
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    own = all(tuple(v.shape) == tuple(a.aval.shape) for v, a in zip(operands, eqn.invars, strict=True))
    return own and all(is_static(a.shape) for a in avals)


def _folded(eqn: Any, operands: list[Value]) -> list[Value]:
    with jax.ensure_compile_time_eval():
        out = eqn.primitive.bind(*(v.value for v in operands if isinstance(v, Constant)), **eqn.params)
    results = [np.asarray(each) for each in (out if eqn.primitive.multiple_results else [out])]
    # Codes moved about keep their type.
    moved = eqn.primitive.name in (
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "slice",
        "copy",
        "broadcast_in_dim",
    )
    qtype = operands[0].qtype if moved and isinstance(operands[0], Constant) else None
    return [Constant(each, qtype) for each in results]


def _input_names(function: Callable[..., Any], arguments: Sequence[Any]) -> list[str]:
    try:
        bound = inspect.signature(function).bind(*arguments).arguments
    except (TypeError, ValueError):
        bound = {"input": tuple(arguments)}
    return [name for key, value in bound.items() for name in _paths(key, value)]


def _paths(name: str, tree: Any) -> list[str]:
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return [".".join([name, *(jax.tree_util.keystr((key,), simple=True) for key in path)]) for path in paths]


def _names(argument: str, given: Sequence[str] | None, default: list[str], count: int) -> list[str]:
    names = default if given is None else list(given)
    if len(names) != count or len(set(names)) != count or not all(isinstance(n, str) and n for n in names):
        raise refuse(NAME, argument, f"{count} different names", repr(given or names), "name each array of the pytree")
    return names
