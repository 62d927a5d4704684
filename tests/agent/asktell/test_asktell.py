"""Asking and telling: numbers, files, matching, what is told twice, what survives."""

import asyncio
import itertools
import shutil
import tempfile
from pathlib import Path

import pytest
from asktell_runs import (
    ask,
    copied,
    decisions,
    divergence,
    history_of,
    judge,
    kernel,
    merge,
    opener,
    reply,
    start,
    state_of,
    tell,
    toy_machine,  # noqa: F401 - a fixture
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kagent.asktell import answers, judging, open_asks
from kagent.asktell.open_run import target_for
from kagent.asktell.state import read_state
from kagent.evolve.replayed import RecordedProposer
from kagent.runs.events import Stop
from kagent.runs.lineage import Operator
from kagent.runs.manifest import identity, read_manifest
from kagent.runs.profiles import Profile, stored_profiles, to_event
from kagent.runs.store import RunStore
from kagent_sandbox.data.verdict import Passed, Rejected, Status
from kagent_sandbox.errors import RunError, UserError
from sampling import examples
from simulated_evolution import evolution
from simulated_landscape import toy_source
from stored_events import execute

UNTIMED = "It was not measured yet"

pytestmark = pytest.mark.usefixtures("toy_machine")


def test_before_anything_is_measured_asks_differ_and_say_so(tmp_path):
    run = start(tmp_path)
    made = ask(run, 6)
    assert [q.id for q in made] == list(range(6))
    assert {q.parent for q in made} == {0, 1}
    # Each seed gets every operator in turn, and seeds take turns.
    wanted = {Operator.STRUCTURE, Operator.REWRITE, Operator.CROSSOVER}
    assert all({q.operator for q in made if q.parent == p} == wanted for p in (0, 1))
    assert all(a.parent != b.parent for a, b in itertools.pairwise(made))
    assert all(UNTIMED in q.prompt for q in made if q.operator is Operator.STRUCTURE)
    assert len({q.prompt for q in made}) == 6
    assert divergence(run) is None


def test_a_prompt_is_a_file_that_says_what_it_is(tmp_path):
    run = start(tmp_path)
    (made,) = ask(run)
    text = made.path.read_text()
    assert made.path == run / "prompts" / "0000.md"
    run_id = identity(run, read_manifest(run))
    assert text.startswith(f"<!-- kagent ask 0000 of run {run_id} -->\n")
    assert text.endswith(made.prompt)
    assert made.system in made.prompt
    assert made.user in made.prompt
    assert toy_source() in text


def test_asking_again_goes_on_and_lists_what_is_open(tmp_path):
    run = start(tmp_path)
    first = ask(run, 2)
    tell(run, (0, reply(4)))
    second = ask(run, 2)
    assert [q.id for q in second] == [2, 3]
    with RunStore.open(run, write=False) as store:
        found = open_asks.open_asks(store, read_state(store.history()))
    assert found == [first[1], *second]


def test_answers_become_candidates_in_the_order_that_they_come(tmp_path):
    run = start(tmp_path)
    ask(run, 3)
    tell(run, (2, reply(8, hypothesis="eight")), (0, reply(4)), (None, kernel(16)))
    proposals = state_of(run).proposals
    assert [(p.id, p.ask) for p in proposals] == [(0, None), (1, None), (2, 2), (3, 0), (4, None)]
    assert proposals[2].hypothesis == "eight"
    assert proposals[2].predicted == 1.2
    assert proposals[2].origin.model == "ask/tell"
    assert proposals[4].operator is Operator.TOLD
    judged = judge(run)
    assert (judged.stop, judged.left, judged.recorded) == (Stop.ANSWERED, 0, (0, 1, 2, 3, 4))
    assert all(isinstance(c.verdict, Passed) for c in judged.history.lineage)
    assert judged.history.lineage.counted == 3
    assert [a.number for a in judged.history.asks] == [1]
    assert divergence(run) is None


def test_once_measured_the_incumbent_is_asked_about_and_failures_are_repaired(tmp_path):
    run = start(tmp_path)
    ask(run, 2)
    tell(run, (0, reply(16, 3)), (1, reply(8, 3)))
    judge(run)
    best = history_of(run).lineage.incumbent
    assert best.id == 2
    asked = ask(run, 6)
    about = [q for q in asked if q.parent == best.id]
    assert len(about) >= 3
    changed = [q for q in about if q.operator is not Operator.REWRITE]  # that starts from nothing
    assert changed
    assert all("X = 16  # how wide" in q.prompt for q in changed)
    assert not any(UNTIMED in q.prompt for q in asked)
    tell(run, (asked[0].id, reply(2, note="1  # WRONG")))
    judge(run)
    repairs = [q for q in ask(run, 2) if q.operator is Operator.REPAIR]
    assert [q.parent for q in repairs] == [4]
    assert "element [0]" in repairs[0].prompt
    assert divergence(run) is None


def test_kernels_that_are_faster_on_some_shapes_are_joined_at_once(tmp_path):
    run = start(tmp_path, joins=True)
    ask(run)
    judged = judge(run)
    assert judged.recorded == (0, 1, 2)
    joined = judged.history.lineage[2]
    assert joined.proposal.operator is Operator.RECOMBINE
    assert judged.history.lineage.incumbent is joined
    assert judged.history.lineage.counted == 0
    assert divergence(run) is None


def test_what_was_joined_elsewhere_gives_way_to_an_answer_that_came_here(tmp_path):
    run = start(tmp_path, joins=True)
    copy = copied(run)
    judge(copy)
    profiles = [Profile(number, "short", "Toy 1", ()) for number in (1, 2)]
    with RunStore.open(copy) as store:
        store.append_all([("profiled", to_event(p)) for p in profiles])
    tell(run, (None, kernel(4)))
    merged = merge(run, copy)
    assert (merged.verdicts, merged.accepted) == ((0, 1), ())
    assert [*stored_profiles(history_of(run)).values()] == profiles[:1]  # here 2 is the answer
    judge(run)
    lineage = history_of(run).lineage
    assert [c.proposal.operator for c in lineage][2:4] == [Operator.TOLD, Operator.RECOMBINE]


def test_what_holds_no_kernel_counts_and_says_why(tmp_path):
    run = start(tmp_path)
    ask(run, 1)
    (told,) = tell(run, (0, "I would rather not."))
    assert "def" in told.fault or "file" in told.fault
    assert history_of(run).asks == ()
    judge(run)
    lineage = history_of(run).lineage
    assert lineage[2].verdict.status is Status.NO_KERNEL
    assert lineage.counted == 1


def test_nothing_is_accepted_twice(tmp_path):
    run = start(tmp_path)
    ask(run, 3)
    text = reply(4)
    (first,) = tell(run, (0, text))
    assert not first.again
    before = decisions(run)
    assert [(a.id, a.again) for a in tell(run, (0, text))] == [(2, True)]
    assert [(a.id, a.again) for a in tell(run, (0, kernel(4)))] == [(2, True)]  # same file
    assert [(a.id, a.again) for a in tell(run, (None, kernel(4)))] == [(2, True)]
    assert [(a.id, a.again) for a in tell(run, (None, toy_source()))] == [(0, True)]  # a seed
    tell(run, (1, "no"))
    (again,) = tell(run, (1, "no"))
    assert again.again
    assert decisions(run)[: len(before)] == before
    assert len(state_of(run).proposals) == 4


def test_a_second_answer_is_another_proposal_and_a_copied_one_a_duplicate(tmp_path):
    run = start(tmp_path)
    ask(run, 2)
    tell(run, (0, reply(4)), (0, reply(8)), (1, reply(8)))
    judge(run)
    lineage = history_of(run).lineage
    assert [c.proposal.ask for c in lineage] == [None, None, 0, 0, 1]
    assert lineage[4].is_duplicate
    assert lineage.counted == 3
    assert (run / "replies" / "0000-2.md").read_text() == reply(8)
    assert divergence(run) is None


def test_kernels_that_nobody_asked_for_descend_from_the_best_or_a_named_one(tmp_path):
    run = start(tmp_path)
    tell(run, (None, kernel(16, 3)))
    judge(run)
    tell(run, (None, kernel(8)))
    tell(run, (None, kernel(2)), parent=1)
    parents = [p.parents for p in state_of(run).proposals]
    assert parents == [(), (), (0,), (2,), (1,)]
    with pytest.raises(UserError, match="no candidate 9: the run has 0 to 4"):
        tell(run, (None, kernel(32)), parent=9)
    ask(run)
    with pytest.raises(UserError, match="answers ask 0, which has its own parent"):
        tell(run, (0, kernel(32)), parent=1)
    assert len(state_of(run).proposals) == 5


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture
def reading(tmp_path):
    """Files as `kagent tell` reads them: (ask, is a plain kernel) of each."""
    run = start(tmp_path)
    ask(run, 3)

    def read(files, **options):
        paths = []
        for name, text in files.items():
            paths.append(tmp_path / name)
            paths[-1].write_text(text, encoding="utf-8")
        with RunStore.open(run, write=False) as store:
            state = read_state(store.history())
            found = answers.read_answers(paths, store, state, "toy", **options)
        return [(g.ask, g.is_kernel) for g in found]

    read.header = f"<!-- kagent ask 0002 of run {identity(run, read_manifest(run))} -->\n"
    return read


def test_a_file_says_which_ask_it_answers(reading):
    assert reading({"0001.md": reply()}) == [(1, False)]
    assert reading({"0001-model a.txt": reply()}) == [(1, False)]
    assert reading({"0001_try.py": kernel()}) == [(1, True)]
    assert reading({"0001.txt": kernel()}) == [(1, True)]
    assert reading({"answer.md": reading.header + reply()}) == [(2, False)]
    assert reading({"answer.py": "# " + reading.header + kernel()}) == [(2, True)]
    assert reading({"answer.md": reply()}, ask=0) == [(0, False)]
    assert reading({"0001.md": reading.header + reply()}, ask=0) == [(0, False)]
    assert reading({"mine.py": kernel()}) == [(None, True)]
    assert reading({"0000.md": "\ufeff" + reply(), "0002.md": ""}) == [(0, False), (2, False)]


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        ({"answer.md": "text"}, {}, r"it names no ask"),
        ({"0007.md": "text"}, {}, "no ask 7 in toy-.*: it has 0 to 2"),
        ({"a.md": "text"}, {"ask": 3}, "no ask 3"),
        ({"a.md": "", "b.md": ""}, {"ask": 1}, "for one file, and 2 were given"),
        ({"a.md": "<!-- kagent ask 0001 of run 0123456789abcdef -->"}, {}, "of another run"),
    ],
)
def test_a_file_that_fits_nothing_is_refused(reading, files, options, words):
    with pytest.raises(UserError, match=words):
        reading(files, **options)


