"""What kagent makes of 1, 2, 4 and 8 GPUs of one machine: turns, throughput, what is never mixed.

    python benchmarks/gpu_scaling.py --out FOLDER [--devices 1,2,4] [--stages turns,judges,campaign]
    python benchmarks/gpu_scaling.py --cpu --devices 1,2 --seconds 20 --search-s 40 --neighbours 2

turns     `--neighbours` judges share the first GPU, a process each. All of them time kernels of
          `planted.py`, equal ones and one that is 5 % faster. First one judge alone, then all.
          Printed are the judge's calls, and whether two turns ever overlapped.
judges    One run with a scripted model, judged on N GPUs, for each N of `--devices`. Printed are
          also how the other GPUs were admitted, which GPU the processes of each judge see, and, at
          the largest N, the final race on two of them.
campaign  A campaign over `--tasks` on N GPUs, in slices, each in a process that starts a judge.

Each search ends after `--search-s`; that of one run has 90 s more, for the start of its judges.
The table at the end has, for each N, replies and evaluations
an hour; the share of the rate of N single GPUs that this is; and what `fleet_simulation.py` makes
of N GPUs if replies become what they became on one. Of a campaign it has two rates: while it
searches, and with the starts of judges. N that the machine lacks are left out.

torch.compile is off: its baselines take a minute, and no figure here depends on them. All that is
measured of the machine is measured anew (`XDG_CACHE_HOME` is a fresh folder). With `--cpu` the
processor stands in for N devices: that tries this script, and its figures say nothing of several
devices. No part of a stage begins after `--limit-s`. One that fails is told, and the next begins;
files in `--out` are written after each.

The scripted model gives a task's seeds with other values of their tunables, each once: 100 answers
for softmax on a GPU, 216 for rms_norm, which four GPUs need. What it says again counts for nothing,
and is told.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import planted
from fleet_simulation import Fleet, Replies, simulate
from kagent.campaign.file import asked_for, plan
from kagent.campaign.running import CampaignRunner
from kagent.config.settings import load_config
from kagent.evolve.admission import pairs_of
from kagent.evolve.session import Outcome, evolve
from kagent.fleet import fleet
from kagent.runs.events import Event, Finished, Phase, PhaseBegan, Progress, Recorded
from kagent.runs.history import History
from kagent.runs.manifest import list_runs, versions
from kagent.runs.store import read_history
from kagent.suite.problems import Problem
from kagent_sandbox.data.device import Ceilings
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.verdict import Passed, Rejected, Stage
from kagent_sandbox.device.detect import VISIBLE, gpu_count
from kagent_sandbox.judge import judge_process
from kagent_sandbox.judge.client import JudgeClient
from kagent_sandbox.judge.timing.noise import Noise
from kagent_sandbox.process import process_tree
from kagent_sandbox.process.device_lock import DeviceLock, Mode
from model_loop import Endpoint

PLANTS = (0.0, 0.05)
ROWS = {"gpu": 8000, "cpu": 1000}  # of the planted kernels
# Calls of the model at once, for each device. On the CPU nothing is timed while others are built.
IN_FLIGHT = {"gpu": 12, "cpu": 2}
MOST_IN_FLIGHT = 64  # of a run
STARTS_S = 90.0  # that judges may take to start where nothing of torch is in memory yet
MORE_THAN_ENOUGH = 4000  # evaluations a GPU: time ends a search
LOOK_AT = (3, 20)  # evaluations after which it is asked which GPUs the judges' processes see
Tell = Callable[[str], None]


@contextlib.contextmanager
def model(task: str, latency_s: float, kind: Kind) -> Iterator[str]:
    """Address of a scripted model for a task, which answers from a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(task, latency_s, kind, there), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


def _answer(task: str, latency_s: float, kind: Kind, told: Any) -> None:
    told.send(Endpoint(task, latency_s, 1, kind).url)
    threading.Event().wait()


# -- neighbours on one GPU -------------------------------------------------------------------------


