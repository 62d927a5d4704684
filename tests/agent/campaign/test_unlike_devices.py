"""A campaign over unlike devices, on a cluster whose nodes have them: builders and judges are
simulated, all else is real.
"""

import contextlib
import json
import threading
from collections import Counter
from dataclasses import replace

import pytest
from commands import run as run_command
from kagent.asktell import judging
from kagent.campaign import worker
from kagent.campaign.file import CampaignFile, places_of, plan
from kagent.campaign.record import Campaign
from kagent.campaign.running import CampaignRunner
from kagent.evolve import session
from kagent.fleet.ray_cluster import ACCELERATOR, Node
from kagent.runs.lineage import Operator
from kagent.runs.store import read_history
from kagent.suite.record import ProblemState, read_record, write_record
from kagent.suite.worker import answer_to
from kagent.suite.workers import Workers
from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.records import to_json
from kagent_sandbox.errors import MachineError
from simulated_landscape import toy_source, toy_task
from simulated_machine import FakeJudge, machine

TARGETS = {"cpu": "cpu", "H100": "sm_90a", "B200": "sm_100a"}
PLACES = {"cpu": 1, "H100": 2, "B200": 1}
NODES = [
    Node("a", 8, 2, {ACCELERATOR: "H100"}),
    Node("b", 8, 1, {ACCELERATOR: "B200"}),
    Node("c", 8, 0, {}),
]


class Killed(BaseException):
    """The command was."""


class Slow(FakeJudge):
    """Beside torch all kernels do worse here than elsewhere."""

    def times(self, source):
        return {case: 2 * us for case, us in super().times(source).items()}


# Wide kernels are the better ones on one of the two GPUs alone.
JUDGES = {
    "cpu": FakeJudge,
    "H100": lambda: FakeJudge(wide=0.7),
    "B200": lambda: Slow(wide=1.3),
}


class Cluster:
    """The machines of all runs.

    Attributes:
        opened: Types of the devices of machines that were opened.
        most: Judges of each type that were there at once.
        killed_at: Number of the machine whose start is the end of the command.
        free: Devices of each type that a run may have.
    """

    def __init__(self):
        self.opened = []
        self.most = Counter()
        self.killed_at = None
        self.free = dict(PLACES)
        self._there = Counter()
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def open_machine(
        self, task, kind, config, secret, say, accept=lambda *_: None, judges=1, *, race=False
    ):
        name = config.accelerator
        assert (kind == "cpu") is (name == "cpu")
        with self._turn:
            self.opened.append(name)
            if len(self.opened) == self.killed_at:
                raise Killed
            if judges > self.free[name]:
                raise MachineError("a judge has not started on the Ray cluster within 300 s")
            self._there[name] += judges
            self.most[name] = max(self.most[name], self._there[name])
        facts = DeviceFacts(kind, name, TARGETS[name], f"{name} key", 1 << 30, 1 << 20, 1, 0.0)
        environment = {"device": name, "key": facts.key, "facts": to_json(facts)}
        accept(environment, facts)
        others = [JUDGES[name]() for _ in range(judges - 1)]
        try:
            yield machine(judge=JUDGES[name](), others=others), facts, environment
        finally:
            with self._turn:
                self._there[name] -= judges


@pytest.fixture
def cluster(monkeypatch):
    made = Cluster()
    monkeypatch.setattr("kagent.fleet.ray_fleet.connect", lambda _: None)
    monkeypatch.setattr("kagent.fleet.ray_fleet.nodes", lambda _: NODES)
    monkeypatch.setattr(session, "open_machine", made.open_machine)
    monkeypatch.setattr(judging, "open_machine", made.open_machine)

    def ask(_, request, tell):  # in this process, where machines are simulated
        answer = answer_to(worker.work, json.loads(json.dumps(request)), tell)
        tell(answer)
        return answer

    monkeypatch.setattr(Workers, "ask", ask)
    return made


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        text = (toy_task(tmp_path / name).folder / "task.toml").read_text()
        (tmp_path / name / "task.toml").write_text(text.replace('"toy"', f'"{name}"', 1))
        for prefix in ("cpp", "triton"):
            for flavour in ("plain", "wide"):
                path = tmp_path / name / f"{prefix}_{flavour}.py"
                path.write_text(toy_source(flavour=flavour))
    return ["./a", "./b"]


def runner(folder, campaign):
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    write_record(folder, campaign)
    places = {device: places_of(device, "ray") for device in campaign.devices}
    session = {"on": "ray"}
    return CampaignRunner(folder, campaign, session, lambda *_: None, lambda _: None, places)


