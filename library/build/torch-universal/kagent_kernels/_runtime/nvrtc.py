"""CUDA C++ to cubins through NVRTC, which needs no GPU and no driver.

NVRTC is called through cuda.bindings rather than cuda.core's Program: candidates give compiler
options as text, and errors are wanted as NVRTC's log. An error names the kernel source's own line:
lines count within the string given to `cuda_kernel`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import cutlass
from .compiling import check_options, define_text, refuse_clock, with_line
from .errors import NOT_THERE, CompileError, KernelUnavailable, ToolkitMissing
from .headers import include_dirs, wheel_folders

DEFAULT_STANDARD = "-std=c++17"
_FILE = "/kernel.cu"  # absolute: line tables hold the current folder otherwise
_LIMITED_GROUPS = "_CG_LIMIT_INCLUDED_DEPENDENCIES"
_MAX_LOG_BYTES = 1 << 20

# Options that change code. What names files or the architecture is the builder's business.
_OPTIONS = (
    r"-[DU]\w+(=.*)?",
    r"-?-std=c\+\+(11|14|17|20)",
    r"-?-(use_fast_math|extra-device-vectorization|restrict|device-int128|default-device|dopt=on)",
    r"-?-(ftz|prec-sqrt|prec-div|fmad)=(true|false)",
    r"-?-maxrregcount=\d+",
    r"-?-diag-suppress=[\w,-]+",
    r"-?-(lineinfo|generate-line-info|expt-relaxed-constexpr|extended-lambda)|-w",
    r"-?-(ptxas-options|Xptxas)=-(v|O[0-3]|-?[\w-]+(=\w+)?)",
)
_IGNORED = {"expt-relaxed-constexpr", "extended-lambda"}  # nvcc's; NVRTC always allows them
_ERROR = re.compile(
    r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?:catastrophic )?error(?: #\S+)?: (?P<text>.*)$",
    re.MULTILINE,
)
_NOT_OPENED = re.compile(r'(open source file "[^"\n]*").*')  # with the reason, or without
_USED_AT = re.compile(r"at line (?P<line>\d+)(?: of (?P<file>\S+))?")
_PTXAS = re.compile(
    r"^ptxas (?:application ptx input, line (?P<line>\d+); )?(?:error|fatal)\s*: (?P<text>.*)$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class CudaBinary:
    """A cubin and the symbol of the kernel that was asked for."""

    cubin: bytes
    symbol: str
    ptx: str  # that the cubin was made from
    log: str = ""  # what the compiler said, though it succeeded


def compile_cuda(
    name: str,
    source: str,
    target: str,
    options: Sequence[str] = (),
    defines: Mapping[str, object] | None = None,
) -> CudaBinary:
    """Compile a CUDA source.

    Args:
        name: A kernel of the source: plain, qualified (`ns::k`) or an instance of a template
            (`k<128, float>`).
        source: The CUDA C++ source.
        target: Architecture, such as "sm_90a".
        options: Further compiler options.
        defines: Macros.

    Raises:
        CompileError: The source or an option was refused; the text is the first error with its
            line.
        KernelUnavailable: NVRTC or the toolkit's headers are missing or too old, or those of
            CUTLASS, which the source includes.
    """
    check_options(
        name, options, _OPTIONS, "--use_fast_math, -maxrregcount=N, -std=c++20, -DNAME=VALUE"
    )
    flags = [o for o in options if o.lstrip("-") not in _IGNORED]
    if not any("std=" in o for o in flags):
        flags.append(DEFAULT_STANDARD)
    flags += [define_text(name, k, v) for k, v in (defines or {}).items()]
    refuse_clock(name, source, flags)
    if cutlass.included_in(source):
        # its functions without a space are the device's; its libcu++ defines the C library's macros
        flags += ["--diag-suppress=47"]
        if not any("default-device" in o for o in flags):
            flags.append("-default-device")
    if "cooperative_groups.h" in source:
        # one overload pulls all of <cuda/atomic> into cooperative groups: 1.7 s against 0.1 s
        try:
            return _compile(name, source, target, [*flags, f"-D{_LIMITED_GROUPS}"])
        except CompileError:
            pass  # perhaps for want of it; if not, the error comes again
    return _compile(name, source, target, flags)


def compiler_version(source: str) -> str:
    """Versions of all that decides what a source compiles to: 13.4, or 13.4-cutlass-4.2.0.

    Raises:
        KernelUnavailable: NVRTC is missing, or headers that the source includes.
    """
    extra = f"-cutlass-{cutlass.headers().version}" if cutlass.included_in(source) else ""
    return nvrtc_version() + extra


def nvrtc_version() -> str:
    """Version of the library that compiles: 13.4.

    Raises:
        ToolkitMissing: There is none.
    """
    try:
        major, minor = _checked(_nvrtc().nvrtcVersion())
    except RuntimeError as e:  # the library is not to be found
        raise ToolkitMissing(f"NVRTC cannot be loaded ({e})") from None
    return f"{major}.{minor}"


@functools.cache
def _nvrtc() -> Any:
    """NVRTC's functions; the library is loaded from NVIDIA's wheel wherever Python finds it.

    NVIDIA's own loader looks into this interpreter's site-packages only, not into those of a host
    that a path file names (`make TORCH=host`). It takes a library that is loaded already.
    NVRTC 13.0 does not look for its built-in functions beside itself: they are loaded, too.

    Raises:
        ToolkitMissing: There is no cuda-bindings.
    """
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as e:
        raise ToolkitMissing(f"CUDA sources cannot be compiled here ({e})") from None
    for folder in wheel_folders():
        for library in sorted(folder.glob("*/lib/libnvrtc.so.*")):
            with contextlib.suppress(OSError):  # a build for another system: the loader decides
                for each in (*library.parent.glob("libnvrtc-builtins.so.*"), library):
                    ctypes.CDLL(str(each), mode=ctypes.RTLD_GLOBAL)
                return nvrtc
    return nvrtc


def _compile(name: str, source: str, target: str, flags: Sequence[str]) -> CudaBinary:
    nvrtc = _nvrtc()
    fixed = [f"--gpu-architecture={target}", "--diag-suppress=1444"]  # of NVIDIA's own headers
    folders = [*include_dirs()]
    mended: Mapping[str, str] = {}
    if cutlass.included_in(source):
        extra = cutlass.headers()
        folders.append(extra.folder)
        mended = extra.mended
    options = [*fixed, *(f"--include-path={d}" for d in folders), *flags]
    names, texts = [n.encode() for n in mended], [t.encode() for t in mended.values()]
    try:
        program = _checked(
            nvrtc.nvrtcCreateProgram(source.encode(), _FILE.encode(), len(names), texts, names)
        )
    except RuntimeError as e:  # the library is not to be found
        raise ToolkitMissing(f"NVRTC cannot be loaded ({e})") from None
    try:
        _checked(nvrtc.nvrtcAddNameExpression(program, name.encode()))
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise _refusal(name, source, target, result, _log(program), program)
        size = _checked(nvrtc.nvrtcGetCUBINSize(program))
        cubin = bytearray(size)
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        symbol = _checked(nvrtc.nvrtcGetLoweredName(program, name.encode()))
        return CudaBinary(bytes(cubin), bytes(symbol).decode(), _ptx(program), _log(program))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(answer: tuple[Any, ...]) -> Any:
    result, *values = answer
    if result != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
        raise KernelUnavailable(f"NVRTC failed: {_result_text(result)}")
    return values[0] if len(values) == 1 else values


def _result_text(result: object) -> str:
    _, text = _nvrtc().nvrtcGetErrorString(result)
    return bytes(text).decode()


def _log(program: object) -> str:
    nvrtc = _nvrtc()
    size = _checked(nvrtc.nvrtcGetProgramLogSize(program))
    buffer = bytearray(size)
    _checked(nvrtc.nvrtcGetProgramLog(program, buffer))
    return bytes(buffer[:_MAX_LOG_BYTES]).rstrip(b"\0").decode(errors="replace")


def _ptx(program: object) -> str:
    """PTX that ptxas was given; NVRTC keeps it when asked for a real architecture."""
    nvrtc = _nvrtc()
    result, size = nvrtc.nvrtcGetPTXSize(program)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS or size <= 1:
        return ""
    buffer = bytearray(size)
    nvrtc.nvrtcGetPTX(program, buffer)
    return bytes(buffer).rstrip(b"\0").decode(errors="replace")


def _ptx_line(program: object, line: int) -> str:
    """Text of a line of the PTX that ptxas refused."""
    lines = _ptx(program).splitlines()
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def _refusal(
    name: str, source: str, target: str, result: object, log: str, program: object
) -> CompileError:
    """The first real error of NVRTC's log, or of ptxas's."""
    nvrtc = _nvrtc()
    if result == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
        if "gpu-architecture" in log:
            raise KernelUnavailable(
                f"this NVRTC cannot compile for {target}: install a newer nvidia-cuda-nvrtc"
            )
        return CompileError(name, log.strip() or _result_text(result))
    if found := _ERROR.search(log):
        return _source_error(name, source, log, found)
    if found := _PTXAS.search(log):
        return _ptxas_error(name, source, target, found, program)
    if result == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
        return CompileError(name, log.strip()[:1000] or "NVRTC gave no reason")
    raise KernelUnavailable(f"NVRTC failed: {_result_text(result)}: {log.strip()[:500]}")


def _source_error(name: str, source: str, log: str, found: re.Match[str]) -> CompileError:
    text, file, line = found["text"], found["file"], int(found["line"])
    text = _NOT_OPENED.sub(rf"\1: {NOT_THERE}", text)
    if file == "__nv_name_map":
        why = text if "overloaded" in text else f"there is no kernel {name} in the source"
        known = ", ".join(dict.fromkeys(re.findall(r"__global__[^;{}()]*?(\w+)\s*\(", source)))
        return CompileError(name, f"{why}; it has {known or 'no __global__ function'}")
    details = log[found.end() :].split("\n\n", 1)[0].strip("\n").splitlines()
    # the lines after an error repeat the source line and a caret; what else is there explains
    notes = [d.strip() for d in details if "argument types" in d or "instantiation of" in d][:3]
    if file != _FILE:
        inside = f"in {file.rsplit('/', 1)[-1]} line {line}: {text}"
        used = [m for n in details for m in _USED_AT.finditer(n) if m["file"] in (None, _FILE)]
        message = with_line(source, int(used[-1]["line"]), inside) if used else inside
    else:
        message = with_line(source, line, text)
    if "could not open source file" in text or "cannot open source file" in text:
        notes.append(
            "Headers of the CUDA toolkit, libcu++ (<cuda/std/...>) and the C library's constants "
            "and types can be included, and those of CUTLASS and CuTe where nvidia-cutlass is "
            "installed; torch's and others cannot."
        )
    return CompileError(name, "\n".join([message, *notes]))


def _ptxas_error(
    name: str, source: str, target: str, found: re.Match[str], program: object
) -> CompileError:
    text = found["text"]
    if "uses too much" in text:
        sizes = [int(x, 16) for x in re.findall(r"0x[0-9a-f]+", text)]
        what = text.split("uses too much ")[1].split(" (")[0]
        amount = f": {sizes[0]} bytes, at most {sizes[1]}" if len(sizes) == 2 else ""
        return CompileError(name, f"too much {what} for {target}{amount}", over_limit=True)
    ptx = _ptx_line(program, int(found["line"])) if found["line"] else ""
    message = f"ptxas for {target}: {text}" + (f"\n    PTX: {ptx}" if ptx else "")
    word = re.search(r"'([\w.:]+)'", text)
    asm = [i for i, s in enumerate(source.splitlines(), 1) if word and word[1] in s]
    return CompileError(name, with_line(source, asm[0], message) if asm else message)
