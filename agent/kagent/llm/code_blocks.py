"""Splits a reply into prose and fenced blocks, in one pass.

A fence inside a string of a Python file (a docstring, CUDA source with a comment) is a part of that
file. So lines of Python are followed far enough to know whether a string is open.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kagent_sandbox.data.language import LANGUAGES

_PYTHON = ("", "python", "py", "python3", "ipython")
_OPENING = re.compile(r"""\#|'''|\"""|"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?""")
_CLOSING = {
    quote: re.compile(rf"\\.|{quote}") for quote in ('"""', "'''", '"', "'")
}  # an escape, or the end of the string


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. Lines are numbered from 1, fences not counted."""

    tag: str  # language, in lower case; "" if none is stated
    body: str
    first: int
    last: int
    closed: bool  # False: the text ends before the fence does

    @property
    def is_python(self) -> bool:
        """Whether it is said to be Python, or not said to be anything else."""
        return _is_python(self.tag)


@dataclass(frozen=True, slots=True)
class Parts:
    """A text taken apart. Each block stands in the prose as one empty line."""

    prose: tuple[str, ...]
    blocks: tuple[Block, ...]


def split(text: str) -> Parts:
    """Prose and blocks of a text, in order."""
    lines = text.split("\n")
    prose: list[str] = []
    blocks: list[Block] = []
    follow = True  # until a file's strings turn out not to end, which would cost a pass each time
    at = 0
    while at < len(lines):
        fence, info = _fence(lines[at])
        if not fence:
            prose.append(lines[at])
            at += 1
            continue
        tag = _tag(info)
        end = None
        if follow and _is_python(tag):
            end = _end_of_python(lines, at + 1, fence)
            follow = end is not None
        if end is None:
            end = next((i for i in range(at + 1, len(lines)) if _closes(lines[i], fence)), None)
        inside = lines[at + 1 : end]
        body = "\n".join(_outdented(inside, lines[at])) + "\n"
        if end is None:
            body = body.rstrip("\n") + "\n"
        blocks.append(Block(tag, body, at + 2, at + 1 + len(inside), end is not None))
        prose.append("")
        at = len(lines) if end is None else end + 1
    return Parts(tuple(prose), tuple(blocks))


def _is_python(tag: str) -> bool:
    known = tag in _PYTHON or tag.endswith(".py")
    return known or any(tag in each.fences for each in LANGUAGES.values())


def _fence(line: str) -> tuple[str, str]:
    """Fence and info string of a line that opens a block; empty where it opens none."""
    text = line.strip()
    if text[:3] not in ("```", "~~~"):
        return "", ""
    info = text.lstrip(text[0])
    if text[0] == "`" and "`" in info:
        return "", ""  # code within a sentence
    return text[: len(text) - len(info)], info


def _tag(info: str) -> str:
    """The language of "python", "{.python}", "Python title=x"."""
    words = info.strip(" \t{}.").replace(",", " ").split()
    return words[0].lower() if words else ""


def _closes(line: str, fence: str) -> bool:
    text = line.strip()
    return len(text) >= len(fence) and not text.strip(fence[0])


def _end_of_python(lines: Sequence[str], start: int, fence: str) -> int | None:
    """Index of the first closing fence outside of every string."""
    quote = ""
    for i in range(start, len(lines)):
        if not quote and _closes(lines[i], fence):
            return i
        quote = _open_string(lines[i], quote)
    return None


def _open_string(line: str, quote: str) -> str:
    """Quotes of the string that is open after a line, given those of the one open before it."""
    at = 0
    while True:
        if quote:
            closing = next((m for m in _CLOSING[quote].finditer(line, at) if m[0] == quote), None)
            if closing is None:
                return quote if len(quote) == 3 or line.endswith("\\") else ""
            quote, at = "", closing.end()
        opening = _OPENING.search(line, at)
        if opening is None or opening[0] == "#":
            return ""
        at = opening.end()
        if len(opening[0]) == 3 and opening[0] in _CLOSING:
            quote = opening[0]
        elif at == len(line) - 1 and line[at] == "\\":  # a string that goes on after the line's end
            return opening[0][0]


def _outdented(lines: Sequence[str], opening: str) -> Sequence[str]:
    """A block's lines without the indentation of its fence, if they have it: as in a list."""
    indent = len(opening) - len(opening.lstrip())
    first = next((line for line in lines if line.strip()), "")
    if not indent or first[:indent].strip():
        return lines
    return [line[min(indent, len(line) - len(line.lstrip())) :] for line in lines]
