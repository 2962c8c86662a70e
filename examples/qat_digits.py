"""Quantisation-aware training on handwritten digits, from a float classifier to stored 8-, 4- and 2-bit weights.

    python examples/qat_digits.py

1. Train a small convolutional network in float.
2. Round its weights to 8, 4 or 2 bits and its activations to 8: post-training quantisation.
3. Train on from there with the rounding in the forward pass and the scales learned: quantisation-aware training.
4. Store the weights as integer codes (packed below 8 bits) and check that they give the trained logits, bit for bit.

The data are 1797 scans of 8 x 8 pixels that come with scikit-learn. Test images are used for the final table only.
"""

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxquant

WEIGHT_TYPES = {8: jnp.int8, 4: jnp.int4, 2: jnp.int2}
ACTIVATION_TYPE = jnp.uint8  # unsigned: a layer's input is pixels or the output of a relu
SMALLEST_SCALE = 1e-6
BATCH = 64


# The model: kernels are quantised per output channel, the input of each layer per tensor.


class Layer(nnx.Module):
    """A convolution (kernel of rank 4) or a dense layer (rank 2), in float until `qtype` and the scales are set."""

    def __init__(self, kernel_shape, stride=1, *, rngs):
        self.kernel = nnx.Param(nnx.initializers.he_normal()(rngs.params(), kernel_shape))
        self.bias = nnx.Param(jnp.zeros(kernel_shape[-1]))
        self.stride = stride
        self.qtype = None

    def weights(self):
        """The kernel as the forward pass uses it."""
        kernel = self.kernel[...]
        if self.qtype is None:
            return kernel
        scale = damp_gradient(self.kernel_scale[...], kernel.size // kernel.shape[-1], self.qtype)
        return jaxquant.fake_quantize(kernel, scale, axis=-1, qtype=self.qtype)

    def __call__(self, x, weights):
        if self.qtype is not None:
            scale = damp_gradient(self.input_scale[...], x[0].size, ACTIVATION_TYPE)
            x = jaxquant.fake_quantize(x, scale, qtype=ACTIVATION_TYPE)
        if weights.ndim == 2:
            return x.reshape(len(x), -1) @ weights + self.bias[...]
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, weights, (self.stride, self.stride), "SAME", dimension_numbers=layout)
        return nnx.relu(x + self.bias[...])


class Classifier(nnx.Module):
    """Three convolutions and a dense layer.

    The weights are an argument of the call, so that fake-quantised ones (training) and dequantised codes (deployment)
    run through one and the same compiled function.
    """

    def __init__(self, rngs):
        shapes = [((3, 3, 1, 8), 1), ((3, 3, 8, 16), 2), ((3, 3, 16, 32), 2), ((2 * 2 * 32, 10), 1)]
        self.layers = nnx.List([Layer(shape, stride, rngs=rngs) for shape, stride in shapes])

    def weights(self):
        return [layer.weights() for layer in self.layers]

    def __call__(self, x, weights):
        for layer, layer_weights in zip(self.layers, weights, strict=True):
            x = layer(x, layer_weights)
        return x


# Scales: where they start and how they learn.


@partial(jax.jit, static_argnames=("qtype", "axis"))
def best_scale(x, qtype, axis=None):
    """Of 50 fractions of the scale that clips nothing, the one with the least squared error (for each channel)."""
    shared = None if axis is None else tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    widest = jnp.maximum(jnp.max(jnp.abs(x), axis=shared) / jnp.iinfo(qtype).max, SMALLEST_SCALE)
    candidates = jnp.linspace(0.02, 1, 50).reshape(-1, *[1] * widest.ndim) * widest

    def error(scale):
        return jnp.sum((jaxquant.fake_quantize(x, scale, axis=axis, qtype=qtype) - x) ** 2, axis=shared)

    best = jnp.argmin(jax.vmap(error)(candidates), axis=0, keepdims=True)
    return jnp.take_along_axis(candidates, best, axis=0)[0]


def damp_gradient(scale, elements, qtype):
    """Returns the scale unchanged; its gradient is divided by sqrt(elements * qmax), as in LSQ (Esser et al., 2020).

    A scale collects the gradients of all its elements, and would otherwise learn far faster than any one weight.
    """
    factor = float(elements * jnp.iinfo(qtype).max) ** -0.5
    return jax.custom_gradient(lambda s: (s, lambda gradient: gradient * factor))(scale)


