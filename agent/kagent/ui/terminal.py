"""A console that shows what others wrote as text, and nothing but text.

Names, hypotheses, messages and whole runs come from models and from other people. Rich takes
control codes in them for text and passes them on: they could move the cursor, write the window's
title or the clipboard, hide a link, or turn a line around.
"""

from __future__ import annotations

from collections.abc import Iterable

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
