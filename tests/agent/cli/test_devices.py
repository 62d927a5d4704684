"""--device and kagent devices, without a GPU: nvidia-smi is a script here."""

import json
import os
import subprocess
import sys
import threading

import pytest
from device_holder import cpu_held
from kagent.candidate_file import build_file
from kagent.config.devices import use_device
from kagent.devices import list_devices
from kagent.tasks import find_task, seeds_of
from kagent_sandbox.data.build import Built
from kagent_sandbox.device.detect import gpu_alone, has_gpu
from kagent_sandbox.errors import UserError
from kagent_sandbox.process.device_lock import CPU, DeviceLock

UUID = "GPU-5c9e0f7d-0000-4000-8000-000000000001"
SMI = f"""#!/bin/sh
echo "0, {UUID}, NVIDIA H200, 1034, 143771, 87, P0"
echo "1, GPU-2, NVIDIA H200, 4, 143771, 0, P8"
echo "no comma here"
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setenv("KAGENT_LOCKS", str(tmp_path / "locks"))
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-7")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return monkeypatch


@pytest.mark.usefixtures("machine")
def test_devices_are_listed_with_who_uses_them(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (15.2, 9.0, 9.0))  # more than there are cores
    with DeviceLock(f"gpu-{UUID}").turn("timing"), DeviceLock(CPU).turn("work"):
        cpu, first, second = list_devices()
    assert (cpu.name, first.name, second.name) == ("cpu", "cuda:0", "cuda:1")
    assert cpu.state == "15.2 threads at work or waiting, in the last minute"
    assert first.state == "87 % busy, 1034 of 143771 MiB in use, P0"
    assert [number for number, _ in first.turns] == [os.getpid()] == [cpu.turns[0][0]]
    assert second.turns == ()


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("shown", ["1", "GPU-2"])
def test_names_are_those_that_the_option_takes(monkeypatch, shown):
    """A GPU that is not visible has no number: its UUID is taken."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert [d.name for d in list_devices()] == ["cpu", UUID, "cuda:0"]


@pytest.mark.usefixtures("machine")
def test_the_command_prints_them():
    command = [sys.executable, "-m", "kagent", "devices"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"cuda:0 is {UUID}" in text
    assert "NVIDIA H200" in text
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True).stdout)
    assert [d["name"] for d in found] == ["cpu", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("name", "shown"), [("cuda:1", "GPU-7"), ("cuda", "2"), ("GPU-9", "GPU-9"), ("MIG-1", "MIG-1")]
)
def test_a_gpu_is_the_only_one_that_is_seen(name, shown, visible):
    visible.setattr("kagent.config.devices.has_gpu", lambda: True)
    use_device(name)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == shown


def test_a_process_may_see_one_of_the_visible_gpus(visible):
    found = [gpu_alone(index)["CUDA_VISIBLE_DEVICES"] for index in range(3)]
    assert found == ["2", "GPU-7", ""]
    visible.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_alone(3) == {"CUDA_VISIBLE_DEVICES": "3"}


def test_the_cpu_hides_all_gpus(visible):
    use_device("cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    use_device(None)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:2", "CPU", "cuda:1 "])
def test_what_is_no_device_is_refused(name, visible):
    with pytest.raises(UserError, match="no device"):
        use_device(name)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,GPU-7"


@pytest.mark.skipif(has_gpu(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused_by_the_command():
    command = [sys.executable, "-m", "kagent", "check", "x.py", "--task", "softmax"]
    done = subprocess.run([*command, "--device", "cuda:3"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("kagent: no device 'cuda:3' on this machine")


@pytest.mark.usefixtures("machine")
def test_a_build_says_for_whom_it_waits():
    task, told, waits, answers = find_task("softmax"), [], threading.Event(), []
    path = next(s.path for s in seeds_of(task) if s.language == "cpp")

    def say(text):
        told.append(text)
        if "waiting" in text:
            waits.set()

    def build():
        answers.append(build_file(task, path, None, say, configs=1, jobs=1))

    with cpu_held() as other:
        building = threading.Thread(target=build, daemon=True)
        building.start()
        assert waits.wait(60)
        assert not answers
        other.stdin.close()
        building.join(60)
    assert told[0] == f"building {path.name}"
    assert told[1].startswith(f"the device is shared: waiting for process {other.pid}")
    assert isinstance(answers[0], Built)
