"""Bringing verdicts home: from copies, once or in parts, in any order, and never two for one."""

import json
import time
from dataclasses import replace

import pytest
from asktell_runs import (
    FACTS,
    ask,
    copied,
    decisions,
    divergence,
    history_of,
    judge,
    kernel,
    merge,
    reply,
    start,
    state_of,
    tell,
    toy_machine,  # noqa: F401 - a fixture
)
from kagent.runs.events import Stop
from kagent.runs.lineage import Operator
from kagent.runs.manifest import identity, read_manifest
from kagent.runs.store import RunStore
from kagent.runs.stored_event import StoredEvent
from kagent_sandbox.errors import RunError, UserError
from simulated_machine import FakeJudge

pytestmark = pytest.mark.usefixtures("toy_machine")


@pytest.fixture
def home(tmp_path):
    """A run with two seeds and two answers that wait."""
    run = start(tmp_path)
    ask(run, 3)
    tell(run, (0, reply(16, 3)), (1, reply(8)))
    return run


def test_verdicts_and_the_device_come_home(home):
    copy = copied(home)
    judge(copy, race=True)
    merged = merge(home, copy)
    assert (merged.verdicts, merged.race) == ((0, 1, 2, 3), True)
    assert decisions(home) == decisions(copy)
    ours, theirs = history_of(home), history_of(copy)
    assert (ours.stop, ours.baselines, ours.race) == (Stop.ANSWERED, {"us": {}}, theirs.race)
    assert ours.elapsed_s == theirs.elapsed_s
    with RunStore.open(home, write=False) as store:
        assert store.manifest.device == FACTS.name
    assert divergence(home) is None
    assert ask(home)[0].parent == 2, "asking goes on from what was measured"


def test_told_kernels_are_tuned_before_their_verdicts_and_all_times_come_home(home, toy_machine):  # noqa: F811
    toy_machine(tune=5)
    copy = copied(home)
    judge(copy)
    merge(home, copy)
    history = history_of(home)
    assert history.timed_configs == history_of(copy).timed_configs
    assert set(history.timed_configs) == {2, 3}
    tuned = history.lineage[3]
    assert tuned.written
    assert tuned.facts.configs == len(history.timed_configs[3]) == 5
    assert merge(home, copy).events == 0
    assert divergence(home) is None


def test_home_may_have_asked_and_accepted_more(home):
    copy = copied(home)
    ask(home, 2)
    tell(home, (4, reply(4)), (None, kernel(2)))
    judge(copy)
    assert merge(home, copy).verdicts == (0, 1, 2, 3)
    assert [p.id for p in history_of(home).pending] == [4, 5]
    assert [a.number for a in history_of(home).asks] == [2, 3]
    assert divergence(home) is None
    back = copied(home, "back")
    judge(back)
    assert merge(home, back).verdicts == (4, 5)
    assert history_of(home).pending == ()
    assert divergence(home) is None


def test_merging_again_changes_nothing(home):
    copy = copied(home)
    judge(copy)
    merge(home, copy)
    before = history_of(home).events
    assert merge(home, copy).events == 0
    assert history_of(home).events == before


def test_the_order_of_copies_does_not_matter(home, toy_machine):  # noqa: F811
    other_home = copied(home, "other")
    part = copied(home, "box")
    deadline = time.monotonic() + 4.0

    class Slowing(FakeJudge):
        """Is quick with one candidate, and not done with the next when time is up."""

        def measure(self, *arguments, **options):
            if self.measured:
                time.sleep(max(0.0, deadline - time.monotonic()) + 0.1)
            return super().measure(*arguments, **options)

    toy_machine(judge=Slowing())
    judge(part, deadline_s=deadline)
    early = copied(part, "early")
    judge(part)
    assert 0 < len(history_of(early).lineage) < len(history_of(part).lineage) == 4
    merge(home, early)
    merge(home, part)
    merge(other_home, part)
    merge(other_home, early)
    assert decisions(home) == decisions(other_home) == decisions(part)


def test_what_was_asked_and_told_there_comes_home_too(home):
    copy = copied(home)
    judge(copy)
    ask(copy, 2)
    tell(copy, (3, reply(32, 3)), (2, "no kernel"))
    judge(copy)
    merged = merge(home, copy)
    assert (merged.verdicts, merged.accepted, merged.asks) == ((0, 1, 2, 3, 4, 5), (4, 5), (3, 4))
    assert decisions(home) == decisions(copy)
    for kind in ("prompts", "replies", "kernels"):
        names = [sorted(p.name for p in (run / kind).iterdir()) for run in (home, copy)]
        assert names[0] == names[1]
    assert divergence(home) is None


