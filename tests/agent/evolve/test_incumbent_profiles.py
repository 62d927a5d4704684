"""Counters of incumbents, by a stand-in for ncu: a program that is started as ncu is, and prints
what it prints. Searches are simulated.
"""

import asyncio
import hashlib
import os
import threading
from dataclasses import replace

import pytest
from commands import run
from kagent.config.settings import Config
from kagent.evolve import profile as profiling_module
from kagent.evolve.device_slot import DeviceSlot
from kagent.evolve.incumbent_profiles import profiling
from kagent.evolve.loop import Evolution, Limits
from kagent.evolve.proposers import prompt_writer
from kagent.review.report_data import page_data
from kagent.runs.ask import Setting
from kagent.runs.events import Progress, Stop
from kagent.runs.profiles import stored_profiles
from kagent.runs.store import RunStore, read_history
from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.plan import Alloc, Buffer, KernelInfo, Launch, Plan, Pointer, TensorRef
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.task import load_task
from kagent_sandbox.device.table import own_unit
from kagent_sandbox.process.device_lock import DeviceLock
from simulated_evolution import SEEDS, RandomProposer, manifest
from simulated_landscape import N, toy_task
from simulated_machine import FakeBuilder, FakeJudge, machine

FACTS = DeviceFacts(
    *("gpu", "NVIDIA H100 80GB HBM3", "sm_90a", "H100, driver 580.159"),
    *(85 * 10**9, 50 << 20, 132, 3352.0),
)
BUDGET = 12
WORKS = """cat <<'END'
==PROF== Connected to process 1
"ID","Process ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum","{stall}"
"","","","byte","nsecond","ratio"
"0","1","k(float *)","2,000,000","10,000","3.0"
END
""".format(stall="smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio")
REFUSED = """echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA \
GPU Performance Counters on the target device 0."
exit 1
"""
COUNTED = "10.0 µs; DRAM 2.0 MB at 200 GB/s"


class GpuBuilder(FakeBuilder):
    """Its plans launch one kernel, which is a few bytes."""

    def build(self, request):
        built = super().build(request)
        if not hasattr(built, "plans"):
            return built
        key = hashlib.sha256(request.source.encode()).hexdigest()
        info = KernelInfo(key, "cuda", "k", (8,), registers=32)
        launch = Launch(key, (1000, 1, 1), (256, 1, 1), (Pointer(0, 0),))
        ref = TensorRef(0, 0, (4,), (1,), "float32")
        plan = Plan("sm_90a", (Buffer(0, "scratch", 16),), (Alloc(0), launch), (ref,), (info,))
        plans = {(0, case): plan for case in N}
        return replace(built, target="sm_90a", plans=plans, binaries={key: b"k"})


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Call it with a script to have that as ncu; the lines that the script wrote to `$CALLS`."""
    programs, calls = tmp_path / "programs", tmp_path / "calls"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("KAGENT_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setattr(profiling_module, "has_gpu", lambda: True)

    def use(script):
        program = programs / "ncu"
        program.write_text(f"#!/bin/sh\nCALLS={calls}\necho ncu $$ >>$CALLS\n{script}")
        program.chmod(0o755)

    def lines():
        return calls.read_text().splitlines() if calls.exists() else []

    use.calls = lines
    return use


def gpu_task(folder):
    """The toy task with its CPU's cases on a GPU, and the other way round."""
    toy_task(folder)
    path = folder / "task.toml"
    rest, cpu = path.read_text().split("[cpu]")
    cpu, gpu = cpu.split("[gpu]")
    path.write_text(f"{rest}[gpu]{cpu}[cpu]{gpu}")
    return load_task(folder)


class Session:
    """A session of a GPU's run on the simulated machine: new, or going on."""

    def __init__(self, tmp_path, budget=BUDGET, limit_s=60.0, proposer=None, take=None):
        self.task = gpu_task(tmp_path / "toy")
        runs = tmp_path / "runs"
        existing = [path.parent for path in runs.glob("*/run.json")]
        made = manifest(kind="gpu", target="sm_90a", environment={"facts": to_json(FACTS)})
        self.store = RunStore.open(existing[0]) if existing else RunStore.create(runs, made)
        self.profiles = [*stored_profiles(self.store.history()).values()]
        self.said = []
        proposer = proposer(self) if proposer else RandomProposer()
        operators = tuple(proposer.operators)
        self.take = take or profiling(self.task, "gpu", Config(), FACTS, limit_s=limit_s)
        self.evolution = Evolution(
            Setting(self.task, "gpu", "sm_90a", budget, 0, 4, operators),
            SEEDS,
            self.store,
            replace(machine(GpuBuilder(), FakeJudge()), profile=self.take),
            proposer,
            lambda e: self.said.append(e.text) if isinstance(e, Progress) else None,
            Limits(race=False),
            profiles=self.profiles,
        )

    def run(self):
        with self.store:
            assert asyncio.run(self.evolution.run()) is Stop.BUDGET
        return read_history(self.store.folder)[1]


