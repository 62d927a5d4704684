"""Memory that a kernel's binary itself has: static and global variables.

All calls share it, and callers are not one after the other: threads call a C++ library at once, and
streams run a CUDA kernel at once. A workspace there is silently wrong then. It is also memory that
no plan has, so that nobody counts it. What a kernel may share are locks, counters, guards of lazy
initialisation and small tables.
"""

from __future__ import annotations

import struct

from kagent_sandbox.builder.binary.elf import (
    EM_CUDA,
    SHF_ALLOC,
    SHF_TLS,
    SHF_WRITE,
    Elf,
    ElfError,
    Section,
    read_elf,
)

MOST_SHARED_BYTES = 16 << 10
"""Most bytes that all calls may share. The loader's own tables take 400 bytes of a C++ library, and
4 KiB of one with regular expressions and streams. CUDA's mathematical functions have tables of some
hundred bytes, and what `printf` and `assert` say is there.
"""
MOST_THREAD_BYTES = 256 << 10
"""Most bytes of `thread_local` variables: a tile that a thread keeps in its own cache."""
_PT_LOAD, _PT_TLS, _PF_WRITE = 1, 7, 2
_MOST_SEGMENTS = 256


def excess_static(binary: bytes, kernel: str) -> tuple[str, str] | None:
    """Describe static memory that a cubin or a library has too much of, and say what to do instead.

    Args:
        binary: What a launcher would load.
        kernel: Name of the kernel, for the text.

    Returns:
        None if there is no such memory.

    Raises:
        ElfError: It cannot be read.
    """
    elf = read_elf(binary)
    shared, per_thread = _cubin_bytes(elf) if elf.machine == EM_CUDA else _library_bytes(binary)
    if shared > MOST_SHARED_BYTES:
        return (
            f"kernel {kernel} has {shared} bytes of static memory{_most_in(elf, tls=False)}, and "
            f"may have {MOST_SHARED_BYTES}: two calls at once would share it",
            "allocate a workspace with torch.empty in the host function and pass it, and make "
            f"tables {'__constant__' if elf.machine == EM_CUDA else 'constexpr'}",
        )
    if per_thread > MOST_THREAD_BYTES:
        return (
            f"kernel {kernel} has {per_thread} bytes of thread_local memory"
            f"{_most_in(elf, tls=True)}, and may have {MOST_THREAD_BYTES}: every thread that ever "
            "calls it keeps as much",
            "allocate a workspace with torch.empty in the host function and pass it",
        )
    return None


def _cubin_bytes(elf: Elf) -> tuple[int, int]:
    """Bytes of a module's own global memory."""
    return sum(s.size for s in elf.sections if _is_global(s)), 0


def _is_global(section: Section) -> bool:
    """Whether a cubin's section is memory of the device that all launches share."""
    if section.name.startswith(".nv.global"):
        return True
    own = section.flags & SHF_ALLOC and section.flags & SHF_WRITE
    return bool(own) and not section.name.startswith((".nv.shared", ".nv.local"))


def _library_bytes(binary: bytes) -> tuple[int, int]:
    """Bytes that the loader maps writable, once and for each thread. Segments say it: the loader
    does not read sections.

    Raises:
        ElfError: The table of segments is malformed.
    """
    (start,) = struct.unpack_from("<Q", binary, 32)
    entry_bytes, count = struct.unpack_from("<HH", binary, 54)
    if not count:
        return 0, 0
    if entry_bytes != 56 or count > _MOST_SEGMENTS or start + 56 * count > len(binary):
        raise ElfError("malformed table of segments")
    shared = per_thread = 0
    for n in range(count):
        kind, flags, _, _, _, _, nbytes, _ = struct.unpack_from("<IIQQQQQQ", binary, start + 56 * n)
        if kind == _PT_LOAD and flags & _PF_WRITE:
            shared += nbytes
        elif kind == _PT_TLS:
            per_thread += nbytes
    return shared, per_thread


def _most_in(elf: Elf, *, tls: bool) -> str:
    """The largest section of that kind, as a text goes on with it."""
    found = [
        s for s in elf.sections if s.flags & SHF_WRITE and bool(s.flags & SHF_TLS) == tls and s.size
    ]
    if elf.machine == EM_CUDA:
        found = [s for s in found if _is_global(s)]
    most = max(found, key=lambda s: s.size, default=None)
    return f" ({most.size} of them in section {most.name:.80})" if most else ""
