"""Cores by affinity and by the quota of a control group."""

import os

import pytest
from kagent.config.settings import load_config
from kagent_sandbox.process import cores


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 1),
        ("50000 100000\n", 1),
        ("6400000 100000\n", 8),
        ("max 100000\n", 8),
        ("", 8),
    ],
)
def test_a_quota_of_time_counts_as_fewer_cores(tmp_path, monkeypatch, quota, expected):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(cores, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cores.usable_cores() == expected
    assert load_config().jobs == expected


def test_without_a_control_group_the_affinity_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "_QUOTA", tmp_path / "none")
    assert cores.usable_cores() == len(os.sched_getaffinity(0))