def neighbour(kind: Kind, folder: Path) -> None:
    """Time planted pairs on the first device from a line on stdin to the next one; print what was
    found, and this process's turns, as one line of JSON.
    """
    turns: list[tuple[str, float, float]] = []

    class Seen(DeviceLock):
        """Keeps when each turn began and ended, on the clock of the machine."""

        @contextlib.contextmanager
        def turn(self, mode: Mode) -> Iterator[None]:
            with super().turn(mode):
                begun = time.monotonic()
                try:
                    yield
                finally:
                    turns.append((mode, begun, time.monotonic()))

    judge_process.DeviceLock = Seen
    task = planted.make_task(folder / str(os.getpid()), ROWS[kind])
    found: list[tuple[float, str, float]] = []
    waits: list[float] = []
    with JudgeClient(task.folder, kind, planted.SECRET, eager_only=True) as judge:
        target = judge.facts.target
        code = planted.compile_kernel(kind, target)
        kernels = {s: planted.planted(task, kind, target, code, s) for s in PLANTS}
        judge.measure(kernels[0.0], ())  # baselines, and the A/A test
        print("ready", flush=True)
        sys.stdin.readline()
        turns.clear()
        stop = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
        while not stop.is_set():
            share = PLANTS[len(found) % len(PLANTS)]
            asked, count = time.monotonic(), len(turns)
            verdict = judge.measure(kernels[0.0], (), kernels[share], "other")
            waits.append(turns[count][1] - asked)
            ratio = math.nan
            if isinstance(verdict, Passed) and verdict.versus is not None:
                ratio = verdict.versus.ratio
            found.append((share, planted.called(verdict), ratio))
    print(json.dumps({"found": found, "turns": turns, "waits": waits}), flush=True)


def share_one(kind: Kind, count: int, seconds: float) -> list[dict[str, Any]]:
    """What so many neighbours found and did in so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--neighbour", folder, *(["--cpu"] * (kind == "cpu"))]
        processes = [
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        try:
            for process in processes:
                assert process.stdout.readline() == "ready\n"
            for pause_s in (seconds, 0.0):  # they begin, they end
                for process in processes:
                    process.stdin.write("\n")
                    process.stdin.flush()
                time.sleep(pause_s)
            return [json.loads(process.communicate()[0]) for process in processes]
        finally:
            for process in processes:
                process.kill()


def report_turns(answers: Sequence[Mapping[str, Any]], tell: Tell) -> None:
    """The judge's calls, and whether turns overlapped."""
    found = [tuple(f) for a in answers for f in a["found"]]
    for share in PLANTS:
        calls = Counter(called for s, called, _ in found if s == share)
        ratios = [r for s, _, r in found if s == share and not math.isnan(r)]
        middle = f"{statistics.median(ratios):.4f}" if ratios else "-"
        off = math.sqrt(statistics.fmean(math.log(r) ** 2 for r in ratios)) if ratios else math.nan
        wide = f", {off:.2%} from 1 (rms)" if share == 0 else ""
        tell(f"  planted {share:.0%}: {dict(calls)}, median ratio {middle}{wide}")
    turns = sorted((b, e, m, i) for i, a in enumerate(answers) for m, b, e in a["turns"])
    timings = [(b, e, i) for b, e, m, i in turns if m == "timing"]
    overlaps = sum(after[0] < before[1] for before, after in itertools.pairwise(timings))
    each = Counter(i for _, _, i in timings)
    waits = [w for a in answers for w in a["waits"]]
    tell(
        f"  {len(timings)} timing turns, {overlaps} of them overlapped; a process had "
        f"{min(each.values())} to {max(each.values())}; waits: median "
        f"{statistics.median(waits):.2f} s, longest {max(waits):.2f} s"
    )


def stage_turns(options: argparse.Namespace, report: Report) -> None:
    for count in (1, options.neighbours):
        name = f"{count} judge{'s' * (count > 1)} on the first device, {options.seconds:g} s"
        with report.part(name) as begins:
            if begins:
                report_turns(share_one(options.kind, count, options.seconds), report.tell)


