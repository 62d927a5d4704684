"""Memory across runs: what is kept, what a related task gets of it, and what is never in it."""

import asyncio
import json
import math
from dataclasses import replace

import pytest
from commands import run
from kagent.config.settings import load_config
from kagent.evolve import remembering
from kagent.evolve.stored_run import setting_of
from kagent.memory import library, recall
from kagent.memory.operation import form_of, operation_of
from kagent.memory.record import Remembered, remember
from kagent.runs.final_race import FinalRace
from kagent.runs.ideas import Effect, Regime, effects
from kagent.runs.lineage import Candidate, Facts, Lineage, Operator, Origin, Proposal
from kagent.runs.recalled import Recalled
from kagent.runs.store import RunStore, read_history
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Passed, Rejected, Stage, Status
from kagent_sandbox.errors import UserError
from replaying import replay
from simulated_evolution import RandomProposer, evolution, manifest
from simulated_landscape import case_times, toy_source, toy_task
from simulated_machine import compared, timings_of
from synthetic_races import synthetic_race


@pytest.fixture(autouse=True)
def own_library(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("KAGENT_MEMORY")
    return tmp_path / "data" / "kagent" / "memory"


def passed(source, against="", before=None):
    times = case_times(source)
    score = math.exp(sum(math.log(100 / t) for t in times.values()) / len(times))
    versus = compared(against, case_times(before), times) if before is not None else None
    return Passed(timings_of(times), (), score, 0.001, versus=versus)


def cpp(x, y, **more):
    """A toy kernel that counts as C++, as a CPU's must."""
    text = toy_source(x, y, **more)
    return text.replace("import torch", 'import torch\nK = cpp_kernel("")')


SEED, BETTER, BEST = cpp(1, 1), cpp(4, 2), cpp(16, 3)


def lineage(best=BEST, extra=""):
    origin = Origin("model-a", card="cpu_vectors", seconds=1.0)
    found = Lineage()
    found.record(Candidate(Proposal(0, (), Operator.SEED, "cpp_plain", SEED, ""), passed(SEED)))
    for number, source in ((1, BETTER), (2, best + extra)):
        before = SEED if number == 1 else BETTER
        proposal = Proposal(
            number, (number - 1,), Operator.STRUCTURE, "cpp_vectors", source, "wider", origin=origin
        )
        verdict = passed(source, str(number - 1), before)
        found.record(Candidate(proposal, verdict, Facts("", source, 1, 0.1)))
    broken = Proposal(3, (2,), Operator.STRUCTURE, "cpp_vectors", "x", "", origin=origin)
    found.record(Candidate(broken, Rejected(Stage.BUILD, Status.COMPILE_ERROR, "no")))
    return found


def stored(tmp_path, task, found, *, race=False, **changes):
    """A run with these candidates, in `tmp_path / "old"`; its folder."""
    fields = {"id": "ab" * 8, "task_digest": task.digest, "task_folder": str(task.folder)}
    with RunStore.create(tmp_path / "old", manifest(**{**fields, **changes})) as store:
        for candidate in found:
            store.propose(candidate.proposal)
            store.record(candidate)
        if race:
            store.race(FinalRace((2, 1), 1, synthetic_race("2", "1")))
        return store.folder


def kept(tmp_path, task, found=None, **more):
    folder = stored(tmp_path, task, found or lineage(), **more)
    store, history = read_history(folder)
    library.keep(folder, store.manifest, history, task)
    return folder


def wanted(task, **changes):
    asked = remembering.wanted(task, "cpu", "cpu", "any", [remembering.SeedText("cpp_plain", SEED)])
    return replace(asked, **changes)


def related_task(tmp_path, name, change=lambda text: text, reference=lambda text: text):
    task = toy_task(tmp_path / name)
    for file, edit in (("task.toml", change), ("reference.py", reference)):
        path = task.folder / file
        path.write_text(edit(path.read_text()))
    return load_task(task.folder)


def test_a_run_leaves_its_best_kernels_and_what_techniques_did(tmp_path):
    task = toy_task(tmp_path / "task")
    kept(tmp_path, task)
    (record,) = library.known(pytest.fail)
    assert [k.source for k in record.kernels] == [BEST, BETTER]  # the seed is the task's own
    assert record.kernels[0].models == ("model-a",)
    (whole,) = [e for e in record.effects if e.regime is Regime.ALL]
    assert (whole.technique, whole.tries, whole.passed, whole.faster) == ("cpu_vectors", 3, 2, 2)
    low, high = whole.interval
    assert low < whole.gain < high


def test_a_hidden_race_leaves_no_trace(tmp_path):
    """The race found another winner; what is kept is the search's, byte for byte."""
    task = toy_task(tmp_path / "task")
    found = []
    for race in (False, True):
        folder = stored(tmp_path, task, lineage(), race=race)
        store, history = read_history(folder)
        assert (history.race is not None) is race
        kept_now = remember(folder, store.manifest, history, task)
        found.append(replace(kept_now, folder=""))
        path = library.keep(folder, store.manifest, history, task)
        assert "hidden" not in path.read_text()
    assert found[0] == found[1]


def test_the_same_operation_is_known_by_its_reference_and_form(tmp_path):
    task = toy_task(tmp_path / "task")
    sizes = related_task(
        tmp_path,
        "b",
        lambda t: t.replace("N = 256", "N = 512").replace('"toy', '"other'),
        lambda t: t.replace(
            "return 2 * x.double()", '"""Said otherwise."""\n    return 2 * x.double()'
        ),
    )
    another = related_task(
        tmp_path,
        "c",
        lambda t: t.replace('name = "toy"', 'name = "third"'),
        lambda t: t.replace("2 * x.double()", "3 * x.double()"),
    )
    rows = related_task(
        tmp_path,
        "d",
        lambda t: t.replace('name = "toy"', 'name = "rows"').replace(
            'shape = ["M", "N"], k', 'shape = ["M"], k'
        ),
    )
    assert operation_of(sizes) == operation_of(task) != operation_of(another)
    assert form_of(another) == form_of(task) != form_of(rows)
    kept(tmp_path, task)
    (record,) = library.known()
    found = [recall.relation(record, t) for t in (task, sizes, another, rows)]
    assert found == [recall.SAME, recall.OTHER_CASES, recall.SAME_FORM, ""]
    for other, seeds, known in ((sizes, 1, True), (another, 0, True), (rows, 0, False)):
        recalled, sources = recall.recall(wanted(other), tmp_path / "none")
        assert len(recalled.seeds) == len(sources) == seeds  # one structure, so one seed
        assert bool(recalled.effects) is known
    assert "def other(x)" in recall.recall(wanted(sizes), tmp_path / "none")[1][0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("TIMES, PLUS = 2.0, 0.0", "TIMES, PLUS = 3.0, 0.0"),
        ("from math import e as TIMES", "from math import pi as TIMES"),
        ("import math as TIMES", "import cmath as TIMES"),
    ],
)
def test_operations_with_other_constants_and_imports_differ(tmp_path, one, other):
    def task(name, head):
        return related_task(
            tmp_path,
            name,
            reference=lambda t: f"{head}\n{t}".replace("2 * x.double()", "TIMES * x.double()"),
        )

    texts = ("a", one), ("b", other), ("c", f"import sys\n{one}")
    first, second, third = (operation_of(task(name, head)) for name, head in texts)
    assert first == third != second


