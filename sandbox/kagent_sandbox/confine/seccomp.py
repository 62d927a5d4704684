"""Seccomp through ctypes:

an allow-list in classic BPF, and a tighter one for measured native code.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import struct
from collections.abc import Iterable

from kagent_sandbox.confine import syscalls
from kagent_sandbox.confine.libc import libc, prctl, syscall

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL_PROCESS = 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _MASK, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NAMESPACES = 0x7E020000  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_CLOSE_RANGE_UNSHARE = 2
_SET_MODE_FILTER = 1
_TSYNC = 1  # the filter binds all threads of the process, also those that run already
_NEWEST_KNOWN = 462  # calls after this one are answered "not implemented": libc then falls back

# PR_SET_PDEATHSIG, GET_DUMPABLE, SET_NAME, GET_NAME, CAPBSET_READ, GET_TIMERSLACK,
# SET_NO_NEW_PRIVS, GET_NO_NEW_PRIVS, SET_THP_DISABLE, GET_THP_DISABLE, SET_VMA
_PRCTL = (1, 3, 15, 16, 23, 30, 38, 39, 41, 42, 0x53564D41)

_SET_OWNER = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX
_SET_OWNER_IOCTL = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP
# DONTNEED, by which the C library gives memory back and which drops a process's own view of shared
# pages alone; HUGEPAGE, for torch's allocator; POPULATE_WRITE, for `device.cpu.arena`. Not REMOVE,
# COLD, PAGEOUT, COLLAPSE, ..., which take pages from others, or change them.
_MADVISE = (4, 14, 23)
_MAYMOVE = 1  # of mremap's flags


class _Program:
    """Instructions of classic BPF, as (code, jump if true, jump if false, operand)."""

    def __init__(self) -> None:
        self.code: list[tuple[int, int, int, int]] = []

    def add(self, code: int, operand: int, true: int = 0, false: int = 0) -> None:
        self.code.append((code, true, false, operand))

    def argument(self, index: int, *, high: bool = False) -> None:
        """Load the low or the high half of an argument: both architectures are little-endian."""
        self.add(_LOAD, 16 + 8 * index + 4 * high)

    def refuse(self, code: int) -> None:
        self.add(_RETURN, _ERRNO | code)

    def when(self, name: str, body: _Program) -> None:
        """Run `body`, which must return, when the call is `name`.

        The accumulator holds the number.
        """
        nr = syscalls.number(name)
        if nr is not None:
            self.add(_EQUAL, nr, 0, len(body.code))
            self.code += body.code

    def prologue(self) -> None:
        machine = platform.machine()
        self.add(_LOAD, 4)
        self.add(_EQUAL, syscalls.ARCHITECTURES[machine], 1, 0)
        self.add(_RETURN, _KILL_PROCESS)
        self.add(_LOAD, 0)
        if machine == "x86_64":  # the x32 interface has other numbers for the same calls
            self.add(_AT_LEAST, 0x40000000, 0, 1)
            self.add(_RETURN, _KILL_PROCESS)

    def packed(self) -> bytes:
        return b"".join(struct.pack("HBBI", c, t, f, k) for c, t, f, k in self.code)


def _install(packed: bytes) -> None:
    buffer = ctypes.create_string_buffer(packed, len(packed))
    header = struct.pack("HxxxxxxP", len(packed) // 8, ctypes.addressof(buffer))
    program = ctypes.create_string_buffer(header, len(header))
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    nr = syscalls.number("seccomp")
    assert nr is not None
    syscall(nr, _SET_MODE_FILTER, _TSYNC, ctypes.addressof(program))


def _returns(value: int) -> _Program:
    body = _Program()
    body.add(_RETURN, value)
    return body


def _argument_in(index: int, values: Iterable[int], mask: int | None = None) -> _Program:
    body = _Program()
    body.argument(index)
    if mask is not None:
        body.add(_MASK, mask)
    for value in values:
        body.add(_EQUAL, value, 0, 1)
        body.add(_RETURN, _ALLOW)
    body.refuse(errno.EPERM)
    return body


def _argument_not_in(index: int, values: Iterable[int]) -> _Program:
    body = _Program()
    body.argument(index)
    for value in values:
        body.add(_EQUAL, value, 0, 1)
        body.refuse(errno.EPERM)
    body.add(_RETURN, _ALLOW)
    return body


def _reallocates() -> _Program:
    """Allows mremap as realloc asks for it, and nothing that leaves two mappings of shared memory.

    An old size of 0, or one that is rounded up to it, makes a second mapping; so do other flags.
    """
    body = _Program()
    body.argument(3)
    body.add(_EQUAL, 0, 2, 0)
    body.add(_EQUAL, _MAYMOVE, 1, 0)
    body.refuse(errno.EPERM)
    body.argument(1, high=True)
    body.add(_AT_LEAST, 1 << 31, 4, 0)
    body.add(_EQUAL, 0, 0, 2)
    body.argument(1)
    body.add(_EQUAL, 0, 1, 0)
    body.add(_RETURN, _ALLOW)
    body.refuse(errno.EPERM)
    return body


def _sets_no_time(path: int) -> _Program:
    """Answers "done", but refuses to set the present time of a file by its path.

    Whoever asks for that may want the file to be made: Path.touch makes it where this fails.
    """
    body = _Program()
    body.argument(path + 1)  # null: the present time
    body.add(_EQUAL, 0, 1, 0)
    body.add(_RETURN, _ERRNO)
    body.argument(path)  # null: the file of the descriptor
    body.add(_EQUAL, 0, 0, 1)
    body.add(_RETURN, _ERRNO)
    body.refuse(errno.EPERM)
    return body


def install_allow_list(*, execute: bool, memfd: bool, tightens: bool) -> None:
    """Allow what compilers, torch, OpenMP and (once its context exists) CUDA need, no more.

    `execute` allows to start programs; `memfd` anonymous files, which count in no limit but the
    polled sum; `tightens` further filters, until one of them forbids it.

    Raises:
        OSError: The kernel has no seccomp filters.
        KeyError: The machine's architecture is not known.
    """
    _install(prepare(execute=execute, memfd=memfd, tightens=tightens))


@functools.cache
def prepare(*, execute: bool, memfd: bool, tightens: bool) -> bytes:
    """The filter of `install_allow_list`: made once, by the process that is forked.

    Raises:
        KeyError: The machine's architecture is not known.
    """
    program = _Program()
    program.prologue()
    program.when("clone3", _returns(_ERRNO | errno.ENOSYS))  # libc falls back to clone
    clone = _Program()
    clone.argument(0)
    clone.add(_ANY_BIT, _NAMESPACES, 0, 1)
    clone.refuse(errno.EPERM)
    # Threads have the process's descriptors: nobody would count those of a table of their own.
    clone.add(_ANY_BIT, _CLONE_THREAD, 0, 2)
    clone.add(_ANY_BIT, _CLONE_FILES, 1, 0)
    clone.refuse(errno.EPERM)
    clone.add(_RETURN, _ALLOW)
    program.when("close_range", _argument_in(2, (0,), mask=_CLOSE_RANGE_UNSHARE))
    program.when("clone", clone)
    program.when("prctl", _argument_in(0, _PRCTL))
    program.when("prlimit64", _argument_in(0, (0,)))
    program.when("sched_setaffinity", _argument_in(0, (0,)))
    # A filter of its own could have a call answered by nobody, or "done" by nothing.
    if tightens:
        program.when("seccomp", _argument_in(0, (_SET_MODE_FILTER,)))
    # The kernel would send a signal to whoever is named the owner of a descriptor.
    program.when("fcntl", _argument_not_in(1, _SET_OWNER))
    program.when("ioctl", _argument_not_in(1, _SET_OWNER_IOCTL))
    # Datagram pairs could send to a named socket by address; streams cannot.
    program.when("socketpair", _argument_in(1, (1, 5), mask=0xF))
    # Landlock does not decide about modes and times: answer "done" and do nothing, so that linkers
    # go on.
    times = {"utime": 0, "utimes": 0, "futimesat": 1, "utimensat": 1}  # position of the path
    for name, path in times.items():
        program.when(name, _sets_no_time(path))
    modes = ("chmod", "fchmod", "fchmodat")
    for name in modes:
        program.when(name, _returns(_ERRNO))
    names = {"fork", "vfork"}
    for group in ("FILES", "MEMORY", "PROCESSES", "SIGNALS", "TIME", "WAITING"):
        names |= getattr(syscalls, group).keys()
    names |= {"execve", "execveat"} if execute else set()
    names |= {"memfd_create"} if memfd else set()
    for name in sorted(names.difference(modes, times, ("fcntl", "ioctl", "close_range"))):
        program.when(name, _returns(_ALLOW))
    program.add(_AT_LEAST, _NEWEST_KNOWN + 1, 0, 1)
    program.refuse(errno.ENOSYS)
    program.refuse(errno.EPERM)
    return program.packed()


def forbid_new_threads() -> None:
    """Forbid new threads, processes, programs, timers and further filters, in all threads, on top
    of the allow-list.

    Nor may a signal be set to come later: SIGCONT would wake a process that the judge stopped. Nor
    may pages of shared memory be given back, or mapped twice.

    Raises:
        OSError: The kernel refuses the filter.
    """
    program = _Program()
    program.prologue()
    program.when("clone3", _returns(_ERRNO | errno.ENOSYS))
    for name in ("clone", "fork", "vfork", "execve", "execveat", "kill", "setsid", "setpgid"):
        program.when(name, _returns(_ERRNO | errno.EPERM))
    for name in ("timer_create", "setitimer", "alarm", "memfd_create", "timerfd_create"):
        program.when(name, _returns(_ERRNO | errno.EPERM))
    program.when("prctl", _argument_not_in(0, (1,)))  # PR_SET_PDEATHSIG
    # Nor may a thread take back the judge's SIGSTOP: SIGCONT drops it before all have stopped.
    for name, argument in (("tkill", 1), ("tgkill", 2), ("pidfd_send_signal", 1)):
        program.when(name, _argument_not_in(argument, (18,)))
    # SIGCONT also says that there are new inputs, before anything is asked: nobody handles it.
    program.when("rt_sigaction", _argument_not_in(0, (18,)))
    tells = ("rt_sigtimedwait", "rt_sigsuspend", "pause", "signalfd4")
    for name in (*tells, "epoll_wait", "epoll_pwait", "epoll_pwait2"):  # calls that it interrupts
        program.when(name, _returns(_ERRNO | errno.EPERM))
    program.when("setsockopt", _returns(_ERRNO | errno.EPERM))  # a receive with a limit is one, too
    # The arena is shared with whoever is timed next: its pages stay there, and where they are. No
    # descriptor of it is here; none that was overlooked shall be of use.
    program.when("madvise", _argument_in(2, _MADVISE))
    program.when("mremap", _reallocates())
    for name in ("fallocate", "ftruncate", "mbind", "set_mempolicy", "seccomp"):
        program.when(name, _returns(_ERRNO | errno.EPERM))
    program.add(_RETURN, _ALLOW)
    _install(program.packed())


def available() -> bool:
    """Whether the kernel and the architecture have seccomp filters."""
    return platform.machine() in syscalls.ARCHITECTURES and int(libc.prctl(21, 0, 0, 0, 0)) >= 0
