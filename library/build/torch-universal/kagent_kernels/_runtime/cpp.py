"""C++ to shared objects through g++.

The compiler itself says what parameters a kernel has: a few lines appended to the source write the
types of its signature, through all typedefs and macros, into a section of the library and under
`SIGNATURE`. Builds run in a private folder under a fixed relative name, so that equal sources give
equal bytes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .compiling import clock_error, define_text, with_line
from .cpp_options import check_cpp_options
from .errors import CompileError, KernelUnavailable

SIGNATURE = "_ZN16kagent_signature10parametersE"
"""Symbol of a library's text that says what parameters its kernel has: `(ppll)`."""
DEFAULT_OPTIONS = ("-std=c++20", "-O3", "-march=native", "-fopenmp")
_CLOCK = "day_and_time_of_the_build"
_FIXED_OPTIONS = (
    *("-shared", "-fPIC", "-pipe", "-w", "-fmax-errors=3", "-fdiagnostics-color=never"),
    *("-fno-diagnostics-show-caret", "-frandom-seed=kagent", "-s", "-Wl,--build-id=none"),
    # Else one note in inline assembler, and the loader makes the stacks of its caller executable.
    *("-Wl,--no-undefined", "-Wl,-z,noexecstack"),
    # Else the loader binds `inline` variables, and statics of inline functions and of templates, to
    # those of the first library that has the name, although libraries are loaded apart.
    "-fno-gnu-unique",
    # Undeclared, wherever they are used: also where a macro puts the name together.
    *(f"-D__{clock}__={_CLOCK}" for clock in ("DATE", "TIME", "TIMESTAMP")),
)
_FILE = "kernel.cpp"
_SIGNATURE_FILE = "signature of the kernel"
_MAX_LOG_BYTES = 256 << 10

_ERROR = re.compile(
    r"^(?P<file>[^\n:]+):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<text>.*)$", re.MULTILINE
)
_ASSEMBLER = re.compile(
    r"^(?:\{standard input\}|[^\n:]+):\d+: (?:Fatal error|Error): (?P<text>.*)$", re.MULTILINE
)
_OVER_LIMIT = re.compile(
    r"File size limit exceeded|Killed signal|out of memory|memory exhausted|Cannot allocate memory"
)
_USED_AT = re.compile(
    rf"^{_FILE}:(?P<line>\d+):(?:\d+:)?\s+(?:required from|instantiated from)", re.MULTILINE
)

# One letter per parameter, in the order of the signature; see scalars.CPP_TYPES.
_SIGNATURE = """
#line 1 "{file}"
namespace kagent_signature {{
template <class T> struct code {{ static constexpr char value = '?'; }};
template <class T> struct code<T*> {{ static constexpr char value = 'p'; }};
template <class T> struct code<const T> : code<T> {{}};
#define KAGENT_CODE(type, letter) \\
  template <> struct code<type> {{ static constexpr char value = letter; }};
KAGENT_CODE(bool, 'b') KAGENT_CODE(char, 'c') KAGENT_CODE(signed char, 'c')
KAGENT_CODE(unsigned char, 'C') KAGENT_CODE(short, 's') KAGENT_CODE(unsigned short, 'S')
KAGENT_CODE(int, 'i') KAGENT_CODE(unsigned int, 'I') KAGENT_CODE(long, 'l')
KAGENT_CODE(unsigned long, 'L') KAGENT_CODE(long long, 'l') KAGENT_CODE(unsigned long long, 'L')
KAGENT_CODE(float, 'f') KAGENT_CODE(double, 'd')
template <class F> struct text;
template <class R, class... A> struct text<R (*)(A...)> {{
  static constexpr char value[] = {{'(', code<A>::value..., ')', 0}};
}};
template <class R, class... A> struct text<R (*)(A...) noexcept> : text<R (*)(A...)> {{}};
template <unsigned n> struct copy {{
  char value[n];
  constexpr copy(const char* from) : value() {{ for (unsigned i = 0; i < n; ++i) value[i] = from[i];
  }}
}};
using text_of = text<decltype(&::{name})>;
__attribute__((used, section(".kagent_signature"))) extern const copy<sizeof(text_of::value)>
parameters; constexpr copy<sizeof(text_of::value)> parameters{{text_of::value}}; }}
"""


RECIPE = (_FIXED_OPTIONS, DEFAULT_OPTIONS, _SIGNATURE)
"""Part of a library that does not come from its source, options and compiler."""


