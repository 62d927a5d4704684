"""Confinements of kagent's own roles."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from kagent_sandbox.confine.policy import Confinement, Tier
from kagent_sandbox.data.language import PLUGINS

_PREFIX_FOLDERS = ("bin", "lib", "lib64", "libexec", "include", "share", "targets", "nvvm")
_PACKAGES = ("kagent_sandbox", "torch", "triton", "numpy", "cuda", "nvidia")


def package_folders(*packages: str) -> list[str]:
    """Return the folders of packages, also those outside of the interpreter's own (PYTHONPATH)."""
    paths: list[str] = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            parent = Path(location).parent
            whole = parent.name in {"site-packages", "dist-packages"}
            paths.append(str(parent if whole else location))
    return paths


@functools.cache
def toolchain() -> tuple[str, ...]:
    """Return the paths that every child may read: Python, its packages and compilers.

    Homes, /etc, /run, /var and the working directory are not among them.
    """
    paths = ["/usr", "/lib", "/lib64", "/bin", "/sbin"]
    for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}:
        paths += [os.path.join(prefix, name) for name in _PREFIX_FOLDERS]
        paths.append(os.path.join(prefix, "pyvenv.cfg"))
    paths += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += package_folders(*_PACKAGES, *PLUGINS)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            paths.append(os.environ[variable])
    for compiler in ("g++", "gcc", "cc", "ld", "as", "nvcc"):
        found = shutil.which(compiler)
        if found:
            paths.append(str(Path(found).resolve().parent.parent))
    absolute = {os.path.realpath(p) for p in paths if os.path.isabs(p)}
    # A compiler in /bin has the root folder as its prefix; never hand that out, nor a home.
    refused = {"/", os.path.realpath(os.path.expanduser("~")), "/home", "/root", "/etc", "/var"}
    return tuple(sorted(p for p in absolute if p not in refused and os.path.exists(p)))


def builder_confinement(*, tier: Tier | None = None) -> Confinement:
    """Traces host code and runs compilers: no device, no network. It gives way to launchers."""
    return Confinement(
        read=toolchain(), memory_bytes=8 << 30, cpu_s=300, processes=256, nice=10, tier=tier
    )


def interpreter_confinement(*, tier: Tier | None = None) -> Confinement:
    """Runs kernels in Triton's interpreter: Python and numpy only, no programs."""
    return Confinement(
        read=toolchain(), memory_bytes=8 << 30, cpu_s=3600, nice=10, execute=False, tier=tier
    )


LAUNCHER_DISK_BYTES = 512 << 20
"""Most that native code may write in its folder."""
LAUNCHER_DISK_FILES = 4096
"""Most files that it may make there."""


def cpu_launcher_confinement(
    *, memory_bytes: int = 8 << 30, disk_bytes: int = LAUNCHER_DISK_BYTES, tier: Tier | None = None
) -> Confinement:
    """Runs native code over shared memory that it is given as a descriptor:

    no programs, few files.
    """
    threads = os.cpu_count() or 1
    return Confinement(
        read=toolchain(),
        memory_bytes=memory_bytes,
        cpu_s=3600,
        processes=6 * threads + 32,  # pools of OpenMP and torch, of up to three callers
        file_bytes=256 << 20,
        disk_bytes=disk_bytes,
        disk_files=LAUNCHER_DISK_FILES,
        execute=False,
        tightens=True,  # device.cpu.executor: no new threads once the pools have started
        tier=tier,
    )


def gpu_launcher_confinement(*, tier: Tier | None = None) -> Confinement:
    """Runs plans on a GPU: the context exists before the lock, device code is loaded after it.

    Does not shield the kernel's driver, which the process talks to by ioctl. Arenas open across
    namespaces, by descriptor and by CUDA IPC (H100, driver 580; tests/gpu/try_namespaces.py).
    """
    nodes = [p for p in sorted(Path("/dev").glob("nvidia*")) if not p.is_dir()]
    extra = ("/sys", "/proc/driver", "/proc/devices", "/proc/modules", "/usr/local/nvidia")
    return Confinement(
        read=(*toolchain(), *extra),
        devices=tuple(str(p) for p in nodes),
        memory_bytes=64 << 30,
        cpu_s=7200,
        processes=512,
        files=4096,
        open_files=16_384,
        file_bytes=64 << 30,
        execute=False,
        memfd=True,
        tier=tier,
    )