def test_a_file_that_contradicts_itself_is_refused(reading):
    with pytest.raises(UserError, match="its name says ask 1, its text ask 2: give --ask"):
        reading({"0001.md": reading.header + reply()})


def test_texts_that_are_none_are_refused(tmp_path):
    run = start(tmp_path)
    with pytest.raises(UserError, match="lone surrogate"):
        tell(run, (None, "x = '\ud800'"))
    with pytest.raises(UserError, match="at most 4,000,000"):
        tell(run, (None, "x" * 4_000_001))


def test_runs_of_another_proposer_are_not_asked(tmp_path):
    from simulated_evolution import stored_run

    run = stored_run(tmp_path, budget=2)
    (tmp_path / "task" / "task.toml").exists()
    with pytest.raises(RunError, match="no task toy on this machine: copy its folder"):
        ask(run)


@pytest.mark.parametrize(
    ("lang", "target", "found"),
    [
        ("any", "sm_90", ("gpu", "sm_90a")),
        ("triton", "sm_80", ("gpu", "sm_80")),
        ("any", "cpu", ("cpu", "cpu")),
        ("cpp", None, ("cpu", "cpu")),
    ],
)
def test_what_kernels_are_asked_for(lang, target, found):
    assert target_for(lang, target) == found


@pytest.mark.parametrize(
    ("lang", "target"), [("cpp", "sm_90a"), ("triton", "cpu"), ("any", "sm_1")]
)
def test_a_language_without_kernels_for_the_target_is_refused(lang, target):
    with pytest.raises(UserError, match=r"target|kernels for"):
        target_for(lang, target)


