"""Messages of compilers, caught while they compile and kept until a plan is sent.

In the builder's child only. It is the candidate's process's own word: for reading, and nothing is
decided by it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from kagent_sandbox.data.compiled import MOST_NAME_CHARS, MOST_REMARK_CHARS, MOST_REMARKS
from kagent_sandbox.runtime.compiling import with_line

_MOST_BYTES = 1 << 20
_CUDA = re.compile(
    r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?P<text>(?:warning|remark)(?: #\S+)?: .*)$"
)
_PTXAS = re.compile(r"^ptxas (?:[^;:]*; )?(?P<level>info|warning)\s*: (?P<text>.*)$")
_FUNCTION = re.compile(r"^Function properties for (?P<name>\S+)")
_SPILLS = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
_MLIR = re.compile(r"^(?P<file>[^\n:]+):(?P<line>\d+):\d+: (?P<text>(?:warning|remark|error): .*)$")
_STATISTICS = re.compile(rb"ptxas |\s+\d+ bytes stack frame|ptxas\s+\.")
_PLAIN = re.compile(r"^(?:warning|remark|error): .*$")

_kept: list[tuple[str, str]] = []


def keep(kernel: str, texts: list[str]) -> None:
    """Keep remarks on a kernel, as far as there is room."""
    for text in texts:
        remark = kernel[:MOST_NAME_CHARS], text[:MOST_REMARK_CHARS]
        if remark not in _kept and len(_kept) < MOST_REMARKS:
            _kept.append(remark)


def taken() -> list[tuple[str, str]]:
    """Return the remarks since the last call."""
    found = _kept.copy()
    _kept.clear()
    return found


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Catch what this process and its compilers print; the list has it, as one text, afterwards.

    The process's log gets it all the same, but for the statistics that ptxas prints of each kernel.
    """
    found: list[str] = []
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        before = os.dup(1), os.dup(2)
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield found
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for to, fd in enumerate(before, 1):
                os.dup2(fd, to)
                os.close(fd)
            file.seek(0)
            text = file.read(_MOST_BYTES)
            found.append(text.decode(errors="replace"))
            said = [n for n in text.splitlines(keepends=True) if not _STATISTICS.match(n)]
            if any(map(bytes.strip, said)):
                with contextlib.suppress(OSError):  # nobody reads the log
                    os.write(2, b"".join(said))


def of_cuda(log: str, source: str) -> list[str]:
    """Remarks in NVRTC's log, with lines of the kernel's source.

    Args:
        log: Of a compile that succeeded.
        source: The kernel's source.
    """
    found = []
    for line in log.splitlines():
        if (m := _CUDA.match(line)) is not None:
            inside = m["file"].rpartition("/")[2]
            ours = inside == "kernel.cu"
            text = m["text"]
            found.append(
                with_line(source, int(m["line"]), text)
                if ours
                else f"in {inside} line {m['line']}: {text}"
            )
    return [*found, *of_ptxas(log)]


def of_ptxas(log: str) -> list[str]:
    """Warnings and numbered remarks of ptxas, and spills by function; not its plain statistics."""
    found = []
    function = ""
    for line in log.splitlines():
        m = _PTXAS.match(line)
        if m is not None and (named := _FUNCTION.match(m["text"])) is not None:
            function = named["name"]
        elif m is not None and (m["level"] == "warning" or m["text"].startswith("(C")):
            found.append(f"ptxas: {m['text']}")
        elif (s := _SPILLS.search(line)) is not None and (int(s["stores"]) or int(s["loads"])):
            found.append(f"ptxas: {function} spills: {s[0]}")
    return found


def of_triton(printed: str) -> list[str]:
    """Remarks in what Triton's compiler prints, ptxas's among them. A line is that of the file."""
    found = []
    for line in printed.splitlines():
        if (m := _MLIR.match(line)) is not None:
            known = m["line"] != "0" and not m["file"].startswith("<")
            found.append(f"line {m['line']}: {m['text']}" if known else m["text"])
        elif _PLAIN.match(line):
            found.append(line)
    return [*found, *of_ptxas(printed)]
