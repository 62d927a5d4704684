"""kagent profile: static facts of plans, ncu's table, and what is said of them."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent.evolve import profile
from kagent.prompting.hardware import hardware
from kagent.prompting.profiles import in_words
from kagent.runs import profiles
from kagent.runs.store import read_history
from kagent_sandbox.data.plan import Alloc, Buffer, KernelInfo, Launch, Plan, Pointer, TensorRef

RUNS = Path(__file__).parents[3] / "runs"
H100 = hardware("sm_90a", None, None)


def plan(registers=32, block=(256, 1, 1), shared=0, grid=(1000, 1, 1), **more):
    info = KernelInfo("0" * 64, "cuda", "k", (8,), registers=registers, **more)
    launch = Launch(info.hash, grid, block, (Pointer(0, 0),), shared=shared)
    ref = TensorRef(0, 0, (4,), (1,), "float32")
    return Plan("sm_90a", (Buffer(0, "scratch", 16),), (Alloc(0), launch), (ref,), (info,))


def only(**facts):
    (kernel,) = profile.static_profile(plan(**facts), H100)
    return kernel


def test_occupancy_is_that_of_the_cuda_occupancy_calculator():
    assert only(registers=32, block=(256, 1, 1)).occupancy == 1.0
    eighty = only(registers=80, block=(256, 1, 1))
    assert (eighty.blocks_per_unit, eighty.occupancy, eighty.limited_by) == (
        3,
        0.375,
        ("registers",),
    )
    held = only(registers=32, shared=100 << 10)
    assert (held.blocks_per_unit, held.limited_by) == (2, ("shared memory",))


def test_waves_are_blocks_over_those_that_run_at_once():
    kernel = only(registers=32, block=(1024, 1, 1), grid=(H100.units * 2 * 3, 1, 1))
    assert kernel.waves == pytest.approx(3.0)


def test_what_is_wasted_is_said():
    kernel = only(
        registers=255, spill_bytes=128, load_bytes={4: 10}, block=(256, 1, 1),
        grid=(H100.units + H100.units // 4, 1, 1),
    )  # fmt: skip
    words = " ".join(in_words(kernel, H100))
    assert "spills 128 bytes" in words
    assert "loads at most 4 bytes" in words
    assert "25% of the device" in words


CSV = """==PROF== Connected to process 1
some output of the program
"ID","Process ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum","{stall}","other"
"","","","byte","nsecond","ratio","%"
"0","1","k(float *)","2,000,000","10,000","3.0","n/a"
"1","1","k2","1000","500","n/a","1"
""".format(stall="smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio")


def test_the_table_of_ncu_is_read_with_its_units():
    first, second = profile.read_csv(CSV)
    assert first["dram__bytes_read.sum"] == 2e6
    assert first["gpu__time_duration.sum"] == pytest.approx(10.0)  # µs
    assert "other" not in first
    assert second == {"dram__bytes_read.sum": 1000.0, "gpu__time_duration.sum": 0.5}


@given(st.text())
def test_any_output_of_ncu_is_read_without_an_error(text):
    list(profile.read_csv(text))
    list(profile.read_csv('"ID","gpu__time_duration.sum"\n' + text))


def test_counters_are_put_into_words():
    rows = [next(profile.read_csv(CSV))]
    (kernel,) = profile.with_counters([only()], rows)
    words = in_words(kernel, H100)
    assert words[0].startswith("10.0 µs; DRAM 2.0 MB at 200 GB/s")
    assert "waiting for global or local memory 100%" in words[1]


def test_a_profile_is_stored_with_its_run():
    _, history = read_history(RUNS / "softmax-ask-tell")
    found = profiles.Profile(14, "c", "H100", (only(),), "no ncu here")
    event = replace(history.events[-1], kind="profiled", data=profiles.to_event(found))
    assert profiles.stored_profiles(replace(history, events=(event,))) == {(14, "c"): found}


def kagent(*words):
    command = [sys.executable, "-m", "kagent", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.nightly
@pytest.mark.usefixtures("warm_processes")
def test_without_a_gpu_there_are_static_facts_and_it_says_so(tmp_path):
    from kagent_sandbox.device.detect import has_gpu

    if has_gpu():
        pytest.skip("this machine has a GPU")
    shutil.copytree(RUNS / "softmax-ask-tell", tmp_path / "run")
    words = ("profile", "run", "1", "--runs", str(tmp_path))
    done = kagent(*words, "--case", "bf16_16384x4096")
    assert done.returncode == 0, done.stderr
    assert "static facts only, without counters: no NVIDIA GPU here" in done.stdout
    assert "occupancy" in done.stdout
    refused = kagent(*words, "--case", "nope")
    assert refused.returncode != 0
    assert "no benchmark case 'nope': there are bf16_" in refused.stderr


def test_the_next_prompt_says_what_a_profile_found():
    from kagent.prompting import Prompter, run_facts_of
    from kagent.tasks import find_task

    store, history = read_history(RUNS / "softmax-ask-tell")
    (kernel,) = profile.with_counters([only()], [next(profile.read_csv(CSV))])
    best = history.lineage.incumbent
    found = profiles.Profile(best.id, "bf16_16384x1024", "H100", (kernel,))
    event = replace(history.events[-1], kind="profiled", data=profiles.to_event(found))
    history = replace(history, events=(*history.events, event))
    manifest = store.manifest
    prompter = Prompter(
        find_task("softmax"), "gpu", manifest.target, run_facts_of(manifest, history)
    )
    told = prompter.profile(best)
    assert "bf16_16384x1024" in told
    assert "waiting for global or local memory 100%" in told
    assert prompter.profile(history.lineage[0]) == ""
