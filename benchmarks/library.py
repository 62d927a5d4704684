"""The winners of all tasks as one library, tested, sanitized and timed: on this machine, in stages.

    python benchmarks/library.py --to OUT [--devices cuda:0,cuda:1] [--seconds S] [--stages A,B]
        [--tasks A,B] [--budget 12] [--at-once N] [--name NAME] [--work DIR] [--allow-slower]
    python benchmarks/library.py --to OUT --library library --stages certify [--devices ...]

evolve    `kagent suite run` of all tasks with the tuner alone, N tasks on each device at once.
export    `kagent export` of each task's winner, N on each device at once, then one library of them.
tests     The library's own tests, an operator at a time, N at once.
sanitize  sanitize.py: each kernel under compute-sanitizer's memcheck and racecheck, N at once.
bench     do_bench.py: triton.testing.do_bench of each operator beside the library's own figures,
          one at a time on each device.
certify   `kagent certify` of each operator, N on each device at once: for another day, and not
          part of what is done without --stages.

--library names a library that is there already; by default it is the one that `export` writes.
Kernels that are not FASTER than torch are left out, unless --allow-slower is given. All stages
together take `--seconds`: what is in progress then is ended, and what is left is named. A second
call with the same --work goes on with what is there; a task that failed is tried again. No failure
of one task ends anything. A short table comes last. OUT gets the library (NAME.tar.gz, with
figures.json in it), figures.json, the logs, and the state: `tar xzf state.tar.gz` in an empty
--work lets another machine go on.

With `--devices cpu` the same is done with C++ kernels: sanitize.py calls them without a tool, and
do_bench.py times calls.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from do_bench import agreement
from kagent import resources
from kagent.export.certify import Line
from kagent.export.merging import merge_library
from kagent.export.reading import OnDisk, is_library, read_library
from kagent.export.writing import files_of, write_library
from kagent.runs.files import write_file
from kagent.suite.record import RUNS, Suite, read_record
from kagent.suite.results import ProblemResult, result_of
from kagent.suite.running import Slot, slots_of
from kagent.tasks import task_names
from kagent.text import interval_text
from kagent_sandbox.cache import cache_folder
from kagent_sandbox.data.records import from_json
from kagent_sandbox.errors import KagentError
from kagent_sandbox.process.cores import usable_cores
from limited import Ended, Running

STAGES = ("evolve", "export", "tests", "sanitize", "bench", "certify")
OF_A_LIBRARY = ("tests", "sanitize", "bench", "certify")
"""Stages that take a library as it is."""
MOST_AT_ONCE = 2
"""Tasks on each device at once. More wait for each other: baselines, which torch compiles and times
for a minute or two of each task, have the device to themselves (five at once on an H100: three of
15 tasks in 550 s).
"""
CORES_EACH = 3
"""Cores for each of them."""
LEAST_S = 20.0
"""Nothing begins with less time left."""
HERE = Path(__file__).resolve().parent
FIGURES = "figures.json"


@dataclass(frozen=True)
class Session:
    """What is to be done, where, and until when.

    Attributes:
        work: Folder of the state.
        library: Folder of the library.
        name: The library's.
        tasks: Names.
        devices: As `--device` takes them.
        at_once: Tasks on each device at once.
        ends_s: On time.monotonic's clock.
        budget: Evaluations of each task.
        allow_slower: Whether kernels that lose to torch may be exported.
    """

    work: Path
    library: Path
    name: str
    tasks: tuple[str, ...]
    devices: tuple[str, ...]
    at_once: int
    ends_s: float
    budget: int
    allow_slower: bool

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.ends_s - time.monotonic()

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU stands in for GPUs."""
        return self.devices == ("cpu",)

    def found(self, stage: str, task: str) -> Path:
        """File of a stage's result for a task."""
        return self.work / stage / f"{task}.json"

    def log(self, stage: str, task: str = "") -> Path:
        """File of all that a command prints."""
        return self.work / "logs" / f"{stage}{'_' * bool(task)}{task}.log"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=HERE.parent / "runs" / "library")
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--stages", default=",".join(STAGES[:-1]))
    parser.add_argument("--library", type=Path)
    parser.add_argument("--tasks", default=",".join(task_names()))
    parser.add_argument("--budget", type=int, default=12)
    parser.add_argument("--at-once", type=int, help=f"1 on a CPU, {MOST_AT_ONCE} on a GPU")
    parser.add_argument("--name", default="kagent_kernels")
    parser.add_argument("--allow-slower", action="store_true")
    options = parser.parse_args()
    stages, tasks = options.stages.split(","), tuple(options.tasks.split(","))
    for what, given, known in (("stage", stages, STAGES), ("task", tasks, task_names())):
        if unknown := sorted(set(given) - set(known)):
            sys.exit(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    library, name = options.work.resolve() / options.name, options.name
    if options.library is not None:
        if made := sorted(set(stages) - set(OF_A_LIBRARY)):
            sys.exit(f"--library is for {', '.join(OF_A_LIBRARY)}: {', '.join(made)} makes one")
        library = options.library.resolve()
        name = read_library(library).library.name
    devices = tuple(options.devices.split(","))
    share = usable_cores() // len(devices) // CORES_EACH
    most = 1 if devices == ("cpu",) else MOST_AT_ONCE
    at_once = options.at_once or max(1, min(most, share))
    session = Session(
        options.work.resolve(),
        library,
        name,
        tasks,
        devices,
        at_once,
        time.monotonic() + options.seconds,
        options.budget,
        options.allow_slower,
    )
    (session.work / "logs").mkdir(parents=True, exist_ok=True)
    for stage in (s for s in STAGES if s in stages):
        began = time.monotonic()
        print(f"{stage}: {session.left_s:.0f} s are left", flush=True)
        try:
            STAGE[stage](session)
        except (KagentError, OSError) as e:
            print(f"{stage}: {e}", flush=True)
        print(f"{stage}: took {time.monotonic() - began:.0f} s", flush=True)
    figures = gather(session)
    pack(session, figures, options.to)
    print(table(session, figures))


# -- stages ----------------------------------------------------------------------------------------


def evolve(session: Session) -> None:
    """Search for kernels of all tasks."""
    folder = session.work / "suite"
    words = ["suite", "run", "--to", str(folder), "--at-once", str(session.at_once)]
    words += [w for d in session.devices for w in ("--device", d)]
    if (folder / Suite.FILE).exists():
        words += ["--resume"]
    else:
        words += [*session.tasks, "--budget", str(session.budget)]
    code = command(session, session.log("evolve"), *KAGENT, *words)
    if code not in (0, 1):
        print(f"evolve: {ended(code)}: {last_line(session.log('evolve'))}", flush=True)
    for task, found in searched(session).items():
        print(f"{task:22} {said(found)}", flush=True)


def searched(session: Session) -> dict[str, ProblemResult]:
    """Results of the searches, by task."""
    folder = session.work / "suite"
    if not (folder / Suite.FILE).exists():
        return {}
    suite = read_record(folder, Suite)
    return {p.name: result_of(folder, suite, p) for p in suite.problems if p.name in session.tasks}


def said(found: ProblemResult) -> str:
    """A search's outcome in words."""
    if not found.correct:
        step = found.progress.step
        return f"failed: {step}: {found.progress.reason}" if step else str(found.progress.state)
    versus = found.versus_torch
    if versus is None:
        known = "the best of torch is not known" if found.lacking else "nothing of torch ran"
        return f"{found.winner}: {known} on every case"
    ratio = interval_text(versus.ratio, versus.low, versus.high)
    return f"{versus.verdict} {ratio}, {found.winner}"


def export(session: Session) -> None:
    """Export each winner alone, side by side, and make one library of all."""
    runs = {t: f.progress.run for t, f in searched(session).items() if f.correct}

    def one(task: str, slot: Slot) -> str:
        to = session.work / "each" / task
        words = ["export", runs[task], "--runs", str(session.work / "suite" / RUNS)]
        words += ["--to", str(to), "--name", f"only_{task}", "--device", slot.device]
        words += ["--allow-slower"] if session.allow_slower else []
        own = cache_folder() / "export" / f"only_{task}-tests.log"
        own.unlink(missing_ok=True)
        code = command(session, session.log("export", task), *KAGENT, *words)
        if code and own.exists():  # what the library's own tests printed, when they failed
            shutil.copy(own, session.log("own_tests", task))
        return "" if not code else f"{ended(code)}: {last_line(session.log('export', task))}"

    at_once(session, "export", [t for t in runs if not is_library(session.work / "each" / t)], one)
    merge(session)


def merge(session: Session) -> None:
    """Make one library of those of single tasks."""
    folders = sorted(p for p in (session.work / "each").glob("*") if is_library(p))
    disks = [read_library(p) for p in folders if p.name in session.tasks]
    there = read_library(session.library) if is_library(session.library) else None
    if not disks:
        return
    lines = [(o, list(d.library.history[0].lines)) for d in disks for o in d.library.operators]
    library = merge_library(None, session.name, resources.version(), lines)
    if there is not None and there.library.operators == library.operators:
        return
    cubins = {key: binary for d in disks for key, binary in d.cubins().items()}
    write_library(library, files_of(library, cubins=cubins), session.library, old=there)


def tests(session: Session) -> None:
    """Run the library's own tests, those of each operator in a process of its own."""

    def one(task: str, slot: Slot) -> str:
        report = session.work / "tests" / f"{task}.xml"
        log, own = session.log("tests", task), session.library / "tests"
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        words += [f"--junit-xml={report}", str(own / f"test_{task}.py")]
        words += [f"{own / 'test_guest.py'}::{GUEST}[{task}]"]
        path = str(session.library / "build/torch-universal")
        code = command(session, log, *words, PYTHONPATH=path, **visible(slot))
        if code not in (0, 1):
            return f"{ended(code)}: {last_line(log)}"
        write(session, "tests", task, {"clean": not code, "said": last_line(log)})
        return "" if not code else last_line(log)

    at_once(session, "tests", unknown_to(session, "tests"), one)


GUEST = "test_importing_and_calling_leave_the_process_as_it_was"


def sanitize(session: Session) -> None:
    """Call each operator's kernels under compute-sanitizer."""

    def one(task: str, slot: Slot) -> str:
        file, log = session.work / "sanitize" / f"{task}.lines", session.log("sanitize", task)
        words = [sys.executable, str(HERE / "sanitize.py"), str(session.library)]
        words += ["--operator", task, "--json", str(file)]
        words += ["--without-tool"] if session.on_cpu else []
        code = command(session, log, *words, **visible(slot))
        if code not in (0, 1) or not file.exists():
            return f"{ended(code)}: {last_line(log)}"
        lines = json.loads(file.read_text())
        write(session, "sanitize", task, {"clean": not code, "tools": lines})
        return "; ".join(f"{li['tool']}: {li['found']}" for li in lines if not li["clean"])

    at_once(session, "sanitize", unknown_to(session, "sanitize"), one)


def bench(session: Session) -> None:
    """Time each operator as triton.testing.do_bench does."""

    def one(task: str, slot: Slot) -> str:
        file, log = session.work / "bench" / f"{task}.lines", session.log("bench", task)
        words = [sys.executable, str(HERE / "do_bench.py"), str(session.library)]
        words += ["--operator", task, "--json", str(file)]
        code = command(session, log, *words, **visible(slot))
        if code or not file.exists():
            return f"{ended(code)}: {last_line(log)}"
        write(session, "bench", task, {"shapes": json.loads(file.read_text())})
        return ""

    at_once(replace(session, at_once=1), "bench", unknown_to(session, "bench"), one)


def certify(session: Session) -> None:
    """Check and measure each operator again."""

    def one(task: str, slot: Slot) -> str:
        log = session.log("certify", task)
        words = ["certify", str(session.library), "--operator", task, "--json"]
        code = command(session, log, *KAGENT, *words, "--device", slot.device)
        text = log.read_text()
        if code not in (0, 1) or "{" not in text:
            return f"{ended(code)}: {last_line(log)}"
        found, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
        write(session, "certify", task, {"clean": not code, "found": found})
        return "" if not code else "; ".join(faults_of(found))

    at_once(session, "certify", unknown_to(session, "certify"), one)


def faults_of(found: Mapping[str, Any]) -> Iterator[str]:
    """What a certificate holds against an operator."""
    yield from (f"{kernel}: {why}" for kernel, why in found["wrong"].items())
    yield from (f"{path}: changed" for path in found["changed"])
    for line in (from_json(Line, each) for each in found["lines"]):
        if line.worse:
            yield f"{line.case}: {line.change}, {line.then_us:.1f} to {line.now_us:.1f} us"
    yield from [found["tests"]] if found["tests"] else []


STAGE: Mapping[str, Callable[[Session], None]] = {
    "evolve": evolve,
    "export": export,
    "tests": tests,
    "sanitize": sanitize,
    "bench": bench,
    "certify": certify,
}
KAGENT = (sys.executable, "-m", "kagent")


# -- commands --------------------------------------------------------------------------------------


def at_once(
    session: Session, stage: str, tasks: Sequence[str], one: Callable[[str, Slot], str]
) -> None:
    """Work on tasks, some on each device; `one` returns what failed, "" if nothing did. What fails
    beside others, perhaps for lack of memory, is tried once more, alone on its device.
    """
    (session.work / stage).mkdir(exist_ok=True)
    slots = slots_of(session.devices, session.at_once)
    failed = in_slots(session, stage, tasks, one, slots)
    again = [t for t, why in failed.items() if NOT_FASTER not in why]
    if again and session.at_once > 1 and session.left_s > LEAST_S:
        print(f"{stage}: once more, alone: {', '.join(again)}", flush=True)
        in_slots(session, stage, again, one, slots_of(session.devices, 1))


NOT_FASTER = "is not FASTER"


def in_slots(
    session: Session,
    stage: str,
    tasks: Sequence[str],
    one: Callable[[str, Slot], str],
    slots: Sequence[Slot],
) -> dict[str, str]:
    """Work on tasks, one in each slot; return what failed."""
    left, lock = list(tasks), threading.Lock()
    found: dict[str, str] = {}

    def work(slot: Slot) -> None:
        if slot.cores:
            os.sched_setaffinity(0, slot.cores)  # of this thread, and of all that it starts
        while True:
            with lock:
                if not left:
                    return
                task = left.pop(0)
            began = time.monotonic()
            if session.left_s < LEAST_S:
                why = "left out, the time is up"
            else:
                try:
                    why = one(task, slot)
                except (KagentError, OSError, ValueError) as e:
                    why = f"{type(e).__name__}: {e}"
            if why:
                found[task] = why
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{task:22} {stage}: {why or 'done'}, {took}", flush=True)

    with ThreadPoolExecutor(len(slots)) as threads:
        try:
            for done in [threads.submit(work, slot) for slot in slots]:
                done.result()
        except BaseException:
            STOPPED.set()
            raise
    return found


def command(session: Session, log: Path, *words: str, **environment: str) -> int:
    """Run a command until the time is up; its exit code. All that it prints goes into a file."""
    running = Running(words, {**os.environ, **environment})
    ended: Ended | None = None
    try:
        while ended is None and session.left_s > 0 and not STOPPED.is_set():
            time.sleep(TICK_S)
            ended = running.ended()
    finally:
        found = ended or running.end()
        log.write_text(found.out + found.err)
    return TIME_IS_UP if found.status is None else found.status


STOPPED = threading.Event()
TICK_S = 0.1
TIME_IS_UP = -1000


def ended(code: int) -> str:
    """The end of a command in words."""
    return "ended, the time is up" if code == TIME_IS_UP else f"exit {code}"


def visible(slot: Slot) -> dict[str, str]:
    """Environment of a command that takes the first device that it sees."""
    if slot.device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    number = int(slot.device.partition(":")[2] or 0)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")  # of which the caller's numbers are
    return {"CUDA_VISIBLE_DEVICES": seen.split(",")[number] if seen else str(number)}


def last_line(log: Path) -> str:
    """The last line that a command printed."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].strip()[:300] if lines else "it printed nothing"


# -- results ---------------------------------------------------------------------------------------


def write(session: Session, stage: str, task: str, found: Mapping[str, Any]) -> None:
    """Keep a stage's result for a task, with what it is of, and the day."""
    of = digest_of(session.library, session.name, task)
    result = {"of": of, "date": time.strftime("%Y-%m-%d"), **found}
    write_file(session.found(stage, task), json.dumps(result, indent=1) + "\n")


def digest_of(library: Path, name: str, task: str) -> str:
    """SHA-256 of an operator's table: its kernels' names, hashes of their sources, and figures."""
    path = library / "build/torch-universal" / name / "portfolio" / f"{task}.json"
    table = json.loads(path.read_text())
    for kernel in table["kernels"].values():
        kernel.pop("repeats", None)  # follows from the source
    text = json.dumps(table, indent=1) + "\n"
    return hashlib.sha256(text.encode()).hexdigest()


def known(session: Session, stage: str, task: str) -> dict[str, Any] | None:
    """A stage's result for an operator as it is now."""
    path = session.found(stage, task)
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found if found["of"] == digest_of(session.library, session.name, task) else None


def exported(session: Session) -> OnDisk | None:
    """The library, if there is one."""
    return read_library(session.library) if is_library(session.library) else None


def unknown_to(session: Session, stage: str) -> list[str]:
    """The library's operators for which a stage has no result, or found something wrong."""
    disk = exported(session)
    names = [o.task for o in disk.library.operators] if disk is not None else []
    found = {n: known(session, stage, n) for n in names if n in session.tasks}
    return [n for n, f in found.items() if f is None or not f.get("clean", True)]


def _command(arguments: Sequence[str]) -> str:
    """This call, with the last part of paths: folders of a machine tell nobody else anything."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    return " ".join(["python benchmarks/library.py", *words])


def gather(session: Session) -> dict[str, Any]:
    """All results of the library's operators: figures.json."""
    disk = exported(session)
    names = [o.task for o in disk.library.operators] if disk is not None else []
    found = {n: {s: known(session, s, n) for s in OF_A_LIBRARY} for n in names}
    return {
        "library": disk.library.version if disk is not None else "",
        "date": time.strftime("%Y-%m-%d"),
        "command": _command(sys.argv[1:]),
        "operators": {n: {s: f for s, f in of.items() if f} for n, of in found.items()},
    }


def table(session: Session, figures: Mapping[str, Any]) -> str:
    """A line for each task: how far it has come."""
    lines = [f"{'task':22} {'tests':28} {'sanitize':12} {'do_bench':22} {'certify':9} search"]
    found = searched(session)
    for task in session.tasks:
        of = figures["operators"].get(task)
        cells = ["not exported", "", "", ""] if of is None else list(cells_of(of))
        search = said(found[task]) if task in found else "none"
        lines.append(f"{task:22} {cells[0]:28} {cells[1]:12} {cells[2]:22} {cells[3]:9} {search}")
    return "\n".join(lines)


def cells_of(of: Mapping[str, Any]) -> Iterator[str]:
    """Tests, sanitizer, do_bench and certificate of an operator, in short."""
    yield of["tests"]["said"].strip("= ")[:28] if "tests" in of else "not run"
    yield ("clean" if of["sanitize"]["clean"] else "NOT clean") if "sanitize" in of else "not run"
    yield agreement(of["bench"]["shapes"]) if "bench" in of else "not run"
    yield ("ok" if of["certify"]["clean"] else "NOT ok") if "certify" in of else "not run"


def pack(session: Session, figures: Mapping[str, Any], to: Path) -> None:
    """Put the library, the figures, the logs and the state into a folder."""
    to.mkdir(parents=True, exist_ok=True)
    text = json.dumps(figures, indent=1) + "\n"
    (to / FIGURES).write_text(text)
    if session.library.parent == session.work and session.library.is_dir():
        (session.library / FIGURES).write_text(text)
        archive(to / f"{session.name}.tar.gz", session.library.parent, [session.name])
    archive(to / "logs.tar.gz", session.work, ["logs"])
    state = ["suite", "each", *OF_A_LIBRARY]
    archive(to / "state.tar.gz", session.work, state)
    for file in sorted(to.iterdir()):
        print(f"{file.name}: {file.stat().st_size / 2**20:.2f} MiB", flush=True)


def archive(file: Path, folder: Path, names: Sequence[str]) -> None:
    """Write an archive of folders; what Python leaves beside its sources stays out."""

    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if "__pycache__" in member.name else member

    with tarfile.open(file, "w:gz") as tar:
        for name in names:
            if (folder / name).exists():
                tar.add(folder / name, name, filter=wanted)


if __name__ == "__main__":
    main()
