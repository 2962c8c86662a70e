"""A quantised dense layer in Flax Linen, trained a few steps on scikit-learn's digits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxquant


class QuantDense(nn.Module):
    """`nn.Dense` with 4-bit weights (a learned scale per output) and 8-bit inputs (one learned scale).

    A scale's logarithm is the parameter: the scale stays positive, and each step changes it by a proportion.
    """

    features: int
    qtype: type = jnp.int4

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        kernel_scale = self.param("kernel_log_scale", lambda _: log_scale(kernel, self.qtype, axis=0))
        input_scale = self.param("input_log_scale", lambda _: log_scale(x, jnp.uint8))

        x = jaxquant.fake_quantize(x, jnp.exp(input_scale), qtype=jnp.uint8)
        kernel = jaxquant.fake_quantize(kernel, jnp.exp(kernel_scale), axis=-1, qtype=self.qtype)
        return x @ kernel + bias


def log_scale(x, qtype, axis=None):
    """A start that clips the tails and spends the codes on the bulk (Esser et al., 2020)."""
    return jnp.log(2 * jnp.mean(jnp.abs(x), axis) / jnp.iinfo(qtype).max ** 0.5)


def main(steps=100):
    """Returns the first and the last loss."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    model, optimizer = nn.Sequential([QuantDense(32), nn.relu, QuantDense(10)]), optax.adam(0.01)
    parameters = model.init(jax.random.key(0, impl="rbg"), images)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state):
        def loss_of(parameters):
            logits = model.apply(parameters, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, loss

    losses = []
    for i in range(steps):
        parameters, state, loss = step(parameters, state)
        losses.append(float(loss))
        if i % 20 == 0 or i == steps - 1:
            print(f"step {i:3}  loss {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