def test_the_nearest_come_first_and_nothing_comes_twice(tmp_path):
    task = toy_task(tmp_path / "task")
    here, there = {"device": "this one"}, {"device": "that one"}
    wide = lineage(BEST, "W = 1\n")
    for number, (found, device) in enumerate(
        ((lineage(), there), (wide, here), (lineage(BEST, "V = 1\n"), there))
    ):
        kept(tmp_path, task, found, id=f"{number:016}", environment=device)
    recalled, sources = recall.recall(wanted(task, device="this one"), tmp_path / "none")
    assert len(sources) == recall.MOST_SEEDS
    assert [s.device for s in recalled.seeds] == ["this one", "that one"]
    assert recalled.seeds[0].why == "the same task, on this device"
    assert "W = 1" in sources[0]
    own = wanted(task, own=(*sources, SEED))
    again, _ = recall.recall(own, tmp_path / "none")
    assert not {s.kernel for s in again.seeds} & {s.kernel for s in recalled.seeds}
    gpu = remembering.wanted(task, "gpu", "sm_90a", "any", [])
    assert recall.recall(gpu, tmp_path / "none")[0] == recall.Recalled()


def test_the_results_of_techniques_say_what_they_are_for():
    def said(*names):
        found = tuple(Effect(name, Regime.ALL, 1, 1, 1, 0.1) for name in names)
        return remembering.described(Recalled(effects=found, runs=("gelu-2026",)))

    follows = "prompts for models show them, and propose those that gained most more often"
    assert said("a") == [f"memory: the results of 1 technique in gelu-2026: {follows}"]
    assert "the results of 2 techniques in" in said("a", "b", "b")[0]


