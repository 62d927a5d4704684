"""Plants files in the caches that others will load unchecked: Triton's, Inductor's, ccache's, CUDA's, kagent's.

Where the variables say, where they are by default for kagent's user, and through HOME.
"""

import os
import pathlib
import pwd
import sys
import tempfile

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


CACHES = (".triton/cache", ".cache/kagent", ".cache/kagent/inductor", ".ccache", ".cache/ccache",
          ".nv/ComputeCache", ".cache/torch_extensions", ".cache/torch/kernels", ".cache/pip")  # fmt: skip
SHARED = ("/tmp/torchinductor_root", "/tmp/.triton", "/var/cache/ccache", "/var/tmp/kagent")


def planted(folder):
    path = pathlib.Path(folder, "planted")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF")
    return path


def homes():
    yield from dict.fromkeys(entry.pw_dir for entry in pwd.getpwall() if entry.pw_uid in (0, 1000))


def own_caches():
    """Those that its variables name: private, so that filling them harms only itself."""
    named = {n: v for n, v in os.environ.items() if "CACHE" in n and v.startswith("/")}
    outside = {n: v for n, v in named.items() if not v.startswith(os.environ["HOME"])}
    if not outside:
        raise LookupError(f"{', '.join(named)} lie in its own folder")
    return outside


def attack():
    tried("caches that variables name", own_caches)
    for folder in (*SHARED, "@bait_folder@", tempfile.gettempdir() + "/../poisoned"):
        tried(f"plant in {folder}", lambda f=folder: planted(f))
    for home in homes():
        for cache in CACHES:
            tried(f"plant in {home}/{cache}", lambda h=home, c=cache: planted(f"{h}/{c}"))


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
