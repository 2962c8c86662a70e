"""Text from a language model on its quantised weights.

    python examples/llm/generate.py --model FILE.gguf "What is a quaternion?"
    python examples/llm/generate.py --model FILE.gguf --temperature 0.8 --top-p 0.95 - < question.txt

Streams the answer, then prints the time to load, the speed of reading the prompt and of writing the answer, and the
memory. The likeliest token each time, unless --temperature is given.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.monitoring
import jax.numpy as jnp
import model as llm
import numpy as np
from jax import lax
from text import Text

from jaxquant import ggml

CHUNK = 256  # tokens of a prompt that go through the layers together


def choose(scores: jax.Array, key: jax.Array, temperature: float, top_k: int, top_p: float) -> jax.Array:
    """A token: the likeliest, or one of the top_k that together have top_p of the probability, or are the first."""
    if temperature == 0.0:
        return scores.argmax().astype(jnp.int32)
    scores, ids = lax.top_k(scores / temperature, min(top_k, scores.size) or scores.size)
    share = jax.nn.softmax(scores)
    kept = jnp.where(jnp.cumsum(share) - share < top_p, scores, -jnp.inf)
    return ids[jax.random.categorical(key, kept)].astype(jnp.int32)


class Generator:
    """A model, and its compiled steps."""

    def __init__(
        self, model: Any, *, adapters: Any = None, lhs_qtype: Any = jnp.int8, temperature: float = 0.0, top_k: int = 0,
        top_p: float = 1.0,
    ):  # fmt: skip
        """model: a path or what ggml.load_gguf gave. adapters: a path. lhs_qtype: None leaves activations and the cache
        in float32."""
        self.params, self.config = llm.load(model)
        if adapters is not None:
            self.params["adapters"] = llm.load_adapters(adapters, self.params, self.config)
        self.cache_dtype = jnp.float32 if lhs_qtype is None else jnp.float16
        config = self.config

        def next_token(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
            scores = llm.logits(params, config, x[-1], lhs_qtype=lhs_qtype)
            return choose(scores, key, temperature, top_k, top_p)

        # The cache is donated: a step writes into it in place.
        @partial(jax.jit, donate_argnums=3, static_argnames="empty")
        def read(params: Any, tokens: jax.Array, first: jax.Array, cache: Any, key: jax.Array, *, empty: bool) -> Any:
            x, cache = llm.decode(params, config, tokens, first, cache, empty=empty, lhs_qtype=lhs_qtype)
            return next_token(params, x, key), cache

        # One program for a token: the next one, chosen on the device, is all that comes back.
        @partial(jax.jit, donate_argnums=3)
        def step(params: Any, token: jax.Array, position: jax.Array, cache: Any, key: jax.Array) -> Any:
            x, cache = llm.decode(params, config, token[None], position, cache, lhs_qtype=lhs_qtype)
            return next_token(params, x, jax.random.fold_in(key, position)), position + 1, cache

        self.read, self.step = read, step

    def new_cache(self, tokens: list[int], most: int) -> Any:
        """For a prompt and what is written, in a few sizes, so that few programs are compiled."""
        total, context = len(tokens) + most, self.config.context
        if not tokens:
            raise ValueError("the prompt is empty: there is nothing to continue")
        if total > context:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and {most} to write are more than the {context} of this model's "
                f"context; shorten the prompt, or write at most {max(context - len(tokens), 0)}"
            )
        return llm.new_cache(self.config, min(context, -(-total // 128) * 128), self.cache_dtype)

    def piece(self, tokens: list[int], first: int, cache: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        """Reads a piece of the prompt, and the token after it. The last one is compiled for its own length."""
        piece = jnp.asarray(tokens[first : first + CHUNK], jnp.int32)
        return self.read(self.params, piece, jnp.int32(first), cache, key, empty=first == 0)

    def warm_up(self, tokens: list[int], most: int, key: jax.Array) -> None:
        """Compiles what writes and what reads the prompt: one after the other, which keeps memory low."""
        cache = self.new_cache(tokens, most)
        cache = jax.block_until_ready(self.step(self.params, jnp.int32(0), jnp.int32(0), cache, key))[2]
        give_back()
        for first in range(0, len(tokens), CHUNK):
            _, cache = jax.block_until_ready(self.piece(tokens, first, cache, key))
            give_back()

    def __call__(self, tokens: list[int], most: int, *, key: jax.Array | None = None) -> Any:
        """Yields new tokens, at most `most`."""
        key = jax.random.key(0) if key is None else key
        cache = self.new_cache(tokens, most)
        for first in range(0, len(tokens), CHUNK):
            token, cache = jax.block_until_ready(self.piece(tokens, first, cache, key))
        position = jnp.int32(len(tokens))
        for left in reversed(range(most)):
            last = token
            if left:  # begun before the last token is looked at: the host's work costs no time
                token, position, cache = self.step(self.params, token, position, cache, key)
            yield int(last)


# ------------------------------------------------------------------------------------------------------ what is printed


def memory() -> tuple[float, float]:
    """MB that the process alone holds now, and at the peak with what it shares: libraries and mapped files."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux
        return float("nan"), float("nan")
    found = {name: int(kilobytes) * 1024 / 1e6 for name, kilobytes in re.findall(r"(\w+):\s+(\d+) kB", status)}
    return found.get("RssAnon", float("nan")), found.get("VmHWM", float("nan"))


