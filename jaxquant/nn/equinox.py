"""Quantised layers for Equinox.

model = quantize(model, Rules([("layers/2/*", None), ("*", Spec(w_qtype=jnp.int4))]))     # ordinary layers replaced
served = convert(model)                    # after training: weights are QArrays, the calls have the same bits
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError("jaxquant.nn.equinox needs Equinox: pip install equinox") from error

from jaxquant._core.errors import refuse
from jaxquant.affine.qarray import QArray
from jaxquant.nn import products
from jaxquant.nn.products import Scales
from jaxquant.nn.rules import Rules, Spec

__all__ = ["QuantConv", "QuantEmbedding", "QuantLinear", "convert", "quantize"]


class _Quantised(eqx.Module):
    """A layer, its spec and its learned scales.

    Args:
      layer: the ordinary layer: its weight is trained, and a `QArray` once converted.
      spec: how it is quantised.
      x: typical inputs in a batch, for learned scales to begin with; None: inputs like a standard normal variable.
    """

    layer: Any
    scales: Scales
    spec: Spec = eqx.field(static=True)

    _core: ClassVar[tuple[Any, Any]] = (products.dense_scales, products.dense_kernel)

    def __init__(self, layer: Any, spec: Spec = Spec(), x: Any = None):  # noqa: B008
        self.layer, self.spec, self.scales = layer, spec, Scales()
        if spec.learned:
            if x is None and not isinstance(layer, eqx.nn.Embedding):
                shape = (layer.weight.shape[1] * getattr(layer, "groups", 1), *(1,) * (layer.weight.ndim - 2))
                x = jax.random.normal(jax.random.key(0), (1024, *shape))
            self.scales = self._core[0](self._kernel(), None if x is None else jnp.moveaxis(x, 1, -1), spec)

    def _kernel(self) -> Any:
        """[*window, in, out], as products read it; a `QArray` is stored like this."""
        weight = self.layer.weight
        return weight if isinstance(weight, QArray) else jnp.moveaxis(weight, (0, 1), (-1, -2))


class QuantLinear(_Quantised):
    """`equinox.nn.Linear` with a `Spec`: the value is the integer product's, the gradient straight through.

    Learned scales are the leaves of ``scales``, exponents of 2.
    """

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        del key
        scalar_in, scalar_out = (size == "scalar" for size in (self.layer.in_features, self.layer.out_features))
        x = jnp.reshape(x, (1,)) if scalar_in else x
        y = products.dense(x, self._kernel(), self.layer.bias, self.spec, self.scales)
        return y[0] if scalar_out else y


class QuantConv(_Quantised):
    """`equinox.nn.Conv` with a `Spec`; padding by zeros."""

    _core: ClassVar[tuple[Any, Any]] = (products.conv_scales, products.conv_kernel)

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        del key
        layer = self.layer
        if layer.padding_mode != "ZEROS":
            raise refuse("QuantConv", "padding_mode", '"ZEROS"', layer.padding_mode, "pad the input, and take 0")
        bias = None if layer.bias is None else layer.bias.reshape(-1)
        y = products.convolve(
            jnp.moveaxis(x, 0, -1), self._kernel(), bias, self.spec, self.scales, strides=layer.stride,
            padding=layer.padding, dilation=layer.dilation, groups=layer.groups,
        )  # fmt: skip
        return jnp.moveaxis(y, -1, 0)


class QuantEmbedding(_Quantised):
    """`equinox.nn.Embedding` with a `Spec`, of which weights alone count; a scale for each row."""

    _core: ClassVar[tuple[Any, Any]] = (products.embed_scales, products.embed_kernel)

    def _kernel(self) -> Any:
        return self.layer.weight

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        del key
        return products.embed(x, self.layer.weight, self.spec, self.scales)


_LAYERS = {eqx.nn.Linear: QuantLinear, eqx.nn.Embedding: QuantEmbedding}
_LAYERS |= dict.fromkeys((eqx.nn.Conv, eqx.nn.Conv1d, eqx.nn.Conv2d, eqx.nn.Conv3d), QuantConv)


def quantize(model: Any, rules: Any) -> Any:
    """The model with `eqx.nn.Linear`, `Conv` and `Embedding` replaced by quantised layers where a rule says so.

    Args:
      model: any pytree.
      rules: a `Rules`, or what makes one, over the paths of weights, as ``layers/0/weight``. Those that decide on
        nothing are reported.
    """
    rules, paths = Rules(rules), []

    def replaced(path: Any, layer: Any) -> Any:
        kind = _LAYERS.get(type(layer))
        if kind is None:
            return layer
        paths.append("/".join((*(_step(key) for key in path), "weight")))
        spec = rules.find(paths[-1])
        return layer if spec is None else kind(layer, spec)

    known = (*_LAYERS, _Quantised)
    model = jax.tree_util.tree_map_with_path(replaced, model, is_leaf=lambda node: isinstance(node, known))
    rules.check(paths)
    return model


def convert(model: Any) -> Any:
    """The model for inference: weights of quantised layers as `QArray`, with the codes and scales of training.

    It is called as the model was, and gives the same bits.
    """

    def converted(layer: Any) -> Any:
        if not isinstance(layer, _Quantised) or isinstance(layer.layer.weight, QArray):
            return layer
        codes = eqx.filter_jit(lambda layer: layer._core[1](layer._kernel(), layer.spec, layer.scales))(layer)
        layer = eqx.tree_at(lambda layer: layer.layer.weight, layer, codes)
        return eqx.tree_at(lambda layer: layer.scales, layer, layer.scales._replace(kernel=None), is_leaf=_is_scales)

    return jax.tree.map(converted, model, is_leaf=lambda node: isinstance(node, _Quantised))


def _is_scales(node: Any) -> bool:
    return isinstance(node, Scales)


def _step(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "idx", getattr(key, "key", key))))
