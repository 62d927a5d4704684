"""Baselines are measured by a process that may fail, hang or die; figures are cached."""

import dataclasses
import os
import signal
import sys
import time

import pytest
import torch
import warm_python
from kagent_sandbox import cache
from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.data.task import load_task
from kagent_sandbox.device.baseline_calls import (
    BaselineUnavailableError,
    drawer,
    forget_compiled,
    make_call,
)
from kagent_sandbox.device.cpu.baselines import CpuBaseline
from kagent_sandbox.errors import ChildDied, DeviceFull
from kagent_sandbox.judge.timing import baselines
from kagent_sandbox.judge.timing.noise import Noise

pytestmark = pytest.mark.usefixtures("few_compiled", "warm_processes")
FACTS = DeviceFacts("cpu", "a cpu", "cpu", "a cpu, torch 0", 1 << 30, 1 << 20, 2, 0.0)

TOML = """
name = "double"
summary = "Twice x plus c."
entry = "double"
signature = "double(x, c) -> y"
dims = { N = "elements" }
bytes = "2 * N * itemsize"
flops = "0"
arguments = [{ name = "x", shape = ["N", 8] }, { name = "c", value = 3 }]
results = [{ name = "y", shape = ["N", 8], k = 2.0 }]
[gpu]
check = [{ name = "g", dtype = "float32", N = 8 }]
bench = [{ name = "gb", dtype = "float32", N = 8 }]
[cpu]
check = [{ name = "c", dtype = "float32", N = 8 }]
bench = [
  { name = "small", dtype = "float32", N = 64 },
  { name = "large", dtype = "float32", N = 4096 },
]
"""

REFERENCE = """
import os, signal
import torch

def inputs(case, generator, device):
    return {"x": torch.randn(case.dims["N"], 8, generator=generator, device=device)}

def reference(*, x, c):
    return 2 * x.double() + c

def eager(*, x, c):
    return 2 * x + c

def lost(*, x, c):
    from kagent_sandbox.device.baseline_calls import ContextLostError
    os.environ["LOST"] = "1"
    raise ContextLostError("CUDA_ERROR_ASSERT")

def elsewhere(*, x, c):
    if "LOST" in os.environ:
        raise RuntimeError("the context was lost")
    return eager(x=x, c=c)

def die(*, x, c):
    os.kill(os.getpid(), signal.SIGSEGV)

def full(*, x, c):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has")

def fail(*, x, c):
    raise ValueError("refuses rows of 8\\nand more text")

def experts():
    return {EXPERTS}
"""


def make_task(folder, experts="{}"):
    (folder / "task.toml").write_text(TOML)
    (folder / "reference.py").write_text(REFERENCE.replace("{EXPERTS}", experts))
    return load_task(folder)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def _only_eager(monkeypatch):
    """The worker without torch.compile, which takes seconds to import."""
    worker = "kagent_sandbox.device.baseline_calls"
    code = (
        f"{warm_python.PROGRAM}\n"
        f"import {worker} as b, kagent_sandbox.judge.timing.baseline_worker as w; "
        "names = w.all_names; "
        "w.all_names = lambda r, k: [n for n in names(r, k) if not n.startswith('compile')]; "
        "w.main()"
    )
    monkeypatch.setattr(baselines, "_WORKER", ("-c", code))


def fake_worker(monkeypatch, body):
    """A worker without torch: `body` sees the request and `tell`."""
    code = (
        "import json, sys, time\n"
        "from kagent_sandbox.device import baseline_calls\n"
        "request = json.load(sys.stdin)\n"
        "tell = lambda **answer: print(json.dumps(answer), flush=True)\n"
        f"{body}\n"
        "tell(complete=True)\n"
    )
    monkeypatch.setattr(baselines, "_WORKER", ("-c", code))


def test_eager_and_compiled_are_measured(tmp_path):
    lines = []
    task = make_task(tmp_path)
    found = baselines.measure_baselines(task, "cpu", FACTS, lines.append, cases=task.cpu.bench[1:])
    assert {c: set(t) for c, t in found.us.items()} == {"large": {"eager", "compile"}}
    assert all(us > 0 for times in found.us.values() for us in times.values())
    assert len(lines) == 2
    assert not found.failed
    name, us = found.fastest("large")
    assert us == min(found.us["large"].values()) == found.us["large"][name]
    assert found.fastest_us == {"large": us}


