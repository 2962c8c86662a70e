"""One list of operations everywhere, what the package says about itself, and kernels of other platforms."""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
import jaxquant.testing
from jaxquant._core import ffi, primitive

ROOT = pathlib.Path(__file__).parents[1]
NAMES = set(primitive.OPERATIONS)


def python(code, **environment):
    """Another process: for what would change this one's registry."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


# ------------------------------------------------------------------------------------------------------------- one list


@pytest.mark.smoke
def test_operations_registrations_and_handlers_are_one_list():
    """A Python operation without a handler, or a handler that nothing calls, shows here."""
    compiled = set(ffi.module("cpu").registrations())
    assert compiled == NAMES == set(ffi.registered()["cpu"])
    listed = []
    for family in ("affine", "affine/dynamic", "ggml", "matmul", "matmul/weight_only", "optim"):
        source = (ROOT / "ffi" / family / "handlers.h").read_text()
        listed += re.findall(r'^  f\("(\w+)"', source[source.index("void ForEach") :], re.MULTILINE)
    assert sorted(listed) == sorted(NAMES)


def test_the_cuda_modules_hold_the_same_list():
    for name in ("cuda", "cuda_emulation"):
        if (module := ffi.module(name)) is not None:
            assert set(module.registrations()) == NAMES, name


@pytest.mark.smoke
def test_one_word_leads_from_python_to_the_kernel():
    """fake_quantize: the file, the primitive, the target and the folder have one name. The block formats' primitives
    live in two files, and their names say the family."""
    folders = {path.parent.name for path in (ROOT / "ffi" / "affine").glob("*/math.h")}
    for name, (operation, bound) in primitive.OPERATIONS.items():
        assert operation.name == name
        assert bound.name.removeprefix("jaxquant_") == name
        assert ffi.target(name, "cpu", None) == f"jaxquant_{name}"
        if name.startswith("ggml_"):
            products = "linear" in name
            home = importlib.import_module(f"jaxquant.ggml.{'products' if products else 'codec'}")
            assert getattr(home, f"{name}_p") is bound
            continue
        if name.startswith("weight_only"):
            assert getattr(importlib.import_module("jaxquant.affine.weight_only"), f"{name}_p") is bound
            continue
        if name == "adam8bit":
            assert jaxquant.optim.adam8bit_p is bound
            continue
        products = {"prepare": "layout", "plain": "layout", "int_matmul": "int_matmul", "scaled_matmul": "int_matmul"}
        if name in products:
            assert getattr(importlib.import_module(f"jaxquant.affine.{products[name]}"), f"{name}_p") is bound
            continue
        shared = {"pack": "packing", "unpack": "packing", "digit_histogram": "histogram"}
        module = shared.get(name, name.removesuffix("_gradient").removeprefix("stochastic_"))
        module = "dynamic" if name.startswith("dynamic_") else "choose" if name == "range" else module
        assert getattr(importlib.import_module(f"jaxquant.affine.{module}"), f"{name}_p") is bound
        assert module in folders or module == "choose"


def test_every_operation_can_be_differentiated():
    from jax.interpreters import ad

    for name, (operation, bound) in primitive.OPERATIONS.items():
        if operation.dtypes == ("uint8",) or name == "adam8bit":
            continue  # bytes have no tangents, and nobody differentiates through an optimiser's state
        assert bound in ad.primitive_jvps, name
        assert not name.endswith("_gradient") or bound in ad.primitive_transposes, name


def test_public_names():
    assert sorted(jaxquant.__all__) == jaxquant.__all__
    for name in jaxquant.__all__:
        assert hasattr(jaxquant, name), name
    for name in jaxquant.forward_mode.__all__:
        assert hasattr(jaxquant.forward_mode, name), name


# ----------------------------------------------------------------------------------------------------------------- info


@pytest.mark.smoke
def test_info():
    facts = jaxquant.info()
    assert facts["jaxquant"] == jaxquant.__version__
    assert facts["jax"] == jax.__version__
    assert re.fullmatch(r"\d+\.\d+", facts["ffi_api"]["running"])
    assert facts["cpu"]["instruction_set"] in facts["cpu"]["compiled"]
    assert set(facts["operations"]) == NAMES
    for name, operation in facts["operations"].items():
        assert operation["target"] == f"jaxquant_{name}"
        assert "cpu" in operation["kernels"]
        assert operation["deterministic"] is True
        assert operation["same_bits"]
        assert set(operation["dtypes"]) <= {
            np.dtype(d).name for d in ("f2", "f4", "f8", "i1", "u1", "i2", "u2", jnp.bfloat16)
        }
    json.dumps(facts)


@pytest.mark.smoke
def test_command_line():
    done = subprocess.run([sys.executable, "-P", "-m", "jaxquant"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for word in ("jaxquant", jax.__version__, *NAMES, *jaxquant.info()["cpu"]["compiled"]):
        assert word in done.stdout, word


def test_export_checks_cover_every_target():
    targets = {repr(check) for check in jaxquant.export_checks()}
    assert len(targets) == len(NAMES)
    for name in NAMES:
        assert any(f"jaxquant_{name}" in target for target in targets)


@pytest.mark.parametrize("value", ["cuda", "FFI"])
def test_an_unknown_default_implementation_stops_the_import(value):
    code, _, error = python("import jaxquant", JAXQUANT_IMPLEMENTATION=value)
    assert code != 0
    assert "JAXQUANT_IMPLEMENTATION" in error and value in error


def test_the_default_implementation():
    show = "import jax, jaxquant; print(jax.jit(lambda x: jaxquant.fake_quantize(x, .5)).lower(1.).as_text())"
    for value, expected in (("xla", False), ("ffi", True)):
        code, out, error = python(show, JAXQUANT_IMPLEMENTATION=value)
        assert code == 0, error
        assert ("jaxquant_fake_quantize" in out) is expected


# -------------------------------------------------------------------------------------------------- platforms of others


@pytest.mark.parametrize(("targets", "got"), [({"quantise": None}, "'quantise'"), ({}, "none")])
def test_register_kernels_refuses_unknown_names(targets, got):
    with pytest.raises(ValueError, match=f"register_kernels: targets: expected names among .*got {got}"):
        jaxquant.register_kernels("rocm", targets)


def test_register_kernels_refuses_a_second_kernel():
    """XLA would take it, and then fail every later call of the whole process."""
    capsule = ffi.module("cpu").registrations()["pack"]
    with pytest.raises(ValueError, match=r"register_kernels: targets: .* without a kernel on CPU, got pack, unpack"):
        jaxquant.register_kernels("CPU", {"unpack": capsule, "pack": capsule})


@pytest.mark.smoke
def test_register_kernels_for_another_platform():
    """The registered operation lowers to its target there, the others to jax.numpy, and the CPU keeps its own."""
    code, out, error = python(
        """
