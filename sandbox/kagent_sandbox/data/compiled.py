"""Messages of compilers about a kernel, and loops of its machine code, for readers and prompts.

Nothing is decided by it. All of it is bounded: `checked_remarks` cuts what a candidate's process
says, `MOST_LOOPS` what is read from machine code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MOST_REMARKS = 16
"""Most remarks of one candidate."""
MOST_REMARK_CHARS = 400
MOST_NAME_CHARS = 200
MOST_LOOPS = 8
"""Most loops of one kernel, those with the most work first."""
MOST_LOOPS_OF_ALL = 24
"""Most loops of all kernels of one candidate."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A compiler's remark on a kernel that it compiled.

    Attributes:
        kernel: The kernel's name in the candidate's file.
        text: The remark. It begins with "line N: " where the compiler names a line: of the file for
            Triton, of the kernel's own source for CUDA.
    """

    kernel: str
    text: str


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of a kernel's machine code.

    Attributes:
        kernel: The symbol of the kernel.
        first: Offset in bytes of its first instruction, as `kagent show --sass` prints it.
        depth: Number of loops around it.
        innermost: Whether no other loop is in it.
        instructions: Its own instructions, without those of loops in it.
        counts: Number of instructions by kind: "HGMMA", "MUFU", "FFMA"; accesses to memory with the
            bytes of a thread: "LDG 16"; "TMA" for bulk copies.
        barriers: Barriers of a block, a group of warps or a cluster.
        between_waits: Instructions from each wait to the next; empty where there is none. The last
            number reaches over the back edge.
        clocks: Clocks of a scheduler that each pipe needs for one iteration of one warp.
        binary: Hash of the kernel's binary.
    """

    kernel: str
    first: int
    depth: int
    innermost: bool
    instructions: int
    counts: Mapping[str, int] = field(default_factory=dict)
    barriers: int = 0
    between_waits: tuple[int, ...] = ()
    clocks: Mapping[str, float] = field(default_factory=dict)
    binary: str = ""


def loop_text(loop: Loop) -> str:
    """A loop in one line.

    Returns:
        "464 instructions; 16 HGMMA, 64 MUFU; 2 barriers; 120, 344 instructions between waits; at
        least 1024 clocks a warp: tensor cores 1024, MUFU 512, issue 464".
    """
    parts = [f"{loop.instructions} instructions"]
    if loop.counts:
        parts.append(", ".join(f"{n} {_kind_text(kind)}" for kind, n in loop.counts.items()))
    if loop.barriers:
        parts.append(f"{loop.barriers} barrier{'s' * (loop.barriers > 1)}")
    if loop.between_waits:
        gaps = ", ".join(map(str, loop.between_waits))
        parts.append(f"{gaps} instructions between waits")
    if loop.clocks:
        pipes = sorted(loop.clocks.items(), key=lambda item: -item[1])
        named = ", ".join(f"{pipe} {clocks:g}" for pipe, clocks in pipes[:4])
        parts.append(f"at least {pipes[0][1]:g} clocks for a warp on each scheduler: {named}")
    return "; ".join(parts)


def _kind_text(kind: str) -> str:
    name, _, nbytes = kind.partition(" ")
    return f"{name} of {nbytes} B" if nbytes else name
