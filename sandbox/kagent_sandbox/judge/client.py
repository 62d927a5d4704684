"""The agent's handle on the judge's process. Needs no torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from kagent_sandbox.confine.isolation import Isolation
from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.data.build import Built, Contender, key_of
from kagent_sandbox.data.device import Ceilings, DeviceFacts
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import (
    CaseError,
    Examined,
    IncumbentWrong,
    Passed,
    Rejected,
    Stage,
    Status,
)
from kagent_sandbox.device.table import find_device
from kagent_sandbox.errors import ChildDied, JudgeMoved, MachineError
from kagent_sandbox.judge.check.cases import bench_cases
from kagent_sandbox.judge.judge_process import JudgeProcess
from kagent_sandbox.judge.link import Link
from kagent_sandbox.judge.packing import pack
from kagent_sandbox.judge.protocol import (
    CheckAnswer,
    Correct,
    Entrant,
    IncumbentRejected,
    MeasureAnswer,
    MeasureRequest,
    RaceRequest,
    SweepAnswer,
    Swept,
)
from kagent_sandbox.judge.timing import metrics
from kagent_sandbox.judge.timing.noise import Noise
from kagent_sandbox.process.temporary_space import says_full

T = TypeVar("T")

KEPT = 16
"""Candidates whose plans and binaries the judge keeps at a time."""
MOST_SET_ASIDE = 2
"""Candidates in a row that judges may die of before it is the machine that is not to be trusted."""
_MOST_DEATH = 1700  # characters of a judge's death in a verdict
CEILINGS_APART = 0.02
"""Largest part by which a case's least time may differ on another unit (`ceilings_apart`)."""