def began(tasks, budget):
    asked = {"tasks": tasks, "devices": list(TARGETS), "seeds": 2, "budget": budget}
    return plan(tasks, CampaignFile.model_validate(asked), "ray")


def histories(folder, campaign):
    """By the runs' names."""
    return {r.name: read_history(folder / "runs" / r.run)[1] for r in campaign.runs if r.run}


@pytest.mark.nightly
def test_unlike_devices_search_apart_give_each_other_kernels_and_race_each_on_its_own(
    cluster, tasks, tmp_path
):
    first = runner(tmp_path, began(tasks, budget=24))
    first.run()
    before = histories(tmp_path, first.campaign)
    settings = replace(first.campaign.settings, budget=48)
    more = runner(tmp_path, replace(first.campaign, settings=settings).resumed())
    more.run()
    campaign = more.campaign
    after = histories(tmp_path, campaign)
    assert sum(h.lineage.counted for h in after.values()) <= 48
    assert set(cluster.opened) == set(TARGETS)
    assert cluster.most == PLACES

    # Kernels go from one kind of GPU to the other, where they are judged anew, and never to a CPU.
    device = {r.run: r.device for r in campaign.runs}
    moved = Counter()
    for run in campaign.runs:
        lineage = after[run.name].lineage
        for candidate in list(lineage)[len(before[run.name].lineage) :]:
            if candidate.proposal.operator is Operator.MIGRATE:
                home = candidate.proposal.hypothesis.split(" of ")[1].split(":")[0]
                moved[device[home], run.device] += 1
                assert [r.task for r in campaign.runs if r.run in (home, run.run)] == [run.task] * 2
    assert moved["H100", "B200"] > 0
    assert {pair for pair in moved if "cpu" in pair} <= {("cpu", "cpu")}

    # One race for each task and device, of what that device's own runs found.
    assert len(campaign.problems) == 2 * len(TARGETS)
    for problem in campaign.problems:
        progress = campaign.of(problem)
        assert (progress.state, progress.reason) == (ProblemState.DONE, "")
        store, history = read_history(tmp_path / "runs" / progress.run)
        runs = campaign.runs_of(problem)
        assert store.manifest.target == TARGETS[runs[0].device]
        assert store.manifest.environment["device"] == runs[0].device
        assert history.race.winner is not None
        units = ["unit 1"] if PLACES[runs[0].device] > 1 else []  # a second device, if there is one
        assert [r.unit for r in history.race.repeats] == units
        texts = {c.proposal.source for r in runs for c in after[r.name].lineage}
        assert {c.proposal.source for c in history.lineage} <= texts


def test_a_race_without_a_second_device_is_not_repeated(cluster, tasks, tmp_path):
    """Others of the cluster may have it."""
    cluster.free["H100"] = 1
    made = runner(tmp_path, began(tasks[:1], budget=12))
    made.run()
    (problem,) = [p for p in made.campaign.problems if made.campaign.runs_of(p)[0].device == "H100"]
    progress = made.campaign.of(problem)
    assert (progress.state, progress.reason) == (ProblemState.DONE, "")
    race = read_history(tmp_path / "runs" / progress.run)[1].race
    assert race.winner is not None
    assert race.repeats == ()


@pytest.mark.nightly
def test_a_campaign_that_is_killed_goes_on_on_all_its_devices(cluster, tasks, tmp_path):
    cluster.killed_at = 8
    with pytest.raises(Killed):
        runner(tmp_path, began(tasks[:1], budget=24)).run()
    campaign = read_record(tmp_path, Campaign)
    before = {n: list(h.lineage) for n, h in histories(tmp_path, campaign).items()}
    assert any(before.values())
    assert not any(campaign.of(p).finished for p in campaign.problems)
    cluster.killed_at = None
    again = runner(tmp_path, campaign.resumed())
    again.run()
    after = histories(tmp_path, again.campaign)
    for name, candidates in before.items():
        assert list(after[name].lineage)[: len(candidates)] == candidates
    assert len(after) == 6
    assert sum(h.lineage.counted for h in after.values()) == 24
    states = [again.campaign.of(p).state for p in again.campaign.problems]
    assert states == [ProblemState.DONE] * 3


def test_a_job_for_a_cluster_makes_the_library_there(tasks, tmp_path, monkeypatch, capsys):
    words = ["campaign", "./a", "--lang", "cpp", "--export", "lib", "--on", "slurm"]
    assert run_command(monkeypatch, capsys, *words).code == 0
    (script,) = tmp_path.glob("*.sbatch")
    assert "--export lib --on ray" in script.read_text()
