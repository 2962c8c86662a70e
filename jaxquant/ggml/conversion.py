"""From a file of weights to a GGUF file in another format, one tensor at a time: a plan first, then the writing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxquant._core.errors import refuse
from jaxquant.ggml.formats import BlockFormat, find, formats
from jaxquant.ggml.gguf import GGUFTensor, open_gguf, save_gguf
from jaxquant.ggml.gguf_header import MAGIC, PLAIN, Metadata, row_bytes
from jaxquant.ggml.imatrix import for_tensor, load_imatrix

# Weights of two dimensions and more that llama.cpp leaves alone (small, or sensitive), and the routers' other names.
_KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|(^|\.)(gate|router)\.weight$|altup|laurel|per_layer_model_proj"
    r"|^position_embd\.weight$|^token_types\.weight$|ssm_conv1d|shortconv\.conv\.weight|attn_rel_b\.weight"
    r"|indexer\.[kq]_proj\.weight|time_mix_([wvagr][012]|first|decay_w[12]|lerp_fused)\.weight"
)
_WEIGHT = re.compile(r"weight$|experts\.(gate_up|down)_proj$")

# general.file_type of llama.cpp, a hint for people: readers go by each tensor's type.
_FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 11, "Q4_K": 14,
    "Q5_K": 16, "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25, "IQ3_S": 26,
    "IQ2_S": 28, "IQ4_XS": 30, "IQ1_M": 31, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38, "NVFP4": 39, "Q1_0": 40,
}  # fmt: skip
_TYPE_IDS = {**{f.name: f.type_id for f in formats.values()}, **{name: id for id, (name, _) in PLAIN.items()}}
_FLOATS = ("F32", "F16", "BF16", "F64")
_INTEGERS = ("I8", "I16", "I32", "I64")


@dataclass(frozen=True)
class Source:
    """A tensor of the input. stored: what `save_gguf` writes to keep it; values: float32."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    stored: Callable[[], Any]
    values: Callable[[], np.ndarray]

    @property
    def rank(self) -> int:
        """Dimensions as ggml counts them: leading ones do not."""
        return next((len(self.shape) - i for i, size in enumerate(self.shape) if size > 1), 0)


@dataclass(frozen=True)
class Output:
    """A tensor of the output, in the shape of a `GGUFTensor`: `raw` makes its bytes, once they are written."""

    shape: tuple[int, ...]
    type_name: str
    make: Callable[[], np.ndarray]

    @property
    def type_id(self) -> int:
        return _TYPE_IDS[self.type_name]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * (row_bytes(self.type_id, self.shape[-1] if self.shape else 1) or 0)

    @property
    def raw(self) -> np.ndarray:
        return self.make()


@dataclass(frozen=True)
class Error:
    """What quantising cost. source: the type before."""

    name: str
    source: str
    size: int
    squared_error: float
    squared: float

    @property
    def rmse(self) -> float:
        return math.sqrt(self.squared_error / self.size)

    @property
    def relative(self) -> float:
        if not self.squared:
            return math.inf if self.squared_error else 0.0
        return math.sqrt(self.squared_error / self.squared)


def total(errors: Sequence[Error]) -> Error:
    return Error("", "", *(sum(getattr(e, part) for e in errors) for part in ("size", "squared_error", "squared")))


@dataclass
class Plan:
    """What is to be written. notes: what a reader should know beforehand, fallbacks above all."""

    metadata: Mapping[str, Any]
    outputs: dict[str, Output] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)

    def write(self, path: str, progress: Callable[[str], None] = lambda name: None) -> list[Error]:
        """Quantises and writes, a tensor at a time; `progress` hears each name when it is done."""

        def announced(name: str, output: Output) -> Output:
            def make() -> np.ndarray:
                data = output.make()
                progress(name)
                return data

            return Output(output.shape, output.type_name, make)

        self.errors.clear()
        save_gguf(path, {name: announced(name, output) for name, output in self.outputs.items()}, self.metadata)
        return list(self.errors)


def plan(
    path: str,
    format: str,
    *,
    imatrix: str | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    requantize: bool = False,
) -> Plan:
    """Decides every tensor's format. Whatever can be refused is refused here, before anything is written."""
    default = _format(format)
    chosen = [(_pattern(pattern), _format(name)) for pattern, name in overrides]
    metadata, sources = _read(path)
    weights = _imatrix(imatrix, sources)
    result = Plan(metadata | _file_type(metadata, default))
    matched: set[int] = set()
    for source in sources:
        target = None
        if source.rank >= 2 and _WEIGHT.search(source.name) and not _KEPT.search(source.name):
            target = default
            for i, (pattern, other) in enumerate(chosen):
                if pattern.search(source.name):
                    target = other
                    matched.add(i)
        result.outputs[source.name] = _output(result, source, target, weights, requantize)
    for i, (pattern, _) in enumerate(chosen):
        if i not in matched:
            raise refuse("quantize", "--tensor-format", "a pattern that matches a weight", f"{pattern.pattern!r}",
                         f"see python -m jaxquant gguf {path}")  # fmt: skip
    return result


