"""Two processes with jax.distributed over gloo: each holds half of x, and both end with the same gradients."""

import os
import pathlib
import socket
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parent / "one_process_of_two.py"


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_two_processes():
    port = free_port()
    path = os.pathsep.join(filter(None, [str(SCRIPT.parent), os.environ.get("PYTHONPATH")]))
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(port), str(i)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        for i, process in enumerate(processes):
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, err[-3000:]
            assert out.splitlines()[-1].split() == ["done", str(i)], out
    finally:
        for process in processes:
            process.kill()
