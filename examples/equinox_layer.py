"""An Equinox model quantised by rules, trained a few steps on scikit-learn's digits, and converted to integers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from jaxquant.nn import Rules, Spec
from jaxquant.nn.equinox import convert, quantize


def main(steps=100):
    """Returns the first and the last loss."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    keys = jax.random.split(jax.random.key(0, impl="rbg"))
    layers = [eqx.nn.Linear(64, 32, key=keys[0]), eqx.nn.Lambda(jax.nn.relu), eqx.nn.Linear(32, 10, key=keys[1])]
    # 4-bit weights in the first layer, 8-bit ones in the others; activations of 8 bits; scales from the values.
    rules = Rules([("layers/0/*", Spec(w_qtype=jnp.int4)), ("*", Spec())], unmatched="raise")
    model = quantize(eqx.nn.Sequential(layers), rules)
    optimizer = optax.adam(0.01)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def logits_of(model):
        return jax.vmap(model)(images)

    @eqx.filter_jit
    def step(model, state):
        def loss_of(model):
            return optax.softmax_cross_entropy_with_integer_labels(logits_of(model), labels).mean()

        loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for i in range(steps):
        model, state, loss = step(model, state)
        losses.append(float(loss))
        if i % 20 == 0 or i == steps - 1:
            print(f"step {i:3}  loss {losses[-1]:.3f}")

    served = convert(model)  # weights as integer codes
    trained, integers = (np.asarray(logits_of(each)) for each in (model, served))
    print(f"{served.layers[0].layer.weight}: the same logits: {np.array_equal(trained, integers)}")
    assert np.array_equal(trained, integers)
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
