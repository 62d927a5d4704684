"""One candidate file at a time: what `kagent build`, `check` and `bench` do."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kagent_sandbox.build.client import Builder
from kagent_sandbox.build.request import Built
from kagent_sandbox.build.targets import parse_target
from kagent_sandbox.errors import KagentError, UserError
from kagent_sandbox.figures import Contender
from kagent_sandbox.judge_client import JudgeClient
from kagent_sandbox.launch.base import DeviceFacts
from kagent_sandbox.race_result import BEST_OF_TORCH, Race
from kagent_sandbox.task import Kind, Task, draw_hidden
from kagent_sandbox.verdict import CaseError, Passed, Rejected

from kagent.disk import read_regular
from kagent.lineage import language_of_source
from kagent.session import has_gpu, request_maker

DEFAULT_TARGET = "sm_90a"
MOST_FILE_BYTES = 16 << 20
"""Of a file that is read: a reply may hold more than its kernel, of which a builder takes 1 MiB."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What checking a file found. `interpreted`: by Triton's interpreter, not by a device."""

    verdict: tuple[CaseError, ...] | Rejected
    device: str
    interpreted: bool = False
    skipped: tuple[str, ...] = ()  # cases too large to interpret


@dataclass(frozen=True, slots=True)
class Benched:
    """Candidates beside every baseline on the visible benchmark cases.

    `measured` are the times that each candidate has by itself, which the race does without. They
    are what there is where it failed: `failure` says why.
    """

    facts: DeviceFacts
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
    task: Task, path: Path, target: str | None, *, configs: int, jobs: int
) -> Built | Rejected:
    """Build for every visible case, on a machine with or without a GPU.

    Raises:
        UserError: There is no such file or target, or the target is not for its language.
    """
    source = read_candidate(path)
    cpp = language_of_source(source) == "cpp"
    if target is None:
        target = "cpu" if cpp else DEFAULT_TARGET
    if (target == "cpu") != cpp:
        raise UserError(
            f"{path}: a {'C++' if cpp else 'GPU'} candidate cannot be built for {target}: "
            + ("leave --target away" if cpp else "name an architecture such as sm_90a")
        )
    parse_target(target)
    cases = task.cases("cpu" if cpp else "gpu")
    request = request_maker(task, target, [*cases.check, *cases.bench], configs)
    with Builder(jobs) as builder:
        return builder.build(request(source))


def _kind_of(sources: Sequence[tuple[Path, str]]) -> Kind:
    kinds: set[Kind] = {"cpu" if language_of_source(s) == "cpp" else "gpu" for _, s in sources}
    if len(kinds) > 1:
        names = ", ".join(str(p) for p, _ in sources)
        raise UserError(f"{names}: C++ and GPU candidates cannot be timed side by side")
    return kinds.pop()


def check_file(task: Task, path: Path, *, jobs: int) -> Checked:
    """Check on all cases: on the device, or a Triton candidate in the interpreter without one.

    Raises:
        UserError: A CUDA candidate where there is no GPU.
    """
    source = read_candidate(path)
    kind = _kind_of([(path, source)])
    secret = secrets.randbits(62)
    if kind == "gpu" and not has_gpu():
        return _interpret(task, path, source, secret)
    cases = [
        *task.cases(kind).check,
        *draw_hidden(task, kind, "check", secret),
    ]
    with Builder(jobs) as builder, JudgeClient(task.folder, kind, secret) as judge:
        built = builder.build(request_maker(task, judge.facts, cases, 1)(source))
        verdict = built if isinstance(built, Rejected) else judge.check(built)
        return Checked(verdict, judge.facts.name)


def _interpret(task: Task, path: Path, source: str, secret: int) -> Checked:
    if language_of_source(source) == "cuda":
        raise UserError(
            f"{path}: a CUDA candidate can only be checked on an NVIDIA GPU, and this machine has "
            f"none. Possible here: kagent build {path} --task {task.name} compiles it"
        )
    from kagent_sandbox.interpret import Interpreter

    with Interpreter(task, secret) as interpreter:
        found = interpreter.check(source)
    if isinstance(found, Rejected):
        return Checked(found, "Triton's interpreter", interpreted=True)
    return Checked(found.errors, "Triton's interpreter", interpreted=True, skipped=found.skipped)


def bench_files(
    task: Task, paths: Sequence[Path], *, jobs: int, configs: int, say: Callable[[str], None]
) -> Benched:
    """Check candidates, find each one's best configuration, then race them with all baselines.

    Raises:
        UserError: GPU candidates where there is no GPU.
        KagentError: The machine failed before any candidate was timed.
    """
    contender_names(paths)
    sources = [(p, read_candidate(p)) for p in paths]
    kind = _kind_of(sources)
    if kind == "gpu" and not has_gpu():
        raise UserError(
            "timing GPU candidates needs an NVIDIA GPU, and this machine has none. Possible here: "
            "kagent build compiles them for one, kagent check runs a Triton candidate in Triton's "
            "interpreter, and C++ candidates are timed on the CPU"
        )
    secret = secrets.randbits(62)
    cases = task.cases(kind)
    hidden = draw_hidden(task, kind, "check", secret)
    with Builder(jobs) as builder, JudgeClient(task.folder, kind, secret) as judge:
        all_cases = [*cases.check, *hidden, *cases.bench]
        request = request_maker(task, judge.facts, all_cases, configs)
        baselines = judge.baselines(say)
        judge.ceilings()
        taken = {name for times in baselines.us.values() for name in times} | {BEST_OF_TORCH}
        names = contender_names(paths, taken)
        bench = Benched(judge.facts, {}, Race((), {}), {})
        contenders: list[Contender] = []
        try:
            for (_, source), name in zip(sources, names, strict=True):
                say(f"{name}: build, check, measure")
                built = builder.build(request(source))
                verdict = _evaluate(built, judge)
                if isinstance(verdict, Rejected):
                    bench.rejected[name] = verdict
                    continue
                assert not isinstance(built, Rejected), "it was measured"
                bench.measured[name] = verdict
                contenders.append(
                    Contender(name, built, {t.case: t.config for t in verdict.timings})
                )
            say("race")
            race = judge.race(contenders, hidden=False) if contenders else bench.race
        except KagentError as e:
            if not bench.measured:
                raise
            return replace(bench, failure=e)
        return replace(bench, race=race)


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


def _evaluate(built: Built | Rejected, judge: JudgeClient) -> Passed | Rejected:
    """A checked candidate's times, with the fastest configuration of each case."""
    if isinstance(built, Rejected):
        return built
    errors = judge.check(built)
    return errors if isinstance(errors, Rejected) else judge.measure(built, errors)
