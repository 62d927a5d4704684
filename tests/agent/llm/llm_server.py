"""Servers on loopback that answer as language models do, well and badly."""

import asyncio
import contextlib
import json

from kagent.llm.endpoint import CONNECT_S, Endpoint
from kagent.llm.model_config import ModelConfig, Prices
from pydantic import SecretStr

KEY = "sk-planted-0123456789abcdef"
USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


def model_at(url, **changes):
    given = {
        "name": "tiny",
        "base_url": url,
        "api_key": SecretStr(KEY),
        "reply_s": 20.0,
        "retries": 0,
        "prices": Prices(1.0, 10.0),
    }
    return ModelConfig(**{**given, **changes})


def chunk(text=None, finish=None, **delta):
    if text is not None:
        delta["content"] = text
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}


def usage_chunk(usage=USAGE):
    return {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": usage}


def sse(*chunks, done=True):
    """The body of a stream."""
    lines = [f"data: {json.dumps(c)}\n\n" for c in chunks]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""])


def plain(content="hello", finish="stop", usage=USAGE, **message):
    """The body of an answer that is not a stream."""
    message = {"role": "assistant", "content": content, **message}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage}


GOOD = sse(chunk("hel"), chunk("lo"), chunk(finish="stop"), usage_chunk())


class RawServer:
    """Speaks HTTP byte by byte. Each connection's request is answered by the next of `answers`,
    the last one again and again: a coroutine function of (request, writer).
    """

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []
        self.tasks = []

    async def _serve(self, reader, writer):
        self.tasks.append(asyncio.current_task())
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(
                    line.lower().split(": ", 1)
                    for line in head.decode().split("\r\n")[1:]
                    if ": " in line
                )
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                self.requests.append((fields, json.loads(body or b"null")))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if not await answer(self.requests[-1], writer):
                    break
        writer.close()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self.server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(self, *exc):
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.server.wait_closed()


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def send(writer, text):
    """One piece of a chunked body."""
    data = text.encode() if isinstance(text, str) else text
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()


def streams(body, *, ends=True, then=0.0, status=STREAM):
    """Answers with a stream. `ends`: in order, else the connection breaks. `then`: silence."""

    async def answer(_request, writer):
        writer.write(status)
        for piece in [body] if isinstance(body, str) else body:
            await send(writer, piece)
        await asyncio.sleep(then)
        if ends:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        return ends

    return answer


def says(status, body, headers=()):
    """Answers with a status and a whole body."""

    async def answer(_request, writer):
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        kind = "text/html" if data.startswith(b"<") else "application/json"
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(data)}"]
        writer.write("\r\n".join([*lines, *headers, "", ""]).encode() + data)
        await writer.drain()
        return True

    return answer


async def ask_async(model, prompt, connect_s=CONNECT_S):
    endpoint = Endpoint(model, connect_s)
    try:
        return await endpoint.complete(prompt)
    finally:
        await endpoint.close()
