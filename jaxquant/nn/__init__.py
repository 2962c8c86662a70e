"""Quantised layers, and products to put into the layers of others.

jaxquant.nn.linen, jaxquant.nn.nnx, jaxquant.nn.equinox: each imports its framework, which must be installed.
"""

from __future__ import annotations

import importlib
from typing import Any

from jaxquant.nn.products import as_dot_general, as_einsum
from jaxquant.nn.rules import Rules, Spec, UnmatchedRules

__all__ = ["Rules", "Spec", "UnmatchedRules", "as_dot_general", "as_einsum"]

_ADAPTERS = ("linen", "nnx", "equinox")


def __getattr__(name: str) -> Any:
    if name in _ADAPTERS:
        return importlib.import_module(f"jaxquant.nn.{name}")
    raise AttributeError(f"module 'jaxquant.nn' has no attribute {name!r}")
