"""What a compiler's refusal becomes: one error with the line of the source that it is about."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kagent_sandbox.verdict import Status

MAX_MESSAGE_CHARS = 2000


class CompileError(Exception):
    """A kernel did not compile. The text is the first real error, its line and that line's text."""

    def __init__(self, kernel: str, message: str, status: Status = Status.COMPILE_ERROR) -> None:
        text = printable(message)
        if len(text) > MAX_MESSAGE_CHARS:
            text = text[:MAX_MESSAGE_CHARS] + " [cut]"
        super().__init__(f"kernel {kernel}: {text}")
        self.kernel = kernel
        self.status = status


def printable(text: str) -> str:
    """Without control characters (terminal escapes), tabs as spaces."""
    return "".join(c for c in text.expandtabs(4) if c == "\n" or c.isprintable())


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
