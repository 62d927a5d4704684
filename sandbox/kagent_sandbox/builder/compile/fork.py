"""A fork of a candidate's process that stays, and compiles Triton kernels for the forks that trace.

Cases are traced in fresh forks, where the compiler's memory and code must be paged in again: 30 ms
of the first compile in each. Here the second compile finds them. A tracing fork asks with the
kernel's name and plain data; the kernel comes back through Triton's cache in the candidate's
private folder, under the very key that the tracing fork looks for. What cannot be asked that way,
or fails, it compiles itself. Both are the candidate's own processes: neither needs to trust the
other.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kagent_sandbox.builder.compile import remarks
from kagent_sandbox.builder.compile.time_limit import compile_limit, too_slow
from kagent_sandbox.builder.policy import BuildRejected
from kagent_sandbox.process.channel import Channel, ChannelError

_channel: Channel | None = None  # in a tracing fork: to its compile fork
_kernels: Mapping[str, Any] = {}


def use(channel: Channel | None, kernels: Mapping[str, Any]) -> None:
    """Use the compile fork at the other end of `channel`. Called in a tracing fork."""
    global _channel, _kernels
    _channel, _kernels = channel, kernels


def module_kernels(module: ModuleType) -> dict[str, Any]:
    """Triton kernels that a module defines, by name, out of whatever decorators wrap them."""
    found = {}
    for name, value in vars(module).items():
        kernel = value
        while kernel is not None and not isinstance(kernel, JITFunction):
            kernel = getattr(kernel, "fn", None) if hasattr(kernel, "arg_names") else None
        if kernel is not None:
            found[name] = kernel
    return found


def compile_ahead(
    kernel: Any, signature: object, constexprs: object, attrs: object, options: Any
) -> list[str]:
    """Have the compile fork put a kernel into the cache, if there is one and it can.

    Returns:
        What the compiler remarked.

    Raises:
        SlowCompile: It took longer than its limit.
    """
    name = next((n for n, k in _kernels.items() if k is kernel), None)
    if _channel is None or name is None:
        return []
    asked = (name, kernel.cache_key, signature, constexprs, attrs, dict(vars(options)))
    with contextlib.suppress(ValueError, SyntaxError, ChannelError):
        text = repr(asked)
        if ast.literal_eval(text) == asked:
            _channel.send(text)
            said = cast("list[str] | None", _channel.recv(None).obj)
            if said is None:
                raise SlowCompile
            return said
    return []


class SlowCompile(Exception):  # noqa: N818
    """The compile fork gave a kernel up: it took longer than its limit."""


class CompileFork:
    """The worker's hold on a compile fork.

    Args:
        kernels: What it may be asked for.
        prepare: Called in it first: sets the tunables of a configuration.
        limit_s: CPU time in seconds for one kernel; None: no limit.
    """

    def __init__(
        self,
        kernels: Mapping[str, Any],
        prepare: Callable[[], None],
        limit_s: float | None = None,
    ) -> None:
        self.channel, theirs = Channel.pair()
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            self.channel.close()
            _serve(Channel(theirs), kernels, prepare, limit_s)
        theirs.close()

    def close(self) -> None:
        """End it, and the compiler that it may have started."""
        end_group(self.pid)
        self.channel.close()


def _serve(
    channel: Channel,
    kernels: Mapping[str, Any],
    prepare: Callable[[], None],
    limit_s: float | None,
) -> NoReturn:
    with contextlib.suppress(BaseException):  # the caller sees the channel close, and compiles
        prepare()
        asked = set[str]()
        while True:
            text = cast("str", channel.recv(None).obj)
            said: list[str] | None = []
            if text not in asked:
                with contextlib.suppress(
                    Exception
                ):  # it fails again, and is told, where it is used
                    try:
                        with remarks.heard() as printed:
                            _compile(kernels, text, limit_s)
                        said = remarks.of_triton(printed[0])
                    except BuildRejected:
                        said = None  # it took too long, and would take as long again
            asked.add(text)
            channel.send(said)
    os._exit(0)


def _compile(kernels: Mapping[str, Any], text: str, limit_s: float | None) -> None:
    name, key, signature, constexprs, attrs, options = ast.literal_eval(text)
    if kernels[name].cache_key != key:
        return  # host code has changed what the kernel reads
    kind = GluonASTSource if kernels[name].is_gluon() else ASTSource
    source = kind(kernels[name], signature, constexprs, attrs)
    active: Any = driver.active
    compiler: Any = triton.compile
    lock = Path(tempfile.gettempdir()) / f"{hashlib.sha256(text.encode()).hexdigest()}.lock"
    with lock.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another lane may be at it: then it is in the cache
        if os.fstat(file.fileno()).st_size:  # or took too long there
            raise too_slow(name, limit_s or 0.0)
        try:
            with compile_limit(name, limit_s):
                compiler(source, target=active.get_current_target(), options=options)
        except BuildRejected:
            file.write("too slow")
            raise


def end_group(pid: int) -> int:
    """Kill a fork and the compilers that it may have left; returns its exit code."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
