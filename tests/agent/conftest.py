"""What the agent's tests share: no model that somebody has set, and races without more rounds."""

import os

import pytest
from kagent_sandbox.confine.libc import prctl


@pytest.fixture(scope="module", autouse=True)
def _no_models():
    """Before what modules' own fixtures start. Where turns are taken is tests/conftest.py's."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(("KAGENT_", "OPENAI_")) and name != "KAGENT_LOCKS":
                patch.delenv(name)
        patch.setenv("KAGENT_MEMORY", "false")  # tests of memory ask for it
        patch.setenv("KAGENT_RACE_TIME", "0.01")  # a tie would go on for a minute
        yield


@pytest.fixture(scope="module")
def orphans_come_here():
    """What outlives its parents becomes this process's child, and so is seen."""
    prctl(36, 1)
    yield
    prctl(36, 0)