def test_a_run_that_was_answered_from_outside_is_measured_once_more(tmp_path):
    run = start(tmp_path, joins=True)
    ask(run, 3)
    tell(run, (1, reply(16, 3)), (None, kernel(8)), (0, "no kernel"), (1, reply(4)))
    judge(run)
    tell(run, (2, reply(2, note="1  # WRONG")))
    judge(run)
    then = history_of(run).lineage
    search, store = evolution(
        tmp_path / "again", tmp_path / "other", proposer=RecordedProposer("x", history_of(run))
    )
    with store:
        assert asyncio.run(search.run()) is Stop.EXHAUSTED
    texts = [(c.proposal.source, c.proposal.parents, c.verdict) for c in then]
    assert [(c.proposal.source, c.proposal.parents, c.verdict) for c in search.lineage] == texts


# -- interruptions ---------------------------------------------------------------------------------


def cut(run, place, count):
    """A copy of a run as it was after its first `count` events."""
    shutil.copytree(run, place)
    execute(place, ("DELETE FROM events WHERE seq > ?", count))
    return place


@pytest.mark.nightly
def test_a_process_killed_between_any_two_events_loses_nothing_before(tmp_path):
    run = start(tmp_path)
    ask(run, 2)
    tell(run, (1, reply(4)), (None, kernel(8)))
    judge(run)
    ask(run, 1)
    tell(run, (0, reply(16, 3)), (2, "no kernel"))
    judge(run)
    events = decisions(run)
    total = len(history_of(run).events)
    for count in range(total + 1):
        copy = cut(run, tmp_path / "runs" / f"cut{count}", count)
        kept = decisions(copy)
        assert kept == events[: len(kept)]
        if count == 0:
            assert read_state(history_of(copy)).proposals == []
        judge(copy)
        number = ask(copy, 1)[0].id
        assert number == len({d["number"] for k, d in kept if k == "asked"})
        tell(copy, (number, reply(32, 2, note=5)))
        assert judge(copy).left == 0
        assert divergence(copy) is None
        assert decisions(copy)[: len(kept)] == kept


