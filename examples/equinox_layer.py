"""A quantised dense layer in Equinox, trained a few steps on scikit-learn's digits."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxquant


class QuantLinear(eqx.nn.Linear):
    """`eqx.nn.Linear` with 4-bit weights (a learned scale per output) and 8-bit inputs (one learned scale).

    A scale's logarithm is the parameter: the scale stays positive, and each step changes it by a proportion.
    """

    weight_log_scale: jax.Array
    input_log_scale: jax.Array
    qtype: type = eqx.field(static=True)

    def __init__(self, in_features, out_features, typical_input, *, qtype=jnp.int4, key):
        super().__init__(in_features, out_features, key=key)
        self.qtype = qtype
        self.weight_log_scale = log_scale(self.weight, qtype, axis=1)
        self.input_log_scale = log_scale(typical_input, jnp.uint8)

    def __call__(self, x, *, key=None):
        x = jaxquant.fake_quantize(x, jnp.exp(self.input_log_scale), qtype=jnp.uint8)
        weight = jaxquant.fake_quantize(self.weight, jnp.exp(self.weight_log_scale), axis=0, qtype=self.qtype)
        return weight @ x + self.bias


def log_scale(x, qtype, axis=None):
    """A start that clips the tails and spends the codes on the bulk (Esser et al., 2020)."""
    return jnp.log(2 * jnp.mean(jnp.abs(x), axis) / jnp.iinfo(qtype).max ** 0.5)


def main(steps=100):
    """Returns the first and the last loss."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    keys = jax.random.split(jax.random.key(0, impl="rbg"))
    hidden = QuantLinear(64, 32, images, key=keys[0])
    activations = jax.nn.relu(jax.vmap(hidden)(images))
    model = eqx.nn.Sequential([hidden, eqx.nn.Lambda(jax.nn.relu), QuantLinear(32, 10, activations, key=keys[1])])
    optimizer = optax.adam(0.01)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state):
        def loss_of(model):
            logits = jax.vmap(model)(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for i in range(steps):
        model, state, loss = step(model, state)
        losses.append(float(loss))
        if i % 20 == 0 or i == steps - 1:
            print(f"step {i:3}  loss {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
