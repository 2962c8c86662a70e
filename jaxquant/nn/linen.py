"""Quantised layers for Flax Linen.

    model = nn.Sequential([QuantDense(32, spec=Spec(w_qtype=jnp.int4)), nn.relu, QuantDense(10)])
    variables = model.init(key, x)             # floating parameters, trained as any
    served = convert(model, variables, x)      # kernels are QArrays; model.apply(served, x) has the same bits

A model of ordinary layers is quantised where it is called, by rules over the paths of its parameters; inside a function
under jit, since what is compiled stays as it was traced:

    with quantized(Rules([("*", Spec())])):
        model.apply(variables, x)

With ``Spec(x_observer=...)`` the collection "observed" holds ``input_scale`` of each layer: the observer's state, which
gathers wherever the collection is mutable, and from `convert` on a `QParams`. One of your own will do:

    variables["observed"] = {"layers_0": {"input_scale": observer.qparams(state)}}
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

try:
    import flax.linen as nn
    from flax.core import unfreeze
except ImportError as error:
    raise ImportError("jaxquant.nn.linen needs Flax: pip install flax") from error

from jaxquant.nn import layers
from jaxquant.nn import linen_calls as calls
from jaxquant.nn.rules import Rules, Spec
from jaxquant.nn.scales import Scales

__all__ = ["QuantConv", "QuantDense", "QuantEmbed", "convert", "quantized"]


class QuantDense(nn.Dense):
    """`flax.linen.Dense` with a `Spec`: the value is the integer product's, the gradient straight through.

    Learned scales are the parameters ``kernel_scale`` and ``input_scale``, exponents of 2. They begin at those that
    suit the kernel and the inputs of ``init``. An observed one is in the collection "observed":

    >>> spec = Spec(x_observer=observers.MinMax(qtype=jnp.uint8, symmetric=False))
    >>> layer, x = QuantDense(2, spec=spec), jnp.array([[0.0, 2.55]])
    >>> variables = layer.init(jax.random.key(0), x)
    >>> for batch in (x / 2, x):
    ...     _, seen = layer.apply(variables, batch, mutable="observed")
    ...     variables = {**variables, **seen}
    >>> convert(layer, variables, x)["observed"]["input_scale"].scale
    Array(0.01, dtype=float32)
    """

    spec: Spec = Spec()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return calls.dense(self, self.spec, inputs)


class QuantConv(nn.Conv):
    """`flax.linen.Conv` with a `Spec`, without input dilation and masks; padding is "SAME", "VALID" or numbers."""

    spec: Spec = Spec()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return calls.convolve(self, self.spec, inputs)


class QuantEmbed(nn.Embed):
    """`flax.linen.Embed` with a `Spec`, of which weights alone count; a scale for each row."""

    spec: Spec = Spec()

    def setup(self) -> None:
        calls.set_up_embed(self, self.spec)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return calls.embed(self, self.spec, inputs)

    def attend(self, query: jax.Array) -> jax.Array:
        """``query @ embedding.T``, with the same codes."""
        return calls.attend(self, self.spec, query)


@contextlib.contextmanager
def quantized(rules: Any) -> Iterator[None]:
    """Within it `nn.Dense`, `nn.Conv` and `nn.Embed` whose parameters match a rule compute as the layers above.

    Args:
      rules: a `Rules`, or what makes one. Rules that decided on nothing by the end are reported.
    """
    with Rules(rules).applied() as find:

        def intercept(function: Any, args: Any, kwargs: Any, context: Any) -> Any:
            kind, methods = calls.CALLS.get(type(context.module), (None, {}))
            if context.method_name in methods and (spec := find(calls.path(context.module, kind))) is not None:
                return methods[context.method_name](context.module, spec, *args, **kwargs)
            return function(*args, **kwargs)

        with nn.intercept_methods(intercept):
            yield


def convert(model: nn.Module, variables: Any, *args: Any, rules: Any = None, **kwargs: Any) -> Any:
    """The variables for inference: kernels of quantised layers as `QArray`, with the codes and scales of training.

    ``model.apply`` takes them as they are, and gives the bits of the training forward.

    Args:
      model, variables: as for ``model.apply``.
      args, kwargs: as for ``model.apply``; only shapes and dtypes count.
      rules: those of `quantized`, for a model of ordinary layers, which is then applied in it too.
    """
    with calls.recorded() as found, contextlib.nullcontext() if rules is None else quantized(rules):
        jax.eval_shape(lambda v, a: model.apply(v, *a, **kwargs), variables, args)
    served = unfreeze(variables)
    for path, (kind, spec, kernel) in found.items():
        *names, name = path.split("/")
        params, seen = served["params"], served.get("observed", {})
        for step in names:
            params, seen = params[step], seen.get(step, {})
        scales = Scales(params.pop("kernel_scale", None), seen.get("input_scale"))
        params[name], scales = layers.converted(kind, spec, params[name].astype(kernel.dtype), scales, kernel.ndim)
        if scales.input is not None:
            seen["input_scale"] = scales.input
    return served
