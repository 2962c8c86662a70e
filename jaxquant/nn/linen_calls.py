"""What a Linen module computes and holds, be it a layer of linen.py or an ordinary one under rules.

A kernel is the parameter, or a `QArray` in its place; learned scales are parameters beside it, observed ones variables
of the collection "observed".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax

from jaxquant.affine.qarray import QArray
from jaxquant.affine.qparams import QParams
from jaxquant.nn import layers
from jaxquant.nn.rules import Spec, path_of
from jaxquant.nn.scales import Scales, observed


def dense(module: Any, spec: Spec, inputs: jax.Array) -> jax.Array:
    return layers.dense(*_operands(module, spec, layers.DENSE, inputs, inputs.shape[-1:]))


def convolve(module: Any, spec: Spec, inputs: jax.Array) -> jax.Array:
    window = (module.kernel_size,) if isinstance(module.kernel_size, int) else tuple(module.kernel_size)
    shape = (*window, inputs.shape[-1] // module.feature_group_count)
    return layers.flax_convolve(module, *_operands(module, spec, layers.CONV, inputs, shape))


def set_up_embed(module: Any, spec: Spec) -> None:
    shape = (module.num_embeddings, module.features)
    table = _parameter(module, "embedding", module.embedding_init, shape, module.param_dtype)
    if not isinstance(table, QArray):
        table = table.astype(module.dtype or table.dtype)
    module.embedding, module.scales = table, _scales(module, spec, layers.EMBED, table, None)


def embed(module: Any, spec: Spec, inputs: jax.Array) -> jax.Array:
    return layers.embed(inputs, module.embedding, spec, module.scales, module.dtype)


def attend(module: Any, spec: Spec, query: jax.Array) -> jax.Array:
    return layers.attend(query, module.embedding, spec, module.scales)


# What interception replaces: the kind of a layer, and its methods.
CALLS: dict[Any, tuple[layers.Kind, dict[str, Any]]] = {
    nn.Dense: (layers.DENSE, {"__call__": dense}),
    nn.Conv: (layers.CONV, {"__call__": convolve}),
    nn.Embed: (layers.EMBED, {"setup": set_up_embed, "__call__": embed, "attend": attend}),
}


# ----------------------------------------------------------------------------------------------------------- variables


def _operands(module: Any, spec: Spec, kind: layers.Kind, inputs: jax.Array, window: tuple[int, ...]) -> Any:
    shape = (*window, module.features)
    kernel = _parameter(module, "kernel", module.kernel_init, shape, module.param_dtype)
    bias = module.param("bias", module.bias_init, shape[-1:], module.param_dtype) if module.use_bias else None

    def promote(*operands: Any) -> Any:
        return module.promote_dtype(*operands, dtype=module.dtype)

    inputs, kernel, bias = layers.flax_operands(module, promote, inputs, kernel, bias)
    return inputs, kernel, bias, spec, _scales(module, spec, kind, kernel, inputs)


def path(module: Any, kind: Any) -> str:
    return path_of(module.path, kind.parameter)


def _parameter(module: Any, name: str, *init: Any) -> Any:
    # A QArray has other shapes than the initialiser's, which param() would refuse.
    if module.has_variable("params", name) and isinstance(found := module.get_variable("params", name), QArray):
        return found
    return module.param(name, *init)


_recorders: list[dict[str, Any]] = []


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, Any]]:
    """The quantised kernels that a call of a model reads: path -> kind, spec, and its shape and dtype."""
    _recorders.append({})
    try:
        yield _recorders[-1]
    finally:
        _recorders.pop()


def _scales(module: Any, spec: Spec, kind: layers.Kind, kernel: Any, inputs: Any) -> Scales:
    """Those that the module holds, or at first begins with."""
    if not isinstance(kernel, QArray) and _recorders:
        _recorders[-1][path(module, kind)] = (kind, spec, jax.typeof(kernel))
    if not spec.learned:
        return Scales(None, None if inputs is None else _observed(module, spec, inputs))

    def learned(name: str) -> Any:
        if module.has_variable("params", f"{name}_scale"):  # param() would trace the initialiser each time
            return module.get_variable("params", f"{name}_scale")
        return module.param(f"{name}_scale", lambda _: getattr(kind.scales(kernel, inputs, spec), name))

    of_kernel = None if isinstance(kernel, QArray) else learned("kernel")
    return Scales(of_kernel, None if inputs is None or spec.x_qtype is None else learned("input"))


def _observed(module: Any, spec: Spec, inputs: Any) -> Any:
    held = module.get_variable("observed", "input_scale")
    if spec.x_observer is None or isinstance(held, QParams):
        return held
    gathers = module.is_mutable_collection("observed")
    seen = inputs if gathers and not module.is_initializing() else None
    held = observed(spec.x_observer, None if held is None else dict(held), seen)
    if gathers:
        module.put_variable("observed", "input_scale", held)
    return held
