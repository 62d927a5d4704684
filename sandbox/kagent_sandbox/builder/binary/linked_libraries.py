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
_SURROUNDINGS = re.compile(
    r"_*(((secure_)?get|put|set|unset|clear)env|environ|program_invocation(_short)?_name|progname"
    r"(_full)?|time|clock|clock_(gettime|getres|nanosleep)|gettimeofday|timespec_get|f?times?"
    r"|getrusage|(u|nano)?sleep|omp_get_wti(me|ck)|get([pt]|pp|e?[ug]|res[ug]|s|pg)id|getpgrp"
    r"|getgroups|prctl|syscall|ptrace|kill|getrandom|getentropy|arc4random(_buf|_uniform)?|uname"
    r"|gethostname|getlogin(_r)?|getpw(uid|nam)(_r)?|open(at)?|creat|f(re)?open|popen|opendir"
    r"|f?access(at)?|euidaccess|readlink(at)?|realpath|getcwd|get_current_dir_name"
    r"|f?[lx]*stat(at|x|v?fs)?|shm_open|socket|connect|isatty|ttyname(_r)?|dl_iterate_phdr|dladdr"
    r"|v?fork|posix_spawnp?|system|exec[vl]p?e?)(64)?(_2|_chk)?$"
)
"""Functions and variables of C that tell a judge from a user: environment, clocks, ids, chance,
names and files. The same in C++:
"""
_SURROUNDINGS_CPP = re.compile(
    r"_ZNK?St(6chrono|13random_device|10filesystem|(13basic_filebuf|14basic_[io]fstream"
    r"|13basic_fstream))"
)


def asked_of_surroundings(binary: bytes) -> str | None:
    """The first import by which a C++ kernel's library can tell where, when and by whom it is
    called; None if it has none.

    Raises:
        ElfError: It is no library.
    """
    for symbol in read_elf(binary).undefined:
        name = symbol.partition("@")[0]
        if _SURROUNDINGS.match(name) or _SURROUNDINGS_CPP.match(name):
            return name
    return None


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
