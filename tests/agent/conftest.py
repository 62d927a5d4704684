"""What the agent's tests share: no model that somebody has set, and races without more rounds."""

import os

import pytest
from kagent_sandbox.confine.libc import prctl
from kagent_sandbox.device.detect import VISIBLE

KEPT = {"KAGENT_LOCKS", "KAGENT_PASS"}
"""Variables that tests/conftest.py sets."""


@pytest.fixture(scope="module", autouse=True)
def _no_models():
    """Before what modules' own fixtures start."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(("KAGENT_", "OPENAI_")) and name not in KEPT:
                patch.delenv(name)
        patch.setenv("KAGENT_MEMORY", "false")  # tests of memory ask for it
        patch.setenv("KAGENT_RACE_TIME", "0.01")  # a tie would go on for a minute
        yield


@pytest.fixture(autouse=True)
def _devices_of_this_test():
    """A command that is told its device, and runs in this process, hides all others for good."""
    before = {name: os.environ.get(name) for name in (VISIBLE, "CUDA_DEVICE_ORDER")}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="module")
def orphans_come_here():
    """What outlives its parents becomes this process's child, and so is seen."""
    prctl(36, 1)
    yield
    prctl(36, 0)
