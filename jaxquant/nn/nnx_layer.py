"""What a quantised layer of NNX holds beside an ordinary one's attributes: a spec, and scales learned or observed."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxquant.affine.qarray import QArray
from jaxquant.nn import layers
from jaxquant.nn.rules import Spec
from jaxquant.nn.scales import Scales, observed


class Observed(nnx.Variable):
    """What a layer's observer has seen; or the `QParams` of its inputs, which one's own observer may have given:

    >>> layer, observer = QuantLinear(2, 2, rngs=nnx.Rngs(0)), observers.AbsMax()
    >>> state = observer.update(observer.init((2,)), jnp.array([1.0, -1.27]))
    >>> layer.input_scale = Observed(observer.qparams(state))
    >>> layer(jnp.array([9.0, 0.0])) == layer(jnp.array([1.27, 0.0]))
    Array([ True,  True], dtype=bool)
    """


class Quantised:
    """An ordinary layer's attributes, a spec, and the scales that it holds."""

    kind, _calibrating = layers.DENSE, False

    def __init__(self, *args: Any, spec: Spec = Spec(), **kwargs: Any):  # noqa: B008
        super().__init__(*args, **kwargs)
        self.spec = spec
        self.calibrate()

    def calibrate(self: Any, x: jax.Array | None = None) -> None:
        """Learned scales to begin with, for typical inputs x; None: inputs like a standard normal variable. An observer
        gathers x. Of a converted layer nothing changes."""
        x, kernel, _ = self.operands(x)
        held = self.held().input
        if isinstance(held, dict) and x is not None:
            self.input_scale.set_value(observed(self.spec.x_observer, held, x))
        elif not isinstance(kernel, QArray) and (held is None or self.spec.learned):
            scales = layers.begin(self.kind, self.spec, kernel, x, getattr(self, "in_features", 0))
            for name, value in scales._asdict().items():
                if value is not None:
                    setattr(self, f"{name}_scale", (nnx.Param if self.spec.learned else Observed)(value))

    def held(self) -> Scales:
        """The scales."""
        found = (getattr(self, f"{name}_scale", None) for name in Scales._fields)
        return Scales(*(None if scale is None else scale.get_value() for scale in found))

    def operands(self: Any, x: Any) -> tuple[Any, Any, Any]:
        """Inputs, kernel and bias, of one dtype."""
        if self._calibrating:
            self._calibrating = False
            self.calibrate(x)
        bias = None if self.bias is None else self.bias[...]

        def promote(*operands: Any) -> Any:
            return self.promote_dtype(operands, dtype=self.dtype)

        return layers.flax_operands(self, promote, x, self.kernel.get_value(), bias)
