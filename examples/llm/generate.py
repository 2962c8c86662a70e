"""Text from a language model on its quantised weights.

    python examples/llm/generate.py --model FILE.gguf "What is a quaternion?"

Streams the answer, then prints the time to load, the speed of reading the prompt and of writing the answer, and the
memory. Greedy unless --temperature is given.
"""

from __future__ import annotations

import argparse
import re
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
from text import Text

from jaxquant import ggml

CHUNK = 512  # tokens of a prompt that go through the layers together


class Generator:
    """A model, and its compiled steps."""

    def __init__(self, model: Any, *, lhs_qtype: Any = jnp.int8, temperature: float = 0.0):
        self.params, self.config = llm.load(model)
        config = self.config
        self.cache_dtype = jnp.float32 if lhs_qtype is None else jnp.float16

        def choose(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
            scores = llm.logits(params, config, x[-1], lhs_qtype=lhs_qtype)
            if temperature == 0.0:
                return scores.argmax().astype(jnp.int32)
            return jax.random.categorical(key, scores / temperature).astype(jnp.int32)

        # The cache is donated: a step writes into it in place.
        @partial(jax.jit, donate_argnums=3, static_argnames="empty")
        def read(params: Any, tokens: jax.Array, first: jax.Array, cache: Any, key: jax.Array, *, empty: bool) -> Any:
            x, cache = llm.decode(params, config, tokens, first, cache, empty=empty, lhs_qtype=lhs_qtype)
            return choose(params, x, key), cache

        # One program for a token: the next one, chosen on the device, is all that comes back.
        @partial(jax.jit, donate_argnums=3)
        def step(params: Any, token: jax.Array, position: jax.Array, cache: Any, key: jax.Array) -> Any:
            x, cache = llm.decode(params, config, token[None], position, cache, lhs_qtype=lhs_qtype)
            return choose(params, x, jax.random.fold_in(key, position)), position + 1, cache

        self.read, self.step = read, step

    def prompt(self, tokens: list[int], cache: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        """The first new token. The last piece of a long prompt is compiled for its own length."""
        for first in range(0, len(tokens), CHUNK):
            piece = jnp.asarray(tokens[first : first + CHUNK], jnp.int32)
            token, cache = self.read(self.params, piece, jnp.int32(first), cache, key, empty=first == 0)
        return token, cache

    def __call__(self, tokens: list[int], most: int, *, key: jax.Array | None = None) -> Any:
        """Yields new tokens, at most `most`."""
        total = len(tokens) + most
        if not tokens or total > self.config.context:
            raise ValueError(
                f"{len(tokens)} + {most} tokens: this model's context is 1 to {self.config.context}; use fewer"
            )
        key = jax.random.key(0) if key is None else key
        # A few sizes, so that few programs are compiled.
        cache = llm.new_cache(self.config, min(self.config.context, -(-total // 128) * 128), self.cache_dtype)
        token, cache = self.prompt(tokens, cache, key)
        position = jnp.int32(len(tokens))
        for left in reversed(range(most)):
            last = token
            if left:  # begun before the last token is looked at: the host's time costs nothing
                token, position, cache = self.step(self.params, token, position, cache, key)
            yield int(last)


def memory() -> tuple[float, float]:
    """MB of the process's own memory now, and of everything (libraries and mapped files too) at the peak."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux
        return float("nan"), float("nan")
    found = {name: int(kilobytes) / 1e3 for name, kilobytes in re.findall(r"(\w+):\s+(\d+) kB", status)}
    return found.get("RssAnon", float("nan")), found.get("VmHWM", float("nan"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="What is the capital of France?")
    parser.add_argument("--model", required=True, help="a GGUF file of a Llama-family model")
    parser.add_argument("--tokens", type=int, default=128, help="write at most so many")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="the prompt as it is, without the chat template")
    parser.add_argument("--float-activations", action="store_true", help="do not quantise activations")
    options = parser.parse_args()

    begin = time.perf_counter()
    before, _ = memory()
    try:
        text = Text(ggml.load_gguf(options.model).metadata, options.model)
        lhs_qtype = None if options.float_activations else jnp.int8
        generator = Generator(options.model, lhs_qtype=lhs_qtype, temperature=options.temperature)
        tokens = text.encode(options.prompt if options.plain else text.chat(options.prompt))
        jax.block_until_ready(generator.params)
        loaded = time.perf_counter() - begin

        # Compiled before the clock runs.
        key = jax.random.key(options.seed)
        for _ in generator(tokens, min(3, options.tokens), key=key):
            pass

        start, times, show = time.perf_counter(), [], text.stream()
        for token in generator(tokens, options.tokens, key=key):
            times.append(time.perf_counter())
            if token in text.end:
                break
            print(show(token), end="", flush=True)
    except (OSError, ValueError) as error:
        sys.exit(f"generate.py: {error}")
    now, peak = memory()
    speed = 1 / np.median(np.diff(times)) if len(times) > 1 else float("nan")
    print(
        f"\n\nload {loaded:.2f} s; prompt {len(tokens)} tokens, {len(tokens) / (times[0] - start):.0f} tokens/s; "
        f"{len(times)} tokens written, {speed:.1f} tokens/s; memory {now - before:.0f} MB more of its own than at the "
        f"start, {peak:.0f} MB at the peak with libraries and the mapped file"
    )


if __name__ == "__main__":
    main()
