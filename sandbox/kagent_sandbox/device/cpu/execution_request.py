"""The messages by which a CPU launcher is asked for executions, on a socket of their own.

They are on the clock, and what they cost without any execution is subtracted. Native code that
answered them itself, in the place of the launcher's Python, would save a part of that: so they cost
as little as they can. A request is a token and the numbers of prepared plans. The answer is the
token; text follows it where an execution failed. Anything shorter than a token says that a message
waits on the channel.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from struct import pack

TOKEN_BYTES = 16
MOST_BYTES = 64 << 10  # of a request, and of an answer
LOOK = b"?"
"""A message waits on the channel."""
FAILED, REFUSED = b"failed ", b"refused "
"""Beginning of the text after an answer's token: an execution raised, or no plan can say it."""
_MOST_TEXT = 4000


def make_request(numbers: Sequence[int]) -> bytes:
    """A request for one execution of each of these plans, in this order, under a fresh token."""
    return secrets.token_bytes(TOKEN_BYTES) + pack(f"={len(numbers)}I", *numbers)


def numbers_of(request: bytes) -> memoryview:
    """The numbers of the plans that a request asks for."""
    return memoryview(request)[TOKEN_BYTES:].cast("I")


def failure(what: bytes, text: str) -> bytes:
    """Text after the token where an execution failed."""
    return what + text.encode(errors="backslashreplace")[:_MOST_TEXT]
