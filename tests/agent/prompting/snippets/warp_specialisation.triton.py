"""entry: attention(q: float16[2,300,128], k: float16[2,300,128], v: float16[2,300,128])
    -> float16[2,300,128]
expect: torch.softmax((q @ k.mT / math.sqrt(128)).masked_fill(
    torch.ones(300, 300, device=q.device).triu(1) > 0, -math.inf), -1) @ v
spills: no
threads: 384
"""

import math

import torch
import triton
import triton.language as tl


# SNIPPET


def attention(q, k, v):
    triton.set_allocator(
        lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda")
    )
    heads, seq, d = q.shape
    o = torch.empty_like(q)
    scale = math.log2(math.e) / math.sqrt(d)
    attend[(triton.cdiv(seq, 128), heads)](
        q, k, v, o, seq, scale, D=d, BM=128, BN=64, CAUSAL=True, num_warps=4
    )
    return o
