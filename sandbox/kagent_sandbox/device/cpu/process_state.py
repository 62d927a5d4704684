"""The confined side of the question whether native code leaves its process as it found it.

Native code shares this process and could falsify what is said here: this finds carelessness. What
the kernel shows from outside is `device.process_snapshot`'s to look at.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
import platform
import resource
import signal
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from kagent_sandbox.confine.libc import libc
from kagent_sandbox.data.plan import PlanError
from kagent_sandbox.device.process_snapshot import signal_names

State: TypeAlias = Mapping[str, object]

_X86 = platform.machine() == "x86_64"
_FENV_BYTES = 64  # more than any fenv_t
_SIGACTION_BYTES = 152
_STACK_T_BYTES = 24
# Nobody may ask for SIGCONT's handler here; the C library keeps two signals for itself.
_SIGNALS = sorted({*range(1, 65)} - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, 32, 33})
_ROUNDING = ("to nearest", "downwards", "upwards", "towards zero")
_PROT_READ, _PROT_WRITE = 1, 2
_LIMITS = sorted({n for name, n in vars(resource).items() if name.startswith("RLIMIT_")})
_LC_ALL = 6


class ProcessStateChanged(Exception):  # noqa: N818
    """Native code left something changed; the text says what."""


@dataclass
class ProcessState:
    """State of a process as its caller sees it, before and after native code."""

    _before: State = field(default_factory=dict)
    _used: int = 0
    _lent: Sequence[tuple[int, int]] = ()

    def perform(self, request: Mapping[str, object], arena: int, nbytes: int) -> None:
        """Carry out one request of the judge over the arena at address `arena`.

        Raises:
            ProcessStateChanged: Something is not as it was.
            PlanError: The request makes no sense.
        """
        what = request["what"]
        if what == "remember":
            self._before = _state()
        elif what == "compare":
            found = differences(self._before, _state())
            if found:
                raise ProcessStateChanged("; ".join(found))
        elif what == "count":
            used = _used_bytes()
            more, self._used = used - self._used, used
            if more > 0:
                raise ProcessStateChanged(str(more))
        elif what == "lend":
            for start, stop in self._lent:
                _protect(arena + start, stop - start, _PROT_READ | _PROT_WRITE)
            ranges = [(a, b) for a, b in cast("list[list[int]]", request["ranges"])]
            self._lent = ()
            for start, stop in ranges:
                if not 0 <= start <= stop <= nbytes:
                    raise PlanError(f"bytes {start} to {stop} are not in the arena")
                _protect(arena + start, stop - start, _PROT_READ)
                self._lent = (*self._lent, (start, stop))
        else:
            raise PlanError(f"unknown request {what!r}")


def differences(before: State, after: State) -> list[str]:
    """Describe the differences between two states in words."""
    found: list[str] = []
    for key, one in before.items():
        other = after[key]
        if one == other:
            continue
        if key == "floating point":
            found += _floating_point(cast("_Controls", one), cast("_Controls", other))
        elif key == "signals":
            pairs = zip(_SIGNALS, cast("Sequence[bytes]", one), cast("Any", other), strict=True)
            names = signal_names([n for n, a, b in pairs if a != b])
            found.append(f"the handler of {names} is another one")
        elif isinstance(one, int | str):
            found.append(f"{key} is {other}, and was {one}")
        else:
            found.append(f"{key} is not as it was")
    return found


_Controls: TypeAlias = Sequence[tuple[int, int, int]]
"""By thread: the control words of the x87 and of SSE, and the x87's registers in use."""


def _state() -> State:
    """All that is compared."""
    stack = ctypes.create_string_buffer(_STACK_T_BYTES)
    libc.sigaltstack(None, stack)
    state: dict[str, object] = {
        "floating point": _controls(),
        "signals": [_handler(n) for n in _SIGNALS],
        "the mask of blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "the alternate stack for signals": stack.raw,
        "the locale": _locale(),
        "the working directory": os.getcwd(),
        "the environment": _environment(),
        "the limits of resources": [resource.getrlimit(n) for n in _LIMITS],
        "the handler of std::terminate or of std::new": _handlers_of_cpp(),
    }
    gomp = _gomp()
    if gomp is not None:
        state["OpenMP's number of threads"] = int(gomp.omp_get_max_threads())
        state["OpenMP's dynamic adjustment of threads"] = int(gomp.omp_get_dynamic())
        state["OpenMP's number of nested levels"] = int(gomp.omp_get_max_active_levels())
        state["OpenMP's schedule"] = _schedule(gomp)
    return state


def _controls() -> _Controls:
    """Control words of floating point of the calling thread and of all of OpenMP's, sorted."""
    gomp = _gomp()
    if gomp is None:
        return [_control()]
    found: list[tuple[int, int, int]] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: found.append(_control()))
    gomp.GOMP_parallel(callback, None, ctypes.c_uint(0), ctypes.c_uint(0))
    return [_control(), *sorted(found)]


