#!/usr/bin/env python3
"""What the compiler made of the CUDA kernels: checks machine code for what they promise, and predicts their speed.

    python tools/cuda_report.py [--arch 90]... [--ptx] [--objects build/cuda] [--jobs 2]

Compiles ffi/*/*/cuda.cu for each architecture (and, with --ptx, for the PTX that ships), disassembles, and walks
the loops that move 16 bytes at a time. Fails when one of a kernel on float32, float16 or bfloat16

  - moves fewer than 16 bytes a load, or a store, on the side of its wider type,
  - goes through a call (the compiler's division has one; it must be outside the hot loop),
  - touches local memory, anywhere in the kernel: spilled registers.

The same holds for the dequantisation of block formats, with loads of 8 bytes where 1024 values are no multiple of 16
bytes (the path shown writes float32). Their quantisers keep blocks in local memory; registers and stacks are listed.

No kernel of the block products may touch local memory. Listed are the products of up to four activations for the
formats that go straight into fragments, with the loads of WEIGHT_LOADS.

For the table: instructions of a loop per element, and the fraction of the memory bandwidth of an H200 that is left if
every scheduler issues an instruction each cycle. Registers tell how many threads fit (65536 a multiprocessor).

Needs nvcc, cuobjdump and nvdisasm: from a CUDA toolkit, or pip's nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted(ROOT.glob("ffi/**/cuda.cu"))
# As in cmake/cuda.cmake.
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", f"-I{ROOT}"]

# An H200: copy bandwidth as measured, and lane instructions a second.
BANDWIDTH = 4.3e12
ISSUE_RATE = 132 * 1.98e9 * 128

SIZES = {"float": 4, "double": 8, "Float16": 2, "BFloat16": 2}
SIZES |= {"Code8": 1, "Code16": 2, "Packed<4>": 0.5, "Packed<2>": 0.25}


def find_tool(name: str) -> str:
    """A program of the toolkit: on the PATH, in /usr/local/cuda, or in pip's packages of this interpreter."""
    candidates = [shutil.which(name), f"/usr/local/cuda/bin/{name}"]
    if (spec := importlib.util.find_spec("nvidia")) is not None:
        candidates += [f"{path}/cu13/bin/{name}" for path in spec.submodule_search_locations or ()]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    sys.exit(f"cuda_report: {name} not found; install a CUDA toolkit, or pip's nvidia-cuda-{name}.")


# ---- Machine code ----


@dataclasses.dataclass
class Instruction:
    address: int
    text: str
    target: int | None = None  # of a branch or call
    calls: bool = False

    @property
    def opcode(self) -> str:
        words = self.text.split()
        return words[1] if words[0].startswith("@") else words[0]

    @property
    def predicated(self) -> bool:
        return self.text.startswith("@") or "," in self.text.split(self.opcode, 1)[1]


@dataclasses.dataclass
class Kernel:
    name: str
    arguments: list[str]
    code: list[Instruction]
    registers: int
    stack: int
    label: str

    @property
    def real(self) -> str:
        return self.arguments[1] if len(self.arguments) > 1 else self.arguments[0] if self.arguments else ""


def is_subroutine(code: list[Instruction], target: int | None) -> bool:
    """Whether a call's target returns. ptxas also leaves loops by CALL.REL.NOINC to a label of the same function, up to
    sm_89; subroutines stand after the last EXIT of the kernel, and end in RET."""
    for instruction in code:
        if target is None or instruction.address >= target:
            if instruction.opcode.startswith("RET"):
                return True
            if instruction.opcode.startswith("EXIT") and not instruction.predicated:
                return False
    return True


def template_arguments(text: str) -> list[str]:
    arguments, depth, current = [], 0, ""
    for character in text:
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "," and depth == 0:
            arguments.append(current.strip())
            current = ""
        else:
            current += character
    return [*arguments, current.strip()] if current.strip() else arguments