def test_licences_travel_and_are_said(tmp_path):
    task = toy_task(tmp_path / "task")
    marked = "# SPDX-License-Identifier: BSD-3-Clause\n"
    kept(tmp_path, task, lineage(cpp(8, 3), marked))
    (task.folder / "LICENSE").write_text("of somebody")
    recalled, sources = recall.recall(wanted(task), tmp_path / "none")
    assert recalled.seeds[0].licences == ("BSD-3-Clause",)
    assert any("licence: BSD-3-Clause" in line for line in remembering.described(recalled))
    # A child that no longer says so is under it all the same, also in the third run.
    with RunStore.create(tmp_path / "next", manifest(id="cd" * 8)) as store:
        store.recall(recalled, sources)
        for number, (source, parents) in enumerate(((sources[0], ()), (BEST, (0,)))):
            operator = Operator.TUNE if parents else Operator.SEED
            store.propose(Proposal(number, parents, operator, "cpp_v", source, ""))
            before = None if not parents else sources[0]
            proposal = store.history().pending[0]
            verdict = passed(source, "0" if parents else "", before)
            store.record(Candidate(proposal, verdict))
        record = remember(store.folder, store.manifest, store.history(), task)
    assert record.kernels[0].licences == ("BSD-3-Clause", str(task.folder / "LICENSE"))


def begun(tmp_path, task, **more):
    """A toy run that takes what memory has for it."""
    search, store = evolution(task.folder, tmp_path / "runs", **more)
    return search, store


def test_a_run_starts_from_them_judges_them_and_repeats_itself(tmp_path):
    task = toy_task(tmp_path / "task")
    kept(tmp_path, task, lineage(BEST, "# WRONG\n"), id="1" * 16)
    kept(tmp_path, task, lineage(cpp(16, 4, extra="Q = 1")), id="2" * 16)
    own = [remembering.SeedText("cpp_plain", SEED)]
    with RunStore.create(tmp_path / "runs", manifest()) as store:
        store.recall(*remembering.take(wanted(task), tmp_path / "none", lambda _: None))
        seeds = [*own, *remembering.seeds_from_memory(store, store.history().recalled)]
    assert len(seeds) == 3

    def session(budget):
        search, store = evolution(task.folder, tmp_path / "runs", seeds=seeds, budget=budget)
        with store:
            asyncio.run(search.run())
            return store.history(), store

    session(4)
    library.forget("1" * 16)  # memory is another one by now
    library.forget("2" * 16)
    history, store = session(12)
    assert history.lineage.counted == 12
    foreign = history.lineage.seeds[1:]
    assert sorted(type(c.verdict).__name__ for c in foreign) == ["Passed", "Rejected"]
    assert not any(
        c.proposal.parents[:1] == (r.id,)
        for r in foreign
        if isinstance(r.verdict, Rejected)
        for c in history.lineage
    )
    with RunStore.open(store.folder, write=False) as opened:
        setting = setting_of(opened, task)
    assert setting.priors == history.recalled.effects != ()
    # The toy's proposer reads no priors: what it was asked is the same with the stored ones.
    setting = replace(setting, operators=RandomProposer.operators)
    assert asyncio.run(replay(history, setting, RandomProposer())) is None


def test_a_repeated_run_gets_what_the_recorded_one_took(tmp_path):
    task = toy_task(tmp_path / "task")
    kept(tmp_path, task)
    with RunStore.create(tmp_path / "runs", manifest()) as store:
        store.recall(*remembering.take(wanted(task), tmp_path / "none", lambda _: None))
        (seed,) = remembering.seeds_from_memory(store, store.history().recalled)
        store.propose(seed.proposal(0))
        recorded = store.history()
    library.forget("ab" * 8)
    with RunStore.create(tmp_path / "again", manifest()) as store:
        remembering.repeat(store, recorded)
        assert remembering.seeds_from_memory(store, store.history().recalled) == [seed]
        assert store.history().recalled.effects == recorded.recalled.effects


