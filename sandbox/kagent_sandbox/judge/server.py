"""The judge's own process: `python -m kagent_sandbox.judge.server FD`.

Answers one request after the other on the socket FD until it is closed. Errors of the machine and
of the user are answers, too; anything else is a bug and ends the process with its traceback in the
log.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kagent_sandbox.confine.presets import LAUNCHER_DISK_BYTES, LAUNCHER_DISK_FILES
from kagent_sandbox.data.build import Contender
from kagent_sandbox.data.race import EAGER
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import IncumbentWrong, Rejected
from kagent_sandbox.device import device_memory, time_limits
from kagent_sandbox.device.table import find_device
from kagent_sandbox.errors import DeviceError, DeviceFull, KagentError
from kagent_sandbox.judge.check.cases import bench_cases
from kagent_sandbox.judge.judge import Judge
from kagent_sandbox.judge.packing import Header, unpack
from kagent_sandbox.judge.protocol import (
    AHEAD,
    USES,
    CheckAnswer,
    Correct,
    Entrant,
    IncumbentRejected,
    MeasureAnswer,
    MeasureRequest,
    RaceRequest,
    SweepAnswer,
    Swept,
    error_answer,
)
from kagent_sandbox.judge.timing.baselines import (
    Baselines,
    BaselineWorker,
    measure_baselines,
    stored_baselines,
)
from kagent_sandbox.judge.timing.race_baselines import RaceBaselines
from kagent_sandbox.process.channel import Channel, ChannelClosed
from kagent_sandbox.process.exit import exit_fast, exit_when_peer_closes
from kagent_sandbox.process.temporary_space import require_room

if TYPE_CHECKING:
    from kagent_sandbox.data.build import Built
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.process.device_lock import Mode

Json = Mapping[str, object]


class JudgeServer:
    """One judge behind a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._judge: Judge | None = None
        self._race_baselines: RaceBaselines | None = None
        self._eager_only = False
        self._device = ""
        self._index = 0
        self._kept: dict[str, Built] = {}
        self._worker: BaselineWorker | None = None  # started while others compile
        self._steps: Generator[Mode, None, Collection[str]] | None = None  # of compiling ahead
        self._compiled = set[str]()  # names of the race's hidden cases, of which the code is here

    def serve(self) -> None:
        """Answer requests until the client is gone."""
        verbs = {
            "load": self._load,
            "open": self._open,
            "ceilings": self._ceilings,
            "noise": self._noise,
            "ahead": self._ahead,
            "ahead timing": self._step,
            "ahead work": self._step,
            "baselines": self._baselines,
            "keep": self._keep,
            "drop": self._drop,
            "check": self._check,
            "examine": self._examine,
            "sweep": self._sweep,
            "measure": self._measure,
            "race": self._race,
            "health": self._health,
            "printed": self._printed,
            "isolation": self._isolation,
            "rest": self._rest,
            "room": self._room,
        }

        def perform(request: Json, blobs: Sequence[bytes]) -> Json:
            self._begin(request)
            return verbs[str(request["do"])](request, blobs)

        try:
            with contextlib.suppress(ChannelClosed):
                while True:
                    message = self._channel.recv(None)
                    request = cast("Json", message.obj)
                    answer = self._answered(request, perform, message.blobs)
                    room = self._answered(request, self._make_room, ())
                    # The first error may have caused the other.
                    self._channel.send(answer if "error" in answer or "ok" in room else room)
        finally:
            self._end_worker()
            self._end_steps()
            if self._judge is not None:
                self._judge.close()

    def _end_worker(self) -> None:
        """End the process that was started ahead to measure baselines, if there is one."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    @property
    def judge(self) -> Judge:
        """The judge, once opened."""
        assert self._judge is not None, "the first request is open"
        return self._judge

    def _answered(
        self,
        request: Json,
        perform: Callable[[Json, Sequence[bytes]], Json],
        blobs: Sequence[bytes],
    ) -> Json:
        """The answer to a request, or the error in its place."""
        try:
            return {"ok": perform(request, blobs)}
        except (DeviceFull, RuntimeError) as e:  # torch's are among the latter
            if not device_memory.lacks_memory(e):
                raise
            return error_answer(self._explained(e, request))
        except KagentError as e:
            return error_answer(e)

    def _make_room(self, _request: Json, _: Sequence[bytes]) -> Json:
        """Give back memory at the end of a request.

        Raises:
            MachineError: The device does not take it.
        """
        try:
            if self._judge is not None:
                self._judge.make_room()
        except RuntimeError as e:  # torch's, and no request's
            first = str(e).partition("\n")[0]
            raise DeviceError(f"memory does not go back: {first}") from e
        return {}

    def _begin(self, request: Json) -> None:
        """A request begins: others work on the device meanwhile, or they do not."""
        if request["do"] in USES and request["do"] not in AHEAD:
            self._end_steps()
        if self._judge is not None and request["do"] in USES:
            self._judge.begin_request(alone=bool(request.get("alone", True)))

    def _explained(self, error: Exception, request: Json) -> KagentError:
        """The error where memory was not enough."""
        judge = self._judge
        use = None
        if judge is not None:
            use = device_memory.memory_use(judge.backend.device, judge.arena_bytes)
        return device_memory.explain(error, use, alone=bool(request.get("alone", True)))

    def _load(self, request: Json, _: Sequence[bytes]) -> Json:
        find_device(str(request["device"])).load()
        return {}

    def _open(self, request: Json, _: Sequence[bytes]) -> Json:
        time_limits.scale = float(str(request["timeout_scale"]))
        task = load_task(Path(str(request["task"])))
        self._device = str(request["device"])
        entry = find_device(self._device)
        self._index = int(str(request["index"]))
        backend = entry.open(self._index, products=bool(task.allow))
        self._race_baselines = RaceBaselines.on(backend, task)
        self._eager_only = bool(request["eager_only"])
        self._judge = Judge(
            task,
            backend,
            int(str(request["run_seed"])),
            race_s=float(str(request["race_s"])),
        )
        return to_json(backend.facts)

    def _ceilings(self, _request: Json, _: Sequence[bytes]) -> Json:
        return to_json(self.judge.ceilings)

    def _noise(self, _request: Json, _: Sequence[bytes]) -> Json:
        return to_json(self.judge.find_noise())

    def _ahead(self, request: Json, _: Sequence[bytes]) -> Json:
        """Begin to compile what torch's baselines need; the answer is that of the first step."""
        judge, race_baselines = self.judge, self._race_baselines
        assert race_baselines is not None, "the first request is open"
        visible: Sequence[Case] = ()
        hidden: Sequence[Case] = ()
        if request["visible"] and not (request["cached"] and self._stored()):
            visible = bench_cases(judge.task, judge.kind)
            beside = not judge.backend.traits.disturbed_by_builds  # its imports are others' noise
            if request["measures_next"] and beside and self._worker is None:
                self._worker = BaselineWorker.ahead(self._device)
        if request["hidden"]:
            hidden = [c for c in judge.race_cases if c.name not in self._compiled]
        self._end_steps()
        self._steps = race_baselines.compile_ahead(hidden, visible)
        return self._step({}, ())

    def _step(self, _request: Json, _: Sequence[bytes]) -> Json:
        """Take the next step of compiling ahead. The answer is the turn that the one after it
        needs, None after the last.
        """
        if self._steps is None:
            return {"needs": None}
        try:
            return {"needs": next(self._steps)}
        except StopIteration as end:
            self._compiled |= set(end.value or ())  # None: a step before failed
            self._steps = None
            return {"needs": None}

    def _end_steps(self) -> None:
        """End what compiles ahead, if somebody did not wait for it."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def _stored(self) -> bool:
        """Whether the visible cases' baselines were measured before, and those times are used."""
        task, facts = self.judge.task, self.judge.backend.facts
        return stored_baselines(task, self._device, facts) is not None

    def _baselines(self, request: Json, _: Sequence[bytes]) -> Json:
        return to_json(self._find_baselines(None, cached=bool(request["cached"])))

    def _find_baselines(self, names: Collection[str] | None, *, cached: bool = True) -> Baselines:
        judge, race_baselines = self.judge, self._race_baselines
        assert race_baselines is not None, "the first request is open"
        if names is None:
            race_baselines.prefetch()  # a run's beginning, which a race ends
        try:
            found = measure_baselines(
                judge.task,
                self._device,
                judge.backend.facts,
                lambda line: self._channel.send({"progress": line}),
                names=names,
                index=self._index,
                cached=cached,
                noise=judge.find_noise(),
                worker=self._worker,
            )
        finally:
            self._end_worker()
        judge.baselines_us.update(found.fastest_us)
        return found

    def _keep(self, request: Json, blobs: Sequence[bytes]) -> Json:
        self._kept[str(request["key"])] = unpack(from_json(Header, request["header"]), blobs)
        return {}

    def _drop(self, request: Json, _: Sequence[bytes]) -> Json:
        self._kept.pop(str(request["key"]), None)
        return {}

    def _check(self, request: Json, _: Sequence[bytes]) -> Json:
        found = self.judge.check(self._kept[str(request["key"])])
        result = found if isinstance(found, Rejected) else Correct(found)
        return to_json(CheckAnswer(result))

    def _examine(self, request: Json, _: Sequence[bytes]) -> Json:
        built = self._kept[str(request["key"])]
        return to_json(self.judge.examine(built, bench_shapes=bool(request["bench_shapes"])))

    def _sweep(self, request: Json, _: Sequence[bytes]) -> Json:
        built = self._kept[str(request["key"])]
        found = self.judge.sweep(built, float(str(request["sweep_s"])))
        return to_json(SweepAnswer(found if isinstance(found, Rejected) else Swept(found)))

    def _measure(self, request: Json, _: Sequence[bytes]) -> Json:
        wanted = from_json(MeasureRequest, request["request"])
        if not self.judge.baselines_us:
            self._find_baselines((EAGER,) if self._eager_only else None)
        self.judge.find_noise()
        incumbent = None if wanted.incumbent is None else self._contender(wanted.incumbent)
        built = self._kept[wanted.key]
        try:
            verdict = self.judge.measure(built, wanted.errors, incumbent, sweep_s=wanted.sweep_s)
        except IncumbentWrong as e:
            return to_json(MeasureAnswer(IncumbentRejected(e.verdict)))
        return to_json(MeasureAnswer(verdict))

    def _race(self, request: Json, _: Sequence[bytes]) -> Json:
        wanted = from_json(RaceRequest, request["request"])
        contenders = [self._contender(e) for e in wanted.entrants]
        race_baselines = self._race_baselines if wanted.baselines else None
        self.judge.find_noise()
        return to_json(
            self.judge.race(contenders, hidden=wanted.hidden, race_baselines=race_baselines)
        )

    def _health(self, _request: Json, _: Sequence[bytes]) -> Json:
        self.judge.health()
        return {}

    def _printed(self, _request: Json, _: Sequence[bytes]) -> Json:
        return {"text": self.judge.backend.printed()}

    def _isolation(self, _request: Json, _: Sequence[bytes]) -> Json:
        return to_json(self.judge.backend.isolation)

    def _rest(self, _request: Json, _: Sequence[bytes]) -> Json:
        self.judge.give_back()
        self.judge.backend.wait_until_idle()
        return {}

    def _room(self, _request: Json, _: Sequence[bytes]) -> Json:
        folder, tier = Path(tempfile.gettempdir()), self.judge.backend.isolation.tier
        require_room(folder, tier, LAUNCHER_DISK_BYTES, LAUNCHER_DISK_FILES, "a launcher")
        return {}

    def _contender(self, entrant: Entrant) -> Contender:
        return Contender(entrant.id, self._kept[entrant.key], entrant.choice)


def main() -> None:
    """Serve the socket whose descriptor is the first argument, and end the process."""
    exit_when_peer_closes(int(sys.argv[1]))
    with Channel(socket.socket(fileno=int(sys.argv[1]))) as channel:
        JudgeServer(channel).serve()
    exit_fast()
