"""The process that children are forked from: imports once, stays single-threaded, and never touches
a device.

Runs as `python -I -c ... main(fd)` with a clean environment. It must never start a thread or run a
parallel torch operation (a forked child's OpenMP would hang) and never call cuInit (CUDA does not
survive a fork).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from kagent_sandbox.confine import cgroup, namespaces, seccomp, users
from kagent_sandbox.confine.isolation import Isolation, observe
from kagent_sandbox.confine.libc import prctl
from kagent_sandbox.confine.policy import Confinement, Tier
from kagent_sandbox.process import process_tree, supervisor
from kagent_sandbox.process.channel import Channel, ChannelClosed
from kagent_sandbox.process.context import Context
from kagent_sandbox.process.exit import exit_fast
from kagent_sandbox.process.huge_pages import gather_pages
from kagent_sandbox.process.remove_tree import remove_tree
from kagent_sandbox.process.spawn import Spawn

_MAX_FDS = 64
FEW_CHILDREN = 20
"""Most children of a server that may soon be closed again: their forks cost less than huge pages
do, 0.19 s against 9 ms of each child (31 children of a builder's server, two cores, 2026-11-26).
"""


def main(fd: int) -> None:
    """Serve spawn requests from the client at the other end of `fd` until it closes it or dies, and
    end the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a killed supervisor leaves behind comes here
    channel = Channel(socket.socket(fileno=fd))
    settings = cast("dict[str, object]", channel.recv(60.0).obj)
    root = Path(str(settings["root"]))
    try:
        _run(channel, settings, root)
    except ChannelClosed:
        pass  # the client is gone: nobody is left to tell
    finally:
        remove_tree(root)
    exit_fast()


def _run(channel: Channel, settings: dict[str, object], root: Path) -> None:
    try:
        with _ended_when_hung_up(channel.fileno(), root):
            handler = _imported(settings)
        confinement, isolation = _confinement(settings, root)
    except Exception:  # noqa: BLE001 - whatever a module raises at import is the client's to report
        channel.send({"error": traceback.format_exc()})
        return
    channel.send(dataclasses.asdict(isolation))
    if isolation.tier >= confinement.least:
        _serve(channel, root, handler, confinement, isolation)


@contextlib.contextmanager
def _ended_when_hung_up(fd: int, root: Path) -> Iterator[None]:
    """End this process as soon as its client is gone: imports take seconds, and do not listen.

    By a signal, not a thread: there must be none. What has been begun meanwhile ends, too.
    """

    def look(*_: object) -> None:
        poller = select.poll()
        poller.register(fd, 0)  # hang-ups are always reported
        if poller.poll(0):
            try:
                process_tree.kill_all(os.getpid())
                remove_tree(root)
            finally:
                os._exit(0)

    before = signal.signal(signal.SIGIO, look)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        look()  # it may be gone already
        yield
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, before)


def _imported(settings: dict[str, object]) -> Callable[[Context], None]:
    """Import what children find warm; their handler."""
    gc.disable()  # importing torch would collect often, and find next to nothing
    for module in cast("list[str]", settings["preload"]):
        importlib.import_module(module)
    module_name, _, function = str(settings["handler"]).partition(":")
    handler: Callable[[Context], None] = getattr(importlib.import_module(module_name), function)
    return handler


def _confinement(settings: dict[str, object], root: Path) -> tuple[Confinement, Isolation]:
    """Determine the confinement of children; after all imports."""
    fields = cast("dict[str, object]", settings["confinement"])
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    confinement = Confinement(**values)  # type: ignore[arg-type]
    if confinement.tier is not None:
        confinement = dataclasses.replace(confinement, tier=Tier(confinement.tier))
    isolation = observe(confinement, root)
    if isolation.tier >= Tier.T2:
        namespaces.leave_network(user=isolation.user_namespace)
    if isolation.tier >= Tier.T1:
        seccomp.prepare(
            execute=confinement.execute, memfd=confinement.memfd, tightens=confinement.tightens
        )
    # Or every child's first collection would copy the whole heap. Nothing is collected before: that
    # walks all of torch, for the 3 % that are garbage, and leaves holes that forks would write to.
    gc.freeze()
    gc.enable()
    return confinement, isolation


def _serve(
    channel: Channel,
    root: Path,
    handler: Callable[[Context], None],
    confinement: Confinement,
    isolation: Isolation,
) -> None:
    supervisors: dict[int, Spawn] = {}
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    first = number = os.getpid() * 7  # servers of one host rarely pick the same users
    while True:
        ready = poller.poll(1000)
        _reap(supervisors)
        if not ready:
            continue
        try:
            message = channel.recv(10.0, max_fds=_MAX_FDS)
        except ChannelClosed:
            break
        number += 1
        if number == first + FEW_CHILDREN:
            gather_pages()
        request = cast("dict[str, float | bool]", message.obj)
        spawn = Spawn(
            handler=handler,
            confinement=confinement,
            isolation=isolation,
            uid=users.uid_for(number) if isolation.drops_uid else None,
            lock_first=bool(request["lock_first"]),
            wall_limit_s=float(request["wall_limit_s"]),
            tmp=root / str(number),
            fds=message.fds,
        )
        pid = os.fork()
        if pid == 0:
            channel.close()
            supervisor.main(spawn)  # never returns
        supervisors[pid] = spawn
        for fd in message.fds:
            os.close(fd)
    # Supervisors see their own connection to the client close, and clean up themselves.
    while supervisors:
        _reap(supervisors, block=True)


def _reap(supervisors: dict[int, Spawn], *, block: bool = False) -> None:
    """Collect ended supervisors; end and remove what one of them left behind by dying too early."""
    while True:
        try:
            pid, status = os.waitpid(-1, 0 if block else os.WNOHANG)
        except ChildProcessError:
            supervisors.clear()
            return
        if pid == 0:
            return
        spawn = supervisors.pop(pid, None)
        if spawn is not None and os.WIFSIGNALED(status):
            for orphan in process_tree.children(os.getpid()):
                if orphan not in supervisors:
                    process_tree.kill_tree(orphan)
            remove_tree(spawn.tmp)
            if spawn.isolation.groups:
                folder = cgroup.folder_of(Path(spawn.isolation.groups), spawn.name)
                cgroup.kill(folder)
                cgroup.remove(folder)
        if block:
            return
