"""Quantised dense layers in Flax Linen, trained a few steps on scikit-learn's digits, and converted to integers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from jaxquant.nn import Spec
from jaxquant.nn.linen import QuantDense, convert


def main(steps=100):
    """Returns the first and the last loss."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    # 4-bit weights with a learned scale for each output, 8-bit inputs with one learned scale.
    spec = Spec(w_qtype=jnp.int4, x_qtype=jnp.uint8, learned=True)
    model, optimizer = nn.Sequential([QuantDense(32, spec=spec), nn.relu, QuantDense(10, spec=spec)]), optax.adam(0.01)
    variables = model.init(jax.random.key(0, impl="rbg"), images)
    state = optimizer.init(variables)

    @jax.jit
    def step(variables, state):
        def loss_of(variables):
            logits = model.apply(variables, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = jax.value_and_grad(loss_of)(variables)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(variables, updates), state, loss

    losses = []
    for i in range(steps):
        variables, state, loss = step(variables, state)
        losses.append(float(loss))
        if i % 20 == 0 or i == steps - 1:
            print(f"step {i:3}  loss {losses[-1]:.3f}")

    served = convert(model, variables, images)  # kernels as integer codes
    trained, integers = (np.asarray(jax.jit(model.apply)(each, images)) for each in (variables, served))
    print(f"{served['params']['layers_0']['kernel']}: the same logits: {np.array_equal(trained, integers)}")
    assert np.array_equal(trained, integers)
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
