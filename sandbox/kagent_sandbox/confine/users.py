"""Running as a user that owns nothing, with no capability but (where the interpreter needs it) to
search folders.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

from kagent_sandbox.confine.libc import prctl, syscall

FIRST_UID = 61_440  # 61184 to 65519 are systemd's dynamic users: no account has them
UIDS = 4_000
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPGET = {"x86_64": 125, "aarch64": 90}
_VERSION_3 = 0x20080522
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2


def uid_for(spawn: int) -> int:
    """The user of the n-th child:

    neighbours differ, so that they cannot signal or inspect one another.
    """
    return FIRST_UID + spawn % UIDS


def become(uid: int, *, need_search: bool) -> None:
    """Drop from root to `uid`, in this thread and process, with no way back.

    `need_search` keeps the right to read files whatever their mode, for an interpreter that lives
    in root's home: Landlock still decides which.

    Raises:
        OSError: Not root, or the user namespace does not map `uid`.
    """
    keep = 0
    if need_search:
        permitted = _permitted()
        for capability in (_DAC_READ_SEARCH, _DAC_OVERRIDE):
            if permitted >> capability & 1:
                keep = 1 << capability
                break
    if keep:
        prctl(8, 1)  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if keep:
        _set(keep)
        prctl(47, 2, keep.bit_length() - 1)  # PR_CAP_AMBIENT, RAISE: compilers inherit it
    prctl(4, 1)  # PR_SET_DUMPABLE: or the process could not read its own /proc/self


def drop_capabilities() -> None:
    """Keep the user but none of root's powers, where the user cannot be changed."""
    _set(0)


def _header() -> ctypes.Array[ctypes.c_char]:
    packed = struct.pack("Ii", _VERSION_3, 0)
    return ctypes.create_string_buffer(packed, len(packed))


def _permitted() -> int:
    header, data = _header(), ctypes.create_string_buffer(24)
    syscall(_CAPGET[platform.machine()], ctypes.addressof(header), ctypes.addressof(data))
    return int(struct.unpack("6I", data.raw)[1])


def _set(capabilities: int) -> None:
    header = _header()
    packed = struct.pack("6I", capabilities, capabilities, capabilities, 0, 0, 0)
    data = ctypes.create_string_buffer(packed, len(packed))
    syscall(_CAPSET[platform.machine()], ctypes.addressof(header), ctypes.addressof(data))
