"""Jinja templates of prompts/, any of which a user's own folder may replace.

Undefined names are errors, and every error names the template's file and line. Nothing is escaped:
prompts are text. A folder of templates may be somebody else's, named by a kagent.toml beside it:
templates read what they are given, and reach neither Python's inner life nor files.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from kagent_sandbox.errors import UserError

from kagent.prompting.text import fenced
from kagent.resources import resource

SUFFIX = ".md.j2"
_RENDERING = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
)  # fmt: skip
"""Exceptions that a template's expressions can raise."""


def folders(own: Path | None) -> list[Path]:
    """Folders of templates: kagent's, and the user's own.

    Raises:
        UserError: The user's own folder is not there.
    """
    found = [resource("prompts")]
    if own is not None:
        if not own.is_dir():
            raise UserError(f"{own}: no such folder: --prompts names one of templates")
        found.append(own)
    return found


class _CompiledTemplates(jinja2.BytecodeCache):
    """Compiled templates of this process. Jinja compiles what was changed anew."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        """Fill the bucket with what was compiled before, if there is anything."""
        if bucket.key in self._kept:
            bucket.bytecode_from_string(self._kept[bucket.key])

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        """Keep what was compiled."""
        self._kept[bucket.key] = bucket.bytecode_to_string()


_compiled = _CompiledTemplates()


class _ReadOnlyEnvironment(ImmutableSandboxedEnvironment):
    """Templates that may look at their values and change nothing, on the disk either."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may take an attribute: none of a path, whose methods open files."""
        return not isinstance(obj, PurePath) and super().is_safe_attribute(obj, attr, value)


class Templates:
    """The templates of some folders; those of later folders replace earlier ones."""

    def __init__(self, places: list[Path]) -> None:
        self._environment = _ReadOnlyEnvironment(
            loader=jinja2.FileSystemLoader([str(p) for p in reversed(places)]),
            undefined=jinja2.StrictUndefined,
            autoescape=False,  # prompts are text, not HTML
            trim_blocks=True,
            lstrip_blocks=True,
            bytecode_cache=_compiled,
        )
        self._environment.filters["fenced"] = fenced

    def read_all(self) -> None:
        """Read every template now.

        Raises:
            UserError: One is wrong; the text names file and line.
        """
        for name in self._environment.list_templates(filter_func=lambda n: n.endswith(SUFFIX)):
            try:
                self._environment.get_template(name)
            except jinja2.TemplateSyntaxError as e:
                raise _wrong(e) from None

    def render(self, name: str, values: Mapping[str, object]) -> str:
        """A template's text, without blank lines in a row or at its ends.

        Raises:
            UserError: It, or one that it includes, is missing or wrong; the text names file and
                line.
        """
        try:
            text = self._environment.get_template(f"{name}{SUFFIX}").render(values)
        except jinja2.TemplateSyntaxError as e:
            raise _wrong(e) from None
        except jinja2.TemplateNotFound as e:
            raise UserError(f"{_place(e)}no template {e.name} in prompts/") from None
        except _RENDERING as e:
            raise UserError(f"{_place(e)}{type(e).__name__}: {e}") from None
        return _tidy(text)


def _wrong(error: jinja2.TemplateSyntaxError) -> UserError:
    return UserError(f"{error.filename or error.name}:{error.lineno}: {error.message}")


def _place(error: BaseException) -> str:
    """File and line of the innermost template in an exception's traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(SUFFIX)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


def _tidy(text: str) -> str:
    """Outside of fenced blocks: one blank line before headings, never two in a row."""
    kept: list[str] = []
    fence = ""
    for line in text.strip("\n").split("\n"):
        mark = line[: len(line) - len(line.lstrip("`"))]
        if fence:
            kept.append(line)
            if len(mark) >= len(fence) and not line.strip("` "):
                fence = ""
            continue
        if len(mark) >= 3:
            fence = mark
        blank = not kept or not kept[-1].strip()
        if line.startswith("#") and not blank:
            kept.append("")
        if line.strip() or not blank:
            kept.append(line.rstrip())
    return "\n".join(kept) + "\n"
