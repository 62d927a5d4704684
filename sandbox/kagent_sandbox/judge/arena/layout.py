"""Layout of a plan's buffers in an arena, with the guard bands around them.

Inputs come first, then results in their order, then all else. So the results of plans that are
compared lie in the same places, and no plan puts scratch memory of its own where a rival's result
lies. One whose result is a part of a larger buffer still can.

A freed buffer's slot is reused only by a buffer of exactly its size, as chunked host code makes
them. So no guard band is ever inside of another buffer, and every one must be intact after any run.

Guarded: writes that leave their buffer by less than a guard band. Not guarded: a stray write that
lands inside of another buffer of the same plan (it shows as a wrong result or a changed input), and
stray reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kagent_sandbox.data.plan import Alloc, Free, Plan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kagent_sandbox.data.plan import Plan

ALIGN = 512  # bytes: torch's allocator aligns to 512, TMA needs 128
GUARD = 4096  # bytes after (and before) every buffer


@dataclass(frozen=True, slots=True)
class Layout:
    """One placement of one plan: byte offsets into the arena.

    `guards` are ranges that nobody may write. `scratch` are the slots of everything but the inputs.
    """

    offsets: Mapping[int, int]
    guards: tuple[tuple[int, int], ...]
    scratch: tuple[tuple[int, int], ...]
    start: int
    stop: int


def lay_out(
    plan: Plan, start: int = 0, *, align: int = ALIGN, guard: int = GUARD, beyond: int = 0
) -> Layout:
    """Lay out the buffers of a plan, with guard bands between them.

    Args:
        plan: The plan.
        start: First byte in the arena.
        align: Alignment of buffers in bytes.
        guard: Bytes of a guard band.
        beyond: Bytes from a multiple of `align` to where buffers begin.
    """
    size = {b.id: b.nbytes for b in plan.buffers}
    offsets: dict[int, int] = {}
    guards: list[tuple[int, int]] = []
    scratch: list[tuple[int, int]] = []
    free: dict[int, list[int]] = {}
    end = start

    def new_slot(nbytes: int) -> int:
        nonlocal end
        at = _round_up(end + guard, align) + beyond
        guards.append((end, at))
        end = at + nbytes
        return at

    for buffer in plan.buffers:
        if buffer.kind == "input":
            offsets[buffer.id] = new_slot(buffer.nbytes)
    for buffer_id in dict.fromkeys(t.buffer for t in plan.outputs):
        if buffer_id not in offsets:  # else an input that is written in place
            at = offsets[buffer_id] = new_slot(size[buffer_id])
            scratch.append((at, at + size[buffer_id]))
    for op in plan.ops:
        if isinstance(op, Alloc) and op.buffer not in offsets:
            nbytes = size[op.buffer]
            slots = free.get(nbytes)
            if slots:
                offsets[op.buffer] = slots.pop()
            else:
                at = offsets[op.buffer] = new_slot(nbytes)
                scratch.append((at, at + nbytes))
        elif isinstance(op, Free):
            free.setdefault(size[op.buffer], []).append(offsets[op.buffer])
    stop = _round_up(end + guard, align)
    guards.append((end, stop))
    return Layout(offsets, tuple(guards), tuple(scratch), start, stop)


def lay_out_many(
    plan: Plan, count: int, pitch: int | None = None, *, beyond: int = 0
) -> list[Layout]:
    """Lay out several placements of one plan.

    Plans that are compared get one pitch and so the same addresses: the place of buffers makes 0.7
    % at 28 µs, and 0.8 % at 800 µs on an H100.

    Args:
        plan: The plan.
        count: Number of placements.
        pitch: Bytes from one placement to the next; by default they touch.
        beyond: See `lay_out`, of all placements but the first.

    Raises:
        ValueError: The pitch is too small for the plan.
    """
    size = lay_out(plan, beyond=beyond).stop
    pitch = size if pitch is None else pitch
    if pitch < size or pitch % ALIGN:
        raise ValueError(f"a pitch of {pitch} bytes for placements of {size}")
    return [lay_out(plan, i * pitch, beyond=beyond if i else 0) for i in range(count)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def pitch_of(plans: Iterable[Plan], *, beyond: int = 0) -> int:
    """Bytes from one placement to the next that suit all of the plans."""
    return max(lay_out(p, beyond=beyond).stop for p in plans)
