"""Values of a traced function on their way to ONNX, and the graph that they are written to.

A value is known (`Constant`), known and quantised (`Quantised`: written as its codes and a DequantizeLinear), or
computed by the graph (`Tensor`). A Tensor may lag behind its value by a transposition and a reshape, which are written
only where something needs them: convolutions and products then follow each other in ONNX's own order of axes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxquant._core.errors import refuse
from jaxquant.affine import qtypes

NAME = "to_onnx"
Shape = tuple[Any, ...]


@dataclass(frozen=True)
class Constant:
    """qtype: of codes in a wider container, their own type."""

    value: np.ndarray
    qtype: str | None = None

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)


@dataclass(frozen=True)
class Quantised:
    """``(codes - zero_point) * scale``. Scale and zero point are float32 of the codes' rank, each axis 1, theirs or a
    divisor."""

    codes: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray
    qtype: str

    shape = property(lambda self: self.codes.shape)
    dtype = property(lambda self: self.scale.dtype)

    def transpose(self, permutation: tuple[int, ...]) -> Quantised:
        codes, scale, zero_point = (p.transpose(permutation) for p in (self.codes, self.scale, self.zero_point))
        return Quantised(codes, scale, zero_point, self.qtype)

    def reshape(self, shape: Shape) -> Quantised | None:
        """None where scales could not follow: axes of 1 come and go freely, others only under one scale."""
        parameters = []
        for parameter in (self.scale, self.zero_point):
            if parameter.size == 1:
                parameters.append(parameter.reshape((1,) * len(shape)))
            elif [n for n in self.shape if n != 1] == [n for n in shape if n != 1]:
                sizes = iter([m for n, m in zip(self.shape, parameter.shape, strict=True) if n != 1])
                parameters.append(parameter.reshape([next(sizes) if n != 1 else 1 for n in shape]))
            else:
                return None
        return Quantised(self.codes.reshape(shape), parameters[0], parameters[1], self.qtype)


@dataclass(frozen=True)
class Tensor:
    """The tensor ``name`` of shape ``base``, its axes permuted, then reshaped to ``shape``."""

    name: str
    base: Shape
    permutation: tuple[int, ...] | None
    shape: Shape
    dtype: np.dtype

    @property
    def reshaped(self) -> bool:
        order = self.permutation or range(len(self.base))
        return tuple(self.base[d] for d in order) != self.shape

    @property
    def lags(self) -> bool:
        return self.permutation is not None or self.reshaped

    def like(self, name: str, base: Shape | None = None, dtype: Any = None) -> Tensor:
        """Another tensor that lags in the same way: the result of something done to each element."""
        base, dtype = self.base if base is None else base, self.dtype if dtype is None else np.dtype(dtype)
        if self.reshaped:
            return replace(self, name=name, dtype=dtype)
        shape = tuple(base[d] for d in self.permutation) if self.permutation else base
        return Tensor(name, base, self.permutation, shape, dtype)


Value = Constant | Quantised | Tensor


def scalar(value: Any, dtype: Any = np.float32) -> Constant:
    return Constant(np.asarray(value, dtype))


class NeedsOpset(Exception):
    """What a graph cannot have in its opset: the opset, and what needs it."""


def is_static(shape: Shape) -> bool:
    return all(isinstance(n, (int, np.integer)) for n in shape)


class Graph:
    """Nodes and initializers in the order in which they are asked for."""

    def __init__(self, opset: int, narrowest: bool):
        """narrowest: weights must be stored in their own number of bits."""
        import onnx

        self.onnx, self.opset, self.narrowest = onnx, opset, narrowest
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.callers: list[Any] = []  # equations whose functions are being written
        self.sizes: dict[str, tuple[str, int]] = {}  # of symbolic dimensions: an input and its axis
        self._taken: set[str] = set()
        self._stored: dict[Any, str] = {}
        self._caught_up: dict[Tensor, str] = {}

    # ------------------------------------------------------------------------------------------------------- writing

    def fresh(self, hint: str) -> str:
        name, i = hint, 0
        while name in self._taken:
            i += 1
            name = f"{hint}_{i}"
        self._taken.add(name)
        return name

    def node(self, op: str, *inputs: str, hint: str | None = None, **attributes: Any) -> str:
        """Adds a node and returns the name of its result."""
        out = self.fresh(hint or op.lower())
        attributes = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(self.onnx.helper.make_node(op, list(inputs), [out], name=out, **attributes))
        return out

    def type_of(self, dtype: Any) -> int:
        name = {"float32": "FLOAT", "float64": "DOUBLE"}.get(np.dtype(dtype).name, np.dtype(dtype).name.upper())
        return getattr(self.onnx.TensorProto, name)

    def initializer(self, value: Any, hint: str = "constant", qtype: str | None = None) -> str:
        """A constant tensor; of code type ``qtype``, packed as ONNX packs. Equal ones are stored once."""
        value = np.ascontiguousarray(value).reshape(np.shape(value))
        bits = qtypes.QTYPES[qtype].bits if qtype else 8
        if qtype is None:
            kind, raw = self.type_of(value.dtype), value.astype(value.dtype.newbyteorder("<")).tobytes()
        else:
            kind = getattr(self.onnx.TensorProto, qtype.upper())
            raw = (
                _pack(value, bits)
                if bits < 8
                else value.astype(qtypes.QTYPES[qtype].container.newbyteorder("<")).tobytes()
            )
        key = (hashlib.sha256(raw).digest(), value.shape, kind)
        if key not in self._stored:
            name = self._stored[key] = self.fresh(hint)
            self.initializers.append(self.onnx.helper.make_tensor(name, kind, value.shape, raw, raw=True))
        return self._stored[key]

    def sizes_of(self, shape: Shape) -> str:
        """An int64 tensor of a shape."""
        if is_static(shape):
            return self.initializer(np.array(shape, np.int64), "shape")
        parts = []
        for n in shape:
            if is_static((n,)):
                parts.append(self.initializer(np.array([n], np.int64), "shape"))
            elif str(n) in self.sizes:
                source, axis = self.sizes[str(n)]
                parts.append(self.node("Shape", source, start=axis, end=axis + 1))
            else:
                raise NotImplementedError(
                    f"{NAME}: a shape with the size {n}, which no input has along an axis; give the sizes as integers."
                )
        return self.node("Concat", *parts, axis=0)

    def _reshaped(self, name: str, before: Shape, shape: Shape) -> str:
        """Symbolic sizes are copied from the same axis (0) or left to be counted (-1) where one of these will do."""
        if is_static(shape):
            return self.node("Reshape", name, self.sizes_of(shape), allowzero=1 if 0 in shape else None)
        same = [d < len(before) and not is_static((n,)) and before[d] == n for d, n in enumerate(shape)]
        rest = [n for n, copied in zip(shape, same, strict=True) if not copied]
        if 0 in rest or sum(not is_static((n,)) for n in rest) > 1:
            return self.node("Reshape", name, self.sizes_of(shape))
        numbers = [0 if copied else int(n) if is_static((n,)) else -1 for n, copied in zip(shape, same, strict=True)]
        return self.node("Reshape", name, self.initializer(np.array(numbers, np.int64), "shape"))

    def give(self, names: list[str], outputs: list[str]) -> None:
        """Gives tensors to the caller: where nobody else uses one, the node that makes it calls it by its output."""
        used = [name for node in self.nodes for name in node.input]
        makers = {node.output[0]: node for node in self.nodes}
        for name, output in zip(names, outputs, strict=True):
            if name in makers and name not in used and names.count(name) == 1:
                makers[name].output[0] = output
            else:
                self.nodes.append(self.onnx.helper.make_node("Identity", [name], [output], name=output))

        self._prune(set(outputs))

    def _prune(self, needed: set[str]) -> None:
        """Drops what no result depends on."""
        kept = []
        for node in reversed(self.nodes):
            if node.output[0] in needed:
                kept.append(node)
                needed.update(node.input)
        self.nodes = kept[::-1]
        self.initializers = [each for each in self.initializers if each.name in needed]

    # -------------------------------------------------------------------------------------------------------- values

    def tensor(self, value: Value) -> Tensor:
        """The value as something the graph computes."""
        if isinstance(value, Tensor):
            return value
        name = self.initializer(value.value) if isinstance(value, Constant) else self.weights(value)
        return Tensor(name, value.shape, None, value.shape, np.dtype(value.dtype))

    def name(self, value: Value) -> str:
        """The name of a tensor that is the value, axis by axis."""
        t = self.tensor(value)
        if not t.lags:
            return t.name
        if t not in self._caught_up:
            name, shape = t.name, t.base
            if t.permutation is not None:
                name = self.node("Transpose", name, perm=list(t.permutation))
                shape = tuple(t.base[d] for d in t.permutation)
            if t.reshaped:
                name = self._reshaped(name, shape, t.shape)
            self._caught_up[t] = name
        return self._caught_up[t]

    def caught_up(self, value: Value) -> Tensor:
        return Tensor(self.name(value), value.shape, None, value.shape, np.dtype(value.dtype))

    def result(self, op: str, *inputs: str, shape: Shape, dtype: Any, **attributes: Any) -> Tensor:
        name = self.node(op, *inputs, **attributes)
        return Tensor(name, tuple(shape), None, tuple(shape), np.dtype(dtype))

    def full(self, value: Value, shape: Shape) -> Value:
        """The value at its own shape: until here axes along which it is constant may be 1."""
        if tuple(value.shape) == tuple(shape):
            return value
        if isinstance(value, Constant) and is_static(shape):
            return replace(value, value=np.broadcast_to(value.value, shape))
        return self.result("Expand", self.name(value), self.sizes_of(shape), shape=shape, dtype=value.dtype)

    def reshape(self, value: Value, shape: Shape) -> Value:
        shape = tuple(shape)
        if isinstance(value, Constant) and is_static(shape):
            return replace(value, value=value.value.reshape(shape))
        if isinstance(value, Quantised):
            reshaped = value.reshape(shape) if is_static(shape) else None
            if reshaped is not None:
                return reshaped
        return replace(self.tensor(value), shape=shape)

    def transpose(self, value: Value, permutation: Any) -> Value:
        permutation = tuple(int(d) for d in permutation)
        if permutation == tuple(range(len(permutation))):
            return value
        if isinstance(value, Constant):
            return replace(value, value=value.value.transpose(permutation))
        if isinstance(value, Quantised):
            return value.transpose(permutation)
        t = self.caught_up(value) if value.reshaped else value
        before = t.permutation or tuple(range(len(t.base)))
        after = tuple(before[d] for d in permutation)
        shape = tuple(t.base[d] for d in after)
        return Tensor(t.name, t.base, None if after == tuple(range(len(after))) else after, shape, t.dtype)

    def cast(self, value: Value, dtype: Any) -> Value:
        if np.dtype(value.dtype) == np.dtype(dtype):
            return value
        if isinstance(value, Constant):
            return replace(value, value=value.value.astype(dtype))
        t = self.tensor(value)
        return t.like(self.node("Cast", t.name, to=self.type_of(dtype)), dtype=dtype)

    # ------------------------------------------------------------------------------------------------- quantised ones

    def quantised(self, x: Value, scale: Any, zero_point: Any, qmin: int, qmax: int) -> Tensor:
        """The codes of x, in whole bytes. A range narrower than the type's is clipped in front: what QuantizeLinear
        gives then lies within it."""
        code = qtypes.QTYPES[smallest_type(qmin, qmax)]
        code = qtypes.QTYPES[np.dtype(code.container).name]
        t = self.tensor(self.cast(x, np.float32))
        t = self.caught_up(t) if scale.size > 1 else t
        name = t.name
        if (qmin, qmax) != (code.qmin, code.qmax):
            name = self._clipped(t, scale, zero_point, qmin, qmax)
        inputs, attributes = self._parameters(t.shape, scale, zero_point, code.name, of_weights=False)
        if len(inputs) == 1:
            attributes["output_dtype"] = self.type_of(code.container)
        return t.like(self.node("QuantizeLinear", name, *inputs, hint="codes", **attributes), dtype=code.container)

    def _clipped(self, x: Tensor, scale: Any, zero_point: Any, qmin: int, qmax: int) -> str:
        limits = []
        for limit in (qmin, qmax):
            with np.errstate(over="ignore"):
                value = np.nan_to_num((np.float32(limit) - zero_point) * scale)
            for d, m in enumerate(value.shape):
                value = value if m == 1 or m == x.shape[d] else np.repeat(value, x.shape[d] // m, d)
            limits.append(self.initializer(value.reshape(()) if value.size == 1 else value, "limit"))
        if scale.size == 1:
            return self.node("Clip", x.name, *limits)
        return self.node("Min", self.node("Max", x.name, limits[0]), limits[1])

    def dequantised(self, codes: Tensor, scale: Any, zero_point: Any) -> Tensor:
        codes = self.caught_up(codes) if scale.size > 1 else codes
        inputs, attributes = self._parameters(codes.shape, scale, zero_point, codes.dtype.name, of_weights=False)
        values = self.node("DequantizeLinear", codes.name, *inputs, hint="values", **attributes)
        return codes.like(values, dtype=np.float32)

    def weights(self, q: Quantised) -> str:
        qtype = self._stored_type(q.qtype)
        inputs, attributes = self._parameters(q.shape, q.scale, q.zero_point, qtype, of_weights=True)
        codes = self.initializer(q.codes, "weight_codes", qtype)
        return self.node("DequantizeLinear", codes, *inputs, hint="weights", **attributes)

    def need(self, opset: int, what: str) -> None:
        if self.opset < opset:
            raise NeedsOpset(opset, what)

    def _stored_type(self, qtype: str) -> str:
        """ONNX has codes of 4 bits from opset 21 on, of 2 bits from 25 on; before that the next wider type serves."""
        bits = qtypes.QTYPES[qtype].bits
        if bits < 8 and self.narrowest:
            self.need(21, f"codes of {bits} bits")
        bits = max(bits, 2 if self.opset >= 25 else 4 if self.opset >= 21 else 8)
        return f"{qtype.rstrip('0123456789')}{bits}"

    def _parameters(
        self, shape: Shape, scale: Any, zero_point: Any, qtype: str, of_weights: bool
    ) -> tuple[list[str], dict[str, Any]]:
        """Scale and zero point as QuantizeLinear and DequantizeLinear take them: of a tensor, along one axis, or of
        blocks along one axis. Scales of other boxes are repeated until they are one of these."""
        code = qtypes.QTYPES[qtype]
        if (zero_point != np.round(zero_point)).any() or zero_point.min() < code.qmin or zero_point.max() > code.qmax:
            got = f"values from {zero_point.min()} to {zero_point.max()}"
            remedy = "choose another: ONNX keeps zero points in the codes' own type"
            raise refuse(NAME, "zero_point", f"integers within [{code.qmin}, {code.qmax}] for {qtype}", got, remedy)
        if code.bits > 8:
            self.need(21, "codes of 16 bits")
        sizes = np.broadcast_shapes(scale.shape, zero_point.shape)
        scale, zero_point = (np.broadcast_to(each, sizes) for each in (scale, zero_point))
        attributes: dict[str, Any] = {}
        many = [d for d, m in enumerate(sizes) if m != 1]
        if not many:
            scale, zero_point = scale.reshape(()), zero_point.reshape(())
        elif len(many) == 1 and sizes[many[0]] == shape[many[0]]:
            scale, zero_point, attributes = scale.reshape(-1), zero_point.reshape(-1), {"axis": many[0]}
        else:
            if not is_static(shape):
                remedy = "use one scale, or one for each index of one axis"
                raise refuse(NAME, "scale", f"no blocks where sizes are symbolic ({shape})", str(sizes), remedy)
            self.need(21, "scales of blocks, or along several axes")
            blocks = [n // m for n, m in zip(shape, sizes, strict=True)]
            axis = int(np.argmax(blocks))
            for d, block in enumerate(blocks):
                if d != axis and block > 1:
                    scale, zero_point = (np.repeat(each, block, d) for each in (scale, zero_point))
            attributes = {"axis": axis, "block_size": blocks[axis]}
        inputs = [self.initializer(scale, "scale")]
        # From opset 21 on ONNX Runtime (1.32) turns int8 activations with a zero point into uint8 ones and then finds
        # fault with what it made, in front of a Transpose or a Reshape.
        if of_weights or self.opset < 21 or code.qmin == 0 or zero_point.any():
            inputs.append(self.initializer(zero_point, "zero_point", qtype))
        return inputs, attributes


def _pack(codes: np.ndarray, bits: int) -> bytes:
    """ONNX packs all of a tensor in a row, not row by row; low bits first."""
    per_byte = 8 // bits
    flat = codes.reshape(-1).astype(np.int64) & ((1 << bits) - 1)
    flat = np.pad(flat, (0, -len(flat) % per_byte)).reshape(-1, per_byte)
    return (flat << (np.arange(per_byte) * bits)).sum(1).astype(np.uint8).tobytes()


def smallest_type(qmin: int, qmax: int) -> str:
    """The narrowest code type with a range of codes."""
    fitting = [t for t in qtypes.QTYPES.values() if t.qmin <= qmin and qmax <= t.qmax]
    return min(fitting, key=lambda t: (t.bits, t.qmin == 0 and qmin < 0, t.qmin != 0 and qmin >= 0)).name