@pytest.mark.usefixtures("_only_eager")
def test_failing_baselines_are_recorded_and_the_rest_goes_on(tmp_path):
    task = make_task(tmp_path, "{'a dies': die, 'b fails': fail, 'c works': eager}")
    found = baselines.measure_baselines(task, "cpu", FACTS, cases=task.cpu.bench[:1])
    assert set(found.us["small"]) == {"eager", "c works"}
    assert found.failed["small"] == {
        "a dies": "its process died of SIGSEGV, twice",
        "b fails": "ValueError: refuses rows of 8",
    }


@pytest.mark.usefixtures("_only_eager")
def test_what_follows_a_baseline_that_ends_the_context_is_measured_in_another_process(tmp_path):
    task = make_task(tmp_path, "{'a lost': lost, 'b works': elsewhere}")
    found = baselines.measure_baselines(task, "cpu", FACTS)
    assert {c: set(us) for c, us in found.us.items()} == {
        "small": {"eager", "b works"},
        "large": {"eager", "b works"},
    }
    why = {"a lost": "it ended the device's context: CUDA_ERROR_ASSERT"}
    assert found.failed == {"small": why, "large": why}


@pytest.mark.usefixtures("_only_eager")
def test_a_baseline_that_lacks_memory_which_others_may_hold_is_no_failure(tmp_path):
    """Else the next fastest would be torch's best, and be kept for a day."""
    task = make_task(tmp_path, "{'best': full}")
    why = r"small: best: CUDA out of memory\. Tried to allocate 12\.00 GiB\."
    with pytest.raises(DeviceFull, match=why):
        baselines.measure_baselines(task, "cpu", FACTS)
    assert baselines.stored_baselines(task, "cpu", FACTS) is None


def test_a_baseline_that_dies_is_tried_once_more_without_what_was_compiled_before(
    tmp_path, monkeypatch
):
    """torch.compile with max-autotune once died of SIGSEGV beside nine searches that filled the
    same folder of compiled code: without it, the best of torch would have been slower.
    """
    fake_worker(
        monkeypatch,
        "import os, signal\n"
        "tell(start=['small', 'eager'])\n"
        "folder = os.environ['TORCHINDUCTOR_CACHE_DIR']\n"
        "if 'cache' in folder.split(os.sep):\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "inside = os.environ['TRITON_CACHE_DIR'].startswith(folder) and os.path.isdir(folder)\n"
        "tell(done=['small', 'eager'], us=7.5, captured=inside, peak_bytes=0)\n",
    )
    lines = []
    task = make_task(tmp_path)
    found = baselines.measure_baselines(task, "cpu", FACTS, lines.append, cases=task.cpu.bench[:1])
    assert found.us == {"small": {"eager": 7.5}}
    assert found.captured == {"small": {"eager": True}}
    assert not found.failed
    assert "died of SIGSEGV; once more" in lines[0]


def test_a_baseline_that_hangs_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "ITEM_LIMIT_S", 1.0)
    fake_worker(
        monkeypatch,
        "if not request['skip']:\n    tell(start=['small', 'eager'])\n    time.sleep(60)\n",
    )
    task = make_task(tmp_path)
    found = baselines.measure_baselines(task, "cpu", FACTS, cases=task.cpu.bench[:1])
    assert found.us == {"small": {}}
    assert found.failed == {"small": {"eager": "its process took longer than 1 s"}}
    assert found.fastest_us == {}
    with pytest.raises(KeyError, match="no baseline of torch ran in case small"):
        found.fastest("small")


