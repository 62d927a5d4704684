"""The launcher process's side of the protocol with the judge: one request, one answer, in order.

Requests are trusted (they come from the judge), answers are not: once a candidate's device code has
run, it may have written anything into this process's pinned memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kagent_sandbox.data.plan import PlanError
from kagent_sandbox.data.plan_json import parse_plan
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device import compiler_cache, device_memory
from kagent_sandbox.device.baseline_calls import BaselineCall, ReadyBaseline, make_call
from kagent_sandbox.device.compile_only import GO_ON, TIME, WAITS, compile_only
from kagent_sandbox.device.cuda import ceilings as gpu_ceilings
from kagent_sandbox.device.cuda.baselines import ready
from kagent_sandbox.device.cuda.executor import Executor
from kagent_sandbox.device.variants import choosing_variants
from kagent_sandbox.process.channel import ChannelClosed, Message

if TYPE_CHECKING:
    from kagent_sandbox.process.context import Context

Answer = dict[str, object]


def serve(context: Context) -> None:
    """Handler of the fork-server: answer requests until the judge closes the channel."""
    server = _Server(context)
    while True:
        try:
            message = context.channel.recv(None, max_fds=1)
        except ChannelClosed:
            return
        answer = server.answer(message)
        blobs = [b for b in answer.values() if isinstance(b, bytes)]
        context.channel.send({"ok": None} if blobs else answer, blobs)


class _Server:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._executor: Executor | None = None
        self._locked = False

    def answer(self, message: Message) -> Answer:
        """Perform one request: {"ok": result}, {"failed": [status, message, blame]} or
        {"error": text}.

        A result that is bytes is to be sent as a blob.
        """
        request = message.obj
        assert isinstance(request, dict)
        try:
            return {"ok": self._perform(request, message)}
        except PlanError as e:
            return {"failed": [Status.RUNTIME_ERROR, str(e), "kernel"]}
        except Exception as e:  # noqa: BLE001 - the process boundary: it becomes a verdict
            if self._executor is None or not self._locked:
                return {"error": f"{type(e).__name__}: {e}"}
            failure = self._executor.explain(e)
            return {"failed": [failure.status, str(failure), failure.blame]}

    def _perform(self, request: Mapping[str, Any], message: Message) -> object:
        do = request["do"]
        if do == "context":
            self._executor = Executor(request["device"], request["products"])
            return os.getpid()
        executor = self._executor
        assert executor is not None, "the first request makes the context"
        actions: Mapping[str, Callable[[], object]] = {
            "health": executor.health,
            "ceilings": lambda: gpu_ceilings.measure(executor.clock),
            "open": lambda: executor.open(
                request["transport"],
                message.blobs[0],
                message.fds[0] if message.fds else -1,
                request["nbytes"],
            ),
            "compile": lambda: self._compile(request),
            "baselines": lambda: self._baselines(request, message, executor),
            "load": lambda: self._load(request, message, executor),
            "prepare": lambda: executor.prepare(
                request["key"],
                parse_plan(message.blobs[0]),
                {int(k): v for k, v in request["offsets"].items()},
            ),
            "forget": lambda: executor.forget(request["key"]),
            "run": lambda: executor.run(request["key"]),
            "samples": lambda: executor.samples(request["keys"], request["count"]),
            "repeat": lambda: executor.repeat(request["keys"], request["count"]),
        }
        return actions[do]()

    def _load(self, request: Mapping[str, Any], message: Message, executor: Executor) -> None:
        if not self._locked:
            self._context.lock()
            self._locked = True
        executor.kernels.add(dict(zip(request["hashes"], message.blobs, strict=True)))

    def _compile(self, request: Mapping[str, Any]) -> bytes:
        """Compile baselines, for what the compiler leaves behind. Others compile and check on the
        device meanwhile, but for the turns that are asked for.
        """
        folder = self._context.tmp / "inductor"
        compiler_cache.use(folder)
        assert self._executor is not None
        device = self._executor.clock.device
        for _, call in self._calls(request):
            compile_only(call, device, self._alone)
        return compiler_cache.pack(folder)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Have the device alone. An error inside is the answer to `TIME`."""
        _give_memory_back()  # others have the device first
        self._context.channel.send({"ok": WAITS})
        self._expect(TIME)
        try:
            yield
        finally:
            _give_memory_back()
        self._context.channel.send({"ok": None})
        self._expect(GO_ON)

    def _expect(self, do: str) -> None:
        request = self._context.channel.recv(None).obj
        if not isinstance(request, dict) or request.get("do") != do:
            raise RuntimeError(f"expected the request to {do}, got {request!r}")

    def _baselines(
        self, request: Mapping[str, Any], message: Message, executor: Executor
    ) -> dict[str, object]:
        """Compile and capture baselines on own memory, before the lock; what became of each. After
        one that ends the context nothing runs here, and the others are left out.
        """
        assert not self._locked, "baselines are compiled before the lock"
        folder = self._context.tmp / "inductor"
        compiler_cache.use(folder)
        for archive in message.blobs:
            compiler_cache.unpack(archive, folder)
        if not message.blobs:  # code compiled while the baselines were measured
            compiler_cache.copy(Path(request["cache"]), folder)
        outcome: dict[str, object] = {}
        for key, call in self._calls(request):
            had_bytes = device_memory.begin_request(executor.clock.device)
            try:
                with choosing_variants(executor.clock.device):
                    with torch.cuda.stream(executor.clock.stream):
                        function = make_call(call, executor.clock.device)
                    baseline = ready(function, executor.clock)
            except Exception as e:  # noqa: BLE001 - a baseline that fails is recorded as such
                fault = executor.clock.fault()
                if fault is not None:
                    outcome[key] = to_json(ReadyBaseline(failed=str(fault), faulted=True))
                    break
                full = device_memory.shared_lack(e, executor.clock.device, had_bytes)
                reason = f"{type(e).__name__}: {e}".partition("\n")[0]
                outcome[key] = to_json(ReadyBaseline(failed=reason, lacked=full is not None))
                continue
            executor.extra[key] = baseline.work
            outcome[key] = to_json(ReadyBaseline(baseline.captured))
        return outcome

    def _calls(self, request: Mapping[str, Any]) -> Iterator[tuple[str, BaselineCall]]:
        """The baselines of a request, on copies of their reference.py."""
        references = {}
        for i, (path, text) in enumerate(request["references"].items()):
            folder = self._context.tmp / f"reference_{i}"
            folder.mkdir(exist_ok=True)
            references[path] = folder / "reference.py"
            references[path].write_text(text)
        for key, record in request["calls"].items():
            record["reference"] = str(references[record["reference"]])
            yield key, from_json(BaselineCall, record)


def _give_memory_back() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
