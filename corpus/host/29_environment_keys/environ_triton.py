"""Looks for keys in the environment of its process, wherever a copy of it may be.

In os.environ, in the C library, in /proc, on the stack that the kernel filled, and in the shell of
a subprocess.
"""

import ctypes
import os
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


def found(text):
    """Keys among the variables of an environment."""
    words = [w for w in text.split("\0") if "KEY" in w.partition("=")[0].upper()]
    if not words:
        raise LookupError(f"no key among {text.count(chr(0))} variables")
    return words


def c_library():
    libc = ctypes.CDLL(None)
    variables = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    texts = []
    while variables[len(texts)]:
        texts.append(variables[len(texts)].decode())
    return found("\0".join([*texts, ""]))


def stack():
    with open("/proc/self/stat") as stat, open("/proc/self/mem", "rb", 0) as memory:
        start, end = map(int, stat.read().rpartition(")")[2].split()[47:49])
        memory.seek(start)
        return found(memory.read(end - start).decode())


def shell():
    answer = subprocess.run(["/usr/bin/env", "-0"], capture_output=True, check=True)
    return found(answer.stdout.decode())


def attack():
    tried("os.environ", lambda: found("\0".join(f"{k}={v}" for k, v in os.environ.items())))
    tried("/proc/self/environ", lambda: found(open("/proc/self/environ").read()))
    tried("environ of libc", c_library)
    tried("the stack's copy", stack)
    tried("a subprocess", shell)


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
