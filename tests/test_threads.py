"""No deadlock: kernels share XLA's thread pool with each other and with the program that calls them."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "many_calls.py"

# A deadlock hangs for ever; without one this takes a few seconds of work on one CPU.
TIMEOUT = 240


@pytest.mark.parametrize("count", [1, 2])
def test_eight_threads_of_many_calls_finish(count):
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(available) < count:
        pytest.skip(f"{count} CPUs to pin to: not on this machine")
    # One device, as users have: its pool then has as many threads as there are CPUs.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, str(SCRIPT), *map(str, available[:count])]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"no end after {TIMEOUT} s on {count} CPUs: a deadlock\n{(expired.stderr or b'')[-2000:]!r}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["done", "8"]
