"""The compiled modules: loading them, checking that this JAX accepts them, registering their targets."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jaxlib.version import __version__ as jaxlib_version

from jaxquant._core.errors import refuse

# Serialised modules hold these names: a target never changes its meaning under the same one.
PREFIX = "jaxquant_"

IMPLEMENTATIONS = (None, "ffi", "xla")

# Platform (as JAX's lowering rules name it) -> names of the operations that have a kernel there.
_registered: dict[str, set[str]] = {}
_modules: dict[str, ModuleType] = {}


def framework_api_version() -> tuple[int, int] | None:
    """The FFI API version of the running jaxlib, from its own header; None where it ships none."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    return (int(found[0][1]), int(found[1][1])) if found[0] and found[1] else None


def _load(name: str, jax_platform: str, platform: str) -> None:
    try:
        module = importlib.import_module(f"jaxquant._core.{name}")
    except ModuleNotFoundError:
        if platform != "cpu":
            return
        raise ImportError(
            f"jaxquant: the compiled kernels are missing in {Path(__file__).parent}: this is a source tree. Run Python "
            "from another folder, where the installed package is found, or install with `pip install -e .`."
        ) from None
    # A handler newer than the framework would not only fail: registering it makes every later JAX call fail.
    built, running = tuple(module.ffi_api_version()), framework_api_version()
    if running is not None and built > running:
        raise ImportError(
            f"jaxquant: {name} was built for XLA FFI API {built[0]}.{built[1]}, but jaxlib {jaxlib_version} has "
            f"{running[0]}.{running[1]}; upgrade jaxlib, or reinstall jaxquant from source (it builds against the "
            "oldest supported headers)."
        )
    _modules[platform] = module
    register(jax_platform, module.registrations(), platform)


def register(jax_platform: str, targets: Mapping[str, Any], platform: str | None = None) -> None:
    """Registers handlers under the names of their operations."""
    platform = platform or jax_platform.lower()
    prefix = f"{PREFIX}emulated_" if platform == "cuda_emulation" else PREFIX
    for name, capsule in targets.items():
        jax.ffi.register_ffi_target(prefix + name, capsule, platform=jax_platform)
        _registered.setdefault(platform, set()).add(name)


def target(operation: str, platform: str | None, implementation: str | None) -> str | None:
    """The FFI target of an operation on a platform, or None for its reference in jax.numpy."""
    if implementation == "cuda_emulation":
        if operation in _registered.get("cuda_emulation", ()) and platform == "cpu":
            return f"{PREFIX}emulated_{operation}"
        raise NotImplementedError(
            f"{operation}: the emulated CUDA kernels are not compiled in; build with JAXQUANT_EMULATION=ON."
        )
    if platform is not None and operation in _registered.get(platform, ()):
        return PREFIX + operation
    if implementation == "ffi":
        raise NotImplementedError(
            f'{operation}: implementation="ffi" was asked for, but there is no kernel for this platform; kernels are '
            f'registered for {sorted(registered()) or "none"}. Use implementation=None or "xla".'
        )
    return None


def registered() -> dict[str, list[str]]:
    """Platform -> operations with a kernel."""
    return {platform: sorted(names) for platform, names in _registered.items() if platform != "cuda_emulation"}


def platforms_with(operation: str) -> list[str]:
    return [platform for platform, names in registered().items() if operation in names]


def module(platform: str) -> ModuleType | None:
    """The compiled module of "cpu", "cuda" or "cuda_emulation", if it was built."""
    return _modules.get(platform)


def _default_implementation() -> str | None:
    value = os.environ.get("JAXQUANT_IMPLEMENTATION", "") or None
    if value not in IMPLEMENTATIONS:
        raise ImportError(f'jaxquant: JAXQUANT_IMPLEMENTATION: expected "ffi", "xla" or nothing, got {value!r}.')
    return value


def check_implementation(operation: str, implementation: str | None) -> str | None:
    """The caller's choice, or the process-wide default."""
    if implementation is None:
        return DEFAULT_IMPLEMENTATION
    if implementation not in (*IMPLEMENTATIONS, "cuda_emulation"):
        remedy = "None chooses what is fastest on the platform"
        raise refuse(operation, "implementation", 'None, "ffi" or "xla"', repr(implementation), remedy)
    return implementation


def _check_isa() -> None:
    wanted, cpu = os.environ.get("JAXQUANT_ISA"), module("cpu")
    if wanted and cpu is not None and cpu.isa() != wanted:
        raise ImportError(
            f"jaxquant: JAXQUANT_ISA: expected one of {cpu.compiled_isas()} that this machine supports, got {wanted!r}."
        )


DEFAULT_IMPLEMENTATION = _default_implementation()
_load("_cpu", "cpu", "cpu")
_load("_cuda", "CUDA", "cuda")
_load("_cuda_emulation", "cpu", "cuda_emulation")
_check_isa()
