"""Responses from the wire, of any kind, read within limits of size and time."""

from __future__ import annotations

import asyncio
import contextvars
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx2

from kagent.llm.arrivals import Arrivals
from kagent.llm.chunks import ChunkReader
from kagent.llm.event_stream import EventStream
from kagent.llm.failures import (
    ADDRESS_REMEDY,
    Failure,
    Scrub,
    Unusable,
    quota_used_up,
    shown,
    wait_s,
)
from kagent.llm.response import ResponseBuffer, member

STALL_S = 120.0
"""Silence in the middle of a reply. Before its first words a model may think for longer."""
GRACE_S = 5.0
"""Seconds after the end of a reply in which its token counts may come."""
_DONE = "[DONE]"
MOST_BYTES = 64 << 20
"""Most bytes of a response: 100,000 tokens, each in a chunk of its own, are 30 MB."""


@dataclass(slots=True)
class HttpCall:
    """One call in flight, over all its tries."""

    deadline: float  # of `time.monotonic`
    begun: float = field(default_factory=time.monotonic)
    tries: int = 0
    last: str = ""  # the status that the latest try failed with
    buffer: ResponseBuffer = field(default_factory=ResponseBuffer)


CALL: contextvars.ContextVar[HttpCall] = contextvars.ContextVar("CALL")
"""The call that a request belongs to: hooks are given nothing but requests and responses."""


async def on_request(_request: httpx2.Request) -> None:
    """Count the tries."""
    CALL.get().tries += 1


async def on_response(response: httpx2.Response) -> None:
    """Cap what can be read, and tell the SDK not to ask again where that cannot help."""
    if isinstance(response.stream, httpx2.AsyncByteStream):
        response.stream = _Capped(response.stream)
    if response.status_code < 400:
        return
    call = CALL.get()
    call.last = f"status {response.status_code}"
    body = await response.aread()
    try:
        stated = json.loads(body)
    except (ValueError, RecursionError):
        stated = None
    error = member(stated, "error") or stated
    spent = quota_used_up(response.status_code, member(error, "code"), member(error, "type"))
    if spent or wait_s(response) > call.deadline - time.monotonic():
        response.headers["x-should-retry"] = "false"


async def read_stream(parts: AsyncIterator[bytes], buffer: ResponseBuffer) -> None:
    """Collect a stream of events until it ends or nothing more is wanted.

    Raises:
        Unusable: Nothing came for too long.
        ValueError: An event is no JSON.
    """
    async with Arrivals(parts) as arrivals:
        await _collect(arrivals, buffer)


async def _collect(arrivals: Arrivals, buffer: ResponseBuffer) -> None:
    events, chunks, done = EventStream(), ChunkReader(buffer), False
    while not buffer.cut and buffer.error is None:
        limit_s = GRACE_S if buffer.complete or done else STALL_S if buffer.begun else None
        try:
            async with asyncio.timeout(limit_s):
                piece = await arrivals.next()
        except TimeoutError:
            if buffer.complete or done:
                return
            what = f"stalled for {limit_s:g} s after {buffer.characters} characters of the reply"
            remedy = "try again, or name another model"
            raise Unusable(Failure(what, remedy, served=True)) from None
        if piece is None:
            return
        texts = [] if done else list(events.feed(piece))
        if ends := [i for i, text in enumerate(texts) if text.startswith(_DONE)]:
            done = True  # what follows is read, for a connection can be used again then
            del texts[ends[0] :]
        chunks.take(texts)


async def read_body(
    parts: AsyncIterator[bytes], kind: str, buffer: ResponseBuffer, scrub: Scrub
) -> None:
    """Collect an answer that is not a stream.

    Args:
        parts: Of the body.
        kind: Its content type.
        buffer: What it is added to.
        scrub: Applied to what is quoted.

    Raises:
        Unusable: It is no JSON.
    """
    body = bytearray()
    async for part in parts:
        body += part
    text = body.decode("utf-8", "replace")
    if "html" in kind or text.lstrip()[:1] == "<":
        what = "answered with a web page in place of a reply"
        raise Unusable(Failure(what, ADDRESS_REMEDY, permanent=True))
    try:
        stated = json.loads(text)
    except (ValueError, RecursionError):
        what = f"answered with something that is no JSON ({shown(scrub(text))})"
        raise Unusable(Failure(what, ADDRESS_REMEDY)) from None
    buffer.take(stated)
    buffer.closed = True


class _Capped(httpx2.AsyncByteStream):
    """A response's bytes, which end with an error when there are too many."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        room = MOST_BYTES
        async for part in self._stream:
            room -= len(part)
            if room < 0:
                raise httpx2.ReadError(f"a response of more than {MOST_BYTES >> 20} MiB")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
