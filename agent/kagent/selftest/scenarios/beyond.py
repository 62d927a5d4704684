"""Attacks of one candidate on another, on a race, or on the reader of a run."""

from __future__ import annotations

import io
import sqlite3
import unicodedata
from pathlib import Path

from kagent_sandbox.builder.identity import tree_hash
from kagent_sandbox.data.build import BuildRequest, Built, Contender
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.task import draw_hidden
from kagent_sandbox.data.verdict import Rejected, Status
from kagent_sandbox.errors import RunError, UserError
from rich.panel import Panel
from rich.text import Text

from kagent.evolve.open_machine import request_maker
from kagent.llm.claims import hypothesis
from kagent.resources import corpus_folder
from kagent.runs.files import connect, connect_to_read
from kagent.selftest.assemble import candidate_text, candidates
from kagent.selftest.catalogue import PASSED
from kagent.selftest.expectations import EntryOutcome, of_verdict
from kagent.selftest.jobs import Job
from kagent.selftest.scenario import ScenarioRun
from kagent.ui.terminal import Terminal


def left_for_the_next(scenario_run: ScenarioRun) -> EntryOutcome:
    """One candidate leaves what it can, the next one looks for it; in the builder and in the
    launcher.
    """
    left = scenario_run.evaluator.evaluate(_job(scenario_run.item / "leaves_cpp.py"))
    # It runs, and leaves what it can, before it is refused for having left something.
    if left.outcome not in (PASSED, "check POLICY"):
        return left
    return scenario_run.evaluator.evaluate(_job(scenario_run.item / "looks_cpp.py"))


def look_alikes(scenario_run: ScenarioRun) -> EntryOutcome:
    """Pairs of files: different kernels are told apart, by text and by machine code; equal ones
    are recognised.
    """
    wrong = []
    for one in (p for p in candidates(scenario_run.item) if p.name.endswith("_a_cpp.py")):
        two = one.with_name(one.name.replace("_a_cpp", "_b_cpp"))
        texts = [candidate_text(path) for path in (one, two)]
        work = [_built(scenario_run, text).work_hash for text in texts]
        differ = tree_hash(texts[0]) != tree_hash(texts[1]), work[0] != work[1]
        expected = (False, False) if one.name.startswith("same_") else (True, True)
        if differ != expected:
            wrong.append(f"{one.stem}: differ by text, by code: {differ}")
    return EntryOutcome("mistaken", "; ".join(wrong)) if wrong else EntryOutcome("told apart")


def beside_the_incumbent(scenario_run: ScenarioRun) -> EntryOutcome:
    """A candidate is timed beside an incumbent, whose code it would rather slow down."""
    task = corpus_folder() / "tasks" / "rows"
    best = _built(
        scenario_run, candidate_text(corpus_folder() / "honest" / "rows_cpp.py"), measured=True
    )
    mine = _built(scenario_run, candidate_text(scenario_run.item / "meddles_cpp.py"), measured=True)
    judge = scenario_run.evaluator.judge(task, "cpu")
    errors = judge.check(mine)
    if isinstance(errors, Rejected):
        if errors.status is not Status.POLICY:
            return of_verdict(errors, judge.printed())
        errors = ()  # refused as a guest: timed all the same, to see what it could do there
    return of_verdict(judge.measure(mine, errors, best, "0"), judge.printed())


def wrong_in_the_race(scenario_run: ScenarioRun) -> EntryOutcome:
    """A finalist that is right on all shapes of the search, and wrong on those of the race."""
    task = scenario_run.evaluator.task(corpus_folder() / "tasks" / "rows")
    cases = draw_hidden(task, "cpu", "bench", scenario_run.evaluator.seed)
    paths = {"honest": corpus_folder() / "honest" / "rows_cpp.py"}
    paths["wrong"] = scenario_run.item / "wrong_on_other_shapes_cpp.py"
    searched = scenario_run.evaluator.evaluate(_job(paths["wrong"], measured=True))
    if searched.outcome != PASSED:
        return searched
    texts = {name: candidate_text(path) for name, path in paths.items()}
    contenders = [Contender(n, _built(scenario_run, t, cases), {}) for n, t in texts.items()]
    judge = scenario_run.evaluator.judge(task.folder, "cpu")
    race = judge.race(contenders, hidden=True, baselines=False)
    if "honest" in race.failed:
        return of_verdict(race.failed["honest"])
    return of_verdict(race.failed.get("wrong"))


def databases_with_programs(scenario_run: ScenarioRun) -> EntryOutcome:
    """Somebody's run, whose database has a trigger, an endless view, or is a link."""
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"
    programs = (
        "CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM events; END",
        f"CREATE VIEW v AS {endless} SELECT x FROM n",  # noqa: S608
    )
    opened = [
        p for i, p in enumerate(programs) if _opens(_database(scenario_run.folder / str(i), p))
    ]
    link = scenario_run.folder / "link.sqlite"
    link.symlink_to(_database(scenario_run.folder / "target"))
    if _opens(link):
        opened.append("a link")
    return (
        EntryOutcome("read", f"{len(opened)}: {opened[0]}") if opened else EntryOutcome("refused")
    )


def texts_that_steer(_scene: ScenarioRun) -> EntryOutcome:
    """Names and hypotheses with control codes, as a terminal and the next prompt get them."""
    evil = "a\x1b[2J\x1b]8;;http://x\x1b\\b\x9b31m \u202egnp\u200b\x07"
    shown = io.StringIO()
    console = Terminal(file=shown, force_terminal=True, color_system=None, width=80)
    console.print(Text(evil), Panel(evil, title=Text(evil)))
    for what, text in (("terminal", shown.getvalue()), ("prompt", hypothesis([evil]))):
        if odd := [c for c in text if c != "\n" and unicodedata.category(c)[0] == "C"]:
            return EntryOutcome("steered", f"U+{ord(odd[0]):04X} reaches the {what}")
    return EntryOutcome("text")


def _database(path: Path, program: str | None = None) -> Path:
    connect(path).close()
    if program is not None:
        db = sqlite3.connect(path)
        db.execute(program)
        db.commit()
        db.close()
    return path


def _opens(path: Path) -> bool:
    for open_ in (connect, connect_to_read):
        try:
            open_(path).close()
        except RunError:
            continue
        return True
    return False


def _job(path: Path, *, measured: bool = False) -> Job:
    task = corpus_folder() / "tasks" / "rows"
    return Job(candidate_text(path), task, "cpu", measured=measured)


def _built(
    scenario_run: ScenarioRun, text: str, cases: list[Case] | None = None, *, measured: bool = False
) -> Built:
    """A candidate, built for check cases, those that are timed too, or the given ones."""
    task = scenario_run.evaluator.task(corpus_folder() / "tasks" / "rows")
    if cases is None:
        cases = [
            *task.cases("cpu").check,
            *draw_hidden(task, "cpu", "check", scenario_run.evaluator.seed),
        ]
        cases += task.cases("cpu").bench if measured else ()
    request: BuildRequest = request_maker(task, "cpu", cases, 1)(text)
    built = scenario_run.evaluator.builder.build(request)
    if isinstance(built, Rejected):
        raise UserError(f"a candidate of this item does not build: {built.message}")
    return built
