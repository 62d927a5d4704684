"""Loops of a kernel, from its machine code as nvdisasm prints it. Pure text in, records out.

A loop is a natural loop of the control flow: all that reaches a back edge without leaving through
the loop's first instruction. Code that the compiler put out of line belongs to the loop that it
returns to. Functions that were not inlined have sections of their own and are not looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kagent_sandbox.data.compiled import MOST_LOOPS, Loop

MOST_INSTRUCTIONS = 100_000
"""Longer kernels have no report: unrolled ones have some ten thousand."""
_MOST_BLOCKS = 2000
_MOST_WAITS = 12

_INSTRUCTION = re.compile(
    r"^\s+/\*(?P<at>[0-9a-f]{4,8})\*/\s+(?:\{\s*)?(?P<guard>@!?U?P\w+\s+)?(?P<name>[A-Z][\w.]*)"
    r"(?P<operands>[^;]*);",
)
_LABEL = re.compile(r"^(?P<name>\.L_x_\d+):")
_TARGET = re.compile(r"`\((?P<name>\.L_x_\d+)\)")
_ENDS = ("EXIT", "RET", "KILL", "BRX", "JMX")
_WAITS = ("WARPGROUP.DEPBAR", "DEPBAR", "BAR.SYNC", "BAR.RED", "UCGABAR_WAIT")
_BARRIERS = ("BAR", "UCGABAR_ARV")

# Results per clock and multiprocessor for 32-bit operations: CUDA C++ Programming Guide,
# "Throughput of Native Arithmetic Instructions".
_FP32 = ("FFMA", "FADD", "FMUL")
_ALU = ("IADD3", "LOP3", "SHF", "ISETP", "FSETP", "FMNMX", "IMNMX")
_RESULTS = {
    80: {"FP32": 64, "ALU": 64, "MUFU": 16},
    90: {"FP32": 128, "ALU": 64, "MUFU": 16},
}
_TENSOR_FMA = {80: 1024, 90: 2048}  # 16-bit products with sums per clock and multiprocessor
_SCHEDULERS = 4  # of a multiprocessor
_LANES = 32
_SHARED_BYTES = 128  # per clock and multiprocessor: 32 banks of 4 bytes

_ACCESSES = ("LDG", "STG", "LDGSTS", "LDS", "STS", "LDL", "STL", "LDSM", "STSM", "RED", "ATOMG")
_COUNTED = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "DMMA", "MUFU", "FFMA", "FADD", "FMUL")
_BULK = ("UTMALDG", "UTMASTG", "UTMAREDG", "UTMAPF", "UBLKCP", "UBLKRED", "UBLKPF")
_WIDTH = re.compile(r"\.(?:U?(8|16)|S(8|16)|(64|128|256))(?=\.|$)")
_WGMMA_SHAPE = re.compile(r"\.(\d{1,3})x(\d{1,3})x(\d{1,3})(?=\.|$)")
_MMA_SHAPES = {"16816": 2048, "1688": 1024, "1684": 512, "16832": 4096, "16864": 8192}


@dataclass(frozen=True, slots=True)
class _Instruction:
    at: int
    name: str
    operands: str
    guarded: bool

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]

    @property
    def target(self) -> str | None:
        found = _TARGET.search(self.operands)
        return found["name"] if found is not None else None


def loops(text: str, symbol: str, capability: int) -> tuple[Loop, ...]:
    """Loops of a kernel, those first that need the most clocks by themselves.

    What is counted of a loop is its own: how often a loop in it runs is not known from the code. A
    loop that only tries again until something has come (a barrier in memory, registers) is part of
    the loop around it, and is not listed.

    The clocks of `Loop.clocks` are a bound from below, for a multiprocessor whose four schedulers
    have such a warp each: a scheduler issues one instruction per clock ("issue"); a pipe takes 32
    lanes x 4 schedulers / results per clock for an instruction (CUDA C++ Programming Guide, 8.0 and
    9.0: "FP32", "ALU", "MUFU"); shared memory moves 128 bytes per clock; the tensor cores make
    1024 (8.0: A100's data sheet) or 2048 (9.0: H100's) 16-bit products with their sums per clock,
    8-bit ones twice as fast and tf32 half as fast. n warps on a scheduler need n times as long. For
    other architectures only "issue" is given.

    Args:
        text: Output of `nvdisasm --print-code`.
        symbol: The kernel.
        capability: Of the target: 80, 90, 100.

    Returns:
        At most `MOST_LOOPS`. Nothing for a kernel of more than `MOST_INSTRUCTIONS`.
    """
    code, labels = _section(text, symbol)
    if not code or len(code) > MOST_INSTRUCTIONS:
        return ()
    starts, after = _blocks(code, labels)
    if len(starts) > _MOST_BLOCKS:
        return ()
    ends = [*starts[1:], len(code)]

    def inside(blocks: set[int]) -> list[_Instruction]:
        return [i for b in sorted(blocks) for i in code[starts[b] : ends[b]]]

    bodies = {h: b for h, b in _natural_loops(after).items() if not _only_waits(inside(b))}
    found = []
    for head, body in bodies.items():
        depth = sum(head in other for h, other in bodies.items() if h != head)
        within = [other for h, other in bodies.items() if h != head and h in body]
        own = inside(body.difference(*within))
        first = code[starts[head]].at
        found.append(_describe(own, first, symbol, depth, not within, capability))
    found.sort(key=lambda loop: (-max(loop.clocks.values()), loop.first))
    return tuple(found[:MOST_LOOPS])


def _only_waits(code: Sequence[_Instruction]) -> bool:
    """Whether a loop does nothing but try again."""
    return any("TRY" in i.name for i in code) and not any(map(_kind, code))


def _section(text: str, symbol: str) -> tuple[list[_Instruction], dict[str, int]]:
    """Instructions of a kernel, and the index of the one at each label."""
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    inside = False
    for line in text.splitlines():
        if line.startswith(".text."):
            inside = line == f".text.{symbol}:"
        elif line.lstrip().startswith(".section"):
            inside = False
        elif inside and (label := _LABEL.match(line)):
            labels[label["name"]] = len(code)
        elif inside and (found := _INSTRUCTION.match(line)):
            guarded = found["guard"] is not None
            at = int(found["at"], 16)
            code.append(_Instruction(at, found["name"], found["operands"].strip(), guarded))
    return code, labels


def _blocks(
    code: Sequence[_Instruction], labels: Mapping[str, int]
) -> tuple[list[int], list[list[int]]]:
    """Index of each basic block's first instruction, and the blocks that follow each."""
    heads = {0, *(i for i in labels.values() if i < len(code))}
    for index, each in enumerate(code[:-1]):
        if each.target is not None or each.base in _ENDS:
            heads.add(index + 1)
    starts = sorted(heads)
    number = {start: block for block, start in enumerate(starts)}
    after = []
    for end in [*starts[1:], len(code)]:
        last = code[end - 1]
        follows = set[int]()
        branches = last.base in ("BRA", "CALL", "JMP")
        if branches and last.target is not None and (to := labels.get(last.target)) in number:
            follows.add(number[to])
        # `BRA P0, `(label)` and `BRA.DIV` go on where the condition does not hold
        always = not last.guarded and last.operands.startswith("`(") and ".DIV" not in last.name
        leaves = (last.base in ("BRA", "JMP") and always) or (
            last.base in _ENDS and not last.guarded
        )
        if not leaves and end in number:
            follows.add(number[end])
        after.append(sorted(follows))
    return starts, after


