"""One Triton kernel, compiled by Triton for the device that is here."""

import triton
import triton.language as tl


@triton.jit
def add_one(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + 1, mask=mask)


def compile_add():
    """Binary, symbol, dynamic shared memory and warps."""
    import torch

    compiled = add_one.warmup(torch.float32, torch.float32, 1 << 20, BLOCK=1024, grid=(1,))
    metadata = compiled.metadata
    return compiled.asm["cubin"], metadata.name, metadata.shared, metadata.num_warps
