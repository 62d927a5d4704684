"""What kagent makes of two GPUs of one machine: turns, throughput, and what is never mixed.

    python benchmarks/two_gpus.py [--stages turns,evolve,campaign,one] [--limit-s 450] [--out FILE]
    python benchmarks/two_gpus.py --cpu --neighbours 2 --seconds 20 --budget 6

turns     `--neighbours` judges share the first GPU, a process each. All of them time kernels of
          `planted.py`, equal ones and one that is 5 % faster. First one judge alone, then all.
          Printed are the judge's calls, and whether two turns ever overlapped.
evolve    `kagent evolve` with a scripted model, judged on one GPU, then on two. Printed are replies
          a second, evaluations a minute, how the second GPU was admitted, which GPU the processes
          of each judge see, and the final race on both.
campaign  A campaign with a run on each of two GPUs.
one       The same campaign with half the budget on one of them, to compare.

torch.compile is off: its baselines take a minute, and no figure here depends on them. All that is
measured of the machine is measured anew (`XDG_CACHE_HOME` is a fresh folder). With `--cpu` the
processor stands in for both GPUs: that tries this script, and its figures say nothing of two
devices. No stage begins after `--limit-s`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import planted
from kagent.campaign.file import BUDGET
from kagent.config.settings import load_config
from kagent.evolve.admission import pairs_of
from kagent.evolve.session import Outcome, evolve
from kagent.fleet import fleet
from kagent.runs.events import Event, Progress, Recorded
from kagent.runs.history import History
from kagent.runs.manifest import list_runs
from kagent.runs.store import read_history
from kagent_sandbox.data.device import Ceilings
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.verdict import Passed
from kagent_sandbox.device.detect import VISIBLE, gpu_count
from kagent_sandbox.judge import judge_process
from kagent_sandbox.judge.client import JudgeClient
from kagent_sandbox.judge.timing.noise import Noise
from kagent_sandbox.process import process_tree
from kagent_sandbox.process.device_lock import DeviceLock, Mode
from model_loop import Endpoint

PLANTS = (0.0, 0.05)
ROWS = {"gpu": 8000, "cpu": 1000}  # of the planted kernels
IN_FLIGHT = 12
STAGES = ("turns", "evolve", "campaign", "one")
Tell = Callable[[str], None]


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


def stage_turns(options: argparse.Namespace, tell: Tell) -> None:
    for count in (1, options.neighbours):
        tell(f"{count} judge{'s' * (count > 1)} on the first device, {options.seconds:g} s")
        report_turns(share_one(options.kind, count, options.seconds), tell)


# -- one run on one GPU and on two -----------------------------------------------------------------


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

    def devices(self) -> tuple[set[str], Counter[str]]:
        """What the judge and all its children have in their environment as the GPUs they may see,
        and on which GPU the driver lists how many of them.
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
        return shown, Counter(unit for pid, unit in driver_s_list() if pid in family)


def driver_s_list() -> Iterator[tuple[int, str]]:
    """Processes with a context, and the UUID of its GPU; nothing where the driver hides them."""
    words = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)
        for line in done.stdout.splitlines():
            pid, _, unit = line.partition(",")
            if pid.strip().isdigit():
                yield int(pid), unit.strip()


