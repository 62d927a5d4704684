"""The process that children are forked from: imports once, stays single-threaded, and never touches
a device.

Runs as `python -I -c ... main(fd)` with a clean environment. It must never start a thread or run a
parallel torch operation (a forked child's OpenMP would hang) and never call cuInit (CUDA does not
survive a fork).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kagent_sandbox import process_tree, supervisor
from kagent_sandbox.channel import Channel, ChannelClosed
from kagent_sandbox.confine import landlock, policy, seccomp, users
from kagent_sandbox.confine.libc import prctl
from kagent_sandbox.confine.policy import Confinement, Tier
from kagent_sandbox.context import Context

_MAX_FDS = 64


@dataclass(frozen=True)
class Isolation:
    """What this host gives, found by trying it in a forked child."""

    tier: Tier
    landlock_abi: int
    seccomp: bool
    drops_uid: bool  # children run as a user that owns nothing
    need_search: (
        bool  # ... who keeps the right to read files whatever their mode (Landlock decides)
    )


def main(fd: int) -> None:
    """Serve spawn requests from the client at the other end of `fd` until it closes it or dies."""
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
        shutil.rmtree(root, ignore_errors=True)


def _run(channel: Channel, settings: dict[str, object], root: Path) -> None:
    try:
        handler, confinement, isolation = _prepare(settings)
    except Exception:  # noqa: BLE001 - whatever a module raises at import is the client's to report
        channel.send({"error": traceback.format_exc()})
        return
    channel.send(
        {
            "tier": isolation.tier,
            "landlock_abi": isolation.landlock_abi,
            "seccomp": isolation.seccomp,
            "drops_uid": isolation.drops_uid,
        }
    )
    if isolation.tier is Tier.T1 or confinement.allow_tier0:
        _serve(channel, root, handler, confinement, isolation)


def _prepare(
    settings: dict[str, object],
) -> tuple[Callable[[Context], None], Confinement, Isolation]:
    for module in cast("list[str]", settings["preload"]):
        importlib.import_module(module)
    module_name, _, function = str(settings["handler"]).partition(":")
    handler = getattr(importlib.import_module(module_name), function)
    fields = cast("dict[str, object]", settings["confinement"])
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    confinement = Confinement(**values)  # type: ignore[arg-type]
    isolation = try_isolation(confinement, Path(str(settings["root"])))
    gc.collect()
    gc.freeze()  # or every child's first collection would copy the whole heap
    return handler, confinement, isolation


def try_isolation(confinement: Confinement, root: Path) -> Isolation:
    """Find out what works here by doing it, in forked children."""
    drops = os.getuid() == 0 and _succeeds(lambda: users.become(users.FIRST_UID, need_search=False))
    need_search = drops and not policy.readable_by_others(confinement.read)

    def locked() -> None:
        policy.enter(confinement, users.FIRST_UID if drops else None, need_search=need_search)
        policy.lock(confinement, root)
        with contextlib.suppress(PermissionError):
            os.listdir("/etc")
            raise RuntimeError("Landlock does not bind")
        with contextlib.suppress(PermissionError):
            socket.socket()
            raise RuntimeError("seccomp does not bind")
        importlib.import_module("colorsys")  # the interpreter's own folder must stay readable

    works = landlock.abi() > 0 and seccomp.available() and _succeeds(locked)
    return Isolation(
        Tier.T1 if works else Tier.T0, landlock.abi(), seccomp.available(), drops, need_search
    )


def _succeeds(action: Callable[[], None]) -> bool:
    """Whether `action` works, tried in a child of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:  # noqa: BLE001 - a probe reports by its exit status alone
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def _serve(
    channel: Channel,
    root: Path,
    handler: Callable[[Context], None],
    confinement: Confinement,
    isolation: Isolation,
) -> None:
    supervisors: set[int] = set()
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    number = os.getpid() * 7  # servers of one host rarely pick the same users
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
        request = cast("dict[str, float | bool]", message.obj)
        spawn = supervisor.Spawn(
            handler=handler,
            confinement=confinement,
            lockable=isolation.tier is Tier.T1,
            uid=users.uid_for(number) if isolation.drops_uid else None,
            need_search=isolation.need_search,
            lock_first=bool(request["lock_first"]),
            wall_limit_s=float(request["wall_limit_s"]),
            tmp=root / str(number),
            fds=message.fds,
        )
        pid = os.fork()
        if pid == 0:
            channel.close()
            supervisor.main(spawn)  # never returns
        supervisors.add(pid)
        for fd in message.fds:
            os.close(fd)
    # Supervisors see their own connection to the client close, and clean up themselves.
    while supervisors:
        _reap(supervisors, block=True)


def _reap(supervisors: set[int], *, block: bool = False) -> None:
    """Collect ended supervisors; kill what one of them left behind by dying too early."""
    while True:
        try:
            pid, status = os.waitpid(-1, 0 if block else os.WNOHANG)
        except ChildProcessError:
            supervisors.clear()
            return
        if pid == 0:
            return
        known = pid in supervisors
        supervisors.discard(pid)
        if known and os.WIFSIGNALED(status):
            for orphan in process_tree.children(os.getpid()):
                if orphan not in supervisors:
                    process_tree.kill_tree(orphan)
        if block:
            return
