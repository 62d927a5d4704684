"""Common parts of both compilers: a kernel's options, and the line of an error."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .errors import CompileError

_NO_CLOCK = (
    "a kernel may not know the day and time of its build (__DATE__, __TIME__, __TIMESTAMP__): "
    "equal sources give equal binaries, on any day. Leave it out, or pass a value of your own by "
    "defines={NAME: VALUE}"
)
_CLOCK = re.compile(r"\b__(DATE|TIME|TIMESTAMP)__\b")
_COMMENT_OR_JOINED = re.compile(r"//[^\n]*|/\*.*?\*/|\\\n", re.DOTALL)


def refuse_clock(kernel: str, source: str, macros: Sequence[str]) -> None:
    """Refuse a source, or macros, that name the macros which hold the time of a build.

    For compilers that do not let these be defined otherwise. A name that macros put together from
    parts is not seen.

    Raises:
        CompileError: One is named; the text has its line.
    """
    names = (*macros, _COMMENT_OR_JOINED.sub("", source))
    if any(_CLOCK.search(text) for text in names):
        raise clock_error(kernel, source)


def clock_error(kernel: str, source: str) -> CompileError:
    """Return the error for a kernel that asks for the time of its build, with the line."""
    found = _CLOCK.search(source)
    if found is None:
        return CompileError(kernel, _NO_CLOCK)
    line = source.count("\n", 0, found.start()) + 1
    return CompileError(kernel, with_line(source, line, _NO_CLOCK))


def with_line(source: str, line: int, message: str) -> str:
    """`line 12: MESSAGE` and the text of that line below."""
    lines = source.splitlines()
    text = lines[line - 1].strip()[:200] if 0 < line <= len(lines) else ""
    return f"line {line}: {message}" + (f"\n    {line} | {text}" if text else "")


def check_options(
    kernel: str, options: Sequence[str], allowed: Sequence[str], examples: str
) -> None:
    """Refuse options that none of the patterns in `allowed` matches whole.

    Raises:
        CompileError: One is not allowed; the text names it and shows some that are.
    """
    for option in options:
        if not isinstance(option, str) or not any(re.fullmatch(p, option) for p in allowed):
            raise CompileError(
                kernel, f"compiler option {option!r:.80} is not allowed; for example {examples} are"
            )


def define_text(kernel: str, key: str, value: object) -> str:
    """`-DKEY=VALUE`; True and False become 1 and 0.

    Raises:
        CompileError: It is not a macro's name, or not a number or text.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", key) or not isinstance(value, str | int | float):
        raise CompileError(
            kernel, f"define {key!r:.40}={value!r:.40} is not a name and a number or text"
        )
    return f"-D{key}={int(value) if isinstance(value, bool) else value}"
