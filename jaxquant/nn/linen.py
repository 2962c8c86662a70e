"""Quantised layers for Flax Linen.

    model = nn.Sequential([QuantDense(32, spec=Spec(w_qtype=jnp.int4)), nn.relu, QuantDense(10)])
    variables = model.init(key, x)             # floating parameters, trained as any
    served = convert(model, variables, x)      # kernels are QArrays; model.apply(served, x) has the same bits

A model of ordinary layers is quantised where it is called, by rules over the paths of its parameters; inside a function
under jit, since what is compiled stays as it was traced:

    with quantized(Rules([("*", Spec())])):
        model.apply(variables, x)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

try:
    import flax.linen as nn
except ImportError as error:
    raise ImportError("jaxquant.nn.linen needs Flax: pip install flax") from error

from jaxquant._core.errors import refuse
from jaxquant.affine.qarray import QArray
from jaxquant.nn import products
from jaxquant.nn.products import Scales
from jaxquant.nn.rules import Rules, Spec

__all__ = ["QuantConv", "QuantDense", "QuantEmbed", "convert", "quantized"]


class QuantDense(nn.Dense):
    """`flax.linen.Dense` with a `Spec`: the value is the integer product's, the gradient straight through.

    Learned scales are the parameters ``kernel_scale`` and ``input_scale``, exponents of 2. They begin at those that
    suit the kernel and the inputs of ``init``.
    """

    spec: Spec = Spec()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return _dense(self, self.spec, inputs)


class QuantConv(nn.Conv):
    """`flax.linen.Conv` with a `Spec`, without input dilation and masks; padding is "SAME", "VALID" or numbers."""

    spec: Spec = Spec()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return _conv(self, self.spec, inputs)


class QuantEmbed(nn.Embed):
    """`flax.linen.Embed` with a `Spec`, of which weights alone count; a scale for each row."""

    spec: Spec = Spec()

    def setup(self) -> None:
        _set_up_embed(self, self.spec)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return _embed(self, self.spec, inputs)

    def attend(self, query: jax.Array) -> jax.Array:
        """``query @ embedding.T``, with the same codes."""
        return _attend(self, self.spec, query)


@contextlib.contextmanager
def quantized(rules: Any) -> Iterator[None]:
    """Within it `nn.Dense`, `nn.Conv` and `nn.Embed` whose parameters match a rule compute as the layers above.

    Args:
      rules: a `Rules`, or what makes one. Rules that decided on nothing by the end are reported.
    """
    rules, seen = Rules(rules), []

    def intercept(function: Any, args: Any, kwargs: Any, context: Any) -> Any:
        name, calls = _CALLS.get(type(context.module), ("", {}))
        if context.method_name in calls:
            seen.append(_path(context.module, name))
            spec = rules.find(seen[-1])
            if spec is not None:
                return calls[context.method_name](context.module, spec, *args, **kwargs)
        return function(*args, **kwargs)

    with nn.intercept_methods(intercept):
        yield
    rules.check(dict.fromkeys(seen))


_recorders: list[dict[str, Any]] = []


def convert(model: nn.Module, variables: Any, *args: Any, rules: Any = None, **kwargs: Any) -> Any:
    """The variables for inference: kernels of quantised layers as `QArray`, with the codes and scales of training.

    ``model.apply`` takes them as they are, and gives the bits of the training forward.

    Args:
      model, variables: as for ``model.apply``.
      args, kwargs: as for ``model.apply``; only shapes and dtypes count.
      rules: those of `quantized`, for a model of ordinary layers, which is then applied in it too.
    """
    found: dict[str, Any] = {}
    _recorders.append(found)
    try:
        with contextlib.nullcontext() if rules is None else quantized(rules):
            jax.eval_shape(lambda v, a: model.apply(v, *a, **kwargs), variables, args)
    finally:
        _recorders.pop()
    params = jax.tree.map(lambda leaf: leaf, variables["params"], is_leaf=lambda leaf: isinstance(leaf, QArray))
    for path, (make, spec, dtype, rank) in found.items():
        *names, name = path.split("/")
        layer = params
        for step in names:
            layer = layer[step]
        kernel, scale = layer[name], layer.pop("kernel_scale", None)

        def codes(kernel: Any, scale: Any, make: Any = make, spec: Any = spec, dtype: Any = dtype) -> QArray:
            return make(kernel.astype(dtype), spec, Scales(scale))

        for _ in range(kernel.ndim - rank):  # stacked by nn.scan or nn.vmap
            codes = jax.vmap(codes)
        layer[name] = jax.jit(codes)(kernel, scale)
    return {**variables, "params": params}


# -------------------------------------------------------------------------------------------------------------- layers


def _dense(module: Any, spec: Spec, inputs: jax.Array) -> jax.Array:
    shape = (inputs.shape[-1], module.features)
    inputs, kernel, bias = _operands(module, inputs, shape)
    scales = _scales(module, spec, products.dense_scales, kernel, inputs)
    _record(module, "kernel", kernel, products.dense_kernel, spec)
    return products.dense(inputs, kernel, bias, spec, scales)


def _conv(module: Any, spec: Spec, inputs: jax.Array) -> jax.Array:
    if module.mask is not None or module.input_dilation not in (None, 1):
        raise refuse("QuantConv", "mask, input_dilation", "neither", "one of them", "use flax.linen.Conv there")
    window = (module.kernel_size,) if isinstance(module.kernel_size, int) else tuple(module.kernel_size)
    groups = module.feature_group_count
    inputs, kernel, bias = _operands(module, inputs, (*window, inputs.shape[-1] // groups, module.features))
    scales = _scales(module, spec, products.conv_scales, kernel, inputs)
    _record(module, "kernel", kernel, products.conv_kernel, spec)
    return products.convolve(
        inputs, kernel, bias, spec, scales, strides=module.strides, padding=module.padding,
        dilation=module.kernel_dilation, groups=groups,
    )  # fmt: skip


def _set_up_embed(module: Any, spec: Spec) -> None:
    shape = (module.num_embeddings, module.features)
    table = _parameter(module, "embedding", module.embedding_init, shape, module.param_dtype)
    if not isinstance(table, QArray):
        table = table.astype(module.dtype or table.dtype)
    scales = _scales(module, spec, products.embed_scales, table, None)
    _record(module, "embedding", table, products.embed_kernel, spec)
    module.embedding, module.kernel_scale = table, scales.kernel


def _embed(module: Any, spec: Spec, inputs: jax.Array) -> jax.Array:
    return products.embed(inputs, module.embedding, spec, Scales(module.kernel_scale), module.dtype)


def _attend(module: Any, spec: Spec, query: jax.Array) -> jax.Array:
    return products.attend(query, module.embedding, spec, Scales(module.kernel_scale))


_CALLS: dict[Any, tuple[str, dict[str, Any]]] = {
    nn.Dense: ("kernel", {"__call__": _dense}),
    nn.Conv: ("kernel", {"__call__": _conv}),
    nn.Embed: ("embedding", {"setup": _set_up_embed, "__call__": _embed, "attend": _attend}),
}


def _parameter(module: Any, name: str, *init: Any) -> Any:
    # A QArray has other shapes than the initialiser's, which param() would refuse.
    if module.has_variable("params", name) and isinstance(found := module.get_variable("params", name), QArray):
        return found
    return module.param(name, *init)


def _operands(module: Any, inputs: jax.Array, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    kernel = _parameter(module, "kernel", module.kernel_init, shape, module.param_dtype)
    bias = module.param("bias", module.bias_init, shape[-1:], module.param_dtype) if module.use_bias else None
    if not isinstance(kernel, QArray):
        return module.promote_dtype(inputs, kernel, bias, dtype=module.dtype)
    dtype = module.dtype or jnp.promote_types(inputs.dtype, module.param_dtype)
    inputs, bias = module.promote_dtype(inputs, bias, dtype=dtype)
    return inputs, kernel, bias


def _scales(module: Any, spec: Spec, make: Any, kernel: Any, inputs: Any) -> Scales:
    if not spec.learned:
        return Scales()

    def learned(name: str) -> Any:
        if module.has_variable("params", f"{name}_scale"):  # param() would trace the initialiser each time
            return module.get_variable("params", f"{name}_scale")
        return module.param(f"{name}_scale", lambda _: getattr(make(kernel, inputs, spec), name))

    of_kernel = None if isinstance(kernel, QArray) else learned("kernel")
    return Scales(of_kernel, None if inputs is None or spec.x_qtype is None else learned("input"))


def _path(module: Any, name: str) -> str:
    return "/".join((*module.path, name))


def _record(module: Any, name: str, kernel: Any, make: Any, spec: Spec) -> None:
    if _recorders and not isinstance(kernel, QArray):
        _recorders[-1][_path(module, name)] = (make, spec, kernel.dtype, kernel.ndim)
