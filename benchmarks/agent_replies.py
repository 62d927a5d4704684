"""How many replies a second one agent process can take, if builders and judges are elsewhere.

    python benchmarks/agent_replies.py [--task softmax] [--budget 200] [--tokens 2000]

The loop runs with a real store over the tests' simulated landscape
(tests/agent/simulated_evolution.py). Each of its candidates comes with the plans and binaries of a
real one, as a builder's worker sends them, and is sent to a judge as `JudgeClient` does. Printed
are the processor seconds of this process for each candidate: where plans are parsed and hashed in
the agent, where they pass through unread, and with a prompt and a model's call besides. The model
is a server in another process that answers at once, in a stream with an event for each of
`--tokens` tokens of four characters: many events in a piece of HTTP, as what passes through
proxies, or one, as servers send them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kagent.config.settings import load_config
from kagent.evolve.loop import Evolution
from kagent.evolve.open_machine import request_maker, search_cases
from kagent.evolve.proposers import open_proposer
from kagent.fleet.ray_builders import read_built
from kagent.fleet.worker import BuildWorker
from kagent.llm.proposer import ModelProposer
from kagent.runs.ask import Ask, Draft, Proposer
from kagent.runs.store import RunStore
from kagent.tasks import find_task, seeds_of
from kagent.text import plural
from kagent_sandbox.data.build import BuildRequest, Built, key_of
from kagent_sandbox.data.packed_plans import Key
from kagent_sandbox.data.plan import Plan
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.judge.packing import Header, pack, unpack

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "agent"))
from simulated_evolution import evolution
from simulated_landscape import toy_source, toy_task
from simulated_machine import FakeBuilder, FakeJudge, machine

IN_FLIGHT = 16
TOGETHER = 50  # events in a piece
DONE = "data: [DONE]\n\n"


class Builder(FakeBuilder):
    """Gives every candidate that builds the plans and binaries of a worker's answer."""

    def __init__(self, answer: Mapping[str, Any], *, parse: bool) -> None:
        super().__init__()
        self._answer, self._parse = answer, parse

    def build(self, request: BuildRequest) -> Built | Rejected:
        """As the toy builds it, with another's work."""
        toy = super().build(request)
        if not isinstance(toy, Built):
            return toy
        if self._parse:
            found = unpack(from_json(Header, self._answer["header"]), self._answer["blobs"])
            assert found.work_hash
        else:
            found = read_built(self._answer)
        own = {f"{toy.source_hash}{i}": b for i, b in enumerate(found.binaries.values())}
        return dataclasses.replace(toy, plans=_Both(toy.plans, found.plans), binaries=own)


class _Both(dict):
    """The toy's plan, which decides what is a duplicate, and real ones that travel with it."""

    def __init__(self, toy: Mapping[Key, Plan], real: Mapping[Key, Plan]) -> None:
        super().__init__(toy)
        self.real = real


class Judge(FakeJudge):
    """Sends each candidate as a client does."""

    sent_bytes = 0

    def check(self, built: Built) -> object:
        """Pack and name the real work."""
        real = dataclasses.replace(built, plans=built.plans.real)
        key_of(real)
        header, blobs = pack(real)
        text = json.dumps(to_json(header))
        self.sent_bytes += len(text) + sum(map(len, blobs))
        return super().check(built)


