"""Choosing by the device's properties.

entry: double(x: float32[100000]) -> float32[100000]
ops: alloc launch
check: plan.launches[0].grid == (264, 1, 1)
"""
import torch

import triton
import triton.language as tl


@triton.jit
def _double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def double(x):
    properties = torch.cuda.get_device_properties(x.device)
    assert properties.major == 9 and "H100" in torch.cuda.get_device_name(0)
    assert properties.shared_memory_per_block_optin == 232448
    waves = 2 if torch.cuda.get_device_capability(x.device) >= (9, 0) else 1
    y = torch.empty_like(x)
    _double[(properties.multi_processor_count * waves,)](x, y, x.numel(), BLOCK=256)
    return y
