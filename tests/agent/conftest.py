"""What the agent's tests share: no test sees, or pays for, the models that somebody has set."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_models(monkeypatch):
    for name in os.environ:
        if name.startswith(("KAGENT_", "OPENAI_")):
            monkeypatch.delenv(name)
