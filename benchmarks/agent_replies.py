"""How many replies a second one agent process can take, if builders and judges are elsewhere.

    python benchmarks/agent_replies.py [--task softmax] [--budget 200]

The loop runs with a real store over the tests' synthetic landscape (tests/agent/toy.py). Each of
its candidates comes with the plans and binaries of a real one, as a builder's worker sends them,
and is sent to a judge as `JudgeClient` does. Printed are the processor seconds of this process for
each candidate: where plans are parsed and hashed in the agent, and where they pass through unread.
Calls of a model are not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kagent.evolve.open_machine import request_maker, search_cases
from kagent.fleet.ray_builders import read_built
from kagent.fleet.worker import BuildWorker
from kagent.tasks import find_task, seeds_of
from kagent_sandbox.data.build import BuildRequest, Built, key_of
from kagent_sandbox.data.packed_plans import Key
from kagent_sandbox.data.plan import Plan
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.judge.packing import Header, pack, unpack

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "agent"))
from toy import FakeBuilder, FakeJudge, evolution, machine


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="softmax")
    parser.add_argument("--budget", type=int, default=200)
    options = parser.parse_args()
    task = find_task(options.task)
    source = next(s.source() for s in seeds_of(task) if s.language == "cpp")
    worker = BuildWorker("auto")
    try:
        request = request_maker(task, "cpu", search_cases(task, "cpu", 1), 1)(source)
        answer = worker.build(to_json(request))
    finally:
        worker.close()
    print(f"{options.task}: {len(answer['header']['plans'])} plans, {os.cpu_count()} cores")
    for name, parse in (("parsed in the agent", True), ("passed on unread", False)):
        judge = Judge()
        with tempfile.TemporaryDirectory() as folder:
            at = Path(folder)
            made = machine(Builder(answer, parse=parse), judge)
            search, store = evolution(at / "t", at / "runs", budget=options.budget, machine=made)
            with store:
                start = time.process_time()
                asyncio.run(search.run())
                cpu_s = time.process_time() - start
            count = len(search.lineage)
        each_ms = cpu_s / count * 1e3
        print(
            f"plans {name}: {each_ms:.1f} ms of one core a candidate, {1e3 / each_ms:.0f} a "
            f"second; {judge.sent_bytes / count / 1e3:.0f} kB each to the judge"
        )


if __name__ == "__main__":
    main()
