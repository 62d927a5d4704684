"""Profiles of candidates in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kagent.runs.profiles import KernelProfile, Profile

if TYPE_CHECKING:
    from kagent.prompting.hardware import Hardware

MOST_IDLE = 2.0  # percent; other work of the tensor pipe makes about 1 without any product
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS: Mapping[str, str] = {
    "long_scoreboard": "waiting for global or local memory",
    "short_scoreboard": "waiting for shared memory or special functions",
    "barrier": "waiting at a barrier of the block",
    "mio_throttle": "the queue of memory instructions is full",
    "lg_throttle": "the queue of global and local accesses is full",
    "math_pipe_throttle": "an arithmetic pipe is busy",
    "wait": "a fixed latency of the instruction before",
    "not_selected": "ready, another warp was issued",
    "no_instruction": "instructions were not fetched yet",
    "membar": "waiting at a memory fence",
    "drain": "waiting for stores at the end",
    "sleeping": "asleep",
    "dispatch_stall": "the dispatcher is held up",
    "imc_miss": "a constant is not in its cache",
    "tex_throttle": "the texture queue is full",
    "branch_resolving": "waiting for a branch",
    "gmma": "waiting for a warp-group product",
}
"""Reasons for which a warp that could not issue had to wait, as ncu calls them."""


def in_words(kernel: KernelProfile, hardware: Hardware) -> list[str]:
    """Describe a profile as a kernel engineer would, the most important finding first."""
    lines = [*_measured_words(kernel, hardware)] if kernel.counters else []
    limits = " and ".join(kernel.limited_by)
    lines.append(
        f"{kernel.blocks_per_unit} blocks on a multiprocessor, {kernel.occupancy:.0%} occupancy, "
        f"limited by {limits}; {kernel.waves:.2f} waves"
    )
    if 1 < kernel.waves < 4 and kernel.waves % 1 and kernel.waves % 1 < 0.5:
        lines.append(
            f"the last wave fills {kernel.waves % 1:.0%} of the device: a tail of "
            f"{(1 - kernel.waves % 1) / math.ceil(kernel.waves):.0%} of its time"
        )
    if kernel.spill_bytes:
        lines.append(f"spills {kernel.spill_bytes} bytes a thread to local memory")
    widths = {int(w): n for w, n in kernel.load_bytes.items() if n}
    if widths and max(widths) < 16:
        lines.append(f"loads at most {max(widths)} bytes at once: 16 would take fewer instructions")
    return lines


def _measured_words(kernel: KernelProfile, hardware: Hardware) -> Iterator[str]:
    c = kernel.counters
    us = c.get("gpu__time_duration.sum")
    moved = c.get("dram__bytes_read.sum", 0.0) + c.get("dram__bytes_write.sum", 0.0)
    if us:
        rate = moved / us / 1e3
        text = f"{us:.1f} µs; DRAM {moved / 1e6:.1f} MB at {rate:.0f} GB/s"
        peak = hardware.theoretical_gb_per_s
        yield f"{text}, {rate / peak:.0%} of {peak:.0f}" if peak else text
    stalls = {r: c.get(STALL.format(r), 0.0) for r in STALLS}
    total = sum(stalls.values())
    worst = sorted(stalls, key=lambda r: -stalls[r])[:3]
    if total:
        named = ", ".join(f"{STALLS[r]} {stalls[r] / total:.0%}" for r in worst if stalls[r] > 0)
        yield f"warps wait: {named}"
    active = c.get("sm__warps_active.avg.pct_of_peak_sustained_active")
    if active is not None:
        yield f"{active:.0f} % of the warps that fit were there on average"
    tensor = c.get("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active")
    if c.get("sm__inst_executed_pipe_tensor.sum") and tensor is not None and tensor >= MOST_IDLE:
        yield f"tensor cores busy {tensor:.0f} % of the time"
    hit = c.get("lts__t_sector_hit_rate.pct")
    if hit is not None:
        yield f"{hit:.0f} % of the accesses to L2 hit"
    conflicts = c.get("l1tex__data_bank_conflicts_pipe_lsu.sum")
    if conflicts:
        yield f"{conflicts:,.0f} bank conflicts in shared memory"


def profile_lines(profile: Profile, hardware: Hardware) -> list[str]:
    """A profile in plain lines: the case, then each launch."""
    without = f", without counters: {profile.why_static}" if profile.why_static else ""
    lines = [f"on {profile.case}, {profile.device}{without}"]
    for kernel in profile.kernels:
        lines += [f"  {kernel.kernel}", *(f"    {line}" for line in in_words(kernel, hardware))]
    return lines
