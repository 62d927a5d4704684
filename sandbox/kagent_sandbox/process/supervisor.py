"""Supervisor of one child: forks it, enforces its limits, ends its subtree, daemons included.

A supervisor is a subreaper: a double-forked daemon becomes its child again when its parent dies, so
that nothing escapes. It lives until its child and all descendants are dead and the private folder
is gone. When the client closes its end (or dies) the child is killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import NoReturn

from kagent_sandbox.confine import namespaces
from kagent_sandbox.confine.cgroup import ControlGroup
from kagent_sandbox.confine.cgroup import kill as kill_group
from kagent_sandbox.confine.libc import prctl
from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.process import child_main as child
from kagent_sandbox.process import process_tree
from kagent_sandbox.process.channel import Channel, ChannelError
from kagent_sandbox.process.child_handle import LOST_SERVER
from kagent_sandbox.process.remove_tree import remove_tree
from kagent_sandbox.process.resource_limits import SubtreeLimits
from kagent_sandbox.process.spawn import Spawn

_LOG_BYTES = 64 << 10
_TICK_S = 0.25


def main(spawn: Spawn) -> NoReturn:
    """Run in a fresh fork of the zygote. Never returns."""
    watcher: _Supervisor | None = None
    try:
        os.setsid()
        prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        watcher = _Supervisor(spawn)
        watcher.run()
    except BaseException:  # noqa: BLE001 - a bug of ours: show it, the client sees the loss
        traceback.print_exc()
        if watcher is not None:
            watcher.give_up()
    finally:
        os._exit(1)


class _Supervisor:
    def __init__(self, spawn: Spawn) -> None:
        self.spawn = spawn
        self.control = Channel(socket.socket(fileno=spawn.fds[1]))
        self.exit = Channel(socket.socket(fileno=spawn.fds[2]))
        self.log = bytearray()
        self.log_total = 0
        self.pid = 0  # of the child, once it is forked
        self.reason: str | None = None
        self.status: int | None = None
        self.usage: tuple[float, float] = (0.0, 0.0)  # CPU seconds, MiB
        self.group: ControlGroup | None = None
        self.init: tuple[int, int] | None = None  # the child's process 1, what keeps it alive

    def run(self) -> NoReturn:
        spawn = self.spawn
        spawn.tmp.mkdir(mode=0o700)
        if spawn.uid is not None:
            os.chown(spawn.tmp, spawn.uid, spawn.uid)
        tier = spawn.isolation.tier
        given_bytes = sum(os.fstat(fd).st_size for fd in spawn.fds[3:])  # shared memory
        self.bounds = SubtreeLimits(spawn.confinement, tier, spawn.tmp, given_bytes)
        log_read, log_write = os.pipe()
        if tier >= Tier.T3:
            self.group = ControlGroup(
                Path(spawn.isolation.groups),
                spawn.name,
                memory_bytes=self.bounds.group_bytes,
                processes=spawn.confinement.processes,
            )
        if tier >= Tier.T2:
            self.init = namespaces.leave_processes()
        self.pid = os.fork()
        if self.pid == 0:
            child.main(spawn, self.group, log_write)  # never returns
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
        server = os.pidfd_open(self.spawn.server)
        if os.getppid() != self.spawn.server:
            self.reason = LOST_SERVER
        poller = select.poll()
        for fd in (pidfd, server, self.control.fileno(), self.log_fd):
            poller.register(fd, select.POLLIN)
        next_tick = time.monotonic() + _TICK_S
        while self.reason is None:
            now = time.monotonic()
            events = dict(poller.poll(max(0.0, min(deadline, next_tick) - now) * 1e3))
            if pidfd in events:
                break
            if server in events:
                self.reason = LOST_SERVER
            elif self.control.fileno() in events:  # its close ends the child, but for that reason
                self.command()
            if self.log_fd in events and not self.drain():
                poller.unregister(self.log_fd)  # the child closed its output
            if time.monotonic() >= deadline:
                self.reason = "wall limit"
            elif self.reason is None and time.monotonic() >= next_tick:
                self.tick()
                next_tick = time.monotonic() + _TICK_S
        os.close(pidfd)
        os.close(server)

    def command(self) -> None:
        try:
            verb = self.control.recv(1.0, max_bytes=256).obj
            if verb == "stop":
                ours = {self.init[0]} if self.init is not None else set()
                stopped = process_tree.stop_tree(self.pid, os.getpid(), ours)
                self.control.send(stopped, timeout_s=5.0)
            elif verb == "cont":
                for pid in process_tree.descendants(os.getpid()):
                    process_tree.send(pid, signal.SIGCONT)
                self.control.send(obj=True, timeout_s=5.0)
            elif verb == "pid":
                self.control.send(self.pid, timeout_s=5.0)
            else:
                self.reason = "killed"
        except ChannelError:
            self.reason = "killed"  # the client closed its end, or died

    def tick(self) -> None:
        """Check what the kernel does not limit per subtree."""
        pids = process_tree.descendants(os.getpid())
        self.reason = self.bounds.exceeded(self.pid, pids, self.log_total)

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
        if self.group is not None and self.reason is None and self.group.exceeded() == "memory":
            self.reason = self.bounds.memory_reason
        self.reap_all()
        if self.group is not None:
            self.bounds.peak_bytes = max(self.bounds.peak_bytes, self.group.peak_bytes())
            self.group.remove()
        while self.log_total <= 2 * self.spawn.confinement.output_bytes:
            before = self.log_total
            if not self.drain() or self.log_total == before:
                break
        remove_tree(self.spawn.tmp)
        if self.reason == LOST_SERVER:
            _remove_server_folder(self.spawn.tmp.parent)
        status = self.status if self.status is not None else signal.SIGKILL
        signaled = os.WIFSIGNALED(status)
        cpu_s, rss_mib = self.usage
        report = {
            "code": None if signaled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signaled else None,
            "reason": self.reason,
            "max_rss_mib": max(rss_mib, self.bounds.peak_bytes / 2**20),
            "cpu_s": cpu_s,
            "log_tail": bytes(self.log).decode("utf-8", "replace"),
        }
        with contextlib.suppress(ChannelError):
            self.exit.send(report, timeout_s=5.0)
        os._exit(0)

    def reap_all(self) -> None:
        """Kill and reap every descendant."""
        if self.reason is not None:
            if self.pid:
                process_tree.send(self.pid, signal.SIGKILL)
            self.kill_namespace()
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == self.pid:
                self.status = status
                self.usage = (usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
                self.kill_namespace()
            elif pid == 0:
                # The child itself may be about to exit by itself: its status is wanted.
                ending = self.status is not None or self.reason is not None
                process_tree.kill_all(os.getpid(), set() if ending else {self.pid})
                time.sleep(0.0005)

    def give_up(self) -> None:
        """Leave nothing behind after an error of our own."""
        self.reason = "failure of its supervisor"
        self.reap_all()
        if self.group is not None:
            self.group.remove()
        remove_tree(self.spawn.tmp)

    def kill_namespace(self) -> None:
        """End process 1, with which the kernel kills all others at once, and the control group."""
        if self.init is not None:
            pid, keep = self.init
            process_tree.send(pid, signal.SIGKILL)
            os.close(keep)
            self.init = None
        if self.group is not None:
            kill_group(self.group.folder)


# -- folders -------------------------------------------------------------------------------------


def _remove_server_folder(root: Path) -> None:
    """Remove the folder of a fork-server that was killed, if no other child's is in it."""
    with contextlib.suppress(OSError):
        if not any(entry.name.isdecimal() for entry in os.scandir(root)):
            remove_tree(root)
