"""One candidate file at a time: what `kagent build`, `check` and `bench` do."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kagent_sandbox.builder.client import Builder, parse_fault
from kagent_sandbox.data.build import Built, Contender
from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.language import language_of_source
from kagent_sandbox.data.race import BEST_OF_TORCH, Race
from kagent_sandbox.data.target import DEFAULT_TARGET, parse_target
from kagent_sandbox.data.task import Task, draw_hidden
from kagent_sandbox.data.verdict import CaseError, Examined, Passed, Rejected
from kagent_sandbox.device.table import available, device_for
from kagent_sandbox.errors import KagentError, UserError
from kagent_sandbox.judge.client import JudgeClient

from kagent.evolve.offline_check import OfflineCheck, OfflineChecker
from kagent.evolve.open_machine import request_maker, search_cases, visible_cases
from kagent.runs.files import read_regular
from kagent.tasks import sound_task
from kagent.text import plural

MOST_FILE_BYTES = 16 << 20
"""Largest size of a file that is read. A reply may hold more than its kernel, of which a builder
takes 1 MiB.
"""


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """Findings from checking a file. `interpreted`: by an interpreter, not by a device.

    A verdict that is no rejection has the errors of one case at least.
    """

    verdict: tuple[CaseError, ...] | Rejected
    device: str
    interpreted: bool = False
    unseen: str = ""  # what the interpreter cannot show
    skipped: tuple[str, ...] = ()  # cases that are too large to interpret, or take too long
    failed: tuple[Rejected, ...] = ()  # of every case that failed; the first one is the verdict


@dataclass(frozen=True, slots=True)
class Benched:
    """Candidates beside every baseline on the visible benchmark cases.

    `measured` are the times that each candidate has by itself, which the race does without. They
    are what there is where it failed: `failure` says why. Without a GPU for them, candidates that
    are rejected are all that there is. `facts` is None where no device was opened.
    """

    facts: DeviceFacts | None
    measured: dict[str, Passed]
    race: Race
    rejected: dict[str, Rejected]
    failure: KagentError | None = None


def read_candidate(path: Path) -> str:
    """The text of a candidate, or of an answer that holds one, in lines that end in newlines.

    Raises:
        UserError: It cannot be read, is no plain file, no text, or too large.
    """
    try:
        text = read_regular(path, MOST_FILE_BYTES).decode("utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None


def build_file(
    task: Task,
    path: Path,
    target: str | None,
    say: Callable[[str], None],
    *,
    configs: int,
    jobs: int,
) -> Built | Rejected:
    """Build a candidate's file for every visible case, on a machine with or without a GPU.

    Args:
        task: The task.
        path: The file.
        target: "cpu" or an architecture; None: the target of the file's language here.
        say: Function that receives lines of progress.
        configs: Most configurations to build.
        jobs: Number of builds at once.

    Raises:
        UserError: There is no such file or target, or the target is not for its language.
    """
    source = read_candidate(path)
    language = language_of_source(source)
    cpu = language.kind == "cpu"
    if target is None:
        target = "cpu" if cpu else DEFAULT_TARGET
    if (target == "cpu") != cpu:
        raise UserError(
            f"{path}: a {language.title if cpu else 'GPU'} candidate cannot be built for {target}: "
            + ("omit --target" if cpu else "name an architecture such as sm_90a")
        )
    parse_target(target)
    cases = visible_cases(task, language.kind)
    request = request_maker(task, target, cases, configs)
    say(f"building {path.name}")
    with Builder(jobs, on_wait=say) as builder:
        return builder.build(replace(request(source), loops=True))


def _kind_of(sources: Sequence[tuple[Path, str]]) -> Kind:
    kinds = {language_of_source(s).kind for _, s in sources}
    if len(kinds) > 1:
        names = ", ".join(str(p) for p, _ in sources)
        raise UserError(f"{names}: CPU and GPU candidates cannot be timed side by side")
    return kinds.pop()


def check_file(
    task: Task,
    path: Path,
    *,
    jobs: int,
    bench_shapes: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> CheckedFile:
    """Build a candidate's file, then check it on all cases, also after one that fails.

    It is checked on the device. Without a GPU a candidate in Triton or Gluon is interpreted.

    Args:
        task: The task.
        path: The file.
        jobs: Number of builds at once.
        bench_shapes: Whether benchmark cases, and hidden ones as a final race draws, are checked
            against the reference, too.
        say: Is told what is being done.

    Raises:
        TaskError: The task has a fault.
        UserError: There is no GPU, and nothing of what was built can be checked without one.
    """
    source = read_candidate(path)
    kind = _kind_of([(path, source)])
    sound_task(task, kind, say)
    say(f"building and checking {path.name}")
    if not available(kind):
        return _interpret(task, path, source, jobs, bench_shapes=bench_shapes)
    secret = secrets.randbits(62)
    device = device_for(kind)
    with (
        Builder(jobs, on_wait=say) as builder,
        JudgeClient(task.folder, device, secret, on_wait=say) as judge,
    ):
        cases = search_cases(task, kind, secret)
        cases += draw_hidden(task, kind, "bench", secret) if bench_shapes else []
        request = request_maker(task, judge.facts, cases, 1)
        built = builder.build(request(source))
        if isinstance(built, Rejected):
            found = Examined((), (built,))
        else:
            found = judge.examine(built, bench_shapes=bench_shapes)
        return CheckedFile(_first(found), judge.facts.name, failed=found.failed)


def _first(found: Examined) -> tuple[CaseError, ...] | Rejected:
    return found.failed[0] if found.failed else found.errors


def _interpret(
    task: Task, path: Path, source: str, jobs: int, *, bench_shapes: bool
) -> CheckedFile:
    with OfflineChecker(
        task,
        "gpu",
        DEFAULT_TARGET,
        configs=1,
        jobs=jobs,
        every=True,
        bench_shapes=bench_shapes,
    ) as checker:
        look = checker.look(source)
    if look.unchecked:
        raise UserError(
            f"{path}: built for {DEFAULT_TARGET}, but not checked: {look.unchecked}, and this "
            "machine has no NVIDIA GPU. Check it where there is one"
        )
    if isinstance(look.built, Rejected):
        return CheckedFile(look.built, f"the builder for {DEFAULT_TARGET}", failed=(look.built,))
    assert look.values is not None, "or it would say why it is unchecked"
    values = look.values
    found = (
        Examined((), (values,))
        if isinstance(values, Rejected)
        else Examined(values.errors, values.failed)
    )
    return CheckedFile(
        _first(found), look.where, True, look.unseen, skipped=look.skipped, failed=found.failed
    )


def bench_files(
    task: Task,
    paths: Sequence[Path],
    *,
    jobs: int,
    configs: int,
    say: Callable[[str], None],
    fresh: bool = False,
) -> Benched:
    """Check candidates, find each one's best configuration, then race them with all baselines.

    Nothing is measured before every candidate is built. Where none can be, nothing is at all.

    Args:
        task: The task.
        paths: The files.
        jobs: Number of builds at once.
        configs: Most configurations of each candidate.
        say: Function that receives lines of progress.
        fresh: Whether baselines are measured again before the race, whatever is stored.

    Raises:
        TaskError: The task has a fault.
        UserError: GPU candidates that nothing is wrong with so far, where there is no GPU.
        KagentError: The machine failed before any candidate was timed.
    """
    contender_names(paths)
    sources = [(p, read_candidate(p)) for p in paths]
    kind = _kind_of(sources)
    faults = [fault for _, s in sources if (fault := parse_fault(s)) is not None]
    if len(faults) == len(sources):
        rejected = dict(zip(contender_names(paths), faults, strict=True))
        return Benched(None, {}, Race((), {}), rejected)
    sound_task(task, kind, say)
    if not available(kind):
        return _not_timed(task, sources, jobs=jobs, configs=configs, say=say)
    secret = secrets.randbits(62)
    device = device_for(kind)
    with (
        Builder(jobs, on_wait=say) as builder,
        JudgeClient(task.folder, device, secret, on_wait=say) as judge,
    ):
        request = request_maker(task, judge.facts, search_cases(task, kind, secret), configs)
        bench = Benched(judge.facts, {}, Race((), {}), {})
        names = contender_names(paths)
        builds: list[Built | Rejected] = []
        for (_, source), name in zip(sources, names, strict=True):
            say(f"{name}: build")
            builds.append(builder.build(request(source)))
        if any(isinstance(built, Built) for built in builds):
            baselines = judge.baselines(say, cached=not fresh)
            judge.ceilings()
            taken = {name for times in baselines.us.values() for name in times} | {BEST_OF_TORCH}
            names = contender_names(paths, taken)
        contenders: list[Contender] = []
        try:
            for name, built in zip(names, builds, strict=True):
                if isinstance(built, Rejected):
                    bench.rejected[name] = built
                    continue
                say(f"{name}: check, measure")
                verdict = _evaluate(built, judge)
                if isinstance(verdict, Rejected):
                    bench.rejected[name] = verdict
                    continue
                bench.measured[name] = verdict
                contenders.append(
                    Contender(name, built, {t.case: t.config for t in verdict.timings})
                )
            if not contenders:
                return bench
            say("race")
            race = judge.race(contenders, hidden=False)
        except KagentError as e:
            if not bench.measured:
                raise
            return replace(bench, failure=e)
        return replace(bench, race=race)


def _not_timed(
    task: Task,
    sources: Sequence[tuple[Path, str]],
    *,
    jobs: int,
    configs: int,
    say: Callable[[str], None],
) -> Benched:
    """GPU candidates where there is no GPU: those that a look at them rejects.

    Raises:
        UserError: None is rejected, and none can be timed.
    """
    bench = Benched(None, {}, Race((), {}), {})
    names = contender_names([p for p, _ in sources])
    seen: list[str] = []
    with OfflineChecker(task, "gpu", DEFAULT_TARGET, configs=configs, jobs=jobs) as checker:
        for (_, source), name in zip(sources, names, strict=True):
            say(f"{name}: build, check")
            look = checker.look(source)
            seen.append(f"{name}: {_seen(look)}")
            if look.rejected is not None:
                bench.rejected[name] = look.rejected
    if bench.rejected:
        return bench
    raise UserError(
        f"{'; '.join(seen)}; not timed: timing GPU candidates needs an NVIDIA GPU, and this "
        "machine has none. Possible here: kagent build compiles them for one, kagent check runs a "
        "Triton or Gluon candidate by interpreting it, and C++ candidates are timed on the CPU"
    )


def _seen(look: OfflineCheck) -> str:
    """Describe what a look at a candidate found, if nothing was wrong with it."""
    if look.unchecked or look.values is None or isinstance(look.values, Rejected):
        return f"builds for {DEFAULT_TARGET}, not checked: {look.unchecked}"
    count = plural(len(look.values.errors), "result")
    return f"builds for {DEFAULT_TARGET}, correct in {count} in {look.where}"


def contender_names(paths: Sequence[Path], taken: Collection[str] = ()) -> list[str]:
    """A name for each file: without folder and suffix, unless that is another's or a baseline's.

    Raises:
        UserError: A file is named twice.
    """
    if len(set(paths)) < len(paths):
        raise UserError(f"{next(p for p in paths if paths.count(p) > 1)}: named twice")
    stems = [p.stem for p in paths]
    return [
        str(p) if stems.count(stem) > 1 or stem in taken else stem
        for p, stem in zip(paths, stems, strict=True)
    ]


def _evaluate(built: Built, judge: JudgeClient) -> Passed | Rejected:
    """A checked candidate's times, with the fastest configuration of each case."""
    errors = judge.check(built)
    return errors if isinstance(errors, Rejected) else judge.measure(built, errors)