def _natural_loops(after: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Blocks of each loop by its first block."""
    order = _in_order(after)
    place = {block: i for i, block in enumerate(order)}
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for to in after[block]:
            before[to].append(block)
    above = _dominators(order, place, before)
    found: dict[int, set[int]] = {}
    for block in order:
        for head in after[block]:
            if not _dominates(head, block, above):
                continue
            body = found.setdefault(head, {head})
            waiting = [block]
            while waiting:
                each = waiting.pop()
                if each not in body:
                    body.add(each)
                    waiting += before[each]
    return found


def _in_order(after: Sequence[Sequence[int]]) -> list[int]:
    """Blocks that can be reached, each before those that it leads to (reverse postorder)."""
    seen, done = {0}, list[int]()
    waiting = [(0, iter(after[0]))]
    while waiting:
        block, rest = waiting[-1]
        to = next((t for t in rest if t not in seen), None)
        if to is None:
            done.append(block)
            waiting.pop()
        else:
            seen.add(to)
            waiting.append((to, iter(after[to])))
    return done[::-1]


def _dominators(
    order: Sequence[int], place: Mapping[int, int], before: Mapping[int, Sequence[int]]
) -> dict[int, int]:
    """The closest block that every way to a block leads through (Cooper, Harvey, Kennedy 2001)."""
    above = {order[0]: order[0]}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [b for b in before[block] if b in above]
            one = known[0]
            for other in known[1:]:
                while one != other:
                    if place[one] > place[other]:
                        one = above[one]
                    else:
                        other = above[other]
            if above.get(block) != one:
                above[block] = one
                changed = True
    return above


def _dominates(head: int, block: int, above: Mapping[int, int]) -> bool:
    while block not in (head, above[block]):
        block = above[block]
    return block == head


# -- one loop ------------------------------------------------------------------------------------


def _describe(
    code: Sequence[_Instruction],
    first: int,
    symbol: str,
    depth: int,
    innermost: bool,
    capability: int,
) -> Loop:
    counts = Counter(kind for i in code if (kind := _kind(i)))
    return Loop(
        kernel=symbol,
        first=first,
        depth=depth,
        innermost=innermost,
        instructions=len(code),
        counts=dict(sorted(counts.items())),
        barriers=sum(i.base in _BARRIERS for i in code),
        between_waits=_between_waits(code),
        clocks=_clocks(code, capability),
    )


def _kind(each: _Instruction) -> str:
    if each.base in _COUNTED:
        return each.base
    if each.base in _ACCESSES:
        return f"{each.base} {_bytes(each)}"
    return "TMA" if each.base in _BULK else ""


def _bytes(each: _Instruction) -> int:
    """Bytes that a thread moves; of LDSM and STSM a quarter of what eight rows of 16 bytes hold."""
    if each.base in ("LDSM", "STSM"):
        return 4 * int(each.name[-1]) if each.name[-1] in "24" else 4
    found = _WIDTH.findall(each.name)
    bits = [int(n) for groups in found for n in groups if n]
    return bits[-1] // 8 if bits else 4


def _between_waits(code: Sequence[_Instruction]) -> tuple[int, ...]:
    """Instructions between the waits: for products, bulk copies, barriers."""
    waits = [i for i, each in enumerate(code) if _waits(each)]
    if not waits:
        return ()
    gaps = [b - a - 1 for a, b in pairwise(waits)]
    return (*gaps, len(code) - waits[-1] - 1 + waits[0])[-_MOST_WAITS:]


def _waits(each: _Instruction) -> bool:
    return each.name.startswith(_WAITS) or (each.base == "SYNCS" and "TRYWAIT" in each.name)


def _clocks(code: Sequence[_Instruction], capability: int) -> dict[str, float]:
    """See `loops`."""
    found = {"issue": float(len(code))}
    results = _RESULTS.get(capability)
    if results is None:
        return found
    per_clock = {
        pipe: _LANES * _SCHEDULERS / n for pipe, n in results.items()
    }  # clocks of an instruction
    for pipe, names in (("FP32", _FP32), ("ALU", _ALU), ("MUFU", ("MUFU",))):
        found[pipe] = per_clock[pipe] * sum(i.base in names for i in code)
    shared = sum(_bytes(i) for i in code if i.base in ("LDS", "STS", "LDSM", "STSM"))
    found["shared memory"] = shared * _LANES * _SCHEDULERS / _SHARED_BYTES
    found["tensor cores"] = sum(map(_products, code)) / _TENSOR_FMA[capability]
    return {pipe: round(clocks, 1) for pipe, clocks in found.items() if clocks}


def _products(each: _Instruction) -> float:
    """16-bit products of four warps, one per scheduler: of one HGMMA, of four HMMA."""
    rate = 0.5 if each.base in ("QGMMA", "IGMMA", "IMMA") else 2.0 if ".TF32" in each.name else 1.0
    if each.base in ("HGMMA", "QGMMA", "IGMMA"):
        shape = _WGMMA_SHAPE.search(each.name)
        return rate * int(shape[1]) * int(shape[2]) * int(shape[3]) if shape else 0.0
    if each.base in ("HMMA", "IMMA"):
        sizes = [s for part in each.name.split(".") if (s := _MMA_SHAPES.get(part))]
        return rate * _SCHEDULERS * sizes[0] if sizes else 0.0
    return 0.0