def compile_cpp(
    name: str,
    source: str,
    options: Sequence[str] = (),
    defines: Mapping[str, object] | None = None,
    *,
    folder: Path | None = None,
) -> bytes:
    """Compile a C++ source to a shared object for this machine.

    Args:
        name: A function that the source declares `extern "C"`.
        source: The C++ source.
        options: Further compiler options.
        defines: Macros.
        folder: Where to build, in a folder of its own; the system's temporary folder if None.

    Raises:
        CompileError: The source or an option was refused; the text is the first error with its
            line.
        KernelUnavailable: There is no g++.
    """
    check_cpp_options(name, options)
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise CompileError(name, 'the name of a C++ kernel is that of its extern "C" function')
    macros = [define_text(name, k, v) for k, v in (defines or {}).items()]
    signature = _SIGNATURE.format(file=_SIGNATURE_FILE, name=name)
    with tempfile.TemporaryDirectory(dir=folder, prefix="cpp_") as work:
        Path(work, _FILE).write_text(f'#line 1 "{_FILE}"\n{source}\n{signature}')
        arguments = [*_FIXED_OPTIONS, *DEFAULT_OPTIONS, *options, *macros]
        code, log = _run([compiler(), *arguments, "-o", "kernel.so", _FILE], work)
        if code:
            raise _refusal(name, source, log, code)
        return Path(work, "kernel.so").read_bytes()


def compiler() -> str:
    """Path of the C++ compiler.

    Raises:
        KernelUnavailable: There is none.
    """
    path = shutil.which("g++", path=os.environ.get("PATH") or "/usr/local/bin:/usr/bin:/bin")
    if path is None:
        raise KernelUnavailable("g++ is not to be found: install it (apt install g++)")
    return path


def _run(command: Sequence[str], folder: str) -> tuple[int, str]:
    """Exit code and the beginning of the log; a compiler that floods its log is stopped."""
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C", "TMPDIR": folder},
    )  # fmt: skip
    assert process.stderr is not None
    try:
        log = process.stderr.read(_MAX_LOG_BYTES)
        if len(log) == _MAX_LOG_BYTES:
            process.kill()
        return process.wait(), log.decode(errors="replace")
    finally:
        process.stderr.close()
        if process.poll() is None:
            process.kill()
            process.wait()


def _refusal(name: str, source: str, log: str, code: int) -> CompileError:
    found = _ERROR.search(log)
    if _CLOCK in log:
        return clock_error(name, source)
    if found is None:
        if len(log) >= _MAX_LOG_BYTES:
            most = f"{_MAX_LOG_BYTES >> 10} KiB"
            return CompileError(name, f"g++ was ended: it printed more than {most}\n{log[:300]}")
        if over := _OVER_LIMIT.search(log):
            text = f"g++ or its assembler ran into a limit on memory or files: {over[0]}"
            return CompileError(name, text, over_limit=True)
        if assembler := _ASSEMBLER.search(log):
            return _assembler_error(name, source, assembler["text"])
        undefined = re.search(r"undefined (?:reference to|symbol).*", log)
        ended = f"g++ ended with code {code}"
        return CompileError(name, undefined[0] if undefined else log.strip()[:1000] or ended)
    file, line, text = found["file"], int(found["line"]), found["text"]
    if file == _SIGNATURE_FILE:
        if "was not declared" in text or "not been declared" in text or "undeclared" in text:
            known = ", ".join(re.findall(r'extern\s+"C"\s+[\w\s:*&]*?(\w+)\s*\(', source))
            has = f"it has {known}" if known else 'declare one as extern "C" void NAME(...)'
            return CompileError(name, f"there is no function {name} in the source; {has}")
        if "overloaded" in text or "unresolved" in text:
            return CompileError(name, f'{name} has several overloads: an extern "C" kernel has one')
        lines = source.count("\n") + 1
        message = "the source ends inside of a function or declaration: is a closing brace missing?"
        return CompileError(name, with_line(source, lines, message))
    if file != _FILE:
        inside = f"in {file.rsplit('/', 1)[-1]} line {line}: {text}"
        used = [int(m["line"]) for m in _USED_AT.finditer(log[: found.start()])]
        return CompileError(name, with_line(source, used[-1], inside) if used else inside)
    return CompileError(name, with_line(source, line, text))


def _assembler_error(name: str, source: str, text: str) -> CompileError:
    """The assembler counts lines of what the compiler wrote: show the source's first inline asm."""
    lines = [i for i, s in enumerate(source.splitlines(), 1) if re.search(r"\basm\b|__asm__", s)]
    message = f"assembler: {text}"
    return CompileError(name, with_line(source, lines[0], message) if lines else message)