# -- rates ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """What N devices did.

    Attributes:
        stage: "judges" or "campaign".
        devices: N.
        judged: Devices that gave verdicts.
        replies: With a verdict, but for what the model had said before.
        evaluations: Those of them, and of other candidates, that were charged.
        seconds: In which they came.
        searching: Share of the devices' time that searches took; the rest is starts of judges.
        timed: Share of the searches' time that a device was held.
        simulated: Replies a second that `fleet_simulation.py` has for a search.
    """

    stage: str
    devices: int
    judged: int
    replies: int
    evaluations: int
    seconds: float
    searching: float
    timed: float
    simulated: float = math.nan

    @property
    def replies_an_hour(self) -> float:
        """Starts of judges included."""
        return 3600 * self.replies / self.seconds

    @property
    def searching_an_hour(self) -> float:
        """Replies an hour while all devices search."""
        return self.replies_an_hour / self.searching

    @property
    def evaluations_an_hour(self) -> float:
        """Starts of judges included."""
        return 3600 * self.evaluations / self.seconds


@dataclass(frozen=True)
class Search:
    """The searches of one run: answers of the model with their verdicts, and when they came.

    Attributes:
        history: The run's.
        spans: From the first question of each session to its last verdict, in seconds of the
            machine's clock.
    """

    history: History
    spans: Sequence[tuple[float, float]]

    @classmethod
    def of(cls, history: History) -> Search:
        """Searches of a run."""
        spans: list[tuple[float, float]] = []
        asked = math.nan
        for event in history.events:
            if event.kind == "session":
                asked = math.nan
            elif event.kind == "asked" and math.isnan(asked):
                asked = event.at
                spans.append((asked, asked))
            elif event.kind == "recorded" and not math.isnan(asked):
                spans[-1] = (asked, event.at)
        return cls(history, [s for s in spans if s[1] > s[0]])

    @property
    def seconds(self) -> float:
        """Of all its sessions together."""
        return sum(end - begin for begin, end in self.spans)

    @property
    def answers(self) -> list[Any]:
        """Candidates that a model gave, but for what it had given before: nobody builds or times
        that.
        """
        given = (c for c in self.history.lineage if c.proposal.ask is not None)
        return [c for c in given if not c.is_duplicate]

    @property
    def repeated(self) -> int:
        """Answers of the model that the run knew."""
        return sum(c.is_duplicate for c in self.history.lineage if c.proposal.ask is not None)


def replies_of(searches: Sequence[Search]) -> tuple[Replies, float]:
    """What became of a model's replies, as the simulation takes it, and the mean seconds of a
    build.
    """
    answers = [c for s in searches for c in s.answers]
    verdicts = [c.verdict for c in answers]
    passed = [v for v in verdicts if isinstance(v, Passed)]
    wrong = [v for v in verdicts if isinstance(v, Rejected) and v.stage is not Stage.BUILD]
    whole, screened = [[v.lane_s for v in passed if v.screened is s] for s in (False, True)]
    builds = [c.facts.build_s for c in answers if c.facts is not None]
    known = Replies()
    judged = len(passed) + len(wrong)
    return Replies(
        not_built=1 - judged / max(1, len(verdicts)),
        wrong=len(wrong) / max(1, judged),
        in_full=len(whole) / max(1, len(passed)),
        wrong_s=known.wrong_s,
        let_go_s=statistics.fmean(screened) if screened else known.let_go_s,
        in_full_s=statistics.fmean(whole) if whole else known.in_full_s,
    ), statistics.fmean(builds) if builds else 1.0


class Rates:
    """The rates so far, each beside the simulated one."""

    def __init__(self, latency_s: float, in_flight: int) -> None:
        self._latency_s = latency_s
        self._in_flight = in_flight  # for each device
        self._one: dict[str, tuple[Replies, float]] = {}
        self.all: list[Rate] = []

    def add(
        self,
        stage: str,
        devices: int,
        searches: Sequence[Search],
        seconds: float | None,
        tell: Tell,
    ) -> None:
        """Add what N devices did.

        Args:
            stage: "judges" or "campaign".
            devices: N.
            searches: The runs.
            seconds: Wall clock with starts of judges; None: only the search counts.
            tell: Is told.
        """
        searches = [s for s in searches if s.spans]
        if not searches:
            tell("  nothing was judged: the limit of the search came first")
            return
        runs = devices if stage == "campaign" else 1
        self._one.setdefault(stage, replies_of(searches))
        replies, build_s = self._one[stage]
        in_flight = min(MOST_IN_FLIGHT, self._in_flight * devices // runs)
        cores = os.cpu_count() or 1
        passed = [c for s in searches for c in s.answers if isinstance(c.verdict, Passed)]
        searched = sum(s.seconds for s in searches)
        whole = seconds if seconds is not None else searched
        units = {(n if stage == "campaign" else 0, c.unit) for n, s in enumerate(searches)
                 for c in s.answers if isinstance(c.verdict, Passed)}  # fmt: skip
        share = devices if stage == "judges" else 1  # a run's time is that of all its devices
        rate = Rate(
            stage,
            devices,
            min(devices, len(units)),
            sum(len(s.answers) for s in searches),
            sum(c.counts and not c.is_duplicate for s in searches for c in s.history.lineage),
            whole,
            min(1.0, searched / (runs * whole)),
            sum(c.verdict.lane_s for c in passed) / (share * searched),
            simulate(
                Fleet(devices, cores, runs, in_flight, self._latency_s, build_s, replies=replies)
            ).rate,
        )
        self.all.append(rate)
        rejected = Counter(
            str(c.verdict.status)
            for s in searches
            for c in s.answers
            if isinstance(c.verdict, Rejected)
        )
        tell(
            f"  {rate.evaluations} evaluations and {rate.replies} replies in {rate.seconds:.0f} s; "
            f"verdicts by device: {dict(Counter(c.unit or 'the first' for c in passed))}; "
            f"rejected: {dict(rejected) or 'none'}"
        )
        if repeated := sum(s.repeated for s in searches):
            tell(f"  the model said again what it had said: {repeated} answers, which do not count")

    def table(self) -> Iterator[str]:
        """Lines of the table."""
        yield (
            f"{'':10}{'devices':>8}{'judging':>8}{'replies/h':>11}{'evaluations/h':>14}"
            f"{'of N times one':>15}{'searching':>11}{'of N times one':>15}{'simulated':>10}"
            f"{'device held':>12}"
        )
        for rate in self.all:
            one = next(r for r in self.all if r.stage == rate.stage)
            times = rate.devices / one.devices

            def share(value: float, single: float, times: float = times) -> str:
                return f"{value / (times * single):.0%}"

            yield (
                f"{rate.stage:10}{rate.devices:8}{rate.judged:8}{rate.replies_an_hour:11.0f}"
                f"{rate.evaluations_an_hour:14.0f}"
                f"{share(rate.replies_an_hour, one.replies_an_hour):>15}"
                f"{rate.searching_an_hour:11.0f}"
                f"{share(rate.searching_an_hour, one.searching_an_hour):>15}"
                f"{share(rate.simulated, one.simulated):>10}{rate.timed:12.0%}"
            )


# -- one run on several GPUs -----------------------------------------------------------------------


class Watched(JudgeClient):
    """A judge's client that keeps what admission is decided by."""

    living: ClassVar[list[Watched]] = []

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.answers: dict[str, Any] = {}
        Watched.living.append(self)

    def noise(self) -> Noise:
        """As the client has it, and kept."""
        return self.answers.setdefault("noise", super().noise())

    def ceilings(self) -> Ceilings:
        """As the client has it, and kept."""
        return self.answers.setdefault("ceilings", super().ceilings())

    def race(self, contenders: Any, *, hidden: bool = True, baselines: bool = True) -> Race:
        """As the client has it, and the first one is kept."""
        race = super().race(contenders, hidden=hidden, baselines=baselines)
        self.answers.setdefault("seeds", race)  # the first one; the final race is later
        return race

    def devices(self, listed: Sequence[tuple[int, str]]) -> tuple[set[str], Counter[str]]:
        """What the judge and all its children have in their environment as the GPUs they may see,
        and on which GPU the driver lists how many of them.

        Args:
            listed: The driver's list.
        """
        family = {self.pid, *process_tree.descendants(self.pid)}
        shown = set()
        for pid in family:
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                shown |= {
                    v.decode().partition("=")[2]
                    for v in variables
                    if v.startswith(VISIBLE.encode() + b"=")
                }
        return shown, Counter(unit for pid, unit in listed if pid in family)


