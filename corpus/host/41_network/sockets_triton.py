"""Reaches a listener on this machine by TCP and by UDP, and asks for a name.

In Python, by raw system calls, and with the programs that are at hand.
"""

import ctypes
import os
import platform
import socket
import subprocess
import sys

import torch
import triton
import triton.language as tl

# x86-64 and 64-bit ARM
NUMBERS = {
    "socket": (41, 198),
}

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def call(name, *arguments):
    """A raw system call, by number: no wrapper of libc or Python stands in between."""
    number = NUMBERS[name][platform.machine() == "aarch64"]
    result = libc.syscall(
        number, *(a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments)
    )
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def tried(what, attack):
    """Run an attack: what refuses it is printed, and one that succeeds ends the candidate."""
    try:
        loot = attack()
    except Exception as error:
        print(f"met: {what}: {error!r:.200}", file=sys.stderr, flush=True)
    else:
        raise SystemError(f"escaped: {what}: {loot!r:.200}")


PORT = int("@bait_port@")


def datagram():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        return sender.sendto(b"loot", ("127.0.0.1", PORT))


def program(*words):
    return subprocess.run(words, check=True, capture_output=True, timeout=5).stdout


def attack():
    tried("TCP", lambda: socket.create_connection(("127.0.0.1", PORT), 1.0))
    tried("TCP over IPv6", lambda: socket.create_connection(("::ffff:127.0.0.1", PORT), 1.0))
    tried("UDP", datagram)
    tried("listen", lambda: socket.create_server(("127.0.0.1", 0)))
    tried("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
    tried("DNS", lambda: socket.getaddrinfo("example.com", 443))
    tried("socket by number", lambda: call("socket", socket.AF_INET, socket.SOCK_STREAM, 0))
    tried("bash", lambda: program("bash", "-c", f"echo loot > /dev/tcp/127.0.0.1/{PORT}"))
    tried("bash by UDP", lambda: program("bash", "-c", f"echo loot > /dev/udp/127.0.0.1/{PORT}"))
    tried("curl", lambda: program("curl", "-sm", "2", f"http://127.0.0.1:{PORT}"))
    tried(
        "perl",
        lambda: program(
            "perl", "-MIO::Socket::INET", "-e", f'IO::Socket::INET->new("127.0.0.1:{PORT}") or die'
        ),
    )


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