def _control() -> tuple[int, int, int]:
    """This thread's control words (on x86 of the x87 and of SSE), without the exceptions so far.

    The third is the x87's word of tags: a function returns with all of these registers empty. MMX
    takes them, and gives them back by `emms` alone.
    """
    state = ctypes.create_string_buffer(_FENV_BYTES)
    _libm().fegetenv(state)
    if _X86:
        x87, tags, mxcsr = struct.unpack_from("H6xH18xI", state.raw)
        return x87, mxcsr & ~0x3F, tags
    return 0, struct.unpack_from("I", state.raw)[0], 0


def _floating_point(before: _Controls, after: _Controls) -> list[str]:
    """Describe the differences of control words over all threads."""
    if len(before) != len(after):
        return [f"OpenMP has {len(after) - 1} threads, and had {len(before) - 1}"]
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    found: dict[str, None] = {}
    for (x87, word, tags), (x87_now, word_now, tags_now) in pairs:
        shift, subnormals, traps = (13, 0x8040, 0x1F80) if _X86 else (22, 1 << 24, 0x9F00)
        rounding, rounding_now = (_rounding(w, shift) for w in (word, word_now))
        if rounding != rounding_now:
            found[f"the rounding mode is {rounding_now}, and was {rounding}"] = None
        if (word ^ word_now) & subnormals:
            found["whether subnormal numbers are turned to zero (FTZ, DAZ) is not as it was"] = None
        if (word ^ word_now) & traps:
            found["which floating-point exceptions trap is not as it was"] = None
        if x87 != x87_now:
            found["the x87's control word (rounding, precision, traps) is not as it was"] = None
        if tags != tags_now:
            found["registers of the x87 are in use (MMX without emms?): long double is NaN"] = None
    return list(found) or ["the floating-point environment is not as it was"]


def _rounding(word: int, shift: int) -> str:
    mode = word >> shift & 3
    # Arm has upwards and downwards the other way round.
    return _ROUNDING[mode if _X86 else (0, 2, 1, 3)[mode]]


def _handler(number: int) -> bytes:
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    libc.sigaction(number, None, action)
    handler, mask, flags = action.raw[:8], action.raw[8:16], action.raw[136:140]
    if int.from_bytes(handler, "little") in (signal.SIG_DFL, signal.SIG_IGN):
        return handler  # nothing runs with the mask
    return handler + mask + flags  # the C library leaves anything in the rest of its mask


def _handlers_of_cpp() -> tuple[int | None, ...]:
    """Addresses of the functions that C++ calls where it gives up, or lacks memory."""
    try:
        cpp = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return ()
    getters = (cpp._ZSt13get_terminatev, cpp._ZSt15get_new_handlerv)  # noqa: SLF001 - mangled names
    for getter in getters:
        getter.restype = ctypes.c_void_p
    return tuple(getter() for getter in getters)


def _schedule(gomp: ctypes.CDLL) -> str:
    """The schedule of loops that leave it to the caller, as OMP_SCHEDULE has it: kind and chunk."""
    kind, chunk = ctypes.c_uint(), ctypes.c_int()
    gomp.omp_get_schedule(ctypes.byref(kind), ctypes.byref(chunk))
    names = {1: "static", 2: "dynamic", 3: "guided", 4: "auto"}
    return f"{names.get(kind.value & 0xFF, kind.value)},{chunk.value}"


def _locale() -> str:
    setlocale = libc.setlocale
    setlocale.restype = ctypes.c_char_p
    return bytes(setlocale(_LC_ALL, None) or b"").decode("ascii", "replace")


def _environment() -> tuple[bytes, ...]:
    """Environment as C sees it: Python's own view is a copy."""
    pointers = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    found: list[bytes] = []
    while pointers and pointers[len(found)] is not None:
        found.append(pointers[len(found)])
    return tuple(sorted(found))


class _Mallinfo2(ctypes.Structure):
    """Counters of the C library: bytes and numbers of blocks."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _used_bytes() -> int:
    """Memory that was allocated and not freed, to the byte; 0 where the C library does not say."""
    try:
        mallinfo2 = libc.mallinfo2
    except AttributeError:  # glibc before 2.33, and others
        return 0
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


@functools.cache
def _libm() -> ctypes.CDLL:
    return ctypes.CDLL("libm.so.6")


@functools.cache
def _gomp() -> ctypes.CDLL | None:
    """The OpenMP that kernels link; None where there is no g++."""
    try:
        return ctypes.CDLL("libgomp.so.1")
    except OSError:
        return None


_mprotect: Callable[..., int] = libc.mprotect


def _protect(address: int, nbytes: int, access: int) -> None:
    if _mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), access):
        raise OSError(ctypes.get_errno(), "mprotect failed")
