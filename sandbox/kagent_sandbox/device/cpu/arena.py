"""Memory that the judge and a CPU launcher both map: a sealed anonymous file."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

import torch

from kagent_sandbox.data.plan import TensorRef
from kagent_sandbox.device.plan_ops import as_words, strided_view
from kagent_sandbox.errors import MachineError

_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_POPULATE_WRITE = 23  # madvise: fault all pages in now


def map_arena(fd: int, nbytes: int) -> mmap.mmap:
    """Map an arena, in large pages where the host offers them for shared memory."""
    memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def populate(memory: mmap.mmap, start: int, stop: int) -> None:
    """Have this process's page tables hold a range of bytes, which lies in the arena."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    if first < stop:
        with contextlib.suppress(OSError):  # Linux before 5.14: pages come at the first touch
            memory.madvise(_POPULATE_WRITE, first, stop - first)


class CpuArena:
    """Shared memory of a sealed size: a truncation would kill the judge by SIGBUS.

    Zero-filled at first. `fd` is what a launcher is given.
    """

    def __init__(self, nbytes: int) -> None:
        page = mmap.PAGESIZE
        self.nbytes = max(page, -(-nbytes // page) * page)
        self.fd = os.memfd_create("kagent-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.nbytes)
            seals = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self._map = map_arena(self.fd, self.nbytes)
        except OSError as e:
            os.close(self.fd)
            raise MachineError(f"no shared memory of {self.nbytes >> 20} MiB: {e}") from None
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def view(self, tensor: TensorRef, base: int) -> torch.Tensor:
        """The judge's own view of a plan's tensor whose buffer starts at byte `base`.

        Raises:
            PlanError: The view leaves the arena or is not aligned.
        """
        return strided_view(self._memory, tensor, base)

    def bytes(self, start: int, stop: int) -> torch.Tensor:
        """uint8 view of a range of bytes."""
        return self._memory[start:stop]

    def words(self, nbytes: int) -> torch.Tensor:
        """All of it as integers of 1, 2, 4 or 8 bytes."""
        return as_words(self._memory, nbytes)

    def close(self) -> None:
        """Give the memory back, once the last view of it is gone."""
        if self.fd < 0:
            return
        del self._memory
        with contextlib.suppress(BufferError):  # a view is alive: unmapped with it
            self._map.close()
        os.close(self.fd)
        self.fd = -1
