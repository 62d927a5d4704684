"""Storage of compiled kernels: beside the package, and in a folder of the user's.

Beside the package are `cubins/` (CUDA, shipped for the devices that were measured) and `binaries/`
(C++, compiled when the package was installed). What is compiled later goes into the user's cache
folder, and is private to the user. Names hold all that a binary depends on, so that a package or a
home that moves to another machine is no danger: there, nothing is found.

Needs the standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .cpp import RECIPE, compile_cpp, compiler
from .source import Source

_PACKAGE = Path(__file__).resolve().parent.parent
CUBINS = _PACKAGE / "cubins"
LIBRARIES = _PACKAGE / "binaries"
_FOLDER = "kagent-kernels"


def compile_ahead(sources: Iterable[Source], folder: Path = LIBRARIES) -> list[Path]:
    """Compile C++ sources for this machine into `folder`, where they are looked for first.

    Raises:
        KernelUnavailable: There is no g++.
        CompileError: A source was refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for source in sources:
        if source.language != "cpp":
            continue
        binary = compile_cpp(source.name, source.text, source.options, dict(source.defines))
        path = folder / shipped_library(source).name
        if write(path, binary):
            made.append(path)
    return made


def shipped_library(source: Source) -> Path:
    """Return the path where `compile_ahead` leaves a library that this processor can run."""
    return LIBRARIES / f"{source.key('cpu')}-{processor()}.so"


def kept_library(source: Source) -> Path | None:
    """Return the path of this user's library of a source; None where nothing can be kept.

    Raises:
        KernelUnavailable: There is no g++, which is part of the name.
    """
    folder = cache_folder()
    if folder is None:
        return None
    recipe = hashlib.sha256(repr(RECIPE).encode()).hexdigest()[:8]  # other versions have another
    return folder / f"{source.key('cpu')}-{processor()}-{_compiler_version()}-{recipe}.so"


def shipped_cubin(source: Source, target: str) -> Path:
    """Return the path of a cubin that came with the package, if there is one for this target."""
    return CUBINS / f"{source.key(target)}.cubin"


def kept_cubin(source: Source, target: str, compiler_version: str) -> Path | None:
    """Return the path of this user's cubin of a source; None where nothing can be kept."""
    folder = cache_folder()
    return folder and folder / f"{source.key(target)}-{compiler_version}.cubin"


def packed_cubin(cubin: bytes, symbol: str) -> bytes:
    """A cubin file that says which of its kernels is meant: the symbol follows the last zero byte,
    where tools that read cubins do not look.
    """
    return cubin + b"\0" + symbol.encode()


def unpacked_cubin(data: bytes) -> tuple[bytes, str]:
    """A cubin and its symbol, from what `packed_cubin` made."""
    cubin, _, symbol = data.rpartition(b"\0")
    return cubin, symbol.decode()


def read(path: Path | None) -> bytes | None:
    """A file's bytes, or None where there is none."""
    if path is not None:
        with contextlib.suppress(OSError):
            return path.read_bytes()
    return None


def write(path: Path | None, data: bytes) -> bool:
    """Write a file so that no one ever sees half of it; whether that worked (the disk is full)."""
    if path is None:
        return False
    try:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        return False
    return True


def cache_folder() -> Path | None:
    """The user's folder for compiled kernels, made if need be; None where it cannot be had, or
    where others could write to it: what lies there is loaded into the process.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base, _FOLDER)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    own = found.st_uid == os.geteuid()
    shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if own and not shared and os.access(folder, os.W_OK) else None


@functools.cache
def processor() -> str:
    """Hash the processor's features, which `-march=native` depends on."""
    features = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
        features = " ".join(sorted(found[1].split())) if found else text
    return hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:16]


@functools.cache
def _compiler_version() -> str:
    command = [compiler(), "-dumpfullversion", "-dumpversion"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return re.sub(r"[^\w.]", "", done.stdout) or "unknown"