def driver_s_list() -> Iterator[tuple[int, str]]:
    """Processes with a context, and the UUID of its GPU; nothing where the driver hides them."""
    words = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)
        for line in done.stdout.splitlines():
            pid, _, unit = line.partition(",")
            if pid.strip().isdigit():
                yield int(pid), unit.strip()


def one_run(options: argparse.Namespace, judges: int, race: bool, tell: Tell) -> Outcome:
    """A run with so many judges."""
    seen: dict[str, tuple[set[str], Counter[str]]] = defaultdict(lambda: (set(), Counter()))
    looks: list[threading.Thread] = []
    units: list[str] = []  # of the search's verdicts
    searching_s = 0.0  # when the search began

    def look() -> None:
        listed = list(driver_s_list())
        for judge in list(Watched.living):
            shown, on = judge.devices(listed)
            seen[judge.facts.unit][0].update(shown)
            seen[judge.facts.unit][1].update(on)

    def observe(event: Event) -> None:
        nonlocal searching_s
        if isinstance(event, Progress) and "judge" in event.text:
            tell(f"  {event.text}")
        if isinstance(event, PhaseBegan) and event.phase is Phase.SEARCH:
            searching_s = time.monotonic()
        if isinstance(event, Recorded) and searching_s:
            units.append(event.candidate.unit)
        over = isinstance(event, PhaseBegan) and event.phase is Phase.RACE  # which may be cut off
        if searching_s and (over or isinstance(event, Finished)):
            count, took_s = len(units), time.monotonic() - searching_s
            by_unit = dict(Counter(unit or "none" for unit in units))
            tell(f"  {count} verdicts in the {took_s:.0f} s of the search, by device: {by_unit}")
            searching_s = 0.0
        # The driver takes up to seconds for its list, and the run must not wait for it.
        due = len(looks) < len(LOOK_AT) and LOOK_AT[len(looks)]
        if isinstance(event, Recorded) and due and event.counted >= due:
            looks.append(threading.Thread(target=look, daemon=True))
            looks[-1].start()

    Watched.living.clear()
    fleet.JudgeClient = Watched
    task = options.tasks[0]
    with model(task, options.latency, options.kind) as url:
        config = load_config(
            runs=options.folder / f"judges-{judges}",
            budget=MORE_THAN_ENOUGH * judges,
            lang=options.lang,
            model=["scripted"],
            base_url=url,
            in_flight=min(MOST_IN_FLIGHT, IN_FLIGHT[options.kind] * judges),
            judges=judges,
            configs=1,
            tune=1,
            memory=False,
            early_stop=False,
            max_time=STARTS_S + options.search_s,
            race_time=1.0,
        )
        began = time.monotonic()
        outcome = evolve(task, config, observe, race=race)
    for thread in looks:
        thread.join()
    tell(f"  whole {time.monotonic() - began:.0f} s, ended: {outcome.stop}")
    for unit, (shown, listed) in seen.items():
        where = f", in the driver's list on {dict(listed)}" if listed else ""
        tell(f"  processes of the judge on {unit or 'the CPU'} see {sorted(shown)}{where}")
    return outcome


