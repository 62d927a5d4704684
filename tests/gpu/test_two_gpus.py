"""Several GPUs of one machine: who sees which, who waits for whom, and runs that use two."""

import contextlib
import json
import subprocess
import sys
import threading

import pytest
from kagent_sandbox.data.verdict import Passed, Rejected
from kagent_sandbox.device.detect import gpu_count, gpu_uuid
from kagent_sandbox.device.table import find_device
from test_gpu_judge import REFERENCE, SEED, TASK, source

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs"),
    pytest.mark.usefixtures("uncompiled"),
]
CONTEXT_MIB = 100
"""Less than any process takes of a GPU that it uses, and more than others come and go with."""
HOLD = """
import sys
from kagent_sandbox.process.device_lock import DeviceLock
with DeviceLock(sys.argv[1]).turn("timing"):
    print(flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("double")
    (made / "task.toml").write_text(TASK)
    (made / "reference.py").write_text(REFERENCE)
    (made / "triton_blocks.py").write_text(source())
    return made


@contextlib.contextmanager
def judge(folder, index, say=None):
    from kagent_sandbox.judge.client import JudgeClient

    with JudgeClient(folder, "gpu", SEED, index=index, eager_only=True, on_wait=say) as made:
        yield made


def built(folder, builder, facts):
    from kagent.evolve.open_machine import request_maker, search_cases
    from kagent_sandbox.data.task import load_task

    task = load_task(folder)
    made = builder.build(request_maker(task, facts, search_cases(task, "gpu", SEED), 1)(source()))
    assert not isinstance(made, Rejected), made
    return made


def used_mib():
    """Memory in use by UUID."""
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [line.split(",") for line in done.stdout.splitlines()]
    return {uuid.strip(): int(used) for uuid, used in rows}


@contextlib.contextmanager
def held(index):
    """A process that has a GPU's turn."""
    name = find_device("gpu").unit_name(index)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        yield other


def kagent(*words, codes=(0, 3)):  # 3: a verdict, TIE too
    done = subprocess.run(
        [sys.executable, "-m", "kagent", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode in codes, done.stdout[-2000:] + done.stderr
    return done.stdout


def only_run(runs):
    from kagent.runs.manifest import list_runs
    from kagent.runs.store import read_history

    (run,) = list_runs(runs)
    return read_history(run)


def test_a_judge_of_the_second_gpu_has_nothing_on_the_first(folder, builder):
    before = used_mib()
    with judge(folder, 1) as client:
        candidate = built(folder, builder, client.facts)
        errors = client.check(candidate)
        assert not isinstance(errors, Rejected)
        assert isinstance(client.measure(candidate, errors), Passed)
        grown = {unit: mib - before[unit] for unit, mib in used_mib().items()}
        assert client.facts.unit == gpu_uuid(1)
    assert grown[gpu_uuid(1)] > CONTEXT_MIB
    assert grown[gpu_uuid(0)] < CONTEXT_MIB


def test_who_has_one_gpu_keeps_nobody_from_the_other(folder):
    told, waits = [], threading.Event()

    def say(text):
        told.append(text)
        waits.set()

    def open_first():
        with judge(folder, 0, say):
            pass

    with held(0) as other:
        with judge(folder, 1, told.append) as second:
            assert second.noise().factor > 0
        assert told == []
        first = threading.Thread(target=open_first, daemon=True)
        first.start()
        assert waits.wait(60)
        other.stdin.close()
    first.join(120)
    assert not first.is_alive()
    assert told == [f"the device is shared: waiting for process {other.pid} (-c gpu-{gpu_uuid(0)})"]


@pytest.mark.parametrize("name", ["cuda:1", "UUID"])
def test_a_run_is_judged_on_the_gpu_that_is_named(folder, tmp_path, name):
    device = gpu_uuid(1) if name == "UUID" else name
    kagent(
        *("evolve", folder, "--lang", "triton", "--budget", 1, "--no-early-stop"),
        *("--runs", tmp_path, "--device", device),
    )
    store, _ = only_run(tmp_path)
    assert store.manifest.environment["facts"]["unit"] == gpu_uuid(1)


def test_two_gpus_share_a_run(folder, tmp_path):
    kagent(
        *("evolve", folder, "--lang", "triton", "--budget", 6, "--no-early-stop"),
        *("--runs", tmp_path, "--judges", 2),
    )
    store, history = only_run(tmp_path)
    assert history.lineage.counted > 0
    assert store.manifest.environment["facts"]["unit"] == gpu_uuid(0)
    (event,) = [e for e in history.events if e.kind == "units"]
    assert event.data["home"] == gpu_uuid(0)
    others = [other["unit"] for other in event.data["others"] if not other["why_not"]]
    assert others in ([], [gpu_uuid(1)])  # one whose ratios are others does not judge
    judged = {c.unit for c in history.lineage if isinstance(c.verdict, Passed)}
    assert judged <= {gpu_uuid(0), *others}
    assert [repeat.unit for repeat in history.race.repeats] == others


def test_a_campaign_has_a_run_on_each(folder, tmp_path):
    text = kagent(
        *("campaign", folder, "--device", "cuda:0", "--device", "cuda:1", "--budget", 4),
        *("--lang", "triton", "--to", tmp_path / "night"),
        codes=(0, 1),  # 1: no final race has a winner
    )
    assert "cuda:1" in text
    from kagent.runs.manifest import list_runs, read_manifest

    record = json.loads((tmp_path / "night" / "campaign.json").read_text())
    assert {run["device"] for run in record["runs"]} == {"cuda:0", "cuda:1"}
    units = {
        read_manifest(run).environment["facts"]["unit"]
        for run in list_runs(tmp_path / "night" / "runs")
        if read_manifest(run).environment
    }
    assert units == {gpu_uuid(0), gpu_uuid(1)}
