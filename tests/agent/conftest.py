"""What the agent's tests share: no model that somebody has set, and races without more rounds."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_models(monkeypatch):
    for name in os.environ:
        if name.startswith(("KAGENT_", "OPENAI_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KAGENT_RACE_TIME", "0.01")  # a tie would go on for a minute
