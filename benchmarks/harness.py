"""How everything here is measured: ours and its peers alternate on the same data in one process, and the median counts.

A case is one kind of work with a function for each contender. Each returns arrays, which are waited for; with
`donate=True` it takes its operand and gives back one of the same size, which the next call receives: memory is reused
and only the kernel counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Memory that is freed stays with the process: no page faults, only the work counts.
REUSE = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8000000000:glibc.malloc.hugetlb=1"
RESULTS = Path(__file__).parent / "results"


@dataclass
class Case:
    """One row: what is done, the contenders by name (the first is ours), targets as ratios to a contender."""

    name: str
    contenders: dict[str, Callable[..., Any]]
    operands: tuple[Any, ...] = ()
    donate: bool = False
    targets: dict[str, float] = field(default_factory=dict)
    least_runs: int = 15
    repeat: int = 1  # calls in one timing, for work of microseconds
    warm: int = 0  # calls before each timing: after a pause, processors and threads take milliseconds to wake
    # Entered outside the timing: a peer whose threads look for work between its calls would slow down the others'.
    around: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = field(default_factory=dict)


def measure(case: Case) -> dict[str, float]:
    """Median milliseconds of each contender."""
    import jax

    state = dict.fromkeys(case.contenders, case.operands)

    def call(name: str) -> float:
        function = case.contenders[name]
        operands = state[name]
        with case.around.get(name, contextlib.nullcontext)():
            for _ in range(case.warm):
                jax.block_until_ready(function(*operands))
            start = time.perf_counter()
            for _ in range(case.repeat):
                out = function(*operands)
                if case.donate:
                    operands = (out, *operands[1:])
            jax.block_until_ready(out)
            elapsed = (time.perf_counter() - start) / case.repeat * 1e3
        if case.donate:
            state[name] = operands
        return elapsed

    if case.donate:
        for name in case.contenders:
            first = jax.tree.map(lambda a: jax.numpy.array(a, copy=True), case.operands[0])
            state[name] = (first, *case.operands[1:])
    for name in case.contenders:
        for _ in range(3):
            call(name)
    times: dict[str, list[float]] = {name: [] for name in case.contenders}
    for _ in range(case.least_runs):
        for name in case.contenders:
            times[name].append(call(name))
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, Any]:
    import jax

    import jaxquant

    cpu = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    return {
        "cpu": cpu,
        "threads": len(os.sched_getaffinity(0)),
        "instruction_set": jaxquant.info()["cpu"]["instruction_set"],
        "memory": "reused" if os.environ.get("GLIBC_TUNABLES") else "fresh",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxquant": jaxquant.__version__,
    }


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def run(cases: list[Case], title: str) -> list[dict[str, Any]]:
    """Measures, prints a line as each case ends, and returns the rows."""
    rows = []
    print(f"\n{title}")
    print(f"  {'work':<58}{'ours ms':>9}  peers: ms (ours / peer, target)")
    for case in cases:
        times = measure(case)
        ours = next(iter(times))
        peers = []
        for peer in list(times)[1:]:
            ratio = times[ours] / times[peer]
            target = case.targets.get(peer)
            mark = "" if target is None else f", target {target:g} {'met' if ratio <= target else 'MISSED'}"
            peers.append(f"{peer} {times[peer]:.3f} ({ratio:.2f}{mark})")
        print(f"  {case.name:<58}{times[ours]:>9.3f}  {'; '.join(peers)}", flush=True)
        rows.append({"work": case.name, "milliseconds": times, "targets": case.targets})
    return rows


def main(script: str, name: str, cases: Callable[[], list[Case]], one_reused: bool = False) -> None:
    """Runs `cases` on all threads, on one, and with reused memory (on one thread too: one_reused), a process each;
    writes results/<name>.json."""
    if os.environ.get("JAXQUANT_BENCH_CHILD"):
        facts = machine()
        title = f"{facts['threads']} thread(s), {facts['memory']} memory, {facts['cpu']}, {facts['instruction_set']}"
        rows = run(cases(), f"{title}, jax {facts['jax']}")
        Path(os.environ["JAXQUANT_BENCH_CHILD"]).write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))
        return
    RESULTS.mkdir(exist_ok=True)
    results = []
    available = sorted(os.sched_getaffinity(0))
    reused = {"GLIBC_TUNABLES": REUSE}
    variants = [(available, {}), (available[:1], {}), (available, reused)] + [(available[:1], reused)] * one_reused
    for cores, tunables in variants:
        part = RESULTS / f".{name}.json"
        environment = {**os.environ, **tunables, "JAXQUANT_BENCH_CHILD": str(part)}
        pin = lambda cores=cores: os.sched_setaffinity(0, cores)  # noqa: E731
        subprocess.run([sys.executable, script, *sys.argv[1:]], env=environment, preexec_fn=pin, check=True)
        results.append(json.loads(part.read_text()))
        part.unlink()
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
