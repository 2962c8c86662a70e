"""jax.export of the block formats: round trips through bytes, other platforms, symbolic sizes, gradients."""

import jax
import jax.numpy as jnp
import pytest
from ggml_cases import LINEAR, NAMED, assert_same_bits, every_case, every_product, same
from jax import export

import jaxquant
from jaxquant import ggml


def exported(function, *arguments, platforms=None, vjp_order=0):
    options = {"disabled_checks": jaxquant.export_checks()}
    if platforms is not None:
        options["platforms"] = platforms
    return export.deserialize(export.export(jax.jit(function), **options)(*arguments).serialize(vjp_order=vjp_order))


def flattened(case):
    """The call on leaves, for modules that know no QTensor, and the leaves."""
    leaves, tree = jax.tree.flatten(case.operands)
    return (lambda *leaves: jax.tree.leaves(case.call(*jax.tree.unflatten(tree, leaves)))[0]), leaves


@every_case
def test_export(case):
    """Through bytes and back, for every platform; where one has no kernel, jax.numpy is in the module."""
    call, leaves = flattened(case)
    platforms = ["cpu"] if case.name.startswith("quantize") else ["cpu", "cuda", "tpu"]
    module = exported(call, *leaves, platforms=platforms)
    same(module.call(*leaves), jax.tree.leaves(case.compiled(*case.operands))[0])


@pytest.mark.smoke
def test_export_of_tensors():
    """A QTensor goes in and comes out as itself."""
    x, w = LINEAR
    module = exported(lambda x, w: (ggml.linear(x, w), w.prepare()), x, w)
    y, prepared = module.call(x, w)
    same(y, ggml.linear(x, w))
    assert isinstance(prepared, ggml.QTensor) and prepared.layout == "prepared"
    same(prepared.dequantize(), w.dequantize())
    with pytest.raises(ValueError):
        module.call(x, prepared)


SYMBOLIC = {
    "quantize": ("batch", None), "quantize_with_imatrix": ("batch", "-"), "dequantize": ("batch",),
    "dequantize_half": ("batch",), "take": ("-", "batch"), "prepare": ("batch",), "plain": ("batch",),
    "linear": ("batch", "-"), "linear_float": ("batch", "-"), "linear_prepared": ("batch", "-"),
    "moe_linear": ("batch", "-", "batch"), "moe_linear_float": ("batch", "-", "batch"),
    "moe_linear_prepared": ("batch", "-", "batch"), "ragged_linear": ("batch", "-", "-"),
}  # fmt: skip


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_batch(name):
    """One module for every number of rows or tokens."""
    case = NAMED[name]
    call, leaves = flattened(case)
    (batch,) = export.symbolic_shape("batch")
    symbolic = [
        jax.ShapeDtypeStruct((batch if mark == "batch" else a.shape[0], *a.shape[1:]), a.dtype)
        for mark, a in zip(SYMBOLIC[name], leaves, strict=False)
    ]
    functions = [call, jax.grad(lambda *a: (call(*a) ** 2).sum())] if case.differentiable else [call]
    modules = [exported(f, *symbolic) for f in functions]
    for size in (1, leaves[0].shape[0] if SYMBOLIC[name][0] == "batch" else leaves[1].shape[0], 16):
        arguments = [
            jnp.resize(a, (size, *a.shape[1:])) if mark == "batch" else a
            for mark, a in zip(SYMBOLIC[name], leaves, strict=False)
        ]
        for module, function in zip(modules, functions, strict=True):
            assert_same_bits(module.call(*arguments), jax.jit(function)(*arguments))


@every_product
def test_gradient_of_an_exported_function(case):
    call, leaves = flattened(case)
    module = exported(call, *leaves, vjp_order=1)
    gradient = jax.grad(lambda x: (module.call(x, *leaves[1:]) * case.weights).sum())(leaves[0])
    assert_same_bits(gradient, case.gradient(*case.operands))
