"""Imports that a C++ kernel's library may have: C, C++ and OpenMP, and neither torch nor Python.

A launcher has torch and a Python in its process, and native code that finds them by name could have
torch do the work: a call to torch is not a kernel, whatever language it is written in.

This reads the tables that a compiler writes. It keeps honest searches honest, and is no boundary:
machine code can look for functions in memory without a name. What it does to its own process then
is contained by the confinement, and shows in a file that nobody would ship.
"""

from __future__ import annotations

import re
import struct

from kagent_sandbox.builder.binary.elf import Elf, read_elf

_SHT_DYNAMIC = 6
_DT_NEEDED = 1
_LIBRARIES = re.compile(
    r"(libc|libm|libgomp|libstdc\+\+|libgcc_s|libmvec|libpthread|libdl|librt|ld-linux[\w-]*)\.so[.\d]*"
)
_LOADER = re.compile(r"dl(open|mopen|sym|vsym)$|__libc_dl")
_UNREADABLE = re.compile(
    r"(mallopt|s?rand(om|48)?|[deljmn]rand48|initstate|setstate|lcong48|seed48|on_exit)$"
)
"""They set what a process has once, and nobody can read: no look at it afterwards finds them. A
random number is the caller's next one, and a function that `on_exit` takes is called at the end of
the process, when its library may be gone.
"""
_FOREIGN = re.compile(
    r"_?Py[A-Z_]|_ZN?K?(2at|3c10|5torch|6caffe2)|aoti_|(cblas|mkl|LAPACKE|dnnl|openblas)_|[sdcz]gemm_?$"
)


def forbidden_import(binary: bytes) -> str | None:
    """The first thing that a library imports and may not, as a message names it; None if none.

    Raises:
        ElfError: It is no library.
    """
    elf = read_elf(binary)
    for symbol in elf.undefined:
        name = symbol.partition("@")[0]
        if _LOADER.match(name):
            return f"{name}, which finds other libraries' functions"
        if _UNREADABLE.match(name):
            return f"{name}, which changes its caller's allocator, random numbers or end"
        if _FOREIGN.match(name):
            return f"{name}, which is not a kernel's own work"
    for name in _needed(elf):
        if not _LIBRARIES.fullmatch(name):
            return f"the library {name}"
    return None


def _needed(elf: Elf) -> list[str]:
    """Libraries that the loader is told to load with it."""
    found = []
    for section in elf.sections:
        if section.type != _SHT_DYNAMIC or section.link >= len(elf.sections):
            continue
        strings = elf.sections[section.link].data
        whole = section.data[: len(section.data) // 16 * 16]
        for tag, value in struct.iter_unpack("<QQ", whole):
            if tag == _DT_NEEDED:
                found.append(
                    strings[value : value + 4096].partition(b"\0")[0].decode(errors="replace")
                )
    return found
