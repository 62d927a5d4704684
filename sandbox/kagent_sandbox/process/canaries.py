"""Some two dozen attacks, run inside the confinement of this host to see what it stops.

Each attack stops at the proof that it would have worked. What they do not show: bugs of the kernel,
what a path that the confinement names gives away, and use of shared hardware.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from kagent_sandbox.confine.libc import prctl, syscall
from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.process.context import Context

Facts = Mapping[str, str | int]
_NUMBERS: Mapping[str, tuple[int, int]] = {  # x86_64, aarch64
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
    "ptrace": (101, 117),
    "shmget": (29, 194),
    "shmctl": (31, 195),
    "add_key": (248, 217),
    "perf_event_open": (298, 241),
    "memfd_create": (319, 279),
    "process_vm_readv": (310, 270),
    "seccomp": (317, 277),
}
_NEWUSER = 0x10000000
_ATTACH = 16
_PRIVATE_KEY, _CREATE, _REMOVE = 0, 0o1600, 0  # of SysV shared memory
_NETLINK = 16
_SET_MODE_FILTER, _PR_SET_SECCOMP = 1, 22


@dataclass(frozen=True)
class Attack:
    """An attack, and the lowest tier that claims to stop it. It succeeds if it returns."""

    act: Callable[[Facts], None]
    stopped_from: Tier = Tier.T1


def run(context: Context) -> None:
    """Handler: try every attack on what the client set out as bait."""
    facts = cast("Facts", context.channel.recv(30.0).obj)
    results: dict[str, str | None] = {}
    for name, attack in ATTACKS.items():
        try:
            attack.act(facts)
        except (OSError, ValueError) as e:
            results[name] = f"{type(e).__name__}: {e.strerror if isinstance(e, OSError) else e}"
        else:
            results[name] = None
    context.channel.send(results)


def _call(name: str, *args: int) -> int:
    return syscall(_NUMBERS[name][platform.machine() != "x86_64"], *args)


def _read_secret(facts: Facts) -> None:
    with open(str(facts["secret"]), encoding="utf-8") as file:
        file.read()


def _overwrite_secret(facts: Facts) -> None:
    with open(str(facts["secret"]), "a", encoding="utf-8"):
        return


def _write_outside(facts: Facts) -> None:
    with open(os.path.join(str(facts["folder"]), "planted"), "w", encoding="utf-8"):
        return


def _edit_package(facts: Facts) -> None:
    with open(str(facts["package"]), "a", encoding="utf-8"):
        return


def _read_environment(facts: Facts) -> None:
    with open(f"/proc/{facts['pid']}/environ", "rb") as file:
        file.read()


def _open_memory(facts: Facts) -> None:
    with open(f"/proc/{facts['pid']}/mem", "r+b"):
        return


def _signal(facts: Facts) -> None:
    os.kill(int(facts["pid"]), 0)


def _trace(facts: Facts) -> None:
    _call("ptrace", _ATTACH, int(facts["pid"]), 0, 0)


def _read_memory(facts: Facts) -> None:
    buffer = ctypes.create_string_buffer(8)
    # one struct iovec serves for both sides: what counts is whether the call is let through
    vector = struct.pack("PN", ctypes.addressof(buffer), 8)
    here = ctypes.create_string_buffer(vector, len(vector))
    there = ctypes.create_string_buffer(struct.pack("PN", int(facts["address"]), 8), len(vector))
    _call(
        "process_vm_readv",
        int(facts["pid"]),
        ctypes.addressof(here),
        1,
        ctypes.addressof(there),
        1,
        0,
    )


def _slow_down(facts: Facts) -> None:
    pid = int(facts["pid"])
    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid))


def _move_to_a_core(facts: Facts) -> None:
    os.sched_setaffinity(int(facts["pid"]), os.sched_getaffinity(int(facts["pid"])))


def _see(facts: Facts) -> None:
    pid = int(facts["server"])
    if pid == os.getpid():
        raise ProcessLookupError(3, "No such process")
    os.stat(f"/proc/{pid}")


def _connect(facts: Facts) -> None:
    with socket.create_connection(("127.0.0.1", int(facts["port"])), 1.0):
        return


def _send_datagram(_: Facts) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", ("127.0.0.1", 9))


def _local_socket(facts: Facts) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(facts["socket"]))


def _abstract_socket(facts: Facts) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + str(facts["abstract"]))


def _netlink(_: Facts) -> None:
    with socket.socket(_NETLINK, socket.SOCK_RAW, 0) as link:
        link.bind((0, 0))


def _share_memory(_: Facts) -> None:
    _call("shmctl", _call("shmget", _PRIVATE_KEY, 4096, _CREATE), _REMOVE, 0)


def _leave_shared_memory(facts: Facts) -> None:
    path = f"/dev/shm/{facts['abstract']}"  # noqa: S108 - the point of the attack
    with open(path, "w", encoding="utf-8"):
        os.unlink(path)


def _keyring(_: Facts) -> None:
    kind, name = (ctypes.create_string_buffer(b) for b in (b"user", b"kagent-canary"))
    # into the thread's own keyring, which ends with it
    _call("add_key", ctypes.addressof(kind), ctypes.addressof(name), ctypes.addressof(name), 4, -1)


def _performance_events(_: Facts) -> None:
    attributes = ctypes.create_string_buffer(struct.pack("IIQ", 1, 128, 0), 128)
    os.close(_call("perf_event_open", ctypes.addressof(attributes), 0, -1, -1, 0))


def _run_from_memory(_: Facts) -> None:
    name = ctypes.create_string_buffer(b"canary")
    fd = _call("memfd_create", ctypes.addressof(name), 0)
    try:
        with open("/bin/true", "rb") as program:
            os.write(fd, program.read())
        pid = os.fork()
        if pid == 0:
            try:
                os.execve(fd, ["true"], {})  # noqa: S606
            except OSError:
                os._exit(1)
        if os.waitpid(pid, 0)[1]:
            raise PermissionError(13, "Permission denied")
    finally:
        os.close(fd)


def _setuid_program(_: Facts) -> None:
    if prctl(39):  # PR_GET_NO_NEW_PRIVS
        raise PermissionError(1, "no_new_privs is set")


def _io_uring(_: Facts) -> None:
    parameters = ctypes.create_string_buffer(120)
    os.close(_call("io_uring_setup", 1, ctypes.addressof(parameters)))


def _new_namespace(_: Facts) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            _call("unshare", _NEWUSER)
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise PermissionError(1, "Operation not permitted")


def _filter_own_calls(_: Facts) -> None:
    """Install a filter that allows everything: another one could answer calls that do nothing."""
    allow = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000), 8)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(allow)), 16)
    try:
        _call("seccomp", _SET_MODE_FILTER, 0, ctypes.addressof(program))
    except OSError:
        prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(program))


def _become_root(_: Facts) -> None:
    os.setuid(0)
    if os.geteuid() == 0 and not os.access("/etc/shadow", os.R_OK):
        raise PermissionError(1, "root by name only")


ATTACKS: Mapping[str, Attack] = {
    "read a secret file": Attack(_read_secret),
    "overwrite a secret file": Attack(_overwrite_secret),
    "write outside of its folder": Attack(_write_outside),
    "edit an installed package": Attack(_edit_package),
    "read the client's environment": Attack(_read_environment),
    "open the client's memory": Attack(_open_memory),
    "read the client's memory": Attack(_read_memory),
    "signal the client": Attack(_signal),
    "trace the client": Attack(_trace),
    "change the client's priority": Attack(_slow_down),
    "move the client to another core": Attack(_move_to_a_core),
    "see other processes": Attack(_see, Tier.T2),
    "connect by TCP": Attack(_connect),
    "send by UDP": Attack(_send_datagram),
    "connect to a local socket": Attack(_local_socket),
    "connect to an abstract socket": Attack(_abstract_socket),
    "ask the kernel by netlink": Attack(_netlink),
    "share memory by SysV IPC": Attack(_share_memory),
    "leave a file in /dev/shm": Attack(_leave_shared_memory),
    "keep a key in the kernel": Attack(_keyring),
    "count events of the machine": Attack(_performance_events),
    "run a program from memory": Attack(_run_from_memory),
    "gain by a setuid program": Attack(_setuid_program),
    "use io_uring": Attack(_io_uring),
    "enter a user namespace": Attack(_new_namespace),
    "become root": Attack(_become_root),
    "filter its own calls": Attack(_filter_own_calls),
}
"""Attacks by their names in reports."""