def test_two_verdicts_for_one_candidate_are_refused(home):
    copy = copied(home)
    judge(copy)
    judge(home)
    before = history_of(home).events
    with pytest.raises(RunError, match=r"candidate 0 was judged in both.*Nothing was changed"):
        merge(home, copy)
    assert history_of(home).events == before


def test_two_kernels_for_one_number_are_refused(home):
    copy = copied(home)
    tell(copy, (None, kernel(32)))
    judge(copy)
    tell(home, (None, kernel(4)))
    before = history_of(home).events
    with pytest.raises(RunError, match="candidate 4 is another kernel in each"):
        merge(home, copy)
    assert history_of(home).events == before
    assert not (home / "logs").exists() or not list((home / "logs").iterdir())


def test_the_same_answer_told_on_both_sides_is_one(home):
    copy = copied(home)
    for run in (home, copy):
        tell(run, (2, reply(32)))
    judge(copy)
    merged = merge(home, copy)
    assert (merged.accepted, merged.verdicts) == ((), (0, 1, 2, 3, 4))
    assert len(state_of(home).told) == 3
    assert divergence(home) is None


def test_two_decisions_for_one_number_are_refused(home):
    copy = copied(home)
    judge(copy)
    ask(copy)
    ask(home)
    with pytest.raises(RunError, match="ask 3 is another decision in each"):
        merge(home, copy)


def test_times_of_two_devices_are_refused(home, toy_machine):  # noqa: F811
    copy = copied(home)
    judge(home)
    toy_machine(replace(FACTS, key="Toy 1, driver 8"))
    judge(copy)
    with pytest.raises(RunError, match="measured on Toy 1, driver 7, the other on Toy 1, driver 8"):
        merge(home, copy)


def test_what_is_no_copy_is_refused(home, tmp_path):
    other = start(tmp_path / "other")
    with pytest.raises(UserError, match=r"a run of its own \(toy, .*\), no copy of"):
        merge(home, other)
    with pytest.raises(UserError, match="is the run itself"):
        merge(home, home)
    with pytest.raises(RunError, match="no run there"):
        merge(home, tmp_path)


def test_a_run_of_an_earlier_version_is_known_by_its_manifest(home):
    data = json.loads((home / "run.json").read_text())
    del data["id"]
    (home / "run.json").write_text(json.dumps(data))
    copy = copied(home)
    assert identity(home, read_manifest(home)) == identity(copy, read_manifest(copy))
    judge(copy)
    assert merge(home, copy).verdicts == (0, 1, 2, 3)


def test_half_a_kernel_of_an_interrupted_merge_is_replaced(home):
    copy = copied(home)
    judge(copy)
    tell(copy, (2, reply(4, 2)))
    before = {p.name for p in (home / "kernels").iterdir()}
    for path in (copy / "kernels").iterdir():
        if path.name not in before:
            (home / "kernels" / path.name).write_bytes(path.read_bytes()[:20])
    merge(home, copy)
    with RunStore.open(home, write=False) as store:
        assert store.history().lineage
    assert {p.name for p in (home / "kernels").iterdir()} > before


def test_a_copy_may_be_read_only(home):
    copy = copied(home)
    judge(copy)
    copy.chmod(0o555)
    try:
        assert merge(home, copy).verdicts == (0, 1, 2, 3)
    finally:
        copy.chmod(0o755)


def test_adopting_is_all_or_nothing(home):
    with RunStore.open(home) as store:
        before = store.history().events
        damaged = StoredEvent(0, 1.0, "note", {"x": float("nan")})
        with pytest.raises(ValueError, match="JSON"):
            store.adopt([StoredEvent(0, 1.0, "note", {}), damaged])
        assert store.history().events == before


def test_a_run_that_is_worked_on_waits(home):
    copy = copied(home)
    judge(copy)
    with RunStore.open(home), pytest.raises(RunError, match="is working on this run"):
        merge(home, copy)
    assert [p.operator for p in history_of(home).pending[:2]] == [Operator.SEED] * 2