def test_runs_of_a_folder_are_known_without_being_kept_until_they_are_forgotten(tmp_path):
    task = toy_task(tmp_path / "task")
    folder = stored(tmp_path, task, lineage())
    damaged = stored(tmp_path, task, lineage(), id="ef" * 8)
    (damaged / "lineage.sqlite").write_bytes(b"none")
    with RunStore.open(folder) as store:  # made without a device, and judged on one later
        store.append("machine", {"environment": {"device": "Toy 1"}})
    recalled, _ = recall.recall(wanted(task, device="Toy 1"), tmp_path / "old")
    assert [(s.run, s.why) for s in recalled.seeds] == [
        (folder.name, "the same task, on this device")
    ]
    unknown, _ = recall.recall(wanted(task), tmp_path / "old")
    assert unknown.seeds[0].why == "the same task, on a device of this target"
    library.forget("ab" * 8)
    assert recall.recall(wanted(task), tmp_path / "old")[0] == recall.Recalled()


def test_a_run_that_is_forgotten_stays_so_when_it_goes_on(tmp_path):
    task = toy_task(tmp_path / "task")
    folder = kept(tmp_path, task)
    assert [r.run for r in library.known()] == ["ab" * 8]
    library.forget("ab" * 8)
    with RunStore.open(folder, write=False) as store:
        assert library.keep(folder, store.manifest, store.history(), task) is None
    assert library.known() == []


@pytest.mark.parametrize("text", [b"\xff\xfe", b"1" * (library.MOST_BYTES + 1)])
def test_what_was_forgotten_does_not_come_back_when_the_list_is_damaged(
    tmp_path, own_library, text
):
    task = toy_task(tmp_path / "task")
    stored(tmp_path, task, lineage())
    library.forget("ab" * 8)
    (own_library / "forgotten").write_bytes(text)
    with pytest.raises(UserError, match="forgotten: "):
        recall.recall(wanted(task), tmp_path / "old")
    with pytest.raises(UserError, match="forgotten: "):
        library.forget("cd" * 8)
    assert (own_library / "forgotten").read_bytes() == text


def test_a_file_that_cannot_be_read_is_said_and_left_out(tmp_path, own_library):
    task = toy_task(tmp_path / "task")
    kept(tmp_path, task)
    (own_library / "0.json").write_text("{}")
    (own_library / "1.json").write_text("[" * 100_000)
    whole = json.loads((own_library / f"{'ab' * 8}.json").read_text())
    (own_library / "2.json").write_text(json.dumps({**whole, "run": "../../x"}))
    said = []
    assert [type(r) for r in library.known(said.append)] == [Remembered]
    assert len(said) == 3
    own_library.chmod(0o700)


def test_the_command_lists_shows_and_forgets(tmp_path, monkeypatch, capsys):
    task = toy_task(tmp_path / "task")
    (task.folder / "cpp_plain.py").write_text(SEED)

    def kagent(*words):
        return run(monkeypatch, capsys, "memory", *words)

    nothing = " ".join(kagent("list").out.split())
    assert "nothing is remembered yet" in nothing
    assert "a run is kept that has a kernel faster than its seeds, or has tried" in nothing
    folder = kept(tmp_path, task)
    assert folder.name in kagent("list").out
    assert json.loads(kagent("list", "--json").out)[0]["id"] == "ab" * 8
    shown = kagent("show", str(task.folder), "--runs", str(tmp_path / "none"))
    for words in ("#2 of", "the same task", "no licence is named", "cpu_vectors", "all calls"):
        assert words in shown.out, words
    assert kagent("forget").code != 0
    assert "nobody" in kagent("forget", "nobody").err
    assert "1 forgotten" in kagent("forget", folder.name).out
    assert "nothing of a related task" in kagent("show", str(task.folder)).out
    (folder.parent / "damaged").mkdir()
    (folder.parent / "damaged" / "run.json").write_text("{")
    everything = kagent("forget", "--all", "--runs", str(folder.parent))
    assert "1 forgotten" in everything.out
    assert "left out: " in everything.err


def test_one_flag_and_one_variable_turn_it_off(monkeypatch):
    assert load_config().memory
    assert not load_config(memory=False).memory
    monkeypatch.setenv("KAGENT_MEMORY", "0")
    assert not load_config().memory


def test_effects_by_regime_need_both_regimes():
    names = {e.regime for e in effects(lineage())}
    assert names == {Regime.ALL}  # every case of the toy is a long one
