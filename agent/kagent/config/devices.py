"""The device that a command uses, as its user names it."""

from __future__ import annotations

import os
import re

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.device.detect import VISIBLE, gpu_count, has_gpu, visible_gpus
from kagent_sandbox.errors import UserError

_HOW = "expected cpu, cuda, cuda:N or a GPU's UUID (kagent devices lists them)"


def use_device(name: str | None) -> None:
    """Make one device the only one that this process, and all that it starts, sees of its kind.

    The driver reads which GPUs it shows once. So this comes before anything asks for one.

    Args:
        name: "cpu", "cuda", "cuda:3" or "GPU-..." or "MIG-..."; None changes nothing.

    Raises:
        UserError: There is no such device.
    """
    if name is None:
        return
    if name == "cpu":
        os.environ[VISIBLE] = ""
        return
    number = re.fullmatch(r"cuda(?::(\d+))?", name)
    if number is not None:
        chosen = _visible(int(number[1] or 0), name)
    elif name.startswith(("GPU-", "MIG-")):
        chosen = name
    else:
        raise UserError(f"no device {name!r}: {_HOW}")
    os.environ |= {VISIBLE: chosen, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if not has_gpu():
        raise UserError(f"no device {name!r} on this machine: {_HOW}")


def kind_of_device(name: str) -> Kind:
    """The kind of device that a name stands for. Nothing is changed for this process.

    Args:
        name: As `use_device` takes it.

    Raises:
        UserError: It is no name of a device, or one of a GPU, and this machine has none.
    """
    if name == "cpu":
        return "cpu"
    if not re.fullmatch(r"cuda(:\d+)?|(GPU|MIG)-.+", name):
        raise UserError(f"no device {name!r}: {_HOW}")
    number = re.fullmatch(r"cuda:(\d+)", name)
    if gpu_count() <= int(number[1] if number else 0):
        raise UserError(f"no device {name!r} on this machine: {_HOW}")
    return "gpu"


def _visible(index: int, name: str) -> str:
    """The driver's name of a GPU, by its number among the visible ones."""
    names = visible_gpus()
    if names is None:
        return str(index)
    if index >= len(names):
        shown = ",".join(names)
        raise UserError(f"no device {name!r}: {VISIBLE}={shown} shows {len(names)} of them")
    return names[index]
