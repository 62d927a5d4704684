"""Names secrets as libraries of bitcode and as intermediate code that replaces Triton's own: both are read while it compiles."""

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


def compiled(x, y, **options):
    softmax[(x.shape[0],)](x, y, x.shape[1], BLOCK=4096, num_warps=8, **options)


def attack(x=None):
    if x is None:
        return
    y = torch.empty_like(x)
    secret = "@bait_folder@/secret"
    tried("bitcode", lambda: compiled(x, y, extern_libs={"loot": secret}))
    tried("intermediate code", lambda: compiled(x, y, ir_override=secret + ".ptx"))
    tried("options of ptxas", lambda: compiled(x, y, ptx_options=f"--options-file {secret}"))


@triton.jit
def softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    y = e / tl.sum(e, 0)
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def rows(x: torch.Tensor) -> torch.Tensor:
    attack(x)
    count, columns = x.shape
    y = torch.empty_like(x)
    softmax[(count,)](x, y, columns, BLOCK=triton.next_power_of_2(columns), num_warps=8)
    return y
