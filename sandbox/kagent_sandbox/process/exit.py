"""Ending a process whose client is gone, also while it is busy with what the client asked for."""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import threading
import time
from typing import NoReturn

GRACE_S = 2.0


def exit_when_peer_closes(fd: int, grace_s: float = GRACE_S) -> None:
    """Kill this process, and its group where it leads one, some time after the other end of a
    socket or pipe is closed.

    A process that is not busy notices by itself, and cleans up within `grace_s`. The thread that
    waits costs nothing while it does.
    """
    threading.Thread(target=_wait, args=(fd, grace_s), name="hang-up", daemon=True).start()


def _wait(fd: int, grace_s: float) -> None:
    poller = select.poll()
    poller.register(fd, 0)  # hang-ups and errors are always reported
    while not poller.poll():
        continue
    time.sleep(grace_s)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def exit_fast() -> NoReturn:
    """End this process without taking the interpreter apart: with torch in it that takes 0.7 s, for
    which whoever started it waits.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - what libraries want done before the end
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
