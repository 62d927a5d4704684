"""A disk of temporary files from which no code can be loaded, as Docker's `--tmpfs` is."""

import sys
from pathlib import Path

import pytest
from own_disk import on_own_disk, require_own_disk

SEED = Path(__file__).parents[3] / "seeds" / "softmax" / "cpp_rows.py"
OPTIONS = "noexec,size=64m"
BUILD = """
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.builder.health import known_request
from kagent_sandbox.errors import MachineError

try:
    with Builder() as builder:
        print(type(builder.build(known_request("cpu"))).__name__)
except MachineError as e:
    print(e)
"""


@pytest.fixture
def disk(tmp_path):
    """A place to mount it."""
    require_own_disk(tmp_path)
    return tmp_path


@pytest.mark.nightly
def test_it_is_said_before_anything_is_built(disk):
    done = on_own_disk(OPTIONS, disk, sys.executable, "-c", BUILD)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{disk}: the disk of temporary files is mounted noexec")
    assert "docker run --tmpfs /tmp:exec" in done.stdout


@pytest.mark.nightly
def test_a_command_says_it_in_a_line(disk):
    words = [sys.executable, "-m", "kagent", "build", "--task", "softmax"]
    done = on_own_disk(OPTIONS, disk, *words, SEED)
    assert done.returncode == 5
    assert "is mounted noexec" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
