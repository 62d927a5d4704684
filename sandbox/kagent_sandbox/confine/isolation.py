"""Isolation that a host can give, found by trying it in forked processes, not from settings."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kagent_sandbox.confine import landlock, namespaces, policy, seccomp, users
from kagent_sandbox.confine.cgroup import ControlGroup
from kagent_sandbox.confine.cgroup import find as find_groups
from kagent_sandbox.confine.policy import Confinement, Tier
from kagent_sandbox.errors import ConfinementError

_MAX_REASON = 400


@dataclass(frozen=True)
class Isolation:
    """Isolation of a fork-server's children, printed by `doctor` and in every report."""

    tier: Tier
    landlock_abi: int  # 0: none; signals are scoped from 6, device ioctls from 5, TCP from 4
    seccomp: bool
    drops_uid: bool  # children run as a user that owns nothing
    need_search: bool = False
    """Whether that user may read files whatever their mode (Landlock decides)."""
    user_namespace: bool = False  # namespaces are had through one: the caller is not root
    groups: str = ""  # folder that children's control groups are made in
    lacking: tuple[str, ...] = ()  # why each higher tier fails here, as "T3: reason"

    def describe(self) -> str:
        """One line: the tier, and what it consists of here."""
        parts = [f"tier {self.tier}", f"Landlock ABI {self.landlock_abi}"]
        parts += ["seccomp"] if self.seccomp else []
        parts += ["own user per child"] if self.drops_uid else []
        if self.tier >= Tier.T2:
            parts.append("namespaces" + (" of an ordinary user" if self.user_namespace else ""))
        parts += ["control groups"] if self.tier >= Tier.T3 else []
        return ", ".join(parts)

    def require(self, confinement: Confinement) -> None:
        """Make sure that this is what was asked for: never less in silence.

        Raises:
            ConfinementError: It is not; the text says what the host lacks and what to do.
        """
        if self.tier >= confinement.least:
            return
        lacks = "; ".join(self.lacking) or "unknown reason"
        if confinement.tier is None:
            raise ConfinementError(
                f"this host cannot confine untrusted code ({lacks}): use Linux 5.13 or newer with "
                "Landlock enabled (lsm=landlock,...), or accept weaker isolation explicitly "
                '(--isolation T0, or isolation = "T0")'
            )
        raise ConfinementError(
            f"isolation {confinement.least} was asked for and this host gives {self.tier} "
            f"({lacks}): leave the option out for the highest that works, or name a lower tier"
        )


def observe(confinement: Confinement, root: Path) -> Isolation:
    """Try one tier after the other, up to what the confinement asks for.

    `root` is the fork-server's folder. Leaves nothing behind.
    """
    drops = os.getuid() == 0 and not _try(lambda: users.become(users.FIRST_UID, need_search=False))
    found = Isolation(
        Tier.T0,
        landlock.abi(),
        seccomp.available(),
        drops,
        need_search=drops and not policy.readable_by_others(confinement.read),
    )
    for tier, attempt in ((Tier.T1, _locked), (Tier.T2, _separated), (Tier.T3, _grouped)):
        if tier > confinement.most:
            break
        found, reason = attempt(found, confinement, root)
        if reason:
            return replace(found, lacking=(f"{tier}: {reason}",))
        found = replace(found, tier=tier)
    return found


def _locked(found: Isolation, confinement: Confinement, root: Path) -> tuple[Isolation, str]:
    if not found.landlock_abi:
        return found, "the kernel has no Landlock"
    if not found.seccomp:
        return found, "the kernel has no seccomp filters"
    return found, _try(lambda: _lock(found, confinement, root))


def _lock(found: Isolation, confinement: Confinement, private: Path) -> None:
    uid = users.FIRST_UID if found.drops_uid else None
    policy.enter(confinement, uid, need_search=found.need_search)
    policy.lock(confinement, private)
    with contextlib.suppress(PermissionError):
        os.listdir("/etc")
        raise RuntimeError("Landlock does not bind")
    with contextlib.suppress(PermissionError):
        socket.socket()
        raise RuntimeError("seccomp does not bind")
    importlib.import_module("colorsys")  # the interpreter's own folder must stay readable


def _separated(found: Isolation, confinement: Confinement, root: Path) -> tuple[Isolation, str]:
    # A user of its own is worth more than a user namespace, in which there is none.
    user = not found.drops_uid
    found_ = replace(found, user_namespace=user)
    private = root / "trial"
    private.mkdir()
    try:
        reason = _try(lambda: _separate(found_, confinement, private))
    finally:
        private.rmdir()
    return (found, reason) if reason else (found_, "")


def _separate(found: Isolation, confinement: Confinement, private: Path) -> None:
    """All that a fork-server, a supervisor and a child do, one after the other."""
    namespaces.leave_network(user=found.user_namespace)
    _, keep = namespaces.leave_processes()
    with os.fdopen(keep, "wb"):
        reason = _try(lambda: _inside(found, confinement, private))
    if reason:
        raise RuntimeError(reason)


def _inside(found: Isolation, confinement: Confinement, private: Path) -> None:
    namespaces.leave_mounts(
        private,
        confinement.paths,
        uid=users.FIRST_UID if found.drops_uid else None,
        disk_bytes=1 << 20,
        disk_files=10,
    )
    if os.getpid() != 2 or [n for n in os.listdir("/proc") if n.isdecimal()] != ["1", "2"]:
        raise RuntimeError("other processes are seen")
    _lock(found, confinement, private)
    (private / "file").write_text("own")


def _grouped(found: Isolation, _: Confinement, _root: Path) -> tuple[Isolation, str]:
    try:
        folder = find_groups()
        name = f"{os.getpid()}-trial"
        group = ControlGroup(folder, name, memory_bytes=64 << 20, processes=1)
    except OSError as e:
        return found, _text(e)

    def enter() -> None:
        group.enter()
        with contextlib.suppress(BlockingIOError):
            if os.fork() == 0:
                os._exit(0)
            raise RuntimeError("a control group's limit does not bind")

    try:
        reason = _try(enter)
    finally:
        group.remove()
    return (found, reason) if reason else (replace(found, groups=str(folder)), "")


def _try(action: Callable[[], None]) -> str:
    """Do something in a process of its own; "" if it works, else what it met."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            action()
        except BaseException as e:  # noqa: BLE001 - a trial's outcome is a text
            os.write(write, _text(e).encode()[:_MAX_REASON])
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        text = file.read(_MAX_REASON).decode(errors="replace")
    status = os.waitpid(pid, 0)[1]
    if status == 0:
        return ""
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    return text or "failed"


def _text(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)
