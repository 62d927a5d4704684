"""The machine of an export: this one, or a worker of a cluster, which a stand-in for Ray calls."""

import re
import types

import pytest
from commands import run
from kagent import resources
from kagent.config.settings import load_config
from kagent.export import ray_host
from kagent.export.host import LocalHost, open_host
from kagent.export.measuring import LibraryEntrant, LibraryTimes, Measurement, TimedResult
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Comparison
from kagent_sandbox.errors import ChildDied, MachineError
from kagent_sandbox.replay.library_tests import Ran
from synthetic_library import SEEDS, cpu_library


class Failed(Exception):
    """Any of Ray's errors."""


class Lost(Failed):
    """An actor that is gone, as Ray tells it."""


class Remote:
    """A call of an actor, made at once and told when it is asked for."""

    def __init__(self, method):
        self.method = method

    def remote(self, *given):
        return lambda: self.method(*given)


class Actor:
    """Handle of a worker that answers what it is told to."""

    def __init__(self, answers, kagent):
        self.answers, self.kagent, self.asked = answers, kagent, []

    def __getattr__(self, name):
        def call(*given):
            self.asked.append((name, given))
            if name in ("describe", "close"):
                return {"kagent": self.kagent, "host": "a"}
            found = self.answers.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        return Remote(call)


@pytest.fixture
def cluster(monkeypatch):
    """Actors that are made, with the answers of each and the options it was made with."""
    made = types.SimpleNamespace(answers=[], actors=[], options=[], ended=[], kagent=None)

    def options(**given):
        made.options.append(given)

        def remote(_isolation):
            version = made.kagent or resources.version()
            made.actors.append(Actor(made.answers.pop(0), version))
            return made.actors[-1]

        return types.SimpleNamespace(remote=remote)

    ray = types.SimpleNamespace(
        exceptions=types.SimpleNamespace(
            RayActorError=Lost, ActorUnavailableError=Lost, RayError=Failed
        ),
        wait=lambda refs, **_: (list(refs), []),
        get=lambda ref: ref(),
        kill=lambda actor, **_: made.ended.append(actor),
        available_resources=dict,
        remote=lambda _cls: types.SimpleNamespace(options=options),
        nodes=lambda: [
            {"Alive": True, "NodeManagerHostname": "a", "Resources": {"CPU": 8, "GPU": 1}}
        ],
    )
    monkeypatch.setattr(ray_host, "connect", lambda _on: ray)
    return made


@pytest.fixture(scope="module")
def times():
    """Times of a task's kernel, of the two kinds of device."""
    (operator,) = [o for o in cpu_library().operators if o.task == "softmax"]
    (device,), (kernel, *_) = operator.devices, operator.kernels
    versus = Comparison("torch", 1.3, 1.2, float("inf"), 1.0, {})
    result = TimedResult(kernel.id, "", kernel.configs, kernel.regions, versus)
    compiled = {kernel.id: kernel.compiled}
    return {
        target: LibraryTimes(device, target, {kernel.id: result}, compiled, {"k": b"\x00cubin"})
        for target in ("cpu", "sm_90a")
    }


def ask(kind):
    task = load_task(SEEDS / "softmax")
    return Measurement(task, kind, [LibraryEntrant("a", "text", 1, {"case": 0})])


def test_each_kind_has_a_worker_and_the_order_stays(cluster, times):
    gpu, cpu = to_json(times["sm_90a"]), to_json(times["cpu"])
    ran = {"ok": to_json(Ran(3, (), "log"))}
    cluster.answers = [[{"ok": [cpu], "said": ["timed"]}], [{"ok": [gpu, gpu]}, ran]]
    said = []
    config = load_config(on="ray", jobs=2)
    with open_host(config, said.append) as host:
        found = host.measure([ask("cpu"), ask("gpu"), ask("gpu")], said.append)
        assert found == [times["cpu"], times["sm_90a"], times["sm_90a"]]
        assert host.run_tests("lib", {"f": b""}, gpu=True, path="p") == Ran(3, (), "log")
        assert not cluster.ended
    assert cluster.ended == cluster.actors
    assert [o.get("num_gpus", 0) for o in cluster.options] == [0, 1]
    assert "timed" in said
    (_, (texts, options)) = next(a for a in cluster.actors[1].asked if a[0] == "measure")
    assert options == {"jobs": 2, "isolation": "auto", "race_time": config.race_time}
    assert [t["kind"] for t in texts] == ["gpu", "gpu"]
    assert {"task.toml", "reference.py"} <= set(texts[0]["task"])
    assert texts[0]["entrants"] == [to_json(LibraryEntrant("a", "text", 1, {"case": 0}))]


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        ({"error": "MachineError", "text": "no isolation", "said": []}, MachineError, "no iso"),
        (Lost("trace\nthe node died"), ChildDied, "lost: the node died. Nothing was written"),
        (Failed("trace\nOSError: disk full"), MachineError, "worker failed: OSError: disk full"),
    ],
)
def test_what_fails_there_fails_here(cluster, answer, error, says):
    cluster.answers = [[answer]]
    with (
        pytest.raises(error, match=says),
        open_host(load_config(on="ray"), print) as host,
    ):
        host.measure([ask("cpu")], print)
    assert cluster.ended == cluster.actors


def test_a_node_with_another_kagent_is_refused(cluster):
    cluster.answers, cluster.kagent = [[]], "0.0.0"
    with (
        pytest.raises(MachineError, match=r"host a has kagent 0\.0\.0"),
        open_host(load_config(on="ray"), print) as host,
    ):
        host.measure([ask("cpu")], print)


def test_this_machine_is_the_host_unless_told_otherwise():
    with open_host(load_config(), print) as host:
        assert isinstance(host, LocalHost)
        assert host.has("cpu")


@pytest.mark.parametrize("command", ["export RUN --to lib", "certify lib"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--on slurm", "--on slurm writes scripts for evolve and campaign alone"),
        ("--on moon", "moon"),
        ("--on ray --device cpu", "--device cpu .* chooses a device of this machine"),
        ("--accelerator H100", "--accelerator H100 chooses among the nodes of a Ray cluster"),
    ],
)
def test_options_that_do_not_fit_are_refused(command, options, says, monkeypatch, capsys):
    ended = run(monkeypatch, capsys, *command.split(), *options.split())
    assert ended.code == 2
    assert re.search(says, ended.err.replace("\n", " "))
