"""Every door has the same lock: what refuses a candidate first is the same wherever it comes in.

Files of the corpus, and seeds: a sample of a fixed size, that these tests stay quick, and all of
them with `--whole`. Left out of the corpus are files that meet their limits on time (minutes), that
name baits (the selftest makes them), and that may get one of several verdicts.
"""

import contextlib
import random
from types import SimpleNamespace

import pytest
from kagent import candidate_file as workbench
from kagent.candidate_file import bench_files, build_file, check_file
from kagent.evolve import offline_check as looker
from kagent.evolve.offline_check import OfflineChecker
from kagent.evolve.open_machine import request_maker, search_cases
from kagent.selftest.assemble import candidate_text
from kagent.selftest.catalogue import Variant, load_catalogue
from kagent.tasks import find_task, seeds_of, task_names
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.verdict import Examined, Rejected, Stage, Status
from kagent_sandbox.device.cpu.facts import cpu_facts
from kagent_sandbox.errors import UserError

pytestmark = pytest.mark.usefixtures("warm_processes")  # each task is checked in one

REFUSED, OTHERS = 3, 1  # files of the corpus for each kind of device, by their verdict
SEED = "gelu"  # the task whose seed for the CPU is compiled in a second
FRONT = (Stage.PARSE, Stage.BUILD)
NOT_TIMED = Rejected(Stage.MEASURE, Status.SUSPECT, "nothing is timed here")


class Judge:
    """Passes whatever was built as correct, and times nothing: these tests end before."""

    facts = cpu_facts()

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def check(self, built):
        return ()

    def examine(self, built, *, bench_shapes):
        return Examined(self.check(built))

    def measure(self, built, errors):
        return NOT_TIMED

    def compile_ahead(self, *, race, cached):
        pass

    def baselines(self, say, *, cached):
        return SimpleNamespace(us={})

    def ceilings(self):
        pass

    def race(self, *_, **__):
        return Race((), {})


def usable():
    """The files of the corpus that are compared."""
    return [
        e
        for e in load_catalogue()
        if isinstance(e, Variant)
        and len(e.expect) == 1
        and "TIMEOUT" not in e.expect[0]
        and not e.endless
        and "@bait" not in candidate_text(e.path)
    ]


def sampled():
    """Paths of candidates, and their tasks; always the same."""
    chance = random.Random(0)
    task = find_task(SEED)
    seeds, files = seeds_of(task), usable()
    for cpp in (True, False):
        mine = [e for e in files if (e.runs == "cpu") == cpp]
        front = [e for e in mine if e.expect[0].startswith(FRONT)]
        rest = [e for e in mine if e not in front]
        picked = [*chance.sample(front, REFUSED), *chance.sample(rest, OTHERS)]
        for e in picked:
            yield pytest.param(e.path, e.task, id=e.id)
        if cpp:  # of one for GPUs, each door would compile every configuration
            seed = next(s for s in seeds if s.language == "cpp")
            yield pytest.param(seed.path, task.folder, id=f"{SEED}-{seed.name}")


def whole():
    """All files of the corpus, and all seeds of all tasks."""
    for e in usable():
        yield pytest.param(e.path, e.task, id=e.id)
    for task in map(find_task, task_names()):
        for seed in seeds_of(task):
            yield pytest.param(seed.path, task.folder, id=f"{task.name}-{seed.name}")


def pytest_generate_tests(metafunc):
    if "path" in metafunc.fixturenames:
        files = whole() if metafunc.config.getoption("--whole") else sampled()
        metafunc.parametrize(("path", "task"), list(files))


@pytest.fixture(autouse=True)
def _without_device(builder, monkeypatch):
    for module in (workbench, looker):
        monkeypatch.setattr(module, "Builder", lambda *_, **__: contextlib.nullcontext(builder))
    monkeypatch.setattr(workbench, "JudgeClient", Judge)
    monkeypatch.setattr(workbench, "available", lambda kind: kind == "cpu")
    monkeypatch.setattr("kagent_sandbox.judge.interpreter.Interpreter", Uninterpreted)


class Uninterpreted:
    """In place of the interpreter, which is behind the doors: nothing could be checked."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def check(self, source, built, **_):
        return Nothing()


class Nothing:
    errors = skipped = failed = ()
    not_simulated = ""


def first_refusals(builder, task, path):
    """By door: the stage and status of what refuses a candidate first, None if nothing does."""
    source = path.read_text()
    kind = workbench._kind_of([(path, source)])
    target = "cpu" if kind == "cpu" else workbench.DEFAULT_TARGET

    def look():
        with OfflineChecker(task, kind, target, configs=1, jobs=1) as looker:
            return looker.look(source).rejected

    def search():
        return builder.build(request_maker(task, target, search_cases(task, kind, 1), 1)(source))

    doors = {
        "build": lambda: build_file(task, path, None, print, configs=1, jobs=1),
        "check": lambda: check_file(task, path, jobs=1).verdict,
        "bench": lambda: bench_files(
            task, [path], jobs=1, configs=1, say=lambda _: None
        ).rejected.get(path.stem),
        "tell --queue": look,
        "evolve, tell, judge, export": search,
    }
    found = {}
    for name, door in doors.items():
        try:
            answer = door()
        except UserError:  # nothing is wrong with it, and there is no GPU
            answer = None
        refused = isinstance(answer, Rejected) and answer.stage in FRONT
        found[name] = (answer.stage, answer.status) if refused else None
    return found


@pytest.mark.sampled(one_in=8)
def test_first_refusal_is_the_same_at_every_door(builder, tmp_path, path, task):
    file = tmp_path / path.name
    file.write_text(candidate_text(path))
    found = first_refusals(builder, find_task(task), file)
    assert len(set(found.values())) == 1, found


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("return torch.softmax(x, -1)", Status.POLICY),
        ("return torch.empty_like(x)", Status.POLICY),
        ("return x.exp().sum().item()", Status.POLICY),
        ("raise ValueError(x.shape)", Status.RUNTIME_ERROR),
    ],
)
def test_what_is_no_kernel_is_refused_at_every_door(builder, tmp_path, body, status):
    path = tmp_path / "candidate.py"
    path.write_text(f"import torch\n\ndef softmax(x):\n    {body}\n")
    found = first_refusals(builder, find_task("softmax"), path)
    assert set(found.values()) == {(Stage.BUILD, status)}, found