def give_back() -> None:
    """What is freed, by the compiler for the most part, goes back to the system (where it is glibc's)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def profile(generator: Generator, tokens: list[int], key: jax.Array, steps: int = 32) -> str:
    """Where the time of a token goes, from a trace of the compiled program's operations."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    writing = generator(tokens, 2 * steps + 4, key=key)
    for _ in range(4):
        next(writing)
    compiled.clear()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    start = time.perf_counter()
    for _ in range(steps):
        next(writing)
    plain = (time.perf_counter() - start) / steps * 1e3
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            start = time.perf_counter()
            for _ in range(steps):
                next(writing)
            traced = (time.perf_counter() - start) / steps * 1e3
        data = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
        events = [event for plane in data.planes for line in plane.lines for event in line.events]
    products = [e.duration_ns for e in events if e.name.startswith(("ffi_call", "custom-call"))]
    inside = sum(products) / steps / 1e6
    return (
        f"a token: {plain:.2f} ms, {traced:.2f} ms while traced: {inside:.2f} ms in {len(products) / steps:.0f} calls "
        f"of jaxquant's kernels, {traced - inside:.2f} ms in all else (attention, norms, choice, JAX itself); "
        f"{len(compiled)} programs compiled meanwhile; to the host came one int32 a token"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="What is a quaternion?", help="-: from standard input")
    parser.add_argument("--model", required=True, help="a GGUF file of a Llama-family model")
    parser.add_argument("--adapters", help="what finetune_lora.py wrote: a safetensors file")
    parser.add_argument("--tokens", type=int, default=128, help="write at most so many (128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, as it is: the likeliest token each time")
    parser.add_argument("--top-k", type=int, default=0, help="choose among so many (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="choose among the likeliest with this share (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the choices (0)")
    parser.add_argument("--system", help="a system message for the chat template")
    parser.add_argument("--plain", action="store_true", help="the prompt as it is, without the chat template")
    parser.add_argument("--float-activations", action="store_true", help="quantise no activations: slower, exact")
    parser.add_argument("--profile", action="store_true", help="show where the time of a token goes")
    options = parser.parse_args()
    for name, right in (
        ("tokens", options.tokens >= 1), ("temperature", options.temperature >= 0), ("top-k", options.top_k >= 0),
        ("top-p", 0 < options.top_p <= 1),
    ):  # fmt: skip
        if not right:
            parser.error(f"--{name} is out of range")
    return options


def main() -> None:
    options = parse()
    jax.block_until_ready(jax.jit(jnp.negative)(1.0))  # JAX is there before the model, for its memory to be told apart
    _, without = memory()
    begin = time.perf_counter()
    try:
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        file = ggml.load_gguf(options.model)
        text = Text(file.metadata, options.model)
        tokens = text.encode(prompt if options.plain else text.chat(prompt, options.system))
        generator = Generator(
            file, adapters=options.adapters, lhs_qtype=None if options.float_activations else jnp.int8,
            temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
        )  # fmt: skip
        jax.block_until_ready(generator.params)
        del file
        loaded = time.perf_counter() - begin
        give_back()

        key = jax.random.key(options.seed)
        generator.warm_up(tokens, options.tokens, key)

        start, times, show = time.perf_counter(), [], text.stream()
        for token in generator(tokens, options.tokens, key=key):
            times.append(time.perf_counter())
            if token in text.end:
                break
            print(show(token), end="", flush=True)
    except (OSError, ValueError) as error:
        sys.exit(f"generate.py: {error}")
    _, peak = memory()
    speed = 1 / np.median(np.diff(times)) if len(times) > 1 else float("nan")
    size = Path(options.model).stat().st_size / 1e6
    shapes = jax.eval_shape(lambda: generator.new_cache(tokens, options.tokens))
    cache = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes)) / 1e6
    print(
        f"\n\nload {loaded:.2f} s; prompt {len(tokens)} tokens, {len(tokens) / (times[0] - start):.0f} tokens/s; "
        f"{len(times)} tokens written, {speed:.1f} tokens/s\n"
        f"memory at the peak {peak:.0f} MB: {without:.0f} MB before the model (JAX and libraries) and "
        f"{peak - without:.0f} MB for it: {size:.0f} of the file, {cache:.0f} of the cache of keys and values, "
        f"{peak - without - size - cache:.0f} of everything else"
    )
    if options.profile:
        try:
            print(profile(generator, tokens, key))
        except ValueError as error:
            sys.exit(f"generate.py: --profile: {error}")


if __name__ == "__main__":
    main()
