"""What tests of tasks share."""

import pytest
import torch
from kagent.authoring import new_task
from kagent_sandbox.judge.check import task_checker


@pytest.fixture
def in_process(monkeypatch):
    def check(task, *, say):
        return [task_checker.check(task, kind, torch.device("cpu")) for kind in ("gpu", "cpu")]

    monkeypatch.setattr(new_task, "check_kinds", check)
