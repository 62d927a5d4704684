"""A process and all that it started: found, stopped, killed, weighed. Through /proc alone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator

_EXITING = 0x4  # PF_EXITING, of the flags in proc_pid_stat(5)


def children(pid: int) -> list[int]:
    """Direct children of a process, of all its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file,
            ):
                found += [int(word) for word in file.read().split()]
    return found


def descendants(pid: int) -> list[int]:
    """All processes under `pid`, parents first."""
    found: list[int] = []
    level = [pid]
    while level:
        level = [c for p in level for c in children(p)]
        found += level
    return found


def kill_tree(pid: int) -> None:
    """Kill a process and all under it that can be seen."""
    for victim in (*reversed(descendants(pid)), pid):
        send(victim, signal.SIGKILL)


def kill_all(root: int, besides: Collection[int] = ()) -> None:
    """Kill everything under `root`, `besides` a few.

    Frozen first, until nothing new appears: whoever is killed makes room under the limit of
    processes, in which a fork bomb would grow again.
    """
    frozen: set[int] = set()
    while new := set(descendants(root)).difference(frozen, besides):
        for pid in new:
            send(pid, signal.SIGSTOP)
        frozen |= new
    for pid in frozen:
        send(pid, signal.SIGKILL)


def stop_tree(first: int, root: int, besides: Collection[int] = ()) -> bool:
    """Stop every thread of every process under `root`, `besides` a few, and wait until all are.

    False after a second.
    """
    deadline = time.monotonic() + 1.0
    send(first, signal.SIGSTOP)
    while time.monotonic() < deadline:
        running = [p for p in descendants(root) if p not in besides and not _stopped(p)]
        if not running:
            return True
        for pid in running:
            send(pid, signal.SIGSTOP)
        time.sleep(0.00005)
    return False


def wait_until_stopped(pid: int) -> bool:
    """Whether every thread of a process that was sent SIGSTOP is stopped, or it has ended. False
    after 10 s, and where it has ended.
    """
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        states = [fields[0] for _, fields in _tasks(pid)]
        if not states or all(s in "ZX" for s in states):
            return False
        if all(s in "TtZX" for s in states):
            return True
        time.sleep(0.00002)
    return False


def _stopped(pid: int) -> bool:
    return all(fields[0] in "TtZX" for _, fields in _tasks(pid))


def is_stopped(pid: int) -> bool:
    """Whether a process exists and every thread of it is stopped: somebody sent it SIGSTOP."""
    states = [fields[0] for _, fields in _tasks(pid)]
    return bool(states) and all(s in "Tt" for s in states)


def exiting(pid: int) -> bool:
    """Whether all of a process has ended and the kernel takes it apart: that of a GPU's context
    may last seconds. Not one that is done, and that only its parent's question keeps.
    """
    tasks = [fields for _, fields in _tasks(pid)]
    return all(int(fields[6]) & _EXITING for fields in tasks) and any(
        fields[0] not in "ZX" for fields in tasks
    )


def ended(pid: int) -> bool:
    """Whether there is no such process, or only its entry, which its parent has not asked about."""
    return all(fields[0] in "ZX" for _, fields in _tasks(pid))


def began(pid: int) -> int | None:
    """When a process was started, in clock ticks since the machine was; None where it is gone."""
    return next((int(fields[19]) for task, fields in _tasks(pid) if task == str(pid)), None)


def _tasks(pid: int) -> Iterator[tuple[str, list[str]]]:
    """Return each thread's number, and the text of its `stat` after its name, from its state on."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{pid}/task/{task}/stat", encoding="latin-1") as file,
            ):
                yield task, file.read().rpartition(")")[2].split()


def used_cpu_s(root: int) -> float:
    """CPU time in seconds of a process and all under it, also of those that have ended, once their
    parents have asked about them.
    """
    ticks = 0
    for pid in (root, *descendants(root)):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def end_stopped(pids: Iterable[int]) -> None:
    """End those processes that somebody has stopped: they would neither answer nor notice that they
    are to end.
    """
    for pid in pids:
        if is_stopped(pid):
            send(pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    """Signal a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def alive(pid: int) -> str:
    """The folder in /proc that tells of a process: of another of its threads where the first one
    has ended by itself, since that one's says nothing of memory and files any more.
    """
    running = (task for task, fields in _tasks(pid) if fields[0] not in "ZX")
    return f"/proc/{next(running, pid)}"


def tasks(pids: Iterable[int]) -> int:
    """Threads of all the processes."""
    count = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            # each is one link of the task folder, besides . and ..
            count += os.stat(f"/proc/{pid}/task").st_nlink - 2
    return count


def open_files(pids: Iterable[int]) -> int:
    """Open descriptors of all the processes, as far as the caller may look."""
    count = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            count += len(os.listdir(f"{alive(pid)}/fd"))
    return count
