"""Quantised layers for Flax NNX.

model = quantize(model, Rules([("head/*", None), ("*", Spec(w_qtype=jnp.int4))]))     # ordinary layers replaced
calibrate(model, images)                   # learned scales begin where these suit; observers gather, batch after batch
served = convert(model)                    # after training: kernels are QArrays, the calls have the same bits
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("jaxquant.nn.nnx needs Flax: pip install flax") from error

from jaxquant.affine.qarray import QArray
from jaxquant.nn import layers
from jaxquant.nn.nnx_layer import Observed, Quantised
from jaxquant.nn.rules import Rules, path_of

__all__ = ["Observed", "QuantConv", "QuantEmbed", "QuantLinear", "calibrate", "convert", "quantize"]


class QuantLinear(Quantised, nnx.Linear):
    """`flax.nnx.Linear` with a `Spec`: the value is the integer product's, the gradient straight through.

    Learned scales are the parameters ``kernel_scale`` and ``input_scale``, exponents of 2; see `calibrate`. Where the
    spec has an observer, ``input_scale`` is `Observed`.
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return layers.dense(*self.operands(inputs), self.spec, self.held())


class QuantConv(Quantised, nnx.Conv):
    """`flax.nnx.Conv` with a `Spec`, without input dilation and masks; padding is "SAME", "VALID" or numbers."""

    kind = layers.CONV

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return layers.flax_convolve(self, *self.operands(inputs), self.spec, self.held())


class QuantEmbed(Quantised, nnx.Embed):
    """`flax.nnx.Embed` with a `Spec`, of which weights alone count; a scale for each row."""

    kind = layers.EMBED

    def operands(self, x: Any) -> tuple[Any, Any, Any]:
        table = self.embedding.get_value()
        return x, table if isinstance(table, QArray) else table.astype(self.dtype), None

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return layers.embed(inputs, self.operands(None)[1], self.spec, self.held(), self.dtype)

    def attend(self, query: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """``query @ embedding.T``, with the same codes."""
        return layers.attend(query, self.operands(None)[1], self.spec, self.held())


_LAYERS: dict[Any, Any] = {nnx.Linear: QuantLinear, nnx.Conv: QuantConv, nnx.Embed: QuantEmbed}


def quantize(model: Any, rules: Any) -> Any:
    """A copy of a model whose `nnx.Linear`, `nnx.Conv` and `nnx.Embed` are quantised layers where a rule says so.

    Args:
      model: an NNX module; other layers, and subclasses of these, stay as they are.
      rules: a `Rules`, or what makes one, over the paths of kernels and embeddings. Those that decide on nothing are
        reported.
    """
    with Rules(rules).applied() as find:

        def replaced(path: Any, layer: Any) -> Any:
            quantised = _LAYERS.get(type(layer))
            if quantised is None or (spec := find(path_of(path, quantised.kind.parameter))) is None:
                return layer
            # The same attributes, and the calls of the other class.
            new = quantised.__new__(quantised)
            vars(new).update(vars(layer))
            new.spec = spec
            new.calibrate()
            return new

        return nnx.recursive_map(replaced, nnx.clone(model))


def _quantised(model: Any) -> list[Any]:
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, Quantised)]


def calibrate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Sets learned scales, in place, to those that suit the kernels and the inputs that reach each layer when
    ``model(*args, **kwargs)`` is called, the layers in front of it quantised already; observers gather these inputs.
    Returns what the call does."""
    found = _quantised(model)
    for layer in found:
        layer._calibrating = True
    try:
        return model(*args, **kwargs)
    finally:
        for layer in found:
            del layer._calibrating


def convert(model: Any) -> Any:
    """A copy of a model for inference: kernels of quantised layers as `QArray`, with the codes and scales of training.

    It is called as the model was, and gives the same bits.
    """
    model = nnx.clone(model)
    for layer in _quantised(model):
        _, kernel, _ = layer.operands(jnp.zeros(()))
        if isinstance(kernel, QArray):
            continue
        rank = 2 if layer.kind is not layers.CONV else len(layer.kernel_size) + 2
        kernel, scales = layers.converted(layer.kind, layer.spec, kernel, layer.held(), rank)
        setattr(layer, layer.kind.parameter, nnx.Param(kernel))
        if hasattr(layer, "kernel_scale"):
            del layer.kernel_scale
        if scales.input is not None:
            layer.input_scale.set_value(scales.input)
    return model
