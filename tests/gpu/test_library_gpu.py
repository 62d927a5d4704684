"""A library of Triton and CUDA seeds on this GPU: its own tests and its own benchmark."""

import json
import os
import subprocess
import sys

import pytest
import torch
from kagent.export.library._devices import capability, device_name
from kagent.export.writing import files_of, write_library
from kagent_sandbox.replay.library_tests import run_tests

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


KERNELS = {
    "softmax": ("cuda_cluster.py", "triton_rows.py"),
    "cross_entropy": ("cuda_cluster.py", "triton_onchip.py"),
    "gelu": ("cuda_vector.py", "triton_flat.py"),
    "attention": ("triton_flash.py",),
    "linear_cross_entropy": ("cuda_rows.py",),
}


@pytest.fixture(scope="module", params=list(KERNELS))
def library(request, tmp_path_factory):
    """A task's kernels, each the fastest by made-up figures at every other measured shape."""
    from synthetic_library import LibraryRecord, device_of, kernel_of, operator_of

    task, where = request.param, torch.device("cuda")
    kernels = [kernel_of(task, file, "gpu") for file in KERNELS[task]]
    devices = [
        device_of(task, k, "gpu", device_name(where), capability(where), lost=0) for k in kernels
    ]
    points = tuple(devices[i % len(devices)].points[i] for i in range(len(devices[0].points)))
    device = type(devices[0])(
        devices[0].name, "gpu", devices[0].capability, devices[0].environment, "today", points
    )
    name = f"tried_{task}"
    folder = tmp_path_factory.mktemp("library") / name
    operator = operator_of(task, "Unused", kernels, [device])
    library = LibraryRecord(name, "0.1.0", "0.1.0", (operator,), ())
    write_library(library, files_of(library, cubins={}), folder)
    return folder


def run(library, *arguments, timeout_s=600):
    env = {**os.environ, "PYTHONPATH": str(library / "build/torch-universal")}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=library, env=env, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(900)
def test_its_own_tests_pass_and_kernels_run(library):
    out = run(library, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests")
    print(out[-1500:])
    assert "no kernel was measured on a device like those here" not in out


@pytest.mark.timeout(900)
def test_its_own_tests_pass_confined_as_an_export_runs_them(library):
    files = {p.relative_to(library).as_posix(): p for p in library.rglob("*") if p.is_file()}
    files = {n: p.read_bytes() for n, p in files.items() if "__pycache__" not in p.parts}
    ran = run_tests(library.name, files, gpu=True, path="build/torch-universal")
    print(ran.log[-1500:])
    assert ran.why == ""
    assert "no kernel was measured on a device like those here" not in ran.log


@pytest.mark.timeout(900)
def test_its_benchmark_times_kernels_and_calls(library):
    """What a call costs over its kernel's own launch is to stay below 15 µs: read it."""
    found = json.loads(run(library, "benchmarks/bench.py", "--points", "1", "--json"))
    for kind in ("shapes", "calls"):
        print(json.dumps([f for f in found[kind] if f["device"] == "cuda"], indent=1))
    shape = next(s for s in found["shapes"] if s["device"] == "cuda")
    assert shape["kernel"] != "torch"
    calls = next(c for c in found["calls"] if c["device"] == "cuda")
    assert "the operator, compiled with reduce-overhead" in calls["us"]
    assert "eager, compiled with reduce-overhead" in calls["us"]
    assert shape["not_captured"] == []
