"""Fine-tunes low-rank adapters (LoRA: Hu et al., 2021) over a language model's frozen, packed weights.

    python examples/llm/finetune_lora.py --model FILE.gguf --output build/lora

The text is Python's language reference, which comes with Python itself. The quantised weights are multiplied as they
are, forward and backward; they are never dequantised as a whole. Writes the adapters (safetensors) and a plot of the
loss, and checks that the adapters read back give the same loss.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import model as llm
import numpy as np
import optax
from generate import memory
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.numpy import save_file
from text import Text, batches

from jaxquant import ggml

HELD_OUT = 0.1  # the end of the text, for the loss that is compared


def new_adapters(params: Any, config: llm.Config, rank: int, names: tuple[str, ...], key: jax.Array) -> Any:
    """Name of a product -> a [layers, k, rank] and b [layers, rank, n]; b is zero, so that the model is as it was."""
    adapters = {}
    for name in names:
        k, n = llm.product_shape(params, name)
        key, mine = jax.random.split(key)
        adapters[name] = {
            "a": jax.random.normal(mine, (config.layers, k, rank)) * k**-0.5,
            "b": jnp.zeros((config.layers, rank, n)),
        }
    return adapters


def make_loss(config: llm.Config, lhs_qtype: Any) -> Any:
    """loss(adapters, params, tokens [batch, length + 1]): mean cross-entropy of each next token."""

    def loss(adapters: Any, params: Any, tokens: jax.Array) -> jax.Array:
        run = partial(llm.forward, params, config, adapters=adapters, lhs_qtype=lhs_qtype)
        scores = jax.vmap(run)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()

    return loss


def save_adapters(path: Path, adapters: Any) -> None:
    save_file(
        {f"{name}.{part}": np.asarray(value) for name, pair in adapters.items() for part, value in pair.items()}, path
    )


def plot(path: Path, losses: list[float], before: float, after: float) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(1, len(losses) + 1), losses, label="training batches")
    axes.axhline(before, color="gray", linestyle="--", label=f"held out, before: {before:.3f}")
    axes.axhline(after, color="black", label=f"held out, after: {after:.3f}")
    axes.set(xlabel="step", ylabel="cross-entropy per token (nats)", title="Adapters over packed weights")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a GGUF file of a Llama-family model")
    parser.add_argument("--output", type=Path, default=Path("build/lora"), help="folder for adapters and plot")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--products", nargs="+", default=["qkv", "o"], choices=list(llm.PRODUCTS), help="what is adapted"
    )
    parser.add_argument("--int8", action="store_true", help="quantise activations in the forward pass (faster)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console()

    try:
        text = Text(ggml.load_gguf(options.model).metadata, options.model)
        params, config = llm.load(options.model)
    except (OSError, ValueError) as error:
        sys.exit(f"finetune_lora.py: {error}")
    from pydoc_data.topics import topics

    tokens = np.asarray(text.encode("\n\n".join(topics[name] for name in sorted(topics))), np.int32)
    split = int(len(tokens) * (1 - HELD_OUT))
    stream = batches(tokens[:split], options.length, options.batch, np.random.default_rng(options.seed))
    unseen = batches(tokens[split:], options.length, options.batch, np.random.default_rng(1))
    held_out = [next(unseen) for _ in range(4)]

    adapters = new_adapters(params, config, options.rank, tuple(options.products), jax.random.key(options.seed))
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, 5, max(options.steps, 6)))
    state = optimizer.init(adapters)
    loss = make_loss(config, jnp.int8 if options.int8 else None)

    # Adapters and the optimiser's state are updated in place; the packed weights are an argument that nothing changes.
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(adapters: Any, state: Any, params: Any, tokens: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(adapters, params, tokens)
        updates, state = optimizer.update(gradient, state, adapters)
        return optax.apply_updates(adapters, updates), state, value

    evaluate = jax.jit(loss)
    score = lambda adapters: float(np.mean([evaluate(adapters, params, batch) for batch in held_out]))  # noqa: E731

    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    trained = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    console.print(
        f"{len(tokens)} tokens of text; {weights / 1e6:.0f} MB of frozen weights, {trained / 1e6:.2f} M trained numbers"
    )
    before, losses, start = score(adapters), [], time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=options.steps)
        for _ in range(options.steps):
            adapters, state, value = step(adapters, state, params, next(stream))
            losses.append(float(value))
            progress.update(task, advance=1, description=f"loss {losses[-1]:.3f}")
    seconds = time.perf_counter() - start
    after = score(adapters)

    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "adapters.safetensors"
    save_adapters(file, adapters)
    if score(llm.load_adapters(file, params, config)) != after:
        sys.exit("finetune_lora.py: the adapters read back give another loss")
    plot(options.output / "loss.png", losses, before, after)
    own, peak = memory()
    console.print(
        f"held-out loss {before:.3f} -> {after:.3f} nats a token; {seconds / max(options.steps, 1):.2f} s a step; "
        f"memory {own:.0f} MB of its own, {peak:.0f} MB at the peak; adapters and plot in {options.output}; "
        f"generate.py --adapters {file} applies them"
    )


if __name__ == "__main__":
    main()