import jax, jax.numpy as jnp, jaxquant
from jax import export
from jaxquant._core import ffi

capsules = ffi.module("cpu").registrations()
jaxquant.register_kernels("rocm", {"fake_quantize": capsules["fake_quantize"]})
assert jaxquant.info()["operations"]["fake_quantize"]["kernels"] == ["cpu", "rocm"]
assert jaxquant.info()["operations"]["quantize"]["kernels"] == ["cpu"]

def text(f, platform):
    checks = jaxquant.export_checks()
    return export.export(jax.jit(f), platforms=[platform], disabled_checks=checks)(jnp.ones(4)).mlir_module()

fake = lambda x: jaxquant.fake_quantize(x, 0.5)
assert "@jaxquant_fake_quantize" in text(fake, "rocm")
assert "@jaxquant" not in text(lambda x: jaxquant.quantize(x, 0.5), "rocm")
assert "@jaxquant" not in text(fake, "tpu")
assert fake(jnp.float32(1.2)) == 1.0
print("done")
"""
    )
    assert code == 0, error
    assert out.split() == ["done"]


# ---------------------------------------------------------------------------------------------------------- conformance


def test_conformance():
    report = jaxquant.testing.conformance("ffi")
    assert report.ordered_sums
    assert set(report.kernels) == NAMES == set(report.cases)
    assert all(report.cases.values())
    assert "passed" in str(report)


# The emulated kernels' own tests hold them to the same references.
@pytest.mark.slow
@pytest.mark.skipif(not jaxquant.testing.emulation_available(), reason="the emulated CUDA kernels are not compiled in")
def test_conformance_of_the_emulated_cuda_kernels():
    assert jaxquant.testing.conformance("cuda_emulation").ordered_sums


def test_conformance_fails_for_a_wrong_kernel(monkeypatch):
    """Multiplying by the reciprocal is the classic mistake."""

    def wrong(x, scale, zero_point=None, *, block_shape=None, qtype=None, qmin=-128, qmax=127, implementation=None):
        del block_shape, qtype, implementation
        zero_point = 0 if zero_point is None else jnp.round(zero_point)
        v = jnp.round(x * (1 / scale)) + zero_point
        return ((jnp.clip(v, qmin, qmax) - zero_point) * scale).astype(x.dtype)

    monkeypatch.setattr(jaxquant.testing, "_cases", lambda: [jaxquant.testing._ties()])
    for family in ("histogram", "matmul", "weight_only", "ggml"):
        monkeypatch.setattr(getattr(jaxquant.testing, f"{family}_conformance"), "check", lambda *_: None)
    jaxquant.testing.conformance("ffi")
    monkeypatch.setattr(jaxquant, "fake_quantize", wrong)
    with pytest.raises(jaxquant.testing.ConformanceError, match=r"fake_quantize, result 0, ties: \d+ of 1920 differ"):
        jaxquant.testing.conformance("ffi")
