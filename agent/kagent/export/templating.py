"""Texts of a library from their templates, and how figures and words of others stand in them."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from pathlib import Path

import jinja2
from kagent_sandbox.data.records import to_json
from kagent_sandbox.runtime.text import printable

from kagent.export.record import LibraryRecord

_TEMPLATES = Path(__file__).parent / "templates"
_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")  # snake_case is no emphasis
_AT_START = re.compile(r"^(?:[#+=-]|\d+(?=[.)](?:\s|$)))")  # a heading, a list, a rule
_LINK = re.compile(r"(?i)(?<=ttp|tps|ftp):(?=//)|(?<=www)\.|(?<=\w)@(?=\w)")
_LONGEST = 400  # characters of a hypothesis


def render(template: str, **names: object) -> str:
    """The text of a template; a name that it uses and that is not given is an error."""
    return _environment().get_template(template).render(**names)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(  # noqa: S701 - Markdown, TOML and Python, escaped by filters
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        words=words, code=code, quoted=quoted, python=python, in_docstring=in_docstring
    )
    return environment


def words(text: object) -> str:
    """Words that others wrote (a model, a driver), as one line of plain Markdown text.

    Nothing in them becomes markup, a link, HTML or another cell of a table.
    """
    line = one_line(text)
    line = _SPECIAL.sub(r"\\\g<0>", line.replace("&", "&amp;"))
    line = line.replace("<", "&lt;").replace(">", "&gt;")
    line = _LINK.sub(lambda found: f"&#{ord(found[0])};", line)  # no automatic links
    return _AT_START.sub(_defused, line)


def _defused(found: re.Match[str]) -> str:
    """Escape characters that begin a heading, a list or a rule, so that they are shown and not
    used.
    """
    return "".join(f"&#{ord(c)};" for c in found[0])


def code(text: object) -> str:
    """Escape a text for a code span: names, shapes, signatures."""
    return f"`{one_line(text).replace('`', chr(39)).replace('|', '¦') or ' '}`"


def one_line(text: object) -> str:
    """A line whose every character can be seen, of single blanks, at most a few hundred long."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1].rstrip() + "…"


def in_docstring(text: object) -> str:
    """Escape a text for a docstring, so that it cannot end it."""
    return one_line(text).replace("\\", "/").replace('"', "'")


def python(value: object) -> str:
    """A value of records as Python, strings in double quotes."""
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case dict():
            return f"{{{', '.join(f'{python(k)}: {python(v)}' for k, v in value.items())}}}"
        case list():
            return f"[{', '.join(map(python, value))}]"
        case tuple():
            return f"({', '.join(map(python, value))}{',' * (len(value) == 1)})"
    return repr(value)


def quoted(text: object) -> str:
    """A string of TOML or JSON."""
    return json.dumps(printable(" ".join(str(text).split())), ensure_ascii=False)


def figure(value: float) -> str:
    """A time or a ratio in four digits, without an exponent: 0.1148, 12.35, 1432."""
    if value >= 1000:
        return f"{value:.0f}"
    for limit, digits in ((100, 1), (10, 2), (1, 3)):
        if value >= limit:
            return f"{value:.{digits}f}"
    return f"{value:.4f}"


def listed(names: list[str]) -> str:
    """Names in a sentence: "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def digest(library: LibraryRecord) -> str:
    """Eight hexadecimal digits that stand for all that a library holds."""
    text = json.dumps(to_json(library), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