class Waiting(RandomProposer):
    """Answers once an incumbent was profiled, or could not be."""

    def __init__(self, session):
        super().__init__()
        self.profiles = session.profiles

    async def propose(self, ask):
        while not self.profiles:
            await asyncio.sleep(0.01)
        return await super().propose(ask)


def profiled(history):
    return [e.data["candidate"] for e in history.events if e.kind == "profiled"]


def test_incumbents_get_counters_once_in_a_turn_on_the_device(tmp_path, ncu, monkeypatch):
    monkeypatch.setenv("KAGENT_API_KEY", "secret-of-an-endpoint")
    ncu(f"ls $KAGENT_LOCKS/gpu-* >>$CALLS\nenv | grep -c secret-of >>$CALLS\n{WORKS}")
    session = Session(tmp_path)
    history = session.run()
    lineage, found = history.lineage, profiled(history)
    assert found
    assert len(set(found)) == len(found)
    assert set(found) <= {c.id for c in lineage.promotions}
    assert lineage.incumbent.id in found
    calls = ncu.calls()
    assert sum(line.startswith("ncu ") for line in calls) == len(found)
    assert sum(line.endswith("-timing") for line in calls) == len(found)
    assert calls.count("0") == len(found)  # no key in its environment
    (best,) = (p for p in stored_profiles(history).values() if p.candidate == lineage.incumbent.id)
    worst = min(lineage.incumbent.verdict.timings, key=lambda t: t.roofline_share)
    assert best.case == worst.case
    assert best.kernels[0].counters["gpu__time_duration.sum"] == pytest.approx(10.0)
    assert f"ncu has counted what #{best.candidate} does on {best.case}" in session.said


def test_a_profile_changes_no_decision(tmp_path, ncu):
    ncu(WORKS)
    without = Session(tmp_path / "without")
    without.evolution._profiles._take = None
    with_profiles = Session(tmp_path / "with").run()
    plain = without.run()
    assert profiled(with_profiles)
    assert not profiled(plain)
    assert [c.proposal for c in plain.lineage] == [c.proposal for c in with_profiles.lineage]
    assert [c.verdict for c in plain.lineage] == [c.verdict for c in with_profiles.lineage]


def test_where_counters_are_not_permitted_ncu_is_asked_once(tmp_path, ncu):
    ncu(REFUSED)
    session = Session(tmp_path, proposer=Waiting)
    history = session.run()
    assert history.lineage.incumbent.id not in profiled(history)  # there were later ones
    assert len(ncu.calls()) == 1
    (kept,) = stored_profiles(history).values()
    assert kept.why_static.startswith("ncu: ERR_NVGPUCTRPERM")
    assert sum("no counters of kernels in this session" in text for text in session.said) == 1
    again = Session(tmp_path, take=session.take)  # as each answer of ask and tell on one machine
    again.run()
    assert len(ncu.calls()) == 1
    assert not any("no counters" in text for text in again.said)


def test_without_ncu_that_is_said_once(tmp_path, ncu, monkeypatch):
    monkeypatch.setattr(profiling_module, "find_ncu", lambda: None)
    session = Session(tmp_path)
    (kept,) = stored_profiles(session.run()).values()
    assert kept.why_static == "no ncu here"
    assert sum("no ncu here" in text for text in session.said) == 1


def test_an_ncu_that_hangs_is_killed_and_the_search_goes_on(tmp_path, ncu):
    ncu("exec sleep 3600")
    session = Session(tmp_path, limit_s=0.3)
    (kept,) = stored_profiles(session.run()).values()
    assert kept.why_static == "ncu took longer than 0.3 s"
    (call,) = ncu.calls()
    with pytest.raises(ProcessLookupError):
        os.kill(int(call.split()[1]), 0)


def test_a_search_that_is_interrupted_ends_ncu(tmp_path, ncu):
    ncu("exec sleep 3600")
    session = Session(tmp_path)

    async def interrupted():
        search = asyncio.create_task(session.evolution.run())
        while not ncu.calls():
            await asyncio.sleep(0.01)
        search.cancel()
        await asyncio.gather(search, return_exceptions=True)

    with session.store:
        asyncio.run(interrupted())
    assert read_history(session.store.folder)[1].stop is Stop.INTERRUPTED
    with pytest.raises(ProcessLookupError):
        os.kill(int(ncu.calls()[0].split()[1]), 0)