def read_kernels(object_file: pathlib.Path, arch: str, tools: dict[str, str]) -> list[Kernel]:
    environment = {**os.environ, "PATH": os.pathsep.join([os.path.dirname(tools["nvdisasm"]), os.environ["PATH"]])}

    def dump(option: str) -> str:
        command = [tools["cuobjdump"], option, "-arch", f"sm_{arch}", str(object_file)]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout

    usage = {
        name: (int(registers), int(stack))
        for name, registers, stack in re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", dump("-res-usage"))
    }
    code: dict[str, list[Instruction]] = {}
    lines: list[Instruction] = []
    for line in dump("-sass").splitlines():
        if found := re.search(r"Function : (\S+)", line):
            lines = code.setdefault(found[1], [])
        elif found := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line):
            instruction = Instruction(int(found[1], 16), found[2])
            if instruction.opcode.startswith(("BRA", "BREAK", "JMP", "CALL")):
                targets = re.findall(r"0x[0-9a-f]+", instruction.text)
                instruction.target = int(targets[-1], 16) if targets else None
            lines.append(instruction)
    for lines in code.values():
        for instruction in lines:
            instruction.calls = instruction.opcode.startswith("CALL") and is_subroutine(lines, instruction.target)
    names = subprocess.run(["c++filt"], input="\n".join(code), check=True, capture_output=True, text=True).stdout
    kernels = []
    for mangled, name in zip(code, names.splitlines(), strict=True):
        name = re.sub(r"jq::|ggml::|\(anonymous namespace\)::", "", name).replace("> >", ">>")
        found = re.match(r"(?:void )?(\w+)(?:<(.*?)>)?\((?!.*\)<)", name)
        if not found:
            continue
        arguments = template_arguments(found[2] or "")
        label = ", ".join(arguments).replace("ValueOf<", "value<").replace("GradientOf<", "gradient<")
        label = f"{found[1]}<{label}>" if arguments else found[1]
        kernels.append(Kernel(found[1], arguments, code[mangled], *usage[mangled], label))
    return kernels


# ---- Loops ----


@dataclasses.dataclass
class Path:
    """The way through a loop with the most loads and stores and, among those, the fewest instructions."""

    instructions: list[Instruction]

    def accesses(self, kind: str) -> list[int]:
        """Bytes of each load ("LDG") or store ("STG")."""
        widths = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1, "8": 1}
        prefixes = (kind, f"{kind[:2]}.E")
        found = [i.opcode for i in self.instructions if i.opcode.startswith(prefixes) and moves_elements(i)]
        return [next((widths[part] for part in opcode.split(".") if part in widths), 4) for opcode in found]

    @property
    def calls(self) -> int:
        return sum(i.calls for i in self.instructions)


def moves_elements(instruction: Instruction) -> bool:
    """Not scales and zero points, which are read through the constant path. LD.E and ST.E: the generic forms, which
    ptxas falls back to where it has lost track of the address space."""
    return instruction.opcode.startswith(("LDG", "STG", "LD.E", "ST.E")) and "CONSTANT" not in instruction.opcode


def wide(instruction: Instruction) -> bool:
    return moves_elements(instruction) and (".128" in instruction.opcode or ".256" in instruction.opcode)


