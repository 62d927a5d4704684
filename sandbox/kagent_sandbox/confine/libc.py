"""The few calls into libc that Python does not offer."""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def syscall(number: int, *args: int) -> int:
    """Make a system call with integer (or address) arguments.

    Raises:
        OSError: It failed.
    """
    result = int(libc.syscall(ctypes.c_long(number), *(ctypes.c_void_p(a) for a in args)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result


def prctl(option: int, *args: int) -> int:
    """Set or read an attribute of the process, as `man 2 prctl` lists them.

    Raises:
        OSError: It failed.
    """
    padded = (*args, 0, 0, 0, 0)[:4]
    result = int(libc.prctl(option, *(ctypes.c_ulong(a) for a in padded)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
    return result
