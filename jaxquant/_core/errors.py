"""One shape for every message: operation, operand, expected, got, remedy."""

from __future__ import annotations


def refuse(
    operation: str, operand: str, expected: str, got: str, remedy: str, kind: type[Exception] = ValueError
) -> Exception:
    """The exception to raise when `operand` of `operation` is not what it must be."""
    return kind(f"{operation}: {operand}: expected {expected}, got {got}; {remedy}.")