class JudgeClient:
    """A judge in a process of its own.

    Use it as a context manager. Calls block; make them from one thread at a time. Every method
    raises the errors of the judge (`TaskError`, `MachineError`, `DeviceWedged`), and `ChildDied`
    with the end of its log when the process is gone.

    A judge that dies while it has a candidate is started and asked once more. If it dies again, the
    candidate is set aside with a verdict that says so. Otherwise that candidate would end every
    session of a run at the same place. A candidate that takes the whole machine down is not
    covered.

    Example:
        Build a seed for the CPU, then check and time it::

            from pathlib import Path

            from kagent_sandbox.builder.client import Builder
            from kagent_sandbox.data.build import BuildRequest
            from kagent_sandbox.data.build_case import build_case
            from kagent_sandbox.data.task import load_task
            from kagent_sandbox.judge.check.cases import bench_cases, check_cases
            from kagent_sandbox.judge.client import JudgeClient

            folder, run_seed = Path("seeds/softmax"), 7
            task = load_task(folder)
            cases = check_cases(task, "cpu", run_seed) + bench_cases(task, "cpu")
            request = BuildRequest(
                source=(folder / "cpp_rows.py").read_text(),
                entry=task.entry,
                target="cpu",
                cases=tuple(build_case(task, case) for case in cases),
            )
            with Builder() as builder, JudgeClient(folder, "cpu", run_seed) as judge:
                built = builder.build(request)
                errors = judge.check(built)
                print(judge.measure(built, errors))
    """

    def __init__(
        self,
        task_folder: Path,
        device: str,
        run_seed: int,
        *,
        index: int = 0,
        timeout_scale: float = 1.0,
        eager_only: bool = False,
        race_s: float = 0.0,
        tier: Tier | None = None,
        on_wait: Callable[[str], None] | None = None,
        take_turns: bool = True,
        connect: Callable[[], Link] | None = None,
    ) -> None:
        """Start the process and open the device.

        Args:
            task_folder: Folder of the task.
            device: Its name (`kagent_sandbox.device.table`): "gpu", "cpu".
            run_seed: Draws the run's hidden cases.
            index: Which of several.
            timeout_scale: Share of the usual limits after which a candidate is taken for hung.
            eager_only: Whether candidates' times are divided by eager torch's alone where nobody
                has asked for `baselines`: what torch compiles may take a minute.
            race_s: Seconds from a race's start in which further rounds may begin, after those that
                everybody gets, while a verdict beside torch is not clear. A device whose
                comparisons have no further rounds ignores it.
            tier: How launchers are confined: None is as KAGENT_ISOLATION says.
            on_wait: Is told, from the thread of a call, who has the device while this waits for it.
            take_turns: Whether the device is taken for each request. Otherwise the caller has it
                (`kagent_sandbox.process.device_lock`).
            connect: Starts a judge that is elsewhere, and returns what reaches it; then `index`,
                `tier`, `on_wait` and `take_turns` are the other end's. None: a process of this
                machine's.
        """
        self._entry = find_device(device)
        self._opened: Mapping[str, object] = {
            "task": str(task_folder),
            "device": device,
            "run_seed": run_seed,
            "timeout_scale": timeout_scale,
            "eager_only": eager_only,
            "race_s": race_s,
        }
        self._connect = connect or partial(
            JudgeProcess, device, index=index, tier=tier, on_wait=on_wait, take_turns=take_turns
        )
        self._choices: dict[str, Mapping[str, int]] = {}
        self._set_aside = 0  # candidates since the last one that was judged
        self._ceilings: Ceilings | None = None
        self._timed = False  # whether there are times that those of a successor must compare with
        self._moved: JudgeMoved | None = None  # to another device, which nobody has been told
        self._died_of = ""  # key of the candidate that the last judge died of
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._link = self._connect()
        self._kept: OrderedDict[str, None] = OrderedDict()
        try:
            if self._closed:
                raise ChildDied("the judge was closed")  # noqa: TRY301
            self.facts: DeviceFacts = from_json(DeviceFacts, self._ask("open", self._opened))
        except BaseException:
            self._link.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def isolation(self) -> Isolation:
        """Isolation of launchers, as observed. Waits until their fork-server is ready."""
        return from_json(Isolation, self._ask("isolation"))

    @property
    def pid(self) -> int:
        """Process id of the judge, or of its successor."""
        return self._link.pid

    def ceilings(self) -> Ceilings:
        """Ceilings of the device: the rates of the plainest kernels. Measured once, then cached."""
        self._ceilings = from_json(Ceilings, self._steadily(partial(self._ask, "ceilings")))
        return self._ceilings

    def ceilings_apart(self, one: Ceilings, other: Ceilings) -> float:
        """Largest part by which the ceilings of two devices differ for this task, 0 to 1.

        A task whose cases are all bound by memory does not see that another card of its name
        multiplies faster.
        """
        task = load_task(Path(str(self._opened["task"])))
        return metrics.ceilings_apart(task, bench_cases(task, self.facts.kind), one, other)

    def noise(self) -> Noise:
        """A/A test: apparent ratio of a kernel timed against itself. Every judge runs it before it
        times anything.
        """
        return from_json(Noise, self._steadily(partial(self._ask, "noise")))

    def compile_ahead(self, *, race: bool, cached: bool = True) -> None:
        """Compile what `baselines` will time, beside others that compile or check. Nobody is timed
        meanwhile: processes on the device, which start and end, would disturb it. Where torch's
        compiler times variants, it has the device alone for as long as that takes.

        Args:
            race: Whether a race on hidden cases is to come: its baselines are compiled as well.
            cached: Whether stored times may be returned then; nothing is compiled for these.
        """
        request = _ahead(visible=True, hidden=race, cached=cached, measures_next=True)
        self._steadily(partial(self._ask_ahead, request))

    def baselines(
        self, on_progress: Callable[[str], None] | None = None, *, cached: bool = True
    ) -> Any:
        """Measure all baselines on the benchmark cases.

        Args:
            on_progress: Function that receives a line per baseline that is measured.
            cached: Whether stored times may be returned.

        Returns:
            `kagent_sandbox.judge.timing.baselines.Baselines`: times in µs by case and name.
        """
        from kagent_sandbox.judge.timing.baselines import Baselines

        ask = partial(self._ask, "baselines", {"cached": cached}, on_progress=on_progress)
        return from_json(Baselines, self._steadily(ask))

    def check(self, built: Built) -> tuple[CaseError, ...] | Rejected:
        """Check a candidate on all visible and hidden check cases.

        Args:
            built: The candidate's plans and binaries.

        Returns:
            An error per case and result if all are within tolerance, else the rejection.
        """

        def ask() -> tuple[CaseError, ...] | Rejected:
            result = from_json(CheckAnswer, self._ask("check", {"key": self._keep(built)})).result
            return result.errors if isinstance(result, Correct) else result

        return self._judged(Stage.CHECK, built, ask)

    def examine(self, built: Built, *, bench_shapes: bool = False) -> Examined:
        """Check a candidate in every case, also after one that fails. A search ends at the first.

        Args:
            built: The candidate's plans and binaries.
            bench_shapes: Whether the benchmark cases and the hidden ones of the final race are
                checked, too. The candidate was built for them.
        """

        def ask() -> Examined:
            asked = {"key": self._keep(built), "bench_shapes": bench_shapes}
            return from_json(Examined, self._ask("examine", asked))

        found = self._judged(Stage.CHECK, built, ask)
        for rejected in found.failed if isinstance(found, Examined) else ():
            self._require_room(rejected)
        return Examined((), (found,)) if isinstance(found, Rejected) else found

    def sweep(self, built: Built) -> tuple[Mapping[str, float], ...] | Rejected:
        """Time configurations that nobody has checked, with a few samples each. They count for
        nothing but the choice of one.

        Args:
            built: The candidate, for the benchmark cases at least. It has passed `check` in its
                declared configuration, the first.

        Returns:
            Median µs by case of each configuration, a case missing where it failed; the rejection
            where the declared one failed.
        """

        def ask() -> tuple[Mapping[str, float], ...] | Rejected:
            asked = {"key": self._keep(built), "sweep_s": self._entry.traits.sweep_s}
            found = from_json(SweepAnswer, self._ask("sweep", asked)).result
            return found.us if isinstance(found, Swept) else found

        return self._judged(Stage.MEASURE, built, ask)

    def measure(
        self,
        built: Built,
        errors: tuple[CaseError, ...],
        incumbent: Built | None = None,
        against: str = "",
        *,
        choice: Mapping[str, int] | None = None,
        sweep_s: float | None = None,
    ) -> Passed | Rejected:
        """Time a candidate on all benchmark cases, beside the incumbent.

        Args:
            built: The candidate.
            errors: The result of `check` for it.
            incumbent: The best candidate so far; None if there is none.
            against: The incumbent's id.
            choice: The incumbent's configuration per case. The default is the one that this client
                measured.
            sweep_s: Seconds on the device per case to find the candidate's best configuration.

        Returns:
            Times in µs with 95 % intervals and the comparison with the incumbent, or a rejection.

        Raises:
            IncumbentWrong: The incumbent failed, or was wrong where it was timed.
        """

        def ask() -> Passed | Rejected | IncumbentRejected:
            entrant = None
            if incumbent is not None:
                entrant = self._entrant(Contender(against, incumbent, choice or {}), built)
            key = self._keep(built)
            limit_s = self._entry.traits.sweep_s if sweep_s is None else sweep_s
            request = to_json(MeasureRequest(key, tuple(errors), entrant, limit_s))
            return from_json(MeasureAnswer, self._ask("measure", {"request": request})).result

        answer = self._judged(Stage.MEASURE, built, ask)
        self._timed = True
        if isinstance(answer, IncumbentRejected):
            self._require_room(answer.incumbent)
            raise IncumbentWrong(against, answer.incumbent)
        if isinstance(answer, Passed):
            self._choices[built.source_hash] = {t.case: t.config for t in answer.timings}
        return answer

    def race(
        self, contenders: Sequence[Contender], *, hidden: bool = True, baselines: bool = True
    ) -> Race:
        """Time contenders and all baselines side by side in fresh launchers.

        Args:
            contenders: The candidates, built for the cases of the race.
            hidden: Whether the race is on the hidden cases of the final race. Otherwise it is on
                the visible benchmark cases (`kagent bench`).
            baselines: Whether torch's baselines take part.

        Returns:
            Times in µs and ratios per case, and ratios over all cases.
        """
        self._tell_moved()
        try:
            return self._race(contenders, hidden=hidden, baselines=baselines)
        except ChildDied:
            self._restart()
            self._tell_moved()
            return self._race(contenders, hidden=hidden, baselines=baselines)

    def _race(self, contenders: Sequence[Contender], *, hidden: bool, baselines: bool) -> Race:
        entrants = tuple(self._entrant(c, *(o.built for o in contenders)) for c in contenders)
        if baselines and contenders:  # of visible cases that were timed here, the code is there
            self._ask_ahead(_ahead(visible=not hidden, hidden=hidden))
        request = to_json(RaceRequest(entrants, hidden, baselines))
        race = from_json(Race, self._ask("race", {"request": request}))
        self._timed = True
        for rejected in race.failed.values():
            self._require_room(rejected)
        return race

    def health(self) -> None:
        """Make sure that the device still computes.

        Raises:
            DeviceWedged: It does not.
        """
        self._ask("health")

    def printed(self) -> str:
        """Return the output of launchers that have ended since the last call: a candidate's own
        words.
        """
        return str(cast("dict[str, object]", self._ask("printed"))["text"])

    def close(self) -> None:
        """End the process and all that it started. Whoever waits for the device, or for an answer,
        gives up: no other judge is started.
        """
        self._closed = True
        self._link.close()

    # -- when the judge dies -----------------------------------------------------------------------

    def _judged(self, stage: Stage, built: Built, ask: Callable[[], T]) -> T | Rejected:
        """Ask about a candidate; again with a new judge if this one dies.

        Raises:
            ChildDied: That happens to one candidate after the other.
            DeviceWedged: The device does not compute any more.
            JudgeMoved: See `_tell_moved`.
        """
        self._tell_moved()
        try:
            answer = ask()
        except ChildDied as death:
            before, self._died_of = self._died_of, key_of(built)
            if before == self._died_of:  # as the judge before, on another device
                return self._aside(stage, death)
            self._restart()
            self._tell_moved()
            try:
                answer = ask()
            except ChildDied as again:
                return self._aside(stage, again)
        self._set_aside = 0
        self._died_of = ""
        if isinstance(answer, Rejected):
            self._require_room(answer)
        return answer

    def _require_room(self, rejected: Rejected) -> None:
        """Make sure that it was not the machine's disk that was full.

        Raises:
            MachineError: It was.
        """
        if says_full(rejected.message):
            self._ask("room")

    def _aside(self, stage: Stage, death: ChildDied) -> Rejected:
        """The verdict on a candidate that two judges in a row have died of."""
        self._set_aside += 1
        self._died_of = ""
        if self._set_aside > MOST_SET_ASIDE:
            raise ChildDied(
                f"{self._set_aside} candidates in a row have cost two judges each: that is the "
                f"machine rather than the kernels. The last time {death}"
            ) from death
        self._restart()
        self.health()
        text = str(death)
        if len(text) > _MOST_DEATH:  # the end of the log says of what
            text = f"{text[:100]} ... {text[-_MOST_DEATH:]}"
        return Rejected(
            stage,
            Status.RUNTIME_ERROR,
            "set aside: two judges in a row died of this candidate, and the device computes known "
            f"results as before. It may be the machine's fault. The last time {text}",
        )

    def _steadily(self, ask: Callable[[], object]) -> object:
        """The answer to what is not about a candidate; of a new judge if this one dies."""
        self._tell_moved()
        try:
            return ask()
        except ChildDied:
            self._restart()
            self._tell_moved()
            return ask()

    def _ask_ahead(self, request: Mapping[str, object]) -> None:
        """Have baselines compiled, step by step, each in the turn on the device that it needs."""
        answer = self._ask("ahead", request)
        while (needs := cast("dict[str, object]", answer)["needs"]) is not None:
            answer = self._ask(f"ahead {needs}")

    def _restart(self) -> None:
        """A new judge in the place of one that is gone. It has no candidates yet.

        Raises:
            ChildDied: This client was closed meanwhile.
            MachineError: It is on a device whose times do not compare with those before.
        """
        if self._closed:
            raise ChildDied("the judge was closed")
        before = self.facts
        self._link.close()
        self._start()
        if self.facts.key != before.key:
            raise MachineError(
                f"the judge was lost, and the one in its place is on {self.facts.key}; times were "
                f"measured on {before.key}, and those of the two do not compare. What is recorded "
                "is kept: resume where there is such a device"
            )
        known = self._ceilings
        if known is not None and self.facts.unit != before.unit:
            apart = self.ceilings_apart(known, from_json(Ceilings, self._ask("ceilings")))
            if apart > CEILINGS_APART:
                raise MachineError(
                    f"the judge was lost, and the one in its place is on another {before.name}, "
                    f"whose ceilings differ by {apart:.1%} (most: {CEILINGS_APART:.0%}): times of "
                    "the two do not compare. What is recorded is kept: resume on the first one"
                )
        if self._timed and self.facts.unit != before.unit:
            self._moved = JudgeMoved(
                f"the judge was lost, and the one in its place is on another {before.name} "
                f"({self.facts.unit}). What is recorded is kept: resume on the first one",
                self.facts.unit,
            )

    def _tell_moved(self) -> None:
        """Tell once that the judge has moved, before it is asked on the other device.

        Raises:
            JudgeMoved: It has. Whoever asks again has made sure that times of the two compare.
        """
        moved, self._moved = self._moved, None
        if moved is not None:
            raise moved

    # -- the protocol ----------------------------------------------------------------------------

    def _entrant(self, contender: Contender, *keep: Built) -> Entrant:
        choice = contender.choice or self._choices.get(contender.built.source_hash, {})
        return Entrant(contender.id, self._keep(contender.built, *keep), choice)

    def _keep(self, built: Built, *others: Built) -> str:
        """Send a candidate unless the judge has it; the one not used for longest makes room."""
        key = key_of(built)
        if key not in self._kept:
            header, blobs = pack(built)
            self._ask("keep", {"key": key, "header": to_json(header)}, blobs)
            self._kept[key] = None
        self._kept.move_to_end(key)
        needed = {key, *(key_of(o) for o in others)}
        for old in [k for k in self._kept if k not in needed][: max(0, len(self._kept) - KEPT)]:
            del self._kept[old]
            self._ask("drop", {"key": old})
        return key

    def _ask(
        self,
        verb: str,
        request: Mapping[str, object] | None = None,
        blobs: Sequence[bytes] = (),
        *,
        on_progress: Callable[[str], None] | None = None,
    ) -> object:
        """Send a request and return its answer."""
        return self._link.ask(verb, request or {}, blobs, on_progress)


def _ahead(
    *, visible: bool, hidden: bool, cached: bool = True, measures_next: bool = False
) -> dict[str, object]:
    """Request to compile baselines of visible and hidden cases.

    Args:
        visible: Those of the visible cases, unless `cached` and their times are known.
        hidden: Those of the race's hidden cases.
        cached: See `JudgeClient.compile_ahead`.
        measures_next: Whether a process that measures the visible ones is needed next.
    """
    return {"visible": visible, "hidden": hidden, "cached": cached, "measures_next": measures_next}
