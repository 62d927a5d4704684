"""Chunks of a stream into a reply, those that differ only in a piece of its text in one step.

Most servers send a chunk for each token, and all else in it is the same. So what is around the
piece is learned from one chunk; where others have the same around theirs, only the pieces are
parsed, all in one call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress

from kagent.llm.response import ResponseBuffer

_LESSONS = 4  # chunks that are learned from: where ever more of them differ, none is


class ChunkReader:
    """Adds chunks to a buffer, with the same result as one after the other."""

    def __init__(self, buffer: ResponseBuffer) -> None:
        self._buffer = buffer
        self._around: tuple[str, str] | None = None  # text before and after the piece
        self._lessons = _LESSONS

    def take(self, texts: Sequence[str]) -> None:
        """Add the chunks of some events.

        Raises:
            ValueError: One is no JSON.
        """
        at = 0
        while at < len(texts):
            end = self._end_of_equal(texts, at)
            if end > at + 1 and (whole := self._joined(texts[at:end])) is not None:
                self._buffer.take(json.loads(whole))
                at = end
            elif self._lessons:
                received = json.loads(texts[at])
                self._buffer.take(received)
                self._learn(texts[at], received)
                at += 1
            else:
                for received in _parsed(texts[at:]):
                    self._buffer.take(received)
                return

    def _end_of_equal(self, texts: Sequence[str], at: int) -> int:
        if self._around is not None:
            before, after = self._around
            while at < len(texts) and texts[at].startswith(before) and texts[at].endswith(after):
                at += 1
        return at

    def _joined(self, texts: Sequence[str]) -> str | None:
        """One chunk in the place of several, or None if more than a piece differs."""
        assert self._around is not None
        before, after = self._around
        pieces = _list([text[len(before) : len(text) - len(after)] for text in texts])
        if len(pieces) != len(texts) or not all(isinstance(p, str) for p in pieces):
            return None
        return f"{before}{json.dumps(''.join(map(str, pieces)))}{after}"

    def _learn(self, text: str, received: object) -> None:
        piece = _only_piece(received)
        if piece is None:
            return
        self._lessons -= 1
        for literal in (json.dumps(piece), json.dumps(piece, ensure_ascii=False)):
            if text.count(literal) == 1:
                before, after = text.split(literal)
                self._around = before, after
                return


def _only_piece(received: object) -> str | None:
    """The piece of a reply or of reasoning in a chunk that has nothing else to add."""
    match received:
        case {"choices": [{"delta": dict(delta)}]}:
            said = [value for name, value in delta.items() if value and name != "role"]
            if len(said) == 1 and isinstance(said[0], str):
                return said[0]
    return None


def _parsed(texts: Sequence[str]) -> Iterable[object]:
    """The objects of some events: all in one call of the parser, which takes half as long.

    Raises:
        ValueError: One is no JSON.
    """
    objects = _list(texts)
    return objects if len(objects) == len(texts) else map(json.loads, texts)


def _list(texts: Sequence[str]) -> Sequence[object]:
    """The values of some texts; empty where one is no JSON."""
    found: Sequence[object] = ()
    with suppress(ValueError, RecursionError):
        found = json.loads(f"[{','.join(texts)}]")
    return found
