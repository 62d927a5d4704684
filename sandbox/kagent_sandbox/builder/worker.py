"""The builder's confined child: imports one candidate, traces its cases in forks, sends plans.

Everything here shares its process with the candidate and can be changed by it. So nothing that it
sends is believed: `client` checks all of it again.

Messages to the client, in this order: {"loaded": [configs]}, then {"plan": [config, case],
"hashes": [...]} with the plan and its new binaries as blobs, {"ptx": [hashes]} with the texts as
blobs where they were asked for, {"remarks": [[kernel, text], ...]}, {"dropped": text},
and last {"done": true} or {"rejected": {...}} or {"machine": text}. A message {"command": [...]}
instead of a request has a binary's machine code printed (`binary.disassemble`).
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import cast

from kagent_sandbox.builder.binary import disassemble
from kagent_sandbox.builder.case_forks import CaseForks
from kagent_sandbox.builder.compile import fork as compile_fork
from kagent_sandbox.builder.compile import kernels, ptx, remarks
from kagent_sandbox.builder.compile import time_limit as limits
from kagent_sandbox.builder.configs import apply_config, enumerate_configs
from kagent_sandbox.builder.declared_results import wrong_results
from kagent_sandbox.builder.policy import BuildRejected
from kagent_sandbox.builder.trace.trace import load_candidate, trace_case
from kagent_sandbox.data import records
from kagent_sandbox.data.build import BuildCase, BuildRequest
from kagent_sandbox.data.plan_json import dump_plan
from kagent_sandbox.data.target import Target, parse_target
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.errors import MachineError
from kagent_sandbox.process.channel import Channel, Message
from kagent_sandbox.process.context import Context

_MAX_FORKS = 64
_FURTHER_SHARE = 1 / 3  # of the wall limit, after which no further configuration is begun
_SPARE_S = 1.0  # of the candidate's wall limit, kept to send what there is


def handle(ctx: Context) -> None:
    """Build the candidate of the one request that comes in, or print a binary's machine code."""
    message = ctx.channel.recv(60.0)
    asked = cast("dict[str, object]", message.obj)
    if "command" in asked:  # no candidate's code runs in this child
        disassemble.run_tool(ctx, message)
        return
    request = records.from_json(BuildRequest, asked["request"])
    forks = min(cast("int", asked["forks"]), len(request.cases), _MAX_FORKS)
    deadline = time.monotonic() + request.wall_limit_s - _SPARE_S
    try:
        ctx.channel.send(_Build(request, ctx.channel, ctx.tmp, deadline, max(1, forks)).run())
    except BuildRejected as e:
        ctx.channel.send({"rejected": records.to_json(Rejected(e.stage, e.status, e.message))})
    except MachineError as e:
        ctx.channel.send({"machine": str(e)})


