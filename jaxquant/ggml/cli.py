"""``python -m jaxquant gguf`` shows a GGUF file; ``python -m jaxquant quantize`` writes one in another format."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxquant.ggml import conversion
from jaxquant.ggml.gguf import GGUFFile, GGUFTensor, load_gguf


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, or 2 after one line about bad input."""
    parsed = _parser().parse_args(arguments)
    try:
        import rich  # noqa: F401

        parsed.run(parsed)
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 0
    except ModuleNotFoundError as error:
        return _fail(f"{error.name} is not installed; pip install 'jaxquant[gguf]'")
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        return _fail(str(error))
    return 0


def _fail(message: str) -> int:
    print("jaxquant: " + printable(" ".join(message.split())), file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxquant", description="Without a command: what is installed.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("gguf", help="shows the tensors and metadata of a GGUF file")
    show.add_argument("file")
    show.set_defaults(run=lambda parsed: show_file(load_gguf(parsed.file)))

    convert = commands.add_parser(
        "quantize",
        help="quantises the weights of a GGUF or safetensors file",
        description="Quantises the weights of two or more dimensions to one format, like llama-quantize --pure. Norms, "
        "routers, position embeddings and other small tensors are kept, those of one dimension as F32. Rows that the "
        "format's blocks do not divide take its fallback, then F16.",
    )
    convert.add_argument("input", help="GGUF or safetensors; told from its first bytes")
    convert.add_argument("output", help="the GGUF file to write; appears only when it is complete")
    convert.add_argument("--format", required=True, help="Q4_K, IQ4_XS, ... (see jaxquant.ggml.formats)")
    convert.add_argument("--imatrix", metavar="FILE", help="importance matrix, GGUF or .dat")
    convert.add_argument(
        "--tensor-format", metavar="REGEX=FORMAT", action="append", default=[],
        help="another format for the weights whose name REGEX matches; may be repeated, the last match counts",
    )  # fmt: skip
    convert.add_argument("--requantize", action="store_true", help="accept weights that are quantised already")
    convert.set_defaults(run=_quantize)
    return parser


def printable(text: str) -> str:
    """Names come from files: no control characters, no halves of surrogate pairs."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _console(**options: Any) -> Any:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, **options)
    # Redirected output is not cut to a terminal's width.
    return console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=200, **options)


def _table(title: str, *columns: str) -> Any:
    """Columns are flush left, those whose name begins with ">" flush right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column[0] == ">" else "left", overflow="fold")
    return table


def show_file(file: GGUFFile) -> None:
    """Prints metadata, tensors, and totals per format."""
    metadata = _table("metadata", "key", "type", "value")
    for key, value in file.metadata.items():
        metadata.add_row(printable(key), file.metadata.types[key], _short(value))

    tensors = _table("tensors", "name", ">shape", "format", ">bytes", ">bits per weight")
    values, sizes, count = Counter(), Counter(), Counter()
    for name, tensor in file.items():
        nbytes, size = _nbytes(tensor), int(np.prod(tensor.shape, dtype=object))
        bits = "?" if nbytes is None else _bits(nbytes, size)
        tensors.add_row(
            printable(name), _shape(tensor.shape), tensor.type_name, "?" if nbytes is None else f"{nbytes:,}", bits
        )
        count[tensor.type_name] += 1
        values[tensor.type_name] += size
        sizes[tensor.type_name] += nbytes or 0

    totals = _table("totals", "format", ">tensors", ">values", ">bytes", ">bits per weight")
    for name, nbytes in sizes.most_common():
        totals.add_row(name, f"{count[name]}", f"{values[name]:,}", f"{nbytes:,}", _bits(nbytes, values[name]))
    all_values, all_bytes = sum(values.values()), sum(sizes.values())
    totals.add_row("all", f"{len(file)}", f"{all_values:,}", f"{all_bytes:,}", _bits(all_bytes, all_values))

    console = _console()
    console.print(printable(f"{file.path}: GGUF version {file.version}, {len(file)} tensors"))
    for table in (metadata, tensors, totals):
        console.print(table)


def _nbytes(tensor: GGUFTensor) -> int | None:
    try:
        return tensor.nbytes
    except ValueError:  # of an unknown type
        return None


def _bits(nbytes: int, size: int) -> str:
    return f"{8 * nbytes / size:.4g}" if size else "-"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _short(value: Any) -> str:
    if isinstance(value, (list, np.ndarray)):
        shown = ", ".join(str(item) for item in value[:4])
        return _short(f"{shown}{', ...' if len(value) > 4 else ''}  ({len(value)})")
    text = printable(str(value))
    return text if len(text) <= 72 else text[:69] + "..."


def _quantize(parsed: argparse.Namespace) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    overrides = [tuple(item.rsplit("=", 1)) if "=" in item else (item, "") for item in parsed.tensor_format]
    plan = conversion.plan(
        parsed.input, parsed.format, imatrix=parsed.imatrix, overrides=overrides, requantize=parsed.requantize
    )
    messages = _console(stderr=True)
    for note in plan.notes:
        messages.print(printable(note))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=messages) as progress:
        task = progress.add_task("", total=len(plan.outputs))

        def show(name: str) -> None:
            progress.update(task, description=f"{printable(name):40}", advance=1)

        errors = plan.write(parsed.output, show)
    _show_errors(parsed.output, plan, errors)


def _show_errors(path: str, plan: conversion.Plan, errors: Sequence[conversion.Error]) -> None:
    table = _table("errors, the largest relative first", "name", ">shape", "from", "to", ">RMSE", ">RMSE / RMS")
    for error in sorted(errors, key=lambda error: -error.relative):
        output = plan.outputs[error.name]
        table.add_row(
            printable(error.name), _shape(output.shape), error.source, output.type_name, f"{error.rmse:.4e}",
            f"{error.relative:.4e}",
        )  # fmt: skip
    console = _console()
    if errors:
        console.print(table)
        total = conversion.total(errors)
        console.print(f"all quantised weights: RMSE {total.rmse:.4e}, RMSE / RMS {total.relative:.4e}")
    values = sum(int(np.prod(o.shape, dtype=object)) for o in plan.outputs.values())
    nbytes = sum(o.nbytes for o in plan.outputs.values())
    console.print(
        printable(
            f"{path}: {len(plan.outputs)} tensors, {len(errors)} quantised, {nbytes:,} bytes, "
            f"{_bits(nbytes, values)} bits per weight"
        )
    )