def one_run(options: argparse.Namespace, judges: int, tell: Tell) -> Outcome:
    """A run with so many judges."""
    endpoint = Endpoint(options.task, options.latency, 1, options.kind)
    seen: dict[str, tuple[set[str], Counter[str]]] = defaultdict(lambda: (set(), Counter()))

    def observe(event: Event) -> None:
        if isinstance(event, Progress) and "judge" in event.text:
            tell(f"  {event.text}")
        if isinstance(event, Recorded):
            for judge in Watched.living:
                shown, listed = judge.devices()
                seen[judge.facts.unit][0].update(shown)
                seen[judge.facts.unit][1].update(listed)

    Watched.living.clear()
    fleet.JudgeClient = Watched
    config = load_config(
        runs=options.folder / f"judges-{judges}",
        budget=options.budget * judges,
        lang=options.lang,
        model=["scripted"],
        base_url=endpoint.url,
        in_flight=IN_FLIGHT,
        judges=judges,
        configs=1,
        tune=1,
        memory=False,
        early_stop=False,
        max_time=options.search_s,
        race_time=1.0,
    )
    tell(f"evolve {options.task} on {judges}: {config.budget} evaluations")
    began = time.monotonic()
    outcome = evolve(options.task, config, observe, race=judges > 1)
    tell(f"  whole {time.monotonic() - began:.0f} s, ended: {outcome.stop}")
    report_rate(outcome.history, judges, endpoint.calls, tell)
    for unit, (shown, listed) in seen.items():
        where = f", in the driver's list on {dict(listed)}" if listed else ""
        tell(f"  processes of the judge on {unit or 'the CPU'} see {sorted(shown)}{where}")
    return outcome


def report_rate(history: History, judges: int, calls: int, tell: Tell) -> None:
    """Replies and verdicts from the first question to the last verdict."""
    asked = [e.at for e in history.events if e.kind == "asked"]
    recorded = [
        e.at for e in history.events if e.kind == "recorded" and e.at > min(asked, default=math.inf)
    ]
    if not recorded:
        tell("  nothing was judged: the limit of the search came first")
        return
    seconds = recorded[-1] - asked[0]
    passed = [c for c in history.lineage if isinstance(c.verdict, Passed)]
    lanes = sum(c.verdict.lane_s for c in passed if c.proposal.ask is not None)
    tell(
        f"  {history.lineage.counted} evaluations and {len(recorded)} replies in {seconds:.1f} s: "
        f"{60 * history.lineage.counted / seconds:.1f} evaluations a minute, "
        f"{len(recorded) / seconds:.2f} replies a second ({calls} calls of the model); devices "
        f"timed for {lanes / judges / seconds:.0%} of it"
    )
    units = Counter(c.unit or "the first" for c in passed)
    rejected = ", ".join(f"{n} {s}" for (_, s), n in history.lineage.rejections().items()) or "none"
    tell(f"  verdicts by device: {dict(units)}; rejected: {rejected}")