class Interleaved(RuleBasedStateMachine):
    """Any order of asking, telling, judging here or on a copy, and starting anew."""

    @initialize(seed=st.integers(0, 3))
    def begin(self, seed):
        self.folder = tempfile.TemporaryDirectory()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(judging, "open_machine", opener())
        self.run = start(Path(self.folder.name), joins=True, seed=seed)
        self.texts = 0
        self.told = []
        self.copy = None
        self.apart = False

    @rule(count=st.integers(1, 3))
    def ask(self, count):
        before = history_of(self.run).asked
        assert [q.id for q in ask(self.run, count)] == list(range(before, before + count))

    @rule(
        pick=st.integers(0, 30),
        x=st.sampled_from([1, 2, 4, 8, 16, 32]),
        note=st.sampled_from(["0", "1", "2", "3  # WRONG", "4\nBROKEN = 1"]),
        form=st.sampled_from(["reply", "kernel", "prose"]),
    )
    def tell(self, pick, x, note, form):
        asks = [*state_of(self.run).asks, None]
        number = asks[pick % len(asks)]
        text = {"reply": reply, "kernel": kernel}.get(form, lambda *_: f"prose {note}")(x, 3, note)
        if number is None and form != "kernel":
            return
        before = len(state_of(self.run).proposals)
        (accepted,) = tell(self.run, (number, text))
        (again,) = tell(self.run, (number, text))
        assert again.again
        assert again.id == accepted.id
        assert accepted.again or accepted.id == before
        assert len(state_of(self.run).proposals) == before + (not accepted.again)

    @precondition(lambda self: not self.apart)
    @rule()
    def judge(self):
        assert judge(self.run).left == 0
        self.copy = None

    @rule()
    def copy_out(self):
        if not self.apart:
            self.copy = self.run.parent / f"copy{len(list(self.run.parent.iterdir()))}"
            shutil.copytree(self.run, self.copy)
            self.apart = True

    @precondition(lambda self: self.apart)
    @rule()
    def judge_there_and_merge(self):
        judge(self.copy)
        waiting = {p.id for p in history_of(self.run).pending}
        merged = merge(self.run, self.copy)
        left = {p.id for p in history_of(self.run).pending}
        assert left == waiting.union(merged.accepted).difference(merged.verdicts)
        assert merge(self.run, self.copy).events == 0
        self.apart = False

    @invariant()
    def consistent(self):
        history = history_of(self.run)
        state = read_state(history)
        assert [p.id for p in state.proposals] == list(range(len(state.proposals)))
        assert list(state.asks) == list(range(history.asked))
        answered = {p.ask for p in state.proposals}
        assert [a.number for a in state.open] == [n for n in state.asks if n not in answered]
        assert len({(t.ask, t.text) for t in state.told}) == len(state.told)
        assert all((self.run / "prompts" / f"{n:04}.md").is_file() for n in state.asks)
        assert divergence(self.run) is None
        for candidate in history.lineage:
            assert isinstance(candidate.verdict, Passed | Rejected)

    def teardown(self):
        if hasattr(self, "folder"):
            self.patch.undo()
            self.folder.cleanup()


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(
    max_examples=examples(20),
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
