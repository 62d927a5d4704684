"""The families of slightly wrong kernels in corpus/numerics: what each file must get."""

import contextlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from kagent.selftest.assemble import candidate_text
from kagent.tasks import find_task
from kagent_sandbox.data.build import BuildRequest
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.judge.interpreter import Interpreted
from kagent_sandbox.judge.judge import Judge

FOLDER = Path(__file__).parents[2] / "corpus" / "numerics"
RUNS = ("cpu", "interpret", "gpu")


@dataclass(frozen=True)
class Member:
    """One file of a family."""

    task: str
    file: Path
    runs: tuple[str, ...]
    expect: tuple[str, ...]  # "stage STATUS", or "passed"
    says: str
    why: str

    @property
    def text(self):
        return candidate_text(self.file)

    @property
    def right(self):
        return self.expect == ("passed",)

    def __str__(self):
        return f"{self.task}-{self.file.stem}"


def members():
    """All members of all families, in order."""
    found = []
    for path in sorted(FOLDER.glob("*/family.toml")):
        for entry in tomllib.loads(path.read_text())["member"]:
            expect = entry.pop("expect")
            found.append(
                Member(
                    task=path.parent.name,
                    file=path.with_name(entry.pop("file")),
                    runs=tuple(entry.pop("runs")),
                    expect=(expect,) if isinstance(expect, str) else tuple(expect),
                    says=entry.pop("says", ""),
                    why=entry.pop("why"),
                )
            )
            assert not entry, f"{path}: unknown keys {sorted(entry)}"
    return found


def built_and_checked(builder, judge, cases, source):
    """A candidate's errors, or its rejection."""
    task = judge.task
    given = tuple(build_case(task, c) for c in cases)
    request = BuildRequest(source, task.entry, judge.backend.facts.target, given, task.allow)
    built = builder.build(request)
    return built if isinstance(built, Rejected) else judge.check(built)


def expect_verdict(member, verdict):
    """The verdict is the one that family.toml tells."""
    if isinstance(verdict, Interpreted):
        verdict = verdict.errors
    if isinstance(verdict, Rejected):
        assert f"{verdict.stage} {verdict.status}" in member.expect, verdict
        assert re.search(member.says, verdict.message), verdict.message
        return
    worst = max(verdict, key=lambda e: e.share_of_tolerance)
    assert member.right, f"it passed, at most with {worst}"
    assert worst.share_of_tolerance <= 1


MEMBERS = members()
RUN_SEED = 20


def with_runs(kind):
    """Members that run there, task by task: judges are shared."""
    return [pytest.param(m, id=str(m)) for m in MEMBERS if kind in m.runs]


class Judges:
    """One judge or interpreter at a time: tests come task by task."""

    def __init__(self, make):
        self.make = make
        self.task = None
        self.open = contextlib.ExitStack()

    def of(self, task):
        if task != self.task:
            self.open.close()
            self.made = self.make(find_task(task), self.open)
            self.task = task
        return self.made


def a_judge(task, backend, stack):
    judge = Judge(task, backend, RUN_SEED)
    stack.callback(judge.close)  # and with it the backend
    return judge
