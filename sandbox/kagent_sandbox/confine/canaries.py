"""A handful of attacks, run inside the confinement of this host to see what it stops.

Each attack stops at the proof that it would have worked. What they do not show: bugs of the kernel,
what a path that the confinement names gives away, and use of shared hardware.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
from collections.abc import Callable, Mapping
from typing import cast

from kagent_sandbox.confine.libc import libc, syscall
from kagent_sandbox.context import Context

Facts = Mapping[str, str | int]
_NUMBERS = {"x86_64": (425, 272, 101), "aarch64": (425, 97, 117)}  # io_uring, unshare, ptrace
_NEWUSER = 0x10000000
_ATTACH = 16


def run(context: Context) -> None:
    """Handler: try every attack on what the client set out as bait."""
    facts = cast("Facts", context.channel.recv(30.0).obj)
    results: dict[str, str | None] = {}
    for name, attack in ATTACKS.items():
        try:
            attack(facts)
        except (OSError, ValueError) as e:
            results[name] = f"{type(e).__name__}: {e.strerror if isinstance(e, OSError) else e}"
        else:
            results[name] = None
    context.channel.send(results)


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
    syscall(_NUMBERS[platform.machine()][2], _ATTACH, int(facts["pid"]), 0, 0)


def _connect(facts: Facts) -> None:
    with socket.create_connection(("127.0.0.1", int(facts["port"])), 1.0):
        return


def _send_datagram(_: Facts) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", ("127.0.0.1", 9))


def _local_socket(facts: Facts) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(facts["socket"]))


def _io_uring(_: Facts) -> None:
    parameters = ctypes.create_string_buffer(120)
    os.close(syscall(_NUMBERS[platform.machine()][0], 1, ctypes.addressof(parameters)))


def _new_namespace(_: Facts) -> None:
    pid = os.fork()
    if pid == 0:
        ok = libc.syscall(_NUMBERS[platform.machine()][1], ctypes.c_long(_NEWUSER)) == 0
        os._exit(0 if ok else 1)
    if os.waitpid(pid, 0)[1]:
        raise PermissionError(1, "Operation not permitted")


def _become_root(_: Facts) -> None:
    os.setuid(0)
    if os.geteuid() == 0 and not os.access("/etc/shadow", os.R_OK):
        raise PermissionError(1, "root by name only")


ATTACKS: Mapping[str, Callable[[Facts], None]] = {
    "read a secret file": _read_secret,
    "overwrite a secret file": _overwrite_secret,
    "write outside of its folder": _write_outside,
    "edit an installed package": _edit_package,
    "read the client's environment": _read_environment,
    "open the client's memory": _open_memory,
    "signal the client": _signal,
    "trace the client": _trace,
    "connect by TCP": _connect,
    "send by UDP": _send_datagram,
    "connect to a local socket": _local_socket,
    "use io_uring": _io_uring,
    "enter a user namespace": _new_namespace,
    "become root": _become_root,
}
"""By what a report calls them; an attack that returns has succeeded."""
