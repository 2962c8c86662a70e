"""Specs of einsum as the dimension numbers of one product."""

from __future__ import annotations

from typing import Any

from jaxquant._core.errors import refuse

Labels = list[Any]  # letters; integers for the axes of an ellipsis, counted from its end


def parse(spec: str, x_shape: tuple[Any, ...], w_shape: tuple[Any, ...]) -> tuple[Any, tuple[int, ...]]:
    """Dimension numbers, and the transposition of their result that the spec asks for."""
    if not isinstance(spec, str):
        raise refuse("einsum", "spec", 'a string as "...k,kn->...n"', repr(spec), "write one", TypeError)
    text = spec.replace(" ", "")
    operands, arrow, output = text.partition("->")
    terms = operands.split(",")
    if len(terms) != 2:
        raise _unsupported(spec, "it has not two operands")
    x, w = (_labels(spec, term, len(shape)) for term, shape in zip(terms, (x_shape, w_shape), strict=True))
    dots = sorted({a for a in (*x, *w) if isinstance(a, int)}, reverse=True)
    if arrow:
        out = _expand(spec, output, dots)
    else:
        letters = [a for a in (*x, *w) if isinstance(a, str)]
        out = [*dots, *sorted(a for a in letters if letters.count(a) == 1)]
    for what, own in (("x", x), ("w", w), ("the result", out)):
        if len(set(own)) != len(own):
            raise _unsupported(spec, f"an index comes twice in {what}")
    if extra := [a for a in out if a not in x and a not in w]:
        raise refuse("einsum", "spec", "indices of the operands behind the arrow", f"{spec!r}", f"drop {extra[0]}")
    for what, own, other in (("x", x, w), ("w", w, x)):
        if any(a not in other and a not in out for a in own):
            raise _unsupported(spec, f"an index is summed over {what} alone")
    shared = [a for a in w if a in x]
    for a in shared:
        if isinstance(a, int) and x_shape[x.index(a)] != w_shape[w.index(a)]:
            raise _unsupported(spec, f"its ellipsis broadcasts shapes {x_shape} and {w_shape}")
    batch, contract = [a for a in shared if a in out], [a for a in shared if a not in out]
    numbers = tuple(tuple(tuple(own.index(a) for a in axes) for own in (x, w)) for axes in (contract, batch))
    made = [*batch, *(a for a in x if a not in shared), *(a for a in w if a not in shared)]
    return numbers, tuple(made.index(a) for a in out)


def _labels(spec: str, term: str, rank: int) -> Labels:
    letters = len(term.replace("...", ""))
    dots = rank - letters
    if dots < 0 or (dots and "..." not in term):
        raise refuse(
            "einsum", "spec", f"{rank} indices for an operand of rank {rank}", f"{term!r} in {spec!r}", "correct it"
        )
    return _expand(spec, term, list(range(dots - 1, -1, -1)))


def _expand(spec: str, term: str, dots: list[int]) -> Labels:
    head, found, tail = term.partition("...")
    if not all(a.isalpha() for a in (*head, *tail)):
        raise refuse("einsum", "spec", "letters, one ellipsis and one arrow", f"{spec!r}", "see jnp.einsum")
    return [*head, *(dots if found else []), *tail]


def _unsupported(spec: str, reason: str) -> Exception:
    return NotImplementedError(
        f"einsum: {spec!r} is no batched product of two matrices: {reason}. Dequantise w, or rewrite the spec."
    )
