"""What is installed and what it promises, from the tables that the dispatcher itself uses."""

from __future__ import annotations

from typing import Any

import jax
from jaxlib.version import __version__ as jaxlib_version

from jaxquant._core import ffi, primitive


def export_checks() -> list[Any]:
    """The safety checks to disable for ``jax.export`` of functions that call jaxquant's kernels.

    JAX serialises only custom calls whose compatibility it guarantees itself. jaxquant's target names and attributes
    keep their meaning; pass this list as ``disabled_checks``.

    >>> f = jax.jit(lambda x: fake_quantize(x, 0.1))
    >>> module = jax.export.export(f, disabled_checks=export_checks())(jnp.ones(3)).serialize()
    """
    from jax import export

    return [export.DisabledSafetyCheck.custom_call(ffi.PREFIX + name) for name in primitive.OPERATIONS]


def info() -> dict[str, Any]:
    """Versions, instruction sets, and per operation: platforms with a kernel, determinism and bit guarantees.

    >>> info()["operations"]["fake_quantize"]["kernels"]
    ['cpu'...]
    """
    import jaxquant

    cpu, cuda = ffi.module("cpu"), ffi.module("cuda")
    return {
        "jaxquant": jaxquant.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib_version,
        "ffi_api": {
            "running": _dotted(ffi.framework_api_version()),
            **{
                f"built ({name})": _dotted(tuple(m.ffi_api_version()))
                for name, m in (("cpu", cpu), ("cuda", cuda))
                if m
            },
        },
        "default_implementation": ffi.DEFAULT_IMPLEMENTATION,
        "cpu": {"instruction_set": cpu.isa(), "compiled": cpu.compiled_isas().split()} if cpu else None,
        "cuda": {"architectures": cuda.architectures().split()} if cuda else None,
        "operations": {name: _operation(name, operation) for name, (operation, _) in primitive.OPERATIONS.items()},
    }


def _operation(name: str, operation: primitive.Operation) -> dict[str, Any]:
    sums = operation.scratch is not None
    return {
        "target": ffi.PREFIX + name,
        "kernels": ffi.platforms_with(name),
        "dtypes": list(operation.dtypes),
        "deterministic": True,
        "same_bits": (
            "dx everywhere; dscale and dzero_point on cpu and cuda, any thread count, vmap or loop"
            if sums
            else operation.same_bits
        ),
    }


def _dotted(version: tuple[int, int] | None) -> str | None:
    return None if version is None else f"{version[0]}.{version[1]}"


def describe() -> str:
    """`info` as text."""
    facts = info()
    lines = [f"jaxquant {facts['jaxquant']}   jax {facts['jax']}   jaxlib {facts['jaxlib']}"]
    lines.append("XLA FFI API  " + "   ".join(f"{k} {v}" for k, v in facts["ffi_api"].items()))
    cpu, cuda = facts["cpu"], facts["cuda"]
    lines.append(
        f"CPU          {cpu['instruction_set']} of {', '.join(cpu['compiled'])}"
        if cpu
        else "CPU          not compiled in"
    )
    lines.append(f"CUDA         {', '.join(cuda['architectures'])}" if cuda else "CUDA         not compiled in")
    lines.append(f"default      implementation={facts['default_implementation']!r}")
    lines.append("")
    width = max(map(len, facts["operations"]))
    lines.append(f"{'operation':<{width}}  {'kernels':<10}  dtypes")
    for name, operation in facts["operations"].items():
        lines.append(f"{name:<{width}}  {', '.join(operation['kernels']) or '-':<10}  {', '.join(operation['dtypes'])}")
        lines.append(f"{'':<{width}}  same bits: {operation['same_bits']}")
    return "\n".join(lines)
