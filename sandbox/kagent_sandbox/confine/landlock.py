"""Landlock through ctypes: which files a process may read, write, execute or use as a device.

Binds the calling thread and whatever it starts later, not threads that run already: lock before a
thread that will run candidate code exists.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from kagent_sandbox.confine.libc import libc, prctl, syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on all architectures
_EXECUTE, _WRITE, _READ, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL_DEV


def abi() -> int:
    """Version of the kernel's Landlock, 0 where there is none."""
    return max(0, int(libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))))


def restrict(read: Iterable[str], write: Iterable[str], devices: Iterable[str]) -> None:
    """Bind this thread: `read` may be read and executed, `write` (folders) filled, `devices` used.

    Paths that do not exist are skipped. TCP, signals to processes outside and abstract sockets are
    refused where the kernel's version can (4, 6 and 6).

    Raises:
        OSError: The kernel has no Landlock.
    """
    version = abi()
    rights = (1 << 13) - 1
    rights |= _REFER if version >= 2 else 0
    rights |= _TRUNCATE if version >= 3 else 0
    rights |= _IOCTL_DEV if version >= 5 else 0
    network = 3 if version >= 4 else 0
    scoped = 3 if version >= 6 else 0
    packed = struct.pack("QQQ", rights, network, scoped)
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = ctypes.create_string_buffer(packed, len(packed))
    ruleset = syscall(_CREATE, ctypes.addressof(attributes), size, 0)
    try:
        for path in read:
            _allow(ruleset, path, rights & (_EXECUTE | _READ | _READ_DIR))
        for path in write:
            refused = _EXECUTE | _MAKE_CHAR | _MAKE_SOCK | _MAKE_BLOCK | _IOCTL_DEV
            _allow(ruleset, path, rights & ~refused)
        for path in devices:
            _allow(ruleset, path, rights & (_READ | _READ_DIR | _WRITE | _TRUNCATE | _IOCTL_DEV))
        prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
        syscall(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not there, or not reachable: then it cannot be used either
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _FILE_RIGHTS
        packed = struct.pack("=Qi", rights, fd)
        rule = ctypes.create_string_buffer(packed, len(packed))
        syscall(_ADD, ruleset, 1, ctypes.addressof(rule), 0)
    finally:
        os.close(fd)
