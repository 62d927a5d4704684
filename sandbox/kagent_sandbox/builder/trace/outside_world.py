"""Refuses host code that asks what differs from day to day, from call to call and from machine to
machine: clocks, random numbers, the names of host and user.

A plan holds for all calls of its shapes. Host code that reads a clock would be judged by today's
plan, and its library would do something else on another day. The functions of the standard library
refuse whoever calls them from the candidate's file, directly or through other modules of the
standard library. Torch, Triton and kagent's own code are answered. Like all rules for host code
these are for files that do not hide what they do: see `kagent_sandbox.builder.policy`.
"""

from __future__ import annotations

import datetime as dt
import functools
import os
import platform
import random
import secrets
import socket
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch

from kagent_sandbox.builder.policy import PolicyError, candidate_path
from kagent_sandbox.builder.trace.recorder import current_recorder

_ARGUMENTS_ALONE = (
    "what a call launches may depend on its arguments alone, or an exported kernel would not do "
    "what was judged: remove it"
)
_CLOCKS = (
    *("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"),
    *("process_time", "process_time_ns", "thread_time", "thread_time_ns"),
    *("clock_gettime", "clock_gettime_ns", "localtime", "gmtime", "ctime", "strftime"),
)
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = tuple(sysconfig.get_path(n) + os.sep for n in ("purelib", "platlib"))
_MAY_ASK = ("<frozen importlib", f"{_STDLIB}logging{os.sep}")  # imports, and records of a log

_first: list[PolicyError] = []  # the first refusal while the candidate is imported


def install() -> None:
    """Put the refusals in place, in this process, before the candidate is imported."""
    _first.clear()
    for name in _CLOCKS:
        _replace(time, name, "reads a clock")
    _replace(os, "times", "reads a clock")
    for name in ("datetime", "date"):
        setattr(dt, name, _without_now(getattr(dt, name)))
    for name in _functions(random):
        _replace(random, name, "draws random numbers")
    for name in ("urandom", "getrandom"):
        _replace(os, name, "draws random numbers")
    for name in _functions(secrets):
        _replace(secrets, name, "draws random numbers")
    for name in ("uuid1", "uuid4", "getnode"):
        _replace(uuid, name, "draws random numbers")
    for name in _functions(np.random):
        _replace(np.random, name, "draws random numbers")
    for name in ("seed", "initial_seed"):
        _replace(torch, name, "draws random numbers")
    for name in ("gethostname", "getfqdn"):
        _replace(socket, name, "asks for the host's name")
    _replace(platform, "node", "asks for the host's name")
    _replace(os, "getlogin", "asks for the user's name")


def first_refusal() -> PolicyError | None:
    """The first refusal since `install`: it stands even where host code caught it."""
    return _first[0] if _first else None


def _functions(module: ModuleType) -> Iterator[str]:
    """Names of what a module offers to call, but for classes."""
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if callable(value) and not isinstance(value, type):
            yield name


def _replace(module: ModuleType, name: str, does: str) -> None:
    """Put a function that refuses host code in a function's place, where the system has it."""
    function = getattr(module, name, None)
    if function is None:
        return
    what = f"host code {does} ({module.__name__}.{name})"

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _refuse_candidate(what, sys._getframe(1))  # noqa: SLF001
        return function(*args, **kwargs)

    setattr(module, name, guarded)


def _without_now(known: Any) -> Any:
    """A class of dates that refuses to tell host code today's."""

    def guarded(name: str) -> Callable[..., Any]:
        def call(_: type, *args: Any) -> Any:
            _refuse_candidate(
                f"host code reads a clock (datetime.{name})",
                sys._getframe(1),  # noqa: SLF001
            )
            return getattr(known, name)(*args)

        return call

    names = [n for n in ("now", "utcnow", "today") if hasattr(known, n)]
    members: dict[str, Any] = {n: classmethod(guarded(n)) for n in names}
    return type(known.__name__, (known,), members)


def _refuse_candidate(what: str, frame: FrameType | None) -> None:
    """Refuse a call from the candidate's file, also one through the standard library.

    Raises:
        PolicyError: It is one.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        if candidate_path(name):
            error = PolicyError(what, _ARGUMENTS_ALONE)
            _first.append(error)
            if (recorder := current_recorder()) is not None:
                recorder.refuse(error)
            raise error
        if name.startswith(_MAY_ASK):
            return
        known = name.startswith(_STDLIB) and not name.startswith(_PACKAGES)
        if not known and not name.startswith("<"):
            return
        frame = frame.f_back
