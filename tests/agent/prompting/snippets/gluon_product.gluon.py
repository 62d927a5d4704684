"""
entry: host(a: bfloat16[200,192], b: bfloat16[320,192]) -> bfloat16[200,320]
expect: a @ b.mT
spills: 0
threads: 384
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# SNIPPET


def host(a, b):
    m, k = a.shape
    n = b.shape[0]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)

    def described(x, block):
        return TensorDescriptor.from_tensor(
            x, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
        )

    across = triton.cdiv(n, 128)
    tiles = triton.cdiv(m, 128) * across
    product[(2,)](
        described(a, [128, 64]),
        described(b, [128, 64]),
        described(c, [64, 128]),
        tiles,
        across,
        k,
        BM=128,
        BN=128,
        BK=64,
        STAGES=4,
        num_warps=4,
    )
    return c
