"""A disk of temporary files from which no code can be loaded, as Docker's `--tmpfs` is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SEED = Path(__file__).parents[3] / "seeds" / "softmax" / "cpp_rows.py"
MOUNT = 'mount -t tmpfs -o noexec,size=64m none "$TMPDIR" && exec "$@"'
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


def in_namespace(folder, tier, *words):
    """A command whose temporary files are on a disk of its own, mounted noexec."""
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", MOUNT, "bash", *words],
        env={**os.environ, "TMPDIR": str(folder), "KAGENT_ISOLATION": tier},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def disk(tmp_path):
    """A place to mount it."""
    try:
        possible = in_namespace(tmp_path, "T1", "true").returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("no disk of one's own without privileges here")
    return tmp_path


def test_it_is_said_before_anything_is_built(disk):
    done = in_namespace(disk, "T1", sys.executable, "-c", BUILD)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{disk}: the disk of temporary files is mounted noexec")
    assert "docker run --tmpfs /tmp:exec" in done.stdout


def test_a_command_says_it_in_a_line(disk):
    words = [sys.executable, "-m", "kagent", "build", "--task", "softmax"]
    done = in_namespace(disk, "T1", *words, SEED)
    assert done.returncode == 5
    assert "is mounted noexec" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
