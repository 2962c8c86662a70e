"""How layers are quantised (`Spec`), and which (`Rules`)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp

from jaxquant._core.errors import refuse
from jaxquant.affine import choose, qtypes
from jaxquant.affine.granularity import Granularity, PerTensor


@dataclass(frozen=True)
class Spec:
    """How the operands of a product are quantised: activations x and weights w. Hashable.

    Args:
      w_qtype: the code type of weights, symmetric.
      x_qtype: that of activations; None leaves them floating (weight-only).
      w_granularity: which weights share a scale, as axes of the kernel; None gives each output channel one.
      x_granularity: which activations share a scale; None gives each row of the product one, each example in a
        convolution.
      symmetric: activations have no zero point. With ``symmetric=False`` it is chosen with the scale.
      learned: scales are parameters that are trained (LSQ), one for all activations of a layer; else they are chosen
        from the values at each call. A learned scale takes the full range of its code type, and an unsigned type is
        for activations that are not negative: there is no learned zero point.
      x_observer: of `jaxquant.observers`, with one scale for all activations of a layer. The layer holds its state,
        which gathers while the model is calibrated; the scale is then constant. Type and symmetry of activations are
        the observer's.

    >>> Spec(w_qtype=jnp.int4)
    Spec(w_qtype=int4, x_qtype=int8)
    """

    w_qtype: Any = jnp.int8
    x_qtype: Any = jnp.int8
    w_granularity: Granularity | None = None
    x_granularity: Granularity | None = None
    symmetric: bool = True
    learned: bool = False
    x_observer: Any = None

    def __post_init__(self) -> None:
        if self.x_observer is not None:
            self._follow(self.x_observer)
        for name in ("w_qtype", "x_qtype"):
            value = getattr(self, name)
            if value is not None or name == "w_qtype":
                code = qtypes.lookup("Spec", value)
                if code.bits > 8:
                    raise refuse("Spec", name, "at most 8 bits", code.name, "products take no wider", TypeError)
                object.__setattr__(self, name, code.name)
        for name in ("w_granularity", "x_granularity"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Granularity):
                remedy = "None suits the product"
                raise refuse("Spec", name, "a granularity such as PerAxis(-1)", repr(value), remedy, TypeError)
        choose.code_limits("Spec", self.w_qtype, True, None)
        if self.learned and (self.x_granularity is not None or not self.symmetric):
            got = "x_granularity or symmetric=False beside it"
            raise refuse("Spec", "learned", "one symmetric scale for the activations", got, "leave them out")
        if self.x_qtype is not None and not self.learned:
            choose.code_limits("Spec", self.x_qtype, self.symmetric, None)

    def _follow(self, observer: Any) -> None:
        if not all(hasattr(observer, name) for name in ("init", "update", "qparams")):
            raise refuse("Spec", "x_observer", "an observer", repr(observer), "see jaxquant.observers", TypeError)
        if observer.granularity != PerTensor() or self.x_granularity is not None or self.learned:
            got = "another granularity, or learned=True beside it"
            raise refuse("Spec", "x_observer", "one constant scale for the activations", got, "leave that out")
        object.__setattr__(self, "x_qtype", observer.qtype)
        object.__setattr__(self, "symmetric", observer.symmetric)

    def __repr__(self) -> str:
        parts = [f"w_qtype={self.w_qtype}", f"x_qtype={self.x_qtype}"]
        for name, default in (
            ("w_granularity", None),
            ("x_granularity", None),
            ("symmetric", True),
            ("learned", False),
            ("x_observer", None),
        ):
            if getattr(self, name) != default:
                parts.append(f"{name}={getattr(self, name)!r}")
        return f"Spec({', '.join(parts)})"


class UnmatchedRules(UserWarning):
    """Rules that applied to no parameter."""


class Rules:
    """Ordered rules: which parameters are quantised, and how. The first that matches a parameter's path decides.

    A path is the parameter's, as ``encoder/0/kernel``, or its layer's, ``encoder/0``; patterns are those of `fnmatch`,
    in which ``*`` crosses slashes too.

    Args:
      rules: pairs of a pattern and a `Spec`, or None to leave what matches as it is. A mapping or a `Spec` alone (for
        every path) will do.
      unmatched: what becomes of rules that match nothing: "warn", "raise" or "ignore".

    >>> rules = Rules([("head/*", None), ("*/kernel", Spec(w_qtype=jnp.int4))])
    >>> rules.find("head/kernel"), rules.find("block/0/kernel")
    (None, Spec(w_qtype=int4, x_qtype=int8))
    >>> rules.unmatched(["block/0/kernel"])
    ['head/*']
    """

    def __init__(self, rules: Any, *, unmatched: str = "warn"):
        if unmatched not in ("warn", "raise", "ignore"):
            raise refuse("Rules", "unmatched", '"warn", "raise" or "ignore"', repr(unmatched), "choose one")
        if isinstance(rules, Rules):
            rules = rules.rules
        elif isinstance(rules, Spec):
            rules = [("*", rules)]
        self.rules = tuple(rules.items() if isinstance(rules, dict) else rules)
        self.on_unmatched = unmatched
        for rule in self.rules:
            if not (len(rule) == 2 and isinstance(rule[0], str) and isinstance(rule[1], (Spec, type(None)))):
                raise refuse(
                    "Rules", "rules", "pairs of a pattern and a Spec or None", repr(rule), "see Rules", TypeError
                )

    def find(self, path: str) -> Spec | None:
        """The spec of the first rule that matches a parameter's path; None where there is none."""
        return next((spec for pattern, spec in self.rules if _matches(path, pattern)), None)

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """Patterns that decide on none of the paths: they match nothing, or earlier rules take all that they match."""
        deciding = {next((i for i, rule in enumerate(self.rules) if _matches(path, rule[0])), None) for path in paths}
        return [pattern for i, (pattern, _) in enumerate(self.rules) if i not in deciding]

    @contextlib.contextmanager
    def applied(self) -> Iterator[Callable[[str], Spec | None]]:
        """`find`; in the end, rules that decided on none of the paths it was asked for are reported."""
        asked: dict[str, None] = {}

        def find(path: str) -> Spec | None:
            asked[path] = None
            return self.find(path)

        yield find
        self.check(asked)

    def check(self, paths: Iterable[str]) -> None:
        """Warns or raises if there are unmatched rules, naming them and what paths there are."""
        paths = list(paths)
        missed = self.unmatched(paths)
        if not missed or self.on_unmatched == "ignore":
            return
        shown = ", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")
        message = f"rules that decide on no parameter: {', '.join(missed)}; the parameters are: {shown or 'none'}."
        if self.on_unmatched == "raise":
            raise ValueError(message)
        warnings.warn(message, UnmatchedRules, stacklevel=3)


def path_of(keys: Iterable[Any], parameter: str) -> str:
    """The path of a layer's parameter, from the names, indices or pytree keys that lead to the layer."""
    steps = (getattr(key, "name", getattr(key, "idx", getattr(key, "key", key))) for key in keys)
    return "/".join((*map(str, steps), parameter))


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path.rpartition("/")[0], pattern)