def test_figures_are_cached_by_device_and_task(tmp_path, monkeypatch):
    fake_worker(
        monkeypatch,
        "for call in request['calls']:\n"
        "    tell(done=[call['case']['name'], 'eager'], us=7.5, captured=True, peak_bytes=64)\n",
    )
    task = make_task(tmp_path)
    lines = []

    def measure(task, facts=FACTS, **more):
        lines.clear()
        found = baselines.measure_baselines(task, "cpu", facts, lines.append, **more)
        return found, len(lines)

    first, said = measure(task)
    assert said == 2
    assert first.captured == {"small": {"eager": True}, "large": {"eager": True}}
    assert first.peak_bytes["large"] == {"eager": 64}
    assert time.time() - first.measured_at < 60
    assert first.state["load_average"] >= 0
    assert measure(task) == (first, 1)
    assert lines[0].startswith("baselines were measured ")
    assert measure(task, dataclasses.replace(FACTS, key="another"))[1] == 2
    assert measure(task, cached=False)[1] == 2
    assert measure(task, cases=task.cpu.bench[:1])[1] == 1
    (tmp_path / "reference.py").write_text((tmp_path / "reference.py").read_text() + "\n# new\n")
    assert measure(load_task(tmp_path))[1] == 2


QUIET = Noise(300.0, 1.0, 0.01)


@pytest.mark.parametrize(
    ("hours", "noise", "why"),
    [
        (1, QUIET, None),
        (1, dataclasses.replace(QUIET, kernel_us=320.0, pair_sd=0.025), None),
        (25, QUIET, "the stored ones were measured 25 h ago"),
        (-1, QUIET, "the stored ones were measured at an unknown time"),
        (1, dataclasses.replace(QUIET, kernel_us=390.0), "a copy took 300 µs and takes 390 µs"),
        (1, dataclasses.replace(QUIET, pair_sd=0.06), "pairs of blocks differed by 1.0%, and do"),
        (1, dataclasses.replace(QUIET, factor=2.5), "intervals were widened 1.0×, and are 2.5×"),
    ],
)
def test_stored_figures_are_used_for_a_day_while_the_machine_is_as_noisy(hours, noise, why):
    at = time.time() - 3600 * hours
    known = baselines.Baselines({}, {}, {}, measured_at=at, noise=QUIET)
    found = baselines._outdated(known, noise)
    assert found is None if why is None else found.startswith(why)


def test_figures_without_a_date_are_of_an_earlier_kagent():
    found = baselines._outdated(baselines.Baselines({}, {}, {}), QUIET)
    assert found == "the stored ones were measured at an unknown time"


def test_a_process_that_was_started_ahead_measures_and_then_ends(tmp_path, monkeypatch):
    fake_worker(
        monkeypatch,
        "import os\n"
        "ahead = baseline_calls.AHEAD in sys.argv\n"
        "tell(done=['small', 'eager'], us=float(os.getpid()), captured=ahead, peak_bytes=0)\n"
        "tell(complete=True)\n"
        "time.sleep(60)\n",  # as the compiler's processes, which take seconds to end
    )
    task = make_task(tmp_path)
    with baselines.BaselineWorker.ahead("cpu") as worker:
        found = baselines.measure_baselines(
            task, "cpu", FACTS, cases=task.cpu.bench[:1], worker=worker
        )
    assert found.captured == {"small": {"eager": True}}
    number = int(found.us["small"]["eager"])
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_a_process_that_was_started_ahead_and_is_not_needed_ends(monkeypatch):
    fake_worker(monkeypatch, "")
    with baselines.BaselineWorker.ahead("cpu") as worker:
        process = worker._process
        assert process.poll() is None  # it waits to be asked
    assert process.returncode == -signal.SIGKILL
    worker.close()  # nothing is left to be done


def test_a_process_that_died_before_it_was_asked_is_replaced(tmp_path, monkeypatch):
    body = "tell(done=['small', 'eager'], us=7.5, captured=False, peak_bytes=0)\n"
    fake_worker(monkeypatch, body)
    task = make_task(tmp_path)
    with baselines.BaselineWorker.ahead("cpu") as worker:
        worker._process.kill()
        worker._process.wait()
        found = baselines.measure_baselines(
            task, "cpu", FACTS, cases=task.cpu.bench[:1], worker=worker
        )
    assert found.us == {"small": {"eager": 7.5}}


