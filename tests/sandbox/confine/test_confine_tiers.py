"""The tiers: chosen by trying, required or capped by the user, never lower in silence."""

import pytest
from confined_handlers import ask
from kagent_sandbox.confine import Confinement, Tier
from kagent_sandbox.confine.isolation import Isolation
from kagent_sandbox.confine.presets import toolchain
from kagent_sandbox.errors import ConfinementError
from kagent_sandbox.process.forkserver import ForkServer

HANDLER = "confined_handlers:execute"


def found(tier, *lacking):
    return Isolation(tier, 7, seccomp=True, drops_uid=False, lacking=lacking)


def test_a_host_without_landlock_is_refused_unless_asked_for():
    weak = found(Tier.T0, "T1: the kernel has no Landlock")
    with pytest.raises(ConfinementError, match=r"no Landlock.*Linux 5\.13.*--isolation T0"):
        weak.require(Confinement())
    weak.require(Confinement(tier=Tier.T0))


def test_a_tier_that_was_asked_for_is_given_or_refused():
    two = found(Tier.T2, "T3: no cgroup2 mounted")
    two.require(Confinement())
    two.require(Confinement(tier=Tier.T2))
    with pytest.raises(ConfinementError, match=r"T3 was asked for.*gives T2 .*no cgroup2 mounted"):
        two.require(Confinement(tier=Tier.T3))


def test_a_fork_server_refuses_to_start_below_what_was_asked_for():
    with ForkServer(HANDLER, confinement=Confinement(read=toolchain())) as server:
        if server.isolation.tier is Tier.T3:
            pytest.skip("this host gives every tier")
        asked = Tier(f"T{int(server.isolation.tier[1]) + 1}")
    confinement = Confinement(read=toolchain(), tier=asked)
    with (
        ForkServer(HANDLER, confinement=confinement) as server,
        pytest.raises(ConfinementError, match=f"{asked} was asked for"),
    ):
        server.spawn(wall_limit_s=1.0)


@pytest.mark.parametrize("tier", [Tier.T0, Tier.T1, Tier.T2])
def test_a_cap_holds(tier):
    with ForkServer(HANDLER, confinement=Confinement(read=toolchain(), tier=tier)) as server:
        assert server.isolation.tier is tier
        with server.spawn(wall_limit_s=60.0) as child:
            listed = ask(child, "os.listdir('/etc'); result = 1")
            assert listed == (1 if tier is Tier.T0 else "PermissionError")
            assert (ask(child, "result = os.getpid()") == 2) == (tier is Tier.T2)
