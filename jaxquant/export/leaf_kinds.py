"""Quantised leaves of a tree as parts that are arrays and a part that is JSON, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxquant.affine import layout as layouts
from jaxquant.affine import qtypes
from jaxquant.affine.packing import packed_shape
from jaxquant.affine.qarray import LAYOUTS, QArray
from jaxquant.affine.qparams import QParams
from jaxquant.ggml.formats import find
from jaxquant.ggml.qtensor import LAYOUTS as QTENSOR_LAYOUTS
from jaxquant.ggml.qtensor import QTensor


class Kind(NamedTuple):
    """A quantised leaf: its parts, the first of which it always has; its static part to JSON and, with parts, back."""

    type: type
    parts: tuple[str, ...]
    describe: Callable[[Any], dict[str, Any]]
    build: Callable[[dict[str, Any], dict[str, Any]], Any]


def _describe_qarray(q: QArray) -> dict[str, Any]:
    code, low, high, tail, layout = q._static
    return {"qtype": code.name, "qmin": low, "qmax": high, "tail": list(tail), "layout": layout}


def _build_qarray(parts: dict[str, Any], entry: dict[str, Any]) -> QArray:
    code, low, high = _codes(entry)
    tail, layout = _integers(entry, "tail"), entry.get("layout")
    data, scale, zero_point = parts["data"], parts.get("scale"), parts.get("zero_point")
    _need(layout in LAYOUTS, f"a layout of {LAYOUTS}", repr(layout))
    if layout == "prepared":
        _need(len(tail) == 2 and code.bits <= 8 and data.ndim >= 3, "a prepared matrix", f"{data.shape}, tail {tail}")
        shape, dtype = (*data.shape[:-3], *layouts.prepared_shape(tail[0], tail[1], code.bits)), np.dtype(np.uint8)
        logical = (*data.shape[:-3], *tail)
    elif code.bits < 8 and data.ndim:
        _need(len(tail) == 1, "the size of the last axis", f"tail {tail}")
        logical, dtype = (*data.shape[:-1], *tail), np.dtype(np.uint8)
        shape = packed_shape(logical, code.bits)
    else:
        _need(not tail, "no tail", f"{tail}")
        shape = logical = data.shape
        dtype = np.dtype(code.container)
    _need(tuple(data.shape) == tuple(shape) and data.dtype == dtype, f"{dtype} data of shape {shape}", _of(data))
    _need(scale is not None and jnp.issubdtype(scale.dtype, jnp.floating), "a floating scale", _of(scale))
    assert scale is not None
    fits = scale.ndim == len(logical) and all(
        m == n or m == 1 or (m and n % m == 0) for n, m in zip(logical, scale.shape, strict=True)
    )
    _need(fits, f"a scale that fits {logical}", str(scale.shape))
    if zero_point is not None:
        _need(jnp.issubdtype(zero_point.dtype, jnp.integer), "an integer zero point", _of(zero_point))
        _need(
            _broadcasts(zero_point.shape, scale.shape),
            f"a zero point that broadcasts to {scale.shape}",
            _of(zero_point),
        )
    return QArray(data, scale, zero_point, code.name, low, high, tail, str(layout))


def _describe_qparams(p: QParams) -> dict[str, Any]:
    block = None if p.block_shape is None else list(p.block_shape)
    return {
        "qtype": qtypes.lookup("save_safetensors", p.qtype).name,
        "qmin": p.qmin,
        "qmax": p.qmax,
        "block_shape": block,
    }


def _build_qparams(parts: dict[str, Any], entry: dict[str, Any]) -> QParams:
    code, _, _ = _codes(entry)
    block = None if entry.get("block_shape") is None else _integers(entry, "block_shape", least=-1)
    scale = parts["scale"]
    _need(jnp.issubdtype(scale.dtype, jnp.floating), "a floating scale", _of(scale))
    return QParams(scale, parts.get("zero_point"), jnp.dtype(code.name), entry.get("qmin"), entry.get("qmax"), block)


def _describe_qtensor(t: QTensor) -> dict[str, Any]:
    return {"format": t.format.name, "layout": t.layout, **({"rows": t.shape[-2]} if t.padding else {})}


def _build_qtensor(parts: dict[str, Any], entry: dict[str, Any]) -> QTensor:
    format, layout, data = entry.get("format"), entry.get("layout"), parts["data"]
    _need(isinstance(format, str) and layout in QTENSOR_LAYOUTS, "a format and a layout", f"{format!r}, {layout!r}")
    assert isinstance(format, str)
    kind = find("load_safetensors", format)
    _need(data.ndim > 0 and data.dtype == np.uint8, "uint8 rows", _of(data))
    _need(layout == "plain" or data.ndim > 1, "a prepared matrix", _of(data))
    rows = entry.get("rows")
    _need(rows is None or type(rows) is int, "an integer number of rows", repr(rows))
    tensor = QTensor(data, kind, str(layout), rows)
    _need(min(tensor.shape) >= 0, "whole rows", _of(data))  # the shape refuses what is no whole blocks
    return tensor


KINDS = (
    Kind(QArray, ("data", "scale", "zero_point"), _describe_qarray, _build_qarray),
    Kind(QParams, ("scale", "zero_point"), _describe_qparams, _build_qparams),
    Kind(QTensor, ("data",), _describe_qtensor, _build_qtensor),
)


def is_quantised(node: Any) -> bool:
    return any(type(node) is kind.type for kind in KINDS)


def _codes(entry: dict[str, Any]) -> tuple[qtypes.QType, int, int]:
    name = entry.get("qtype")
    _need(isinstance(name, str) and name in qtypes.QTYPES, f"a code type of {', '.join(qtypes.QTYPES)}", repr(name))
    code = qtypes.QTYPES[str(name)]
    low, high = qtypes.code_range("load_safetensors", code, entry.get("qmin"), entry.get("qmax"))
    return code, low, high


def _integers(entry: dict[str, Any], name: str, least: int = 0) -> tuple[int, ...]:
    value = entry.get(name)
    _need(
        isinstance(value, list) and all(type(n) is int and n >= least for n in value),
        f"{name} of integers",
        repr(value),
    )
    return tuple(value or ())


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(m in (1, n) for m, n in zip(shape[::-1], to[::-1], strict=False))


def _of(array: Any) -> str:
    return "none" if array is None else f"{array.dtype} of shape {array.shape}"


class Wrong(ValueError):
    """What was expected of an entry, and what it has."""


def _need(holds: bool, expected: str, got: str) -> None:
    if not holds:
        raise Wrong(expected, got)
