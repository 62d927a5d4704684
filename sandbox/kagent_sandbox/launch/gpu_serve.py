"""The launcher process's side of the protocol with the judge: one request, one answer, in order.

Requests are trusted (they come from the judge), answers are not: once a candidate's device code has
run, it may have written anything into this process's pinned memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kagent_sandbox.channel import ChannelClosed, Message
from kagent_sandbox.launch import gpu_ceilings
from kagent_sandbox.launch.baseline_calls import BaselineCall, make_call
from kagent_sandbox.launch.gpu_baselines import ready
from kagent_sandbox.launch.gpu_exec import Executor
from kagent_sandbox.plan import PlanError
from kagent_sandbox.plan_json import parse_plan
from kagent_sandbox.records import from_json
from kagent_sandbox.verdict import Status

if TYPE_CHECKING:
    from kagent_sandbox.context import Context

Answer = dict[str, object]
CACHE_FILES = 8000
CACHE_BYTES = 512 << 20


def serve(context: Context) -> None:
    """Handler of the fork-server: answer requests until the judge closes the channel."""
    server = _Server(context)
    while True:
        try:
            message = context.channel.recv(None, max_fds=1)
        except ChannelClosed:
            return
        context.channel.send(server.answer(message))


class _Server:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._executor: Executor | None = None
        self._locked = False

    def answer(self, message: Message) -> Answer:
        """Perform one request: {"ok": result}, {"failed": [status, message]} or {"error": text}."""
        request = message.obj
        assert isinstance(request, dict)
        try:
            return {"ok": self._perform(request, message)}
        except PlanError as e:
            return {"failed": [Status.RUNTIME_ERROR, str(e)]}
        except Exception as e:  # noqa: BLE001 - the process boundary: it becomes a verdict
            if self._executor is None or not self._locked:
                return {"error": f"{type(e).__name__}: {e}"}
            failure = self._executor.explain(e)
            return {"failed": [failure.status, str(failure)]}

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
            "baselines": lambda: self._baselines(request, executor),
            "load": lambda: self._load(request, message, executor),
            "prepare": lambda: executor.prepare(
                request["key"],
                parse_plan(message.blobs[0]),
                {int(k): v for k, v in request["placement"].items()},
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

    def _baselines(self, request: Mapping[str, Any], executor: Executor) -> dict[str, object]:
        """Compile and capture baselines on own memory, before the lock; what became of each."""
        assert not self._locked, "baselines are compiled before the lock"
        _warm_compiler_cache(self._context.tmp, Path(request["cache"]))
        references = {}
        for i, (path, text) in enumerate(request["references"].items()):
            folder = self._context.tmp / f"reference_{i}"
            folder.mkdir()
            references[path] = folder / "reference.py"
            references[path].write_text(text)
        outcome: dict[str, object] = {}
        for key, record in request["calls"].items():
            record["reference"] = str(references[record["reference"]])
            try:
                with torch.cuda.stream(executor.clock.stream):
                    call = make_call(from_json(BaselineCall, record), executor.clock.device)
                baseline = ready(call, executor.clock)
            except Exception as e:  # noqa: BLE001 - a baseline that fails is recorded as such
                outcome[key] = f"{type(e).__name__}: {e}".partition("\n")[0]
                continue
            executor.extra[key] = baseline.work
            outcome[key] = baseline.captured
        return outcome


def _warm_compiler_cache(tmp: Path, cache: Path) -> None:
    """Have Inductor start from what measuring the baselines compiled; it writes here only.

    A cache that has grown large is left alone: the private folder's size is limited.
    """
    folder = tmp / "inductor"
    with contextlib.suppress(OSError, shutil.Error):
        sizes = [p.stat().st_size for p in cache.rglob("*") if p.is_file()]
        if len(sizes) <= CACHE_FILES and sum(sizes) <= CACHE_BYTES:
            shutil.copytree(cache, folder, dirs_exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
