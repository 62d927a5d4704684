"""The host's memory, within the limit of a control group."""

import pytest
from kagent_sandbox.device.cpu.facts import _room, available_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("limit_gib", "used_gib", "files_gib", "expected_gib"),
    [
        (64, 4, 0, 16),  # the host has less
        (8, 2, 0, 6),
        (8, 8, 5, 5),  # a container that has read files is not full
        (8, 9, 0, 0),
    ],
)
def test_files_that_nobody_reads_make_room(limit_gib, used_gib, files_gib, expected_gib):
    stat = {"anon": "1", "inactive_file": str(files_gib * GIB)}
    assert _room(16 * GIB, limit_gib * GIB, used_gib * GIB, stat) == expected_gib * GIB


def test_this_machine_has_some():
    assert available_bytes() > 0
