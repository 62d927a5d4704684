"""One run with two real judges: this machine's CPU counts as two devices, on which they take turns.

Whether its times are those of equal devices is chance here, so that any difference admits. What is
refused is in test_judges.py.
"""

import asyncio
import math
import re

import pytest
from doubling_task import PARALLEL, PLAIN, REFERENCE, TASK, kernel_of_passes
from kagent.config.settings import load_config
from kagent.evolve import admission, units
from kagent.evolve.admission import ComparedUnits
from kagent.evolve.rematch import wants_rematch
from kagent.evolve.session import evolve
from kagent.evolve.stored_run import setting_of
from kagent.fleet.fleet import LocalFleet
from kagent.runs.events import Stop
from kagent.runs.lineage import Lineage
from kagent.runs.store import RunStore
from kagent.search.tuner import Tuner
from kagent.tasks import find_task
from kagent_sandbox.data.records import from_json
from kagent_sandbox.data.verdict import Passed
from replaying import replay


@pytest.mark.nightly
@pytest.mark.usefixtures("uncompiled", "shared", "brief_timing")
def test_a_second_judge_is_admitted_gives_verdicts_and_repeats_the_race(tmp_path, monkeypatch):
    task = tmp_path / "double"
    task.mkdir()
    less = re.sub(r"  { name = \"(odd|long)\".*\n", "", TASK)
    (task / "task.toml").write_text(less.replace("M = 64,", "M = 256,"))
    (task / "reference.py").write_text(REFERENCE)
    for name, source in (
        ("cpp_parallel", kernel_of_passes(PARALLEL + PLAIN)),
        ("cpp_plain", kernel_of_passes(PLAIN, passes=4)),
    ):
        few = re.sub("TUNE = .*", 'TUNE = {"PASSES": [1, 3, 4, 5, 6, 8]}', source)
        (task / f"{name}.py").write_text(few)
    monkeypatch.setattr(LocalFleet, "seats", lambda *_: 2)
    for module, name in (
        (units, "NOISIER"),
        (units, "CEILINGS_APART"),
        (admission, "RATIOS_APART"),
        (admission, "MOST_DOUBT"),
    ):
        monkeypatch.setattr(module, name, math.inf)
    config = load_config(
        runs=tmp_path / "runs",
        lang="cpp",
        budget=4,
        judges=2,
        race_time=1.0,  # of three races
        early_stop=False,
        memory=False,
    )
    said = []
    outcome = evolve(str(task), config, lambda event: said.append(str(event)))
    assert outcome.stop is Stop.BUDGET
    history = outcome.history
    assert history.lineage.counted == 4
    assert [c.id for c in history.lineage] == list(range(len(history.lineage)))

    (event,) = [e for e in history.events if e.kind == "units"]
    compared = from_json(ComparedUnits, event.data)
    (other,) = compared.others
    assert other.why_not == ""
    assert other.unit == f"{compared.home}#2"
    assert any(f"{other.unit} judges, too" in text for text in said)
    assert compared.spread == pytest.approx(math.sqrt(other.squares))
    assert 0 < compared.spread <= other.apart

    lineage, judged = Lineage(), set()
    for number in range(len(history.lineage)):
        candidate = history.lineage.as_recorded(number)
        if isinstance(candidate.verdict, Passed) and candidate.proposal.ask is not None:
            judged.add(candidate.unit)
            assert not wants_rematch(lineage, candidate.verdict)
        lineage.record(candidate)
    assert judged == {compared.home, other.unit}

    assert history.race.winner is not None
    (repeat,) = history.race.repeats
    assert repeat.unit == other.unit
    assert repeat.race.overall.keys() == history.race.race.overall.keys()
    with RunStore.open(outcome.folder, write=False) as store:
        decided = replay(store.history(), setting_of(store, find_task(str(task))), Tuner())
        assert asyncio.run(decided) is None
