"""Namespaces: processes, network, IPC objects and mounts that a child does not share with the host.

In three steps, because each binds another process. The fork-server takes a network without
interfaces (and, where it is not root, the user namespace that the rest needs) once for all of its
children; a supervisor takes a process table and IPC objects for its child; the child takes mounts
for itself, since only a process that is in the new table can mount its /proc.

Not covered: the kernel itself, which is shared; device nodes; the host's files, which stay mounted
(Landlock decides about those).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

from kagent_sandbox.confine.libc import libc

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
_SHM_BYTES = 16 << 20
DISK_SLACK_BYTES = 64 << 20
"""Space of the private folder over its limit, so that the limit is met before the disk is full."""
_HIDDEN = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - names of mount points


def unshare(flags: int) -> None:
    """Leave namespaces.

    Raises:
        OSError: The kernel refuses, or a filter of the container does.
    """
    if libc.unshare(ctypes.c_int(flags)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare({flags:#x}): {os.strerror(code)}")


def leave_network(*, user: bool) -> None:
    """Enter an empty network; through a user namespace where the caller is not root. For the
    fork-server.

    Raises:
        OSError: The kernel refuses.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare(_NEWNET | (_NEWUSER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny", "ascii")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", "ascii")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", "ascii")


def leave_processes() -> tuple[int, int]:
    """Hide other processes from the children that follow: they see one another only. For the
    supervisor.

    The first of them is process 1, with whose end the kernel kills all others. It is `cat` on a
    pipe that nobody writes to: when this process dies in whatever way, it reads the end. Its id,
    and the descriptor to keep open, are returned.

    Raises:
        OSError: The kernel refuses, or there is no `cat`.
    """
    program = shutil.which("cat", path="/usr/bin:/bin:/run/current-system/sw/bin")
    if program is None:
        raise FileNotFoundError(2, "no cat in /usr/bin or /bin, to be the first process")
    unshare(_NEWPID | _NEWIPC)
    end, keep = os.pipe()
    null = os.open("/dev/null", os.O_WRONLY)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # inherited: it need not collect orphans
    try:
        files = [(os.POSIX_SPAWN_DUP2, fd, to) for fd, to in ((end, 0), (null, 1), (null, 2))]
        pid = os.posix_spawn(program, ["kagent-init"], {}, file_actions=files, setsid=True)
    finally:
        signal.signal(signal.SIGCHLD, before)
        os.close(end)
        os.close(null)
    return pid, keep


def leave_mounts(
    private: Path, keep: Iterable[str], *, uid: int | None, disk_bytes: int, disk_files: int
) -> None:
    """Enter its own /proc, /tmp and /dev/shm, and a private folder in memory. For the child.

    Args:
        private: The private folder. Made anew, with a size of `disk_bytes` and a little more.
        keep: Paths that stay visible although they lie in a folder that is replaced.
        uid: Who owns the private folder, if not the caller.
        disk_bytes: Of the private folder.
        disk_files: Of the private folder.

    Raises:
        OSError: The kernel refuses.
    """
    unshare(_NEWNS)
    _mount("none", "/", None, _REC | _PRIVATE)
    keep = tuple(keep)
    folders = sorted({os.path.realpath(h) for h in _HIDDEN if os.path.isdir(h)})
    hidden = [h for h in folders if not any(_within(h, k) for k in keep)]
    held = _hold(keep, (*hidden, str(private)))
    size = f"size={disk_bytes + DISK_SLACK_BYTES},nr_inodes={disk_files + 1000}"
    for folder in hidden:
        options = size if _within(str(private), folder) else f"size={_SHM_BYTES},nr_inodes=1000"
        _mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, f"mode=1777,{options}")
    if not any(_within(str(private), h) for h in hidden):
        _mount("tmpfs", str(private), "tmpfs", _NOSUID | _NODEV, f"mode=700,{size}")
    private.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    private.mkdir(mode=0o700, exist_ok=True)
    if uid is not None:
        os.chown(private, uid, uid)
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    for path, fd, is_folder in held:
        target = Path(path)
        (target if is_folder else target.parent).mkdir(parents=True, exist_ok=True)
        if not is_folder:
            target.touch()
        _mount(f"/proc/self/fd/{fd}", path, None, _BIND | _REC)
        os.close(fd)


def _hold(keep: Sequence[str], hidden: Sequence[str]) -> list[tuple[str, int, bool]]:
    """Descriptors of the paths that would be hidden, outermost ones only."""
    held: list[tuple[str, int, bool]] = []
    for path in sorted(keep):
        covered = any(_within(path, p) for p, _, folder in held if folder)
        if covered or not any(_within(path, h) for h in hidden):
            continue
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # not there
        held.append((path, fd, os.path.isdir(path)))
    return held


def _within(path: str, folder: str) -> bool:
    return folder == "/" or path == folder or path.startswith(folder.rstrip("/") + "/")


def _mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    encoded = [None if t is None else t.encode() for t in (source, target, kind, options)]
    if libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount {kind or source} on {target}: {os.strerror(code)}")
