"""The tests' own fixtures hold in the processes that the agent's tests start."""

import pytest
from kagent_sandbox.process.environment import for_trusted


@pytest.mark.usefixtures("uncompiled", "brief_timing")
def test_nothing_is_compiled_and_no_other_worker_is_waited_for():
    assert for_trusted().keys() >= {"TORCHDYNAMO_DISABLE", "KAGENT_LOCKS", "BRIEF_TIMING"}
