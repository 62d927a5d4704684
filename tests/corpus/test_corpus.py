"""Every file of the corpus gets the verdict that it must have, and its honest twin passes."""

import pytest
from kagent.selftest.catalogue import PASSED, Variant, load_catalogue
from kagent.selftest.compare import miss
from kagent.selftest.rig import Rig, job_of
from kagent.selftest.runner import play

ENTRIES = load_catalogue()
CASES = [
    (e, twin) for e in ENTRIES for twin in ([False, True] if isinstance(e, Variant) else [False])
]


@pytest.fixture(scope="session")
def rig():
    with Rig(jobs=1) as rig:
        yield rig


@pytest.fixture(scope="session")
def done():
    """Equal candidates are evaluated once: many items have one twin."""
    return {}


@pytest.mark.parametrize(("entry", "twin"), CASES, ids=[e.id + "-twin" * t for e, t in CASES])
def test_item(entry, twin, rig, done):
    if reason := rig.skips(entry.runs):
        pytest.skip(reason)
    if not isinstance(entry, Variant):
        assert miss(entry.expect, entry.says, play(rig, entry)) is None
        return
    job = job_of(entry, twin=twin)
    if job not in done:
        done[job] = rig.evaluate(job)
    expect, says = ((PASSED,), "") if twin else (entry.expect, entry.says)
    why = miss(expect, says, done[job])
    assert why is None, f"{why}\n{entry.twin if twin else entry.path}"
