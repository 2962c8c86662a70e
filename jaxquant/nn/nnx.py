"""Quantised layers for Flax NNX.

model = quantize(model, Rules([("head/*", None), ("*", Spec(w_qtype=jnp.int4))]))     # ordinary layers replaced
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

from jaxquant._core.errors import refuse
from jaxquant.affine.qarray import QArray
from jaxquant.nn import products
from jaxquant.nn.products import Scales
from jaxquant.nn.rules import Rules, Spec

__all__ = ["QuantConv", "QuantEmbed", "QuantLinear", "calibrate", "convert", "quantize"]


class _Quantised:
    """An ordinary layer's attributes, a spec and learned scales."""

    _name, _calibrating = "kernel", False
    _begin, _codes = staticmethod(products.dense_scales), staticmethod(products.dense_kernel)

    def __init__(self, *args: Any, spec: Spec = Spec(), **kwargs: Any):  # noqa: B008
        super().__init__(*args, **kwargs)
        self.spec = spec
        self.calibrate()

    def calibrate(self: Any, x: jax.Array | None = None) -> None:
        """Learned scales to begin with, for typical inputs x; None: inputs like a standard normal variable."""
        if self.spec.learned:
            if x is None and self._name == "kernel":
                space = (1,) * len(getattr(self, "kernel_size", ()))
                x = jax.random.normal(jax.random.key(0), (1024, *space, self.in_features))
            kernel, x, _ = self._operands(x)
            for name, value in self._begin(kernel, x, self.spec)._asdict().items():
                if value is not None:
                    setattr(self, f"{name}_scale", nnx.Param(value))

    def _scales(self) -> Scales:
        found = (getattr(self, f"{name}_scale", None) for name in Scales._fields)
        return Scales(*(None if scale is None else scale[...] for scale in found))

    def _operands(self: Any, x: Any) -> tuple[Any, Any, Any]:
        """Kernel, inputs and bias, of one dtype."""
        if self._calibrating:
            self._calibrating = False
            self.calibrate(x)
        kernel, bias = self.kernel.get_value(), self.bias
        bias = None if bias is None else bias[...]
        if not isinstance(kernel, QArray):
            x, kernel, bias = self.promote_dtype((x, kernel, bias), dtype=self.dtype)
            return kernel, x, bias
        dtype = self.dtype or jnp.promote_types(x.dtype, self.param_dtype)
        return kernel, x.astype(dtype), None if bias is None else bias.astype(dtype)


class QuantLinear(_Quantised, nnx.Linear):
    """`flax.nnx.Linear` with a `Spec`: the value is the integer product's, the gradient straight through.

    Learned scales are the parameters ``kernel_scale`` and ``input_scale``, exponents of 2; see `calibrate`.
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        kernel, x, bias = self._operands(inputs)
        return products.dense(x, kernel, bias, self.spec, self._scales())


class QuantConv(_Quantised, nnx.Conv):
    """`flax.nnx.Conv` with a `Spec`, without input dilation and masks; padding is "SAME", "VALID" or numbers."""

    _begin, _codes = staticmethod(products.conv_scales), staticmethod(products.conv_kernel)

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.mask is not None or self.input_dilation not in (None, 1):
            raise refuse("QuantConv", "mask, input_dilation", "neither", "one of them", "use flax.nnx.Conv there")
        kernel, x, bias = self._operands(inputs)
        return products.convolve(
            x, kernel, bias, self.spec, self._scales(), strides=self.strides, padding=self.padding,
            dilation=self.kernel_dilation, groups=self.feature_group_count,
        )  # fmt: skip


class QuantEmbed(_Quantised, nnx.Embed):
    """`flax.nnx.Embed` with a `Spec`, of which weights alone count; a scale for each row."""

    _name = "embedding"
    _begin, _codes = staticmethod(products.embed_scales), staticmethod(products.embed_kernel)

    def _operands(self, x: Any) -> tuple[Any, Any, Any]:
        table = self.embedding.get_value()
        return table if isinstance(table, QArray) else table.astype(self.dtype), x, None

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return products.embed(inputs, self._operands(None)[0], self.spec, self._scales(), self.dtype)

    def attend(self, query: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """``query @ embedding.T``, with the same codes."""
        return products.attend(query, self._operands(None)[0], self.spec, self._scales())


_LAYERS: dict[Any, Any] = {nnx.Linear: QuantLinear, nnx.Conv: QuantConv, nnx.Embed: QuantEmbed}


def quantize(model: Any, rules: Any) -> Any:
    """A copy of a model whose `nnx.Linear`, `nnx.Conv` and `nnx.Embed` are quantised layers where a rule says so.

    Args:
      model: an NNX module; other layers, and subclasses of these, stay as they are.
      rules: a `Rules`, or what makes one, over the paths of kernels and embeddings. Those that decide on nothing are
        reported.
    """
    rules, paths = Rules(rules), []

    def replaced(path: Any, layer: Any) -> Any:
        kind = _LAYERS.get(type(layer))
        if kind is None:
            return layer
        paths.append("/".join(map(str, (*path, kind._name))))
        spec = rules.find(paths[-1])
        if spec is None:
            return layer
        # The same attributes, and the calls of the other class.
        new = kind.__new__(kind)
        vars(new).update(vars(layer))
        new.spec = spec
        new.calibrate()
        return new

    model = nnx.recursive_map(replaced, nnx.clone(model))
    rules.check(paths)
    return model


def calibrate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Sets learned scales, in place, to those that suit the kernels and the inputs that reach each layer when
    ``model(*args, **kwargs)`` is called, the layers in front of it quantised already. Returns what the call does."""
    layers: list[Any] = [module for _, module in nnx.iter_modules(model) if isinstance(module, _Quantised)]
    for layer in layers:
        layer._calibrating = True
    try:
        return model(*args, **kwargs)
    finally:
        for layer in layers:
            del layer._calibrating


def convert(model: Any) -> Any:
    """A copy of a model for inference: kernels of quantised layers as `QArray`, with the codes and scales of training.

    It is called as the model was, and gives the same bits.
    """
    model = nnx.clone(model)
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, _Quantised) and not isinstance(getattr(module, module._name).get_value(), QArray):
            kernel = module._operands(jnp.zeros((), jnp.float32))[0]
            setattr(
                module,
                module._name,
                nnx.Param(jax.jit(module._codes, static_argnums=1)(kernel, module.spec, module._scales())),
            )
            if hasattr(module, "kernel_scale"):
                del module.kernel_scale
    return model
