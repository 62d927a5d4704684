"""Errors of a device whose memory is not enough: others hold it, or the work is too large."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

import torch

from kagent_sandbox.errors import DeviceFull, KagentError, TaskError

MOST_SHARE = 0.95
"""Share of the device's memory that one request can ever have: contexts and libraries lie there."""
_TRIED = re.compile(r"Tried to allocate ([0-9.]+) (B|bytes|KiB|MiB|GiB)")
_NO_MEMORY = re.compile(
    r"(CUDA error|\[CUDA\]): out of memory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|CU[A-Z]+_STATUS_\w*ALLOC\w*_FAILED|CUFFT_ALLOC_FAILED"
    r"|nvmlInit_v2_\(\) INTERNAL ASSERT FAILED"
    r"|\bOutOfMemoryError: (?!out of resource)"
)
"""Texts of errors of the driver's and of CUDA's libraries, which torch raises as others. The one of
NVML is its allocator's: without memory it asks NVML who has it, which a confined process cannot.
The last one is torch's compiler's, about an error that it met, unless that is about the shared
memory of a kernel: Triton's, under the same name."""
_UNITS = {"B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of a device, in bytes.

    Attributes:
        total: All of it.
        free: Left for everybody.
        kept: Of this process, now.
        peak: Of this process at most, since the request began, without its arena.
        arena: Of its arena, which candidates' plans work in.
    """

    total: int
    free: int
    kept: int
    peak: int
    arena: int = 0


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that memory of the device was not enough."""
    if isinstance(error, DeviceFull | torch.OutOfMemoryError):
        return True
    return isinstance(error, Exception) and _NO_MEMORY.search(str(error)) is not None


def begin_request(device: torch.device) -> int:
    """Begin to count the most memory that a request has at a time; bytes that this process has."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def shared_lack(error: Exception, device: torch.device, had_bytes: int) -> DeviceFull | None:
    """The error of a baseline that may run with the memory that others hold; None of any other.

    Args:
        error: What the baseline raised.
        device: Where it ran.
        had_bytes: What this process had when the baseline began (`begin_request`).
    """
    if not lacks_memory(error):
        return None
    use = memory_use(device)
    own = None if use is None else replace(use, peak=use.peak - had_bytes)
    found = explain(error, own, alone=True)
    return found if isinstance(found, DeviceFull) else None


def memory_use(device: torch.device, arena_bytes: int = 0) -> MemoryUse | None:
    """Memory of the device now; None of one that has no memory of its own."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) + arena_bytes
    return MemoryUse(total, free, kept, torch.cuda.max_memory_allocated(device), arena_bytes)


def total_bytes(device: torch.device) -> int:
    """Memory of a device: the host's where it has none of its own."""
    use = memory_use(device)
    if use is not None:
        return use.total
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def explain(
    error: Exception, use: MemoryUse | None, *, alone: bool, arena_bytes: int = 0
) -> KagentError:
    """The error to report where memory was not enough.

    Args:
        error: torch's or the driver's, or one that has its text.
        use: Memory of the device.
        alone: Whether no other process works on the device: what others keep between their turns is
            still there.
        arena_bytes: What of an arena is the task's: its inputs and results. The rest is scratch
            memory of a candidate, and no fault of the task.

    Returns:
        `TaskError` where the request alone is more than the whole device; else `DeviceFull`, which
        is nobody's fault.
    """
    if use is None:
        return error if isinstance(error, KagentError) else DeviceFull(_first_line(error))
    needed = use.peak + tried_bytes(str(error))
    of_task = needed + arena_bytes
    if alone and of_task > MOST_SHARE * use.total:
        return TaskError(
            f"{_first_line(error)} It needs {_gib(of_task)} at once, and the device has "
            f"{_gib(use.total)} in all: expected smaller cases, or a reference that keeps less"
        )
    others = max(0, use.total - use.free - use.kept)
    return DeviceFull(
        f"{_first_line(error)} Needed at once {_gib(needed + use.arena)}; {_gib(use.free)} of "
        f"{_gib(use.total)} are free, {_gib(others)} are held by other processes and launchers"
    )


def _first_line(error: Exception) -> str:
    """Its first sentences, without torch's list of all processes."""
    text = " ".join(str(error).split())
    found = _TRIED.search(text)
    return (text if found is None else text[: found.end()]).rstrip(".") + "."


def tried_bytes(text: str) -> int:
    """Bytes that an error says could not be had; 0 where it does not say."""
    found = _TRIED.search(text)
    return 0 if found is None else int(float(found[1]) * _UNITS[found[2]])


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
