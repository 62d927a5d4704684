"""How well calls of a model, builds and the timed lane overlap.

    python benchmarks/model_loop.py [--task softmax] [--budget 50] [--latency 2] [--in-flight 4]

A scripted endpoint (a real HTTP server on loopback, streaming) answers every call after `latency`
seconds with a C++ seed of the task whose tunables have other values. `kagent evolve --model` runs
against it on the CPU backend. Printed is the wall clock of the search (from the first call to the
last verdict; baselines, seeds and the final race are left out) per evaluated candidate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from kagent.config.settings import load_config
from kagent.evolve.session import evolve
from kagent.search.tunables import Value, read_tunables
from kagent.tasks import find_task, seeds_of
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.language import languages_of


class Endpoint:
    """Answers chat calls by a script, from a thread of its own."""

    def __init__(self, task: str, latency_s: float, seed: int, kind: Kind = "cpu") -> None:
        self._latency_s = latency_s
        self._random = random.Random(seed)
        names = {language.name for language in languages_of(kind)}
        sources = [s.source() for s in seeds_of(find_task(task)) if s.language in names]
        self._files = [f for f in map(read_tunables, sources) if f is not None]
        self._said: set[str] = set()
        self.calls = 0
        self.port = 0
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True).start()
        self._ready.wait()

    @property
    def url(self) -> str:
        """Its address, as `base_url` takes it."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def _main(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length:")[1].split("\r\n")[0])
                await reader.readexactly(length)
                self.calls += 1
                await asyncio.sleep(self._latency_s)
                body = "".join(f"data: {json.dumps(c)}\n\n" for c in self._chunks())
                body += "data: [DONE]\n\n"
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                    + f"Content-Length: {len(body.encode())}\r\n\r\n{body}".encode()
                )
                await writer.drain()

    def _new(self) -> tuple[dict[str, Value], str]:
        """Values and the file with them, one that was not said before while there is any."""
        for _ in range(200):
            file = self._random.choice(self._files)
            values = {t.name: self._random.choice(t.values) for t in file.items}
            text = file.rewrite(values)
            if text not in self._said:
                break
        self._said.add(text)
        return values, text

    def _chunks(self) -> Iterator[dict[str, object]]:
        values, source = self._new()
        said = f"Hypothesis: {values}\nPredicted speed-up: 1.05×\n\n```python\n"
        text = said + source + "\n```\n"
        for i in range(0, len(text), 400):
            delta = {"role": "assistant", "content": text[i : i + 400]}
            yield self._chunk([{"index": 0, "delta": delta, "finish_reason": None}])
        yield self._chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}])
        used = {"prompt_tokens": 4000, "completion_tokens": len(text) // 3}
        yield self._chunk([]) | {"usage": used | {"total_tokens": sum(used.values())}}

    def _chunk(self, choices: list[object]) -> dict[str, object]:
        return {
            "id": "x",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": "scripted",
            "choices": choices,
        }


def main() -> None:
    """Run it once and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="softmax")
    parser.add_argument("--budget", type=int, default=50)
    parser.add_argument("--latency", type=float, default=2.0)
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--runs", type=Path, help="keep the run's folder here")
    options = parser.parse_args()
    endpoint = Endpoint(options.task, options.latency, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            runs=options.runs or Path(folder),
            budget=options.budget,
            lang="cpp",
            model=["scripted"],
            base_url=endpoint.url,
            in_flight=options.in_flight,
        )
        outcome = evolve(options.task, config, lambda _event: None)
    history = outcome.history
    asked = [e.at for e in history.events if e.kind == "asked"]
    recorded = [e.at for e in history.events if e.kind == "recorded"]
    wall_s, counted = recorded[-1] - asked[0], history.lineage.counted
    rejected = dict(history.lineage.rejections())
    print(f"{options.task}, latency {options.latency:g} s, {options.in_flight} in flight")
    print(
        f"ended: {outcome.stop}; {counted} evaluated, {endpoint.calls} calls, rejected {rejected}"
    )
    print(f"search {wall_s:.1f} s: {wall_s / counted:.2f} s per evaluated candidate")


if __name__ == "__main__":
    sys.exit(main())
