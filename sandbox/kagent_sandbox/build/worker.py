"""The builder's confined child: imports one candidate, traces every case in a fork of its own,
sends plans.

Everything here shares its process with the candidate and can be changed by it. So nothing that it
sends is
believed: `client` checks all of it again.

Messages to the client, in this order: {"loaded": [configs]}, then {"plan": [config, case],
"hashes": [...]} with the plan and its new binaries as blobs, {"dropped": text}, and last {"done":
true} or {"rejected": {...}} or {"machine": text}.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import cast

from kagent_sandbox import records
from kagent_sandbox.build import kernels, limits
from kagent_sandbox.build.configs import apply_config, enumerate_configs
from kagent_sandbox.build.policy import BuildRejected
from kagent_sandbox.build.request import BuildCase, BuildRequest
from kagent_sandbox.build.results import wrong_results
from kagent_sandbox.build.targets import Target, parse_target
from kagent_sandbox.build.trace import load_candidate, trace_case
from kagent_sandbox.channel import Channel, ChannelError, ChannelTimeout, Message
from kagent_sandbox.context import Context
from kagent_sandbox.errors import MachineError
from kagent_sandbox.plan_json import dump_plan
from kagent_sandbox.verdict import Rejected, Stage, Status

_COMPILE_GRACE_S = 1.0  # a compile that Python can still interrupt ends itself
_HOST_LIMIT_S = 10.0  # host code of one case, compiles not counted: it takes milliseconds
_SPARE_S = 1.0  # of the candidate's wall limit, kept to send what there is


def handle(ctx: Context) -> None:
    """Build the candidate of the one request that comes in."""
    request = records.from_json(BuildRequest, ctx.channel.recv(60.0).obj)
    deadline = time.monotonic() + request.wall_limit_s - _SPARE_S
    try:
        ctx.channel.send(_Build(request, ctx.channel, ctx.tmp, deadline).run())
    except BuildRejected as e:
        ctx.channel.send({"rejected": records.to_json(Rejected(e.stage, e.status, e.message))})
    except MachineError as e:
        ctx.channel.send({"machine": str(e)})


class _Build:
    def __init__(
        self, request: BuildRequest, channel: Channel, folder: Path, deadline: float
    ) -> None:
        self._request = request
        self._channel = channel
        self._folder = folder
        self._deadline = deadline
        self._target: Target = parse_target(request.target)
        self._sent: set[str] = set()  # hashes of binaries

    def run(self) -> Mapping[str, object]:
        """Trace all cases with all configurations, the declared one first; returns the last
        message.
        """
        kernels.cache_folder = self._folder / "kernels"
        kernels.cache_folder.mkdir()
        module = load_candidate(self._request.source, self._folder, self._target)
        configs = enumerate_configs(module, self._request.max_configs)
        gc.collect()
        gc.freeze()  # the tracer collects garbage at every allocation: only its own, please
        self._channel.send({"loaded": [dict(c) for c in configs]})
        for index, config in enumerate(configs):
            for case in self._request.cases:
                failure = self._case(module, index, config, case)
                if failure is None:
                    continue
                if index == 0:
                    return {"rejected": records.to_json(failure)}
                self._channel.send(
                    {"dropped": f"{dict(config)} on {case.name}: {failure.message}"[:2000]}
                )
                if failure.status is Status.TIMEOUT:
                    break  # it would take as long on the next case
            if time.monotonic() > self._deadline:
                left = len(configs) - index - 1
                if left:
                    self._channel.send({"dropped": f"{left} configurations: out of time"})
                break
        return {"done": True}

    def _case(
        self, module: ModuleType, index: int, config: Mapping[str, object], case: BuildCase
    ) -> Rejected | None:
        """Fork, trace one case there, pass on what it sends; the rejection if there is one."""
        ours, theirs = Channel.pair()
        with ours:
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                ours.close()
                self._trace(Channel(theirs), module, config, case)
            theirs.close()
            watch = _Watch(ours, case.name, self._request.compile_limit_s, self._deadline)
            try:
                message = watch.result()
            except ChannelError:
                message = None  # it died, or it was killed for its time
            finally:
                _kill_group(pid)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if message is None:
            return watch.rejection or _died(status, watch.compiling, case.name)
        answer = cast("dict[str, object]", message.obj)
        if "machine" in answer:
            raise MachineError(str(answer["machine"]))
        if "rejected" in answer:
            return records.from_json(Rejected, answer["rejected"])
        hashes = [str(h) for h in cast("list[object]", answer["hashes"])]
        self._channel.send({"plan": [index, case.name], "hashes": hashes}, message.blobs)
        self._sent.update(hashes)
        return None

    def _trace(
        self, channel: Channel, module: ModuleType, config: Mapping[str, object], case: BuildCase
    ) -> None:
        """In the fork: trace, send the plan or why there is none, and end."""
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
                channel.send({"hashes": new}, [dump_plan(plan), *(binaries[h] for h in new)])
        except BuildRejected as e:
            failure = Rejected(e.stage, e.status, e.message, case.name)
            channel.send({"rejected": records.to_json(failure)})
        except MachineError as e:
            channel.send({"machine": str(e)})
        except BaseException:  # noqa: BLE001 - the process boundary: the client reads it in the log
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


class _Watch:
    """Reads what a case's fork sends, and keeps the time of its compiles and of its host code."""

    def __init__(
        self, channel: Channel, case: str, compile_limit_s: float, deadline: float
    ) -> None:
        self.compiling: str | None = None
        self.rejection: Rejected | None = None
        self._channel = channel
        self._case = case
        self._compile_limit_s = compile_limit_s
        self._deadline = deadline

    def result(self) -> Message:
        """The message with the result.

        Raises:
            ChannelError: The fork died, or ran out of time (`rejection` says so).
        """
        host_left = _HOST_LIMIT_S
        while True:
            start = time.monotonic()
            limit = self._compile_limit_s + _COMPILE_GRACE_S if self.compiling else host_left
            try:
                message = self._channel.recv(max(0.0, min(limit, self._deadline - start)))
            except ChannelTimeout:
                self.rejection = self._timeout()
                raise
            spent = time.monotonic() - start
            if not self.compiling:
                host_left -= spent
            answer = message.obj
            if not isinstance(answer, dict) or "compiling" not in answer:
                return message
            self.compiling = cast("str | None", answer["compiling"])

    def _timeout(self) -> Rejected:
        if self.compiling and time.monotonic() < self._deadline:
            error = limits.too_slow(self.compiling, self._compile_limit_s)
            return Rejected(Stage.BUILD, Status.TIMEOUT, error.message, self._case)
        if time.monotonic() >= self._deadline:
            what = f"compiling kernel {self.compiling}" if self.compiling else "tracing"
            message = f"building all cases takes too long; it was cut while {what}"
        else:
            message = (
                f"host code of {self._case} ran for {_HOST_LIMIT_S:g} s: is there an endless loop? "
                "It should only allocate results and launch kernels"
            )
        return Rejected(Stage.BUILD, Status.TIMEOUT, message, self._case)


def _kill_group(pid: int) -> None:
    """End the fork and the compilers that it may have left."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _died(status: int, compiling: str | None, case: str) -> Rejected:
    doing = f"while compiling kernel {compiling}" if compiling else "in host code"
    if status < 0:
        how = f"died of {signal.Signals(-status).name}"
    else:
        how = f"ended itself with status {status}"
    return Rejected(
        Stage.BUILD,
        Status.RUNTIME_ERROR,
        f"the process that traced {case} {how} {doing}",
        case,
    )
