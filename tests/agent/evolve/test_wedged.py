"""A device that no longer computes ends the run with what it has, and the run goes on later."""

import asyncio

import pytest
from commands import run
from kagent.runs.events import Stop
from kagent.runs.manifest import list_runs
from kagent.runs.store import RunStore
from kagent.search.tuner import Tuner
from kagent_sandbox.errors import DeviceWedged, MachineError
from simulated_evolution import evolution
from simulated_machine import FakeBuilder, FakeJudge, machine

BUDGET = 12


class Wedging(FakeJudge):
    """Works for `left` candidates; then the device is gone."""

    def __init__(self, left):
        super().__init__()
        self.left = left

    def check(self, built):
        if self.left == 0:
            raise DeviceWedged("toy no longer computes correctly; then resume the run")
        self.left -= 1
        return super().check(built)


def search(folder, judge):
    return evolution(
        folder / "task",
        folder / "runs",
        proposer=Tuner(),
        budget=BUDGET,
        machine=machine(FakeBuilder(), judge),
    )


def decisions(lineage):
    return [(c.proposal, c.verdict) for c in lineage]


def test_a_wedged_device_stops_the_run_and_keeps_it(tmp_path):
    evolving, store = search(tmp_path / "whole", FakeJudge())
    with store:
        asyncio.run(evolving.run())
    whole = decisions(evolving.lineage)

    evolving, store = search(tmp_path / "wedged", Wedging(6))
    with store, pytest.raises(DeviceWedged, match="resume the run"):
        asyncio.run(evolving.run())
    with RunStore.open(list_runs(tmp_path / "wedged" / "runs")[0]) as stored:
        history = stored.history()
    assert history.stop is Stop.FAILED
    assert decisions(history.lineage) == whole[: len(history.lineage)]
    assert len(history.lineage) >= 2  # what was checked, but not measured yet, is judged again
    assert history.pending

    evolving, store = search(tmp_path / "wedged", FakeJudge())
    with store:
        assert asyncio.run(evolving.run()) is Stop.BUDGET
    assert decisions(evolving.lineage) == whole


def test_the_command_says_so_and_fails(tmp_path, monkeypatch, capsys):
    def wedged(*_, **__):
        raise DeviceWedged("cpu no longer computes correctly. Restart the machine, then resume")

    monkeypatch.setattr("kagent.evolve.session.open_machine", wedged)
    ended = run(
        monkeypatch, capsys, "evolve", "softmax", "--lang", "cpp", "--runs", tmp_path / "runs"
    )
    assert ended.code == MachineError.exit_code
    assert "no longer computes correctly" in ended.err
    assert "Traceback" not in ended.err + ended.out
