"""Resources of a subtree of processes where the kernel does not limit them: memory, and disk.

Whoever is weighed is hostile: memory may be shared so that it counts as nobody's, files may have no
name, folders may be nested deeper than a path can say. What is counted here is what is really used.

Not covered: buffers of pipes and sockets (bounded by the number of open files) and page tables.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kagent_sandbox.process import process_tree

MOST_MAPPINGS = 200_000
"""Most mappings of a subtree: a compiler has a thousand, and its forks as many each. Reading takes
0.1 s.
"""
MOST_LEVELS = 64
"""Folders in folders: compilers and caches need five. Deeper ones count as too many files."""
_KIB = 1024
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_DELETED_END = "(deleted)\n"  # found in a tenth of the time that the expression takes for each line
_DELETED = re.compile(
    r"^(?P<start>\w+)-(?P<end>\w+) \S+ \S+ (?P<device>\w+:\w+) (?P<inode>\d+) .* \(deleted\)$"
)


# -- memory --------------------------------------------------------------------------------------


def memory_bytes(pids: Sequence[int], given_bytes: int = 0) -> int:
    """Memory that these processes hold, private or shared; `given_bytes` of shared memory are not
    theirs.

    A bound: pages that forks have in common count for each of them. To divide them by their users
    takes the kernel longest where it matters, for hundreds of forks of a large process.
    """
    found = [_resident(pid) for pid in pids]
    private, shared = sum(p for p, _ in found), sum(s for _, s in found)
    return private + max(0, shared - given_bytes)


def _resident(pid: int) -> tuple[int, int]:
    """Bytes of private and of shared memory, from a process's status; 0 where it is gone."""
    found = {"RssAnon": 0, "RssShmem": 0}
    path = f"{process_tree.alive(pid)}/status"
    with contextlib.suppress(OSError), open(path, encoding="latin-1") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0]) * _KIB
    return found["RssAnon"], found["RssShmem"]


# -- disk ----------------------------------------------------------------------------------------


def disk_use(folder: Path, pids: Sequence[int], most_files: int) -> tuple[int, int, int]:
    """Bytes, and number of files and folders, in the private folder of a subtree, with what was
    unlinked from it and is still open or mapped; and number of mappings of the processes. Files are
    counted no further than just past `most_files`, mappings than past `MOST_MAPPINGS`.

    Looked for every time: what the file system has lost says little where others give it back.
    """
    used, files = _named(folder, most_files)
    device = os.stat(folder).st_dev
    mapped, mappings = _mapped(pids, device)
    return used + sum({**mapped, **_open(pids, device)}.values()), files, mappings


def _named(folder: Path, most_files: int) -> tuple[int, int]:
    """Bytes and number of files under `folder`. By descriptors: a path has a greatest length."""
    used = files = 0
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        levels = [_Level(os.open(folder, _FOLDER), stack)]
        while levels:
            entry = next(levels[-1].entries, None)
            if entry is None:
                levels.pop().close()
                continue
            files += 1
            if files > most_files or len(levels) > MOST_LEVELS:
                return used, most_files + 1
            with contextlib.suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                used += info.st_blocks * 512
                if stat.S_ISDIR(info.st_mode):
                    levels.append(_Level(_opened(entry.name, levels[-1].fd), stack))
    return used, files


class _Level:
    """A folder that is being read; closed by itself or, at the latest, by `stack`."""

    def __init__(self, fd: int, stack: contextlib.ExitStack) -> None:
        self.fd = fd
        self._stack = contextlib.ExitStack()
        self._stack.callback(os.close, fd)
        stack.callback(self.close)
        self.entries: Iterator[os.DirEntry[str]] = self._stack.enter_context(os.scandir(fd))

    def close(self) -> None:
        self._stack.close()


def _opened(name: str, parent: int) -> int:
    """Open a folder, also one that its maker may enter but nobody may list."""
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except PermissionError:
        # By descriptor: its maker may put a link to elsewhere in its place at any moment.
        path = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{path}", 0o700)
            return os.open(f"/proc/self/fd/{path}", os.O_RDONLY | os.O_DIRECTORY)
        finally:
            os.close(path)


def _open(pids: Iterable[int], device: int) -> dict[int, int]:
    """Bytes by inode of files without a name that some process has open."""
    found: dict[int, int] = {}
    for pid in pids:
        folder = f"{process_tree.alive(pid)}/fd"
        with contextlib.suppress(OSError):
            for number in os.listdir(folder):
                with contextlib.suppress(OSError):
                    info = os.stat(f"{folder}/{number}")
                    if info.st_nlink == 0 and info.st_dev == device and stat.S_ISREG(info.st_mode):
                        found[info.st_ino] = info.st_blocks * 512
    return found


def _mapped(pids: Iterable[int], device: int) -> tuple[dict[int, int], int]:
    """Bytes by inode of files without a name that some process maps, and the number of mappings.

    Where the caller may not see such a file itself, only what is mapped of it counts.
    """
    name = f"{os.major(device):02x}:{os.minor(device):02x}"
    found: dict[int, int] = {}
    count = 0
    for pid in pids:
        place, parts = process_tree.alive(pid), dict[int, int]()
        # Of what ends a line the kernel escapes the newline alone: a name may hold the others.
        with (
            contextlib.suppress(OSError),
            open(f"{place}/maps", encoding="latin-1", newline="\n") as file,
        ):
            for line in file:
                count += 1
                if count > MOST_MAPPINGS:
                    return found, count
                match = _DELETED.match(line) if line.endswith(_DELETED_END) else None
                if match is None or match["device"] != name:
                    continue
                inode, start, end = int(match["inode"]), match["start"], match["end"]
                try:
                    used = os.stat(f"{place}/map_files/{start}-{end}").st_blocks * 512
                except OSError:
                    parts[inode] = used = parts.get(inode, 0) + int(end, 16) - int(start, 16)
                found[inode] = max(found.get(inode, 0), used)
    return found, count


# -- removal -------------------------------------------------------------------------------------
