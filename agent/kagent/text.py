"""Numbers and names as short text."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

from kagent_sandbox.data.compiled import Loop, Remark, loop_text
from kagent_sandbox.data.verdict import CaseTiming

_BUILTIN = {"f": "float", "d": "double", "i": "int", "j": "unsigned", "l": "long", "m": "size_t"}


def human_bytes(count: float) -> str:
    """Bytes with a binary unit: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 100 or count == int(count) else f"{count:.1f} {unit}"


def plural(count: int, noun: str) -> str:
    """'1 launch', '3 launches'."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"


def range_text(low: float, high: float) -> str:
    """An interval of a ratio: '1.003–1.036'."""
    return f"{low:.3f}–{high:.3f}"


def interval_text(ratio: float, low: float, high: float) -> str:
    """A measured ratio with its interval: '1.019× (95 %: 1.003–1.036)'."""
    return f"{ratio:.3f}× (95 %: {range_text(low, high)})"


def ms_text(us: float) -> str:
    """A kernel's time, without its unit: 12.34 µs -> '0.0123'."""
    return f"{us / 1e3:.4f}"


def rate_text(timing: CaseTiming, *, matrix: bool) -> str:
    """A kernel's rate, without its unit: TFLOP/s of a matrix product, else GB/s."""
    return f"{timing.tflop_per_s:.1f}" if matrix else f"{timing.gb_per_s:.0f}"


def local_time() -> str:
    """The time now, local, ISO 8601: '2026-11-29T18:00:00+0000'."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def config_text(config: Mapping[str, object]) -> str:
    """'BLOCK=1024 NUM_WARPS=8', or 'as written' when there is nothing to choose."""
    return " ".join(f"{k}={v}" for k, v in config.items()) or "as written"


def short(text: str, most: int) -> str:
    """The first words of a text, on one line of at most `most` characters."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    start = line[: most - 1]
    return f"{start.rpartition(' ')[0] or start}…"


def widths_text(widths: Mapping[int, int]) -> str:
    """Global load instructions by width: '16 B ×4, 4 B ×1'."""
    return ", ".join(f"{w} B ×{n}" for w, n in sorted(widths.items(), reverse=True)) or "–"


def kernel_label(symbol: str) -> str:
    """A kernel's name as its source has it: 'rows<__half, 8>' for '_Z4rowsI6__halfLi8EEvPKT_'.

    Of mangled names it knows what kernels are named like: a function, perhaps of a template over
    types and numbers. Others stay as they are.
    """
    found = re.match(r"_Z(\d+)", symbol)
    if found is None:
        return symbol
    rest = symbol[found.end() :]
    name, rest = rest[: int(found[1])], rest[int(found[1]) :]
    if not rest.startswith("I"):
        return name
    rest, arguments = rest[1:], []
    while rest and not rest.startswith("E"):
        if found := re.match(r"L[a-z](n?\d+)E", rest):
            arguments.append(found[1].replace("n", "-"))
        elif found := re.match(r"\d+", rest):
            size = int(found[0])
            arguments.append(rest[found.end() : found.end() + size])
            rest = rest[size:]
        elif found := re.match(r"[fdijlm]", rest):
            arguments.append(_BUILTIN[found[0]])
        else:
            return symbol
        rest = rest[found.end() :]
    return f"{name}<{', '.join(arguments)}>"


def remark_lines(remarks: Sequence[Remark]) -> list[str]:
    """Messages of compilers, a line or two each: "rows: line 12: warning: ..."."""
    return [f"{r.kernel}: {r.text}" if r.kernel else r.text for r in remarks]


def loop_lines(loops: Sequence[Loop], most: int | None = None) -> list[str]:
    """A line per loop, of which `most` are shown: "rows at 0x4590: 464 instructions; ...".

    Where a kernel was compiled several times, the line names the binary as tables of kernels do.
    """
    shown = loops if most is None else loops[:most]
    binaries: dict[str, set[str]] = {}
    for loop in loops:
        binaries.setdefault(loop.kernel, set()).add(loop.binary)
    lines = []
    for loop in shown:
        which = f" {loop.binary[:8]}" if len(binaries[loop.kernel]) > 1 else ""
        where = f"{kernel_label(loop.kernel)}{which} at {loop.first:#x}{_place(loop)}"
        lines.append(f"{where}: {loop_text(loop)}")
    left = len(loops) - len(shown)
    return [*lines, f"and {left} further loops"] if left else lines


def _place(loop: Loop) -> str:
    return "" if loop.innermost else " (around other loops)"
