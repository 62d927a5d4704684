"""The confined side of a fork: from the supervisor's copy of the zygote to the handler."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import socket
import sys
import tempfile
import traceback
from typing import TYPE_CHECKING, NoReturn

from kagent_sandbox.confine import namespaces, policy
from kagent_sandbox.confine.libc import prctl
from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.process.channel import Channel
from kagent_sandbox.process.context import Context

if TYPE_CHECKING:
    from kagent_sandbox.confine.cgroup import ControlGroup
    from kagent_sandbox.process.spawn import Spawn


def main(spawn: Spawn, group: ControlGroup | None, log_fd: int) -> NoReturn:
    """Become the child: descriptors, folder, limits, user, lock, handler. Never returns."""
    code = 1
    try:
        context = _enter(spawn, group, log_fd)
        faulthandler.enable()  # a crash leaves a Python traceback in the log
        spawn.handler(context)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:  # noqa: BLE001 - the process boundary: the client reads it in the log
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        os._exit(code & 0xFF)


def _enter(spawn: Spawn, group: ControlGroup | None, log_fd: int) -> Context:
    supervisor = os.getppid()  # 0 if it is in another process namespace
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a second line, the supervisor is the first
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    if group is not None:
        group.enter()
    _close_all_but({0, 1, 2, spawn.fds[0], *spawn.fds[3:]})
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # when memory runs out, this process goes first
    private = str(spawn.tmp)
    limits = spawn.confinement
    if spawn.isolation.tier >= Tier.T2:
        namespaces.leave_mounts(
            spawn.tmp,
            limits.paths,
            uid=spawn.uid,
            disk_bytes=limits.disk_bytes,
            disk_files=limits.disk_files,
        )
    os.chdir(private)
    os.environ.update(
        HOME=private,
        TMPDIR=private,
        XDG_CACHE_HOME=f"{private}/cache",
        TRITON_CACHE_DIR=f"{private}/triton",
        TORCHINDUCTOR_CACHE_DIR=f"{private}/inductor",
        CUDA_CACHE_DISABLE="1",
        USER="kagent",
        LOGNAME="kagent",
    )
    tempfile.tempdir = None
    random.seed()
    policy.enter(limits, spawn.uid, need_search=spawn.isolation.need_search)
    prctl(1, signal.SIGKILL)  # changing the user cleared it
    if os.getppid() != supervisor:
        raise RuntimeError("the supervisor is gone")
    locked = False

    def lock() -> None:
        nonlocal locked
        if not locked and spawn.isolation.tier >= Tier.T1:
            policy.lock(limits, spawn.tmp)
        locked = True

    if spawn.lock_first:
        lock()
    channel = Channel(socket.socket(fileno=spawn.fds[0]))
    return Context(channel, spawn.fds[3:], spawn.tmp, lock)


def _close_all_but(keep: set[int]) -> None:
    low = 0
    for fd in sorted(keep):
        if low < fd:  # an empty range would mean all of them to close_range(2)
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 1 << 20)