def report_admission(outcome: Outcome, tell: Tell) -> None:
    """What further devices were compared by, and the final race on two."""
    first, *others = Watched.living
    for judge in Watched.living:
        noise = judge.answers.get("noise")
        tell(f"  {judge.facts.unit or 'the CPU'}: {judge.facts.key}")
        tell(f"    noise: {noise.text if noise else 'not measured'}")
        tell(f"    ceilings: {judge.answers.get('ceilings', 'not measured')}")
    for other in others:
        if all("ceilings" in j.answers for j in (first, other)):
            apart = first.ceilings_apart(first.answers["ceilings"], other.answers["ceilings"])
            tell(f"  ceilings for this task are {apart:.2%} apart (most: 2 %)")
        if all("seeds" in j.answers for j in (first, other)):
            home, mine = (pairs_of(j.answers["seeds"]) for j in (first, other))
            for pair in sorted(home.keys() & mine.keys()):
                (here, here_sd), (there, there_sd) = home[pair], mine[pair]
                tell(
                    f"  #{pair[0]} beside #{pair[1]}: {math.exp(here):.4f} and "
                    f"{math.exp(there):.4f}, {abs(here - there):.4f} apart, standard errors "
                    f"{here_sd:.4f} and {there_sd:.4f}"
                )
    for event in outcome.history.events:
        if event.kind == "units":
            for other in event.data["others"]:
                tell(f"  {other['unit']}: {other['why_not'] or 'admitted'}")
    race = outcome.history.race
    if race is not None and race.winner is not None:
        for name, each in (("first", race.race), *((r.unit, r.race) for r in race.repeats)):
            versus = each.versus_torch(str(race.winner))
            text = f"{versus.ratio:.4f} ({versus.low:.4f} to {versus.high:.4f})" if versus else "-"
            tell(f"  final race, #{race.winner} beside torch on {name}: {text}")