def test_a_worker_that_leaves_without_a_last_word_is_an_error(tmp_path, monkeypatch):
    fake_worker(monkeypatch, "sys.exit()\n")
    with pytest.raises(ChildDied, match="exited with status 0"):
        baselines.measure_baselines(make_task(tmp_path), "cpu", FACTS)


def test_a_worker_that_does_not_start_is_an_error_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "_WORKER", ("-c", "raise SystemExit('no torch here')"))
    with pytest.raises(ChildDied, match="no torch here"):
        baselines.measure_baselines(make_task(tmp_path), "cpu", FACTS)


def test_a_damaged_cache_is_measured_again(tmp_path):
    cache.save("figures", FACTS)
    assert cache.load("figures", DeviceFacts) == FACTS
    (cache.cache_folder() / "figures.json").write_text("{")
    assert cache.load("figures", DeviceFacts) is None
    assert cache.load("absent", DeviceFacts) is None


def test_calls_travel_as_json_and_draw_the_same_inputs(tmp_path):
    task = make_task(tmp_path)
    call = baselines.baseline_call(task, task.cpu.bench[0], "eager", seed=5)
    copy = from_json(type(call), to_json(call))
    assert copy == call
    one, two = (make_call(c, torch.device("cpu")) for c in (call, copy))
    assert one.keywords["c"] == 3
    assert one().equal(two())
    assert one().equal(2 * one.keywords["x"] + 3)
    other = make_call(dataclasses.replace(call, seed=6), torch.device("cpu"))
    assert not other.keywords["x"].equal(one.keywords["x"])


def test_inputs_have_the_strides_of_the_case(tmp_path):
    task = make_task(tmp_path)
    case = task.cpu.bench[0].model_copy(update={"noncontiguous": True})
    x = make_call(baselines.baseline_call(task, case, "eager", 1), torch.device("cpu")).keywords[
        "x"
    ]
    assert x.stride() == (16, 1)


def test_an_expert_that_is_not_there(tmp_path):
    task = make_task(tmp_path)
    call = baselines.baseline_call(task, task.cpu.bench[0], "quack", seed=5)
    with pytest.raises(BaselineUnavailableError, match="quack"):
        make_call(call, torch.device("cpu"))


def test_where_torchs_compiler_is_off_it_is_not_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setattr(torch, "compile", None)  # calling it would fail
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    task = make_task(tmp_path)
    call = make_call(
        baselines.baseline_call(task, task.cpu.bench[0], "compile", 1), torch.device("cpu")
    )
    assert call.func.__name__ == "eager"
    assert torch.equal(call(), 2 * call.keywords["x"] + 3)
    forget_compiled()
    assert "torch._dynamo" not in sys.modules


def test_each_turn_of_samples_has_inputs_of_its_own_which_all_baselines_share(tmp_path):
    """Where a time depends on the draw, one draw would decide the verdict."""
    task = make_task(tmp_path)
    calls = [baselines.baseline_call(task, task.cpu.bench[1], "eager", 7)] * 2
    draw, seen = drawer(calls[0], torch.device("cpu")), [[], []]
    ready = []
    for call, values in zip(calls, seen, strict=True):
        made = make_call(call, torch.device("cpu"))

        def watched(*, x, c, made=made, values=values):
            values.append(float(x[0, 0]))
            return made.func(x=x, c=c)

        ready.append(CpuBaseline(type(made)(watched, **made.keywords), draw))
    for values in seen:
        values.clear()
    for _ in range(3):
        for baseline in ready:
            baseline.samples(2)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 3


def test_samples_rotate_over_copies_of_the_inputs(tmp_path):
    task = make_task(tmp_path)
    call = make_call(
        baselines.baseline_call(task, task.cpu.bench[1], "eager", 1), torch.device("cpu")
    )
    seen = []

    def watched(*, x, c):
        seen.append(x.data_ptr())
        return call.func(x=x, c=c)

    baseline = CpuBaseline(type(call)(watched, **call.keywords))
    seen.clear()
    assert len(baseline.samples(4)) == 4
    assert len(set(seen)) >= 3