def report_admission(outcome: Outcome, tell: Tell) -> None:
    """What the second device was compared by, and the final race on both."""
    first, second = Watched.living[:2]
    for judge in (first, second):
        noise = judge.answers.get("noise")
        tell(f"  {judge.facts.unit or 'the CPU'}: {judge.facts.key}")
        tell(f"    noise: {noise.text if noise else 'not measured'}")
        tell(f"    ceilings: {judge.answers.get('ceilings', 'not measured')}")
    if all("ceilings" in j.answers for j in (first, second)):
        apart = first.ceilings_apart(first.answers["ceilings"], second.answers["ceilings"])
        tell(f"  ceilings for this task are {apart:.2%} apart (most: 2 %)")
    if all("seeds" in j.answers for j in (first, second)):
        home, mine = (pairs_of(j.answers["seeds"]) for j in (first, second))
        for pair in sorted(home.keys() & mine.keys()):
            (here, here_sd), (there, there_sd) = home[pair], mine[pair]
            tell(
                f"  #{pair[0]} beside #{pair[1]}: {math.exp(here):.4f} and {math.exp(there):.4f}, "
                f"{abs(here - there):.4f} apart, standard errors {here_sd:.4f} and {there_sd:.4f}"
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


def stage_evolve(options: argparse.Namespace, tell: Tell) -> None:
    for judges in (1, 2):
        outcome = one_run(options, judges, tell)
    report_admission(outcome, tell)


# -- campaigns -------------------------------------------------------------------------------------


def stage_campaign(options: argparse.Namespace, tell: Tell, devices: int = 2) -> None:
    endpoint = Endpoint(options.task, options.latency, 1, options.kind)
    names = ["cpu"] if options.kind == "cpu" else [f"cuda:{i}" for i in range(devices)]
    folder = options.folder / f"campaign-{devices}"
    own = {
        "model": ["scripted"], "base_url": endpoint.url, "in_flight": IN_FLIGHT, "configs": 1,
        "tune": 1, "early_stop": False, "lang": options.lang,
    }  # fmt: skip
    file = options.folder / f"campaign-{devices}.toml"
    lines = [f"tasks = [{json.dumps(options.task)}]", f"devices = {json.dumps(names)}"]
    lines += [f"budget = {options.budget * devices}", f'max_time = "{options.search_s:g}s"']
    lines += ["[options]", *(f"{k} = {json.dumps(v)}" for k, v in own.items())]
    file.write_text("\n".join(lines) + "\n")
    tell(f"campaign {options.task} on {names}: {options.budget * devices} evaluations")
    began = time.monotonic()
    words = [sys.executable, "-m", "kagent", "campaign", str(file), "--to", str(folder)]
    environment = {**os.environ, "KAGENT_RACE_TIME": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    seconds = time.monotonic() - began
    if done.returncode not in (0, 1):  # 1: no winner, which decides nothing here
        raise SystemExit(f"the campaign ended with {done.returncode}: {done.stderr[-2000:]}")
    searches = []
    for run in list_runs(folder / "runs"):
        store, history = read_history(run)
        asked = [e.at for e in history.events if e.kind == "asked"]
        if asked:
            ends = [e.at for e in history.events if e.kind == "recorded"]
            unit = store.manifest.environment["facts"]["unit"] or "the CPU"
            searches.append((unit, history.lineage.counted, asked[0], ends[-1]))
    for unit, counted, start, end in searches:
        tell(f"  {unit}: {counted} evaluations from {start - min(s[2] for s in searches):.0f} s "
             f"to {end - min(s[2] for s in searches):.0f} s")  # fmt: skip
    counted = sum(s[1] for s in searches)
    span = max(s[3] for s in searches) - min(s[2] for s in searches)
    tell(
        f"  {counted} evaluations, {60 * counted / span:.1f} a minute of the searches, which took "
        f"{span:.0f} s of {seconds:.0f} s with starts and final races"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="the processor stands in for both")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--task", default="softmax")
    parser.add_argument("--neighbours", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each part of `turns`")
    parser.add_argument("--budget", type=int, default=BUDGET // 2, help="evaluations a device")
    parser.add_argument("--latency", type=float, default=1.0, help="of the model, in s")
    parser.add_argument("--search-s", type=float, default=90.0, help="most seconds of a search")
    parser.add_argument("--limit-s", type=float, default=450.0)
    parser.add_argument("--out", type=Path, help="the lines that are printed are added here")
    parser.add_argument("--neighbour", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.kind, options.lang = ("cpu", "cpp") if options.cpu else ("gpu", "any")
    if options.neighbour is not None:
        neighbour(options.kind, options.neighbour)
        return
    if options.cpu:
        fleet.LocalFleet.seats = lambda *_: 2
        os.environ[VISIBLE] = ""
    elif gpu_count() < 2:
        raise SystemExit(f"this machine has {gpu_count()} GPUs, and two are needed: or --cpu")
    began = time.monotonic()

    def tell(text: str) -> None:
        line = f"{time.monotonic() - began:6.1f} s  {text}"
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    stages = {
        "turns": stage_turns,
        "evolve": stage_evolve,
        "campaign": stage_campaign,
        "one": lambda options, tell: stage_campaign(options, tell, 1),
    }
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        os.environ |= {
            "XDG_CACHE_HOME": str(options.folder / "cache"),
            "TORCHDYNAMO_DISABLE": "1",
            "KAGENT_PASS": "TORCHDYNAMO_DISABLE",
        }
        for name in options.stages.split(","):
            if time.monotonic() - began > options.limit_s:
                tell(f"{name}: left out, the limit has come")
                continue
            stages[name](options, tell)


if __name__ == "__main__":
    main()