def stage_judges(options: argparse.Namespace, report: Report) -> None:
    for judges in options.devices:
        with report.part(f"one run of {options.tasks[0]} on {judges}") as begins:
            if begins:
                last = judges == max(options.devices) > 1
                outcome = one_run(options, judges, last, report.tell)
                searches = [Search.of(outcome.history)]
                report.rates.add("judges", judges, searches, None, report.tell)
                if judges > 1:
                    report_admission(outcome, report.tell)


# -- campaigns -------------------------------------------------------------------------------------


class Searches(CampaignRunner):
    """A campaign without its final races, on which no figure here depends."""

    def _race(self, problem: Problem) -> None:
        pass


def stage_campaign(options: argparse.Namespace, report: Report) -> None:
    for devices in options.devices:
        with report.part(f"campaign of {', '.join(options.tasks)} on {devices}") as begins:
            if begins:
                with contextlib.ExitStack() as stack:
                    urls = {t: stack.enter_context(model(t, options.latency, options.kind))
                            for t in options.tasks}  # fmt: skip
                    one_campaign(options, devices, urls, report.rates, report.tell)


def one_campaign(
    options: argparse.Namespace, devices: int, urls: Mapping[str, str], rates: Rates, tell: Tell
) -> None:
    names = ["cpu"] if options.kind == "cpu" else [f"cuda:{i}" for i in range(devices)]
    folder = options.folder / f"campaign-{devices}"
    folder.mkdir()
    file = folder / "campaign.toml"
    tasks = ", ".join(
        f"{{ task = {json.dumps(task)}, "
        f'options = {{ model = ["scripted"], base_url = {json.dumps(url)} }} }}'
        for task, url in urls.items()
    )
    own = {
        "lang": options.lang, "in_flight": IN_FLIGHT[options.kind], "configs": 1, "tune": 1,
        "early_stop": False,
    }  # fmt: skip
    lines = [f"tasks = [{tasks}]", f"devices = {json.dumps(names)}"]
    lines += [f"budget = {MORE_THAN_ENOUGH * devices}", f'max_time = "{options.search_s:g}s"']
    lines += ["[options]", *(f"{k} = {json.dumps(v)}" for k, v in own.items())]
    file.write_text("\n".join(lines) + "\n")
    # The processor has so many slices at once, each of a seed of its own.
    given = {"seeds": devices if options.kind == "cpu" else 1, "options": {}}
    places = {"cpu": devices} if options.kind == "cpu" else {}
    campaign = plan([str(file)], asked_for([str(file)], given))

    def changed(text: str) -> None:
        if text:
            tell(f"  {text}")

    def doing(_run: str, _text: str) -> None:
        """Say nothing: slices say enough when they are over."""

    runner = Searches(folder, campaign, {}, doing, changed, places)
    runner.run()
    searches = [Search.of(read_history(run)[1]) for run in list_runs(folder / "runs")]
    rates.add("campaign", devices, searches, runner.campaign.seconds, tell)


# -- what is told ----------------------------------------------------------------------------------


