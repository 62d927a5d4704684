"""Every file of the corpus gets the verdict that it must have, and its honest twin passes.

All that are asked for go through the runner that `kagent selftest` uses, when the first of them is:
it builds them side by side. What is only checked does not need the machine to itself.
"""

import contextlib
import os
import secrets
from dataclasses import replace

import pytest
import shared_servers
from kagent.resources import corpus_folder
from kagent.selftest.assemble import candidate_text
from kagent.selftest.bait import name_for
from kagent.selftest.catalogue import PASSED, Variant, item_folders, load_catalogue, load_item
from kagent.selftest.evaluator import SelftestEvaluator
from kagent.selftest.expectations import miss
from kagent.selftest.jobs import Job, job_of
from kagent.selftest.leftovers import Leftovers
from kagent.selftest.runner import run
from kagent_sandbox.errors import UserError


def cases(*, timed):
    """Entries, each variant once more as its twin; an item that cannot be loaded as its error."""
    for folder in item_folders(corpus_folder()).values():
        try:
            entries = load_item(folder)
        except UserError as e:
            if not timed:
                yield pytest.param(e, False, id=folder.name)
            continue
        for entry in (e for e in entries if e.measured == timed):
            yield pytest.param(entry, False, id=entry.id)
            if isinstance(entry, Variant):
                yield pytest.param(entry, True, id=f"{entry.id}-twin")


@pytest.fixture(scope="module")
def evaluator(warm_judges):
    """One for all: its builder and its judges are started once."""
    shared_servers.close_all()  # they would be taken for what an attack leaves behind
    token = secrets.token_hex(16)
    with contextlib.closing(Leftovers(name_for(token))) as outside:
        with SelftestEvaluator(len(os.sched_getaffinity(0)), token) as evaluator:
            yield evaluator
        shared_servers.close_all()  # the template of the judges
        assert outside.left() == []


def results(request, evaluator, test):
    """By entry: what came of it and of its twin."""
    items = [i for i in request.session.items if getattr(i, "originalname", "") == test]
    asked = dict.fromkeys(i.callspec.params["entry"] for i in items if i.path == request.path)
    entries = [e for e in asked if not isinstance(e, UserError)]
    return {r.entry: r for r in run(evaluator, entries, lambda _said: None)}


@pytest.fixture(scope="module")
def timed_results(request, evaluator):
    return results(request, evaluator, "test_timed_item")


@pytest.fixture(scope="module")
def checked_results(request, evaluator):
    return results(request, evaluator, "test_checked_item")


@pytest.mark.sampled(of="entry", one_in=8)
@pytest.mark.alone
@pytest.mark.timeout(1200)  # the first one waits for all
@pytest.mark.parametrize(("entry", "twin"), list(cases(timed=True)))
def test_timed_item(entry, twin, timed_results):
    assert_verdict(entry, twin, timed_results[entry])


@pytest.mark.sampled(of="entry", one_in=8)
@pytest.mark.timeout(1200)  # the first one waits for all
@pytest.mark.parametrize(("entry", "twin"), list(cases(timed=False)))
def test_checked_item(entry, twin, checked_results):
    if isinstance(entry, UserError):
        raise entry
    assert_verdict(entry, twin, checked_results[entry])


def assert_verdict(entry, twin, found):
    if found.skipped:
        pytest.skip(found.skipped)
    expect, says = ((PASSED,), "") if twin else (entry.expect, entry.says)
    why = miss(expect, says, found.twin if twin else found.seen)
    assert why is None, f"{why}\n{entry.twin if twin else entry.path}"


@pytest.mark.parametrize(("hangs", "outcome"), [(True, "build TIMEOUT"), (False, "passed")])
def test_what_need_not_hang_gets_the_limits_of_a_run(evaluator, monkeypatch, hangs, outcome):
    """Before a shorter limit is held against it: a machine may stand still for seconds."""
    monkeypatch.setattr(evaluator, "_timeout_scale", 0.1)  # 1 s for host code, of 10
    honest = candidate_text(corpus_folder() / "honest" / "rows_cpp.py")
    text = honest.replace("y = torch.empty_like(x)", "time.sleep(2); y = torch.empty_like(x)")
    job = Job(f"import time\n{text}", corpus_folder() / "tasks" / "rows", "cpu", False, hangs)
    assert evaluator.evaluate(job).outcome == outcome


@pytest.mark.parametrize(
    ("builds_s", "scale"),
    [((9.0, 0.1, 9.0), 0.3), ((0.7, 0.8, 0.9), 0.6), ((9.0, 9.0, 9.0), 1)],
)
def test_the_timeout_scale_is_of_the_machine_not_of_a_moment(
    evaluator, monkeypatch, builds_s, scale
):
    built, left = evaluator._builder.build, list(builds_s)
    monkeypatch.setattr(evaluator, "_timeout_scale", None)
    monkeypatch.setattr(
        evaluator._builder, "build", lambda asked: replace(built(asked), build_s=left.pop(0))
    )
    assert evaluator.timeout_scale == pytest.approx(scale)
    assert left == []
    assert evaluator.timeout_scale == pytest.approx(scale)  # found out once


def test_only_what_a_build_may_reach_is_a_limit_that_it_need_not_have_twice():
    """A kernel that hangs once it runs is built like any other; who is endless has no other way."""
    jobs = {e.id: job_of(e) for e in load_catalogue() if isinstance(e, Variant)}
    assert not jobs["14_endless_kernel-loop_cpp"].hangs
    assert jobs["40_million_inodes-files_triton"].hangs
    assert not jobs["40_million_inodes-files_triton"].endless
    assert jobs["13_endless_python-import_cpp"].endless
    assert all(job.hangs for job in jobs.values() if job.endless)