def post_training_quantized(model, bits, images):
    """A quantised copy of a float model; the activation scales are chosen on `images`."""
    model, x = nnx.clone(model), images
    for layer in model.layers:
        layer.qtype = WEIGHT_TYPES[bits]
        layer.kernel_scale = nnx.Param(best_scale(layer.kernel[...], layer.qtype, axis=-1))
        layer.input_scale = nnx.Param(best_scale(x, ACTIVATION_TYPE))
        x = layer(x, layer.weights())
    return model


# Training


@nnx.jit
def forward(model, weights, images):
    return model(images, weights)


@nnx.jit
def train_step(model, optimizer, images, labels):
    def loss_of(model):
        logits = model(images, model.weights())
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    for layer in model.layers:
        if layer.qtype is not None:  # an update must not carry a scale through zero
            layer.kernel_scale[...] = jnp.maximum(layer.kernel_scale[...], SMALLEST_SCALE)
            layer.input_scale[...] = jnp.maximum(layer.input_scale[...], SMALLEST_SCALE)
    return loss


def optimizer_for(model, rate, steps):
    return nnx.Optimizer(model, optax.sgd(optax.cosine_decay_schedule(rate, steps), momentum=0.9), wrt=nnx.Param)


def accuracy(model, images, labels):
    return 100 * float(np.mean(np.argmax(forward(model, model.weights(), images), axis=-1) == labels))


def train(model, data, rate, epochs, seed, progress, name):
    """Trains in place; returns the optimizer and the validation accuracies, before the first epoch and after each."""
    images, labels = data["train"]
    batches = len(images) // BATCH
    optimizer, random = optimizer_for(model, rate, epochs * batches), np.random.default_rng(seed)
    history = [accuracy(model, *data["validation"])]
    task = progress.add_task(name, total=epochs, loss="", accuracy=f"{history[0]:.1f}")
    for _ in range(epochs):
        losses = []
        for batch in random.permutation(len(images))[: batches * BATCH].reshape(batches, BATCH):
            shifted = np.roll(images[batch], random.integers(-1, 2), axis=2)  # the outermost columns are mostly empty
            losses.append(train_step(model, optimizer, shifted, labels[batch]))
        history.append(accuracy(model, *data["validation"]))
        progress.update(task, advance=1, loss=f"{np.mean(losses):.3f}", accuracy=f"{history[-1]:.1f}")
    return optimizer, history


def step_times(models, optimizers, data, rounds):
    """Median milliseconds of a training step. The models take turns, so that a busy machine disturbs all alike."""
    images, labels = (part[:BATCH] for part in data["train"])
    times = np.empty((rounds, len(models)))
    for turn in range(rounds):
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            start = time.perf_counter()
            jax.block_until_ready(train_step(model, optimizer, images, labels))
            times[turn, i] = time.perf_counter() - start
    return 1e3 * np.median(times, axis=0)


# Stored codes


def store(model):
    """What a checkpoint needs of each kernel: integer codes, packed below 8 bits, and scales."""
    stored = []
    for layer in model.layers:
        scale, packed = layer.kernel_scale[...], jnp.iinfo(layer.qtype).bits < 8
        codes = jaxquant.quantize(layer.kernel[...], scale, axis=-1, qtype=layer.qtype, packed=packed)
        stored.append((codes, scale))
    return stored


def load(stored, qtype):
    """The weights of a checkpoint, as `forward` takes them."""
    weights = []
    for codes, scale in stored:
        if jnp.iinfo(qtype).bits < 8:
            codes = jaxquant.unpack(codes, qtype, len(scale))
        weights.append(jaxquant.dequantize(codes, scale, axis=-1))
    return weights


# The experiment


def load_data(seed):
    """Images in [0, 1] as [N, 8, 8, 1]: 60 % to train on, 15 % to validate, 25 % to test."""
    digits = load_digits()
    images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target.astype(np.int32)
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=seed)
    x, x_valid, y, y_valid = train_test_split(x, y, test_size=0.2, stratify=y, random_state=seed)
    return {"train": (x, y), "validation": (x_valid, y_valid), "test": (x_test, y_test)}


