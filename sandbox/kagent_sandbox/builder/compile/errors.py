"""Errors of compilers as rejections: the innermost cause, at the line of the candidate's file."""

from __future__ import annotations

import inspect
from types import ModuleType

from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
from triton.runtime.errors import OutOfResources, PTXASError

from kagent_sandbox.builder.binary.inspect import InspectError
from kagent_sandbox.builder.policy import BuildRejected, at_line, source_line, where
from kagent_sandbox.data.verdict import Stage, Status
from kagent_sandbox.runtime.errors import CompileError


def compile_rejection(error: BaseException, module: ModuleType) -> BuildRejected | None:
    """The rejection for a compiler's error; None for any other."""
    if isinstance(error, CompileError):
        status = Status.RESOURCE_LIMIT if error.over_limit else Status.COMPILE_ERROR
        return BuildRejected(Stage.BUILD, status, str(error))
    if isinstance(error, InspectError):
        return BuildRejected(Stage.BUILD, Status.COMPILE_ERROR, f"{where(error)}{error}")
    if isinstance(error, OutOfResources):
        return BuildRejected(
            Stage.BUILD,
            Status.RESOURCE_LIMIT,
            f"{where(error)}a kernel needs {error.required} of {error.name}, the target "
            f"has {error.limit}: use smaller tiles or fewer num_stages",
        )
    if isinstance(error, PTXASError):
        text = str(error).split("Repro command")[0].strip()
        too_large = "too much shared" in text or "exceed" in text
        status = Status.RESOURCE_LIMIT if too_large else Status.COMPILE_ERROR
        return BuildRejected(Stage.BUILD, status, f"{where(error)}{text}"[:3000])
    if isinstance(error, CompilationError):
        return _compilation(error, module)
    return None


def _compilation(error: CompilationError, module: ModuleType) -> BuildRejected:
    innermost, messages = error, []
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CompilationError):
            innermost = cause
            if cause.error_message:
                messages.append(str(cause.error_message))
        else:
            messages.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    line = _line(innermost, module)
    text = source_line(module.__file__ or "", line) if line else ""
    reason = messages[-1] if messages else "the kernel does not compile"
    if isinstance(error, CompileTimeAssertionFailure):
        reason = f"static_assert failed: {reason}"
    return BuildRejected(Stage.BUILD, Status.COMPILE_ERROR, f"{at_line(line, text)}{reason}"[:3000])


def _line(error: CompilationError, module: ModuleType) -> int:
    """Triton counts lines from the kernel's `def`: find that text in the file."""
    offset = getattr(error.node, "lineno", 0)
    if not offset or not error.src:
        return 0
    try:
        lines = inspect.getsource(module).splitlines()
    except OSError:
        return 0
    wanted = [x.strip() for x in error.src.splitlines()[:3]]
    for start in range(len(lines)):
        if [x.strip() for x in lines[start : start + len(wanted)]] == wanted:
            return int(start + offset)
    return 0