class _Build:
    def __init__(
        self, request: BuildRequest, channel: Channel, folder: Path, deadline: float, forks: int
    ) -> None:
        self._request = request
        self._fork_count = forks  # cases that are traced at once
        self._channel = channel
        self._folder = folder
        self._deadline = deadline
        self._further_until = deadline - (1 - _FURTHER_SHARE) * request.wall_limit_s
        self._target: Target = parse_target(request.target, request.device)
        self._sent: set[str] = set()  # hashes of binaries

    def run(self) -> Mapping[str, object]:
        """Trace all cases with all configurations, the declared one first; returns the last
        message.
        """
        kernels.cache_folder = self._folder / "kernels"
        kernels.cache_folder.mkdir()
        if self._request.ptx:
            ptx.start()
        limit_s = self._request.import_limit_s
        faulthandler.dump_traceback_later(limit_s)  # the client ends it, and reads where it was
        module = load_candidate(self._request.source, self._folder, self._target)
        faulthandler.cancel_dump_traceback_later()
        configs = enumerate_configs(module, self._request.max_configs)
        gc.collect()
        gc.freeze()  # the tracer collects garbage at every allocation: only its own, please
        self._channel.send({"loaded": [dict(c) for c in configs]})
        for index, config in enumerate(configs):
            for case, result in self._forks(module, config).results(self._request.cases):
                failure = self._passed_on(index, case, result)
                if failure is None:
                    continue
                if index == 0:
                    return {"rejected": records.to_json(failure)}
                self._channel.send(
                    {"dropped": f"{dict(config)} on {case.name}: {failure.message}"[:2000]}
                )
                if failure.status is Status.TIMEOUT:
                    break  # it would take as long on the next case
            if time.monotonic() > self._further_until:
                left = len(configs) - index - 1
                if left:
                    self._channel.send({"dropped": f"{left} configurations: out of time"})
                break
        return {"done": True}

    def _forks(self, module: ModuleType, config: Mapping[str, object]) -> CaseForks:
        """Return the forks that trace the cases of one configuration."""
        known = {} if self._target.is_cpu else compile_fork.module_kernels(module)
        prepare = functools.partial(apply_config, module, config)

        def trace(cases: Sequence[BuildCase], channel: Channel, compiler: Channel | None) -> None:
            compile_fork.use(compiler, known)
            for case in cases:
                self._trace(channel, module, config, case)
            os._exit(0)

        return CaseForks(
            self._fork_count,
            trace,
            functools.partial(
                compile_fork.CompileFork, known, prepare, self._request.compile_limit_s
            )
            if known
            else None,
            self._request.compile_limit_s,
            self._request.host_limit_s,
            self._deadline,
        )

    def _passed_on(
        self, index: int, case: BuildCase, result: Message | Rejected
    ) -> Rejected | None:
        """Send the plan of a case; the rejection if there is one instead."""
        if isinstance(result, Rejected):
            return result
        answer = cast("dict[str, object]", result.obj)
        if "machine" in answer:
            raise MachineError(str(answer["machine"]))
        if "rejected" in answer:
            return records.from_json(Rejected, answer["rejected"])
        hashes = [str(h) for h in cast("list[object]", answer["hashes"])]
        plan, *blobs = result.blobs
        binaries, texts = blobs[: len(hashes)], blobs[len(hashes) :]
        if texts:
            self._channel.send({"ptx": answer["ptx"]}, texts)
        if answer["remarks"]:
            self._channel.send({"remarks": answer["remarks"]})
        new = {h: b for h, b in zip(hashes, binaries, strict=True) if h not in self._sent}
        self._channel.send({"plan": [index, case.name], "hashes": [*new]}, [plan, *new.values()])
        self._sent.update(new)
        return None

    def _trace(
        self, channel: Channel, module: ModuleType, config: Mapping[str, object], case: BuildCase
    ) -> None:
        """Trace, and send the plan; or why there is none, and end. Called in the fork."""
        request = self._request
        limits.on_compile = lambda name: channel.send({"compiling": name})
        try:
            apply_config(module, config)
            plan, binaries = trace_case(
                module,
                request.entry,
                case,
                self._target,
                request.allow,
                request.mutates,
                request.compile_limit_s,
            )
            if wrong := wrong_results(plan, case, request.source, request.entry):
                channel.send({"rejected": records.to_json(wrong)})
            else:
                new = sorted(binaries.keys() - self._sent)
                texts = ptx.taken()
                channel.send(
                    {"hashes": new, "ptx": [*texts], "remarks": remarks.taken()},
                    [dump_plan(plan), *(binaries[h] for h in new), *texts.values()],
                )
                self._sent.update(new)  # as this fork knows it
                return
        except BuildRejected as e:
            where = None if e.stage is Stage.PARSE else case.name  # it is the whole file's fault
            failure = Rejected(e.stage, e.status, e.message, where)
            channel.send({"rejected": records.to_json(failure)})
        except MachineError as e:
            channel.send({"machine": str(e)})
        except BaseException:  # noqa: BLE001 - the process boundary: the client reads it in the log
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
