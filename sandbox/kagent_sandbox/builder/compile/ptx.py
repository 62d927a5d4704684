"""PTX of a candidate's kernels, kept while it is built for somebody who wants to read it.

Compilers make it on the way to machine code and nobody else needs it: it is not part of a build
otherwise. In the builder's child only. What is kept there is a candidate's own word, as all that
its process says: it is for reading, and nothing is decided by it.
"""

from __future__ import annotations

from kagent_sandbox.builder.binary.inspect import kernel_info

MAX_TEXT_BYTES = 8 << 20
"""Most bytes of one kernel's text; a longer text is cut. Unrolled kernels have about one MiB."""

_kept: dict[str, bytes] | None = None  # by the kernel's hash, as in a plan


def start() -> None:
    """Keep what is compiled from now on, here and in forks."""
    global _kept
    _kept = {}


def keep(binary: bytes, symbol: str, written_in: str, text: str) -> None:
    """Keep a kernel's PTX, if somebody wants it."""
    if _kept is not None and text:
        key = kernel_info(binary, symbol, written_in).hash
        _kept[key] = text.encode(errors="replace")[:MAX_TEXT_BYTES]


def taken() -> dict[str, bytes]:
    """Return the texts that were kept since the last call."""
    global _kept
    found = _kept or {}
    if found:
        _kept = {}
    return found
