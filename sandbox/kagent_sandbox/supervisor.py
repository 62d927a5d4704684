"""One child's keeper: forks it, enforces its limits, and ends its whole subtree, daemons included.

A supervisor is a subreaper: a double-forked daemon becomes its child again when its parent dies, so
that nothing escapes. It lives until its child and all descendants are dead and the private folder
is gone. When the client closes its end (or dies) the child is killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kagent_sandbox import child, process_tree
from kagent_sandbox.channel import Channel, ChannelError
from kagent_sandbox.confine.libc import prctl
from kagent_sandbox.confine.policy import Confinement
from kagent_sandbox.context import Context

_LOG_BYTES = 64 << 10
_TICK_S = 0.25


@dataclass(frozen=True)
class Spawn:
    """All that a supervisor needs. `fds`: the child's channel, control, exit, then the user's."""

    handler: Callable[[Context], None]
    confinement: Confinement
    lockable: bool
    uid: int | None
    need_search: bool
    lock_first: bool
    wall_limit_s: float
    tmp: Path
    fds: tuple[int, ...]


def main(spawn: Spawn) -> NoReturn:
    """Run in a fresh fork of the zygote. Never returns."""
    try:
        os.setsid()
        prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _Keeper(spawn).run()
    except BaseException:  # noqa: BLE001 - a bug of ours: show it, the client sees the loss
        traceback.print_exc()
    finally:
        os._exit(1)


class _Keeper:
    def __init__(self, spawn: Spawn) -> None:
        self.spawn = spawn
        self.control = Channel(socket.socket(fileno=spawn.fds[1]))
        self.exit = Channel(socket.socket(fileno=spawn.fds[2]))
        self.log = bytearray()
        self.log_total = 0
        self.peak_bytes = 0
        self.reason: str | None = None
        self.status: int | None = None
        self.usage: tuple[float, float] = (0.0, 0.0)  # CPU seconds, MiB

    def run(self) -> NoReturn:
        spawn = self.spawn
        spawn.tmp.mkdir(mode=0o700)
        if spawn.uid is not None:
            os.chown(spawn.tmp, spawn.uid, spawn.uid)
        log_read, log_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            child.main(spawn, log_write)  # never returns
        for fd in (log_write, spawn.fds[0], *spawn.fds[3:]):
            os.close(fd)
        os.set_blocking(log_read, False)
        self.log_fd = log_read
        self.watch()
        self.end()

    def watch(self) -> None:
        """Serve until the child has exited or must be killed."""
        deadline = time.monotonic() + self.spawn.wall_limit_s
        pidfd = os.pidfd_open(self.pid)
        poller = select.poll()
        for fd in (pidfd, self.control.fileno(), self.log_fd):
            poller.register(fd, select.POLLIN)
        next_tick = time.monotonic() + _TICK_S
        while self.reason is None:
            now = time.monotonic()
            events = dict(poller.poll(max(0.0, min(deadline, next_tick) - now) * 1e3))
            if pidfd in events:
                break
            if self.control.fileno() in events:
                self.command()
            if self.log_fd in events and not self.drain():
                poller.unregister(self.log_fd)  # the child closed its output
            if time.monotonic() >= deadline:
                self.reason = "wall limit"
            elif time.monotonic() >= next_tick:
                self.tick()
                next_tick = time.monotonic() + _TICK_S
        os.close(pidfd)

    def command(self) -> None:
        try:
            verb = self.control.recv(1.0, max_bytes=256).obj
            if verb == "stop":
                self.control.send(process_tree.stop_tree(self.pid, os.getpid()), timeout_s=5.0)
            elif verb == "cont":
                for pid in process_tree.descendants(os.getpid()):
                    process_tree.send(pid, signal.SIGCONT)
                self.control.send(obj=True, timeout_s=5.0)
            else:
                self.reason = "killed"
        except ChannelError:
            self.reason = "killed"  # the client closed its end, or died

    def tick(self) -> None:
        """Check what the kernel does not limit per subtree."""
        limits = self.spawn.confinement
        pids = process_tree.descendants(os.getpid())
        used = sum(process_tree.private_bytes(pid) for pid in pids)
        self.peak_bytes = max(self.peak_bytes, used)
        if len(pids) > limits.processes:  # the kernel's limit does not bind root
            self.reason = f"limit of {limits.processes} processes"
        if used > limits.memory_bytes:
            self.reason = f"memory limit of {limits.memory_bytes >> 20} MiB"
        disk, files = _disk_use(self.spawn.tmp, limits.disk_files)
        if disk > limits.disk_bytes:
            self.reason = f"disk limit of {limits.disk_bytes >> 20} MiB"
        elif files > limits.disk_files:
            self.reason = f"limit of {limits.disk_files} files"
        elif self.log_total > limits.output_bytes:
            self.reason = f"output limit of {limits.output_bytes >> 20} MiB"

    def drain(self) -> bool:
        """Read what the child printed, keeping the end of it. False at its end."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.log_fd, _LOG_BYTES)
            if not data:
                return False
            self.log_total += len(data)
            self.log += data
            del self.log[:-_LOG_BYTES]
        return True

    def end(self) -> NoReturn:
        """Kill what is left, clean up, report."""
        self.bury()
        while self.log_total <= 2 * self.spawn.confinement.output_bytes:
            before = self.log_total
            if not self.drain() or self.log_total == before:
                break
        remove_tree(self.spawn.tmp)
        status = self.status if self.status is not None else signal.SIGKILL
        signaled = os.WIFSIGNALED(status)
        cpu_s, rss_mib = self.usage
        report = {
            "code": None if signaled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signaled else None,
            "reason": self.reason,
            "max_rss_mib": max(rss_mib, self.peak_bytes / 2**20),
            "cpu_s": cpu_s,
            "log_tail": bytes(self.log).decode("utf-8", "replace"),
        }
        with contextlib.suppress(ChannelError):
            self.exit.send(report, timeout_s=5.0)
        os._exit(0)

    def bury(self) -> None:
        """Kill and reap every descendant.

        Freezing first keeps a fork bomb from outrunning the loop.
        """
        if self.reason is not None:
            process_tree.send(self.pid, signal.SIGKILL)
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == self.pid:
                self.status = status
                self.usage = (usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
            elif pid == 0:
                left = process_tree.descendants(os.getpid())
                for number in (signal.SIGSTOP, signal.SIGKILL):
                    for other in left:
                        if other != self.pid or self.status is not None or self.reason is not None:
                            process_tree.send(other, number)
                time.sleep(0.0005)


# -- the private folder --------------------------------------------------------------------------


def _disk_use(folder: Path, most_files: int) -> tuple[int, int]:
    """Bytes and number of files under `folder`, counting no further than just past `most_files`."""
    used = files = 0
    todo = [str(folder)]
    while todo and files <= most_files:
        with contextlib.suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                files += 1
                if files > most_files:
                    break
                with contextlib.suppress(OSError):
                    info = entry.stat(follow_symlinks=False)
                    used += info.st_blocks * 512
                    if stat.S_ISDIR(info.st_mode):
                        todo.append(entry.path)
    return used, files


def remove_tree(folder: Path) -> None:
    """Remove a folder whose contents are hostile:

    folders without rights, odd names, links out of it.
    """

    def retry(function: Callable[..., object], path: str, _: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            if stat.S_ISDIR(os.lstat(path).st_mode):
                os.chmod(path, 0o700)
                shutil.rmtree(path, ignore_errors=True)
            else:
                function(path)

    if sys.version_info >= (3, 12):
        shutil.rmtree(folder, onexc=retry)
    else:
        shutil.rmtree(folder, onerror=retry)
