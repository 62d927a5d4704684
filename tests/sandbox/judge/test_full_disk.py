"""A full disk of temporary files is the machine's fault: never a verdict against a candidate."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from kagent_sandbox.builder import health
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.confine import builder_confinement
from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.errors import MachineError
from kagent_sandbox.process import temporary_space
from own_disk import on_own_disk, require_own_disk

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).parents[1] / "full_disk.py"
FULL = "the disk of temporary files is full: "


@pytest.mark.nightly
def test_builder_and_judge_on_a_disk_that_fills_up(tmp_path):
    require_own_disk(tmp_path)
    done = on_own_disk("size=64m", tmp_path, sys.executable, SCRIPT, ROOT / "seeds" / "gelu")
    assert done.returncode == 0, done.stderr
    before, known, built, checked, after = done.stdout.splitlines()
    assert (before, known, after) == ("judge: tuple", "builder: Built", "builder: Built")
    for line, role in ((built, "builder"), (checked, "judge")):
        assert line.startswith(f"{role}: MachineError {tmp_path}: {FULL}0 bytes are free"), line
        assert "no candidate is blamed: free some space" in line


@pytest.mark.parametrize("tier", [Tier.T1, Tier.T2])
def test_a_candidate_that_says_so_is_believed_only_of_a_disk_without_room(monkeypatch, tier):
    """From T2 on folders are disks of their own, whatever the machine's has."""
    known = health.known_request("cpu")
    full = "raise OSError(28, 'No space left on device')"
    request = dataclasses.replace(known, source=f"{known.source}\n{full}\n")
    with Builder(confinement=builder_confinement(tier=tier)) as builder:
        assert isinstance(builder.build(request), Rejected)
        monkeypatch.setattr(temporary_space, "free_bytes", lambda _: 4096)
        if tier >= Tier.T2:
            assert isinstance(builder.build(request), Rejected)
        else:
            with pytest.raises(MachineError, match=f"{FULL}4096 bytes are free, and a build may"):
                builder.build(request)


def test_a_disk_without_inodes_is_full(monkeypatch, tmp_path):
    def disk(files, left):
        found = SimpleNamespace(f_bavail=1 << 30, f_frsize=4096, f_files=files, f_favail=left)
        monkeypatch.setattr("os.statvfs", lambda _: found)

    disk(1000, 10)
    with pytest.raises(MachineError, match="only 10 inodes, and a build may make 20000 files"):
        temporary_space.require_room(tmp_path, Tier.T1, 1 << 20, 20_000, "a build")
    temporary_space.require_room(tmp_path, Tier.T2, 1 << 20, 20_000, "a build")
    disk(100_000, 50_000)
    temporary_space.require_room(tmp_path, Tier.T1, 1 << 20, 20_000, "a build")
    disk(0, 0)  # a disk that makes inodes as they are needed
    temporary_space.require_room(tmp_path, Tier.T1, 1 << 20, 20_000, "a build")


def test_a_disk_that_is_full_at_the_start(monkeypatch, tmp_path):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(MachineError, match=FULL), Builder():
        pass

    def none(*_, **__):
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.mkdtemp", none)
    with pytest.raises(MachineError, match=FULL), Builder():
        pass
