"""Control groups (version 2): limits of memory and processes that the kernel keeps for a whole
subtree, and an end that nothing in it can outrun.

A group is made beside the caller's own, in the nearest folder above it that the caller may write
and whose groups have the controllers: systemd delegates such folders to users (`systemd-run --user
--scope`), root has them where version 2 is mounted writable. The caller's own processes are not
moved.

Not covered: processor time and bandwidth, which would make timings depend on the limits; disk.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_NEEDED = frozenset({"memory", "pids"})
_PREFIX = "kagent-"


def find() -> Path:
    """The folder to make groups in.

    Raises:
        OSError: There is none; the text says why.
    """
    mounted = _mount_point()
    own = next((line[3:] for line in _lines("/proc/self/cgroup") if line.startswith("0::")), None)
    if mounted is None or own is None or own.startswith("/.."):
        raise FileNotFoundError(2, "no cgroup2 mounted")
    point, root = mounted
    inner = own[len(root) :] if root != "/" and own.startswith(root) else own
    folder = Path(point, inner.lstrip("/"))
    why = f"{folder} is not delegated"
    while True:
        offered = _words(folder / "cgroup.subtree_control")
        if offered >= _NEEDED or _enable(folder):
            if os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK):
                _sweep(folder)
                return folder
            why = f"{folder} cannot be written"
        elif lacks := _NEEDED - _words(folder / "cgroup.controllers"):
            lacking = ", ".join(sorted(lacks))
            why = f"{folder} has no controller for {lacking}"
        if folder == Path(point):
            raise PermissionError(1, why)
        folder = folder.parent


def _enable(folder: Path) -> bool:
    """Offer the controllers to groups in the folder: possible where no process is in it itself."""
    if _NEEDED - _words(folder / "cgroup.controllers"):
        return False
    with contextlib.suppress(OSError):
        _write(folder / "cgroup.subtree_control", " ".join(f"+{c}" for c in sorted(_NEEDED)))
        return True
    return False


class ControlGroup:
    """One child's group. Made by its supervisor, entered by the child, removed at the end."""

    def __init__(self, parent: Path, name: str, *, memory_bytes: int, processes: int) -> None:
        """Make it.

        Raises:
            OSError: The kernel refuses.
        """
        self.folder = folder_of(parent, name)
        self.folder.mkdir()
        try:
            _write(self.folder / "memory.max", str(memory_bytes))
            _write(self.folder / "pids.max", str(processes))
            for name_, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
                with contextlib.suppress(OSError):  # no swap accounting; Linux before 4.19
                    _write(self.folder / name_, value)
            self.entrance = os.open(self.folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except BaseException:
            self.folder.rmdir()
            raise

    def enter(self) -> None:
        """Move the calling process into it.

        Raises:
            OSError: The kernel refuses.
        """
        os.write(self.entrance, b"0")

    def exceeded(self) -> str | None:
        """Name the limit that was met: "memory", "processes", or None."""
        if _events(self.folder / "memory.events").get("oom_kill", 0):
            return "memory"
        return "processes" if _events(self.folder / "pids.events").get("max", 0) else None

    def peak_bytes(self) -> int:
        """Most memory that was used at once, 0 where the kernel does not say (before 5.19)."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / "memory.peak").read_text("ascii"))
        return 0

    def remove(self) -> None:
        """Kill what is left, and remove it."""
        kill(self.folder)
        with contextlib.suppress(OSError):
            os.close(self.entrance)
        remove(self.folder)


def folder_of(parent: Path, name: str) -> Path:
    """Return the folder of a group."""
    return parent / f"{_PREFIX}{name}"


def kill(folder: Path) -> None:
    """Kill all that are in a group at once, where the kernel can (5.14)."""
    with contextlib.suppress(OSError):
        _write(folder / "cgroup.kill", "1")


def remove(folder: Path) -> None:
    """Remove a group whose processes have been killed: they may take a moment to be gone."""
    for _ in range(200):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.005)
        else:
            return


def _sweep(folder: Path) -> None:
    """Remove what fork-servers left that were killed together with all that they had started."""
    with contextlib.suppress(OSError):
        for entry in folder.glob(f"{_PREFIX}*"):
            owner = entry.name.removeprefix(_PREFIX).partition("-")[0]
            if owner.isdecimal() and not os.path.exists(f"/proc/{owner}"):
                with contextlib.suppress(OSError):
                    entry.rmdir()


def _mount_point() -> tuple[str, str] | None:
    """Return the mount point of version 2, and which of its folders it shows."""
    for line in _lines("/proc/self/mountinfo"):
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            return fields.split()[4], fields.split()[3]
    return None


def _events(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _lines(str(path)))
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def _words(path: Path) -> set[str]:
    return set(" ".join(_lines(str(path))).split())


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8").splitlines()
    except OSError:
        return []


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
