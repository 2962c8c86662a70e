"""One set of bits for every instruction set and thread count: each variant is a fresh process that hashes all outputs
of the affine half, dynamic quantisation, the block formats, integer and weight-only products."""

import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

PROGRAM = """
import json, dynamic_output_hashes, ggml_output_hashes, matmul_output_hashes, output_hashes, weight_only_hashes
families = (output_hashes, dynamic_output_hashes, ggml_output_hashes, matmul_output_hashes, weight_only_hashes)
print(json.dumps({f"{f.__name__}: {name}": value for f in families for name, value in f.every_hash().items()}))
"""


@functools.cache
def cpu_flags():
    text = pathlib.Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    return frozenset(next((line.split() for line in text.splitlines() if line.startswith("flags")), []))


@functools.cache
def hashes(isa, cpus=None):
    environment = {name: value for name, value in os.environ.items() if name not in ("JAXQUANT_ISA", "XLA_FLAGS")}
    environment["JAXQUANT_ISA"] = isa
    here = str(pathlib.Path(__file__).parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-c", PROGRAM]
    if cpus is not None:
        command = ["taskset", "-c", cpus, *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_equal_hashes(actual, expected):
    different = [name for name in expected if actual.get(name) != expected[name]]
    assert not different, different
    assert actual.keys() == expected.keys()


# The variants share the portable process through the cache, so they run in one worker (--dist loadgroup).
pytestmark = pytest.mark.xdist_group("machines")

NEEDED = {
    "portable": set(), "v2": {"sse4_2"}, "v3": {"avx2", "fma", "f16c"}, "v4": {"avx512f", "avx512bw", "avx512vl"},
    "amx": {"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "amx_tile", "amx_int8"},
}  # fmt: skip


@pytest.mark.parametrize("isa", [*NEEDED][1:])
def test_instruction_sets(isa):
    if not NEEDED[isa] <= cpu_flags():
        pytest.skip(f"this CPU lacks {isa}")
    assert_equal_hashes(hashes(isa), hashes("portable"))


@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset is missing")
def test_one_thread():
    cpu = str(min(os.sched_getaffinity(0)))
    best = [isa for isa in NEEDED if NEEDED[isa] <= cpu_flags()][-1]
    assert_equal_hashes(hashes(best, cpu), hashes("portable"))
