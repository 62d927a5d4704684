"""Remove a folder whose contents are hostile."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from kagent_sandbox.process.resource_usage import _FOLDER, _opened


def remove_tree(folder: Path) -> None:
    """Remove a folder whose contents are hostile: deeper than any path, without rights, with odd
    names, with links out of it. Nobody may be at work in it any more.

    A folder's own folders are moved up and removed in turn, so that no depth needs more than two
    descriptors. What cannot be removed stays.
    """
    with contextlib.suppress(OSError):
        top = os.open(folder, _FOLDER)
        try:
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(folder)


def _empty(top: int) -> None:
    moved = 0
    names = os.listdir(top)
    while names:
        for name in names:
            with contextlib.suppress(OSError):
                if not _unlinked(name, top):
                    moved = _emptied(name, top, moved)
                    os.rmdir(name, dir_fd=top)
        before, names = names, os.listdir(top)
        if names == before:
            return  # no progress: it cannot be removed


def _emptied(name: str, top: int, moved: int) -> int:
    """Move the folders in a folder of `top` to `top`, and remove its files; how many have been."""
    fd = _opened(name, top)
    try:
        os.fchmod(fd, 0o700)
        for inner in os.listdir(fd):
            with contextlib.suppress(OSError):
                if not _unlinked(inner, fd):
                    os.chmod(inner, 0o700, dir_fd=fd)  # to be moved it must be writable itself
                    moved = _moved(inner, fd, top, moved)
    finally:
        os.close(fd)
    return moved


def _moved(name: str, fd: int, top: int, moved: int) -> int:
    while True:
        moved += 1
        target = f"kagent-removes-{moved}"
        try:
            os.stat(target, dir_fd=top, follow_symlinks=False)
        except FileNotFoundError:
            os.rename(name, target, src_dir_fd=fd, dst_dir_fd=top)
            return moved


def _unlinked(name: str, fd: int) -> bool:
    """Remove what is not a folder. False for a folder."""
    if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
        return False
    os.unlink(name, dir_fd=fd)
    return True
