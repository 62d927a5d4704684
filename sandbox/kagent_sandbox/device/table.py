"""All devices, by name. docs/add-a-device.md says what a new one needs.

A device is a module that has an `ENTRY`: one of these, or one that an installed package names as an
entry point of the group `kagent.devices`. Modules are imported when their device is asked for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kagent_sandbox.device.entry import TableEntry
from kagent_sandbox.errors import UserError

if TYPE_CHECKING:
    from kagent_sandbox.data.kind import Kind

DEVICES: Mapping[str, str] = {
    "cpu": "kagent_sandbox.device.cpu.entry",
    "gpu": "kagent_sandbox.device.cuda.entry",
}
"""Name -> module."""
GROUP = "kagent.devices"


@functools.cache
def find_device(name: str) -> TableEntry:
    """The device of a name.

    Raises:
        UserError: There is none, or its module has no entry.
    """
    module = DEVICES.get(name) or _installed().get(name)
    if module is None:
        known = ", ".join(sorted({*DEVICES, *_installed()}))
        raise UserError(f"no device {name!r}: expected one of {known}")
    found = getattr(importlib.import_module(module), "ENTRY", None)
    if not isinstance(found, TableEntry) or found.name != name:
        raise UserError(f"{module}: expected ENTRY, a TableEntry whose name is {name!r}")
    return found


@functools.cache
def device_for(kind: Kind) -> str:
    """Name of the device of a kind that is used here: the first that this machine has, ours before
    others', and ours where it has none.
    """
    ours = [n for n in DEVICES if find_device(n).kind == kind]
    theirs = (n for n in _installed() if n not in DEVICES and find_device(n).kind == kind)
    names = itertools.chain(ours, theirs)
    return next((n for n in names if find_device(n).available()), ours[0])


def own_unit(kind: Kind) -> str:
    """Name of the first device of a kind that is used here, for turns on it (`DeviceLock`)."""
    return find_device(device_for(kind)).unit_name(0)


def available(kind: Kind) -> bool:
    """Whether this machine has a device of a kind; opens none."""
    return find_device(device_for(kind)).available()


def _installed() -> Mapping[str, str]:
    """Devices of other packages. Ours cannot be replaced by theirs."""
    return {e.name: e.module for e in importlib.metadata.entry_points(group=GROUP)}
