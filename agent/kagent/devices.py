"""This machine's devices, and who uses them now."""

from __future__ import annotations

import csv
import os
import subprocess
from dataclasses import dataclass

from kagent_sandbox.device.cpu.facts import cpu_facts
from kagent_sandbox.device.detect import visible_gpus
from kagent_sandbox.device.table import find_device
from kagent_sandbox.process.device_lock import CPU, DeviceLock

_FIELDS = ("index", "uuid", "name", "memory.used", "memory.total", "utilization.gpu", "pstate")
_QUERY_S = 20.0


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device, and its state at this moment."""

    name: str  # that --device takes
    uuid: str  # of a GPU; it is taken, too
    model: str
    state: str
    turns: tuple[tuple[int, str], ...]  # processes of kagent on it or waiting, and what they do


def list_devices() -> list[DeviceState]:
    """The CPU, then all GPUs that the driver knows, visible to this process or not."""
    facts = cpu_facts()
    load = f"{os.getloadavg()[0]:.1f} threads at work or waiting, in the last minute"
    cpu = DeviceState("cpu", "", f"{facts.name}, {facts.units} cores", load, _turns(CPU))
    return [cpu, *_gpus()]


def _gpus() -> list[DeviceState]:
    """GPUs as nvidia-smi lists them, in the order of their bus addresses."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True):
        if len(row) != len(_FIELDS):
            continue
        index, uuid, model, used, total, busy, state = row
        text = f"{busy} % busy, {used} of {total} MiB in use, {state}"
        lock = f"{find_device('gpu').name}-{uuid}"
        found.append(DeviceState(_name(index, uuid), uuid, model, text, _turns(lock)))
    return found


def _name(index: str, uuid: str) -> str:
    """Name of a GPU for --device: its number among the visible ones, else its UUID."""
    names = visible_gpus()
    if names is None:
        return f"cuda:{index}"
    places = (i for i, name in enumerate(names) if name == index or uuid.startswith(name))
    return next((f"cuda:{place}" for place in places), uuid)


def _turns(lock: str) -> tuple[tuple[int, str], ...]:
    return tuple(DeviceLock(lock).turns())
