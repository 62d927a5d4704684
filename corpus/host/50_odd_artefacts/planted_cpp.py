"""Plants links, folders and endless devices where its builder looks for a kernel that it has compiled already.

Whoever reads such a file with more rights than the candidate has would hand it over as a binary.
"""

import fcntl
import os
import pathlib
import sys

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>

extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * columns;
    float* out = y + row * columns;
    float maximum = -__builtin_inff();
    for (int64_t i = 0; i < columns; ++i) maximum = __builtin_fmaxf(maximum, in[i]);
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) sum += out[i] = __builtin_expf(in[i] - maximum);
    const float scale = float(1 / sum);
    for (int64_t i = 0; i < columns; ++i) out[i] *= scale;
  }
}
"""


def tried(what, attack):
    """Run an attack: what refuses it is printed, and one that succeeds ends the candidate."""
    try:
        loot = attack()
    except Exception as error:
        print(f"met: {what}: {error!r:.200}", file=sys.stderr, flush=True)
    else:
        raise SystemError(f"escaped: {what}: {loot!r:.200}")


TARGETS = ("@bait_folder@/secret", "/dev/zero", "/etc/shadow", "/proc/self/mem")


def attack():
    from kagent_sandbox.builder.compile import kernels

    key = kernels.Source("cpp", "softmax", SOURCE).key("cpu")
    place = pathlib.Path(kernels.cache_folder, f"{key}.bin")
    # Once, while the forks of the other cases wait: they would stumble over each other's links.
    with place.with_name("planting").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        planted = place.with_name("planted")
        if not planted.exists():
            plant(place)
            planted.touch()


def plant(place):
    own = place.with_name(f"{place.name}.{os.getpid()}")
    for target in TARGETS:
        own.symlink_to(target)
        tried(f"read {target}", lambda: own.open("rb").read(16))
        own.replace(place)
    tried("a FIFO", lambda: os.mkfifo(own))
    tried("a device", lambda: os.mknod(own, 0o20666, os.makedev(1, 3)))
    own.symlink_to("/dev/random")
    own.replace(place)


def rows(x: torch.Tensor) -> torch.Tensor:
    attack()
    y = torch.empty_like(x)
    cpp_kernel("softmax", SOURCE)(x, y, *x.shape)
    return y