def run(epochs, seed, rounds, progress):
    """Trains the float model and one for each width; returns the rows of the table, float first."""
    data = load_data(seed)
    baseline = Classifier(nnx.Rngs(jax.random.key(seed, impl="rbg")))  # compiles in a fraction of the default's time
    optimizer, _ = train(baseline, data, 0.1, epochs, seed, progress, "float")
    models, optimizers = [baseline], [optimizer]
    size = sum(layer.kernel.nbytes for layer in baseline.layers)
    rows = [{"name": "float", "trained": accuracy(baseline, *data["test"]), "bytes": size}]

    for bits, qtype in WEIGHT_TYPES.items():
        row = {"name": f"{bits} bits"}
        model = post_training_quantized(baseline, bits, data["train"][0][:256])
        row["rounded"] = accuracy(model, *data["test"])
        optimizer, row["history"] = train(model, data, 0.05, epochs, seed, progress, row["name"])
        row["trained"] = accuracy(model, *data["test"])

        stored = store(model)
        row["bytes"] = sum(codes.nbytes + scale.nbytes for codes, scale in stored)
        logits = [forward(model, weights, data["test"][0]) for weights in (model.weights(), load(stored, qtype))]
        row["same_logits"] = np.array_equal(*(np.asarray(each).view(np.uint32) for each in logits))
        rows, models, optimizers = [*rows, row], [*models, model], [*optimizers, optimizer]

    for row, milliseconds in zip(rows, step_times(models, optimizers, data, rounds), strict=True):
        row["step_ms"] = float(milliseconds)
    return rows


def table_of(rows):
    table = Table(title="Handwritten digits: accuracy on the test images, activations of 8 bits", title_justify="left")
    table.add_column("weights")
    accuracies = ["rounded\nafterwards", "trained at\nthese bits"]
    for heading in [*accuracies, "weight\nbytes", "of\nfloat", "step,\nms", "of\nfloat", "same\nlogits"]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['rounded']:.1f} %" if "rounded" in row else "",
            f"{row['trained']:.1f} %",
            f"{row['bytes']:,}",
            f"{row['bytes'] / rows[0]['bytes']:.2f}",
            f"{row['step_ms']:.2f}",
            f"{row['step_ms'] / rows[0]['step_ms']:.2f}",
            {True: "yes", False: "NO", None: ""}[row.get("same_logits")],
        )
    return table


def plot(rows, path):
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.axhline(rows[0]["trained"], color="0.4", linestyle="--", label="float")
    names = [f"{row['name']}\n{row['bytes'] / rows[0]['bytes']:.0%} of the bytes" for row in rows[1:]]
    left.plot(names, [row["rounded"] for row in rows[1:]], "s-", color="C1", label="rounded after training")
    left.plot(names, [row["trained"] for row in rows[1:]], "o-", color="C0", label="quantisation-aware training")
    left.set(title="Test accuracy by bits of a weight")
    left.margins(x=0.15)
    for row, color in zip(rows[1:], ("C2", "C4", "C3"), strict=True):
        right.plot(row["history"], color=color, label=row["name"])
    right.set(title="Validation accuracy while training at these bits", xlabel="epoch; 0 is the rounded float model")
    for axes in (left, right):
        axes.set_ylabel("accuracy, %")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower left" if axes is left else "lower right")
    figure.savefig(path, dpi=150)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Quantisation-aware training on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=40, help="for the float model and again for each width")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="qat_digits.png", help="where the plot goes")
    parser.add_argument("--quick", action="store_true", help="a few epochs: does it run, not how well")
    options = parser.parse_args(arguments)
    epochs, rounds = (4, 10) if options.quick else (options.epochs, 100)

    console = Console()
    columns = [TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs")]
    columns += [TextColumn("loss {task.fields[loss]:>5}  validation {task.fields[accuracy]:>5} %"), TimeElapsedColumn()]
    with Progress(*columns, console=console) as progress:
        rows = run(epochs, options.seed, rounds, progress)
    console.print(table_of(rows))
    plot(rows, options.output)
    if not all(row["same_logits"] for row in rows[1:]):
        raise SystemExit("The stored codes do not give the logits of the trained model.")
    console.print("The stored codes give the logits of the trained model, bit for bit.")
    accuracies = {row["name"]: row["trained"] for row in rows}
    difference = accuracies["4 bits"] - accuracies["float"]
    console.print(f"4-bit training: {difference:+.1f} points against float.")
    console.print(f"The plot is in {options.output}.")
    if difference < -1 and not options.quick:
        raise SystemExit("4-bit training lost more than a point against float.")
    return rows


if __name__ == "__main__":
    main()
