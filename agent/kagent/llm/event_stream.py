"""Server-sent events: the data of each, from bytes that come in any pieces.

A reply may have an event for each of thousands of tokens, and many replies come at once. So events
are not made into records of the SDK's, which takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterator

_PREFIX = b"data:"


class EventStream:
    """Splits a stream into events. All fields but their data are passed over."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # pieces of a line that has not ended
        self._data: list[bytes] = []  # lines of an event that has not ended

    def feed(self, piece: bytes) -> Iterator[str]:
        """The data of each event that ends in the next piece.

        Raises:
            UnicodeDecodeError: It is no UTF-8.
        """
        if b"\n" not in piece and b"\r" not in piece:
            self._rest.append(piece)
            return
        whole = b"".join([*self._rest, piece])
        lines = whole.splitlines()
        self._rest = []
        if not whole.endswith(b"\n"):  # a line that ends in CR may go on with LF
            begun = len(lines.pop()) + whole.endswith(b"\r")
            self._rest.append(whole[len(whole) - begun :])
        for line in lines:
            if line:
                if line.startswith(_PREFIX):
                    self._data.append(line[len(_PREFIX) :].removeprefix(b" "))
            elif self._data:
                yield b"\n".join(self._data).decode()
                self._data.clear()