class Report:
    """What was told and measured, kept after each part: a machine may be taken away.

    Args:
        rates: Those of all parts.
        facts: Of the machine and of what was asked for, for the file.
        out: Folder of gpu_scaling.txt and .json; None: they are not written.
        limit_s: Seconds after which no part begins.
    """

    def __init__(
        self, rates: Rates, facts: Mapping[str, Any], out: Path | None, limit_s: float
    ) -> None:
        self.rates = rates
        self.failed = 0
        self._facts = facts
        self._out = out
        self._limit_s = limit_s
        self._began = time.monotonic()
        self._told: list[str] = []

    def tell(self, text: str) -> None:
        """Print a line, and keep it."""
        self._told.append(f"{time.monotonic() - self._began:6.1f} s  {text}")
        print(self._told[-1], flush=True)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[bool]:
        """Do a part in this context if it yields True. If it fails, the next one may not."""
        if time.monotonic() - self._began > self._limit_s:
            self.tell(f"{name}: left out, the limit has come")
            yield False
            return
        self.tell(name)
        try:
            yield True
        except Exception:  # noqa: BLE001 - whatever a GPU or this script does
            self.failed += 1
            self.tell(f"  failed: {traceback.format_exc()}")
        finally:
            self.write()

    def write(self) -> None:
        """Write the files."""
        if self._out is None:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        lines = [*self._told, "", *self.rates.table(), ""]
        (self._out / "gpu_scaling.txt").write_text("\n".join(lines))
        facts = {**self._facts, "failed": self.failed}
        facts["rates"] = [asdict(r) for r in self.rates.all]
        (self._out / "gpu_scaling.json").write_text(json.dumps(facts, indent=1) + "\n")


STAGES = {"turns": stage_turns, "judges": stage_judges, "campaign": stage_campaign}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="the processor stands in for all")
    parser.add_argument("--devices", default="1,2,4,8", help="how many at once, one after another")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--tasks", default="softmax", help="the first one is that of one run")
    parser.add_argument("--neighbours", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each part of `turns`")
    parser.add_argument("--latency", type=float, default=1.0, help="of the model, in s")
    parser.add_argument("--search-s", type=float, default=60.0, help="most seconds of a search")
    parser.add_argument("--limit-s", type=float, default=450.0)
    parser.add_argument("--out", type=Path, help="folder for gpu_scaling.txt and .json")
    parser.add_argument("--neighbour", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.kind, options.lang = ("cpu", "cpp") if options.cpu else ("gpu", "any")
    if options.neighbour is not None:
        neighbour(options.kind, options.neighbour)
        return
    asked = sorted({int(n) for n in options.devices.split(",")})
    options.tasks = options.tasks.split(",")
    stages = options.stages.split(",")
    if unknown := set(stages) - set(STAGES):
        raise SystemExit(f"no stage {', '.join(unknown)}: expected some of {', '.join(STAGES)}")
    if options.cpu:
        fleet.LocalFleet.seats = lambda *_: max(asked)
        os.environ[VISIBLE] = ""
        options.devices = asked
    else:
        options.devices = [n for n in asked if n <= gpu_count()]
    if not options.devices:
        raise SystemExit(f"this machine has {gpu_count()} GPUs: give fewer --devices, or --cpu")
    facts = {
        "host": platform.node(), "cores": os.cpu_count(), "gpus": gpu_count(),
        "cpu": options.cpu, "versions": versions(), "latency_s": options.latency,
        "search_s": options.search_s, "tasks": options.tasks,
    }  # fmt: skip
    rates = Rates(options.latency, IN_FLIGHT[options.kind])
    report = Report(rates, facts, options.out, options.limit_s)
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        os.environ |= {
            "XDG_CACHE_HOME": str(options.folder / "cache"),
            "TORCHDYNAMO_DISABLE": "1",
            "KAGENT_PASS": "TORCHDYNAMO_DISABLE",
        }
        for name, stage in STAGES.items():
            if name in stages:
                stage(options, report)
    print("\n".join(["", *rates.table()]), flush=True)
    if report.failed:
        raise SystemExit(f"{report.failed} parts failed")


if __name__ == "__main__":
    main()
