"""Text for prompts: numbers in few characters, tables, and quotations that cannot break out."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from kagent_sandbox.runtime.text import printable

ELLIPSIS = "…"
_MARKS = str.maketrans("“”", '""')
_PAUSE = re.compile(r"[.;:,](?=\s)")


def one_line(text: str, limit: int) -> str:
    """Put a text on one line, with every character visible, in at most `limit` characters."""
    flat = _flat(text)
    return flat if len(flat) <= limit else flat[: limit - 1].rstrip() + ELLIPSIS


def _flat(text: str) -> str:
    return printable(" ".join(text.split()))


def cut_at_a_pause(text: str, limit: int) -> str:
    """Shorten as `one_line` does, but end at the last sentence or clause that fits, if that leaves
    half of the limit.
    """
    flat = _flat(text)
    if len(flat) <= limit:
        return flat
    pauses = [m.end() for m in _PAUSE.finditer(flat[:limit])]
    if not pauses or pauses[-1] < limit // 2:
        return one_line(flat, limit)
    kept = flat[: pauses[-1]]
    return kept if kept.endswith(".") else kept[:-1] + ELLIPSIS


def quoted(text: str, limit: int) -> str:
    """Quote somebody else's text as data: one line between marks that it cannot close itself, cut
    at a pause. Empty where there is no text.
    """
    flat = cut_at_a_pause(text.translate(_MARKS), limit)
    return f"“{flat}”" if flat else ""


def clipped(text: str, lines: int, width: int = 200) -> str:
    """The first lines of a text; what is left out is said."""
    all_lines = printable(text.expandtabs(4)).rstrip("\n").split("\n")
    kept = [x if len(x) <= width else x[: width - 1] + ELLIPSIS for x in all_lines[:lines]]
    left = len(all_lines) - len(kept)
    return "\n".join([*kept, f"[{left} more lines]"] if left > 0 else kept)


def fenced(text: str, info: str = "text") -> str:
    """A fenced block that holds the text whatever it contains: the fence is longer than any in it,
    and every character can be seen.
    """
    text = printable(text)
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    body = text.rstrip("\n")
    return f"{fence}{info}\n{body}\n{fence}"


def microseconds(us: float) -> str:
    """Three or four digits: 21.2, 353, 1,130."""
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def ratio(value: float) -> str:
    """A speed-up: '1.234×'; a dash where there is none."""
    return f"{value:.3f}×" if math.isfinite(value) and value > 0 else "–"


def amount(value: float, unit: str) -> str:
    """Format with a decimal prefix: 67.1 MB, 4.40 TFLOP."""
    if value <= 0:
        return f"0 {unit}"
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def kib(count: int) -> str:
    """Bytes of shared memory or of spills: '0', '96 B', '33 KiB'."""
    if count == 0:
        return "0"
    return f"{count} B" if count < 1024 else f"{count / 1024:.4g} KiB"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. Columns that are empty in every row are left out."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [
        [head[i] for i in kept],
        ["---"] * len(kept),
        *([row[i] for i in kept] for row in rows),
    ]
    return "\n".join("| " + " | ".join(cell or "–" for cell in line) + " |" for line in lines)
