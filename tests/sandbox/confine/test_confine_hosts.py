"""Other hosts, made from this one: an ordinary user, and a container that denies namespaces."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import kagent_sandbox
import pytest
from kagent_sandbox.confine import Tier
from kagent_sandbox.confine.policy import ISOLATION

NOBODY = 64_999
PROGRAM = """
import dataclasses, json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
uid, denies_namespaces = int(sys.argv[2]), sys.argv[3] == "container"
if os.getuid() != uid:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.environ["HOME"] = "/"
if denies_namespaces:
    from container_seccomp import deny_namespaces
    deny_namespaces()
from kagent_sandbox.process.isolation_probe import probe
from kagent_sandbox.errors import ConfinementError
try:
    seen = probe()
    seen.require()
except ConfinementError as e:
    print(json.dumps({"error": str(e)}))
else:
    isolation = dataclasses.asdict(seen.isolation)
    print(json.dumps({**isolation, "escaped": seen.escaped, "uncovered": seen.uncovered}))
"""


HERE = [str(Path(__file__).parents[1]), str(Path(kagent_sandbox.__file__).parents[1])]


def observe(*, user=None, container=False, ask="auto"):
    """What a probe says on such a host."""
    uid, python = (os.getuid(), sys.executable) if user is None else user
    kind = "container" if container else "plain"
    done = subprocess.run(
        [python, "-c", PROGRAM, json.dumps(HERE), str(uid), kind],
        capture_output=True,
        text=True,
        timeout=100.0,
        env={**os.environ, "TMPDIR": "/tmp", ISOLATION: ask},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def user():
    """An ordinary user's id, and a Python that it can run."""
    if os.getuid():
        return os.getuid(), sys.executable
    for python in (sys.executable, "/usr/bin/python3"):
        if readable(Path(python)) and readable(Path(__file__)) and new_enough(python):
            return NOBODY, python
    pytest.skip("an ordinary user can read no Python 3.11 here, or not this folder")


def readable(path):
    real = path.resolve()
    return all(p.stat().st_mode & 0o001 for p in (path.parent, *real.parents) if p.exists())


def new_enough(python):
    code = "import sys; sys.exit(sys.version_info < (3, 11))"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def test_an_ordinary_user_has_namespaces_through_one_of_users(user):
    seen = observe(user=user)
    assert seen["tier"] in {Tier.T2, Tier.T3}, seen["lacking"]
    assert seen["user_namespace"]
    assert not seen["drops_uid"]
    assert seen["escaped"] == seen["uncovered"] == []


def test_in_a_container_that_denies_namespaces_an_ordinary_user_has_the_first_tier(user):
    seen = observe(user=user, container=True)
    assert seen["tier"] == Tier.T1
    assert seen["lacking"][0].startswith("T2: ")
    assert "Operation not permitted" in seen["lacking"][0]
    assert seen["escaped"] == []
    assert seen["uncovered"] == ["see other processes"]


def test_in_a_container_that_denies_namespaces_root_has_the_first_tier():
    if os.getuid():
        pytest.skip("not root")
    seen = observe(container=True)
    assert seen["tier"] == Tier.T1
    assert seen["drops_uid"]
    assert seen["escaped"] == []


def test_a_tier_that_the_container_denies_is_refused_and_not_lowered(user):
    seen = observe(user=user, container=True, ask="T2")
    assert "isolation T2 was asked for and this host gives T1" in seen["error"]
    assert "Operation not permitted" in seen["error"]


def test_the_weakest_tier_is_given_only_when_it_is_asked_for(user):
    seen = observe(user=user, container=True, ask="T0")
    assert seen["tier"] == Tier.T0
    assert "read a secret file" in seen["uncovered"]


def test_the_filter_of_these_tests_denies_what_it_says():
    if platform.machine() not in {"x86_64", "aarch64"}:
        pytest.skip("numbers of system calls are known for x86-64 and 64-bit ARM")
    source = """
import sys
sys.path[:0] = sys.argv[1:]
from container_seccomp import deny_namespaces
from kagent_sandbox.confine.namespaces import unshare
deny_namespaces()
for flags in (1 << 28, 1 << 29, 0x20000):
    try:
        unshare(flags)
    except PermissionError:
        continue
    raise SystemError("not denied")
"""
    subprocess.run([sys.executable, "-c", source, *HERE], check=True, timeout=60.0)