class Asked:
    """A model's proposer, which is opened once the run has a store."""

    operators, name, resamples, at_once = ModelProposer.operators, "model", 2, IN_FLIGHT
    inner: Proposer

    async def propose(self, ask: Ask) -> Draft | None:
        """As the model's proposer does."""
        return await self.inner.propose(ask)


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tokens: int, together: int
) -> None:
    """Answer calls of one connection with files that differ."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(head.split("content-length:")[1].split("\r\n")[0]))
            pick = random.SystemRandom()
            values = pick.choice((1, 2, 4, 8, 16, 32)), pick.choice((1, 2, 3, 4))
            source = toy_source(*values, extra=f"Z = {pick.getrandbits(60)}")
            text = f"Hypothesis: wider\nPredicted speed-up: 1.05×\n\n```python\n{source}```\n"
            text = text.rjust(4 * tokens, ".")
            events = [
                event([{"index": 0, "delta": {"content": text[i : i + 4]}, "finish_reason": None}])
                for i in range(0, len(text), 4)
            ]
            events.append(event([{"index": 0, "delta": {}, "finish_reason": "stop"}]))
            used = {"prompt_tokens": 4000, "completion_tokens": tokens}
            events += [event([], usage={**used, "total_tokens": sum(used.values())}), DONE]
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(pieces(events, together))
            )
            await writer.drain()


def event(choices: list[object], **more: object) -> str:
    """One event of a stream."""
    fixed = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    return f"data: {json.dumps({**fixed, 'choices': choices, **more})}\n\n"


def pieces(events: Sequence[str], together: int) -> Iterator[bytes]:
    """A body in chunks of some events each."""
    for i in range(0, len(events), together):
        chunk = "".join(events[i : i + together]).encode()
        yield b"%x\r\n%s\r\n" % (len(chunk), chunk)
    yield b"0\r\n\r\n"


async def serve(tokens: int, together: int) -> None:
    """Answer until this process is ended; the port is printed."""
    server = await asyncio.start_server(lambda r, w: answer(r, w, tokens, together), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def model_server(tokens: int, together: int = TOGETHER) -> Iterator[str]:
    """The address of a model in another process."""
    words = [sys.executable, __file__, "--serve", str(together), "--tokens", str(tokens)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        finally:
            process.kill()


def measure(
    answer: Mapping[str, Any], budget: int, *, parse: bool, url: str | None = None
) -> tuple[float, int, int]:
    """CPU seconds of this process, candidates, and bytes that the judge was sent."""
    judge = Judge()
    proposer = None if url is None else Asked()

    async def search(evolved: Evolution, task: Task, store: RunStore) -> None:
        async with contextlib.AsyncExitStack() as stack:
            if proposer is not None:
                config = load_config(model=["m"], base_url=url, in_flight=IN_FLIGHT, tune=1)
                proposer.inner = await open_proposer(config, task, store, lambda _: None, stack)
            await evolved.run()

    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        made = machine(Builder(answer, parse=parse), judge, jobs=4)
        options = {} if proposer is None else {"proposer": proposer, "in_flight": 2 * IN_FLIGHT}
        evolved, store = evolution(at / "t", at / "runs", budget=budget, machine=made, **options)
        with store:
            start = time.process_time()
            asyncio.run(search(evolved, toy_task(at / "t"), store))
            cpu_s = time.process_time() - start
        return cpu_s, len(evolved.lineage), judge.sent_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="softmax")
    parser.add_argument("--budget", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2000, help="of a reply")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.tokens, options.serve))
        return
    task = find_task(options.task)
    source = next(s.source() for s in seeds_of(task) if s.language == "cpp")
    worker = BuildWorker("auto")
    try:
        request = request_maker(task, "cpu", search_cases(task, "cpu", 1), 1)(source)
        built = worker.build(to_json(request))
    finally:
        worker.close()
    print(f"{options.task}: {len(built['header']['plans'])} plans, {os.cpu_count()} cores")

    def report(name: str, *, parse: bool = False, url: str | None = None) -> None:
        cpu_s, count, sent_bytes = measure(built, options.budget, parse=parse, url=url)
        each_ms = cpu_s / count * 1e3
        print(
            f"{name}: {each_ms:.1f} ms of one core a candidate, {1e3 / each_ms:.0f} a second; "
            f"{sent_bytes / count / 1e3:.0f} kB each to the judge"
        )

    report("plans parsed in the agent", parse=True)
    report("plans passed on unread")
    for together in (TOGETHER, 1):
        with model_server(options.tokens, together) as url:
            measure(built, 20, parse=False, url=url)  # imports, templates, connections
            what = f"a model's {options.tokens} tokens each, {plural(together, 'event')} a piece"
            report(f"the same with {what}", url=url)


if __name__ == "__main__":
    main()
