"""What the agent's tests share: no model that somebody has set, and races without more rounds."""

import os

import pytest
from kagent_sandbox.confine.libc import prctl

SET_BY_TESTS = ("KAGENT_LOCKS", "KAGENT_PASS")
"""Of tests/conftest.py: without them tests wait for other workers' turns, and torch compiles."""


@pytest.fixture(autouse=True)
def _no_models(monkeypatch):
    for name in os.environ:
        if name.startswith(("KAGENT_", "OPENAI_")) and name not in SET_BY_TESTS:
            monkeypatch.delenv(name)
    monkeypatch.setenv("KAGENT_RACE_TIME", "0.01")  # a tie would go on for a minute


@pytest.fixture(scope="module")
def orphans_come_here():
    """What outlives its parents becomes this process's child, and so is seen."""
    prctl(36, 1)
    yield
    prctl(36, 0)
