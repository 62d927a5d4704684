"""The disk of temporary files, where it is full or runs no code: the machine's fault, and nobody
else's.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.errors import MachineError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TEXT = os.strerror(errno.ENOSPC)
_NO_FOLDER = "No usable temporary directory"  # tempfile found none that it can write to


def says_full(text: str) -> bool:
    """Whether a text tells of a full disk. A candidate can fill its own folder, or print that."""
    return _TEXT in text


def require_room(folder: Path, tier: Tier, most_bytes: int, most_files: int, what: str) -> None:
    """Make sure that a child which met a full disk could have written all that it may write.

    A disk is full, too, where it has no inodes left for new files.

    Args:
        folder: In which children have their folders.
        tier: Their isolation. From T2 on their folders are disks of their own.
        most_bytes: Most that a child may write.
        most_files: Most files that it may make.
        what: What the child does, such as "a build".

    Raises:
        MachineError: The machine's disk has less room.
    """
    if tier >= Tier.T2:
        return
    if free_bytes(folder) < most_bytes:
        raise no_room(folder, f", and {what} may take {most_bytes}")
    files = free_files(folder)
    if files is not None and files < most_files:
        raise no_room(folder, f", but only {files} inodes, and {what} may make {most_files} files")


def require_code(folder: Path, tier: Tier) -> None:
    """Make sure that kernels which a child compiles into its folder can be loaded from there.

    Args:
        folder: In which children have their folders.
        tier: Their isolation. From T2 on their folders are disks of their own.

    Raises:
        MachineError: The disk is mounted `noexec`, as Docker mounts a `--tmpfs` unless told.
    """
    if tier < Tier.T2 and os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise MachineError(
            f"{folder.parent}: the disk of temporary files is mounted noexec, and kernels are "
            "loaded from there: mount it with exec (docker run --tmpfs /tmp:exec,size=4g), or set "
            "TMPDIR to a folder on another disk"
        )


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write on the disk of a folder; 0 where it cannot be asked."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def free_files(folder: Path) -> int | None:
    """Files that this user may still make on the disk of a folder; None where there is no limit, or
    it cannot be asked.
    """
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_favail if found.f_files else None


def no_room(folder: Path, needed: str = "") -> MachineError:
    """The error for a full disk.

    Args:
        folder: In which temporary files are made.
        needed: What would need more room.
    """
    return MachineError(
        f"{folder}: the disk of temporary files is full: {free_bytes(folder)} bytes are free"
        f"{needed}. What is recorded is kept, and no candidate is blamed: free some space, or set "
        "TMPDIR to a folder that has some, then start again or resume the run"
    )


@contextlib.contextmanager
def temporary_space() -> Iterator[None]:
    """Around whatever makes temporary files in the agent's own process.

    Raises:
        MachineError: Their disk is full.
    """
    try:
        yield
    except OSError as e:
        if e.errno in _FULL or _NO_FOLDER in str(e):
            raise no_room(Path(os.environ.get("TMPDIR") or "/tmp")) from None  # noqa: S108
        raise
