import pytest
from kagent_sandbox.confine.canaries import ATTACKS
from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.confine.probe import Canary, Probe, probe
from kagent_sandbox.errors import ConfinementError
from kagent_sandbox.forkserver import Isolation


def test_no_canary_escapes():
    result = probe()
    assert result.isolation.tier >= Tier.T1
    assert [c.name for c in result.canaries] == list(ATTACKS)
    assert result.escaped == ()
    assert all("Error" in c.stopped_by for c in result.canaries)
    result.require()


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
        ATTACKS[name](facts)
    ATTACKS["send by UDP"](facts)
