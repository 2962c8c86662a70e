"""Observers: ranges of values gathered batch by batch, for calibration and for training.

An observer is a frozen, hashable description; what it has seen is a state of float32 arrays, a dictionary that jit,
scan, checkpoints and sharding take as it is:

    observer = observers.MinMax(PerAxis(-1), qtype=jnp.uint8, symmetric=False)
    state = observer.init(x.shape)            # or an array; only its shape counts
    state = observer.update(state, x)         # any number of times, inside jit or scan
    state = observer.merge(state, "data")     # inside shard_map or pmap: all shards get the state of all
    qparams = observer.qparams(state)         # QParams for quantize, fake_quantize, ...

Layers keep such states themselves: see ``x_observer`` of `jaxquant.nn.Spec`.

Only finite values count. Before the first of them, and for zeros alone, the scale is 1. Nothing here is differentiated:
states are constants. Batches may differ in size along axes that share a scale (all but PerGroup's and PerBlock's).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxquant._core import compat
from jaxquant._core.errors import refuse
from jaxquant.affine import choose, qtypes, search
from jaxquant.affine import granularity as granularities
from jaxquant.affine import histogram as _histogram
from jaxquant.affine.histogram import histogram, percentile
from jaxquant.affine.qparams import QParams

State = dict[str, jax.Array]

__all__ = ["AbsMax", "Histogram", "MinMax", "MovingAverage", "Percentile", "histogram", "percentile"]


@dataclass(frozen=True)
class _Observer:
    """What observers share.

    Args:
      granularity: which elements share a scale.
      qtype, symmetric, narrow_range: as for `jaxquant.choose_qparams`.
    """

    granularity: Any = granularities.PerTensor()  # noqa: RUF009
    qtype: Any = jnp.int8
    symmetric: bool = True
    narrow_range: bool | None = None

    # Names of the state's arrays, each of the scale's shape.
    _fields: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        # One spelling, so that equal observers are equal, and jit compiles once.
        object.__setattr__(self, "qtype", jnp.dtype(self._limits()[0].name))

    @property
    def _name(self) -> str:
        return f"observers.{type(self).__name__}"

    def init(self, x: Any) -> State:
        """The state before any value, for arrays like x: an array, or a shape."""
        grid = self._grid(x if isinstance(x, (tuple, list)) else x.shape)
        return {name: jnp.zeros(grid, jnp.float32) for name in self._fields}

    def _grid(self, shape: Any) -> tuple[int, ...]:
        block = granularities.resolve(self._name, self.granularity, tuple(shape))
        return granularities.scale_shape(tuple(shape), block)

    def _prepare(self, state: State, x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise refuse(self._name, "x", "a float array", x.dtype.name, "convert it", TypeError)
        grid, held = self._grid(x.shape), next(iter(state.values())).shape[: x.ndim]
        if grid != held:
            remedy = "init the state with this shape, or share the scale along the axis that varies"
            raise refuse(self._name, "x", f"blocks of the state's shape {held}", f"{grid} for x {x.shape}", remedy)
        return _histogram.countable(jax.lax.stop_gradient(x))

    def _qparams(self, low: Any, high: Any) -> QParams:
        code, qmin, qmax = self._limits()
        scale, zero_point = choose.parameters(low, high, qmin, qmax, self.symmetric)
        zero_point = None if self.symmetric else zero_point.astype(jnp.int32)
        block = _blocks(self.granularity, low.ndim)
        return QParams(scale, zero_point, jnp.dtype(code.name), qmin, qmax, block)

    def _limits(self) -> tuple[qtypes.QType, int, int]:
        return choose.code_limits(self._name, self.qtype, self.symmetric, self.narrow_range)


@dataclass(frozen=True)
class AbsMax(_Observer):
    """The largest magnitude so far.

    >>> observer = observers.AbsMax(PerToken())
    >>> state = observer.update(observer.init((2, 3)), jnp.array([[1.0, -127.0, 3.0], [0.0, jnp.nan, 0.0]]))
    >>> observer.qparams(state).scale
    Array([[1.],
           [1.]], dtype=float32)
    """

    _fields: ClassVar[tuple[str, ...]] = ("absmax",)

    def update(self, state: State, x: Any) -> State:
        """The state after another batch."""
        x = self._prepare(state, x)
        block = search.block_of(x.shape, state["absmax"].shape)
        (largest,) = choose.block_range(x, block, absolute=True)
        return {"absmax": jnp.maximum(state["absmax"], largest)}

    def merge(self, state: State, axis_name: Any) -> State:
        """The state of all shards along mesh axes."""
        return {"absmax": jax.lax.pmax(state["absmax"], axis_name)}

    def qparams(self, state: State) -> QParams:
        """Scale and zero point for what was seen."""
        return self._qparams(-state["absmax"], state["absmax"])


@dataclass(frozen=True)
class MinMax(_Observer):
    """The smallest and the largest value so far, and 0.

    >>> observer = observers.MinMax(qtype=jnp.uint8, symmetric=False)
    >>> state = observer.update(observer.init((3,)), jnp.array([-1.0, 0.5, 1.55]))
    >>> qparams = observer.qparams(state)
    >>> qparams.scale, qparams.zero_point
    (Array([0.01], dtype=float32), Array([100], dtype=int32))
    """

    _fields: ClassVar[tuple[str, ...]] = ("low", "high")

    def update(self, state: State, x: Any) -> State:
        """The state after another batch."""
        low, high, _ = search.finite_range(self._prepare(state, x), state["low"].shape)
        return {"low": jnp.minimum(state["low"], low), "high": jnp.maximum(state["high"], high)}

    def merge(self, state: State, axis_name: Any) -> State:
        """The state of all shards along mesh axes."""
        return {"low": -jax.lax.pmax(-state["low"], axis_name), "high": jax.lax.pmax(state["high"], axis_name)}

    def qparams(self, state: State) -> QParams:
        """Scale and zero point for what was seen."""
        return self._qparams(state["low"], state["high"])


@dataclass(frozen=True)
class MovingAverage(_Observer):
    """Exponential moving averages of each batch's extremes (of the largest magnitude where symmetric).

    ``low <- decay * low + (1 - decay) * batch_low``, likewise high, and ``weight <- decay * weight + (1 - decay)``; the
    range is ``low / weight``, ``high / weight``: the average without a bias towards the zeros it began with. A block
    without a finite value leaves its averages as they are.

    Merging averages the shards, each by its weight; it may be done after every update or once at the end.

    >>> observer = observers.MovingAverage(decay=0.9)
    >>> state = observer.update(observer.init((2,)), jnp.array([1.0, -127.0]))
    >>> observer.qparams(state).scale
    Array([1.], dtype=float32)
    """

    decay: float = 0.99
    _fields: ClassVar[tuple[str, ...]] = ("low", "high", "weight")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise refuse(self._name, "decay", "a number from 0 to below 1", repr(self.decay), "0.99 is usual")

    def update(self, state: State, x: Any) -> State:
        """The state after another batch."""
        low, high, seen = search.finite_range(self._prepare(state, x), state["low"].shape)
        if self.symmetric:
            high = jnp.maximum(-low, high)
            low = -high
        decay = jnp.float32(self.decay)
        batch = {"low": low, "high": high, "weight": jnp.ones_like(low)}
        return {k: jnp.where(seen, decay * state[k] + (1 - decay) * batch[k], state[k]) for k in self._fields}

    def merge(self, state: State, axis_name: Any) -> State:
        """The state of all shards along mesh axes."""
        return {name: jax.lax.pmean(value, axis_name) for name, value in state.items()}

    def qparams(self, state: State) -> QParams:
        """Scale and zero point for what was seen."""
        weight = jnp.where(state["weight"] > 0, state["weight"], 1)
        return self._qparams(state["low"] / weight, state["high"] / weight)


@dataclass(frozen=True)
class Percentile(_Observer):
    """The mean over batches of exact percentiles: of ``|x|`` where symmetric, else of both tails.

    For the percentile of all values together, to the resolution of a histogram, see `Histogram`.

    >>> observer = observers.Percentile(percentile=50)
    >>> state = observer.update(observer.init((3,)), jnp.array([1.0, -127.0, 1e9]))
    >>> observer.qparams(state).scale
    Array([1.], dtype=float32)
    """

    percentile: float = 99.9
    _fields: ClassVar[tuple[str, ...]] = ("low", "high", "batches")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_percentile(self._name, self.percentile)

    def update(self, state: State, x: Any) -> State:
        """The state after another batch."""
        x, grid = self._prepare(state, x), state["low"].shape
        low, high, seen = search.percentiles_seen(x, grid, self.percentile, self.symmetric)
        seen = seen.astype(jnp.float32)
        return {
            "low": state["low"] + seen * low,
            "high": state["high"] + seen * high,
            "batches": state["batches"] + seen,
        }

    def merge(self, state: State, axis_name: Any) -> State:
        """The state of all shards along mesh axes: once, since what was merged counts again in a second merge."""
        return {name: jax.lax.psum(value, axis_name) for name, value in state.items()}

    def qparams(self, state: State) -> QParams:
        """Scale and zero point for what was seen."""
        batches = jnp.maximum(state["batches"], 1)
        return self._qparams(state["low"] / batches, state["high"] / batches)


@dataclass(frozen=True)
class Histogram(_Observer):
    """Counts of all values so far, and a range that is chosen on them in the end.

    Counted are magnitudes over [0, span] where symmetric, else values over [-span, span]; span is a power of two. It
    grows by doubling, which merges pairs of bins: counts stay exact (to 2^24 in a bin, then to 24 bits), and those of
    batches and shards add up whatever order they come in. (With both signs, negative values within 2^-24 of the span
    at the time may count as 0.)

    Args:
      bins: a power of two.
      search: "mse": the least mean squared error of rounding and clipping together; "kl": entropy calibration
        (S. Migacz, "8-bit inference with TensorRT", GTC 2017), symmetric only; "percentile": that of all values.
      percentile: for that.

    >>> observer = observers.Histogram(search="percentile", percentile=99)
    >>> state = observer.update(observer.init((1000,)), jnp.linspace(-127.0, 127.0, 1000))
    >>> observer.qparams(state).scale.round(1)
    Array([1.], dtype=float32)
    """

    bins: int = search.BINS
    search: Literal["mse", "kl", "percentile"] = "mse"
    percentile: float = 99.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 64 <= self.bins <= _histogram.MAX_BINS or self.bins & (self.bins - 1):
            raise refuse(self._name, "bins", "a power of two from 64 to 65536", repr(self.bins), "2048 is usual")
        if self.search not in ("mse", "kl", "percentile"):
            raise refuse(self._name, "search", '"mse", "kl" or "percentile"', repr(self.search), "choose one")
        if self.search == "kl" and not self.symmetric:
            remedy = 'use symmetric=True, or search="mse"'
            raise refuse(self._name, "search", '"mse" or "percentile" with symmetric=False', '"kl"', remedy)
        _check_percentile(self._name, self.percentile)

    def init(self, x: Any) -> State:
        """The state before any value, for arrays like x: an array, or a shape."""
        grid = self._grid(x if isinstance(x, (tuple, list)) else x.shape)
        zeros = jnp.zeros(grid, jnp.float32)
        counts = jnp.zeros((*grid, self.bins), jnp.float32)
        return {"low": zeros, "high": zeros, "span": zeros + _SMALLEST, "counts": counts}

    def update(self, state: State, x: Any) -> State:
        """The state after another batch."""
        x = self._prepare(state, x)
        low, high, _ = search.finite_range(x, state["low"].shape)
        span = jnp.maximum(state["span"], _power_of_two(jnp.maximum(-low, high)))
        bottom = jnp.zeros_like(span) if self.symmetric else -span
        counts = _histogram.count(x, bottom, span, bins=self.bins, magnitude=self.symmetric)
        return {
            "low": jnp.minimum(state["low"], low),
            "high": jnp.maximum(state["high"], high),
            "span": span,
            "counts": self._widened(state, span) + counts.astype(jnp.float32),
        }

    def merge(self, state: State, axis_name: Any) -> State:
        """The state of all shards along mesh axes: once, since what was merged counts again in a second merge."""
        extremes = jnp.stack([-state["low"], state["high"], state["span"]])
        low, high, span = jax.lax.pmax(extremes, axis_name)
        counts = jax.lax.psum(self._widened(state, span), axis_name)
        return {"low": -low, "high": high, "span": span, "counts": counts}

    # Compiled once for each shape, outside jit too: the branches are functions made anew at each call.
    @functools.partial(jax.jit, static_argnums=0)
    def _widened(self, state: State, span: Any) -> jax.Array:
        """The counts over a span that is some doublings wider."""
        counts, doublings = state["counts"], _exponent(span) - _exponent(state["span"])
        most = self.bins.bit_length() - 1 if self.symmetric else self.bins.bit_length() - 2
        # Alike in the manual axes they vary over, as the branches below must be.
        counts, doublings = compat.match_varying_axes(counts, jnp.minimum(doublings, most)[..., None])

        def widen(counts: Any) -> Any:
            for power in range(most.bit_length()):
                merged = 1 << (1 << power)
                inner = counts.reshape(*counts.shape[:-1], self.bins // merged, merged).sum(axis=-1)
                left = self.bins - inner.shape[-1]
                before = 0 if self.symmetric else left // 2
                wide = jnp.pad(inner, [*[(0, 0)] * (counts.ndim - 1), (before, left - before)])
                counts = jnp.where(doublings >> power & 1, wide, counts)
            return counts

        return jax.lax.cond((doublings > 0).any(), widen, lambda counts: counts, counts)

    def qparams(self, state: State) -> QParams:
        """Scale and zero point for what was seen."""
        counts, span = state["counts"], state["span"]
        bottom = jnp.zeros_like(span) if self.symmetric else -span
        _, qmin, qmax = self._limits()
        if self.search == "mse":
            low, high = search.least_squares(counts, bottom, span, qmin, qmax, self.symmetric)
        elif self.search == "kl":
            high = search.least_divergence(counts, span, qmax + 1)
            low = -high
        elif self.symmetric:
            high = search.counted_percentile(counts, bottom, span, self.percentile)
            low = -high
        else:
            low = search.counted_percentile(counts, bottom, span, 100 - self.percentile)
            high = search.counted_percentile(counts, bottom, span, self.percentile)
        # Within what was seen: bins end beyond it.
        largest = jnp.maximum(-state["low"], state["high"])
        if self.symmetric:
            return self._qparams(jnp.maximum(low, -largest), jnp.minimum(high, largest))
        return self._qparams(jnp.clip(low, state["low"], 0), jnp.clip(high, 0, state["high"]))


# -------------------------------------------------------------------------------------------------------------- helpers

_SMALLEST = 2.0**-126


def _exponent(power: Any) -> jax.Array:
    return (jax.lax.bitcast_convert_type(power, jnp.uint32) >> 23).astype(jnp.int32)


def _power_of_two(x: Any) -> jax.Array:
    """The smallest power of two that is not below x >= 0, from 2^-126 to 2^127."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32((1 << 23) - 1)
    return jax.lax.bitcast_convert_type(jnp.clip(bits >> 23, 1, 254) << 23, jnp.float32)


def _check_percentile(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not 50 <= value <= 100:
        raise refuse(name, "percentile", "a number from 50 to 100", repr(value), "99.9 is usual")


def _blocks(granularity: Any, ndim: int) -> tuple[int, ...] | None:
    """The block shape that QParams need, where scales do not tell it by their shape."""
    if isinstance(granularity, granularities.PerGroup):
        return tuple(granularity.size if d == granularity.axis % ndim else 1 for d in range(ndim))
    return granularity.shape if isinstance(granularity, granularities.PerBlock) else None
