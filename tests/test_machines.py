"""One set of bits for every instruction set and thread count: each variant is a fresh process over a script that
prints hashes of all outputs, of the affine half or of the block formats."""

import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

SCRIPTS = ("output_hashes.py", "ggml_output_hashes.py", "weight_only_hashes.py")


@functools.cache
def cpu_flags():
    text = pathlib.Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    return frozenset(next((line.split() for line in text.splitlines() if line.startswith("flags")), []))


@functools.cache
def hashes(script, isa=None, cpus=None):
    environment = {name: value for name, value in os.environ.items() if name not in ("JAXQUANT_ISA", "XLA_FLAGS")}
    if isa is not None:
        environment["JAXQUANT_ISA"] = isa
    command = [sys.executable, str(pathlib.Path(__file__).parent / script)]
    if cpus is not None:
        command = ["taskset", "-c", cpus, *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_equal_hashes(actual, expected):
    different = [name for name in expected if actual.get(name) != expected[name]]
    assert not different, different
    assert actual.keys() == expected.keys()


# The variants share the base process through the cache, so they run in one worker.
pytestmark = pytest.mark.xdist_group("machines")

NEEDED = {"portable": set(), "v2": {"sse4_2"}, "v3": {"avx2", "fma", "f16c"}, "v4": {"avx512f", "avx512bw", "avx512vl"}}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("isa", NEEDED)
def test_instruction_sets(isa, script):
    if not NEEDED[isa] <= cpu_flags():
        pytest.skip(f"this CPU has no x86-64-{isa}")
    assert_equal_hashes(hashes(script, isa), hashes(script))


@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset is missing")
@pytest.mark.parametrize("script", SCRIPTS)
def test_one_thread(script):
    cpu = str(min(os.sched_getaffinity(0)))
    assert_equal_hashes(hashes(script, cpus=cpu), hashes(script))
