"""SIGKILL at random moments: what was recorded stays, and the run goes on as it would have."""

import asyncio
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_python
from kagent.runs.events import Stop
from kagent.runs.manifest import list_runs
from kagent.runs.store import RunStore
from kagent.search.tuner import Tuner
from simulated_evolution import evolution
from simulated_machine import FakeBuilder, FakeJudge, machine

BUDGET = 30
PROGRAM = f"""{warm_python.PROGRAM}
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from simulated_evolution import evolution
from simulated_machine import FakeBuilder, FakeJudge, machine
from kagent.search.tuner import Tuner

search, store = evolution(
    Path(sys.argv[1]), Path(sys.argv[2]), proposer=Tuner(), budget={BUDGET},
    machine=machine(FakeBuilder(0.06), FakeJudge(0.01)),
)
print("ready", flush=True)
with store:
    asyncio.run(search.run())
"""


def decisions(lineage):
    return [(c.proposal, c.verdict) for c in lineage]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    search, store = evolution(
        folder / "task",
        folder / "runs",
        proposer=Tuner(),
        budget=BUDGET,
        machine=machine(FakeBuilder(), FakeJudge()),
    )
    with store:
        assert asyncio.run(search.run()) is Stop.BUDGET
    return decisions(search.lineage)


@pytest.mark.nightly
@pytest.mark.parametrize("attempt", range(2))
def test_killed_at_random_moments_and_resumed(tmp_path, uninterrupted, attempt):
    rng = random.Random()
    recorded = []
    for session in range(40):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "task"), str(tmp_path / "runs")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            # later and later: a slow machine gets there, too, and in a few sessions
            time.sleep(rng.uniform(0.0, 0.4 + session / 20))
            process.send_signal(signal.SIGKILL)
        with RunStore.open(list_runs(tmp_path / "runs")[0]) as store:
            history = store.history()
        assert decisions(history.lineage)[: len(recorded)] == recorded, "a record was lost"
        recorded = decisions(history.lineage)
        assert [p.id for p in history.pending] == list(
            range(len(recorded), len(recorded) + len(history.pending))
        )
        assert len(history.pending) <= 4
        if history.stop is Stop.BUDGET:
            break
    assert recorded == uninterrupted