def _output(
    plan: Plan, source: Source, target: BlockFormat | None, weights: Mapping[str, np.ndarray], requantize: bool
) -> Output:
    format = None
    if target is not None and source.type_name not in (target.name, *_INTEGERS):
        format = _fitting(plan, source, target)
    if format is None or source.type_name == format.name:
        if source.rank < 2 and source.type_name in _FLOATS:
            return Output(source.shape, "F32", source.values)
        return Output(source.shape, source.type_name, source.stored)
    if not (source.type_name in _FLOATS or format.is_float or requantize):
        raise refuse(
            "quantize", f"{source.name!r}", "float weights", source.type_name,
            "start from the unquantised model, or accept the further loss with --requantize",
        )  # fmt: skip
    importance = None if format.is_float else weights.get(source.name)
    if importance is not None:
        importance = for_tensor(source.name, importance, source.shape)
    elif format.requires_imatrix:
        raise refuse(
            "quantize", f"{source.name!r}", f"an importance matrix, without which {format.name} is useless",
            "none", f"give one with --imatrix, or another format: --tensor-format '^{re.escape(source.name)}$=Q4_K'",
        )  # fmt: skip
    return Output(source.shape, format.name, partial(_quantise, plan, source, format, importance))


def _fitting(plan: Plan, source: Source, target: BlockFormat) -> BlockFormat:
    format = target
    while source.shape[-1] % format.block_size:
        format = formats[format.fallback or "F16"]
    if format is not target:
        plan.notes.append(
            f"{source.name}: {format.name} instead of {target.name}: rows of {source.shape[-1]} values are no multiple "
            f"of {target.block_size}"
        )
    return format


def _quantise(plan: Plan, source: Source, format: BlockFormat, importance: np.ndarray | None) -> np.ndarray:
    from jaxquant.ggml import quantize

    x = source.values()
    try:
        q = quantize(x, format.name, imatrix=importance)
        restored = np.asarray(q.dequantize())
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        raise ValueError(f"{source.name!r}: {error}") from error
    # The sum is in float64, without a float64 copy of the tensor.
    squared_error, squared = (
        float(np.einsum("i,i->", v, v, dtype=np.float64)) for v in ((restored - x).ravel(), x.ravel())
    )
    plan.errors.append(Error(source.name, source.type_name, x.size, squared_error, squared))
    return np.frombuffer(q.to_bytes(), np.uint8)


def _format(name: str) -> BlockFormat:
    format = find("quantize", name)
    if format.activation:
        raise refuse("quantize", "format", "a format for weights", format.name, "take Q8_0")
    return format


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise refuse("quantize", "--tensor-format", "REGEX=FORMAT", f"{text!r} ({error})", "correct it") from None


def _file_type(metadata: Mapping[str, Any], format: BlockFormat) -> dict[str, int]:
    if not metadata or format.name not in _FILE_TYPES:
        return {}
    return {"general.file_type": _FILE_TYPES[format.name], "general.quantization_version": 2}


def _imatrix(path: str | None, sources: Sequence[Source]) -> dict[str, np.ndarray]:
    if path is None:
        return {}
    weights = load_imatrix(path)
    if not any(source.name in weights for source in sources):
        raise refuse("quantize", path, "importance of these tensors", f"that of {next(iter(weights), None)!r}, ...",
                     "use the imatrix of this model")  # fmt: skip
    return weights


def _read(path: str) -> tuple[Metadata, list[Source]]:
    with open(path, "rb") as file:
        is_gguf = file.read(len(MAGIC)) == MAGIC
    if not is_gguf:
        return Metadata(), _read_safetensors(path)
    file = open_gguf("quantize", path)
    return file.metadata, [_from_entry(entry) for entry in file.values()]


def _from_entry(entry: GGUFTensor) -> Source:
    _ = entry.nbytes  # refuses unknown types

    def values() -> np.ndarray:
        if entry.type_name in _FLOATS:
            return entry.numpy().astype(np.float32, copy=False)
        return np.asarray(entry.load().dequantize())

    return Source(entry.name, entry.shape, entry.type_name, lambda: entry.raw, values)


def _read_safetensors(path: str) -> list[Source]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise refuse("quantize", path, "a GGUF or safetensors file", str(error), "convert the model to one") from None
    sources = []
    for name in file.keys():  # noqa: SIM118 (not a mapping)
        view = file.get_slice(name)
        if view.get_dtype() not in (*_FLOATS, *_INTEGERS):
            raise refuse("quantize", f"{path}: {name!r}", f"one of {', '.join((*_FLOATS, *_INTEGERS))}",
                         view.get_dtype(), "convert it: GGUF has no such type")  # fmt: skip
        read = partial(file.get_tensor, name)
        values = partial(lambda read: read().astype(np.float32), read)
        sources.append(Source(name, tuple(view.get_shape()), view.get_dtype(), read, values))
    return sources