def best_path(
    code: list[Instruction], first: int, last: int, counts: Callable[[Instruction], bool] = moves_elements
) -> Path:
    """From code[first] to code[last], forward branches only: what counts most, in the fewest instructions."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    best: dict[int, tuple[int, int]] = {last: (counts(code[last]), -1)}
    following: dict[int, int] = {}
    for i in range(last - 1, first - 1, -1):
        instruction = code[i]
        ways = []
        jump = index.get(instruction.target) if instruction.target is not None and not instruction.calls else None
        if jump is not None and i < jump <= last:
            ways.append(jump)
        leaves = instruction.opcode.startswith(("EXIT", "RET")) or jump is not None
        if not leaves or instruction.predicated:
            ways.append(i + 1)
        ways = [way for way in ways if way in best]
        if not ways:
            continue
        following[i] = max(ways, key=lambda way: best[way])
        accesses, negative_length = best[following[i]]
        best[i] = (accesses + counts(instruction), negative_length - 1)
    path, i = [], first
    while i in best:
        path.append(code[i])
        if i == last:
            break
        i = following[i]
    return Path(path)


def hot_loops(kernel: Kernel) -> list[Path]:
    """Loops with 16-byte accesses that hold no other such loop; what takes the fewest instructions a byte first."""
    index = {instruction.address: i for i, instruction in enumerate(kernel.code)}
    spans = []
    for i, instruction in enumerate(kernel.code):
        if not instruction.calls and instruction.target is not None and instruction.target < instruction.address:
            start = index[instruction.target]
            if any(wide(each) for each in kernel.code[start : i + 1]):
                spans.append((start, i))
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    paths = [best_path(kernel.code, *span) for span in inner]
    return sorted(
        (path for path in paths if sum(path.accesses("STG"))),
        key=lambda path: len(path.instructions) / sum(path.accesses("STG")),
    )


# ---- The report ----

LOOPS = {"VectorMap": ("one scale", "runs", "crossing runs"), "ColumnMap": ("columns",), "RowGradient": ("rows",),
         "ColumnGradient": ("columns",), "PackKernel": ("",), "UnpackKernel": ("",)}  # fmt: skip


@dataclasses.dataclass
class Traffic:
    """Bytes of an element: read in all, and of the operand and the result."""

    read: float
    x: float
    out: float


def traffic(kernel: Kernel) -> Traffic:
    if kernel.name == "PackKernel":
        return Traffic(1, 1, int(kernel.arguments[0]) / 8)
    if kernel.name == "UnpackKernel":
        return Traffic(int(kernel.arguments[0]) / 8, int(kernel.arguments[0]) / 8, 1)
    x = SIZES[kernel.arguments[2]]
    if kernel.name.endswith("Gradient"):
        return Traffic(2 * x, x, x)
    out = SIZES[kernel.arguments[3]]
    return Traffic(2 * x if kernel.arguments[0].startswith("GradientOf") else x, x, out)


def examine(kernel: Kernel) -> tuple[list[str], list[str]]:
    """Lines of the table, and what is wrong."""
    rows, wrong = [], []
    strict = kernel.real != "double"
    size = traffic(kernel)
    if strict and any(i.opcode.startswith(("LDL", "STL")) for i in kernel.code):
        wrong.append("spills registers")
    names = LOOPS[kernel.name]
    loops = hot_loops(kernel)
    if len(loops) != len(names):
        wrong.append(f"{len(loops)} loops with 16-byte accesses, expected {len(names)}")
    for name, loop in zip(names, loops, strict=False):
        elements = sum(loop.accesses("STG")) / size.out
        narrow_loads = [n for n in loop.accesses("LDG") if n < 16] if size.x >= size.out else []
        narrow_stores = [n for n in loop.accesses("STG") if n < 16] if size.out >= size.x else []
        if strict and (narrow_loads or narrow_stores):
            wrong.append(f"{name}: loads of {narrow_loads} and stores of {narrow_stores} bytes")
        if strict and loop.calls:
            wrong.append(f"{name}: {loop.calls} calls")
        each = len(loop.instructions) / elements
        by_memory = BANDWIDTH / (size.read + size.out)
        by_issue = ISSUE_RATE / each
        loads = "+".join(map(str, sorted(set(loop.accesses("LDG")))))
        stores = "+".join(map(str, sorted(set(loop.accesses("STG")))))
        share = min(1.0, by_issue / by_memory)
        rows.append(
            f"{kernel.label:<66} {name:<14} {kernel.registers:>4} {loads:>5} {stores:>6} {elements:>5.0f} {each:>7.1f} "
            f"{size.read + size.out:>6.2f} {by_memory * each / ISSUE_RATE:>6.0%} {share * BANDWIDTH / 1e12:>6.2f}"
        )
    return rows, [f"{kernel.label}: {text}" for text in wrong]


# ---- Block formats

TILE = 1024  # values of a warp, 32 of each thread: ffi/ggml/codec/cuda.cu


def block_formats() -> dict[str, tuple[int, int]]:
    """Name -> values and bytes of a block."""
    text = (ROOT / "ffi/ggml/formats.h").read_text()
    values = dict(re.findall(r"struct (\w+) {\s+static constexpr int kId = \d+, kBlock = (\w+);", text))
    sizes = {"F32": 4, "F16": 2, "BF16": 2} | {n: int(b) for n, b in re.findall(r"sizeof\((\w+)\) == (\d+)", text)}
    return {name: (256 if count == "kSuper" else int(count), sizes[name]) for name, count in values.items()}


def works(instruction: Instruction) -> bool:
    """What the way of a whole, aligned tile to float32 has most of."""
    if instruction.opcode.startswith(("LDG", "STG", "LD.E", "ST.E", "LDS", "STS")):
        return bool({"64", "128", "256"} & set(instruction.opcode.split(".")))
    return instruction.opcode.startswith(("FMUL", "I2F"))


def examine_blocks(kernel: Kernel, formats: dict[str, tuple[int, int]]) -> tuple[list[str], list[str]]:
    if kernel.name == "QuantizeKernel":
        return [f"{kernel.label:<66} {f'stack {kernel.stack}':<14} {kernel.registers:>4}"], []
    values, size = formats[kernel.arguments[0]]
    wrong = []
    if kernel.stack or any(i.opcode.startswith(("LDL", "STL")) for i in kernel.code):
        wrong.append("uses local memory")
    index = {instruction.address: i for i, instruction in enumerate(kernel.code)}
    spans = [
        (index[i.target], index[i.address])
        for i in kernel.code
        if i.target is not None and not i.calls and i.target < i.address
    ]
    path = best_path(kernel.code, *max(spans, key=lambda span: span[1] - span[0]), works)
    # Ids and tables are read in other pieces.
    loads = [n for n in path.accesses("LDG") if n >= 8]
    stores = path.accesses("STG")
    wide = 16 if TILE // values * size % 16 == 0 else 8
    if sum(loads) * 32 < TILE // values * size or min(loads, default=0) < wide:
        wrong.append(f"loads of {loads} bytes, expected {wide} for each")
    if stores != [16] * 8:
        wrong.append(f"stores of {stores} bytes, expected 16 for each")
    if path.calls:
        wrong.append(f"{path.calls} calls")
    each, moved = len(path.instructions) / 32, size / values + 4
    by_memory, by_issue = BANDWIDTH / moved, ISSUE_RATE / each
    row = (
        f"{kernel.label:<66} {'to float32':<14} {kernel.registers:>4} {wide:>5} {16:>6} {32:>5} {each:>7.1f} "
        f"{moved:>6.2f} {by_memory / by_issue:>6.0%} {min(1.0, by_issue / by_memory) * BANDWIDTH / 1e12:>6.2f}"
    )
    return [row], [f"{kernel.label}: {text}" for text in wrong]


# ---- Products of block formats

PRODUCTS = ("MatvecKernel", "MatmulKernel", "ValueKernel", "QuantizeActivationsKernel", "CountKernel", "AddUpKernel",
            "ScatterKernel", "ZeroRowsKernel")  # fmt: skip
# Bytes of a lane's load of weights, and why they are not 16.
WEIGHT_LOADS = {
    "MatvecKernel<Direct>": (4, "a lane's part of a fragment; the warp's lie in a row, 128 bytes"),
    "MatvecKernel<Staged>": (None, "formats of any size and alignment, by the shared decoder"),
    "MatmulKernel": (None, "words, which lanes of eight rows have side by side, or by the shared decoder"),
    "ValueKernel": (None, "by the shared decoder"),
}
FEW_REGISTERS = 64  # bytes
SPAN = 16 * 32  # weights that a warp multiplies at once: ffi/ggml/linear/cuda_fragments.cuh


def spans_of(code: list[Instruction]) -> float:
    """By the products of tensor cores: rows and columns of weights, 8 activations."""
    shapes = {"8816": 8 * 16, "16816": 16 * 16, "16832": 16 * 32}
    found = (shape for i in code if i.opcode.startswith("IMMA") for shape in shapes if shape in i.opcode.split("."))
    return sum(shapes[shape] for shape in found) / SPAN


def narrow_loads(code: list[Instruction]) -> int:
    opcodes = (i.opcode.split(".") for i in code if i.opcode.startswith("LDG"))
    return sum(bool({"U8", "S8", "U16", "S16"} & set(parts)) for parts in opcodes)


def examine_product(kernel: Kernel, formats: dict[str, tuple[int, int]]) -> tuple[list[str], list[str]]:
    wrong = []
    local = sum(i.opcode.startswith(("LDL", "STL")) for i in kernel.code)
    if kernel.stack or local:
        wrong.append(f"{kernel.label}: uses local memory: {kernel.stack} bytes, {local} accesses")
    if kernel.name == "MatmulKernel" and not any(wide(i) for i in kernel.code):
        wrong.append(f"{kernel.label}: no loads of 16 bytes for activations")
    found = re.match(r"MatvecKernel<Direct<(\w+)>, 4>", kernel.label)
    if not found:
        return [], wrong
    values, size = formats[found[1]]
    index = {instruction.address: i for i, instruction in enumerate(kernel.code)}
    loops = [
        best_path(kernel.code, index[i.target], index[i.address], lambda i: i.opcode.startswith("IMMA")).instructions
        for i in kernel.code
        if i.target is not None and not i.calls and i.target < i.address
    ]
    # Prepared and plain weights have loops of their own. A way with 64 weights to the lane is half a chunk, but counts
    # all of the exchange of sums behind it, about one instruction a weight too many.
    width, _ = WEIGHT_LOADS["MatvecKernel<Direct>"]
    # The scales of two rows may lie alone.
    ways = [path for path in loops if spans_of(path) and narrow_loads(path) <= 2 * spans_of(path)]
    if not ways:
        return [], [*wrong, f"{kernel.label}: no loop with loads of {width} bytes for weights"]
    loop = min(ways, key=lambda path: len(path) / spans_of(path))
    spans = spans_of(loop)
    each, bytes_each = len(loop) / spans / (SPAN / 32), size / values
    by_memory, by_issue = BANDWIDTH / bytes_each, ISSUE_RATE / each
    row = (
        f"{kernel.label:<66} {'1 token':<14} {kernel.registers:>4} {width:>5} {'':>6} {spans * 16:>5.0f} {each:>7.1f} "
        f"{bytes_each:>6.2f} {by_memory / by_issue:>6.0%} {min(1.0, by_issue / by_memory) * BANDWIDTH / 1e12:>6.2f}"
    )
    return [row], wrong


def examine_stack(kernel: Kernel) -> tuple[list[str], list[str]]:
    """Of the kernels whose speed nothing is promised about: local memory, listed up to a few registers' worth."""
    if not kernel.stack:
        return [], []
    row = f"{kernel.label[:66]:<66} {f'stack {kernel.stack}':<14} {kernel.registers:>4}"
    return [row], [f"{kernel.label}: {kernel.stack} bytes of local memory"] if kernel.stack > FEW_REGISTERS else []


