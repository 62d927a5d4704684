"""Pieces of a response, read many at a time."""

import asyncio

import pytest
from kagent.llm.arrivals import Arrivals


def read(parts, most=None):
    """All that was given, call by call."""

    async def run():
        found = []
        async with Arrivals(parts()) as arrivals:
            while len(found) != most and (piece := await arrivals.next()) is not None:
                found.append(piece)
        return found

    return asyncio.run(asyncio.wait_for(run(), 20))


def test_pieces_that_are_there_come_together(monkeypatch):
    # Whoever loses the core in between is no slow server.
    monkeypatch.setattr("kagent.llm.arrivals._AT_ONCE_S", 60.0)

    async def parts():
        for i in range(100):
            yield b"%d," % i

    assert read(parts) == [b"".join(b"%d," % i for i in range(100))]


def test_whoever_waited_for_one_gets_those_of_a_pause(monkeypatch):
    monkeypatch.setattr("kagent.llm.arrivals.PAUSE", 1.0)
    sent = [b"a", b"b", b"c", b"d", b"e", b"f"]

    async def run():
        queue = asyncio.Queue()

        async def send():
            for piece in sent:
                await asyncio.sleep(0.02)
                queue.put_nowait(piece)
            queue.put_nowait(None)

        async def parts():
            while (piece := await queue.get()) is not None:
                yield piece

        sender = asyncio.create_task(send())
        found = []
        async with Arrivals(parts()) as arrivals:
            while (piece := await arrivals.next()) is not None:
                found.append(piece)
        await sender
        return found

    found = asyncio.run(asyncio.wait_for(run(), 20))
    assert b"".join(found) == b"abcdef"
    assert len(found) < len(sent)


def test_a_fault_comes_after_what_was_read():
    async def parts():
        yield b"a"
        raise OSError("gone")

    async def run():
        async with Arrivals(parts()) as arrivals:
            assert await arrivals.next() == b"a"
            with pytest.raises(OSError, match="gone"):
                await arrivals.next()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_nothing():
    async def parts():
        return
        yield

    assert read(parts) == []


def test_reading_ends_with_the_context():
    ended = []

    async def parts():
        try:
            yield b"a"
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append(True)
            raise

    assert read(parts, most=1) == [b"a"]
    assert ended == [True]