class Prompting(Waiting):
    """Writes the prompt of each ask."""

    def __init__(self, session):
        super().__init__(session)
        self.write = prompt_writer(session.task, session.store, Config(), session.profiles)
        self.prompts = session.prompts = []

    async def propose(self, ask):
        answer = await super().propose(ask)
        had = {p.candidate for p in self.profiles}
        self.prompts.append((ask.parent.id in had, self.write(ask).user))
        return answer


def test_the_next_prompts_about_that_parent_have_its_counters(tmp_path, ncu):
    ncu(WORKS)
    session = Session(tmp_path, proposer=Prompting)
    session.run()
    assert {had for had, _ in session.prompts} == {True, False}
    for had, prompt in session.prompts:
        assert (COUNTED in prompt) == had
    # A resumed run has them from its first prompt on, without asking ncu again.
    calls = len(ncu.calls())
    ncu(REFUSED)
    resumed = Session(tmp_path, budget=BUDGET + 3, proposer=Prompting)
    resumed.run()
    assert any(had and COUNTED in prompt for had, prompt in resumed.prompts)
    assert len(ncu.calls()) <= calls + 1  # one, if there was a new incumbent


def test_a_resumed_run_profiles_the_incumbent_that_has_no_counters(tmp_path, ncu):
    ncu(REFUSED)
    before = Session(tmp_path).run()
    Session(tmp_path).run()
    assert len(ncu.calls()) == 2  # each session asks once
    ncu(WORKS)
    after = Session(tmp_path).run()
    best = before.lineage.incumbent.id
    assert [p.why_static for p in stored_profiles(after).values() if p.candidate == best] == [""]
    Session(tmp_path).run()
    assert len(ncu.calls()) == 3


def test_show_and_the_report_have_the_counters(tmp_path, ncu, monkeypatch, capsys):
    ncu(WORKS)
    session = Session(tmp_path)
    history = session.run()
    best = history.lineage.incumbent.id
    folder = session.store.folder
    shown = run(monkeypatch, capsys, "show", folder, str(best)).out
    assert "profiles: what its kernels do on the device" in shown
    assert COUNTED in shown
    as_json = run(monkeypatch, capsys, "show", folder, str(best), "--json").out
    assert '"gpu__time_duration.sum": 10.0' in as_json
    rows = page_data(session.store.manifest, history)["candidates"]
    assert any(COUNTED in line for line in rows[best]["profile"])
    others = [row for row in rows if row["id"] not in profiled(history)]
    assert others
    assert all(row["profile"] == [] for row in others)


def test_none_is_taken_on_a_cpu_on_a_cluster_or_where_it_is_not_wanted(tmp_path):
    task = gpu_task(tmp_path / "toy")
    assert profiling(task, "gpu", Config(), FACTS) is not None
    assert profiling(task, "cpu", Config(), FACTS) is None
    assert profiling(task, "gpu", Config(on="ray"), FACTS) is None
    assert profiling(task, "gpu", Config(profile=False), FACTS) is None


def test_a_profile_waits_for_its_turn_on_the_device(tmp_path, ncu):
    ncu(WORKS)
    session = Session(tmp_path)
    history = session.run()
    take = profiling(session.task, "gpu", Config(), FACTS)
    best = history.lineage.incumbent
    built = GpuBuilder().build(session.evolution._evaluator._machine.request(best.proposal.source))
    calls, found = len(ncu.calls()), []
    name = own_unit("gpu")
    with DeviceLock(name).turn("timing"):
        waits = threading.Thread(
            target=lambda: found.append(take(best, built, threading.Event())), daemon=True
        )
        waits.start()
        while len(list((tmp_path / "locks" / name).glob("*-timing"))) < 2:
            waits.join(0.01)
        assert len(ncu.calls()) == calls
    waits.join()
    assert found[0].kernels[0].counters
    assert len(ncu.calls()) == calls + 1


def test_a_profile_lets_all_go_first_that_want_the_device():
    async def main():
        slot, order = DeviceSlot(1, quiet=False), []

        async def use(kind):
            async with getattr(slot, kind)():
                order.append(kind)

        async with slot.measure():
            tasks = [asyncio.create_task(use(kind)) for kind in ("spare", "check", "measure")]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(main()) == ["check", "measure", "spare"]
