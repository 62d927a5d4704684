import tempfile

import pytest
from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.errors import ConfinementError
from kagent_sandbox.process.canaries import ATTACKS
from kagent_sandbox.process.forkserver import Isolation
from kagent_sandbox.process.isolation_probe import Canary, Probe, probe


def test_no_canary_escapes():
    result = probe()
    assert result.isolation.tier >= Tier.T1
    assert [c.name for c in result.canaries] == list(ATTACKS)
    assert result.escaped == ()
    assert all("Error" in c.stopped_by for c in result.canaries)
    result.require()


def test_a_long_name_of_the_temporary_folder_is_no_obstacle(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert probe(Tier.T1).escaped == ()


def test_an_escape_fails_closed():
    isolation = Isolation(Tier.T1, 1, seccomp=True, drops_uid=False)
    escaped = Probe(isolation, (Canary("use io_uring", None), Canary("send by UDP", "EPERM")))
    with pytest.raises(ConfinementError, match=r"T1 does not hold.*could use io_uring\. Run"):
        escaped.require()


def test_canaries_do_escape_when_unconfined(tmp_path):
    """Or they would prove nothing: the same attacks on the same bait, from this process."""
    secret = tmp_path / "secret"
    secret.write_text("bait")
    facts = {"secret": str(secret), "folder": str(tmp_path), "pid": 1, "package": str(secret)}
    for name in ("read a secret file", "overwrite a secret file", "write outside of its folder"):
        ATTACKS[name].act(facts)
    ATTACKS["send by UDP"].act(facts)


def test_attacks_work_where_nothing_is_asked_to_stop_them():
    result = probe(Tier.T0)
    assert result.isolation.tier is Tier.T0
    assert result.escaped == ()  # T0 claims nothing
    result.require()
    expected = {"read a secret file", "connect by TCP", "connect to an abstract socket"}
    assert expected <= set(result.uncovered)
    assert "a higher tier would stop: read a secret file" in result.describe()


def test_what_only_a_higher_tier_stops_is_said_and_is_no_escape():
    result = probe(Tier.T1)
    assert result.isolation.tier is Tier.T1
    assert result.uncovered == ("see other processes",)
    result.require()