def compile_object(source: pathlib.Path, arch: str, ptx: bool, folder: pathlib.Path, nvcc: str) -> pathlib.Path:
    parts = source.relative_to(ROOT / "ffi").parts[:-1]
    target = folder / f"{'_'.join(parts)}_{arch}.o"
    code = f"[sm_{arch},compute_{arch}]" if ptx else f"sm_{arch}"
    command = [
        nvcc,
        *FLAGS,
        f"-ftz={'false' if parts[0] == 'ggml' else 'true'}",
        "-gencode",
        f"arch=compute_{arch},code={code}",
        "-c",
        str(source),
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", metavar="90", help="compute capability; several are allowed")
    parser.add_argument("--ptx", action="store_true", help="compile PTX of the last architecture too")
    parser.add_argument("--objects", type=pathlib.Path, help="a folder with object files (searched for **/cuda.cu.o) "
                        "instead of compiling")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    archs = options.arch or ["90"]
    tools = {name: find_tool(name) for name in ("cuobjdump", "nvdisasm")}
    with tempfile.TemporaryDirectory() as temporary:
        if options.objects:
            objects = [(file, arch) for arch in archs for file in sorted(options.objects.rglob("cuda.cu.o"))]
            if not objects:
                sys.exit(f"cuda_report: no cuda.cu.o under {options.objects}.")
        else:
            nvcc = os.environ.get("CUDACXX") or find_tool("nvcc")
            with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
                # The longest first.
                jobs = [(source, arch) for arch in archs for source in reversed(SOURCES)]
                files = pool.map(
                    lambda job: compile_object(
                        *job, options.ptx and job[1] == archs[-1], pathlib.Path(temporary), nvcc
                    ),
                    jobs,
                )
                objects = list(zip(files, (arch for _, arch in jobs), strict=True))
        wrong, formats = [], block_formats()
        for arch in archs:
            kernels = [k for file, its in objects if its == arch for k in read_kernels(file, arch, tools)]
            if not kernels:
                wrong.append(f"sm_{arch}: no machine code")
                continue
            print(f"\nsm_{arch}: {len(kernels)} kernels")
            print(f"{'kernel':<66} {'loop':<14} regs loads stores  each ins/elt  bytes  issue   TB/s")
            for kernel in sorted(kernels, key=lambda k: k.label):
                if kernel.name in PRODUCTS:
                    rows, problems = examine_product(kernel, formats)
                elif kernel.name in ("DequantizeKernel", "QuantizeKernel"):
                    rows, problems = examine_blocks(kernel, formats)
                elif kernel.name in LOOPS:
                    rows, problems = examine(kernel)
                else:
                    rows, problems = examine_stack(kernel)
                if rows:
                    print("\n".join(rows))
                wrong += [f"sm_{arch}: {problem}" for problem in problems]
    print(
        "\nloads, stores: bytes; each: elements of an iteration; ins/elt: instructions per element; bytes: moved per\n"
        "element; issue: share of an H200's instruction rate that its memory bandwidth needs (100%: all there is);\n"
        f"TB/s: predicted, of {BANDWIDTH / 1e12} measured for a copy."
    )
    if wrong:
        print("\nFAILED\n  " + "\n  ".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
