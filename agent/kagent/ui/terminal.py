"""A console that shows what others wrote as text, and nothing but text.

Names, hypotheses, messages and whole runs come from models and from other people. Rich takes
control codes in them for text and passes them on: they could move the cursor, write the window's
title or the clipboard, hide a link, or turn a line around.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import IO, Any, cast

from kagent_sandbox.runtime.text import printable
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


class Terminal(Console):
    """A `rich.console.Console` on which only its own styles and movements reach the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as `Console.render` does, with every character of texts visible."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


class _StandardError:
    """sys.stderr as it is at the time, on which all can be written though nobody may read it: its
    disk may be full, and its reader gone. What a command works on is not lost for that.
    """

    @property
    def rich_proxied_file(self) -> _StandardError:
        """File that rich writes to while it takes the place of sys.stderr."""
        return self

    def write(self, text: str) -> int:
        """Write as much as can be."""
        with contextlib.suppress(OSError, ValueError):  # the latter where it is closed
            _stderr().write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if it can be."""
        with contextlib.suppress(OSError, ValueError):
            _stderr().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(_stderr(), name)


def _stderr() -> Any:
    return getattr(sys.stderr, "rich_proxied_file", sys.stderr)


STDERR = cast("IO[str]", _StandardError())
