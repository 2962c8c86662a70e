"""The operations as smooth functions of JAX alone: what autodiff of any order should see at given operands.

Mask and rounding residual are constants, taken from the oracle. Independent of the library's differentiation rules.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle


def model_of(case):
    """The case's function as a smooth one: what autodiff of any order should see at these operands."""
    keywords = case.granularity.keywords
    names = case.operation.operands
    values = dict(zip(names, map(np.asarray, case.operands), strict=True))
    axis = keywords["axis"]

    def full(parameter):
        shape = [1] * len(case.granularity.x_shape)
        if axis is not None:
            shape[axis] = -1
            parameter = parameter.reshape(shape)
        for d, (n, m) in enumerate(zip(case.granularity.x_shape, parameter.shape, strict=True)):
            parameter = jnp.repeat(parameter, n // m, axis=d)
        return parameter

    if case.operation.model == "dequantize":
        return lambda q, scale, zero_point: (q - full(zero_point)) * full(scale)
    steps = oracle.steps(values["x"], values["scale"], values["zero_point"], qtype="int4", **keywords)
    edge = np.where(steps.above, steps.qmax, steps.qmin).astype(np.float32)
    residual = steps.rounded - steps.t

    def fake(x, scale, zero_point):
        return jnp.where(steps.mask, x + full(scale) * residual, (edge - full(zero_point)) * full(scale))

    def codes(x, scale, zero_point):
        return jnp.where(steps.mask, x / full(scale) + residual + full(zero_point), edge)

    def backward(dy, x, scale, zero_point):
        return jax.vjp(codes, x, scale, zero_point)[1](dy)[0]

    return {"fake_quantize": fake, "quantize": codes, "quantize_backward": backward}[case.operation.model]
