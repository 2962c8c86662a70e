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
from jaxquant.nn import layers
from jaxquant.nn.rules import Rules, Spec, path_of
from jaxquant.nn.scales import Scales, observed

__all__ = ["QuantConv", "QuantEmbedding", "QuantLinear", "convert", "quantize"]


class _Quantised(eqx.Module):
    """A layer, its spec and the scales that it holds.

    Args:
      layer: the ordinary layer: its weight is trained, and a `QArray` once converted.
      spec: how it is quantised.
      x: a batch of typical inputs, for learned scales to begin with (None: like a standard normal variable).
    """

    layer: Any
    scales: Scales
    spec: Spec = eqx.field(static=True)

    _kind: ClassVar[layers.Kind] = layers.DENSE

    def __init__(self, layer: Any, spec: Spec = Spec(), x: Any = None):  # noqa: B008
        self.layer, self.spec = layer, spec
        features = getattr(layer, "groups", 1) * layer.weight.shape[1]
        x = None if x is None else jnp.moveaxis(x, 1, -1)
        self.scales = layers.begin(self._kind, spec, self._arrange(layer.weight), x, features)

    def _arrange(self, weight: Any) -> Any:
        """[*window, in, out], as products read it; a `QArray` is stored like this."""
        return weight if isinstance(weight, QArray) else jnp.moveaxis(weight, (0, 1), (-1, -2))

    def observe(self, x: jax.Array) -> Any:
        """The layer after its observer has seen another batch of inputs."""
        scales = self.scales._replace(input=observed(self.spec.x_observer, self.scales.input, x))
        return eqx.tree_at(lambda layer: layer.scales, self, scales, is_leaf=_is_a(Scales))


class QuantLinear(_Quantised):
    """`equinox.nn.Linear` with a `Spec`: the value is the integer product's, the gradient straight through.

    Learned scales are the leaves of ``scales``, exponents of 2. With ``Spec(x_observer=...)``, ``scales.input`` is the
    observer's state (float leaves without a gradient: keep weight decay off them), and from `convert` on a `QParams`;
    one of your own may be put there.

    >>> spec = Spec(x_observer=observers.MinMax(qtype=jnp.uint8, symmetric=False))
    >>> layer = QuantLinear(eqx.nn.Linear(2, 2, key=jax.random.key(0)), spec)
    >>> for batch in jnp.array([[[0.0, 1.0]], [[0.5, 2.55]]]):
    ...     layer = layer.observe(batch)
    >>> convert(layer).scales.input.scale
    Array(0.01, dtype=float32)
    """

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        del key
        scalar_in, scalar_out = (size == "scalar" for size in (self.layer.in_features, self.layer.out_features))
        x = jnp.reshape(x, (1,)) if scalar_in else x
        y = layers.dense(x, self._arrange(self.layer.weight), self.layer.bias, self.spec, self.scales)
        return y[0] if scalar_out else y


class QuantConv(_Quantised):
    """`equinox.nn.Conv` with a `Spec`; padding by zeros."""

    _kind: ClassVar[layers.Kind] = layers.CONV

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        del key
        layer = self.layer
        if layer.padding_mode != "ZEROS":
            raise refuse("QuantConv", "padding_mode", '"ZEROS"', layer.padding_mode, "pad the input, and take 0")
        bias = None if layer.bias is None else layer.bias.reshape(-1)
        y = layers.convolve(
            jnp.moveaxis(x, 0, -1), self._arrange(layer.weight), bias, self.spec, self.scales, strides=layer.stride,
            padding=layer.padding, dilation=layer.dilation, groups=layer.groups,
        )  # fmt: skip
        return jnp.moveaxis(y, -1, 0)


class QuantEmbedding(_Quantised):
    """`equinox.nn.Embedding` with a `Spec`, of which weights alone count; a scale for each row."""

    _kind: ClassVar[layers.Kind] = layers.EMBED

    def _arrange(self, weight: Any) -> Any:
        return weight

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        del key
        return layers.embed(x, self.layer.weight, self.spec, self.scales)


_LAYERS = {eqx.nn.Linear: QuantLinear, eqx.nn.Embedding: QuantEmbedding}
_LAYERS |= dict.fromkeys((eqx.nn.Conv, eqx.nn.Conv1d, eqx.nn.Conv2d, eqx.nn.Conv3d), QuantConv)


def quantize(model: Any, rules: Any) -> Any:
    """The model with `eqx.nn.Linear`, `Conv` and `Embedding` replaced by quantised layers where a rule says so.

    Args:
      model: any pytree.
      rules: a `Rules`, or what makes one, over the paths of weights, as ``layers/0/weight``. Those that decide on
        nothing are reported.
    """
    with Rules(rules).applied() as find:

        def replaced(path: Any, layer: Any) -> Any:
            kind = _LAYERS.get(type(layer))
            spec = None if kind is None else find(path_of(path, "weight"))
            return layer if kind is None or spec is None else kind(layer, spec)

        return jax.tree_util.tree_map_with_path(replaced, model, is_leaf=_is_a(*_LAYERS, _Quantised))


def convert(model: Any) -> Any:
    """The model for inference: weights of quantised layers as `QArray`, with the codes and scales of training.

    It is called as the model was, and gives the same bits.
    """

    def converted(layer: Any) -> Any:
        if not isinstance(layer, _Quantised) or isinstance(weight := layer.layer.weight, QArray):
            return layer
        new = layers.converted(layer._kind, layer.spec, weight, layer.scales, weight.ndim, layer._arrange)
        return eqx.tree_at(lambda layer: (layer.layer.weight, layer.scales), layer, new, is_leaf=_is_a(Scales))

    return jax.tree.map(converted, model, is_leaf=_is_a(_Quantised))


def _is_a(*kinds: Any) -> Any:
    return lambda node: isinstance(node, kinds)
