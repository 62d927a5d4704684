"""Memory that the judge and a CPU launcher both map: a sealed anonymous file.

A launcher keeps no descriptor of it. By one, native code could map it a second time, where pages
that were lent to it can be written, and give its pages back to the kernel: these are then missing
from the page tables of all processes, and whoever is timed next pays for their return.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os

import torch

from kagent_sandbox.confine.libc import libc
from kagent_sandbox.data.plan import TensorRef
from kagent_sandbox.device.plan_ops import as_words, strided_view
from kagent_sandbox.errors import MachineError

_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_POPULATE_WRITE = 23  # madvise: fault all pages in now
_MAP_FAILED = ctypes.c_void_p(-1).value

_mmap = libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_int64,
)


def map_arena(fd: int, nbytes: int) -> torch.Tensor:
    """Map an arena until the process ends, and close the descriptor.

    Python's own mapping would keep a copy of it.

    Returns:
        uint8, [nbytes].

    Raises:
        MachineError: There is no room for it.
    """
    access, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
    address = _mmap(None, nbytes, access, shared, fd, 0)
    code = ctypes.get_errno()
    os.close(fd)
    if address == _MAP_FAILED:
        raise MachineError(f"the arena of {nbytes >> 20} MiB is not mapped: {os.strerror(code)}")
    memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    _advise(memory, 0, nbytes, mmap.MADV_HUGEPAGE)
    return memory


def refuse_descriptors() -> None:
    """Make sure that this process has no descriptor of shared memory, before native code is here.

    Raises:
        MachineError: It has one: an error in kagent.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the folder that was listed
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:"):
                raise MachineError(
                    f"internal error: the launcher keeps descriptor {name} of shared memory, by "
                    "which a kernel could reach the pages of others; please report it"
                )


def populate(memory: torch.Tensor, start: int, stop: int) -> None:
    """Have this process's page tables hold a range of bytes of its mapping of the arena."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    if first < stop:  # not on Linux before 5.14: pages come at the first touch
        _advise(memory, first, stop, _POPULATE_WRITE)


def _advise(memory: torch.Tensor, start: int, stop: int, advice: int) -> None:
    """Tell the kernel about a range, in whole pages; it may know nothing of that advice."""
    address, nbytes = memory.data_ptr() + start, stop - start
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


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
            self._map = mmap.mmap(self.fd, self.nbytes)
        except OSError as e:
            os.close(self.fd)
            raise MachineError(f"no shared memory of {self.nbytes >> 20} MiB: {e}") from None
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        _advise(self._memory, 0, self.nbytes, mmap.MADV_HUGEPAGE)

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
