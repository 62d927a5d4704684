"""Kernels with a source, compiled once per source and target, and kept on disk between forks."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from kagent_sandbox.builder.binary.inspect import kernel_info
from kagent_sandbox.builder.compile.time_limit import compile_limit
from kagent_sandbox.builder.policy import BuildRejected
from kagent_sandbox.data.language import language
from kagent_sandbox.data.plan import KernelInfo
from kagent_sandbox.data.target import parse_target
from kagent_sandbox.data.verdict import Stage, Status
from kagent_sandbox.runtime.arguments import Parameter
from kagent_sandbox.runtime.errors import CompileError
from kagent_sandbox.runtime.launches import Launching
from kagent_sandbox.runtime.source import Source

cache_folder: Path | None = None
"""Folder of binaries for the forks of one candidate: private, never shared between candidates."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A binary, what it says about the kernel, and the types of its parameters."""

    binary: bytes
    info: KernelInfo
    parameters: tuple[Parameter, ...]


class Compiler(Protocol):
    """Interface of the module that a language names as its compiler."""

    def compile_source(self, source: Source, target: str) -> tuple[bytes, str]:
        """A binary for the target, and the symbol of the kernel in it.

        Raises:
            CompileError: The source was refused.
            ToolchainError: The compiler or its headers are missing.
        """

    def parameters(self, source: Source, binary: bytes, info: KernelInfo) -> tuple[Parameter, ...]:
        """Types of the kernel's parameters."""


_done: dict[str, Compiled] = {}


def compiled(source: Source, target: str, limit_s: float | None = None) -> Compiled:
    """Compile for `target` ("cpu", "sm_90a"), or take what an earlier call left.

    Raises:
        CompileError: The source was refused.
        BuildRejected: It took longer than `limit_s`.
        ToolchainError: The compiler or its headers are missing.
    """
    key = source.key(target)
    if key not in _done:
        stored = cache_folder / f"{key}.bin" if cache_folder else None
        found = _stored(stored)
        if found is None:
            with compile_limit(source.name, limit_s) as told, _alone(stored):
                found = _stored(stored)  # by a fork that was traced at the same time
                if found is None:
                    found = _compile_once(source, target, stored, told)
        _done[key] = _describe(source, *found)
    return _done[key]


def _compile_once(
    source: Source, target: str, stored: Path | None, told: Callable[[Exception], Exception]
) -> tuple[bytes, str]:
    """Compile, unless a fork did that was refused: it would be again, maybe after its whole limit.
    One that lacked memory may be luckier in another.

    `told` says what an exception becomes further up.
    """
    refused = stored.with_suffix(".refused") if stored else None
    if refused is not None and refused.is_file():
        raise _parsed(refused.read_text())
    try:
        found = _compiler(source).compile_source(source, target)
    except (CompileError, BuildRejected) as error:
        last = told(error)
        lacked = isinstance(last, CompileError) and last.over_limit
        if refused is not None and not lacked:
            _write(refused, _as_text(last).encode())
        raise
    binary, symbol = found
    if stored is not None:
        _write(stored, symbol.encode() + b"\0" + binary)
    return found


def _as_text(error: Exception) -> str:
    if isinstance(error, BuildRejected):
        return json.dumps({"stage": error.stage, "status": error.status, "text": error.message})
    assert isinstance(error, CompileError)
    return json.dumps({"kernel": error.kernel, "text": str(error)})


def _parsed(text: str) -> Exception:
    said = json.loads(text)
    if "kernel" not in said:
        return BuildRejected(Stage(said["stage"]), Status(said["status"]), said["text"])
    error = CompileError(said["kernel"], "")
    error.args = (said["text"],)
    return error


@contextlib.contextmanager
def _alone(stored: Path | None) -> Iterator[None]:
    """One fork compiles while others that need the same wait; its death lets go, too."""
    if stored is None:
        yield
        return
    with open(stored.with_suffix(".lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stored(stored: Path | None) -> tuple[bytes, str] | None:
    """A kept binary and its symbol."""
    if stored is None or not stored.is_file():
        return None
    symbol, _, binary = stored.read_bytes().partition(b"\0")
    return binary, symbol.decode()


def _write(file: Path, data: bytes) -> None:
    """Write a file for others, whole: this process may be killed."""
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(file)


def _compiler(source: Source) -> Compiler:
    return cast("Compiler", importlib.import_module(language(source.language).compiler))


def _describe(source: Source, binary: bytes, symbol: str) -> Compiled:
    info = kernel_info(binary, symbol, source.language)
    return Compiled(binary, info, _compiler(source).parameters(source, binary, info))


def over_limits(
    info: KernelInfo, launch: Launching, target: str, name: str | None = None
) -> tuple[str, str] | None:
    """Return what a launch asks for that the target never grants, and the remedy; None if there is
    nothing. `name` is the candidate's name of the kernel, where its symbol is mangled.

    Not checked: whether a cooperative grid fits the device at once, which is for the launcher.
    """
    if target == "cpu":
        return None
    name = name or info.name
    limits = parse_target(target)
    threads = math.prod(launch.block)
    if threads > limits.threads_per_block or launch.block[2] > 64:
        return (
            f"kernel {name} is launched with blocks of {_times(launch.block)} threads",
            f"use at most {limits.threads_per_block}, 64 along z",
        )
    registers = -(-max(info.registers, 1) // 8) * 8
    if registers * -(-threads // 32) * 32 > limits.registers_per_multiprocessor:
        return (
            f"kernel {name} needs {info.registers} registers a thread: too many for "
            f"{threads} threads",
            "declare __launch_bounds__(threads), or use fewer threads",
        )
    shared = launch.shared + info.static_shared_bytes
    if launch.shared < 0 or shared > limits.shared_per_block:
        return (
            f"kernel {name} asks for {shared} bytes of shared memory a block",
            f"{target} has {limits.shared_per_block}",
        )
    if max(launch.grid[1:]) > 65535:
        return (
            f"kernel {name} is launched with a grid of {_times(launch.grid)} blocks",
            "y and z take at most 65535: use x for the large axis",
        )
    if (launch.cluster or launch.pdl) and limits.capability < 90:
        return f"kernel {name} is launched with cluster or pdl", f"{target} has neither"
    if launch.cluster is not None:
        uneven = any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True))
        if uneven or math.prod(launch.cluster) > 16:
            return (
                f"kernel {name}: clusters of {_times(launch.cluster)} in a grid of "
                f"{_times(launch.grid)} blocks",
                "a cluster has at most 16 blocks, and the grid is a multiple of it",
            )
    return None


def _times(sizes: tuple[int, int, int]) -> str:
    return "x".join(map(str, sizes))
