"""Quantisation-aware training on handwritten digits, from a float classifier to stored 8-, 4- and 2-bit weights.

    python examples/qat_digits.py

1. Train a small convolutional network in float.
2. Round its weights to 8, 4 or 2 bits and its activations to 8: post-training quantisation.
3. Train on from there with the rounding in the forward pass and the scales learned: quantisation-aware training.
4. Convert it to integer weights (packed below 8 bits) and check that they give the trained logits, bit for bit.

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

import jaxquant.nn.nnx as qnn
from jaxquant.nn import Spec

WEIGHT_TYPES = {8: jnp.int8, 4: jnp.int4, 2: jnp.int2}
BATCH = 64


class Classifier(nnx.Module):
    """Three convolutions and a dense layer."""

    def __init__(self, rngs):
        conv = partial(nnx.Conv, kernel_size=(3, 3), kernel_init=nnx.initializers.he_normal(), rngs=rngs)
        convolutions = [conv(1, 8), conv(8, 16, strides=2), conv(16, 32, strides=2)]
        self.layers = nnx.List([*convolutions, nnx.Linear(2 * 2 * 32, 10, rngs=rngs)])

    def __call__(self, x):
        *convolutions, head = self.layers
        for layer in convolutions:
            x = nnx.relu(layer(x))
        return head(x.reshape(len(x), -1))


def post_training_quantized(model, bits, images):
    """A quantised copy of a float model, with a scale for each output channel and one for each layer's input.

    Activations are unsigned: a layer's input is pixels or the output of a relu.
    """
    model = qnn.quantize(model, Spec(w_qtype=WEIGHT_TYPES[bits], x_qtype=jnp.uint8, learned=True))
    qnn.calibrate(model, images)
    return model


# Training


@nnx.jit
def forward(model, images):
    return model(images)


@nnx.jit
def train_step(model, optimizer, images, labels):
    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def accuracy(model, images, labels):
    return 100 * float(np.mean(np.argmax(forward(model, images), axis=-1) == labels))


def train(model, data, optimizer_of, rate, epochs, seed, progress, name):
    """Trains in place; returns the optimizer and the validation accuracies, before the first epoch and after each."""
    images, labels = data["train"]
    batches = len(images) // BATCH
    schedule = optax.cosine_decay_schedule(rate, epochs * batches)
    optimizer, random = nnx.Optimizer(model, optimizer_of(schedule), wrt=nnx.Param), np.random.default_rng(seed)
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


# The experiment


def load_data(seed):
    """Images in [0, 1], [N, 8, 8, 1]: 60 % to train on, 15 % that learning rates were chosen on, 25 % to test."""
    digits = load_digits()
    images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target.astype(np.int32)
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=seed)
    x, x_valid, y, y_valid = train_test_split(x, y, test_size=0.2, stratify=y, random_state=seed)
    return {"train": (x, y), "validation": (x_valid, y_valid), "test": (x_test, y_test)}


def run(epochs, seed, rounds, progress):
    """Trains the float model and one for each width; returns the rows of the table, float first."""
    data = load_data(seed)
    baseline = Classifier(nnx.Rngs(jax.random.key(seed, impl="rbg")))  # compiles in a fraction of the default's time
    optimizer, _ = train(baseline, data, partial(optax.sgd, momentum=0.9), 0.1, epochs, seed, progress, "float")
    models, optimizers = [baseline], [optimizer]
    size = sum(layer.kernel.get_value().nbytes for layer in baseline.layers)
    rows = [{"name": "float", "trained": accuracy(baseline, *data["test"]), "bytes": size}]

    for bits in WEIGHT_TYPES:
        row = {"name": f"{bits} bits"}
        model = post_training_quantized(baseline, bits, data["train"][0][:256])
        row["rounded"] = accuracy(model, *data["test"])
        optimizer, row["history"] = train(model, data, optax.adam, 0.01, epochs, seed, progress, row["name"])
        row["trained"] = accuracy(model, *data["test"])

        served = qnn.convert(model)
        row["bytes"] = sum(layer.kernel.get_value().nbytes for layer in served.layers)
        logits = [np.asarray(forward(each, data["test"][0])) for each in (model, served)]
        row["same_logits"] = np.array_equal(*(each.view(np.uint32) for each in logits))
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
