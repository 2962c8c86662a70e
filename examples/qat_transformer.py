"""A character-level transformer trained with 8- and 4-bit weights and 8-bit activations, beside float.

    python examples/qat_transformer.py

1. Train a small Flax Linen transformer on Python's own documentation (about 500,000 characters that ship with Python):
   in float, and from the same start with dense layers of 8-bit activations and of 8- or 4-bit weights.
2. Convert the quantised models to integer weights and check that they give the trained logits, bit for bit.
3. Compare memory and time of a training step with the same quantisation written in jax.numpy, and with qwix if it is
   installed.
"""

import argparse
import importlib.util
import os
import time
from collections.abc import Callable
from functools import partial
from pydoc_data.topics import topics

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxquant.nn import Rules, Spec
from jaxquant.nn.linen import convert, quantized

MIB = 1 << 20
# Recomputed in the backward pass, as is usual: what is kept is then mostly what dense layers need.
gelu = jax.checkpoint(nn.gelu)
attention = jax.checkpoint(partial(jax.nn.dot_product_attention, is_causal=True))


class Block(nn.Module):
    heads: int
    dense: Callable

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        q, k, v = jnp.split(self.dense(3 * width, name="qkv")(nn.LayerNorm()(x)), 3, axis=-1)
        q, k, v = (each.reshape(*x.shape[:-1], self.heads, -1) for each in (q, k, v))
        attended = attention(q, k, v)
        x = x + self.dense(width, name="out")(attended.reshape(x.shape))
        return x + self.dense(width, name="down")(gelu(self.dense(4 * width, name="up")(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    characters: int
    layers: int = 4
    width: int = 256
    context: int = 128
    heads: int = 4
    dense: Callable = nn.Dense

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.characters, self.width, name="characters")(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (self.context, self.width))
        for i in range(self.layers):
            x = Block(self.heads, self.dense, name=f"block_{i}")(x)
        return self.dense(self.characters, name="head")(nn.LayerNorm()(x))


# The kinds of training. Each is a function of variables and tokens; all take the same variables.


def rules(w_qtype):
    """Every dense layer but the head, which chooses among few characters and stays at 8 bits."""
    return Rules([("head/*", Spec()), ("*/kernel", Spec(w_qtype=w_qtype))], unmatched="raise")


def jaxquant_model(model, w_qtype):
    def apply(variables, tokens):
        with quantized(rules(w_qtype)):
            return model.apply(variables, tokens)

    return apply


def numpy_model(model):
    """Quantisation-aware training as one writes it in jax.numpy."""

    def fake_quantize(x, axis):
        scale = jnp.maximum(jnp.max(jnp.abs(x), axis=axis, keepdims=True), 1e-12) / 127
        return x + jax.lax.stop_gradient(jnp.round(x / scale) * scale - x)

    def dot_general(x, w, numbers, precision=None, preferred_element_type=None):
        return jax.lax.dot_general(fake_quantize(x, -1), fake_quantize(w, 0), numbers, precision)

    return model.clone(dense=partial(nn.Dense, dot_general=dot_general)).apply


def qwix_model(model):
    import qwix

    rule = qwix.QtRule(module_path=".*(qkv|out|up|down|head)", weight_qtype=jnp.int8, act_qtype=jnp.int8)
    return qwix.quantize_model(model, qwix.QtProvider([rule])).apply


def loss_of(apply, variables, batch):
    logits = apply(variables, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def step_of(apply, optimizer):
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(variables, state, batch):
        loss, gradients = jax.value_and_grad(partial(loss_of, apply))(variables, batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(variables, updates), state, loss

    return step


# What a step takes.


def residual_bytes(apply, variables, batch):
    """Bytes that the forward pass keeps for the backward pass, the variables themselves excepted."""

    def residuals(variables):
        return jax.tree.leaves(jax.vjp(lambda v: loss_of(apply, v, batch), variables)[1])

    jaxpr = jax.make_jaxpr(residuals)(variables).jaxpr
    given = {id(v) for v in (*jaxpr.invars, *jaxpr.constvars)}
    kept = {id(v): v.aval for v in jaxpr.outvars if id(v) not in given}
    return sum(aval.size * aval.dtype.itemsize for aval in kept.values())


def step_times(steps, start, optimizer, batch, rounds):
    """Median milliseconds of a step. The kinds take turns, so that a busy machine disturbs all alike."""
    times = np.empty((rounds, len(steps)))
    states = [jax.tree.map(jnp.copy, (start, optimizer.init(start))) for _ in steps]
    for turn in range(-1, rounds):
        for i, step in enumerate(steps):
            began = time.perf_counter()
            *states[i], loss = step(*states[i], batch)
            jax.block_until_ready(loss)
            times[turn, i] = time.perf_counter() - began  # turn -1 warms up, and is overwritten by the last
    return 1e3 * np.median(times, axis=0)


# The experiment


def load_text(context):
    """Windows of one character more than the context: those to train on, those to evaluate on, and how many characters
    there are."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    characters, codes = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True)
    windows = np.lib.stride_tricks.sliding_window_view(codes.astype(np.int32), context + 1)
    split = len(windows) * 9 // 10
    return windows[: split - context], windows[split::context], len(characters)


def train(name, apply, step, start, optimizer, text, options, progress):
    """Trained variables, and the loss on the held-out windows."""
    train_windows, held_out, _ = text
    variables, state = jax.tree.map(jnp.copy, (start, optimizer.init(start)))
    random = np.random.default_rng(options.seed)  # the same batches for all
    task = progress.add_task(name, total=options.steps, loss="")
    for i in range(options.steps):
        batch = train_windows[random.integers(len(train_windows), size=options.batch)]
        variables, state, loss = step(variables, state, batch)
        progress.update(task, advance=1, **({"loss": f"{float(loss):.3f}"} if i % 10 == 0 else {}))
    evaluate = jax.jit(partial(loss_of, apply))
    batches = np.array_split(held_out, max(len(held_out) // 64, 1))[: 1 if options.quick else 4]
    return variables, float(np.mean([evaluate(variables, batch) for batch in batches]))


def same_logits(model, apply, w_qtype, variables, tokens):
    """Whether the converted model, of integer weights, gives the trained logits, bit for bit."""
    served = convert(model, variables, tokens, rules=rules(w_qtype))
    logits = [np.asarray(jax.jit(apply)(each, tokens)).view(np.uint32) for each in (variables, served)]
    return np.array_equal(*logits)


def run(options, progress, console):
    text = load_text(options.context)
    model = Transformer(text[2], options.layers, options.width, options.context)
    batch = np.ascontiguousarray(text[0][: options.batch])
    start = model.init(jax.random.key(options.seed), batch[:, :-1])
    schedule = optax.warmup_cosine_decay_schedule(0, 1e-3, options.steps // 10, options.steps)
    optimizer = optax.adam(schedule)

    kinds = {"float": model.apply}
    kinds |= {f"W{jnp.iinfo(w).bits}A8, jaxquant": jaxquant_model(model, w) for w in (jnp.int8, jnp.int4)}
    kinds["W8A8, jax.numpy"] = numpy_model(model)
    if importlib.util.find_spec("qwix"):
        kinds["W8A8, qwix"] = qwix_model(model)
    else:
        console.print("qwix is not installed: its row is left out.")

    rows, steps = [], []
    for name, apply in kinds.items():
        compiled = step_of(apply, optimizer).lower(start, optimizer.init(start), batch).compile()
        steps.append(compiled)
        row = {"name": name, "temporary": compiled.memory_analysis().temp_size_in_bytes}
        row["residuals"] = residual_bytes(apply, start, batch)
        if name == "float" or "jaxquant" in name:
            variables, row["loss"] = train(name, apply, compiled, start, optimizer, text, options, progress)
        if "jaxquant" in name:
            w_qtype = jnp.int8 if "W8" in name else jnp.int4
            row["same_logits"] = same_logits(model, apply, w_qtype, variables, batch[:, :-1])
        rows.append(row)
    for row, milliseconds in zip(rows, step_times(steps, start, optimizer, batch, options.rounds), strict=True):
        row["step_ms"] = float(milliseconds)
    return rows


def table_of(rows, options):
    size = f"{options.layers} layers, width {options.width}, context {options.context}, batch {options.batch}"
    table = Table(title=f"Characters of Python's documentation: {size}", title_justify="left")
    table.add_column("dense layers", no_wrap=True)
    headings = ["loss", "to\nfloat", "same\nlogits", "kept,\nMiB", "temp.,\nMiB", "step,\nms", "to\nfloat"]
    for heading in headings:
        table.add_column(heading, justify="right")
    base = rows[0]
    for row in rows:
        trained = "loss" in row
        table.add_row(
            row["name"],
            f"{row['loss']:.3f}" if trained else "",
            f"{row['loss'] / base['loss'] - 1:+.1%}" if trained else "",
            {True: "yes", False: "NO", None: ""}[row.get("same_logits")],
            f"{row['residuals'] / MIB:.1f}",
            f"{row['temporary'] / MIB:.1f}",
            f"{row['step_ms']:.0f}",
            f"{row['step_ms'] / base['step_ms']:.2f}",
        )
    return table


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Quantisation-aware training of a character-level transformer.")
    numbers = {"layers": 4, "width": 256, "context": 128, "batch": 8, "steps": 500, "rounds": 10, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps: does it run, not how well")
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.width, options.context, options.batch, options.steps, options.rounds = (
            1,
            64,
            32,
            8,
            20,
            2,
        )

    console = Console()
    columns = [TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps")]
    with Progress(
        *columns, TextColumn("loss {task.fields[loss]:>5}"), TimeElapsedColumn(), console=console
    ) as progress:
        rows = run(options, progress, console)
    console.print(table_of(rows, options))
    quantised = [row for row in rows if "same_logits" in row]
    if not all(row["same_logits"] for row in quantised):
        raise SystemExit("The integer weights do not give the logits of the trained model.")
    console.print(
        "Loss: on held-out text. Kept: by the forward pass for the backward pass. Temp.: at most at any time."
    )
    console.print("The integer weights give the logits of the trained models, bit for bit.")
    worst = max(row["loss"] / rows[0]["loss"] - 1 for row in quantised)
    if worst > 0.02 and not options.quick:
        raise SystemExit("A quantised model's loss is more than 2 % above float's.")
    return rows


if __name__ == "__main__":
    # XLA's default order of operations on CPU favours parallelism, for which it keeps values longer than they are
    # needed: temporary memory then says little about what training keeps.
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_concurrency_optimized_scheduler=false"
    )
    main()
