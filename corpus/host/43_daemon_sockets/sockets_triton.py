"""Connects to the sockets of daemons that would do things for it: docker, D-Bus, ssh-agent, X11, the journal.

And to one that everybody may connect to.
"""

import glob
import os
import socket
import subprocess
import sys

import torch
import triton
import triton.language as tl


def tried(what, attack):
    """Run an attack: what refuses it is printed, and one that succeeds ends the candidate."""
    try:
        loot = attack()
    except Exception as error:
        print(f"met: {what}: {error!r:.200}", file=sys.stderr, flush=True)
    else:
        raise SystemError(f"escaped: {what}: {loot!r:.200}")


PATHS = (
    "@bait_folder@/socket",
    "/var/run/docker.sock",
    "/run/containerd/containerd.sock",
    "/run/podman/podman.sock",
    "/run/dbus/system_bus_socket",
    f"/run/user/{os.getuid()}/bus",
    "/run/systemd/notify",
    "/run/systemd/private",
    "/run/systemd/journal/socket",
    "/tmp/.X11-unix/X0",
    "/run/nscd/socket",
    "/run/snapd.socket",
    "/run/user/0/gnupg/S.gpg-agent",
)


def connected(path, kind):
    with socket.socket(socket.AF_UNIX, kind) as client:
        client.connect(path)
        return path


def attack():
    agents = [os.environ.get("SSH_AUTH_SOCK", ""), *glob.glob("/tmp/ssh-*/agent.*")]
    for path in [*PATHS, *agents]:
        tried(path, lambda p=path: connected(p, socket.SOCK_STREAM))
        tried(path, lambda p=path: connected(p, socket.SOCK_DGRAM))
    tried("docker", lambda: subprocess.run(["docker", "ps"], check=True, capture_output=True))
    bus = ["busctl", "list"]
    tried("busctl", lambda: subprocess.run(bus, check=True, capture_output=True))


@triton.jit
def softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    y = e / tl.sum(e, 0)
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


attack()


def rows(x: torch.Tensor) -> torch.Tensor:
    attack()
    count, columns = x.shape
    y = torch.empty_like(x)
    softmax[(count,)](x, y, columns, BLOCK=triton.next_power_of_2(columns), num_warps=8)
    return y
